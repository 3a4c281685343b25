package executor

import (
	"log/slog"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// sampleEvery is how often each worker is checked for running a function. These samples divide the processor time that
// the kernel reports into execution and polling. The sum is exact, the division an estimate, and workers pay nothing
// for it.
const sampleEvery = 50 * time.Millisecond

// sampleMost is the longest time for which one sample counts. A sample after this process was stopped would count for longer.
const sampleMost = time.Second

// sampleAtOnce is about how many workers are checked at a time. If there are more, each lease is checked less often, and each of its samples counts for a longer
// time. So the samples of a thousand workers use little processor time.
const sampleAtOnce = 200

// restEvery is the time between two readings of the processor time of a worker at rest. A worker is at rest if it has executed no function since the last reading, and
// had used less than 1/restShare of a core before. A reading takes some microseconds. The last measurement of a lease reads all workers, so its sum is exact.
const (
	restEvery = 10 * time.Second
	restShare = 1000
)

// accounts measures what leases use and reports it to the resource manager: first to the journal, then to cells in the
// manager's memory, or by message if there are none. The journal entry is dropped when the ledger has it. Leases never
// wait for any of this.
type accounts struct {
	node        string
	incarnation [16]byte
	now         func() time.Time
	log         *slog.Logger
	poke        chan struct{} // capacity 1: a lease has ended

	mu      sync.Mutex
	leases  map[lease.ID]*account
	tables  map[tableKey]*tableUse
	using   map[lease.ID][]tableKey // tables of leases
	ended   []*account
	trouble map[string]bool // errors that were logged
	total   accounting.Use  // of all leases, as measured last
	sampled time.Time       // when workers were last checked for running a function
	turn    uint64          // counts these checks
	turns   uint64          // each lease is checked once in so many checks
	running time.Duration   // time that all workers spent in functions, by these samples

	// Used only by the settling goroutine.
	settling sync.Mutex
	journal  *accounting.Journal // nil: sums are kept in memory only
	owed     map[accounting.Key]*owed
	way      *link.Executor // connection to the manager's memory; nil: by message
	cells    []*owed        // by cell of that connection; nil: free
}

// tableKey is a table that leases of a tenant use.
type tableKey struct {
	tenant string
	sum    sum
}

// tableUse is its charge: an account of its own, from the first lease that uses it to the end of the last one.
type tableUse struct {
	id     lease.ID // of the account
	leases int      // and 1 if it is a published seed
}

// account is one lease, or a table.
type account struct {
	id      lease.ID
	tenant  string
	began   time.Time
	part    uint32
	meter   *accounting.Meter
	workers []*metered // by seat; nil for a worker that has not been added yet
	ended   time.Time
	counted accounting.Use // of this part, in accounts.total
}

// metered is one worker.
type metered struct {
	Worker
	polls           bool          // spins for calls
	at              time.Time     // of the last measurement that found more processor time
	cpu, base       time.Duration // processor time at that measurement; before this lease
	samples, inside uint64        // samples since then; those in a function
	report          accounting.Report
	read            time.Time // when the processor time was last read
	rests           bool      // it had used hardly any more
}

// owed has the sums of a Key that the ledger may not have yet.
type owed struct {
	entry   accounting.Entry
	cell    int            // -1: none
	charged accounting.Use // content of the cell
	headed  bool           // the cell is marked as final
	// Left by an earlier executor. It is final and is sent by message, because only a message is answered with a
	// refusal. A cell would wait for its receipt for ever.
	earlier bool
}

func newAccounts(node string, incarnation [16]byte, now func() time.Time, journal *accounting.Journal, log *slog.Logger) *accounts {
	a := &accounts{node: node, incarnation: incarnation, now: now, log: log, poke: make(chan struct{}, 1), journal: journal, sampled: now(), turns: 1,
		leases: map[lease.ID]*account{}, tables: map[tableKey]*tableUse{}, using: map[lease.ID][]tableKey{}, owed: map[accounting.Key]*owed{}, trouble: map[string]bool{}}
	if journal != nil {
		for _, e := range journal.Live() {
			e.Final = true // the executor that wrote it has ended
			a.owed[e.Key] = &owed{entry: e, cell: -1, earlier: true}
		}
		if n := len(a.owed); n > 0 {
			log.Info("sending charges that an earlier executor left in the journal to the resource manager", "leases", n)
		}
		if n := journal.Damaged(); n > 0 {
			log.Error("skipped damaged journal records; their charges are lost unless a later record covers them", "records", n)
		}
	}
	return a
}

// begin starts charging a lease. All methods may be called on a nil accounts, which counts nothing.
func (a *accounts) begin(l lease.Lease, workers []Worker, polls bool, began time.Time, tables ...*table) {
	if a == nil {
		return
	}
	acc := newAccount(l, workers, polls, began)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leases[l.ID] = acc
	a.use(acc, tables)
}

func newAccount(l lease.Lease, workers []Worker, polls bool, began time.Time) *account {
	acc := &account{id: l.ID, tenant: tenantOf(l.Terms.Tenant), began: began, workers: make([]*metered, l.Terms.Workers),
		meter: accounting.NewMeter(l.Terms.Workers, len(workers)*l.Terms.CoresPerWorker, l.Terms.MemoryPerWorker*uint64(len(workers)), began)}
	for i, w := range workers {
		m := &metered{Worker: w, polls: polls, at: began}
		if w.Steps().Cached { // an earlier lease has paid for its processor time so far
			m.base, _ = w.CPUTime()
			m.cpu = m.base
		}
		acc.workers[i] = m
	}
	return acc
}

// used is what a worker had counted for a lease, and its processor time so far, when that lease was no longer charged.
type used struct {
	counted zygote.Counters
	cpu     time.Duration
}

// succeed begins to charge a lease that claimed the workers of the lease old. The lease is charged from the time `at` of the claim on. before has
// what the workers had used when they were frozen. nil: they were still awake, so the earlier lease is still charged, and pays for the cores until
// the claim. In that case, what the workers have counted and used between the claim and now belongs to the earlier lease, so that the sum is exact.
func (a *accounts) succeed(old lease.ID, l lease.Lease, workers []Worker, before []used, polls bool, at time.Time, tables []*table) {
	var was *account
	if a != nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		was = a.leases[old]
	}
	if before == nil {
		before = usedBy(workers)
	}
	for i, w := range workers {
		if was != nil {
			was.look(i, at)
			m := was.workers[i]
			c := &before[i].counted
			c.Calls, c.Failed, c.BytesIn, c.BytesOut = m.report.Calls, m.report.Failures, m.report.BytesIn, m.report.BytesOut
			before[i].cpu = m.cpu
		}
		w.Claimed(before[i].counted)
	}
	if a == nil {
		return
	}
	acc := newAccount(l, workers, polls, at)
	for i, m := range acc.workers {
		m.base, m.cpu = before[i].cpu, before[i].cpu
	}
	a.leases[l.ID] = acc
	a.use(acc, tables)
	if was != nil {
		a.close(was, at)
	}
	a.drop(old)
}

