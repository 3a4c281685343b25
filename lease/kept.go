package lease

import (
	"fmt"
	"slices"
	"time"
)

// Keep keeps a released lease's workers, in the place of Reaped, for a request that reuses it. Errors: ErrState (not
// released, or without resources), ErrDraining, ErrUnknown; the caller then goes on to reap them.
func (t *Table) Keep(id ID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	switch {
	case r == nil:
		return unknown(id)
	case r.State != Released || r.reaped || r.dropped || !r.kept.IsZero():
		return fmt.Errorf("lease %d is %v, resources given back: %t, kept: %t, or no more: %t: %w", id, r.State, r.reaped,
			!r.kept.IsZero(), r.dropped, ErrState)
	case t.draining:
		return ErrDraining
	case r.Terms.Kind == [32]byte{}:
		return fmt.Errorf("lease %d fits no other: %w", id, ErrState)
	}
	r.kept = t.cfg.Now().Add(t.cfg.Keep)
	t.kept = append(t.kept, id)
	t.holding--
	count(t.cores.used, r.shares, -1)
	count(t.cores.kept, r.shares, 1)
	t.keptMemory += r.memory
	t.wake()
	return nil
}

// Drop ends the keeping: its caller reaps the workers and then calls Reaped. Exactly one of Drop and the requests that
// reuse or evict it succeeds; for the others it is ErrState.
func (t *Table) Drop(id ID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	switch {
	case r == nil:
		return unknown(id)
	case r.kept.IsZero():
		return fmt.Errorf("lease %d is not kept: %w", id, ErrState)
	}
	t.drop(r)
	return nil
}

// drop makes a kept lease one that waits to be reaped.
func (t *Table) drop(r *record) {
	t.unkeep(r)
	r.dropped = true
	t.holding++
	count(t.cores.used, r.shares, 1)
}

func (t *Table) unkeep(r *record) {
	r.kept = time.Time{}
	t.kept = slices.DeleteFunc(t.kept, func(id ID) bool { return id == r.ID })
	count(t.cores.kept, r.shares, -1)
	t.keptMemory -= r.memory
}

// Kept returns the leases that are kept, the oldest first.
func (t *Table) Kept() []ID {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.kept)
}

// takeOver gives a new lease what a kept one holds.
func (t *Table) takeOver(r *record, terms *Terms, id ID) error {
	old := t.leases[id]
	switch {
	case old == nil || old.kept.IsZero():
		return fmt.Errorf("lease %d: %w", id, ErrNotKept)
	case !terms.fit(old.Terms):
		return fmt.Errorf("lease %d is kept for other terms: %w", id, ErrNotKept)
	}
	t.unkeep(old)
	r.Reuses, r.shares, r.memory = id, old.shares, old.memory
	count(t.cores.used, r.shares, 1)
	old.shares, old.memory = nil, 0
	t.bury(old)
	return nil
}
