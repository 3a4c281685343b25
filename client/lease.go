package client

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// DefaultDepth is the number of calls in flight per worker when LeaseOptions.Depth is 0.
const DefaultDepth = dataplane.DefaultDepth

// LeaseOptions say what to lease. Library or Code is mandatory.
type LeaseOptions struct {
	Library        string // path of the shared library with the functions, on this machine
	Code           []byte // or its bytes
	Workers        int    // 0: 1
	CoresPerWorker int    // 0: 1
	// WorkersMin is the fewest workers with which the lease is opened, at most Workers. It gets as many as the executor has room for, up to
	// Workers. The others are added as cores become free on that executor, and EventWorkerAdded reports each of them. 0: Workers.
	WorkersMin int
	Memory     uint64 // bytes per worker; 0: the executor's default
	Depth      int    // calls in flight per worker; 0: DefaultDepth
	Eager      int    // bytes of payload that travel with the request; 0: 16 KiB
	// Bulk bounds the bytes of all large payloads in flight, for each worker and direction. Both sides reserve them when the lease is taken.
	// 0: 2 MiB. Negative: none, so that Eager is the limit. Payloads and results of up to Bulk bytes travel in one piece, larger ones in parts.
	Bulk int64
	// BulkMax is the limit in bytes of one payload and of one result. Payloads and results larger than Bulk travel in parts of up to 1 MiB.
	// Each call takes memory for its parts when it needs it. The worker's share counts as the worker's own (Memory). 0: 1 GiB if Bulk is 0, otherwise Bulk.
	BulkMax  int64
	WaitMode WaitMode
	// Duration is the time after which the lease ends by itself. 0: the executor's default, and Renew. ErrInvalid: it is negative, or
	// longer than the executor permits. Durations below a millisecond count as a millisecond.
	Duration time.Duration
	Renew    bool // renew the lease in the background for as long as it is held
	// Failover moves the lease to another executor when its executor is lost or its node drains. Calls then search for a lease
	// with as many workers, wherever the session finds one, or only at Executor if that is given. They wait for it until their
	// context ends, or without a deadline for the session's time-out, and then fail with ErrLease, not started. Later calls continue the
	// search. State that functions kept in the old workers is lost. Calls in flight end with an error. Idempotent calls are
	// repeated instead (see [Idempotent]). Worker i then means the new worker i.
	Failover bool
	// Local runs functions in this process while no executor has room. The library is loaded here too (dlopen): its constructors
	// run, and everything that it is linked with must exist (StatusBadLibrary). If no executor can be reached or has room,
	// Session.Lease succeeds, Provider is "local", and LocalReason says why. With Options.Local this includes a session without an address,
	// an agent or a credential. When an executor has room for the lease, the next call moves the lease there (EventMoved). It waits until
	// the workers are ready, at most for half of the time that its context has left, or for the session's time-out. State that functions kept
	// in this process is not transferred: the new workers execute the init call. If that executor is lost, the lease ends, unless it has
	// Failover. Then calls run here again (EventLocal), and the lease moves on to the next executor. A local call runs on the caller's
	// thread, before Invoke or Submit returns. No deadline, time limit or memory limit ends it, and a crash of the function is a crash of
	// the program.
	// rfaas_state of local calls is separate from that of workers (rfaas_function.h).
	Local bool
	// InitFunction is the name of the init call, a function of the library. Every worker of the lease executes it with InitPayload before
	// any other call of the lease, so functions can rely on state that it makes. This includes workers that replace dead ones, workers of
	// another executor after a failover, and cached workers of an earlier lease. With Local this process executes it too, before the first
	// local call. Its result is ignored. Session.Lease returns when all workers have executed it, which may take the session's time-out
	// longer, or CallLimit if that is longer. If it fails, the error is that of a call, and its text names the init call and the worker.
	// If the init call of a replacement fails, the call that waited for the replacement gets this error with Started false, and the next
	// call tries again with a new worker. Empty: no init call.
	InitFunction string
	InitPayload  []byte // at most the largest of BulkMax, Bulk and Eager bytes
	// Reuse permits cached workers that have executed functions of an earlier lease with Reuse, and lets the workers of this lease serve a
	// later one. Such workers keep their static variables, their rfaas_state, their threads and all other state.
	// Without Reuse, only workers that have executed no function are cached.
	Reuse bool
	// Seed makes the init call once instead of once for each worker: all workers start from the memory of the process that has
	// made it, which other executors copy. Where that is impossible, the workers make it, and StartSteps.Unseeded says why. See RFAAS_LEASE_SEED for what the init call may
	// do. Not with Reuse.
	Seed bool
	// SeedName is the full name of a seed (Seed.Name). The workers start from it, and its setup function takes the place of InitFunction. Library and
	// Bundle must be those with which the seed was made. Memory must not be less; 0: the seed's. The executor that has made the seed is asked first.
	SeedName string
	// SeedRequired is Seed, but a worker that cannot start from a seed is an error (ErrUnsupported), whose text says why. Not with Local.
	SeedRequired bool
	// CallLimit is how long one call may run: a worker that takes longer is killed and the call ends with
	// StatusTimeLimit. 0: the executor's own limit, if it has one. It does not concern the init call of a new worker, which the session's
	// time-out and the executor's setting init-limit bound.
	CallLimit time.Duration
	// Wait is how long Session.Lease, LeaseAcross and Places wait if no executor has room. They try again when an executor reports room or
	// a new executor registers. Waiting leases are not queued. 0: they return ErrBusy at once.
	Wait     time.Duration
	Executor string // address: this executor and no other; empty: the session's choice
	// Bundle names files and directories of this machine that travel with the library. Functions get the path of each by calling
	// rfaas_bundle_path (rfaas_function.h) with its last component.
	Bundle []string
	// Runtime names a runtime of the executor, an interpreter with imported modules that the workers start with. Not with Seed or Local.
	Runtime string
	// OnEvent is called with each event of the lease, one at a time, on a goroutine of the lease, which polls for events every
	// 10 ms. It must not block for long and must not call Release.
	OnEvent func(Event)
}

