package executor

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// ledgerStub is a manager that takes accounts by message, as a ledger would: the larger sums count.
type ledgerStub struct {
	control.ManagerClient
	mu   sync.Mutex
	fail error
	use  map[accounting.Key]accounting.Use
	last map[accounting.Key]*control.AccountEntry
}

func (l *ledgerStub) Settle(_ context.Context, req *control.SettleRequest, _ ...grpc.CallOption) (*control.SettleReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		return nil, l.fail
	}
	for _, e := range req.GetEntries() {
		if e.GetTenant() == "thief" {
			return nil, control.Errorf(control.ClassInvalid, "not yours")
		}
	}
	for _, e := range req.GetEntries() {
		k := accounting.Key{Lease: e.GetLease(), Part: e.GetPart()}
		copy(k.Incarnation[:], e.GetIncarnation())
		var u accounting.Use
		copy(u[:], e.GetUse())
		l.use[k], l.last[k] = l.use[k].Max(u), e
	}
	return &control.SettleReply{}, nil
}

func newLedgerStub() *ledgerStub {
	return &ledgerStub{use: map[accounting.Key]accounting.Use{}, last: map[accounting.Key]*control.AccountEntry{}}
}

// countingWorker is this process in the place of a worker: its processor time is real.
type countingWorker struct {
	*fakeWorker
	counters zygote.Counters
	function string
}

func (w *countingWorker) CPUTime() (time.Duration, bool) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano()), err == nil
}
func (w *countingWorker) Counters() zygote.Counters { return w.counters }
func (w *countingWorker) Running() string           { return w.function }

func newCountingWorker() *countingWorker {
	return &countingWorker{fakeWorker: &fakeWorker{done: make(chan struct{})}}
}

// burn uses this much processor time.
func burn(t *testing.T, d time.Duration) {
	t.Helper()
	w := newCountingWorker()
	start, ok := w.CPUTime()
	if !ok {
		t.Fatal("this process has no clock")
	}
	for now := start; now < start+d; now, _ = w.CPUTime() {
	}
}

func terms(tenant string, workers, cores int) lease.Lease {
	return lease.Lease{ID: 7, Terms: lease.Terms{Tenant: tenant, Workers: workers, CoresPerWorker: cores, MemoryPerWorker: 1 << 30}}
}

func TestAccountsOfALease(t *testing.T) {
	clock := time.Unix(1000, 0)
	a := newAccounts("n", [16]byte{9}, func() time.Time { return clock }, nil, slog.New(slog.DiscardHandler))
	m := newLedgerStub()
	w, v := newCountingWorker(), newCountingWorker()
	a.begin(terms("ann", 2, 3), []Worker{w, v}, true, clock)
	key := accounting.Key{Incarnation: [16]byte{9}, Lease: 7}
	a.lookAtAll() // so that the processor time that this process has used before does not count
	base := a.leases[7].meter.Use(clock)

	clock = clock.Add(time.Second)
	w.counters, w.function = zygote.Counters{Calls: 3, BytesIn: 10, BytesOut: 20, Failed: 1}, "f"
	for range 4 {
		a.sample()
	}
	if got := a.callTime(); got != time.Second {
		t.Errorf("%v in functions, want the second of the one worker that runs one", got)
	}
	burn(t, 20*time.Millisecond)
	a.step(t.Context(), m)
	u := m.use[key].Since(base)
	if u[accounting.CoreMicros] != 6e6 || u[accounting.MemoryMiBMillis] != 2048*1000 || u[accounting.Calls] != 3 || u[accounting.BytesIn] != 10 ||
		u[accounting.BytesOut] != 20 || u[accounting.Failures] != 1 {
		t.Errorf("%v", u)
	}
	// Both workers are this process: what one computed in functions the other polled.
	exec, hot := u[accounting.ExecMicros], u[accounting.HotMicros]
	if exec < 20_000 || hot < 20_000 || max(exec, hot) > 2*min(exec, hot) {
		t.Errorf("%d us in functions, %d us polling", exec, hot)
	}
	// The manager is away: the charge is kept until it answers again.
	m.fail = errors.New("away")
	clock = clock.Add(time.Second)
	a.seat(7, 0, newCountingWorker())
	a.end(7)
	a.end(7)
	a.end(8)
	a.step(t.Context(), m)
	clock = clock.Add(time.Hour)
	if len(a.owed) != 1 {
		t.Fatalf("%d leases are owed", len(a.owed))
	}
	m.fail = nil
	a.step(t.Context(), m)
	if u := m.use[key].Since(base); u[accounting.CoreMicros] != 12e6 || u[accounting.Calls] != 3 || len(a.owed) != 0 {
		t.Errorf("%v, %d owed", u, len(a.owed))
	}
	if e := m.last[key]; !e.GetFinal() || e.GetTenant() != "ann" || e.GetNode() != "n" || e.GetAsOfNs() != 1002e9 || e.GetBeganNs() != 1000e9 {
		t.Errorf("%v", e)
	}
	before := maps.Clone(m.last)
	a.step(t.Context(), m)
	if len(m.last) != len(before) {
		t.Error("something was settled twice")
	}
	var none *accounts // an executor without a manager
	none.begin(terms("x", 1, 1), nil, true, clock)
	none.seat(1, 0, nil)
	none.last(1)
	none.end(1)
	none.join(nil)
	none.detach()
	none.finish(t.Context(), nil)
	if none.callTime() != 0 {
		t.Error("calls of no lease")
	}
}

