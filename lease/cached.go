package lease

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// Keep caches the workers of a released lease, in place of Reaped, for a request that reuses it. Errors: ErrState (not
// released, or without resources), ErrDraining, ErrUnknown; the caller then reaps the workers.
func (t *Table) Keep(id ID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	switch {
	case r == nil:
		return unknown(id)
	case r.State != Released || r.reaped || r.dropped || !r.cached.IsZero():
		return fmt.Errorf("lease %d is %v, resources returned: %t, cached: %t, dropped: %t: %w", id, r.State, r.reaped,
			!r.cached.IsZero(), r.dropped, ErrState)
	case t.draining:
		return ErrDraining
	case r.Terms.Kind == [32]byte{}:
		return fmt.Errorf("lease %d has no kind, so no request can reuse it: %w", id, ErrState)
	}
	t.cache(r)
	return nil
}

// cache lists a lease as cached. Its resources count as free from then on.
func (t *Table) cache(r *record) {
	r.cached = t.cfg.Now().Add(t.cfg.Keep)
	t.cached = append(t.cached, r.ID)
	t.holding--
	count(t.cores.used, r.shares, -1)
	count(t.cores.cached, r.shares, 1)
	t.cachedMemory += r.memory
	t.wake()
}

// Drop removes a lease from the cache. Its caller reaps the workers and then calls Reaped. Of Drop, the claim and the requests that
// reuse or evict the lease exactly one succeeds; Drop returns ErrState if it was another.
func (t *Table) Drop(id ID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	switch {
	case r == nil:
		return unknown(id)
	case r.cached.IsZero() || !t.cfg.Revoke(id):
		return fmt.Errorf("lease %d is not cached: %w", id, ErrState)
	}
	t.drop(r)
	return nil
}

// drop removes a lease from the cache. The caller must reap its workers.
func (t *Table) drop(r *record) {
	t.unkeep(r)
	r.dropped = true
	t.holding++
	count(t.cores.used, r.shares, 1)
}

func (t *Table) unkeep(r *record) {
	r.cached = time.Time{}
	t.cached = slices.DeleteFunc(t.cached, func(id ID) bool { return id == r.ID })
	count(t.cores.cached, r.shares, -1)
	t.cachedMemory -= r.memory
}

// Cached returns the cached leases, the oldest first.
func (t *Table) Cached() []ID {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.cached)
}

// takeOver gives the resources of a cached lease to a new one.
func (t *Table) takeOver(r *record, terms *Terms, id ID) error {
	old := t.leases[id]
	switch {
	case old == nil || old.cached.IsZero():
		return fmt.Errorf("lease %d: %w", id, ErrNotCached)
	case !terms.fit(old.Terms):
		return fmt.Errorf("lease %d is cached for other terms: %w", id, ErrNotCached)
	case !t.cfg.Revoke(id):
		return fmt.Errorf("lease %d was claimed: %w", id, ErrNotCached)
	}
	t.inherit(r, old)
	return nil
}

// inherit gives the resources of a cached lease to a new one.
func (t *Table) inherit(r, old *record) {
	t.unkeep(old)
	r.Reuses, r.shares, r.memory = old.ID, old.shares, old.memory
	count(t.cores.used, r.shares, 1)
	old.shares, old.memory = nil, 0
	t.bury(old)
}

// Claim turns a cached lease that a client has claimed (Config.Revoke has returned false for it, or will) into a granted lease with the same
// terms and another id. Its time runs from `at` on. Errors: ErrNotCached, ErrState (the id is in use).
func (t *Table) Claim(old, id ID, at time.Time) (Lease, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.leases[old]
	switch {
	case was == nil || was.cached.IsZero():
		return Lease{}, fmt.Errorf("lease %d: %w", old, ErrNotCached)
	case id == 0 || t.leases[id] != nil:
		return Lease{}, fmt.Errorf("lease %d: its id is in use: %w", id, ErrState)
	}
	r := &record{settled: make(chan struct{})}
	t.inherit(r, was)
	r.ID, r.State, r.Terms, r.Granted = id, Granted, was.Terms, at
	r.Terms.Spare = false
	r.RequestID = t.unusedRequest(id)
	r.CPUs = t.cores.cpus(r.shares)
	t.holding++
	t.leases[r.ID], t.requests[r.RequestID] = r, r
	t.setEnd(r, at, r.Terms.Duration)
	r.comeBy = t.cfg.Now().Add(t.cfg.FirstUse)
	close(r.settled)
	t.wake()
	return r.copy(), nil
}

// unusedRequest returns a request id for a lease that no request has asked for. A client can read the lease's id before it claims, and may have used
// a request id that is derived from it. No two leases of a table may have the same request id, because Restore refuses that.
func (t *Table) unusedRequest(id ID) (rid RequestID) {
	binary.LittleEndian.PutUint64(rid[:], uint64(id))
	for n := uint64(0); t.requests[rid] != nil; n++ {
		binary.LittleEndian.PutUint64(rid[8:], n)
	}
	return rid
}
