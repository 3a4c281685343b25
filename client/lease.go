package client

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// WaitMode says how both sides wait for messages.
type WaitMode int

// The waiting policies.
const (
	Adaptive WaitMode = iota // spin for about as long as a wake-up takes, then block
	Hot                      // spin: lowest latency, one core each on both sides
	Warm                     // block at once: no core is burnt
)

// DefaultDepth is the number of calls in flight per worker when LeaseOptions.Depth is 0.
const DefaultDepth = dataplane.DefaultDepth

// LeaseOptions say what to lease. Library or Code is mandatory.
type LeaseOptions struct {
	Library        string // path of the shared library with the functions, on this machine
	Code           []byte // or its bytes
	Workers        int    // 0: 1
	CoresPerWorker int    // 0: 1
	Memory         uint64 // bytes per worker; 0: the executor's default
	Depth          int    // calls in flight per worker; 0: DefaultDepth
	Eager          int    // bytes of payload that travel with the request; 0: 16 KiB
	// Bulk is how many bytes the large payloads in flight may take together, per worker and direction, so also the
	// largest payload and result; 0: 2 MiB, negative: none, Eager is the limit then.
	Bulk     int64
	WaitMode WaitMode
	// Duration is after which time the lease ends by itself; 0: not set, which is the executor's default, and Renew. Negative ones, and those
	// that the executor does not give, are ErrInvalid; one below a millisecond is a millisecond.
	Duration time.Duration
	Renew    bool // renew the lease in the background for as long as it is held
	// Failover: the lease goes on elsewhere. When its executor is lost or its node drains, a lease with as many workers is taken
	// in the background, wherever the session finds one (at Executor alone if that is given), again and again until there is one.
	// Calls wait for it, at most until their context ends or for the session's time-out, and fail with ErrLease, not started,
	// if there is none by then. State that functions kept in the old workers is gone. Calls in flight end with an error, but
	// for those that [Idempotent] lets be made again. Worker i is then whichever worker has that place.
	Failover bool
	// Local: functions run in this process when there is no executor for them. The library is opened here too (dlopen), so its
	// constructors run and what it is linked with must be there (StatusBadLibrary). If Session.Lease finds no room or nobody to
	// ask, it succeeds, Provider says "local", and the lease stays so until it is released. With Failover, calls run here from
	// the loss of the executor until another one is found. Such a call runs on the caller's thread, one at a time for a lease,
	// before Invoke or Submit returns; no deadline, time or memory limit ends it, a crash is the caller's, rfaas_state is
	// another one, and rfaas_fail only prints (rfaas_function.h).
	Local bool
	// CallLimit is how long one call may run: a worker that takes longer is killed and the call ends with
	// StatusTimeLimit. 0: the executor's own limit, if it has one.
	CallLimit time.Duration
	Executor  string // address: this executor and no other; empty: the session's choice
	// OnEvent is called with what happens to the lease, one event at a time, on a goroutine of the lease. It must not block
	// for long nor call Release.
	OnEvent func(Event)
}

// Lease is a number of workers on one executor. Safe for concurrent use.
type Lease struct {
	session *Session
	held    *grant.Held
	workers []*Worker
	byName  map[string]*Function
	config  dataplane.ChannelConfig
	kind    spareKind

	free    []atomic.Uint64 // bit per worker that nobody is using
	waiting atomic.Int32    // goroutines in claimAny
	wake    chan struct{}

	ctx    context.Context // ends with the lease
	cancel context.CancelFunc
	heal   sync.WaitGroup
	start  time.Time // with startNs: the data plane's clock without a call into C
	startN int64

	replaced atomic.Uint64
	released atomic.Bool
	onEvent  func(Event)
	repeated atomic.Uint64 // calls made again

	mover *mover         // of a lease that goes on elsewhere: it has no workers of its own, but those of the mover's home
	front *Lease         // of such a home
	plan  *grant.Pending // of a home: how it was found
	local *local         // of a home that is this process

	leaving atomic.Bool   // no call is started any more, since the node drains or the lease is over
	closing chan struct{} // closed then
	over    atomic.Bool   // ended is set

	healCtx  context.Context // ends before ctx: nothing is healed any more
	stopHeal context.CancelFunc

	mu     sync.Mutex
	closed bool   // nothing more in the background
	why    string // the node drains
	ended  Status // not OK: why the lease is no more
	reason string
}

