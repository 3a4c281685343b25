package grant

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// EnvCached is the environment variable with the largest number of released leases that a session caches. 0: none.
const EnvCached = "RFAAS_CACHED_LEASES"

// defaultCached is that number if the variable is not set.
const defaultCached = 16

// cachedKey has the terms in which a new lease must equal a cached one to get its workers.
type cachedKey struct {
	sha            [sha256.Size]byte
	workers, cores int
	memory         uint64
	mode           control.WaitMode
	limit          time.Duration
	depth, eager   int
	bulk           uint64
	tables         [sha256.Size]byte
	keepsState     bool
	initCall       bool
	seeded         bool // such leases are never cached
	runtime        string
}

func (p *Pending) key() cachedKey {
	s := &p.spec
	return cachedKey{p.sha, s.Workers, s.CoresPerWorker, s.Memory, s.Mode, s.CallLimit, s.Depth, s.Eager, s.Bulk, tablesKey(s.all()), s.KeepsState, s.InitCall, s.Seed != nil, s.Runtime}
}

// Cached is a released lease whose workers the executor caches, or a spare lease (Started). The session that released it caches the
// channels under the same name. If the channels were handed over, any session with the same addresses and credentials can take them, even
// after that session was closed. Each Cached is either taken once (TakeCached, TakeHanded) or reported to Options.Dropped by its name.
type Cached struct {
	name    uint64
	cand    Candidate
	id      uint64
	key     cachedKey
	library string // its name
	cl      control.ExecutorClient
	timer   *time.Timer
	expires time.Time
	last    *Held     // the released lease
	claim   *Claim    // nil: the workers are reused by message only
	far     *farClaim // nil: the same, on tcp and verbs
	own     *OwnClaim // nil: the client process that owns it does not claim the workers itself, on verbs
	fresh   bool      // a spare lease: no lease has used the workers
	late    bool      // see Late
	failed  func()    // see Started.Keep; nil: not a spare lease

	// Protected by the cache, until it is taken.
	owner  *Control         // nil: its session was closed
	use    func()           // gives up the connections; nil while the lease has an owner
	handed io.Closer        // the channels; nil: only the owner has them
	spare  func(taken bool) // see Started.Keep; nil: a lease has used the workers before
}

// cache holds the cached leases of all sessions that share connections, the oldest first.
type cache struct {
	mu        sync.Mutex
	all       []*Cached
	releasing []*pendingRelease
	closed    bool
}

// pendingRelease is a lease that is being released, and whose workers the executor may cache. A search with the same terms waits for it, because a request
// for new workers would make the executor end the cached ones.
type pendingRelease struct {
	*Cached
	done    chan struct{} // closed when the release has ended
	awaited bool          // a search waits for it. Others do not, because each lease serves only one search
}

// releaseWait is how long a search waits for a release. A release takes about a millisecond, and a start of new workers a few. If a release takes
// longer than releaseWait, the executor may have stopped.
const releaseWait = 50 * time.Millisecond

// expect adds a lease whose release begins. The caller calls ended when the release has ended.
func (s *cache) expect(k *Cached) (ended func()) {
	e := &pendingRelease{Cached: k, done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releasing = append(s.releasing, e)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.releasing = slices.DeleteFunc(s.releasing, func(x *pendingRelease) bool { return x == e })
		close(e.done)
	}
}

// keep caches a released lease for d. If there are too many, the oldest one is given up.
func (c *Control) keep(k *Cached, d time.Duration) {
	s := &c.cache
	s.mu.Lock()
	k.owner = c
	k.expireIn(c, d)
	s.all = append(s.all, k)
	given := s.closed || c.left && !c.disown(k) // the session was closed meanwhile
	oldest := s.beyond(k.owner, c.opts.Keep)
	s.mu.Unlock()
	if given {
		c.expire(k)
	}
	if oldest != nil {
		c.expire(oldest)
	}
}

// expireIn makes c give up k before the executor ends the workers after d, so that no lease asks for workers that have ended. The caller holds the
// cache's mu.
func (k *Cached) expireIn(c *Control, d time.Duration) {
	d -= d / 10
	k.expires = time.Now().Add(d)
	k.timer = time.AfterFunc(d, func() { c.expire(k) })
}

