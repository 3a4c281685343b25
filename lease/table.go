package lease

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Config of a table. Cores and NewID are mandatory.
type Config struct {
	Cores  []Core // that may be leased, each logical CPU once
	Memory uint64 // bytes that may be leased
	Near   []int  // NUMA nodes whose cores go first
	Share  int    // leases that may have the same core; 0: 1

	// FirstUse is how long a granted lease waits for its client. Return is how long an active lease waits for an absent client,
	// and Connected the same while workers are connected to the client's process; at least Return. 0: 10 s, 2 s, 1 minute.
	FirstUse, Return, Connected time.Duration
	// Margin is how long before the end the client stops, at most a tenth of the duration. Notice is how long before the end
	// it is notified, at most a third. 0: 500 ms and 30 s.
	Margin, Notice time.Duration
	// Keep is how long released leases are cached. 0: 1 minute.
	Keep time.Duration

	// Now is the clock. nil: time.Now.
	Now func() time.Time
	// NewID makes lease ids. They should be hard to guess and differ between incarnations of an executor, so that
	// a stale id from an earlier one names nothing. A repeated or zero id is asked for again.
	NewID func() ID
	// Remember is how many ended leases are remembered. 0: 1024.
	Remember int
	// Revoke is called before the workers of a cached lease get another use, or end. It returns false if a client has claimed them. The caller of
	// the table then calls Claim soon. Revoke is called with the table locked. nil: no workers can be claimed.
	Revoke func(ID) bool
}

// Capacity is what a table has. Cores are physical ones, times Config.Share.
type Capacity struct {
	Cores, FreeCores   int // cores of cached leases count as free
	Memory, FreeMemory uint64
	Leases             int // leases that hold resources, without cached ones
	Cached             int
	SetAside           uint64 // bytes of Memory that SetAside has taken
}

// Table keeps the leases. All methods may be called from any goroutine; only Wait blocks.
type Table struct {
	cfg     Config
	changed chan struct{} // capacity 1: a deadline may have become earlier

	mu           sync.Mutex
	cores        *cores
	memory       uint64 // free, without cachedMemory
	cachedMemory uint64
	setAside     uint64
	draining     bool
	leases       map[ID]*record
	requests     map[RequestID]*record
	past         []ID // reaped leases still remembered, oldest first
	cached       []ID // oldest first
	holding      int  // leases with resources that are not cached
}

// New makes an empty table.
func New(cfg Config) (*Table, error) {
	if cfg.NewID == nil {
		return nil, fmt.Errorf("lease table: no NewID: %w", ErrInvalid)
	}
	cores, err := newCores(cfg.Cores, cfg.Near, cmp.Or(cfg.Share, 1))
	if err != nil {
		return nil, err
	}
	cfg.FirstUse = cmp.Or(cfg.FirstUse, 10*time.Second)
	cfg.Return = cmp.Or(cfg.Return, 2*time.Second)
	cfg.Connected = cmp.Or(cfg.Connected, time.Minute)
	cfg.Margin = cmp.Or(cfg.Margin, 500*time.Millisecond)
	cfg.Notice = cmp.Or(cfg.Notice, 30*time.Second)
	cfg.Keep = cmp.Or(cfg.Keep, time.Minute)
	cfg.Remember = cmp.Or(cfg.Remember, 1024)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Revoke == nil {
		cfg.Revoke = func(ID) bool { return true }
	}
	return &Table{cfg: cfg, changed: make(chan struct{}, 1), cores: cores, memory: cfg.Memory,
		leases: map[ID]*record{}, requests: map[RequestID]*record{}}, nil
}

// Request sets resources aside for the terms and returns the lease in state Requested with first true: the
// caller reaps the workers of Lease.Evict, starts the new ones and then calls Grant or Fail. With first false the id was
// seen before: the caller calls Wait.
//
// With Terms.Spare, the lease is cached from now on. Its caller starts the workers, and calls Drop if it cannot.
//
// reuse names a cached lease whose workers the new one takes over; 0: none. The caller then resumes them and starts none.
//
// Errors: ErrInvalid (never possible here, or the id came with other terms), ErrBusy, ErrDraining, ErrNotCached, ErrEnded
// (the id's lease is over).
func (t *Table) Request(rid RequestID, terms Terms, reuse ID) (l Lease, first bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.requests[rid]; r != nil {
		switch {
		case !r.Terms.sameRequest(&terms) || r.Reuses != reuse:
			return Lease{}, false, fmt.Errorf("request id %x was used with other terms: %w", rid[:], ErrInvalid)
		case r.State.Ended():
			return Lease{}, false, r.ended()
		}
		return r.copy(), false, nil
	}
	if t.draining {
		return Lease{}, false, ErrDraining
	}
	if err := t.possible(terms); err != nil {
		return Lease{}, false, err
	}
	r := &record{settled: make(chan struct{})}
	if reuse != 0 {
		err = t.takeOver(r, &terms, reuse)
	} else {
		err = t.take(r, &terms)
	}
	if err != nil {
		return Lease{}, false, err
	}
	r.ID, r.RequestID, r.State, r.Terms = t.newID(), rid, Requested, terms
	r.CPUs = t.cores.cpus(r.shares)
	t.holding++
	t.leases[r.ID], t.requests[rid] = r, r
	if terms.Spare {
		r.State, r.Reason = Released, "its workers are spare"
		close(r.settled)
		t.cache(r)
	}
	return r.copy(), true, nil
}

