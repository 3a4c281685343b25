package manager

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/history"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// Config configures a Manager.
type Config struct {
	Heartbeat                 time.Duration     // interval in which executors report
	Slots                     int               // most executors
	Providers                 []string          // through which its memory can be reached, if they are available
	Asked                     bool              // Providers come from a setting: a missing one is an error
	Verbs                     dataplane.Options // of the device
	DataListen, DataAdvertise string            // of provider tcp; see datalisten.Open
	Encrypt                   int               // dataplane.Encrypt value of provider tcp
	StateDir                  string            // of the ledger; empty: in memory
	Tariff                    accounting.Tariff
	Limits                    accounting.Limits                             // of tenants' cores
	Replica                   accounting.Replica                            // of the ledger; nil: the ledger is in StateDir
	Load                      func(add func(accounting.Change) error) error // reads the replica's records
	Confirmed                 func() error                                  // returns an error if another process may write to the replica; nil: none can
	Keep                      time.Duration                                 // how long the ledger keeps records of single ended leases; 0: for ever
	Gate                      *control.Gate                                 // of the port, with the quotas of tenants; nil: no quotas
	Quota                     NodeQuota
	Attempts                  int // most connections to its memory that are made at a time; 0: DefaultAttempts
	Attached                  int // most connections of one tenant to the board; 0: DefaultTenantAttached
	Log                       *slog.Logger
	Audit                     *identity.Audit  // records executors that register and deregister; may be nil
	Now                       func() time.Time // nil: time.Now
}

// NodeQuota limits what one node certificate uses of a manager. 0: no limit.
type NodeQuota struct {
	Executors int    // most registered at a time
	Memory    uint64 // bytes of the manager's memory
}

// Manager is the control.ManagerServer.
type Manager struct {
	control.UnimplementedManagerServer
	cfg      Config
	log      *slog.Logger
	table    *table
	memory   *memory
	notifier *notifier
	accounts *accounts
	limits   *limits
	history  *history.History
	watched  time.Time // last call of history.Watch
	attach   *attaching
	nodeID   string
	epoch    uint64
	gate     *control.Gate  // counts refusals; may be nil
	node     *identity.Node // checks the certificates of registered nodes; nil: no checks
	refusals refusals

	harvesting atomic.Bool
	aside      sync.WaitGroup // of harvestAside
}

// New returns a manager that is not served yet. The caller closes it.
func New(cfg Config) (*Manager, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	m := &Manager{cfg: cfg, log: cfg.Log, attach: newAttaching(cfg.Attempts, cfg.Attached)}
	var err error
	if m.nodeID, err = control.NodeID(); err != nil {
		return nil, err
	}
	if m.accounts, err = openLedger(&cfg); err != nil {
		return nil, err
	}
	m.accounts.keep = cfg.Keep
	if err := m.openHistory(); err != nil {
		m.accounts.close()
		return nil, err
	}
	m.epoch = rand.Uint64() | 1
	if m.memory, err = openMemory(&cfg, m.epoch); err != nil {
		m.closeLedger()
		return nil, err
	}
	m.notifier = newNotifier(m.epoch)
	// Ids start at a random number, so that an id from before a restart does not name another executor.
	m.table = newTable(cfg.Heartbeat, rand.Uint64()>>16<<8|1, cfg.Now, m.memory.table)
	m.table.quotas = newQuotas(cmp.Or(cfg.Quota.Executors, 1<<30), cmp.Or(cfg.Quota.Memory, 1<<62), cfg.Now)
	m.table.changed = func(c board.Change) {
		m.notifier.change(c)
		m.memory.table.Changed(m.notifier.changes())
	}
	var records []byte
	if cfg.Limits.Any() {
		if records, err = m.memory.openLimits(); err != nil {
			m.memory.close()
			m.closeLedger()
			return nil, err
		}
	}
	m.table.counted = func(node string, s *board.Stats) { m.history.Count(cfg.Now(), node, s) }
	m.limits = newLimits(cfg.Limits, records, m.memory.own, cfg.Log, cfg.Now)
	m.table.left = m.limits.left
	m.table.dropped = func(a *attachment) {
		m.limits.fenced(a)
		m.accounts.drop(a)
	}
	return m, nil
}

// Close ends all connections, merges the last charges into the ledger and frees everything. No call may be running.
func (m *Manager) Close() {
	m.memory.tcp.stop()
	m.notifier.close()
	live := m.table.attachments(false)
	for _, a := range live {
		a.fence()
	}
	ctx, cancel := context.WithTimeout(context.Background(), askBound)
	defer cancel()
	m.claim(ctx)
	if err := m.accounts.harvest(ctx, live, true); err != nil {
		m.log.Warn("the last charges are not in the ledger; executors keep them", "error", err)
	}
	for _, a := range append(live, m.accounts.fenced...) {
		a.free()
	}
	m.memory.close()
	m.closeLedger()
}