// c converts the options to C's types. It fails if a value does not fit.
func (o *LeaseOptions) c() (*c.LeaseOptions, error) {
	const op = "lease"
	for _, x := range []struct {
		name  string
		value int
	}{{"workers", o.Workers}, {"WorkersMin", o.WorkersMin}, {"cores per worker", o.CoresPerWorker}, {"depth", o.Depth}, {"eager", o.Eager}, {"wait mode", int(o.WaitMode)}} {
		if x.value < 0 || x.value > math.MaxInt32 {
			return nil, fail(op, dataplane.StatusInvalid, "%s %d is negative or too large", x.name, x.value)
		}
	}
	for _, p := range o.Bundle {
		if strings.Contains(p, ":") {
			return nil, fail(op, dataplane.StatusInvalid, "bundle: %q contains a colon, which separates paths: rename it, or name its directory", p)
		}
	}
	if o.BulkMax < 0 {
		return nil, fail(op, dataplane.StatusInvalid, "BulkMax %d is negative", o.BulkMax)
	}
	if o.Duration < 0 || o.CallLimit < 0 || o.Wait < 0 {
		return nil, fail(op, dataplane.StatusInvalid, "duration %v, call limit %v, wait %v: negative", o.Duration, o.CallLimit, o.Wait)
	}
	return &c.LeaseOptions{Workers: uint32(o.Workers), WorkersMin: uint32(o.WorkersMin), CoresPerWorker: uint32(o.CoresPerWorker), Depth: uint32(o.Depth),
		Eager: uint32(o.Eager), WaitMode: uint32(o.WaitMode), Bulk: o.Bulk, BulkMax: o.BulkMax, Memory: o.Memory, Duration: o.Duration,
		CallLimit: o.CallLimit, Wait: o.Wait, Library: o.Library, Executor: o.Executor, Code: o.Code, Renew: o.Renew || o.Duration == 0,
		Bundle: strings.Join(o.Bundle, ":"), Failover: o.Failover, Local: o.Local, Reuse: o.Reuse, InitFunction: o.InitFunction,
		InitPayload: o.InitPayload, Runtime: o.Runtime, Seed: o.Seed, SeedRequired: o.SeedRequired, SeedName: o.SeedName}, nil
}

