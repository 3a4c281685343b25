package executor

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// suspendPatience is how long the workers of a released lease may take to come to rest. Slower ones are ended.
const suspendPatience = 500 * time.Millisecond

// cached holds the cached workers of a released lease, or spare workers. They wait for the next lease of the same client, which is an
// agent, with queue pairs, memory and code unchanged. They are frozen, except while awake is set. The goroutine that removes it from
// Executor.cached ends or resumes the workers.
type cached struct {
	id         lease.ID
	spec       zygote.Spec
	code       *code    // with a reference
	tables     []*table // likewise
	workers    []Worker
	keepsState bool          // the workers may have executed functions
	taken      chan struct{} // closed when a lease takes the workers, or they are ended
	unwatch    func() bool   // stops watching the connection
	start      *start        // of spare workers; nil: the workers have served a lease
	late       bool          // spare workers that connect only when a lease takes them

	mu     sync.Mutex // held during the freezing of the workers, and while they are resumed by message
	awake  bool       // the workers are not frozen yet (cool). The released lease is still charged
	failed error      // why the workers could not be frozen: they must not serve another lease
	used   []used     // what the workers had used when they were frozen
}

// keep caches the workers of a released lease, in place of finishEnd. It returns nil if it cannot; some of the workers may be suspended
// then, and finishEnd ends them like the others. ctx is that of the release. claims: the client can claim workers. It may claim these if
// the reply has a Claim. claimant: see claims.arm.
func (e *Executor) keep(ctx context.Context, h *holding, claims bool, claimant uint64) (reply *control.ReleaseReply) {
	s := &e.cfg.Settings
	conn := control.Connection(ctx)
	l, err := e.table.Get(h.id)
	if err != nil || l.Terms.Kind == [32]byte{} || s.CacheTime == 0 || s.CacheMost == 0 || e.memoryShort.Load() {
		return nil
	}
	e.accounts.last(h.id)
	workers, all := h.living()
	if !all || !l.Terms.KeepsState && dirty(workers) {
		return nil
	}
	k := &cached{id: h.id, spec: h.spec, code: h.code, tables: h.tables, workers: workers, taken: make(chan struct{}), keepsState: l.Terms.KeepsState}
	claims = claims && e.claims.possible(k, &l.Terms)
	reply = &control.ReleaseReply{Cached: true, CacheMs: milliseconds(s.CacheTime)}
	awake := claims && s.CacheAwake > 0 && k.spec.Provider == dataplane.SHM // elsewhere the client offers channels of the next generation
	if k.awake = awake; awake {
		for _, w := range k.workers {
			w.ExpectLease()
		}
		reply.Claim = e.claims.arm(ctx, k, &l.Terms, claimant, claim.Awake)
	}
	if reply.Claim == nil {
		if err := e.freeze(conn, k); err != nil {
			e.log.Debug("workers not cached", "lease", uint64(h.id), "error", err)
			return nil
		}
	}
	e.watchConnection(k, conn)
	e.watchCached(k)
	if claims && !awake {
		reply.Claim = e.claims.arm(ctx, k, &l.Terms, claimant, claim.Frozen)
	}
	e.mu.Lock()
	err = e.table.Keep(h.id)
	if err == nil {
		e.cached[h.id] = k
	}
	e.mu.Unlock()
	if err != nil { // the node drains
		e.claims.revoke(k.id)
		e.release(k)
		return nil
	}
	close(h.cached)
	e.remove(h)
	if gone := each(workers, func(_ int, w Worker) error { return ended(w) }); gone != nil || conn.Err() != nil {
		e.dropCached(k.id) // the connection may have ended before the watch began
	}
	for _, oldest := range e.table.Cached() {
		if len(e.table.Cached()) <= s.CacheMost {
			break
		}
		e.dropCached(oldest)
	}
	if awake && reply.Claim != nil {
		e.coolLater(k)
	}
	e.changed()
	return reply
}

// watchConnection ends cached workers when the connection of their client ends.
func (e *Executor) watchConnection(k *cached, conn context.Context) {
	k.unwatch = context.AfterFunc(conn, func() {
		defer e.turns.enter()()
		e.dropCached(k.id)
	})
}

