package lease

import (
	"errors"
	"slices"
	"strings"
	"testing"
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

// Memory that is set aside is neither free nor leased, and a repeated request gets its lease although defaults have changed.
func TestSetAside(t *testing.T) {
	tab := newTable(t, Config{})
	tm := Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 600, Duration: time.Minute, Fingerprint: [32]byte{1}}
	l := granted(t, tab, 1, tm)
	if err := tab.SetAside(401); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "401 bytes wanted, 400 of 1000 are free") {
		t.Fatalf("401 of 400 free bytes: %v", err)
	}
	if err := tab.SetAside(300); err != nil {
		t.Fatal(err)
	}
	if c := tab.Capacity(); c.FreeMemory != 100 || c.SetAside != 300 || c.Memory != 1000 {
		t.Errorf("%+v", c)
	}
	_, _, err := tab.Request(rid(2), Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 101, Duration: time.Minute}, 0)
	if !errors.Is(err, ErrBusy) {
		t.Errorf("101 of 100 free bytes: %v, want ErrBusy", err)
	}
	again := tm
	again.MemoryPerWorker = 500
	if same, first, err := tab.Request(rid(1), again, 0); err != nil || first || same.ID != l.ID {
		t.Errorf("the same request: %v, %t, %v", same.ID, first, err)
	}
	again.Fingerprint[0]++
	if _, _, err := tab.Request(rid(1), again, 0); !errors.Is(err, ErrInvalid) {
		t.Errorf("another request: %v, want ErrInvalid", err)
	}
	tab.GiveBack(300)
	if c := tab.Capacity(); c.FreeMemory != 400 || c.SetAside != 0 {
		t.Errorf("%+v", c)
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
		t.Error("a drained lease was cached")
	}
}