// The time in functions is estimated from samples, whatever their interval. A time for which the executor itself was stopped counts as at most sampleMost.
func TestCallTime(t *testing.T) {
	clock := time.Unix(1000, 0)
	a := newAccounts("n", [16]byte{9}, func() time.Time { return clock }, nil, slog.New(slog.DiscardHandler))
	w, v := newCountingWorker(), newCountingWorker()
	a.begin(terms("ann", 2, 1), []Worker{w, v}, true, clock)
	for _, c := range []struct {
		name  string
		after time.Duration
		busy  int // workers in functions
		more  time.Duration
	}{
		{"idle", sampleEvery, 0, 0},
		{"one", sampleEvery, 1, sampleEvery},
		{"both", sampleEvery, 2, 2 * sampleEvery},
		{"a late sample", 5 * sampleEvery, 2, 10 * sampleEvery},
		{"after a stop", time.Hour, 1, sampleMost},
		{"a clock that went back", -time.Hour, 2, 0},
		{"and on", sampleEvery, 1, sampleEvery},
	} {
		before := a.callTime()
		clock = clock.Add(c.after)
		w.function, v.function = "", ""
		if c.busy > 0 {
			w.function = "f"
		}
		if c.busy > 1 {
			v.function = "f"
		}
		a.sample()
		if got := a.callTime() - before; got != c.more {
			t.Errorf("%s: %v, want %v", c.name, got, c.more)
		}
	}
}

// The split of a worker's processor time.
func TestHotTime(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name            string
		polls           bool
		samples, inside uint64
		used, wall, hot time.Duration
		called          bool
	}{
		{"warm", false, 10, 0, 5 * ms, 100 * ms, 0, true},
		{"hot and idle", true, 10, 0, 100 * ms, 100 * ms, 100 * ms, false},
		{"hot and busy", true, 10, 10, 100 * ms, 100 * ms, 0, true},
		{"hot, half of the time busy", true, 10, 5, 100 * ms, 100 * ms, 50 * ms, true},
		{"four threads in functions", true, 10, 5, 250 * ms, 100 * ms, 50 * ms, true},
		{"adaptive, mostly blocked", true, 10, 0, 8 * ms, 100 * ms, 8 * ms, false},
		{"adaptive, computing when it is awake", true, 10, 1, 8 * ms, 100 * ms, 0, true},
		{"no look, no call", true, 0, 0, 8 * ms, 10 * ms, 8 * ms, false},
		{"no look, a call", true, 0, 0, 8 * ms, 10 * ms, 0, true},
		{"a clock that went back", true, 10, 5, 8 * ms, -time.Hour, 0, true},
	} {
		w := &metered{polls: c.polls, samples: c.samples, inside: c.inside}
		if got := w.hot(c.used, c.wall, c.called); got != c.hot {
			t.Errorf("%s: %v polling, want %v", c.name, got, c.hot)
		}
	}
}

func TestAccountsThatAreRefused(t *testing.T) {
	log := &testkit.Buffer{}
	a := newAccounts("n", [16]byte{9}, time.Now, nil, slog.New(slog.NewTextHandler(log, nil)))
	m := newLedgerStub()
	for i, tenant := range []string{"ann", "thief", "", strings.Repeat("x", 300)} {
		l := terms(tenant, 1, 1)
		l.ID = lease.ID(i + 1)
		a.begin(l, []Worker{newCountingWorker()}, true, time.Now())
		a.end(l.ID)
	}
	a.step(t.Context(), m)
	if len(a.owed) != 0 || len(m.last) != 3 || strings.Count(log.String(), "refused the charges") != 1 {
		t.Errorf("%d owed, %d settled\n%s", len(a.owed), len(m.last), log.String())
	}
}

