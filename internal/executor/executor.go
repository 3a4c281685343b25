package executor

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// Config configures an Executor. All fields except Now are mandatory.
type Config struct {
	Settings  config.Executor
	Cores     []lease.Core         // to lend
	Near      []int                // NUMA nodes whose cores are lent first
	Memory    uint64               // to lend, bytes
	Providers []string             // available on this node
	Fabric    []dataplane.Address  // of its RDMA devices
	Data      *datalisten.Listener // nil: provider tcp is not offered
	Node      string               // host name
	NodeCores int                  // physical cores of the node, lent or not; 0: not known
	NodeID    string               // control.NodeID
	Spawner   Spawner
	Bundles   *bundles // nil: none are taken
	Log       *slog.Logger
}

// Executor grants leases and manages their workers. It implements control.ExecutorServer.
type Executor struct {
	control.UnimplementedExecutorServer
	cfg         Config
	log         *slog.Logger
	table       *lease.Table
	codes       *codeStore
	tables      *tableStore
	published   *publications
	fabric      fetchDevices
	lender      lender
	fillings    fillings
	incarnation [16]byte
	maxWorkers  int
	work        sync.WaitGroup // goroutines that start and end leases
	accounts    *accounts      // nil: nothing is charged
	limits      *limiter       // nil: no tenant has a limit
	claims      claims
	report      func() // notifies the manager of changed capacity; does not block. Called by changed
	room        room   // notifies clients that wait for room
	metrics     *metrics
	gate        *control.Gate // counts refusals; may be nil

	turns turnstile         // shut during a handover
	asked chan drainRequest // capacity 1: an operator's request to drain
	back  *wantedBack

	mu          sync.Mutex
	holdings    map[lease.ID]*holding
	cached      map[lease.ID]*cached // cached workers
	coming      coming               // resources of cached workers that are being reaped
	draining    bool
	memoryShort atomic.Bool     // other programs need memory: none is lent
	slowdown    atomic.Uint32   // as InfoReply.neighbour_slowdown
	cordoned    string          // reason for which no new leases are granted; "": they are
	until       time.Time       // end of the grace, while draining
	grace       context.Context // of the drain: it also ends when the drain is cut short
}

// New returns an executor without leases. It needs Run and a gRPC server.
func New(cfg Config) (*Executor, error) {
	s := &cfg.Settings
	e := &Executor{cfg: cfg, log: cfg.Log, lender: lender{hashing: make(chan struct{}, 1)}}
	table, err := lease.New(lease.Config{Cores: cfg.Cores, Near: cfg.Near, Share: s.ShareCores, Memory: cfg.Memory,
		FirstUse: s.ClientFirstUse, Return: s.ClientReturn, Connected: s.AgentGrace, Margin: s.LeaseMargin, Notice: s.LeaseNotice,
		Keep: s.CacheTime, NewID: randomID, Revoke: e.claims.revoke})
	if err != nil {
		return nil, err
	}
	e.claims.e = e
	e.room.info, e.room.firstFor = e.info, firstFor
	e.table, e.maxWorkers, e.holdings, e.cached = table, s.MaxWorkers, map[lease.ID]*holding{}, map[lease.ID]*cached{}
	e.asked, e.report, e.metrics, e.back = make(chan drainRequest, 1), func() {}, newMetrics(), newWantedBack(s.Until.Time(), s.Grace)
	e.back.told = func() { e.claims.revokeSoon(everyTenant) }
	e.codes = newCodeStore(uint64(s.CodeLimit), uint64(s.CodeCache), cfg.Spawner.Inspect)
	e.tables = newTableStore(tableLimit(s, cfg.Memory), cfg.Bundles, e.setAside, table.GiveBack, e.dropCachedWithTables)
	e.published = newPublications(e.tables, func() *accounts { return e.accounts }, e.now, e.log)
	e.tables.withdraw = e.published.withdraw
	if lends := table.Capacity().Cores; e.maxWorkers == 0 || e.maxWorkers > lends {
		e.maxWorkers = lends
	}
	rand.Read(e.incarnation[:])
	return e, nil
}

// randomID returns a first id that no earlier incarnation has used and that cannot be guessed.
func randomID() lease.ID {
	var b [8]byte
	rand.Read(b[:])
	return lease.ID(binary.LittleEndian.Uint64(b[:]))
}

