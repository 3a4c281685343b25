package executor

import (
	"log/slog"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// restingWorker counts how often its processor time is read.
type restingWorker struct {
	*countingWorker
	cpu   time.Duration
	reads int
}

func (w *restingWorker) CPUTime() (time.Duration, bool) {
	w.reads++
	return w.cpu, true
}

// The processor time of a worker that does nothing is read rarely, even if it wakes now and then. That of a worker that executes functions, and of one that
// has computed without, is read each time. Nothing is missing from the bill.
func TestWorkerAtRest(t *testing.T) {
	clock := time.Unix(1000, 0)
	a := newAccounts("n", [16]byte{9}, func() time.Time { return clock }, nil, slog.New(slog.DiscardHandler))
	m := newLedgerStub()
	w := &restingWorker{countingWorker: newCountingWorker()}
	a.begin(terms("ann", 1, 1), []Worker{w}, false, clock)
	step := func(name string, after time.Duration, read bool) {
		t.Helper()
		clock = clock.Add(after)
		before := w.reads
		a.step(t.Context(), m)
		if got := w.reads > before; got != read {
			t.Errorf("%s: read %v, want %v", name, got, read)
		}
	}
	step("first", time.Second, true)
	step("second", time.Second, true)
	step("at rest", time.Second, false)
	w.cpu = time.Millisecond
	step("after restEvery", restEvery, true)
	step("at rest although it has woken", time.Second, false)
	w.counters = zygote.Counters{Calls: 1}
	step("after a call", time.Second, true)
	step("at rest again", time.Second, false)
	w.function = "f"
	a.sample()
	w.cpu = 5 * time.Second
	step("during a call", time.Second, true)
	w.function = ""
	w.cpu = 6 * time.Second
	step("after more processor time", time.Second, true)
	step("after the same processor time", time.Second, true)
	w.cpu = 7 * time.Second // a thread that a call has left behind
	step("at rest once more", restEvery-time.Second, false)
	step("after restEvery again", time.Second, true)
	step("for as long as it uses any", time.Second, true)
	w.cpu = 8 * time.Second
	a.end(7)
	a.step(t.Context(), m)
	if u := m.use[accounting.Key{Incarnation: [16]byte{9}, Lease: 7}]; u[accounting.ExecMicros] != 8e6 {
		t.Errorf("%d us charged, want 8 s", u[accounting.ExecMicros])
	}
}

// Of many leases, only some are checked at once, each as often as the others, and the sum is right.
func TestSamplesOfManyLeases(t *testing.T) {
	const leases = 4 * sampleAtOnce
	clock := time.Unix(1000, 0)
	a := newAccounts("n", [16]byte{9}, func() time.Time { return clock }, nil, slog.New(slog.DiscardHandler))
	busy := newCountingWorker()
	busy.function = "f"
	for i := range leases {
		l := terms("ann", 1, 1)
		l.ID = lease.ID(i + 1)
		a.begin(l, []Worker{busy}, false, clock)
	}
	a.measure()
	ticks := 4 * a.turns
	if a.turns < 4 {
		t.Fatalf("each of %d leases is checked in one of %d turns", leases, a.turns)
	}
	for range ticks {
		clock = clock.Add(sampleEvery)
		a.sample()
	}
	for id, acc := range a.leases {
		if n := acc.workers[0].samples; n != ticks/a.turns {
			t.Fatalf("lease %d was checked %d times, want %d", id, n, ticks/a.turns)
		}
	}
	if got, want := a.callTime(), leases*sampleEvery*time.Duration(ticks); got != want {
		t.Errorf("%v in functions, want %v", got, want)
	}
}
