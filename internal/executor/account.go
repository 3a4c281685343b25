package executor

import (
	"log/slog"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/lease"
)

// sampleEvery is how often it is looked whether a worker is in a function. The processor time that the kernel has seen is
// split by that into execution and polling: an estimate whose sum is exact and that costs the workers nothing.
const sampleEvery = 50 * time.Millisecond

// accounts measures what leases use and brings it to the manager: into the journal first, then into cells of the manager's
// memory, or by message where there are none, and out of the journal when the ledger has it. Leases never wait for it.
type accounts struct {
	node        string
	incarnation [16]byte
	now         func() time.Time
	log         *slog.Logger
	poke        chan struct{} // capacity 1: a lease has ended

	mu      sync.Mutex
	leases  map[lease.ID]*account
	ended   []*account
	trouble map[string]bool // what the log has been told of

	// Of the goroutine that settles.
	settling sync.Mutex
	journal  *accounting.Journal // nil: sums are kept in memory only
	owed     map[accounting.Key]*owed
	way      *link.Executor // nil: by message
	cells    []*owed        // of the way, by cell; nil: free
}

// account is one lease.
type account struct {
	id      lease.ID
	tenant  string
	began   time.Time
	part    uint32
	meter   *accounting.Meter
	workers []*metered // by seat
	ended   time.Time
}

// metered is one worker.
type metered struct {
	Worker
	polls           bool          // spins for calls at all
	at              time.Time     // of the last look
	cpu, base       time.Duration // then; before this lease
	samples, inside uint64        // since then
	report          accounting.Report
}

// owed is the sums of a Key that the ledger may not have.
type owed struct {
	entry   accounting.Entry
	cell    int            // -1: none
	charged accounting.Use // what the cell has
	headed  bool           // the cell's head says that it is final
	// Left by an earlier executor. It is final and goes by message, since only the answer to one says that the ledger refuses it: a
	// cell would wait for its receipt for ever.
	earlier bool
}

func newAccounts(node string, incarnation [16]byte, now func() time.Time, journal *accounting.Journal, log *slog.Logger) *accounts {
	a := &accounts{node: node, incarnation: incarnation, now: now, log: log, poke: make(chan struct{}, 1), journal: journal,
		leases: map[lease.ID]*account{}, owed: map[accounting.Key]*owed{}, trouble: map[string]bool{}}
	if journal != nil {
		for _, e := range journal.Live() {
			e.Final = true // whoever wrote it is no more
			a.owed[e.Key] = &owed{entry: e, cell: -1, earlier: true}
		}
		if n := len(a.owed); n > 0 {
			log.Info("the journal has charges of an earlier executor; they are sent to the resource manager", "leases", n)
		}
		if n := journal.Damaged(); n > 0 {
			log.Error("records of the journal are damaged; what they said is lost unless a later one says it", "records", n)
		}
	}
	return a
}

// begin starts a lease's clock. All methods may be called on nil: nothing is counted then.
func (a *accounts) begin(l lease.Lease, workers []Worker, polls bool, began time.Time) {
	if a == nil {
		return
	}
	acc := &account{id: l.ID, tenant: tenantOf(l.Terms.Tenant), began: began, workers: make([]*metered, len(workers)),
		meter: accounting.NewMeter(len(workers), l.Terms.Workers*l.Terms.CoresPerWorker, l.Terms.MemoryPerWorker*uint64(len(workers)), began)}
	for i, w := range workers {
		m := &metered{Worker: w, polls: polls, at: began}
		if w.Steps().Cached { // an earlier lease has paid for what it did until now
			m.base, _ = w.CPUTime()
			m.cpu = m.base
		}
		acc.workers[i] = m
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leases[l.ID] = acc
}

// tenantOf is who pays for a lease that names nobody, or somebody with a longer name than an account has.
func tenantOf(name string) string {
	if name == "" {
		return "unknown"
	}
	return name[:min(len(name), accounting.MaxName)]
}

// seat says that worker i of a lease is another one now.
func (a *accounts) seat(id lease.ID, i int, w Worker) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if acc := a.leases[id]; acc != nil {
		now := a.now()
		acc.look(i, now)
		acc.meter.Replaced(i)
		acc.workers[i] = &metered{Worker: w, polls: acc.workers[i].polls, at: now}
	}
}