// watchCached ends all cached workers of a lease when one of them ends.
func (e *Executor) watchCached(k *cached) {
	for _, w := range k.workers {
		e.work.Go(func() {
			select {
			case <-w.Done():
				defer e.turns.enter()()
				e.dropCached(k.id)
			case <-k.taken:
			}
		})
	}
}

// freeze suspends workers and stops charging their lease. After an error the caller ends them, unless a lease has taken them meanwhile. That lease finds
// the error in failed, and ends them.
func (e *Executor) freeze(ctx context.Context, k *cached) (err error) {
	ctx, cancel := context.WithTimeout(ctx, suspendPatience)
	defer cancel()
	defer func() { k.failed = err }()
	if err := each(k.workers, func(_ int, w Worker) error { return w.Suspend(ctx) }); err != nil {
		return err
	}
	if !k.keepsState && dirty(k.workers) { // calls have arrived since the release
		return errors.New("they have executed functions")
	}
	k.used = usedBy(k.workers)
	e.accounts.end(k.id)
	k.awake = false
	return nil
}

// bookAwakeEvery is the longest time between two looks for a claim of awake workers.
const bookAwakeEvery = 10 * time.Millisecond

// coolLater calls cool after cache-awake. Until then it books a claim within bookAwakeEvery.
func (e *Executor) coolLater(k *cached) {
	until := e.now().Add(e.cfg.Settings.CacheAwake)
	var look func()
	later := func() { time.AfterFunc(min(bookAwakeEvery, until.Sub(e.now())), look) }
	look = func() {
		defer e.turns.enter()()
		if s := e.claims.slot(k.id); s != nil {
			s.Collect()
		}
		if e.now().Before(until) && e.cachedAwake(k) {
			later()
		} else {
			e.cool(k)
		}
	}
	later()
}

// cool freezes cached workers that are still awake, unless another lease has them by now or they have ended.
func (e *Executor) cool(k *cached) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := e.claims.slot(k.id)
	if s != nil && !s.Cool() {
		if e.claims.slot(k.id) == s { // claimed and soon booked, or being closed at this moment
			if e.cachedAwake(k) {
				e.coolLater(k)
			}
			return
		}
		s = nil // the line was closed meanwhile
	}
	if !e.cachedAwake(k) {
		return
	}
	if err := e.freeze(context.Background(), k); err != nil {
		e.log.Debug("workers not cached any more", "lease", uint64(k.id), "error", err)
		_ = e.dropCached(k.id)
		return
	}
	if s != nil {
		s.Cooled()
	}
}

// cachedAwake reports whether workers are still cached and awake.
func (e *Executor) cachedAwake(k *cached) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cached[k.id] == k && k.awake // in this order: a lease that has taken the workers may freeze them now
}

// dirty reports whether a worker has executed a function, whose state must not reach another lease. A function can hide that by
// writing to the worker's page. Only later leases of its own client can then see its state.
func dirty(workers []Worker) bool {
	return slices.ContainsFunc(workers, func(w Worker) bool {
		c := w.Counters()
		return c.Calls != 0 || w.Running() != ""
	})
}

// ended returns an error if a worker has ended.
func ended(w Worker) error {
	select {
	case <-w.Done():
		return errors.New(w.Exit().Reason)
	default:
		return nil
	}
}

// each calls do for all workers in parallel and returns the first error.
func each(workers []Worker, do func(i int, w Worker) error) error {
	if len(workers) == 1 {
		return do(0, workers[0])
	}
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	for i, w := range workers {
		wg.Go(func() {
			if err := do(i, w); err != nil {
				once.Do(func() { first = err })
			}
		})
	}
	wg.Wait()
	return first
}

// take removes and returns the cached workers of a lease; nil if another goroutine has taken them.
func (e *Executor) take(id lease.ID) *cached {
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.cached[id]
	delete(e.cached, id)
	return k
}

// dropCached ends the cached workers of a lease and waits until they are reaped. It returns false if they are not cached
// any more.
func (e *Executor) dropCached(id lease.ID) bool {
	l, err := e.table.Get(id)
	if err != nil {
		return false
	}
	cores, memory := l.Terms.Workers*l.Terms.CoresPerWorker, uint64(l.Terms.Workers)*l.Terms.MemoryPerWorker
	e.mu.Lock()
	e.coming.begin(cores, memory)
	e.mu.Unlock()
	dropped := e.table.Drop(id) == nil
	if dropped {
		e.reapCached(id)
	}
	e.mu.Lock()
	e.coming.end(cores, memory)
	e.mu.Unlock()
	return dropped
}