// Lease is a number of workers on one executor. Safe for concurrent use.
type Lease struct {
	session *Session
	c       *c.Lease
	turns   turns
	chosen  atomic.Int64 // calls on a worker that the program chose; they take no turn of the lease
	workers []Worker
	large   bool   // more than lanes workers
	begun   c.Info // the lease as it began

	released atomic.Bool
	over     chan struct{} // closed by Release
	gone     chan struct{} // closed when Release has ended
	events   sync.WaitGroup

	mu    sync.Mutex
	slots []*slot // all that were made
	free  []*slot
}

// Lease takes a lease: it finds an executor, connects to its workers and loads the library there. The library is sent only
// if the node does not have it. Blocks up to the session's time-out. Nothing stays leased after an error. Errors: ErrBusy (not
// enough free cores), ErrInvalid (also a library that cannot be loaded: StatusBadLibrary), ErrUnsupported,
// ErrConnection.
func (s *Session) Lease(ctx context.Context, o LeaseOptions) (*Lease, error) {
	return s.LeaseAt(ctx, o, "")
}

// Place is an executor that Places has found, for LeaseAt in any process of the tenant.
type Place string

// Places finds room for count leases with the options o, on as few executors as possible. It reserves nothing: the executors may
// refuse later. For programs in which one process searches for all, such as MPI programs. Errors: ErrBusy (there is room for fewer), ErrInvalid,
// ErrConnection.
func (s *Session) Places(ctx context.Context, o LeaseOptions, count int) ([]Place, error) {
	options, err := o.c()
	if err != nil {
		return nil, err
	}
	if count < 1 {
		return nil, fail("places", dataplane.StatusInvalid, "count %d, want at least 1", count)
	}
	return during(ctx, s, "places", func() ([]Place, error) {
		found, err := waiting(ctx, options, func() ([]string, error) {
			return s.c.Places(options, count)
		})
		places := make([]Place, len(found))
		for i, p := range found {
			places[i] = Place(p)
		}
		return places, err
	}, nil)
}

// LeaseAt is Lease at the executor that Places has found, and at no other one. With "" it is Lease.
func (s *Session) LeaseAt(ctx context.Context, o LeaseOptions, at Place) (*Lease, error) {
	options, err := o.c()
	if err != nil {
		return nil, err
	}
	return during(ctx, s, "lease", func() (*Lease, error) {
		l, err := waiting(ctx, options, func() (*c.Lease, error) { return s.c.LeaseOpen(options, string(at)) })
		if err != nil {
			return nil, err
		}
		return s.newLease(l, &o)
	}, func(l *Lease) { _ = l.Release(context.Background()) })
}

// waitSlice is how long an operation that waits for room stays in C before it looks whether its context has ended.
const waitSlice = 500 * time.Millisecond

// waiting calls open until it has room, o.Wait has passed, or ctx has ended.
func waiting[T any](ctx context.Context, o *c.LeaseOptions, open func() (T, error)) (T, error) {
	if ctx.Done() == nil {
		return open()
	}
	until, local := time.Now().Add(o.Wait), o.Local
	for {
		left := time.Until(until)
		o.Wait = min(max(left, 0), waitSlice)
		o.Local = local && left <= 0 // it begins in this process only after the wait
		v, err := open()
		if err == nil || left <= 0 || ctx.Err() != nil || !errors.Is(err, ErrBusy) && !errors.Is(err, ErrConnection) {
			return v, err
		}
	}
}

// newLease returns the lease of a handle. After an error the handle is released.
func (s *Session) newLease(handle *c.Lease, o *LeaseOptions) (*Lease, error) {
	info, err := handle.Info()
	if err != nil {
		_ = handle.Release() // the first error is the one to tell
		return nil, err
	}
	l := &Lease{session: s, c: handle, begun: info, over: make(chan struct{}), gone: make(chan struct{}),
		workers: make([]Worker, info.Wanted), large: info.Wanted > lanes}
	l.turns.init(info.Workers, info.Wanted)
	for i := range l.workers {
		w := &l.workers[i]
		w.lease, w.index = l, i
		w.turns.init(1, 1)
	}
	s.mu.Lock()
	s.leases[l] = struct{}{}
	s.mu.Unlock()
	if info.Workers < info.Wanted {
		l.events.Go(func() { l.grow(info.Workers) })
	}
	if o.OnEvent != nil {
		l.events.Go(func() { l.watch(o.OnEvent) })
	}
	return l, nil
}