// Lease takes a lease: it finds an executor, connects and loads the library there, which is sent only if the node
// does not have it. Blocks up to the session's time-out. Nothing stays leased after an error. Errors: ErrBusy (not
// enough free cores), ErrInvalid (also a library that cannot be loaded: StatusBadLibrary), ErrUnsupported,
// ErrConnection.
func (s *Session) Lease(ctx context.Context, o LeaseOptions) (*Lease, error) {
	return s.leaseAt(ctx, o, "")
}

// leaseAt is Lease that begins at an executor if one is given.
func (s *Session) leaseAt(ctx context.Context, o LeaseOptions, at string) (*Lease, error) {
	cfg, err := o.channel()
	if err != nil {
		return nil, err
	}
	if o.Failover || o.Local {
		return s.leaseMoving(ctx, o, cfg, at)
	}
	return s.leaseFor(ctx, nil, o, cfg, at)
}

// leaseFor takes a lease on one executor, for a front if that is not nil.
func (s *Session) leaseFor(ctx context.Context, front *Lease, o LeaseOptions, cfg dataplane.ChannelConfig, at string) (*Lease, error) {
	p, err := s.control.Prepare(ctx, grant.Spec{Library: o.Library, Code: o.Code, Workers: cmp.Or(o.Workers, 1),
		CoresPerWorker: o.CoresPerWorker, Memory: o.Memory, Mode: control.WaitMode(o.WaitMode), Duration: o.Duration,
		Renew: o.Renew || o.Duration == 0, CallLimit: o.CallLimit,
		Executor: o.Executor, At: at, Depth: cfg.Depth, Eager: cfg.Eager, Bulk: uint64(cfg.Bulk)})
	if err != nil {
		return nil, err
	}
	return s.leaseBy(ctx, front, p, o, cfg)
}

// leaseBy asks one candidate after the other.
func (s *Session) leaseBy(ctx context.Context, front *Lease, p *grant.Pending, o LeaseOptions, cfg dataplane.ChannelConfig) (*Lease, error) {
	for {
		c, err := p.Next()
		if err != nil {
			return nil, err
		}
		l, err := s.leaseFrom(ctx, front, p, c, o, cfg)
		if err == nil {
			return l, nil
		}
		if c.Kept != nil && ctx.Err() == nil {
			continue // what is kept was gone: a new one
		}
		// Somebody was quicker, or that executor is gone: the next one. Pending keeps the error for when there is none.
		if p.Granted() || (!errors.Is(err, ErrBusy) && !errors.Is(err, ErrConnection)) || ctx.Err() != nil {
			return nil, err
		}
	}
}

// channel checks the sizes and fills in the defaults.
func (o *LeaseOptions) channel() (dataplane.ChannelConfig, error) {
	const op = "lease"
	cfg := dataplane.ChannelConfig{Depth: cmp.Or(o.Depth, DefaultDepth), Eager: cmp.Or(o.Eager, dataplane.DefaultEager),
		Bulk: max(cmp.Or(o.Bulk, dataplane.DefaultBulk), 0)}
	switch {
	case cfg.Depth < 1 || cfg.Depth > dataplane.MaxDepth:
		return cfg, fail(op, dataplane.StatusInvalid, "depth %d, want 1 to %d", o.Depth, dataplane.MaxDepth)
	case cfg.Eager < 1 || cfg.Eager > dataplane.MaxEager:
		return cfg, fail(op, dataplane.StatusInvalid, "eager %d bytes, want 1 to %d", o.Eager, dataplane.MaxEager)
	case cfg.Bulk > dataplane.MaxBulk:
		return cfg, fail(op, dataplane.StatusInvalid, "bulk %d bytes, want at most %d", o.Bulk, dataplane.MaxBulk)
	case o.Workers < 0:
		return cfg, fail(op, dataplane.StatusInvalid, "%d workers, want 1 to %d", o.Workers, grant.MaxWorkers)
	}
	return cfg, nil
}