// coming counts the resources of cached workers that are killed but not reaped yet. They already count as free. A
// request that finds nothing else waits for them, so that it is not refused because of workers without a lease. The
// executor's lock protects it.
type coming struct {
	cores  int
	memory uint64
	times  uint64 // how often resources have become free
	ended  chan struct{}
}

func (c *coming) begin(cores int, memory uint64) {
	c.cores += cores
	c.memory += memory
	if c.ended == nil {
		c.ended = make(chan struct{})
	}
}

func (c *coming) end(cores int, memory uint64) {
	c.cores -= cores
	c.memory -= memory
	c.times++
	close(c.ended)
	c.ended = nil
	if c.cores > 0 {
		c.ended = make(chan struct{})
	}
}

// requestPatiently calls try, and again if it was busy and resources have become free in the meantime.
func (e *Executor) requestPatiently(ctx context.Context, try func() error) error {
	for {
		e.mu.Lock()
		times := e.coming.times
		e.mu.Unlock()
		err := try()
		if !errors.Is(err, lease.ErrBusy) {
			return err
		}
		e.mu.Lock()
		more, ended := e.coming.times != times, e.coming.ended
		e.mu.Unlock()
		switch {
		case more:
		case ended == nil:
			return err
		default:
			select {
			case <-ended:
			case <-ctx.Done():
				return err
			}
		}
	}
}

// reapCached ends cached workers that the table has removed.
func (e *Executor) reapCached(id lease.ID) {
	if k := e.take(id); k != nil {
		e.end(k)
	}
	if err := e.table.Reaped(id); err != nil {
		e.log.Error("cannot return the cores of cached workers", "lease", uint64(id), "error", err)
	}
	e.changed()
}

// end ends and reaps workers that were cached.
func (e *Executor) end(k *cached) {
	e.release(k)
	k.start.cancel()
	stopAll(context.Background(), k.workers, killed)
	e.accounts.end(k.id) // if they were still awake
	e.codes.release(k.code)
	e.tables.release(k.tables)
}

// release stops watching the connection of cached workers.
func (e *Executor) release(k *cached) {
	close(k.taken)
	k.unwatch()
}

// evict ends cached workers whose resources another lease needs.
func (e *Executor) evict(ids []lease.ID) {
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() { e.reapCached(id) })
	}
	wg.Wait()
}

// dropAllCached ends all cached workers. The node must be draining, so that no more are cached.
func (e *Executor) dropAllCached() {
	var wg sync.WaitGroup
	for _, id := range e.table.Cached() {
		wg.Go(func() { e.dropCached(id) })
	}
	wg.Wait()
}

// dropCachedOf ends all cached workers of a tenant, except those that a client has claimed: they belong to a lease.
func (e *Executor) dropCachedOf(tenant string) {
	for _, id := range e.table.Cached() {
		if l, err := e.table.Get(id); err == nil && l.Terms.Tenant == tenant {
			e.dropCached(id)
		}
	}
}

// resumeAll resumes cached workers for a new lease. If one cannot be resumed, all are ended and the error is lease.ErrNotCached.
func (e *Executor) resumeAll(h *holding, k *cached, blobs [][]byte, limit time.Duration) ([]Worker, error) {
	e.release(k)
	err := k.start.wait()
	ctx, cancel := spawnContext(h, limit)
	defer cancel()
	k.mu.Lock()
	if err == nil {
		err = k.failed
	}
	if err == nil && k.awake {
		err = e.freeze(ctx, k)
	}
	if err == nil {
		resume, cancel := context.WithTimeout(ctx, limit/2) // the other half is for new workers instead of these
		err = each(k.workers, func(i int, w Worker) error { return w.Resume(resume, blobs[i]) })
		cancel()
	}
	k.mu.Unlock()
	e.codes.release(k.code) // the lease has its own reference
	e.tables.release(k.tables)
	if err == nil && len(k.workers) == len(blobs) {
		return k.workers, nil
	}
	e.tell(h, slog.LevelInfo, "cannot resume cached workers; ended them", "lease", uint64(h.id), "of", uint64(k.id), "error", err)
	stopAll(ctx, k.workers, killed)
	return nil, lease.ErrNotCached
}