// possible checks the terms against what there is. Divisions, since products could wrap.
func (t *Table) possible(terms Terms) error {
	w, c, m := terms.Workers, terms.CoresPerWorker, terms.MemoryPerWorker
	all := t.cores.total()
	switch {
	case w < 1:
		return fmt.Errorf("%d workers: want at least 1: %w", w, ErrInvalid)
	case terms.WorkersMin < 0 || terms.WorkersMin > w:
		return fmt.Errorf("at least %d of %d workers: want 1 to %d: %w", terms.WorkersMin, w, w, ErrInvalid)
	case c < 1:
		return fmt.Errorf("%d cores per worker: want at least 1: %w", c, ErrInvalid)
	case w > all/c || c > len(t.cores.list):
		return fmt.Errorf("%d workers with %d cores each: the node lends %d cores: %w", w, c, all, ErrInvalid)
	case m > t.cfg.Memory/uint64(w):
		return fmt.Errorf("%d workers with %d bytes each: the node lends %d bytes: %w", w, m, t.cfg.Memory, ErrInvalid)
	case terms.Duration <= 0:
		return fmt.Errorf("duration %v: want more than 0: %w", terms.Duration, ErrInvalid)
	case terms.CallLimit < 0:
		return fmt.Errorf("time limit per call %v: want 0 or more: %w", terms.CallLimit, ErrInvalid)
	case terms.Wait > Warm:
		return fmt.Errorf("waiting policy %d is not one of %d to %d: %w", terms.Wait, Adaptive, Warm, ErrInvalid)
	}
	return nil
}

// most returns how many workers of these terms the free cores and memory suffice for at most, with those of cached leases.
func (t *Table) most(terms *Terms) int {
	n := min(terms.Workers, t.cores.free()/terms.CoresPerWorker)
	if m := terms.MemoryPerWorker; m > 0 {
		n = int(min(uint64(n), (t.memory+t.cachedMemory)/m))
	}
	return n
}

// take finds cores and memory for the terms: for all workers, or for as many as possible, but not fewer than the terms permit.
func (t *Table) take(r *record, terms *Terms) error {
	if terms.Spare && !t.ample(terms) {
		return fmt.Errorf("spare workers want %d cores and %d bytes, and as much again free beside them: %w", terms.Workers*terms.CoresPerWorker,
			uint64(terms.Workers)*terms.MemoryPerWorker, ErrBusy)
	}
	for n := max(t.most(terms), terms.least()); ; n-- {
		shares, evict, err := t.takeSome(terms, n)
		if err == nil {
			r.shares = append(shares, make([][]int, terms.Workers-n)...)
			r.memory, r.Evict = uint64(n)*terms.MemoryPerWorker, evict
			return nil
		}
		if n == terms.least() {
			return err
		}
	}
}

// ample reports whether twice the cores and memory of the terms are free without the eviction of cached leases.
func (t *Table) ample(terms *Terms) bool {
	cores := 0
	for i := range t.cores.list {
		cores += t.cores.available(i)
	}
	need := uint64(terms.Workers) * terms.MemoryPerWorker
	return cores >= 2*terms.Workers*terms.CoresPerWorker && t.memory >= need && t.memory-need >= need
}

// takeSome takes the cores and the memory of n workers. When there are not enough free ones, it evicts cached leases, the oldest first,
// and returns them. It passes over leases whose workers a client has claimed.
func (t *Table) takeSome(terms *Terms, n int) (shares [][]int, evict []ID, err error) {
	need := uint64(n) * terms.MemoryPerWorker
	candidates := slices.Clone(t.cached)
	if terms.Spare {
		candidates = nil
	}
	for {
		shares, evict = t.fit(terms, n, candidates)
		if shares == nil {
			return nil, nil, t.busy(terms, n)
		}
		claimed := slices.IndexFunc(evict, func(id ID) bool { return !t.cfg.Revoke(id) })
		if claimed < 0 {
			break
		}
		candidates = slices.Delete(candidates, claimed, claimed+1) // evict is a part of candidates, from the first one on
	}
	for _, id := range evict {
		t.drop(t.leases[id])
	}
	t.charge(shares, need, evict)
	return shares, evict, nil
}