// leaseFrom makes channels on the candidate's provider and asks it for the lease.
func (s *Session) leaseFrom(ctx context.Context, front *Lease, p *grant.Pending, c grant.Candidate, o LeaseOptions, cfg dataplane.ChannelConfig) (*Lease, error) {
	dev, err := s.device(c.Provider)
	if err != nil {
		return nil, err
	}
	n := cmp.Or(o.Workers, 1)
	l := &Lease{session: s, config: cfg, kind: spareKind{dev, cfg, dataplane.WaitMode(o.WaitMode)}, free: make([]atomic.Uint64, (n+63)/64), wake: make(chan struct{}, n),
		byName: make(map[string]*Function), start: time.Now(), startN: dataplane.Now(), onEvent: o.OnEvent,
		closing: make(chan struct{}), front: front, plan: p}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.healCtx, l.stopHeal = context.WithCancel(l.ctx)
	var conns connections
	if c.Kept != nil {
		conns = c.Kept.State.(connections)
	} else if conns, err = s.connections(n, spareKind{dev, cfg, dataplane.WaitMode(o.WaitMode)}); err != nil {
		return nil, err
	}
	blobs := make([][]byte, n)
	for i := range blobs {
		w := newWorker(l, i, conns[i])
		l.workers = append(l.workers, w)
		if c.Kept != nil && err == nil {
			err = w.ch.Renew()
		}
		if err == nil {
			blobs[i], err = w.ch.Offer()
		}
	}
	if err != nil {
		l.closeWorkers()
		return nil, err
	}
	if l.held, err = p.Grant(ctx, blobs); err != nil {
		l.closeWorkers()
		return nil, err
	}
	for i, name := range l.held.Functions {
		l.byName[name] = &Function{lease: l, index: uint32(i), name: name}
	}
	for i, w := range l.workers {
		if err := w.connect(l.held.Workers[i]); err != nil {
			_ = l.held.Release(context.WithoutCancel(ctx))
			l.closeWorkers()
			return nil, err
		}
		l.free[i/64].Or(1 << (i % 64))
	}
	if l.front == nil && !s.enter(l) { // a home is its front's
		_ = l.held.Release(context.WithoutCancel(ctx))
		l.closeWorkers()
		return nil, fail("lease", dataplane.StatusInvalid, "the session is closed")
	}
	for _, w := range l.held.Workers {
		s.started(Start(w.Start))
	}
	l.held.Watch(l.handle)
	l.background(l.listen)
	return l, nil
}

func (l *Lease) closeWorkers() {
	l.cancel()
	for _, w := range l.workers {
		w.freeBuffers()
		w.close()
	}
}

// at is the lease whose workers are called.
func (l *Lease) at() *Lease {
	if l.mover != nil {
		return l.mover.home.Load()
	}
	return l
}

// Workers returns the number of workers.
func (l *Lease) Workers() int { return len(l.at().workers) }

// Worker returns worker i, 0 <= i < Workers(). It panics on another index, as a slice would.
func (l *Lease) Worker(i int) *Worker { return l.at().workers[i] }

// Functions returns the names of the library's functions in the order of their indices.
func (l *Lease) Functions() []string { return slices.Clone(l.at().held.Functions) }

// ID is the lease's number at its executor.
func (l *Lease) ID() uint64 { return l.at().held.ID }

// Executor is the control address of the executor.
func (l *Lease) Executor() string { return l.at().held.Address }

// Node is the host name of the executor's node.
func (l *Lease) Node() string { return l.at().held.Node }

// Provider is "shm", "verbs" or "local" (LeaseOptions.Local).
func (l *Lease) Provider() string { return l.at().held.Provider }

// Duration is how long the lease lasts from its grant; 0: without end.
func (l *Lease) Duration() time.Duration { return l.at().held.Duration }

// Until is when the lease ends for this holder unless it is renewed: a little before the executor ends it.
func (l *Lease) Until() time.Time { return l.at().held.Until() }