// AddTo adds the manager's service to a server.
func (m *Manager) AddTo(s *grpc.Server) { control.RegisterManagerServer(s, m) }

// Run marks silent executors, notifies subscribers and keeps the accounts until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.tell(ctx)
	}()
	tick := time.NewTicker(m.cfg.Heartbeat)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			for _, address := range m.table.sweep() {
				m.log.Warn("executor is silent", "address", address, "missed", missed)
			}
			m.notifier.sweep()
			m.expel()
			if m.cfg.Replica == nil {
				m.harvest()
			} else {
				m.harvestAside(ctx)
			}
			m.watch()
		}
	}
	<-done
	m.aside.Wait()
}

// harvestAside harvests on another goroutine, unless the last such harvest is still running. A replica that does not answer must
// not make executors look silent.
func (m *Manager) harvestAside(ctx context.Context) {
	if !m.harvesting.CompareAndSwap(false, true) {
		return
	}
	m.aside.Go(func() {
		defer m.harvesting.Store(false)
		ctx, cancel := context.WithTimeout(ctx, harvestBound)
		defer cancel()
		_ = m.harvestWithin(ctx, false) // accounts notes the error
	})
}

// retryMailbox is how soon a skipped subscriber is tried again.
const retryMailbox = time.Millisecond

// tell writes mailboxes until ctx ends.
func (m *Manager) tell(ctx context.Context) {
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.notifier.wake:
		case <-retry.C:
		}
		if m.notifier.post() {
			retry.Reset(retryMailbox)
		}
	}
}

// harvest harvests everything.
func (m *Manager) harvest() {
	ctx, cancel := context.WithTimeout(context.Background(), harvestBound)
	defer cancel()
	_ = m.harvestWithin(ctx, true) // accounts notes the error
}

// harvestWithin harvests until ctx ends. See accounts.harvest.
func (m *Manager) harvestWithin(ctx context.Context, all bool) error {
	if m.cfg.Limits.Any() {
		m.limits.hear(m.table.heardOf())
	}
	m.limits.mend(m.table.attachments(true))
	m.claim(ctx)
	// While another resource manager may serve, every harvest writes, which shows whether the ledger still accepts charges.
	return m.accounts.harvest(ctx, m.table.attachments(false), all || m.unconfirmed() != nil)
}

// expel drops executors whose certificate has expired or was revoked. Executors that report by memory make no calls
// that could be refused. They may register again with another certificate.
func (m *Manager) expel() {
	if m.node == nil {
		return
	}
	for address, why := range m.table.expel(func(id *identity.Identity) error { return m.node.Ended(id, time.Now()) }) {
		m.log.Warn("dropped an executor whose certificate is no longer valid; it must register with a new one", "address", address, "error", why)
	}
}

// claim stores the owners of newly registered incarnations in the ledger.
func (m *Manager) claim(ctx context.Context) {
	var err error
	if claims := m.table.unclaimed(); len(claims) > 0 {
		if _, err = m.accounts.ledger.Claim(ctx, m.cfg.Now(), claims...); err != nil {
			m.table.claimAgain(claims)
		}
	}
	m.accounts.note(ofClaims, err) // also nil without claims: failed claims are dropped with their executors
}

// maxFabric is the largest number of RDMA addresses, and of providers, of an executor. maxProvider is the longest name
// of a provider, and maxDataAddress the longest data address with a port.
const (
	maxFabric      = 8
	maxProvider    = 32
	maxDataAddress = 64
)

