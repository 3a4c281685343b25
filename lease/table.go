package lease

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Config of a table. CPUs and NewID are mandatory.
type Config struct {
	CPUs   []int  // logical CPUs that may be leased, each once
	Memory uint64 // bytes that may be leased

	// FirstUse is how long a granted lease waits for its holder; Return how long an active one does after its holder
	// went away. 0: 10 s and 2 s.
	FirstUse, Return time.Duration

	// Now is the clock. nil: time.Now.
	Now func() time.Time
	// NewID makes lease ids. They should be hard to guess and differ between incarnations of an executor, so that
	// a stale id from an earlier one names nothing. A repeated or zero id is asked for again.
	NewID func() ID
	// Remember is how many ended leases are remembered. 0: 1024.
	Remember int
}

// Capacity is what a table has.
type Capacity struct {
	Cores, FreeCores   int
	Memory, FreeMemory uint64
	Leases             int // that hold resources
}

// Table keeps the leases. All methods may be called from any goroutine; only Wait blocks.
type Table struct {
	cfg     Config
	changed chan struct{} // capacity 1: a deadline may have become earlier

	mu       sync.Mutex
	free     []int // ascending
	memory   uint64
	draining bool
	leases   map[ID]*record
	requests map[RequestID]*record
	past     []ID // reaped leases still remembered, oldest first
	holding  int  // leases with resources
}

// New makes an empty table.
func New(cfg Config) (*Table, error) {
	if cfg.NewID == nil {
		return nil, fmt.Errorf("lease table: no NewID: %w", ErrInvalid)
	}
	cpus := slices.Clone(cfg.CPUs)
	slices.Sort(cpus)
	if len(cpus) == 0 {
		return nil, fmt.Errorf("lease table: no cores: %w", ErrInvalid)
	}
	for i, c := range cpus {
		if c < 0 || i > 0 && cpus[i-1] == c {
			return nil, fmt.Errorf("lease table: core %d is negative or named twice: %w", c, ErrInvalid)
		}
	}
	cfg.FirstUse = cmp.Or(cfg.FirstUse, 10*time.Second)
	cfg.Return = cmp.Or(cfg.Return, 2*time.Second)
	cfg.Remember = cmp.Or(cfg.Remember, 1024)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Table{cfg: cfg, changed: make(chan struct{}, 1), free: cpus, memory: cfg.Memory,
		leases: map[ID]*record{}, requests: map[RequestID]*record{}}, nil
}

// Request sets resources aside for the terms and returns the lease in state Requested with first true: the
// caller starts the workers and then calls Grant or Fail. With first false the id was seen before: the caller
// calls Wait. Errors: ErrInvalid (never possible here, or the id came with other terms), ErrBusy, ErrDraining,
// ErrEnded (the id's lease is over).
func (t *Table) Request(rid RequestID, terms Terms) (l Lease, first bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.requests[rid]; r != nil {
		switch {
		case r.Terms != terms:
			return Lease{}, false, fmt.Errorf("request id %x was used with other terms: %w", rid[:], ErrInvalid)
		case r.State.Ended():
			return Lease{}, false, r.ended()
		}
		return r.copy(), false, nil
	}
	if t.draining {
		return Lease{}, false, ErrDraining
	}
	if err := t.fits(terms); err != nil {
		return Lease{}, false, err
	}
	r := &record{settled: make(chan struct{})}
	r.ID, r.RequestID, r.State, r.Terms = t.newID(), rid, Requested, terms
	r.CPUs = t.take(terms.Workers, terms.CoresPerWorker)
	t.memory -= uint64(terms.Workers) * terms.MemoryPerWorker
	t.holding++
	t.leases[r.ID], t.requests[rid] = r, r
	return r.copy(), true, nil
}

// fits checks the terms against what there is and what is free. Divisions, since products could wrap.
func (t *Table) fits(terms Terms) error {
	w, c, m := terms.Workers, terms.CoresPerWorker, terms.MemoryPerWorker
	all := len(t.cfg.CPUs)
	switch {
	case w < 1:
		return fmt.Errorf("%d workers: want at least 1: %w", w, ErrInvalid)
	case c < 1:
		return fmt.Errorf("%d cores per worker: want at least 1: %w", c, ErrInvalid)
	case w > all/c:
		return fmt.Errorf("%d workers with %d cores each: the node lends %d cores: %w", w, c, all, ErrInvalid)
	case m > t.cfg.Memory/uint64(w):
		return fmt.Errorf("%d workers with %d bytes each: the node lends %d bytes: %w", w, m, t.cfg.Memory, ErrInvalid)
	case terms.Duration <= 0:
		return fmt.Errorf("duration %v: want more than 0: %w", terms.Duration, ErrInvalid)
	case w*c > len(t.free):
		return fmt.Errorf("%d cores wanted, %d of %d are free: %w", w*c, len(t.free), all, ErrBusy)
	case uint64(w)*m > t.memory:
		return fmt.Errorf("%d bytes wanted, %d of %d are free: %w", uint64(w)*m, t.memory, t.cfg.Memory, ErrBusy)
	}
	return nil
}

// take removes the lowest free cores, so that a worker's cores are neighbours where they can be.
func (t *Table) take(workers, each int) [][]int {
	out := make([][]int, workers)
	for i := range out {
		out[i] = slices.Clone(t.free[i*each : (i+1)*each])
	}
	t.free = slices.Delete(t.free, 0, workers*each)
	return out
}

func (t *Table) newID() ID {
	for {
		if id := t.cfg.NewID(); id != 0 && t.leases[id] == nil {
			return id
		}
	}
}