// Renew makes the lease last at least d from now on; 0: as long as it was leased for. It never makes it shorter. Errors:
// ErrLease (it has ended), ErrBusy (the node drains and renews nothing), ErrInvalid (longer than the executor permits),
// ErrConnection.
func (l *Lease) Renew(ctx context.Context, d time.Duration) error {
	const op = "renew"
	if l.released.Load() {
		return fail(op, StatusLeaseEnded, "the lease was released")
	}
	l = l.at()
	if err := l.endedError(op); err != nil {
		return err
	}
	if l.local != nil {
		return nil
	}
	return l.held.Renew(ctx, d)
}

// Replaced is how many workers died and were replaced.
func (l *Lease) Replaced() uint64 { return l.Statistics().Replaced }

// LeaseStatistics counts what went wrong with a lease.
type LeaseStatistics struct {
	Replaced uint64 // workers that died and were replaced
	Repeated uint64 // calls that were made again
	Moved    uint64 // times that the lease went on at another executor
	Local    uint64 // calls that ran in this process
}

// Statistics returns the counters since the lease began.
func (l *Lease) Statistics() LeaseStatistics {
	s := LeaseStatistics{Replaced: l.replaced.Load(), Repeated: l.repeated.Load()}
	if m := l.mover; m != nil {
		s.Replaced, s.Moved = s.Replaced+m.home.Load().replaced.Load(), m.moved.Load()
		if m.local != nil {
			s.Local = m.local.local.calls.Load()
		}
	}
	return s
}

// Err is nil while the lease lasts, then an error of class ErrLease or ErrConnection that says how it ended. One with
// LeaseOptions.Failover lasts until it is released.
func (l *Lease) Err() error {
	if l.released.Load() {
		return fail("lease", StatusLeaseEnded, "it was released")
	}
	return l.endedError("lease")
}

func (l *Lease) endedError(op string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended == dataplane.OK {
		return nil
	}
	return fail(op, l.ended, "the lease on %s ended: %s", l.held.Address, l.reason)
}

// Start is how the lease's workers came to it, the slowest of them.
func (l *Lease) Start() Start {
	l = l.at()
	if l.local != nil {
		return StartUnknown
	}
	how := StartCached
	for _, w := range l.held.Workers {
		how = min(how, Start(w.Start))
	}
	return how
}

// Release ends the lease. Calls in flight end with ErrLease. When there are none, its workers may be kept, connected and
// stopped, for the next lease of this session that is like this one. A second Release does nothing.
func (l *Lease) Release(ctx context.Context) error {
	if l.released.Swap(true) {
		return nil
	}
	if l.mover != nil {
		return l.mover.release(ctx)
	}
	idle := !l.session.isClosed()
	var inUse []*Worker
	for _, w := range l.workers {
		if !w.try() {
			inUse = append(inUse, w)
		}
	}
	idle = idle && len(inUse) == 0
	l.note(StatusLeaseEnded, "released by its holder")
	if !idle {
		l.fail(StatusLeaseEnded)
	}
	l.cancel()
	l.held.StopWatch()
	l.stopHealing()
	for _, w := range inUse {
		w.take() // what is inside comes out, since the channels failed
	}
	defer l.session.leave(l)
	if !idle || !l.reusable() {
		err := l.held.Release(ctx)
		l.closeWorkers()
		return err
	}
	var conns connections
	for _, w := range l.workers {
		w.freeBuffers()
		conns = append(conns, w.connection)
	}
	kept, err := l.held.ReleaseKeep(ctx, conns)
	if !kept {
		l.session.spares.put(l.kind, conns)
	}
	return err
}

// reusable says whether every channel can go on with another lease. Nobody else uses them.
func (l *Lease) reusable() bool {
	for _, w := range l.workers {
		if !w.ch.Idle() {
			return false
		}
	}
	return !l.leaving.Load()
}

// end notes why the lease is no more and ends all calls. The first reason stays.
func (l *Lease) end(st Status, reason string) {
	l.note(st, reason)
	l.fail(st)
}

// note notes why the lease is no more. The first reason stays.
func (l *Lease) note(st Status, reason string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended == dataplane.OK {
		l.ended, l.reason = st, reason
		l.over.Store(true)
	}
}

// fail ends all calls.
func (l *Lease) fail(st Status) {
	for _, w := range l.workers {
		w.fail(st)
	}
}

// now is the data plane's clock.
func (l *Lease) now() int64 { return l.startN + int64(time.Since(l.start)) }