func checkInfo(info *control.InfoReply) error {
	if n := len(info.GetIncarnation()); n != 16 {
		return control.Errorf(control.ClassInvalid, "info.incarnation has %d bytes, want 16", n)
	}
	if n := len(info.GetNode()); n > 255 {
		return control.Errorf(control.ClassInvalid, "info.node has %d bytes, want at most 255", n)
	}
	if a := info.GetDataAddress(); a != "" {
		if at, err := netip.ParseAddrPort(a); err != nil || len(a) > maxDataAddress || at.Addr().Zone() != "" { // a zone can be any text
			return control.Errorf(control.ClassInvalid, "info.data_address is %.64q, want an IP address and a port", a)
		}
	}
	if n := len(info.GetNodeId()); n > 255 {
		return control.Errorf(control.ClassInvalid, "info.node_id has %d bytes, want at most 255", n)
	}
	for i, p := range info.GetProviders() {
		if len(p) > maxProvider || i >= maxFabric {
			return control.Errorf(control.ClassInvalid, "info.providers[%d] is %.40q, want at most %d names of at most %d bytes", i, p, maxFabric, maxProvider)
		}
	}
	for i, f := range info.GetFabric() {
		if len(f.GetGid()) != 16 || f.GetLid() > 1<<16-1 || i >= maxFabric {
			return control.Errorf(control.ClassInvalid, "info.fabric[%d] has a GID of %d bytes and the LID %d, want 16 bytes, at most %d and at most %d addresses",
				i, len(f.GetGid()), f.GetLid(), 1<<16-1, maxFabric)
		}
	}
	if info.GetFreeCores() > info.GetCores() {
		return control.Errorf(control.ClassInvalid, "info.free_cores %d is more than info.cores %d", info.GetFreeCores(), info.GetCores())
	}
	if info.GetFreeMemoryBytes() > info.GetMemoryBytes() {
		return control.Errorf(control.ClassInvalid, "info.free_memory_bytes %d is more than info.memory_bytes %d",
			info.GetFreeMemoryBytes(), info.GetMemoryBytes())
	}
	return nil
}

func checkVersion(v uint32) error {
	if v != control.ProtocolVersion {
		return control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition,
			"protocol_version %d: this resource manager speaks %d", v, control.ProtocolVersion)
	}
	return nil
}

func (m *Manager) hello() *control.ManagerHelloReply {
	return &control.ManagerHelloReply{ProtocolVersion: control.ProtocolVersion, NodeId: m.nodeID, Providers: m.memory.providers(),
		HeartbeatMs: uint64(m.cfg.Heartbeat.Milliseconds()), Limits: m.cfg.Limits.Any(), Epoch: m.epoch}
}

// Hello returns how the manager's memory can be reached.
func (m *Manager) Hello(_ context.Context, req *control.ManagerHelloRequest) (*control.ManagerHelloReply, error) {
	if err := checkVersion(req.GetProtocolVersion()); err != nil {
		return nil, err
	}
	return m.hello(), nil
}

// Register adds an executor. A node may register addresses that its certificate is for, under incarnations that no
// other owner has used.
func (m *Manager) Register(ctx context.Context, req *control.RegisterRequest) (*control.RegisterReply, error) {
	if err := checkVersion(req.GetProtocolVersion()); err != nil {
		return nil, err
	}
	if _, err := control.ParseAddress(req.GetAddress()); err != nil {
		return nil, control.Errorf(control.ClassInvalid, "%v", err)
	}
	if err := checkInfo(req.GetInfo()); err != nil {
		return nil, err
	}
	o := ownerOf(ctx)
	if err := o.mayRegister(req.GetAddress()); err != nil {
		return nil, m.refuse(ctx, refusedAddress, control.Manager_Register_FullMethodName, "%[2]s cannot register the address %[1]s: %[3]v (set the "+
			"executor's advertise, or make its identity with rfaas cluster node for the names and addresses that others dial)", req.GetAddress(), o.name, err)
	}
	if err := m.accounts.mayUse(&o, incarnationOf(req.GetInfo())); err != nil {
		return nil, m.answer(ctx, control.Manager_Register_FullMethodName, err)
	}
	id, replaced, err := m.table.register(o, req.GetAddress(), req.GetInfo())
	if err != nil {
		return nil, m.answer(ctx, control.Manager_Register_FullMethodName, err)
	}
	m.log.Debug("executor registered", "address", req.GetAddress(), "id", id, "owner", o.name, "cores", req.GetInfo().GetCores(), "replaced", replaced)
	m.audit(ctx, identity.AuditJoin, req.GetInfo().GetNode(), req.GetAddress())
	return &control.RegisterReply{ExecutorId: id, HeartbeatMs: uint64(m.cfg.Heartbeat.Milliseconds()), Manager: m.hello()}, nil
}

// audit records that an executor registers or deregisters, and the caller.
func (m *Manager) audit(ctx context.Context, event, node, address string) {
	m.cfg.Audit.Write(identity.AuditEntry{Event: event, Node: node, Who: control.Caller(ctx).Name, Remote: control.Remote(ctx), Detail: "address " + address})
}

