package lease

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// counter makes ids 1, 2, 3...
func counter() func() ID {
	var n ID
	return func() ID { n++; return n }
}

// singles are cores of one CPU each.
func singles(cpus ...int) (list []Core) {
	for _, c := range cpus {
		list = append(list, Core{CPUs: []int{c}})
	}
	return list
}

func newTable(t *testing.T, cfg Config) *Table {
	t.Helper()
	if cfg.Cores == nil {
		cfg.Cores = singles(2, 3, 5, 7)
	}
	if cfg.Memory == 0 {
		cfg.Memory = 1000
	}
	if cfg.NewID == nil {
		cfg.NewID = counter()
	}
	tab, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

func rid(b byte) RequestID { return RequestID{0: b} }

func terms(workers int) Terms {
	return Terms{Workers: workers, CoresPerWorker: 1, MemoryPerWorker: 100, Duration: time.Minute}
}

// granted makes a granted lease.
func granted(t *testing.T, tab *Table, r byte, tm Terms) Lease {
	t.Helper()
	l, first, err := tab.Request(rid(r), tm, 0)
	if err != nil || !first {
		t.Fatalf("Request: first %t, %v", first, err)
	}
	if l, err = tab.Grant(l.ID); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestNewRefusesBadCores(t *testing.T) {
	for _, cores := range [][]Core{nil, {}, singles(1, 1), singles(-1), singles(0, 1, 0), {{}}, {{CPUs: []int{0, 2}}, {CPUs: []int{1, 2}}}} {
		if _, err := New(Config{Cores: cores, NewID: counter()}); !errors.Is(err, ErrInvalid) {
			t.Errorf("New with cores %v: %v, want ErrInvalid", cores, err)
		}
	}
	if _, err := New(Config{Cores: singles(1), NewID: counter(), Share: -1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("New with -1 leases for each core: %v, want ErrInvalid", err)
	}
}

func TestRequestChecksTerms(t *testing.T) {
	const huge = int(^uint(0) >> 1)
	for _, c := range []struct {
		name string
		t    Terms
		want error
	}{
		{"no workers", Terms{Workers: 0, CoresPerWorker: 1, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"negative workers", Terms{Workers: -1, CoresPerWorker: 1, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"no cores", Terms{Workers: 1, CoresPerWorker: 0, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"negative cores", Terms{Workers: 1, CoresPerWorker: -4, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"too many workers", Terms{Workers: 5, CoresPerWorker: 1, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"too many cores", Terms{Workers: 1, CoresPerWorker: 5, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"product above", Terms{Workers: 3, CoresPerWorker: 2, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"product wraps", Terms{Workers: huge/2 + 1, CoresPerWorker: 4, MemoryPerWorker: 1, Duration: time.Second}, ErrInvalid},
		{"too much memory", Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 1001, Duration: time.Second}, ErrInvalid},
		{"memory wraps", Terms{Workers: 4, CoresPerWorker: 1, MemoryPerWorker: 1 << 62, Duration: time.Second}, ErrInvalid},
		{"no time", Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 1, Duration: 0}, ErrInvalid},
		{"negative time", Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 1, Duration: -1}, ErrInvalid},
		{"all of it", Terms{Workers: 4, CoresPerWorker: 1, MemoryPerWorker: 250, Duration: time.Second}, nil},
		{"all cores to one", Terms{Workers: 1, CoresPerWorker: 4, MemoryPerWorker: 1000, Duration: time.Second}, nil},
	} {
		tab := newTable(t, Config{})
		before := tab.Capacity()
		_, _, err := tab.Request(rid(1), c.t, 0)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err != nil && tab.Capacity() != before {
			t.Errorf("%s: refused and still took something: %+v", c.name, tab.Capacity())
		}
	}
}

func TestAllocationIsExact(t *testing.T) {
	tab := newTable(t, Config{})
	a := granted(t, tab, 1, Terms{Workers: 1, CoresPerWorker: 2, MemoryPerWorker: 100, Duration: time.Minute})
	b := granted(t, tab, 2, terms(1))
	if !slices.Equal(a.CPUs[0], []int{2, 3}) || !slices.Equal(b.CPUs[0], []int{5}) {
		t.Fatalf("got cores %v and %v", a.CPUs, b.CPUs)
	}
	if _, _, err := tab.Request(rid(3), terms(2), 0); !errors.Is(err, ErrBusy) {
		t.Fatalf("two of one free core: %v, want ErrBusy", err)
	}
	// A caller that writes into its copy changes nothing.
	a.CPUs[0][0] = 99
	if _, err := tab.End(a.ID, Released, ""); err != nil {
		t.Fatal(err)
	}
	if c := tab.Capacity(); c.FreeCores != 1 {
		t.Fatalf("%d cores are free before the workers are reaped, want 1", c.FreeCores)
	}
	if err := tab.Reaped(a.ID); err != nil {
		t.Fatal(err)
	}
	c := granted(t, tab, 3, terms(3))
	if !slices.EqualFunc(c.CPUs, [][]int{{2}, {3}, {7}}, slices.Equal) {
		t.Fatalf("got cores %v, want those that were given back and the free one", c.CPUs)
	}
}

func TestMemoryIsCounted(t *testing.T) {
	tab := newTable(t, Config{})
	granted(t, tab, 1, Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 600, Duration: time.Minute})
	_, _, err := tab.Request(rid(2), Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 500, Duration: time.Minute}, 0)
	if !errors.Is(err, ErrBusy) {
		t.Fatalf("500 of 400 free bytes: %v, want ErrBusy", err)
	}
}

// Fault 1 of the first rFaaS: closing a lease twice inflated the capacity, and freed cores did not come back.
func TestDoubleReleaseNeverInflates(t *testing.T) {
	tab := newTable(t, Config{})
	l := granted(t, tab, 1, terms(2))
	if _, err := tab.End(l.ID, Released, ""); err != nil {
		t.Fatal(err)
	}
	var ended *EndedError
	if _, err := tab.End(l.ID, Released, ""); !errors.Is(err, ErrEnded) || !errors.As(err, &ended) || ended.State != Released {
		t.Fatalf("second end: %v, want an EndedError that says released", err)
	}
	if err := tab.Reaped(l.ID); err != nil {
		t.Fatal(err)
	}
	if err := tab.Reaped(l.ID); !errors.Is(err, ErrState) {
		t.Fatalf("second Reaped: %v, want ErrState", err)
	}
	if _, err := tab.End(l.ID, Revoked, ""); !errors.Is(err, ErrEnded) {
		t.Fatalf("end after the end: %v, want ErrEnded", err)
	}
	if c := tab.Capacity(); c.FreeCores != 4 || c.FreeMemory != 1000 || c.Leases != 0 {
		t.Fatalf("capacity %+v, want all of it", c)
	}
}

func TestUnknownLease(t *testing.T) {
	tab := newTable(t, Config{})
	for name, err := range map[string]error{
		"Grant":  second(tab.Grant(9)),
		"Fail":   tab.Fail(9, nil),
		"Open":   second(tab.Open(9)),
		"End":    second(tab.End(9, Released, "")),
		"Reaped": tab.Reaped(9),
		"Get":    second(tab.Get(9)),
	} {
		if !errors.Is(err, ErrUnknown) {
			t.Errorf("%s: %v, want ErrUnknown", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestEveryStepNeedsItsState(t *testing.T) {
	tab := newTable(t, Config{})
	l, _, err := tab.Request(rid(1), terms(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"Open before the grant":   second(tab.Open(l.ID)),
		"End before the grant":    second(tab.End(l.ID, Revoked, "")),
		"Reaped before the grant": tab.Reaped(l.ID),
		"End as active":           second(tab.End(l.ID, Active, "")),
	} {
		if !errors.Is(err, ErrState) {
			t.Errorf("%s: %v, want ErrState", name, err)
		}
	}
	if _, err := tab.Grant(l.ID); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"second Grant":         second(tab.Grant(l.ID)),
		"Fail after the grant": tab.Fail(l.ID, nil),
	} {
		if !errors.Is(err, ErrState) {
			t.Errorf("%s: %v, want ErrState", name, err)
		}
	}
}

func TestRepeatedRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := newTable(t, Config{})
		l, _, err := tab.Request(rid(1), terms(1), 0)
		if err != nil {
			t.Fatal(err)
		}
		again, first, err := tab.Request(rid(1), terms(1), 0)
		if err != nil || first || again.ID != l.ID {
			t.Fatalf("repetition while in progress: lease %d, first %t, %v", again.ID, first, err)
		}
		got := make(chan Lease, 1)
		go func() {
			l, err := tab.Wait(t.Context(), again)
			if err != nil {
				t.Error(err)
			}
			got <- l
		}()
		synctest.Wait()
		if len(got) != 0 {
			t.Fatal("Wait returned before the grant")
		}
		if _, err := tab.Grant(l.ID); err != nil {
			t.Fatal(err)
		}
		if l2 := <-got; l2.ID != l.ID || l2.State != Granted {
			t.Fatalf("Wait returned lease %d in state %v", l2.ID, l2.State)
		}
		if c := tab.Capacity(); c.FreeCores != 3 {
			t.Fatalf("%d cores free, want 3: the id leased twice", c.FreeCores)
		}
		if _, _, err := tab.Request(rid(1), terms(2), 0); !errors.Is(err, ErrInvalid) {
			t.Fatalf("same id, other terms: %v, want ErrInvalid", err)
		}
		if _, err := tab.End(l.ID, Expired, ""); err != nil {
			t.Fatal(err)
		}
		if _, _, err := tab.Request(rid(1), terms(1), 0); !errors.Is(err, ErrEnded) {
			t.Fatalf("same id after the end: %v, want ErrEnded", err)
		}
	})
}

func TestFailedRequestIsForgotten(t *testing.T) {
	tab := newTable(t, Config{})
	l, _, err := tab.Request(rid(1), terms(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := tab.Request(rid(1), terms(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("worker 0 did not start")
	if err := tab.Fail(l.ID, cause); err != nil {
		t.Fatal(err)
	}
	if _, err := tab.Wait(t.Context(), again); !errors.Is(err, cause) {
		t.Fatalf("Wait: %v, want the cause", err)
	}
	if c := tab.Capacity(); c.FreeCores != 4 || c.FreeMemory != 1000 {
		t.Fatalf("capacity %+v after a failed request", c)
	}
	if _, first, err := tab.Request(rid(1), terms(1), 0); err != nil || !first {
		t.Fatalf("the id again: first %t, %v; want a new attempt", first, err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	tab := newTable(t, Config{})
	l, _, err := tab.Request(rid(1), terms(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tab.Wait(ctx, l); !errors.Is(err, context.Canceled) {
		t.Fatalf("Wait: %v", err)
	}
}

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := newTable(t, Config{FirstUse: 10 * time.Second, Return: 2 * time.Second, Notice: 1})
		due := func(want ...ID) {
			t.Helper()
			list, _ := tab.Due()
			var got []ID
			for _, d := range list {
				got = append(got, d.ID)
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Fatalf("due: %v, want %v", got, want)
			}
		}
		a := granted(t, tab, 1, terms(1))    // never opened
		gone := granted(t, tab, 4, terms(1)) // never opened, and its connection ends
		b := granted(t, tab, 2, terms(1))    // opened, then away, then back, then away
		c := granted(t, tab, 3, Terms{Workers: 1, CoresPerWorker: 1, Duration: 5 * time.Second})
		p, err := tab.Open(b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tab.Open(c.ID); err != nil {
			t.Fatal(err)
		}
		due()
		if _, next := tab.Due(); time.Until(next) != 5*time.Second-1 {
			t.Fatalf("next deadline in %v, want 5s less the notice", time.Until(next))
		}
		tab.Gone(99)
		tab.Gone(b.ID) // has come
		time.Sleep(time.Second)
		tab.Gone(gone.ID)
		time.Sleep(2*time.Second - 1)
		due()
		time.Sleep(time.Nanosecond)
		due(gone.ID)
		if _, err := tab.End(gone.ID, Revoked, ""); err != nil {
			t.Fatal(err)
		}
		tab.Gone(gone.ID)
		time.Sleep(2 * time.Second)
		due(c.ID)
		if list, _ := tab.Due(); list[0].State != Expired {
			t.Fatalf("lease at its end is due as %v", list[0].State)
		}
		tab.Away(b.ID, p)
		time.Sleep(time.Second)
		p2, err := tab.Open(b.ID)
		if err != nil {
			t.Fatal(err)
		}
		tab.Away(b.ID, p) // late news of the first stream
		time.Sleep(3 * time.Second)
		due(c.ID)
		time.Sleep(time.Second)
		due(a.ID, c.ID)
		tab.Away(b.ID, p2)
		time.Sleep(2*time.Second - 1)
		due(a.ID, c.ID)
		time.Sleep(time.Nanosecond)
		due(a.ID, b.ID, c.ID)
		for _, l := range []Lease{a, b, c} {
			if _, err := tab.End(l.ID, Revoked, ""); err != nil {
				t.Fatal(err)
			}
		}
		due()
		if _, next := tab.Due(); !next.IsZero() {
			t.Fatalf("ended leases have the deadline %v", next)
		}
	})
}

func TestChangedTellsOfEarlierDeadlines(t *testing.T) {
	tab := newTable(t, Config{})
	l := granted(t, tab, 1, terms(1))
	select {
	case <-tab.Changed():
	default:
		t.Fatal("no notice of the grant's deadline")
	}
	p, err := tab.Open(l.ID)
	if err != nil {
		t.Fatal(err)
	}
	tab.Away(l.ID, p)
	select {
	case <-tab.Changed():
	default:
		t.Fatal("no notice of the deadline after the holder left")
	}
}

func TestRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := newTable(t, Config{Margin: time.Second, Notice: 10 * time.Second})
		step := func(wantDue State, wantNext time.Duration) {
			t.Helper()
			due, next := tab.Due()
			switch {
			case wantDue == 0 && len(due) > 0, wantDue != 0 && (len(due) != 1 || due[0].State != wantDue):
				t.Fatalf("due: %v, want %v", due, wantDue)
			case wantNext == 0 && !next.IsZero(), wantNext != 0 && time.Until(next) != wantNext:
				t.Fatalf("next deadline in %v, want %v", time.Until(next), wantNext)
			}
		}
		l := granted(t, tab, 1, terms(1)) // a minute
		if got := l.Expires.Sub(l.Holder); got != time.Second {
			t.Errorf("the holder stops %v before the executor, want the margin of 1s", got)
		}
		if _, err := tab.Open(l.ID); err != nil {
			t.Fatal(err)
		}
		step(0, 50*time.Second)
		time.Sleep(20 * time.Second)
		if l, err := tab.Renew(l.ID, time.Second); err != nil || time.Until(l.Expires) != 40*time.Second {
			t.Errorf("renewed for less than is left: %v left, %v", time.Until(l.Expires), err)
		}
		time.Sleep(30 * time.Second)
		step(Expiring, 0)
		if l, err := tab.Notice(l.ID); err != nil || l.State != Expiring {
			t.Fatalf("notice: %v, %v", l.State, err)
		}
		step(0, 10*time.Second)
		if _, err := tab.Notice(l.ID); !errors.Is(err, ErrState) {
			t.Errorf("second notice: %v, want ErrState", err)
		}
		time.Sleep(9 * time.Second)
		l, err := tab.Renew(l.ID, 6*time.Second)
		if err != nil || l.State != Active || time.Until(l.Expires) != 6*time.Second {
			t.Fatalf("renewed at the last moment: %v, %v left, %v", l.State, time.Until(l.Expires), err)
		}
		if got := l.Expires.Sub(l.Holder); got != 600*time.Millisecond {
			t.Errorf("the holder of a short lease stops %v before the executor, want a tenth of its 6s", got)
		}
		step(0, 4*time.Second) // a third of so short a time
		for _, d := range []time.Duration{0, -time.Second} {
			if _, err := tab.Renew(l.ID, d); !errors.Is(err, ErrInvalid) {
				t.Errorf("renewed for %v: %v, want ErrInvalid", d, err)
			}
		}
		time.Sleep(6 * time.Second)
		step(Expired, 0)
		// Nobody has ended it yet, and it is too late all the same.
		if _, err := tab.Renew(l.ID, time.Minute); !errors.Is(err, ErrEnded) {
			t.Errorf("renewed after the end: %v, want ErrEnded", err)
		}
		if _, err := tab.End(l.ID, Expired, ""); err != nil {
			t.Fatal(err)
		}
		if _, err := tab.Renew(l.ID, time.Minute); !errors.Is(err, ErrEnded) {
			t.Errorf("renewed after the end: %v, want ErrEnded", err)
		}
		if _, err := tab.Renew(77, time.Minute); !errors.Is(err, ErrUnknown) {
			t.Errorf("renewed what never was: %v, want ErrUnknown", err)
		}
	})
}

// A holder that comes back during its last seconds is still told.
func TestAwayWhileExpiring(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := newTable(t, Config{Notice: 10 * time.Second, Return: 2 * time.Second})
		l := granted(t, tab, 1, terms(1))
		p, err := tab.Open(l.ID)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Second)
		if _, err := tab.Notice(l.ID); err != nil {
			t.Fatal(err)
		}
		tab.Away(l.ID, p)
		if _, next := tab.Due(); time.Until(next) != 2*time.Second {
			t.Fatalf("next deadline in %v, want 2s: the holder is away", time.Until(next))
		}
		if _, err := tab.Open(l.ID); err != nil {
			t.Fatal(err)
		}
		if got, err := tab.Get(l.ID); err != nil || got.State != Expiring {
			t.Fatalf("the lease is %v (%v), want expiring", got.State, err)
		}
		if _, next := tab.Due(); time.Until(next) != 10*time.Second {
			t.Fatalf("next deadline in %v, want its end in 10s", time.Until(next))
		}
	})
}

func TestKeepAndReuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := newTable(t, Config{Keep: time.Minute})
		kind := func(tm Terms, k byte) Terms { tm.Kind = [32]byte{k}; return tm }
		release := func(l Lease) {
			t.Helper()
			if _, err := tab.End(l.ID, Released, ""); err != nil {
				t.Fatal(err)
			}
		}
		l := granted(t, tab, 1, kind(terms(2), 1))
		if err := tab.Keep(l.ID); !errors.Is(err, ErrState) {
			t.Errorf("keep of a living lease: %v", err)
		}
		release(l)
		if err := tab.Keep(l.ID); err != nil {
			t.Fatal(err)
		}
		if c := tab.Capacity(); c.FreeCores != 4 || c.FreeMemory != 1000 || c.Leases != 0 || c.Kept != 1 {
			t.Errorf("capacity %+v: what is kept is free", c)
		}
		for name, err := range map[string]error{"Keep": tab.Keep(l.ID), "Reaped": tab.Reaped(l.ID)} {
			if !errors.Is(err, ErrState) {
				t.Errorf("%s of a kept lease: %v", name, err)
			}
		}
		other := kind(terms(2), 1)
		other.Tenant = "mallory"
		wait, limit := kind(terms(2), 1), kind(terms(2), 1)
		wait.Wait, limit.CallLimit = Hot, time.Second
		for name, tm := range map[string]Terms{"another kind": kind(terms(2), 2), "fewer workers": kind(terms(1), 1),
			"another tenant": other, "another policy": wait, "another limit": limit, "no kind": terms(2)} {
			if _, _, err := tab.Request(rid(2), tm, l.ID); !errors.Is(err, ErrNotKept) {
				t.Errorf("%s: %v, want ErrNotKept", name, err)
			}
		}
		again, first, err := tab.Request(rid(2), kind(terms(2), 1), l.ID)
		if err != nil || !first || again.Reuses != l.ID || !slices.EqualFunc(again.CPUs, l.CPUs, slices.Equal) || again.ID == l.ID {
			t.Fatalf("reuse: %+v, first %t, %v", again, first, err)
		}
		if _, _, err := tab.Request(rid(2), kind(terms(2), 1), 0); !errors.Is(err, ErrInvalid) {
			t.Errorf("the same request without reuse: %v, want ErrInvalid", err)
		}
		if _, _, err := tab.Request(rid(3), kind(terms(2), 1), l.ID); !errors.Is(err, ErrNotKept) {
			t.Errorf("reused twice: %v, want ErrNotKept", err)
		}
		if err := tab.Drop(l.ID); !errors.Is(err, ErrState) {
			t.Errorf("dropped after the reuse: %v", err)
		}
		if again, err = tab.Grant(again.ID); err != nil {
			t.Fatal(err)
		}
		release(again)
		if err := tab.Keep(again.ID); err != nil {
			t.Fatal(err)
		}

		// Enough is free: it stays. Not enough: it goes, and what the new lease does not need waits for its end.
		small := granted(t, tab, 4, terms(2))
		if c := tab.Capacity(); c.Kept != 1 || c.FreeCores != 2 {
			t.Errorf("capacity %+v: two cores were free without taking anything away", c)
		}
		one, _, err := tab.Request(rid(5), terms(1), 0)
		if err != nil || !slices.Equal(one.Evict, []ID{again.ID}) || one.CPUs[0][0] != again.CPUs[0][0] {
			t.Fatalf("request that needs a kept core: %+v, %v", one, err)
		}
		if c := tab.Capacity(); c.FreeCores != 0 || c.Kept != 0 {
			t.Errorf("capacity %+v: the other core's worker is not reaped yet", c)
		}
		if err := tab.Reaped(again.ID); err != nil {
			t.Fatal(err)
		}
		if c := tab.Capacity(); c.FreeCores != 1 || c.FreeMemory != 700 {
			t.Errorf("capacity %+v, want the one core that nobody took", c)
		}
		for _, l := range []Lease{small, one} {
			if l.ID == one.ID {
				if _, err := tab.Grant(l.ID); err != nil {
					t.Fatal(err)
				}
			}
			release(l)
			if err := tab.Keep(l.ID); !errors.Is(err, ErrState) {
				t.Errorf("keep of a lease without kind: %v", err)
			}
			if err := tab.Reaped(l.ID); err != nil {
				t.Fatal(err)
			}
		}

		// What nobody wants goes by itself.
		last := granted(t, tab, 6, kind(terms(1), 3))
		release(last)
		if err := tab.Keep(last.ID); err != nil {
			t.Fatal(err)
		}
		if due, next := tab.Due(); len(due) != 0 || time.Until(next) != time.Minute {
			t.Fatalf("due %v, next in %v", due, time.Until(next))
		}
		time.Sleep(time.Minute)
		if due, _ := tab.Due(); len(due) != 1 || due[0].State != Released || due[0].ID != last.ID {
			t.Fatalf("due %v, want the kept lease", due)
		}
		if err := tab.Drop(last.ID); err != nil {
			t.Fatal(err)
		}
		if err := tab.Keep(last.ID); !errors.Is(err, ErrState) {
			t.Errorf("kept again after the drop: %v", err)
		}
		if err := tab.Reaped(last.ID); err != nil {
			t.Fatal(err)
		}
		if c := tab.Capacity(); c.FreeCores != 4 || c.FreeMemory != 1000 || c.Leases+c.Kept != 0 {
			t.Errorf("capacity at the end: %+v", c)
		}
	})
}

func TestDrain(t *testing.T) {
	tab := newTable(t, Config{})
	l := granted(t, tab, 1, terms(1))
	tab.Drain()
	if _, _, err := tab.Request(rid(2), terms(1), 0); !errors.Is(err, ErrDraining) {
		t.Fatalf("new request: %v, want ErrDraining", err)
	}
	if again, first, err := tab.Request(rid(1), terms(1), 0); err != nil || first || again.ID != l.ID {
		t.Fatalf("repeated request while draining: %d, %t, %v", again.ID, first, err)
	}
	if _, err := tab.Renew(l.ID, time.Hour); !errors.Is(err, ErrDraining) {
		t.Errorf("renewal: %v, want ErrDraining", err)
	}
	if e, err := tab.End(l.ID, Drained, "over"); err != nil || e.State != Drained || !e.State.Ended() {
		t.Errorf("end: %v, %v", e.State, err)
	}
	if err := tab.Keep(l.ID); err == nil {
		t.Error("a drained lease was kept")
	}
}

func TestOldLeasesAreForgotten(t *testing.T) {
	tab := newTable(t, Config{Remember: 2})
	for r := range byte(4) {
		l := granted(t, tab, r, terms(1))
		if _, err := tab.End(l.ID, Released, ""); err != nil {
			t.Fatal(err)
		}
		if err := tab.Reaped(l.ID); err != nil {
			t.Fatal(err)
		}
	}
	if len(tab.leases) != 2 || len(tab.requests) != 2 || len(tab.past) != 2 {
		t.Fatalf("remembered %d, %d, %d; want 2", len(tab.leases), len(tab.requests), len(tab.past))
	}
	if _, err := tab.Get(1); !errors.Is(err, ErrUnknown) {
		t.Fatalf("the oldest: %v, want ErrUnknown", err)
	}
}