// beyond returns the oldest lease of an owner that has more than most leases, else nil. The caller holds mu.
func (s *cache) beyond(owner *Control, most int) *Cached {
	var oldest *Cached
	n := 0
	for _, k := range s.all {
		if k.owner == owner {
			oldest = cmp.Or(oldest, k)
			n++
		}
	}
	if n <= most {
		return nil
	}
	return oldest
}

// disown lets a cached lease outlive the session that released it. It returns false if the channels were not handed over. The
// caller holds the cache's mu.
func (c *Control) disown(k *Cached) bool {
	if k.handed == nil || c.cache.closed {
		return false
	}
	k.owner, k.use = nil, c.retain()
	return true
}

// leaveCached gives up the cached leases of a closing session. It keeps those whose channels the agent holds. It returns when the
// executors have ended their workers. lives: the client process may still use leases that it has got by claims.
func (c *Control) leaveCached(lives bool) {
	s := &c.cache
	var given []*Cached
	s.mu.Lock()
	c.left = true
	for _, k := range slices.Clone(s.all) {
		if k.owner == c && !c.disown(k) {
			given = append(given, k)
		} else if oldest := s.beyond(nil, c.opts.Keep); oldest != nil {
			s.remove(oldest)
			c.detach(oldest)
			go c.end(oldest, (*Cached).release)
		}
	}
	for _, k := range given {
		s.remove(k)
		c.detach(k)
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, k := range given {
		end := (*Cached).release
		if k.own != nil && !lives {
			end = (*Cached).settle // the process did not tell of a claim, perhaps because it was killed or does not know the outcome
		}
		wg.Go(func() { c.end(k, end) })
	}
	wg.Wait()
}

// remove takes a cached lease off the list. It returns false if the lease was taken before. The caller holds mu.
func (s *cache) remove(k *Cached) bool {
	i := slices.Index(s.all, k)
	if i < 0 {
		return false
	}
	k.timer.Stop()
	s.all = slices.Delete(s.all, i, i+1)
	return true
}

// ClaimGrace is how long a cached lease stays listed after it has expired if its client has claimed the workers, so that the caller finds the
// claim. expire looks again as often.
const ClaimGrace = time.Second

// expire gives up a cached lease, at the executor and in its session, unless it was taken or its client has claimed the workers. c is a session
// with the same connections, and may be closed.
func (c *Control) expire(k *Cached) {
	// The state of an own claim is not known here. If the lease has just expired, the client may have claimed the workers.
	if now := time.Now(); (k.Claimed() || k.own != nil && !now.Before(k.expires)) && now.Before(k.expires.Add(ClaimGrace)) {
		s := &c.cache
		s.mu.Lock()
		if slices.Contains(s.all, k) {
			k.timer.Reset(ClaimGrace)
		}
		s.mu.Unlock()
		return
	}
	if c.drop(k) {
		go c.end(k, (*Cached).release)
	}
}

// drop takes a cached lease off the list and tells its session. It returns false if the lease was taken before.
func (c *Control) drop(k *Cached) bool {
	s := &c.cache
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.remove(k) {
		return false
	}
	c.detach(k)
	return true
}

// detach tells the session of a removed lease that the lease is no longer cached, and closes its channels. The caller holds mu.
func (c *Control) detach(k *Cached) {
	k.left(false)
	if k.owner != nil {
		k.owner.dropped(k.name)
		k.owner, k.use = nil, c.retain()
	}
	k.Close()
}

// end asks the executor to end the workers of a lease without an owner, by release or settle. The connections stay open until the executor has answered.
func (c *Control) end(k *Cached, how func(*Cached, context.Context)) {
	defer k.use()
	ctx, cancel := c.bound(context.Background())
	defer cancel()
	how(k, ctx)
}

// release ends a cached lease. After an error, the executor ends the workers by itself, later.
func (k *Cached) release(ctx context.Context) {
	_, _ = k.cl.Release(ctx, &control.ReleaseRequest{LeaseId: k.id})
}

// close forgets all cached leases when the connections are closed. The executors then end the workers.
func (s *cache) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, k := range s.all {
		k.timer.Stop()
		k.left(false)
		k.Close()
	}
	s.all = nil
}