// usedBy returns what workers have used so far.
func usedBy(workers []Worker) (list []used) {
	for _, w := range workers {
		cpu, _ := w.CPUTime()
		list = append(list, used{w.Counters(), cpu})
	}
	return list
}

// use charges the tables of a lease that no other lease of its tenant uses. The caller holds mu.
func (a *accounts) use(acc *account, tables []*table) {
	for _, t := range tables {
		a.using[acc.id] = append(a.using[acc.id], a.hold(acc.tenant, t))
	}
}

// hold charges a tenant for a table from its first use on. The caller holds mu.
func (a *accounts) hold(tenant string, t *table) tableKey {
	key := tableKey{tenant, t.sum}
	u := a.tables[key]
	if u == nil {
		u = &tableUse{id: randomID()}
		now := a.now()
		a.leases[u.id] = &account{id: u.id, tenant: tenant, began: now, meter: accounting.NewMeter(0, 0, t.size, now)}
		a.tables[key] = u
	}
	u.leases++
	return key
}

// let ends one use of a table. The caller holds mu.
func (a *accounts) let(key tableKey) {
	u := a.tables[key]
	if u == nil {
		return // endTables has ended it
	}
	if u.leases--; u.leases == 0 {
		a.stop(u.id)
		delete(a.tables, key)
	}
}

