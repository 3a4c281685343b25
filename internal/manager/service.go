package manager

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
)

// Manager is the control.ManagerServer.
type Manager struct {
	control.UnimplementedManagerServer
	table *table
	log   *slog.Logger
}

// New makes a manager that wants a heartbeat every interval. now is the clock, nil for time.Now.
func New(interval time.Duration, log *slog.Logger, now func() time.Time) *Manager {
	if now == nil {
		now = time.Now
	}
	// Ids start anywhere, so that one from before a restart names nobody else.
	return &Manager{table: newTable(interval, rand.Uint64()>>16<<8|1, now), log: log}
}

// AddTo adds the manager's service to a server.
func (m *Manager) AddTo(s *grpc.Server) { control.RegisterManagerServer(s, m) }

// Run marks silent executors until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	tick := time.NewTicker(m.table.interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for _, address := range m.table.sweep() {
				m.log.Warn("executor is silent", "address", address, "missed", missed)
			}
		}
	}
}

func checkInfo(info *control.InfoReply) error {
	if n := len(info.GetIncarnation()); n != 16 {
		return control.Errorf(control.ClassInvalid, "info.incarnation has %d bytes, want 16", n)
	}
	if n := len(info.GetNode()); n > 255 {
		return control.Errorf(control.ClassInvalid, "info.node has %d bytes, want at most 255", n)
	}
	if info.GetFreeCores() > info.GetCores() {
		return control.Errorf(control.ClassInvalid, "info.free_cores %d is more than info.cores %d", info.GetFreeCores(), info.GetCores())
	}
	return nil
}

// Register adds an executor.
func (m *Manager) Register(_ context.Context, req *control.RegisterRequest) (*control.RegisterReply, error) {
	if v := req.GetProtocolVersion(); v != control.ProtocolVersion {
		return nil, control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition,
			"protocol_version %d: this resource manager speaks %d", v, control.ProtocolVersion)
	}
	if _, err := control.ParseAddress(req.GetAddress()); err != nil {
		return nil, control.Errorf(control.ClassInvalid, "%v", err)
	}
	if err := checkInfo(req.GetInfo()); err != nil {
		return nil, err
	}
	id, replaced := m.table.register(req.GetAddress(), req.GetInfo())
	if id == 0 {
		return nil, control.Errorf(control.ClassBusy, "the table is full with %d executors", maxExecutors)
	}
	m.log.Info("executor registered", "address", req.GetAddress(), "node", req.GetInfo().GetNode(), "id", id,
		"cores", req.GetInfo().GetCores(), "replaced", replaced)
	return &control.RegisterReply{ExecutorId: id, HeartbeatMs: uint64(m.table.interval.Milliseconds())}, nil
}

// Heartbeat notes that an executor lives and what it has free.
func (m *Manager) Heartbeat(_ context.Context, req *control.HeartbeatRequest) (*control.HeartbeatReply, error) {
	if err := checkInfo(req.GetInfo()); err != nil {
		return nil, err
	}
	known, back := m.table.heartbeat(req.GetExecutorId(), req.GetInfo())
	if back {
		m.log.Info("executor is back", "node", req.GetInfo().GetNode(), "id", req.GetExecutorId())
	}
	return &control.HeartbeatReply{Unknown: !known}, nil
}

// Deregister forgets an executor. One that is not known is as good as forgotten.
func (m *Manager) Deregister(_ context.Context, req *control.DeregisterRequest) (*control.DeregisterReply, error) {
	if address := m.table.deregister(req.GetExecutorId()); address != "" {
		m.log.Info("executor left", "address", address, "id", req.GetExecutorId())
	}
	return &control.DeregisterReply{}, nil
}

// List returns every executor, dead ones marked.
func (m *Manager) List(context.Context, *control.ListRequest) (*control.ListReply, error) {
	return &control.ListReply{Executors: m.table.list()}, nil
}

// Serve runs a resource manager until ctx ends. nil: it ended as it should.
func Serve(ctx context.Context, s config.Manager, log *slog.Logger) error {
	port, err := control.OpenPort(control.PortConfig{Listen: s.Listen, AllowPlaintext: s.AllowPlaintext,
		SecretFile: s.SecretFile, AddressFile: s.AddressFile})
	if err != nil {
		return err
	}
	m := New(s.Heartbeat, log, nil)
	m.AddTo(port.Server)
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
		defer cancel()
		port.Close(ctx)
	}()
	if err := port.Serve(); err != nil {
		return err
	}
	log.Info("ready", "address", port.Address)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.Run(ctx)
	}()
	select {
	case <-ctx.Done():
	case err = <-port.Failed():
	}
	cancel()
	<-done
	return err
}