// AttachExecutor connects a registered executor to its line and cells.
func (m *Manager) AttachExecutor(ctx context.Context, req *control.AttachExecutorRequest) (*control.AttachExecutorReply, error) {
	ctx, connected, err := m.attach.executor(ctx)
	if err != nil {
		return nil, err
	}
	defer connected()
	var slot uint32
	a, err := m.table.attach(ownerOf(ctx), req.GetExecutorId(), req.GetIncarnation(), func(e entry) (*attachment, error) {
		slot = e.slot
		bytes := attachmentBytes(req.GetProvider(), e.info.GetCores())
		if err := m.table.quotas.attach(&e.owner, bytes); err != nil {
			return nil, err
		}
		return m.memory.attachExecutor(ctx, req.GetProvider(), &e, req.GetBlob(), func() { m.table.quotas.give(&e.owner, 0, bytes) })
	})
	if err != nil {
		return nil, m.answer(ctx, control.Manager_AttachExecutor_FullMethodName, err)
	}
	m.log.Debug("executor attached", "id", req.GetExecutorId(), "slot", slot, "provider", req.GetProvider())
	reply := &control.AttachExecutorReply{Blob: a.blob, Slot: slot, Line: refOf(a.line)}
	reply.Cells, reply.Stats = a.cellRefs()
	if a.limits != nil {
		reply.Limits, reply.Held = refOf(a.limits), refOf(a.held)
	}
	return reply, nil
}

// AttachClient connects a client to the board. The error is of class busy if too many connections are being made, or if
// the tenant has too many.
func (m *Manager) AttachClient(ctx context.Context, req *control.AttachClientRequest) (*control.AttachClientReply, error) {
	if err := m.cfg.Gate.Take(ctx, quota.Attaches, 1); err != nil {
		return nil, err
	}
	dev, err := m.memory.device(req.GetProvider())
	if err != nil {
		return nil, err
	}
	s := &subscriber{polls: dev.Provider() == dataplane.TCP}
	if box := req.GetMailbox(); box != nil {
		if box.GetSize() < board.MailboxSize {
			return nil, control.Errorf(control.ClassInvalid, "mailbox.size %d, want %d", box.GetSize(), board.MailboxSize)
		}
		s.mailbox = dataplane.Ref{Addr: box.GetAddr(), Key: box.GetKey(), Size: box.GetSize()}
	}
	ctx, connected, gone, err := m.attach.client(ctx)
	if err != nil {
		return nil, err
	}
	defer connected()
	var blob []byte
	if s.conn, blob, err = m.memory.connectTo(ctx, dev.clients, req.GetBlob(), dev.view); err != nil {
		gone()
		return nil, controlError(err)
	}
	s.gone = gone
	if s.polls {
		if err := m.memory.tcp.expect(s.conn, blob, req.GetBlob(), "client "+control.Caller(ctx).Name, func() { m.notifier.add(s) }, s.close); err != nil {
			s.close()
			return nil, controlError(err)
		}
	} else {
		m.notifier.add(s)
	}
	return &control.AttachClientReply{Blob: blob, Board: refOf(dev.view)}, nil
}

// controlError classes an error of the data plane.
func controlError(err error) error {
	var de *dataplane.Error
	switch {
	case control.IsClassed(err):
		return err
	case errors.As(err, &de):
		return control.StatusError(int32(de.Status), err.Error())
	}
	return control.Errorf(control.ClassFatal, "%v", err)
}

// Heartbeat records that an executor is alive, and its free resources. Executors that write their line send no
// heartbeats.
func (m *Manager) Heartbeat(ctx context.Context, req *control.HeartbeatRequest) (*control.HeartbeatReply, error) {
	if err := checkInfo(req.GetInfo()); err != nil {
		return nil, err
	}
	known, back, err := m.table.heartbeat(ownerOf(ctx), req.GetExecutorId(), req.GetInfo())
	if err != nil {
		return nil, m.answer(ctx, control.Manager_Heartbeat_FullMethodName, err)
	}
	if back {
		m.log.Info("executor is back", "node", req.GetInfo().GetNode(), "id", req.GetExecutorId())
	}
	return &control.HeartbeatReply{Unknown: !known}, nil
}

// Deregister removes an executor. An unknown executor is no error.
func (m *Manager) Deregister(ctx context.Context, req *control.DeregisterRequest) (*control.DeregisterReply, error) {
	node, address, err := m.table.deregister(ownerOf(ctx), req.GetExecutorId())
	if err != nil {
		return nil, m.answer(ctx, control.Manager_Deregister_FullMethodName, err)
	}
	if address != "" {
		m.audit(ctx, identity.AuditLeave, node, address)
	}
	return &control.DeregisterReply{}, nil
}

// List returns all executors. Dead ones are marked.
func (m *Manager) List(context.Context, *control.ListRequest) (*control.ListReply, error) {
	return &control.ListReply{Executors: m.table.list(), NowMs: uint64(time.Now().UnixMilli())}, nil
}
