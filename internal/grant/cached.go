package grant

import (
	"cmp"
	"context"
	"crypto/sha256"
	"slices"
	"strconv"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// EnvCached is the environment variable with the most released leases that a session caches; 0: none.
const EnvCached = "RFAAS_CACHED_LEASES"

// defaultCached is the number without the variable.
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
}

func (p *Pending) key() cachedKey {
	s := &p.spec
	return cachedKey{p.sha, s.Workers, s.CoresPerWorker, s.Memory, s.Mode, s.CallLimit, s.Depth, s.Eager, s.Bulk}
}

// Cached is a released lease whose workers the executor caches. The client caches the channels under the same name. Each Cached is handed
// out once: TakeCached returns it, or Options.Dropped gets its name.
type Cached struct {
	name  uint64
	cand  Candidate
	id    uint64
	key   cachedKey
	cl    control.ExecutorClient
	timer *time.Timer
}

// keep caches a released lease for d. If there are too many, the oldest one is given up.
func (c *Control) keep(k *Cached, d time.Duration) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.dropped(k)
		return
	}
	c.cached = append(c.cached, k)
	// Before the executor ends the workers, so that no lease asks for workers that have ended.
	k.timer = time.AfterFunc(d-d/10, func() { c.expire(k) })
	var oldest *Cached
	if len(c.cached) > c.opts.Keep {
		oldest = c.cached[0]
	}
	c.mu.Unlock()
	if oldest != nil {
		c.expire(oldest)
	}
}

// expire gives up a cached lease, at the executor and the client, unless it was taken.
func (c *Control) expire(k *Cached) {
	c.mu.Lock()
	mine := c.remove(k)
	if mine {
		c.work.Add(1)
	}
	c.mu.Unlock()
	if mine {
		c.dropped(k)
		c.letGo(k)
	}
}

// letGo asks the executor to end the workers of a cached lease. It is counted in work.
func (c *Control) letGo(k *Cached) {
	go func() {
		defer c.work.Done()
		ctx, cancel := c.bound(context.Background())
		defer cancel()
		_, _ = k.cl.Release(ctx, &control.ReleaseRequest{LeaseId: k.id}) // after an error the executor ends them by itself, later
	}()
}

// remove takes a cached lease off the list. Under mu.
func (c *Control) remove(k *Cached) bool {
	i := slices.Index(c.cached, k)
	if i < 0 {
		return false
	}
	k.timer.Stop()
	c.cached = slices.Delete(c.cached, i, i+1)
	return true
}

// dropCached gives up all cached leases.
func (c *Control) dropCached() {
	c.mu.Lock()
	all := slices.Clone(c.cached)
	c.mu.Unlock()
	for _, k := range all {
		c.expire(k)
	}
}

// TakeCached removes and returns the cached lease with this name; nil: it was given up. The caller passes it to UseCached, GiveUp or
// Forget.
func (c *Control) TakeCached(name uint64) *Cached {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.cached, func(k *Cached) bool { return k.name == name })
	if i < 0 {
		return nil
	}
	k := c.cached[i]
	c.remove(k)
	return k
}

// GiveUp ends a cached lease that TakeCached has returned, at the executor and the client.
func (c *Control) GiveUp(k *Cached) {
	c.dropped(k)
	c.Forget(k)
}

// Forget ends a cached lease that TakeCached has returned. Options.Dropped is not called.
func (c *Control) Forget(k *Cached) {
	c.mu.Lock()
	c.work.Add(1)
	c.mu.Unlock()
	c.letGo(k)
}

// UseCached makes a cached lease the only candidate. It returns false if its workers cannot serve this lease; the caller
// then still owns k.
func (p *Pending) UseCached(k *Cached) bool {
	at := cmp.Or(p.spec.At, p.spec.Executor)
	if k.key != p.key() || at != "" && at != k.cand.Address {
		return false
	}
	cand := k.cand
	cand.Cached = k
	p.candidates, p.current, p.byBoard = []Candidate{cand}, 0, false
	return true
}

func (c *Control) dropped(k *Cached) {
	if c.opts.Dropped != nil {
		c.opts.Dropped(k.name)
	}
}

// Cached returns the number of cached leases.
func (c *Control) Cached() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.cached)
}

// ReleaseCached is Release for a client that has no calls in flight and could use the same workers again. If cached is true, TakeCached
// and Options.Dropped know the lease by name.
func (h *Held) ReleaseCached(ctx context.Context, name uint64) (cached bool, err error) {
	if h.c.opts.Keep <= 0 || h.adopted {
		return false, h.Release(ctx)
	}
	r, err := h.release(ctx, true)
	if err != nil || r.GetCacheMs() == 0 || !r.GetCached() {
		return false, err
	}
	h.c.keep(&Cached{name: name, cand: h.Candidate, id: h.ID, key: h.key, cl: h.cl}, milliseconds(r.GetCacheMs()))
	return true, nil
}

// Look finds candidates, and forgets earlier ones.
func (p *Pending) Look(ctx context.Context) (err error) {
	ctx, cancel := p.c.bound(ctx)
	defer cancel()
	p.last = nil
	p.current, p.refused = -1, map[uint32]bool{}
	p.candidates, p.unusable, p.byBoard, err = p.c.first(ctx, &p.spec, p.refused)
	return err
}

// cachedOf returns the most leases to cache, from an option and the environment.
func cachedOf(setting int, environment string) int {
	if n, err := strconv.Atoi(environment); setting == 0 && err == nil {
		return max(n, 0)
	}
	return max(cmp.Or(setting, defaultCached), 0)
}