// fit places n workers on free cores, and on those of as few candidates as needed, from the first one on. It returns nil if all of these cores are
// not enough. It changes nothing.
func (t *Table) fit(terms *Terms, n int, candidates []ID) (shares [][]int, evict []ID) {
	have := make([]int, len(t.cores.list))
	for i := range have {
		have[i] = t.cores.available(i)
	}
	memory, need := t.memory, uint64(n)*terms.MemoryPerWorker
	for victims := 0; ; victims++ {
		if memory >= need {
			if shares = t.cores.place(n, terms.CoresPerWorker, have); shares != nil {
				return shares, slices.Clone(candidates[:victims])
			}
		}
		if victims == len(candidates) {
			return nil, nil
		}
		v := t.leases[candidates[victims]]
		count(have, v.shares, 1)
		for i, away := range t.cores.away {
			if away {
				have[i] = 0
			}
		}
		memory += v.memory
	}
}

// charge books what a lease takes: from what is free, and where that is not enough from the victims, which keep the rest until they are
// reaped.
func (t *Table) charge(shares [][]int, need uint64, victims []ID) {
	for _, s := range shares {
		for _, i := range s {
			if t.cores.available(i) > 0 {
				t.cores.used[i]++
				continue
			}
			for _, id := range victims {
				if t.leases[id].yield(i) {
					break
				}
			}
		}
	}
	from := min(need, t.memory)
	t.memory -= from
	for _, id := range victims {
		v := t.leases[id]
		need -= from
		from = min(need, v.memory)
		v.memory -= from
	}
}

// yield gives up one share of core i.
func (r *record) yield(i int) bool {
	for w, s := range r.shares {
		if at := slices.Index(s, i); at >= 0 {
			r.shares[w] = slices.Delete(slices.Clone(s), at, at+1)
			return true
		}
	}
	return false
}

// busy returns the error for n workers of these terms.
func (t *Table) busy(terms *Terms, n int) error {
	free, memory := t.cores.free(), t.memory+t.cachedMemory
	if need := n * terms.CoresPerWorker; need > free {
		return fmt.Errorf("%d cores wanted, %d of %d are free: %w", need, free, t.cores.total(), ErrBusy)
	}
	if need := uint64(n) * terms.MemoryPerWorker; need > memory {
		return fmt.Errorf("%d bytes wanted (option memory), %d of %d are free: %w", need, memory, t.cfg.Memory, ErrBusy)
	}
	return fmt.Errorf("%d different cores are wanted for each of %d workers, but too few different cores are free: %w",
		terms.CoresPerWorker, n, ErrBusy)
}

func (t *Table) newID() ID {
	for {
		if id := t.cfg.NewID(); id != 0 && t.leases[id] == nil {
			return id
		}
	}
}

// releaseResources returns exactly what a lease holds to the table. Called once per lease, by Fail or Reaped.
func (t *Table) releaseResources(r *record) {
	count(t.cores.used, r.shares, -1)
	t.memory += r.memory
	r.shares, r.memory = nil, 0
	t.holding--
}

// SetAside takes bytes away from what leases may have, for data that several leases share. ErrBusy: so much is not free; the memory of cached
// leases is not.
func (t *Table) SetAside(bytes uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if bytes > t.memory {
		return fmt.Errorf("%d bytes wanted, %d of %d are free: %w", bytes, t.memory, t.cfg.Memory, ErrBusy)
	}
	t.memory -= bytes
	t.setAside += bytes
	return nil
}

// GiveBack returns bytes that SetAside has taken.
func (t *Table) GiveBack(bytes uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.memory += bytes
	t.setAside -= bytes
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
	r.State, r.Granted = Granted, now
	t.setEnd(r, now, r.Terms.Duration)
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
	t.releaseResources(r)
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

// List returns the leases that hold resources, without cached ones, the oldest grant first.
func (t *Table) List() []Lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []Lease
	for _, r := range t.leases {
		if !r.reaped && r.cached.IsZero() {
			list = append(list, r.copy())
		}
	}
	slices.SortFunc(list, func(a, b Lease) int { return cmp.Or(a.Granted.Compare(b.Granted), cmp.Compare(a.ID, b.ID)) })
	return list
}

// Withhold keeps the core that has a logical CPU from all further leases, or lends it again. Leases that have the core keep it until they
// end. It returns the ids of these leases, those that are cached too. A CPU that is not lent is an error.
func (t *Table) Withhold(cpu int, on bool) ([]ID, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.cores.has(cpu)
	if i < 0 {
		return nil, fmt.Errorf("lease table: CPU %d is not lent: %w", cpu, ErrInvalid)
	}
	t.cores.away[i] = on
	var ids []ID
	for id, r := range t.leases {
		if !r.reaped && slices.ContainsFunc(r.shares, func(s []int) bool { return slices.Contains(s, i) }) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// Capacity returns the table's resources, in total and free.
func (t *Table) Capacity() Capacity {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Capacity{Cores: t.cores.total(), FreeCores: t.cores.free(), Memory: t.cfg.Memory,
		FreeMemory: t.memory + t.cachedMemory, Leases: t.holding, Cached: len(t.cached), SetAside: t.setAside}
}

// Changed returns a channel that receives a value when a deadline may be earlier than the last Due said. Only the table's owner reads it.
func (t *Table) Changed() <-chan struct{} { return t.changed }

func (t *Table) wake() {
	select {
	case t.changed <- struct{}{}:
	default: // one notice is enough
	}
}
