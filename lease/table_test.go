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

func newTable(t *testing.T, cfg Config) *Table {
	t.Helper()
	if cfg.CPUs == nil {
		cfg.CPUs = []int{2, 3, 5, 7}
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
	l, first, err := tab.Request(rid(r), tm)
	if err != nil || !first {
		t.Fatalf("Request: first %t, %v", first, err)
	}
	if l, err = tab.Grant(l.ID); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestNewRefusesBadCores(t *testing.T) {
	for _, cpus := range [][]int{nil, {}, {1, 1}, {-1}, {0, 1, 0}} {
		if _, err := New(Config{CPUs: cpus, NewID: counter()}); !errors.Is(err, ErrInvalid) {
			t.Errorf("New with cores %v: %v, want ErrInvalid", cpus, err)
		}
	}
}

func TestRequestChecksTerms(t *testing.T) {
	const huge = int(^uint(0) >> 1)
	for _, c := range []struct {
		name string
		t    Terms
		want error
	}{
		{"no workers", Terms{0, 1, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"negative workers", Terms{-1, 1, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"no cores", Terms{1, 0, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"negative cores", Terms{1, -4, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"too many workers", Terms{5, 1, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"too many cores", Terms{1, 5, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"product above", Terms{3, 2, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"product wraps", Terms{huge/2 + 1, 4, 1, time.Second, "", [32]byte{}}, ErrInvalid},
		{"too much memory", Terms{1, 1, 1001, time.Second, "", [32]byte{}}, ErrInvalid},
		{"memory wraps", Terms{4, 1, 1 << 62, time.Second, "", [32]byte{}}, ErrInvalid},
		{"no time", Terms{1, 1, 1, 0, "", [32]byte{}}, ErrInvalid},
		{"negative time", Terms{1, 1, 1, -1, "", [32]byte{}}, ErrInvalid},
		{"all of it", Terms{4, 1, 250, time.Second, "", [32]byte{}}, nil},
		{"all cores to one", Terms{1, 4, 1000, time.Second, "", [32]byte{}}, nil},
	} {
		tab := newTable(t, Config{})
		before := tab.Capacity()
		_, _, err := tab.Request(rid(1), c.t)
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
	if _, _, err := tab.Request(rid(3), terms(2)); !errors.Is(err, ErrBusy) {
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
	_, _, err := tab.Request(rid(2), Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 500, Duration: time.Minute})
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
	l, _, err := tab.Request(rid(1), terms(1))
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
		l, _, err := tab.Request(rid(1), terms(1))
		if err != nil {
			t.Fatal(err)
		}
		again, first, err := tab.Request(rid(1), terms(1))
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
		if _, _, err := tab.Request(rid(1), terms(2)); !errors.Is(err, ErrInvalid) {
			t.Fatalf("same id, other terms: %v, want ErrInvalid", err)
		}
		if _, err := tab.End(l.ID, Expired, ""); err != nil {
			t.Fatal(err)
		}
		if _, _, err := tab.Request(rid(1), terms(1)); !errors.Is(err, ErrEnded) {
			t.Fatalf("same id after the end: %v, want ErrEnded", err)
		}
	})
}

func TestFailedRequestIsForgotten(t *testing.T) {
	tab := newTable(t, Config{})
	l, _, err := tab.Request(rid(1), terms(1))
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := tab.Request(rid(1), terms(1))
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
	if _, first, err := tab.Request(rid(1), terms(1)); err != nil || !first {
		t.Fatalf("the id again: first %t, %v; want a new attempt", first, err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	tab := newTable(t, Config{})
	l, _, err := tab.Request(rid(1), terms(1))
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
		tab := newTable(t, Config{FirstUse: 10 * time.Second, Return: 2 * time.Second})
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
		a := granted(t, tab, 1, terms(1)) // never opened
		b := granted(t, tab, 2, terms(1)) // opened, then away, then back, then away
		c := granted(t, tab, 3, Terms{Workers: 1, CoresPerWorker: 1, Duration: 5 * time.Second})
		p, err := tab.Open(b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tab.Open(c.ID); err != nil {
			t.Fatal(err)
		}
		due()
		if _, next := tab.Due(); time.Until(next) != 5*time.Second {
			t.Fatalf("next deadline in %v, want 5s", time.Until(next))
		}
		time.Sleep(5 * time.Second)
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

func TestDrain(t *testing.T) {
	tab := newTable(t, Config{})
	l := granted(t, tab, 1, terms(1))
	tab.Drain()
	if _, _, err := tab.Request(rid(2), terms(1)); !errors.Is(err, ErrDraining) {
		t.Fatalf("new request: %v, want ErrDraining", err)
	}
	if again, first, err := tab.Request(rid(1), terms(1)); err != nil || first || again.ID != l.ID {
		t.Fatalf("repeated request while draining: %d, %t, %v", again.ID, first, err)
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