// keep charges a tenant for a seed that is published, until unkeep.
func (a *accounts) keep(tenant string, t *table) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hold(tenantOf(tenant), t)
}

func (a *accounts) unkeep(tenant string, t *table) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.let(tableKey{tenantOf(tenant), t.sum})
}

// spent charges a lease for the processor time of the process that made its seed.
func (a *accounts) spent(id lease.ID, cpu time.Duration) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if acc := a.leases[id]; acc != nil && cpu > 0 && len(acc.workers) > 0 && acc.workers[0] != nil {
		acc.workers[0].report.Exec += cpu
		acc.workers[0].base -= cpu
	}
}

// endTables stops charging tables, for a program that takes over and charges them anew.
func (a *accounts) endTables() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, u := range a.tables {
		a.stop(u.id)
		delete(a.tables, key)
	}
	clear(a.using)
}

// tenantOf returns the tenant that pays for a lease: "unknown" without a name, and the beginning of a name that is too
// long for an account.
func tenantOf(name string) string {
	if name == "" {
		return "unknown"
	}
	return name[:min(len(name), accounting.MaxName)]
}

// seat replaces worker i of a lease.
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

// add charges another worker of a lease from now on.
func (a *accounts) add(l *lease.Lease, i int, w Worker) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if acc := a.leases[l.ID]; acc != nil {
		now := a.now()
		acc.meter.Grew(l.Terms.CoresPerWorker, l.Terms.MemoryPerWorker, now)
		acc.workers[i] = &metered{Worker: w, polls: acc.workers[0].polls, at: now}
	}
}

// last measures the workers of a lease that is about to end, while they exist.
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

// end stops charging a lease, when its cores are free.
func (a *accounts) end(id lease.ID) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stop(id)
	a.drop(id)
}

// drop stops charging the tables of an ended lease that no other lease uses.
func (a *accounts) drop(id lease.ID) {
	for _, key := range a.using[id] {
		a.let(key)
	}
	delete(a.using, id)
}

// stop ends an account. The caller holds mu, as for close and drop.
func (a *accounts) stop(id lease.ID) {
	acc := a.leases[id]
	if acc == nil {
		return // it never began
	}
	now := a.now()
	acc.lookAll(now) // the counters are still there, the process and its processor time are not
	a.close(acc, now)
}

// close ends an account after its last measurement.
func (a *accounts) close(acc *account, at time.Time) {
	acc.ended = at
	acc.meter.End(at)
	delete(a.leases, acc.id)
	a.ended = append(a.ended, acc)
	select {
	case a.poke <- struct{}{}:
	default:
	}
}

func (acc *account) lookAll(now time.Time) {
	for i, w := range acc.workers {
		if w != nil {
			acc.look(i, now)
		}
	}
}

// look measures worker i since the last measurement.
func (acc *account) look(i int, now time.Time) {
	w := acc.workers[i]
	r := workerReport(w.Worker)
	cpu, ok := w.Worker.CPUTime()
	w.rests = ok && !w.read.IsZero() && restShare*(cpu-w.cpu) < max(now.Sub(w.read), 1)
	w.read = now
	if ok && cpu > w.cpu {
		hot := w.hot(cpu-w.cpu, now.Sub(w.at), r.Calls > w.report.Calls)
		w.report.Exec += cpu - w.cpu - hot
		w.report.Hot += hot
		w.cpu, w.at, w.samples, w.inside = cpu, now, 0, 0
	}
	r.Exec, r.Hot = w.report.Exec, w.report.Hot
	w.report = r
	acc.meter.Observe(i, r, w.cpu-w.base)
}

