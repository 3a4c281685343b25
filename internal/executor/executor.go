package executor

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// releaseGrace is how long a released lease's workers may take to finish what their holder no longer wants.
const releaseGrace = time.Second

// Config is what an Executor is made of. All but Now are mandatory.
type Config struct {
	Settings  config.Executor
	CPUs      []int    // to lend
	Memory    uint64   // to lend, bytes
	Providers []string // usable on this node
	Node      string   // host name
	NodeID    string   // control.NodeID
	Spawner   Spawner
	Log       *slog.Logger
	Now       func() time.Time // nil: time.Now
}

// Executor grants leases and holds their workers. It is the control.ExecutorServer.
type Executor struct {
	control.UnimplementedExecutorServer
	cfg         Config
	log         *slog.Logger
	table       *lease.Table
	codes       *codeStore
	incarnation [16]byte
	maxWorkers  int
	work        sync.WaitGroup // goroutines that start and end leases

	mu       sync.Mutex
	holdings map[lease.ID]*holding
	draining bool
}

// New makes an executor without leases. Run and a gRPC server bring it to life.
func New(cfg Config) (*Executor, error) {
	s := &cfg.Settings
	table, err := lease.New(lease.Config{CPUs: cfg.CPUs, Memory: cfg.Memory, FirstUse: s.HolderFirstUse,
		Return: s.HolderReturn, Now: cfg.Now, NewID: randomID})
	if err != nil {
		return nil, err
	}
	e := &Executor{cfg: cfg, log: cfg.Log, table: table, maxWorkers: s.MaxWorkers, holdings: map[lease.ID]*holding{},
		codes: newCodeStore(uint64(s.CodeLimit), uint64(s.CodeCache), nodeGlibc(s.Worker))}
	if e.maxWorkers == 0 || e.maxWorkers > len(cfg.CPUs) {
		e.maxWorkers = len(cfg.CPUs)
	}
	rand.Read(e.incarnation[:])
	return e, nil
}

// randomID makes ids that no earlier incarnation has used and nobody guesses.
func randomID() lease.ID {
	var b [8]byte
	rand.Read(b[:])
	return lease.ID(binary.LittleEndian.Uint64(b[:]))
}

// Register adds the executor's service to a server.
func (e *Executor) Register(s *grpc.Server) { control.RegisterExecutorServer(s, e) }

// Run ends the leases whose time has come, until ctx ends.
func (e *Executor) Run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		due, next := e.table.Due()
		for _, d := range due {
			if h, err := e.beginEnd(d.ID, d.State, d.Reason); err == nil {
				e.work.Go(func() { e.finishEnd(context.Background(), h, false) })
			}
		}
		timer.Stop()
		if !next.IsZero() {
			timer.Reset(next.Sub(e.now()))
		}
		select {
		case <-ctx.Done():
			return
		case <-e.table.Changed():
		case <-timer.C:
		}
	}
}

func (e *Executor) now() time.Time {
	if e.cfg.Now != nil {
		return e.cfg.Now()
	}
	return time.Now()
}

// info is what clients and the manager are told about this executor.
func (e *Executor) info() *control.InfoReply {
	c := e.table.Capacity()
	return &control.InfoReply{
		ProtocolVersion: control.ProtocolVersion,
		Node:            e.cfg.Node, NodeId: e.cfg.NodeID, Incarnation: e.incarnation[:],
		Cores: uint32(c.Cores), FreeCores: uint32(c.FreeCores),
		MemoryBytes: c.Memory, FreeMemoryBytes: c.FreeMemory,
		Providers: e.cfg.Providers, MaxDepth: invoke.MaxDepth, MaxEager: invoke.MaxEager,
		MaxBulk: uint64(e.cfg.Settings.MaxBulk), Draining: e.isDraining(),
	}
}

// find returns the holding of a lease, or why there is none.
func (e *Executor) find(id lease.ID) (*holding, error) {
	e.mu.Lock()
	h := e.holdings[id]
	e.mu.Unlock()
	if h != nil {
		return h, nil
	}
	return nil, e.ended(id)
}

// ended is the error of a lease that is no more.
func (e *Executor) ended(id lease.ID) error {
	l, err := e.table.Get(id)
	if err == nil {
		err = &lease.EndedError{ID: id, State: l.State, Reason: l.Reason}
	}
	return grpcError(err)
}

// beginEnd ends a lease in the books; nobody else will end it again. finishEnd must follow.
func (e *Executor) beginEnd(id lease.ID, how lease.State, reason string) (*holding, error) {
	l, err := e.table.End(id, how, reason)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	h := e.holdings[id] // there since before the grant, until finishEnd
	e.mu.Unlock()
	level := slog.LevelInfo
	if how == lease.Released {
		level = slog.LevelDebug
	}
	e.log.Log(context.Background(), level, "lease ended", "lease", uint64(id), "how", how.String(), "reason", reason,
		"tenant", l.Terms.Tenant)
	h.end(how, reason)
	return h, nil
}

// finishEnd stops the workers, politely until ctx ends or at once, and only when the last one is reaped gives the cores
// back.
func (e *Executor) finishEnd(ctx context.Context, h *holding, polite bool) {
	h.stopWorkers(ctx, polite)
	if err := e.table.Reaped(h.id); err != nil {
		e.log.Error("cores of an ended lease not returned", "lease", uint64(h.id), "error", err)
	}
	e.forget(h)
}

// forget drops what is left of a holding whose workers are gone.
func (e *Executor) forget(h *holding) {
	e.codes.release(h.code)
	e.mu.Lock()
	delete(e.holdings, h.id)
	e.mu.Unlock()
	h.over()
}

// BeginDrain gives out no more leases from now on.
func (e *Executor) BeginDrain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.draining = true
	e.table.Drain()
}

func (e *Executor) isDraining() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.draining
}

// Drain gives out no more leases, tells the holders, lets running calls finish until ctx ends, and returns when
// every worker is reaped. The executor is of no use afterwards.
func (e *Executor) Drain(ctx context.Context) {
	e.BeginDrain()
	e.mu.Lock()
	var all []*holding
	for _, h := range e.holdings {
		all = append(all, h)
	}
	e.mu.Unlock()
	var wg sync.WaitGroup
	for _, h := range all {
		h.drain()
		wg.Go(func() {
			<-h.started
			if _, err := e.beginEnd(h.id, lease.Revoked, "the node is draining"); err == nil {
				e.finishEnd(ctx, h, true)
			}
			<-h.gone
		})
	}
	wg.Wait()
	e.work.Wait()
	e.codes.close()
}

// grpcError classes what the lease table says.
func grpcError(err error) error {
	var we *zygote.WorkerError
	if errors.As(err, &we) {
		return control.StatusError(we.Status, err.Error())
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, lease.ErrBusy):
		return control.Errorf(control.ClassBusy, "%v", err)
	case errors.Is(err, lease.ErrDraining):
		return control.CodeErrorf(control.ClassBusy, codes.Unavailable, "the executor is draining and gives out no more leases")
	case errors.Is(err, lease.ErrInvalid):
		return control.Errorf(control.ClassInvalid, "%v", err)
	case errors.Is(err, lease.ErrUnknown):
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