// TakeCached removes and returns the cached lease with this name; nil: the lease was given up, or another session has taken it. The
// caller passes it to UseCached, GiveUp or Forget.
func (c *Control) TakeCached(name uint64) *Cached {
	s := &c.cache
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.all, func(k *Cached) bool { return k.owner == c && k.name == name })
	if i < 0 {
		return nil
	}
	k := s.all[i]
	s.remove(k)
	k.left(true)
	return k
}

// Expires returns when the session gives up the cached lease.
func (k *Cached) Expires() time.Time { return k.expires }

// TakeHanded removes and returns a cached lease with the same terms whose channels were handed over, or whose workers are late. It
// returns nil if there is none. It takes the latest lease of a closed session, else a spare lease, else a lease of an open session. If there is none of
// these, but a lease with the same terms is being released, it waits until the release ends, at most for releaseWait or until ctx ends. The caller
// passes the lease to UseCached or Forget, and the channels, if there are any, to the client.
func (p *Pending) TakeHanded(ctx context.Context) *Cached {
	if p.c.opts.Keep <= 0 {
		return nil // a session that caches nothing wants new workers
	}
	if k := p.takeHanded(); k != nil {
		return k
	}
	ctx, stop := context.WithTimeout(ctx, releaseWait)
	defer stop()
	return p.awaitHanded(ctx)
}

// awaitHanded waits until the release of a lease with the same terms ends, and takes the lease. It returns nil if there is no such release, if the
// executor does not cache the lease, or if ctx ends first.
func (p *Pending) awaitHanded(ctx context.Context) *Cached {
	s := &p.c.cache
	s.mu.Lock()
	i := slices.IndexFunc(s.releasing, func(e *pendingRelease) bool { return !e.awaited && p.suits(e.Cached) })
	if i < 0 {
		s.mu.Unlock()
		return nil
	}
	e := s.releasing[i]
	e.awaited = true
	s.mu.Unlock()
	select {
	case <-e.done:
		return p.takeHanded()
	case <-ctx.Done():
		return nil
	}
}

// takeHanded is TakeHanded without waiting.
func (p *Pending) takeHanded() *Cached {
	c := p.c
	s := &c.cache
	s.mu.Lock()
	var found *Cached
	for _, k := range s.all {
		if k.anyones() && p.suits(k) && (c.opts.Broker || !k.brokered()) && !k.Claimed() && (found == nil || k.owner == nil && k.rank() >= found.rank()) {
			found = k
		}
	}
	if found == nil || !s.remove(found) {
		s.mu.Unlock()
		return nil
	}
	found.left(true)
	owner, use := found.owner, found.use
	found.owner, found.use = c, nil
	s.mu.Unlock()
	if owner != nil {
		owner.dropped(found.name)
	}
	if use != nil {
		use()
	}
	return found
}

// rank is higher for leases that TakeHanded prefers. The caller holds the cache's mu.
func (k *Cached) rank() int {
	switch {
	case k.owner != nil:
		return 0
	case k.fresh:
		return 1
	}
	return 2
}

// GiveUp ends a cached lease that TakeCached has returned, at the executor and the client.
func (c *Control) GiveUp(k *Cached) {
	c.dropped(k.name)
	c.Forget(k)
}

// Forget ends a cached lease that TakeCached or TakeHanded has returned. Options.Dropped is not called.
func (c *Control) Forget(k *Cached) {
	k.use = c.retain()
	k.Close()
	go c.end(k, (*Cached).settle) // the client process may have claimed the workers without knowing it
}

// Handed returns the channels of a taken lease; nil if they were not handed over. The lease still owns them: see Close and Unhand.
func (k *Cached) Handed() io.Closer { return k.handed }

// Unhand returns the channels, and the caller owns them from then on.
func (k *Cached) Unhand() io.Closer {
	h := k.handed
	k.handed = nil
	return h
}

// Close closes the channels, if they were handed over. The executor still caches the workers.
func (k *Cached) Close() {
	if h := k.Unhand(); h != nil {
		h.Close()
	}
}

// Late reports whether the workers are late: spare workers that connect only when a lease takes them. The client then offers new channels.
func (k *Cached) Late() bool { return k.late }

