package lease

import "fmt"

// Grow takes the cores and the memory of worker i for a lease that was granted with fewer workers than it asked for. The caller reaps
// the workers of Lease.Evict, then starts the worker, or calls Shrink.
//
// Errors: ErrBusy, ErrInvalid (the lease has no worker i), ErrState (the worker has cores already), ErrDraining, ErrUnknown, ErrEnded.
func (t *Table) Grow(id ID, i int) (Lease, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Granted, Active, Expiring)
	switch {
	case err != nil:
		return Lease{}, err
	case t.draining:
		return Lease{}, ErrDraining
	case i < 0 || i >= len(r.shares):
		return Lease{}, fmt.Errorf("worker %d of lease %d, which has %d: %w", i, id, len(r.shares), ErrInvalid)
	case len(r.shares[i]) > 0:
		return Lease{}, fmt.Errorf("worker %d of lease %d has cores already: %w", i, id, ErrState)
	}
	shares, evict, err := t.takeSome(&r.Terms, 1)
	if err != nil {
		return Lease{}, err
	}
	r.shares[i] = shares[0]
	r.memory += r.Terms.MemoryPerWorker
	r.CPUs = t.cores.cpus(r.shares)
	l := r.copy()
	l.Evict = evict
	return l, nil
}

// Shrink gives back what Grow has taken for worker i, which could not be started. The lease may have ended since, but its resources have
// not been returned.
func (t *Table) Shrink(id ID, i int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	switch {
	case r == nil:
		return unknown(id)
	case r.reaped || i < 0 || i >= len(r.shares) || len(r.shares[i]) == 0 || present(r.shares) == 1:
		return fmt.Errorf("worker %d of lease %d cannot be taken away: %w", i, id, ErrState)
	}
	count(t.cores.used, r.shares[i:i+1], -1)
	t.memory += r.Terms.MemoryPerWorker
	r.memory -= r.Terms.MemoryPerWorker
	r.shares[i] = nil
	r.CPUs = t.cores.cpus(r.shares)
	return nil
}