// lookAtAll measures all workers, also those at rest.
func (a *accounts) lookAtAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	for _, acc := range a.leases {
		acc.lookAll(now)
	}
}

// lookAtBusy measures the workers of a lease, without those at rest.
func (acc *account) lookAtBusy(now time.Time) {
	for i, w := range acc.workers {
		if w != nil && !w.atRest(now) {
			acc.look(i, now)
		}
	}
}

// atRest reports whether a worker's processor time need not be read yet.
func (w *metered) atRest(now time.Time) bool {
	since := now.Sub(w.read)
	return w.rests && w.inside == 0 && since >= 0 && since < restEvery && w.Counters().Calls == w.report.Calls
}

// workerReport returns a worker's counters, without times. User code can forge them.
func workerReport(w Worker) accounting.Report {
	c := w.Counters()
	return accounting.Report{Calls: c.Calls, BytesIn: c.BytesIn, BytesOut: c.BytesOut, Failures: c.Failed}
}

// hot returns how much of the used processor time was polling: the rest after the time in functions, but at most the
// time outside of functions, since only one thread polls.
func (w *metered) hot(used, wall time.Duration, called bool) time.Duration {
	switch {
	case !w.polls:
		return 0
	case w.samples == 0 && called:
		return 0 // no samples: count all of it as execution
	case w.samples == 0:
		return used
	}
	inside := time.Duration(float64(wall) * float64(w.inside) / float64(w.samples))
	return max(min(used-inside, wall-inside), 0)
}

// sample counts which workers are in a function. Each of them has run it for the time since its last sample, on average over many samples. The time
// at which a worker is checked does not depend on what it does.
func (a *accounts) sample() {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	since := min(max(now.Sub(a.sampled), 0), sampleMost)
	a.sampled = now
	a.turn++
	for id, acc := range a.leases {
		if (uint64(id)+a.turn)%a.turns != 0 {
			continue
		}
		for _, w := range acc.workers {
			if w == nil {
				continue
			}
			w.samples++
			if w.Running() != "" {
				w.inside++
				a.running += min(since*time.Duration(a.turns), sampleMost)
			}
		}
	}
}

// measure returns the current sums of all leases. Those of ended leases are final.
func (a *accounts) measure() []accounting.Entry {
	a.mu.Lock()
	defer a.mu.Unlock()
	var entries []accounting.Entry
	now := a.now()
	take := func(acc *account, final bool) {
		e := accounting.Entry{Key: accounting.Key{Incarnation: a.incarnation, Lease: uint64(acc.id), Part: acc.part},
			Tenant: acc.tenant, Node: a.node, Began: acc.began, AsOf: now, Final: final, Use: acc.meter.Use(now)}
		for i, n := range e.Use.Since(acc.counted) {
			a.total[i] += n
		}
		acc.counted = e.Use
		if final {
			e.AsOf = acc.ended
		} else if acc.meter.Split(e.Use) {
			e.Final = true
			acc.part++
			acc.counted = accounting.Use{}
		}
		entries = append(entries, e)
	}
	workers := 0
	for _, acc := range a.leases {
		acc.lookAtBusy(now)
		take(acc, false)
		workers += len(acc.workers)
	}
	a.turns = uint64(1 + min(workers/sampleAtOnce, int(sampleMost/sampleEvery)-1))
	for _, acc := range a.ended {
		take(acc, true)
	}
	a.ended = nil
	return entries
}

// sum returns a counter of all leases, as measured last.
func (a *accounts) sum(c accounting.Counter) uint64 {
	if a == nil {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.total[c]
}

// callTime returns the time that calls have spent in functions, by samples.
func (a *accounts) callTime() time.Duration {
	if a == nil {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.running
}