// anyones reports whether a lease of any session can take the workers.
func (k *Cached) anyones() bool { return k.handed != nil || k.Late() }

// brokered reports whether the channels pass through this process. The caller holds the cache's mu.
func (k *Cached) brokered() bool { return k.handed != nil && k.cand.Provider == dataplane.Verbs }

// Spare reports whether no lease has used the workers.
func (k *Cached) Spare() bool { return k.fresh }

// Candidate returns the executor that caches the workers.
func (k *Cached) Candidate() Candidate { return k.cand }

// suits reports whether the workers of a cached lease can serve this one.
func (p *Pending) suits(k *Cached) bool {
	at := cmp.Or(p.spec.At, p.spec.Executor)
	return k.key == p.key() && (at == "" || at == k.cand.Address)
}

// UseCached makes a cached lease the only candidate. It returns false if its workers cannot serve this lease; the caller
// then still owns k.
func (p *Pending) UseCached(k *Cached) bool {
	if !p.suits(k) {
		return false
	}
	cand := k.cand
	cand.Cached = k
	p.candidates, p.current, p.byBoard = []Candidate{cand}, 0, false
	return true
}

func (c *Control) dropped(name uint64) {
	if c.opts.Dropped != nil {
		c.opts.Dropped(name)
	}
}

// CachedLease describes a cached lease.
type CachedLease struct {
	Executor, Node string
	Library        string // its name
	SHA256         string // of the library, in hexadecimal digits
	Workers        int
	Handed         bool // any process can take it
	Orphaned       bool // the session that released it was closed
	Spare          bool // no lease has used its workers yet
}

// Cached returns the cached leases of all sessions, the oldest of each group of connections first.
func (p *Pool) Cached() []CachedLease {
	all := []CachedLease{}
	p.mu.Lock()
	parts := slices.Collect(maps.Values(p.parts))
	p.mu.Unlock() // before the caches are locked
	for _, s := range parts {
		s.cache.mu.Lock()
		for _, k := range s.cache.all {
			all = append(all, CachedLease{Executor: k.cand.Address, Node: k.cand.Node, Library: k.library, SHA256: hex.EncodeToString(k.key.sha[:]),
				Workers: k.key.workers, Handed: k.anyones(), Orphaned: k.owner == nil && !k.fresh,
				Spare: k.fresh})
		}
		s.cache.mu.Unlock()
	}
	return all
}

// Cached returns the number of cached leases of the session.
func (c *Control) Cached() (n int) {
	c.cache.mu.Lock()
	defer c.cache.mu.Unlock()
	for _, k := range c.cache.all {
		if k.owner == c {
			n++
		}
	}
	return n
}

// ReleaseCached is Release for a client that has no calls in flight and could use the same workers again. If the executor caches the
// workers, it returns the lease, which TakeCached and Options.Dropped know by name. Otherwise it returns nil. handed has the channels, if
// the client has handed them over; it is closed when the lease is given up, and at once if the lease is not cached. own: the client process is a claimant of
// the executor on verbs, and is to claim the workers itself.
func (h *Held) ReleaseCached(ctx context.Context, name uint64, handed io.Closer, own bool) (cached *Cached, err error) {
	k := &Cached{name: name, cand: h.Candidate, id: h.ID, key: h.key, library: h.library, cl: h.cl, last: h, handed: handed}
	k.cand.Cached = nil
	if h.c.opts.Keep <= 0 || h.adopted {
		k.Close()
		return nil, h.Release(ctx)
	}
	if handed != nil {
		defer h.c.cache.expect(k)()
	}
	var claimant uint64
	if own && handed == nil {
		claimant = h.c.claimant(h.Address)
	}
	r, err := h.release(ctx, true, claimant)
	if err != nil || r.GetCacheMs() == 0 || !r.GetCached() {
		k.Close()
		return nil, err
	}
	k.claimable(h.c, r.GetClaim())
	h.c.keep(k, milliseconds(r.GetCacheMs()))
	return k, nil
}

// cachedOf returns the most leases to cache, from an option and the environment.
func cachedOf(setting int, environment string) int {
	if n, err := strconv.Atoi(environment); setting == 0 && err == nil {
		return max(n, 0)
	}
	return max(cmp.Or(setting, defaultCached), 0)
}