// The next executor settles the charges of a killed one, once. Use after the last charge is not charged.
// docs/operations.md states that bound.
func TestJournalOfAnotherLife(t *testing.T) {
	dir := t.TempDir()
	open := func() *accounts {
		t.Helper()
		j, err := accounting.OpenJournal(dir, "n")
		if err != nil {
			t.Fatal(err)
		}
		return newAccounts("n", [16]byte{byte(len(dir)), 1}, time.Now, j, slog.New(slog.DiscardHandler))
	}
	a := open()
	w := newCountingWorker()
	a.begin(terms("ann", 1, 1), []Worker{w}, true, time.Now().Add(-time.Second))
	m := newLedgerStub()
	m.fail = errors.New("away")
	w.counters.Calls = 1000
	a.step(t.Context(), m)
	w.counters.Calls = 1007
	if err := a.journal.Close(); err != nil { // as the kernel does with a killed one
		t.Fatal(err)
	}
	b := open()
	if len(b.owed) != 1 {
		t.Fatalf("%d leases in the journal", len(b.owed))
	}
	b.step(t.Context(), m)
	m.fail = nil
	b.finish(t.Context(), m)
	if len(m.last) != 1 || len(b.owed) != 0 {
		t.Errorf("%d settled, %d owed", len(m.last), len(b.owed))
	}
	for k, e := range m.last {
		if !e.GetFinal() || m.use[k][accounting.CoreMicros] < 1e6 || m.use[k][accounting.Calls] != 1000 {
			t.Errorf("%v %v", k, e)
		}
	}
	if j, err := (rights{}).openJournal(&config.Executor{Manager: "x"}, "n", slog.New(slog.DiscardHandler)); j != nil || err != nil {
		t.Errorf("%v %v", j, err)
	}
}

// Leases of the executor are measured from grant to release, replaced workers included.
func TestLeasesAreMeasured(t *testing.T) {
	n := newNode(t)
	m := newLedgerStub()
	n.e.accounts = newAccounts("node", n.e.incarnation, time.Now, nil, slog.New(slog.DiscardHandler))
	l := n.lease(2)
	w := n.z.alive()[0]
	w.Kill()
	<-w.done
	if _, err := n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), Worker: 0, ClientBlob: n.request(1).ClientBlobs[0]}); err != nil {
		t.Fatal(err)
	}
	n.e.accounts.step(t.Context(), m)
	n.release(l.GetLeaseId())
	n.e.accounts.step(t.Context(), m)
	if len(m.last) != 1 {
		t.Fatalf("%d leases", len(m.last))
	}
	for k, e := range m.last {
		if k.Lease != l.GetLeaseId() || k.Incarnation != n.e.incarnation || e.GetTenant() != "alice" || !e.GetFinal() || m.use[k][accounting.CoreMicros] == 0 {
			t.Errorf("%v %v", k, e)
		}
	}
	if len(n.e.accounts.leases) != 0 {
		t.Errorf("%d leases are measured after their end", len(n.e.accounts.leases))
	}
}

// The resource manager accepts a message of charges with any names.
func TestSettlementFits(t *testing.T) {
	most := &control.AccountEntry{Incarnation: make([]byte, 16), Lease: math.MaxUint64, Part: math.MaxUint32, Tenant: strings.Repeat("t", maxTenant),
		Node: strings.Repeat("n", 255), BeganNs: math.MaxInt64, AsOfNs: math.MaxInt64, Final: true, Use: slices.Repeat([]uint64{math.MaxUint64}, 8)}
	if n := proto.Size(&control.SettleRequest{Entries: slices.Repeat([]*control.AccountEntry{most}, messageMost)}); n > control.MaxRequest {
		t.Errorf("%d entries take %d bytes, more than %d", messageMost, n, control.MaxRequest)
	}
}

// cellManager is a manager with cells for which it never writes a receipt, like a ledger that refuses their content. It
// refuses messages of leases below 100.
type cellManager struct {
	*ledgerStub
	t   *testing.T
	dev *dataplane.Device
}

func (m *cellManager) Settle(ctx context.Context, req *control.SettleRequest, opts ...grpc.CallOption) (*control.SettleReply, error) {
	for _, e := range req.GetEntries() {
		if e.GetLease() < 100 {
			return nil, control.Errorf(control.ClassInvalid, "lease %d is older than what the ledger keeps", e.GetLease())
		}
	}
	return m.ledgerStub.Settle(ctx, req, opts...)
}