// info describes the lease; after its release, as it was at its beginning.
func (l *Lease) info() c.Info {
	if !l.released.Load() {
		if info, err := l.c.Info(); err == nil {
			return info
		}
	}
	info := l.begun
	info.Left = 0
	return info
}

// grow gives calls a turn for each worker that is added to the lease. Like watch it polls, which also makes the C library add workers.
func (l *Lease) grow(n int) {
	tick := time.NewTicker(eventsEvery)
	defer tick.Stop()
	for n < len(l.workers) {
		select {
		case <-l.over:
			return
		case <-tick.C:
		}
		for now := l.c.Workers(); n < now; n++ {
			l.turns.give()
		}
	}
}

// Workers returns the number of workers that the lease has now. With LeaseOptions.WorkersMin it grows up to LeaseOptions.Workers.
func (l *Lease) Workers() int {
	if !l.released.Load() {
		if n := l.c.Workers(); n > 0 {
			return n
		}
	}
	return l.begun.Workers
}

// Worker returns worker i, 0 <= i < LeaseOptions.Workers. It panics on another index, as a slice would. Calls on a worker that has not been
// added yet (LeaseOptions.WorkersMin) fail with ErrInvalid.
func (l *Lease) Worker(i int) *Worker { return &l.workers[i] }

// Functions returns the names of the library's functions in the order of their indices. A local lease knows only the functions that
// were looked up.
func (l *Lease) Functions() []string {
	var names []string
	for i := range l.info().Functions {
		names = append(names, l.c.FunctionName(uint32(i)))
	}
	return names
}

// Function finds a function by name. The error ErrInvalid (StatusNoFunction) names the functions that exist.
func (l *Lease) Function(name string) (*Function, error) {
	if l.released.Load() {
		return nil, fail("find function", StatusLeaseEnded, "the lease was released")
	}
	i, err := l.c.Function(name)
	if err != nil {
		return nil, l.explain(err)
	}
	return &Function{lease: l, index: i, name: name}, nil
}

// Chain returns a function that calls first, and then second with the result of first. Both run in the same worker. Only the result of
// second travels back. A chain can be used like any other Function. The result of first may have as many bytes as the larger of the
// lease's eager size and bulk area. If it is larger, or first fails, second is not called. The error is then ErrFunction, and its text names
// the function that failed. rfaas_lease_chain(3) has the details.
func (l *Lease) Chain(first, second *Function) (*Function, error) {
	if first == nil || second == nil || first.lease != l || second.lease != l {
		return nil, fail("chain", dataplane.StatusInvalid, "a function is nil or belongs to another lease")
	}
	if l.released.Load() {
		return nil, fail("chain", StatusLeaseEnded, "the lease was released")
	}
	i, err := l.c.Chain(first.index, second.index)
	if err != nil {
		return nil, l.explain(err)
	}
	return &Function{lease: l, index: i, name: first.name + ", then " + second.name}, nil
}

// ID is the lease's number at its executor.
func (l *Lease) ID() uint64 { return l.info().ID }

// Executor is the control address of the executor.
func (l *Lease) Executor() string { return l.info().Executor }

// Node is the host name of the executor's node.
func (l *Lease) Node() string { return l.info().Node }

// Provider is "shm", "verbs", "tcp", "ofi" or "local" (LeaseOptions.Local).
func (l *Lease) Provider() string { return l.info().Provider }

// LocalReason says why calls run in this process (LeaseOptions.Local). It is empty if they do not.
func (l *Lease) LocalReason() string { return l.info().LocalReason }

// Until returns when the client stops using the lease unless it is renewed: a little before the executor ends it. The zero Time: the
// lease has ended, or ends only with its release.
func (l *Lease) Until() time.Time {
	if left := l.info().Left; left > 0 {
		return time.Now().Add(left)
	}
	return time.Time{}
}

// Renew makes the lease last at least d from now on; 0: its first duration. It never makes it shorter. Errors:
// ErrLease (it has ended, or its executor is lost), ErrBusy (the node drains and renews nothing), ErrInvalid (longer than the executor
// permits), ErrConnection.
func (l *Lease) Renew(ctx context.Context, d time.Duration) error {
	if l.released.Load() {
		return fail("renew", StatusLeaseEnded, "the lease was released")
	}
	_, err := during(ctx, l.session, "renew", func() (struct{}, error) {
		return struct{}{}, l.explain(l.c.Renew(d))
	}, nil)
	return err
}

