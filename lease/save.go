package lease

import (
	"fmt"
	"slices"
	"time"
)

// Saved is a lease as Save returns it, for the table of the program that takes over.
type Saved struct {
	Lease
	Presence uint64
	Present  bool
	Left     time.Time // when the client went away last
	ComeBy   time.Time // deadline for the absent client; zero while it is present
	Notice   time.Time // when the client is notified that the end is near
	Shares   [][]int   // of each worker: indices into the sorted cores; none for a worker that has not been added
}

// Save returns the leases that are granted and have not ended. No lease may be Requested or cached, and no ended one may have
// resources: the owner lets them end first.
func (t *Table) Save() ([]Saved, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Saved
	for _, r := range t.leases {
		switch {
		case r.State == Requested, r.State.Ended() && !r.reaped:
			return nil, fmt.Errorf("lease %d is %v and has resources: %w", r.ID, r.State, ErrState)
		case r.State.Ended():
			continue
		}
		s := Saved{Lease: r.copy(), Presence: r.presence, Present: r.present, Left: r.left, ComeBy: r.comeBy, Notice: r.notice}
		s.rec, s.Evict = nil, nil
		for _, share := range r.shares {
			s.Shares = append(s.Shares, slices.Clone(share))
		}
		all = append(all, s)
	}
	return all, nil
}

// Restore adds what Save returned to a new table with the same cores. It checks that the node has what the leases hold. After an
// error the table must not be used.
func (t *Table) Restore(all []Saved) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range all {
		if err := t.restore(&all[i]); err != nil {
			return fmt.Errorf("saved lease %d: %w", all[i].ID, err)
		}
	}
	t.wake()
	return nil
}

func (t *Table) restore(s *Saved) error {
	switch {
	case s.ID == 0 || t.leases[s.ID] != nil || t.requests[s.RequestID] != nil:
		return fmt.Errorf("its id is 0 or used twice: %w", ErrInvalid)
	case s.State < Granted || s.State.Ended():
		return fmt.Errorf("it is %v: %w", s.State, ErrInvalid)
	case s.Granted.IsZero() || s.Expires.IsZero():
		return fmt.Errorf("it has no end: %w", ErrInvalid)
	}
	if err := t.possible(s.Terms); err != nil {
		return err
	}
	memory := uint64(present(s.Shares)) * s.Terms.MemoryPerWorker
	if len(s.Shares) != s.Terms.Workers || present(s.Shares) < s.Terms.least() || memory > t.memory {
		return fmt.Errorf("cores of %d of %d workers and %d bytes of memory, %d are free: %w", present(s.Shares), len(s.Shares), memory, t.memory, ErrInvalid)
	}
	r := &record{Lease: s.Lease, settled: make(chan struct{}), presence: s.Presence, present: s.Present, left: s.Left, comeBy: s.ComeBy,
		notice: s.Notice, memory: memory}
	for _, share := range s.Shares {
		if len(share) != 0 && len(share) != s.Terms.CoresPerWorker {
			return fmt.Errorf("a worker with %d cores: %w", len(share), ErrInvalid)
		}
		for _, core := range share {
			if core < 0 || core >= len(t.cores.list) || t.cores.available(core) < 1 {
				return fmt.Errorf("core %d is not free: %w", core, ErrInvalid)
			}
			t.cores.used[core]++
		}
		r.shares = append(r.shares, slices.Clone(share))
	}
	r.rec, r.Evict = nil, nil
	r.CPUs = t.cores.cpus(r.shares)
	close(r.settled)
	t.memory -= r.memory
	t.holding++
	t.leases[r.ID], t.requests[r.RequestID] = r, r
	return nil
}