// giveBack returns exactly what was taken. Called once per lease, by Fail or Reaped.
func (t *Table) giveBack(r *record) {
	for _, cpus := range r.CPUs {
		t.free = append(t.free, cpus...)
	}
	slices.Sort(t.free)
	t.memory += uint64(r.Terms.Workers) * r.Terms.MemoryPerWorker
	t.holding--
}

// Grant turns a requested lease into a granted one; its time runs from now on.
func (t *Table) Grant(id ID) (Lease, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Requested)
	if err != nil {
		return Lease{}, err
	}
	now := t.cfg.Now()
	r.State = Granted
	r.Expires = now.Add(r.Terms.Duration)
	r.comeBy = now.Add(t.cfg.FirstUse)
	close(r.settled)
	t.wake()
	return r.copy(), nil
}

// Fail forgets a requested lease: its workers did not start, and none of them is left. Those who wait for it get cause.
func (t *Table) Fail(id ID, cause error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Requested)
	if err != nil {
		return err
	}
	t.giveBack(r)
	delete(t.leases, id)
	delete(t.requests, r.RequestID)
	r.failure = cause
	close(r.settled)
	return nil
}

// Wait blocks until a lease that Request returned is no longer Requested and returns what became of it, or the
// cause that Fail was given, or ctx's.
func (t *Table) Wait(ctx context.Context, l Lease) (Lease, error) {
	r := l.rec
	select {
	case <-r.settled:
	case <-ctx.Done():
		return Lease{}, context.Cause(ctx)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case r.failure != nil:
		return Lease{}, r.failure
	case r.State.Ended():
		return Lease{}, r.ended()
	}
	return r.copy(), nil
}

// Open notes that the holder is here (its event stream is open) and returns the number of this presence for Away.
// A newer presence takes the place of an older one.
func (t *Table) Open(id ID) (presence uint64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Granted, Active)
	if err != nil {
		return 0, err
	}
	r.State = Active
	r.presence++
	r.present, r.comeBy = true, time.Time{}
	return r.presence, nil
}

// Away notes that a presence is over; the holder has Config.Return to come back. It does nothing when a newer
// presence has begun or the lease has ended.
func (t *Table) Away(id ID, presence uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil || r.State != Active || !r.present || r.presence != presence {
		return
	}
	r.present = false
	r.comeBy = t.cfg.Now().Add(t.cfg.Return)
	t.wake()
}

// End ends a granted or active lease as Released, Expired or Revoked. Exactly one call succeeds for a lease: its
// caller stops the workers and then calls Reaped. Its resources stay taken until then.
func (t *Table) End(id ID, how State, reason string) (Lease, error) {
	if !how.Ended() {
		return Lease{}, fmt.Errorf("lease %d: end as %v: %w", id, how, ErrState)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Granted, Active)
	if err != nil {
		return Lease{}, err
	}
	r.State, r.Reason = how, reason
	r.present, r.comeBy = false, time.Time{}
	return r.copy(), nil
}

// Reaped gives back the resources of an ended lease whose last worker is gone. A second call is ErrState and
// changes nothing.
func (t *Table) Reaped(id ID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil {
		return unknown(id)
	}
	if !r.State.Ended() || r.reaped {
		return fmt.Errorf("lease %d is %v, resources given back: %t: %w", id, r.State, r.reaped, ErrState)
	}
	r.reaped = true
	t.giveBack(r)
	t.past = append(t.past, id)
	if len(t.past) > t.cfg.Remember {
		old := t.leases[t.past[0]]
		delete(t.leases, old.ID)
		delete(t.requests, old.RequestID)
		t.past = slices.Delete(t.past, 0, 1)
	}
	return nil
}

// find returns a lease that is in one of the states.
func (t *Table) find(id ID, states ...State) (*record, error) {
	r := t.leases[id]
	switch {
	case r == nil:
		return nil, unknown(id)
	case slices.Contains(states, r.State):
		return r, nil
	case r.State.Ended():
		return nil, r.ended()
	}
	return nil, fmt.Errorf("lease %d is %v: %w", id, r.State, ErrState)
}

// Get returns a lease, ended ones too as long as they are remembered.
func (t *Table) Get(id ID) (Lease, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil {
		return Lease{}, unknown(id)
	}
	return r.copy(), nil
}

// Drain makes every further new request ErrDraining. Leases that exist stay.
func (t *Table) Drain() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.draining = true
}

// Capacity returns what there is and what is free.
func (t *Table) Capacity() Capacity {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Capacity{Cores: len(t.cfg.CPUs), FreeCores: len(t.free),
		Memory: t.cfg.Memory, FreeMemory: t.memory, Leases: t.holding}
}

// Due is a lease whose deadline has passed, and how its owner shall End it.
type Due struct {
	ID     ID
	State  State
	Reason string
}

// Due returns the leases whose deadline has passed and the next deadline after them (zero: none). It ends
// nothing: the owner does, and may find that somebody else was faster.
func (t *Table) Due() (due []Due, next time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Now()
	for id, r := range t.leases {
		at, how, reason := r.deadline()
		switch {
		case at.IsZero():
		case !at.After(now):
			due = append(due, Due{ID: id, State: how, Reason: reason})
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	return due, next
}

// Changed receives when a deadline may have become earlier than the last Due said. One owner reads it.
func (t *Table) Changed() <-chan struct{} { return t.changed }

func (t *Table) wake() {
	select {
	case t.changed <- struct{}{}:
	default: // one notice is enough
	}
}