// LeaseStatistics counts what happened to a lease.
type LeaseStatistics struct {
	Replaced uint64 // workers that died and were replaced
	Repeated uint64 // calls that were repeated
	Moved    uint64 // times that the lease moved to another executor
	Local    uint64 // calls that ran in this process
	// Workers by how they started, including replacements and moves.
	Cold, Seeded, Pooled, Cached uint64
}

// Statistics returns the counters since the lease began; zeros for a lease that was released.
func (l *Lease) Statistics() LeaseStatistics {
	if l.released.Load() {
		return LeaseStatistics{}
	}
	s, _ := l.c.Statistics() // an error: it was released just now
	return LeaseStatistics{Replaced: s.Replaced, Repeated: s.Repeated, Moved: s.Moved, Local: s.Local, Cold: s.Cold, Pooled: s.Pooled,
		Cached: s.Cached, Seeded: s.Seeded}
}

// Replaced is how many workers died and were replaced.
func (l *Lease) Replaced() uint64 { return l.Statistics().Replaced }

// Err returns nil while the lease lasts, then an error of class ErrLease whose text says how it ended. A lease with
// LeaseOptions.Failover lasts until it is released.
func (l *Lease) Err() error {
	if l.released.Load() {
		return fail("lease", StatusLeaseEnded, "it was released")
	}
	return l.explain(l.c.Status())
}

// Start returns how the workers of the lease started; if they differ, the slowest way.
func (l *Lease) Start() Start {
	how := StartSeeded // the largest
	for i := range l.Workers() {
		how = min(how, l.workers[i].StartSteps().Start)
	}
	return how
}

// Release ends the lease. Calls in flight end with ErrLease. When there are none, its workers may be cached, connected and
// frozen, for the next lease of this session with the same terms. When the context ends first, the release goes on. A second
// Release does nothing.
func (l *Lease) Release(ctx context.Context) error {
	if l.released.Swap(true) {
		return nil
	}
	close(l.over)
	done := make(chan error, 1)
	release := func() {
		l.events.Wait()
		err := l.c.Release()
		l.drop()
		l.session.mu.Lock()
		delete(l.session.leases, l)
		l.session.mu.Unlock()
		close(l.gone)
		done <- err
	}
	if ctx.Done() == nil {
		release()
		return <-done
	}
	go release()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return contextError(ctx, "release", "it goes on in the background", false)
	}
}

// turns bounds how many goroutines are inside C, where each occupies a thread of the operating system. Goroutines that wait for a turn do
// not.
type turns struct {
	free atomic.Int64 // free turns; below 0: the number of waiting goroutines
	wake chan struct{}
}

// init makes n turns, which give may increase up to `most`.
func (t *turns) init(n, most int) {
	t.free.Store(int64(n))
	t.wake = make(chan struct{}, most)
}

// take takes a turn; false: the context or the lease ended first.
func (t *turns) take(ctx context.Context, over <-chan struct{}) bool {
	return t.free.Add(-1) >= 0 || t.wait(ctx, over)
}

func (t *turns) wait(ctx context.Context, over <-chan struct{}) bool {
	select {
	case <-t.wake:
		return true
	case <-over:
	case <-ctx.Done():
	}
	for n := t.free.Load(); n < 0; n = t.free.Load() {
		if t.free.CompareAndSwap(n, n+1) { // one waiting goroutine less
			return false
		}
	}
	<-t.wake // this goroutine has been given a turn
	t.give()
	return false
}

func (t *turns) give() {
	if t.free.Add(1) <= 0 {
		t.wake <- struct{}{}
	}
}

// idle reports whether a worker was free a moment ago.
func (l *Lease) idle() bool { return l.turns.free.Load() > l.chosen.Load() }

// noTurn returns the error of a call that got no turn.
func (l *Lease) noTurn(ctx context.Context, op string) error {
	if l.released.Load() {
		return fail(op, StatusLeaseEnded, "the lease was released")
	}
	return contextError(ctx, op, "no worker became free", false)
}