func (m *cellManager) AttachExecutor(ctx context.Context, req *control.AttachExecutorRequest, _ ...grpc.CallOption) (*control.AttachExecutorReply, error) {
	domain, err := m.dev.NewDomain()
	if err != nil {
		return nil, err
	}
	m.t.Cleanup(domain.Close)
	reply := &control.AttachExecutorReply{}
	var regions []*dataplane.Memory
	for _, r := range []struct {
		size uint64
		ref  **control.MemoryRef
	}{{board.LineSize, &reply.Line}, {4 * accounting.CellSize, &reply.Cells}} {
		mem, err := domain.Alloc(r.size, dataplane.RemoteRead|dataplane.RemoteWrite|dataplane.RemoteAtomic)
		if err != nil {
			return nil, err
		}
		m.t.Cleanup(mem.Free)
		ref := mem.Ref()
		*r.ref = &control.MemoryRef{Addr: ref.Addr, Key: ref.Key, Size: ref.Size}
		regions = append(regions, mem)
	}
	conn, err := domain.NewConn(regions...)
	if err != nil {
		return nil, err
	}
	m.t.Cleanup(conn.Close)
	if reply.Blob, err = conn.Blob(); err == nil {
		err = conn.Connect(ctx, req.GetBlob())
	}
	return reply, err
}

// Charges of an earlier executor that the ledger refuses, because it has pruned their leases, are given up, and do not
// occupy cells of current leases.
func TestJournalAfterAPrune(t *testing.T) {
	journal, err := accounting.OpenJournal(t.TempDir(), "n")
	if err != nil {
		t.Fatal(err)
	}
	defer journal.Close()
	for n := range uint64(6) {
		if err := journal.Put(accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{1}, Lease: 1 + n}, Tenant: "ann",
			Began: time.Unix(1e9, 0), AsOf: time.Unix(1e9, 0), Use: accounting.Use{1}}); err != nil {
			t.Fatal(err)
		}
	}
	m := &cellManager{ledgerStub: newLedgerStub(), t: t}
	if m.dev, err = dataplane.Open(dataplane.SHM, dataplane.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.dev.Close)
	a := newAccounts("n", [16]byte{2}, time.Now, journal, slog.New(slog.DiscardHandler))
	way, err := link.AttachExecutor(t.Context(), m, m.dev, 1, [16]byte{2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(way.Close)
	a.join(way)
	l := terms("bob", 1, 1)
	l.ID = 100
	a.begin(l, []Worker{newCountingWorker()}, true, time.Now().Add(-time.Second))
	a.step(t.Context(), m)
	if len(a.owed) != 1 || len(journal.Live()) != 1 {
		t.Errorf("%d charges are owed and %d in the journal, want that of the lease that there is", len(a.owed), len(journal.Live()))
	}
	for key, o := range a.owed {
		if key.Lease != 100 || o.cell < 0 {
			t.Errorf("lease %d has cell %d", key.Lease, o.cell)
		}
	}
}

// A table is charged once for each tenant, from its first lease to the end of the last one, and across a handover.
func TestTablesAreChargedOnce(t *testing.T) {
	clock := time.Unix(1000, 0)
	a := newAccounts("n", [16]byte{9}, func() time.Time { return clock }, nil, slog.New(slog.DiscardHandler))
	m := newLedgerStub()
	shared, own := &table{sum: sum{1}, size: 1 << 30}, &table{sum: sum{2}, size: 1 << 20}
	begin := func(id lease.ID, tenant string, tables ...*table) {
		l := lease.Lease{ID: id, Terms: lease.Terms{Tenant: tenant, Workers: 1, CoresPerWorker: 1}}
		a.begin(l, []Worker{newCountingWorker()}, false, clock, tables...)
	}
	second := func() { clock = clock.Add(time.Second) }
	begin(7, "ann", shared)
	begin(9, "bob", shared, own)
	second()
	begin(8, "ann", shared, shared) // by two names
	second()
	a.end(7)
	second()
	a.endTables()
	second() // between two programs
	a.mu.Lock()
	a.use(a.leases[8], []*table{shared, shared})
	a.use(a.leases[9], []*table{shared, own})
	a.mu.Unlock()
	second()
	a.end(8)
	a.end(8)
	second()
	a.end(9)
	second()
	begin(10, "ann", shared)
	second()
	a.end(10)
	a.step(t.Context(), m)
	memory := map[string]uint64{}
	for key, u := range m.use {
		memory[m.last[key].GetTenant()] += u[accounting.MemoryMiBMillis]
		if !m.last[key].GetFinal() {
			t.Errorf("account %d is not final", key.Lease)
		}
	}
	if want := uint64(1024 * (3000 + 1000 + 1000)); memory["ann"] != want {
		t.Errorf("ann pays for %d MiB ms, want %d", memory["ann"], want)
	}
	if want := uint64((1024 + 1) * (3000 + 2000)); memory["bob"] != want {
		t.Errorf("bob pays for %d MiB ms, want %d", memory["bob"], want)
	}
	if len(a.leases)+len(a.tables)+len(a.using) > 0 {
		t.Errorf("%d accounts, %d tables, %d leases with tables are left", len(a.leases), len(a.tables), len(a.using))
	}
}