// last looks at the workers of a lease that is about to end, while there are any.
func (a *accounts) last(id lease.ID) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if acc := a.leases[id]; acc != nil {
		acc.lookAll(a.now())
	}
}

// end stops a lease's clock: its cores are free.
func (a *accounts) end(id lease.ID) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	acc := a.leases[id]
	if acc == nil {
		return // it never began
	}
	acc.ended = a.now()
	acc.lookAll(acc.ended) // counters outlive their process, its processor time does not
	acc.meter.End(acc.ended)
	delete(a.leases, id)
	a.ended = append(a.ended, acc)
	select {
	case a.poke <- struct{}{}:
	default:
	}
}

func (acc *account) lookAll(now time.Time) {
	for i := range acc.workers {
		acc.look(i, now)
	}
}

// look takes in what worker i has done since the last look.
func (acc *account) look(i int, now time.Time) {
	w := acc.workers[i]
	r := workerReport(w.Worker)
	if cpu, ok := w.Worker.CPUTime(); ok && cpu > w.cpu {
		hot := w.hot(cpu-w.cpu, now.Sub(w.at), r.Calls > w.report.Calls)
		w.report.Exec += cpu - w.cpu - hot
		w.report.Hot += hot
		w.cpu, w.at, w.samples, w.inside = cpu, now, 0, 0
	}
	r.Exec, r.Hot = w.report.Exec, w.report.Hot
	w.report = r
	acc.meter.Observe(i, r, w.cpu-w.base)
}

// workerReport is what a worker says that it has done, without times. User code can change it.
func workerReport(w Worker) accounting.Report {
	c := w.Counters()
	return accounting.Report{Calls: c.Calls, BytesIn: c.BytesIn, BytesOut: c.BytesOut, Failures: c.Failed}
}

// hot is how much of the processor time that was used went into polling: what is left after the time in functions, and no more
// than the time outside of them, for only one thread polls.
func (w *metered) hot(used, wall time.Duration, called bool) time.Duration {
	switch {
	case !w.polls:
		return 0
	case w.samples == 0 && called:
		return 0 // nobody looked: better the one than the other
	case w.samples == 0:
		return used
	}
	inside := time.Duration(float64(wall) * float64(w.inside) / float64(w.samples))
	return max(min(used-inside, wall-inside), 0)
}

// sample looks which workers are in a function.
func (a *accounts) sample() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, acc := range a.leases {
		for _, w := range acc.workers {
			w.samples++
			if w.Running() != "" {
				w.inside++
			}
		}
	}
}

// measure returns the sums of all leases as of now; those of ended ones are final.
func (a *accounts) measure() []accounting.Entry {
	a.mu.Lock()
	defer a.mu.Unlock()
	var entries []accounting.Entry
	now := a.now()
	take := func(acc *account, final bool) {
		e := accounting.Entry{Key: accounting.Key{Incarnation: a.incarnation, Lease: uint64(acc.id), Part: acc.part},
			Tenant: acc.tenant, Node: a.node, Began: acc.began, AsOf: now, Final: final, Use: acc.meter.Use(now)}
		if final {
			e.AsOf = acc.ended
		} else if acc.meter.Split(e.Use) {
			e.Final = true
			acc.part++
		}
		entries = append(entries, e)
	}
	for _, acc := range a.leases {
		acc.lookAll(now)
		take(acc, false)
	}
	for _, acc := range a.ended {
		take(acc, true)
	}
	a.ended = nil
	return entries
}