// Register adds the executor's service to a server.
func (e *Executor) Register(s *grpc.Server) { control.RegisterExecutorServer(s, e) }

func (e *Executor) now() time.Time { return time.Now() }

// info returns what clients and the manager are told about this executor.
func (e *Executor) info() *control.InfoReply {
	c := e.table.Capacity()
	_, unused := e.tables.bytes()
	e.mu.Lock()
	leases := len(e.holdings)
	c.FreeCores = min(c.FreeCores+e.coming.cores, c.Cores)
	c.FreeMemory = min(c.FreeMemory+e.coming.memory+unused, c.Memory)
	e.mu.Unlock()
	if _, reason := e.cfg.Spawner.CannotStart(); reason != nil || e.memoryShort.Load() {
		c.FreeCores, c.FreeMemory = 0, 0 // so that no client is sent here
	}
	cordoned := e.whyCordoned() != ""
	data := ""
	if e.cfg.Data != nil {
		data = e.cfg.Data.Address
	}
	return &control.InfoReply{
		Leases:          uint32(leases),
		DataAddress:     data,
		Fabric:          fabricAddresses(e.cfg.Fabric),
		ProtocolVersion: control.ProtocolVersion,
		Node:            e.cfg.Node, NodeId: e.cfg.NodeID, Incarnation: e.incarnation[:],
		Cores: uint32(c.Cores), FreeCores: uint32(c.FreeCores),
		MemoryBytes: c.Memory, FreeMemoryBytes: c.FreeMemory,
		Providers: e.cfg.Providers, MaxDepth: invoke.MaxDepth, MaxEager: invoke.MaxEager,
		MaxBulk: uint64(e.cfg.Settings.MaxBulk), Draining: e.isDraining() || cordoned, Cordoned: cordoned,
		AvailableUntil: e.back.unix(), NodeCores: uint32(e.cfg.NodeCores), NeighbourSlowdown: e.slowdown.Load(),
	}
}

// reported returns what the manager is told about this executor.
func (e *Executor) reported() *control.InfoReply {
	i := e.info()
	s := e.metrics.stats()
	i.Stats = s.Values()
	return i
}

func fabricAddresses(all []dataplane.Address) (out []*control.FabricAddress) {
	for _, a := range all {
		out = append(out, &control.FabricAddress{Infiniband: a.InfiniBand, Gid: a.GID[:], Lid: uint32(a.LID)})
	}
	return out
}

// holding returns the holding of a lease, nil if there is none.
func (e *Executor) holding(id lease.ID) *holding {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.holdings[id]
}

// find returns the holding of a lease, or an error that says why there is none.
func (e *Executor) find(id lease.ID) (*holding, error) {
	if h := e.holding(id); h != nil {
		return h, nil
	}
	return nil, e.ended(id)
}

// ended returns the error for a lease that no longer exists.
func (e *Executor) ended(id lease.ID) error {
	l, err := e.table.Get(id)
	if err == nil {
		err = &lease.EndedError{ID: id, State: l.State, Reason: l.Reason}
	}
	return grpcError(err)
}

// grpcError classes an error of the lease table. It removes the class's words from the text, since readers see the
// class before the text.
func grpcError(err error) error {
	without := func(class error) string { return strings.TrimSuffix(err.Error(), ": "+class.Error()) }
	var we *zygote.WorkerError
	if errors.As(err, &we) {
		return control.StatusError(we.Status, err.Error())
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, lease.ErrBusy):
		return control.Errorf(control.ClassBusy, "%s", without(lease.ErrBusy))
	case errors.Is(err, lease.ErrDraining):
		return control.CodeErrorf(control.ClassBusy, codes.Unavailable, "the executor is draining and grants no more leases")
	case errors.Is(err, lease.ErrInvalid):
		return control.Errorf(control.ClassInvalid, "%s", without(lease.ErrInvalid))
	case errors.Is(err, lease.ErrUnknown), errors.Is(err, lease.ErrNotCached):
		return control.Errorf(control.ClassLease, "%v", err)
	case errors.Is(err, lease.ErrEnded), errors.Is(err, lease.ErrState):
		return control.CodeErrorf(control.ClassLease, codes.FailedPrecondition, "%v", err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return control.Errorf(control.ClassConnection, "%v", err)
	}
	if control.IsClassed(err) {
		return err
	}
	return control.Errorf(control.ClassFatal, "%v", err)
}
