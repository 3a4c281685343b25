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

// EnvKeep is the environment variable with the number of released leases that a session keeps connected; 0: none.
const EnvKeep = "RFAAS_KEEP_LEASES"

// defaultKeep is this number without the variable.
const defaultKeep = 16

// keptKey is what a new lease must have in common with a kept one to get its workers.
type keptKey struct {
	sha            [sha256.Size]byte
	workers, cores int
	memory         uint64
	mode           control.WaitMode
	limit          time.Duration
	depth, eager   int
	bulk           uint64
}

func (p *Pending) key() keptKey {
	s := &p.spec
	return keptKey{p.sha, s.Workers, s.CoresPerWorker, s.Memory, s.Mode, s.CallLimit, s.Depth, s.Eager, s.Bulk}
}

// Kept is a released lease whose workers the executor caches. The client has the channels, under the name of the lease. Each Kept is
// passed on once: to the caller of TakeKept, or its name to Options.Dropped.
type Kept struct {
	name  uint64
	cand  Candidate
	id    uint64
	key   keptKey
	cl    control.ExecutorClient
	timer *time.Timer
}

// keep remembers a released lease for d. If there are too many, the one that was released first is given up.
func (c *Control) keep(k *Kept, d time.Duration) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.dropped(k)
		return
	}
	c.kept = append(c.kept, k)
	// Earlier than the executor ends the workers, so that no lease asks for workers that are gone.
	k.timer = time.AfterFunc(d-d/10, func() { c.expire(k) })
	var oldest *Kept
	if len(c.kept) > c.opts.Keep {
		oldest = c.kept[0]
	}
	c.mu.Unlock()
	if oldest != nil {
		c.expire(oldest)
	}
}

// expire gives a kept lease up, on both sides, unless it was taken.
func (c *Control) expire(k *Kept) {
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

// letGo asks the executor to end the workers of a kept lease. It is counted in work.
func (c *Control) letGo(k *Kept) {
	go func() {
		defer c.work.Done()
		ctx, cancel := c.bound(context.Background())
		defer cancel()
		_, _ = k.cl.Release(ctx, &control.ReleaseRequest{LeaseId: k.id}) // after an error the executor ends them later by itself
	}()
}

// remove takes a kept lease off the list. Under mu.
func (c *Control) remove(k *Kept) bool {
	i := slices.Index(c.kept, k)
	if i < 0 {
		return false
	}
	k.timer.Stop()
	c.kept = slices.Delete(c.kept, i, i+1)
	return true
}

// dropKept gives all kept leases up.
func (c *Control) dropKept() {
	c.mu.Lock()
	all := slices.Clone(c.kept)
	c.mu.Unlock()
	for _, k := range all {
		c.expire(k)
	}
}

// TakeKept takes the kept lease with this name. The caller passes it to UseKept, GiveUp or Forget. nil: it was given up.
func (c *Control) TakeKept(name uint64) *Kept {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.kept, func(k *Kept) bool { return k.name == name })
	if i < 0 {
		return nil
	}
	k := c.kept[i]
	c.remove(k)
	return k
}

// GiveUp ends a kept lease that TakeKept has returned, on both sides.
func (c *Control) GiveUp(k *Kept) {
	c.dropped(k)
	c.Forget(k)
}

// Forget ends a kept lease that TakeKept has returned. Options.Dropped is not called.
func (c *Control) Forget(k *Kept) {
	c.mu.Lock()
	c.work.Add(1)
	c.mu.Unlock()
	c.letGo(k)
}

// UseKept makes a kept lease the only candidate. It returns false if its workers cannot serve this lease; k is still
// the caller's then.
func (p *Pending) UseKept(k *Kept) bool {
	at := cmp.Or(p.spec.At, p.spec.Executor)
	if k.key != p.key() || at != "" && at != k.cand.Address {
		return false
	}
	cand := k.cand
	cand.Kept = k
	p.candidates, p.current, p.byBoard = []Candidate{cand}, 0, false
	return true
}

func (c *Control) dropped(k *Kept) {
	if c.opts.Dropped != nil {
		c.opts.Dropped(k.name)
	}
}

// Kept returns the number of kept leases.
func (c *Control) Kept() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.kept)
}

// ReleaseKeep is Release for a client without calls in flight that could use the same workers again. name is for TakeKept and
// Options.Dropped, which get it only if kept is true.
func (h *Held) ReleaseKeep(ctx context.Context, name uint64) (kept bool, err error) {
	if h.c.opts.Keep <= 0 || h.adopted {
		return false, h.Release(ctx)
	}
	r, err := h.release(ctx, true)
	if err != nil || r.GetKeepMs() == 0 || !r.GetKept() {
		return false, err
	}
	h.c.keep(&Kept{name: name, cand: h.Candidate, id: h.ID, key: h.key, cl: h.cl}, milliseconds(r.GetKeepMs()))
	return true, nil
}

// Look finds candidates, and forgets earlier ones.
func (p *Pending) Look(ctx context.Context) (err error) {
	ctx, cancel := p.c.bound(ctx)
	defer cancel()
	p.last = nil
	p.current, p.refused = -1, map[uint32]bool{}
	p.candidates, p.byBoard, err = p.c.first(ctx, &p.spec, p.refused)
	return err
}

// keepOf returns the number of leases to keep, from an option and the environment.
func keepOf(setting int, environment string) int {
	if n, err := strconv.Atoi(environment); setting == 0 && err == nil {
		return max(n, 0)
	}
	return max(cmp.Or(setting, defaultKeep), 0)
}
