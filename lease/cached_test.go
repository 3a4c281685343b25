package lease

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

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
		if c := tab.Capacity(); c.FreeCores != 4 || c.FreeMemory != 1000 || c.Leases != 0 || c.Cached != 1 {
			t.Errorf("capacity %+v: what is cached is free", c)
		}
		for name, err := range map[string]error{"Keep": tab.Keep(l.ID), "Reaped": tab.Reaped(l.ID)} {
			if !errors.Is(err, ErrState) {
				t.Errorf("%s of a cached lease: %v", name, err)
			}
		}
		other := kind(terms(2), 1)
		other.Tenant = "mallory"
		wait, limit := kind(terms(2), 1), kind(terms(2), 1)
		wait.Wait, limit.CallLimit = Hot, time.Second
		for name, tm := range map[string]Terms{"another kind": kind(terms(2), 2), "fewer workers": kind(terms(1), 1),
			"another tenant": other, "another policy": wait, "another limit": limit, "no kind": terms(2)} {
			if _, _, err := tab.Request(rid(2), tm, l.ID); !errors.Is(err, ErrNotCached) {
				t.Errorf("%s: %v, want ErrNotCached", name, err)
			}
		}
		again, first, err := tab.Request(rid(2), kind(terms(2), 1), l.ID)
		if err != nil || !first || again.Reuses != l.ID || !slices.EqualFunc(again.CPUs, l.CPUs, slices.Equal) || again.ID == l.ID {
			t.Fatalf("reuse: %+v, first %t, %v", again, first, err)
		}
		if _, _, err := tab.Request(rid(2), kind(terms(2), 1), 0); !errors.Is(err, ErrInvalid) {
			t.Errorf("the same request without reuse: %v, want ErrInvalid", err)
		}
		if _, _, err := tab.Request(rid(3), kind(terms(2), 1), l.ID); !errors.Is(err, ErrNotCached) {
			t.Errorf("reused twice: %v, want ErrNotCached", err)
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

		// With enough free cores the cached lease stays. Without, it is evicted, and the resources that the new lease does not need are free
		// when its workers are reaped.
		small := granted(t, tab, 4, terms(2))
		if c := tab.Capacity(); c.Cached != 1 || c.FreeCores != 2 {
			t.Errorf("capacity %+v: two cores were free without taking anything away", c)
		}
		one, _, err := tab.Request(rid(5), terms(1), 0)
		if err != nil || !slices.Equal(one.Evict, []ID{again.ID}) || one.CPUs[0][0] != again.CPUs[0][0] {
			t.Fatalf("request that needs a cached core: %+v, %v", one, err)
		}
		if c := tab.Capacity(); c.FreeCores != 0 || c.Cached != 0 {
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

		// A cached lease that no request reuses ends by itself.
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
			t.Fatalf("due %v, want the cached lease", due)
		}
		if err := tab.Drop(last.ID); err != nil {
			t.Fatal(err)
		}
		if err := tab.Keep(last.ID); !errors.Is(err, ErrState) {
			t.Errorf("cached again after the drop: %v", err)
		}
		if err := tab.Reaped(last.ID); err != nil {
			t.Fatal(err)
		}
		if c := tab.Capacity(); c.FreeCores != 4 || c.FreeMemory != 1000 || c.Leases+c.Cached != 0 {
			t.Errorf("capacity at the end: %+v", c)
		}
	})
}

// Spare workers get only cores and memory that no lease has, and as much again stays free.
func TestSpareWorkers(t *testing.T) {
	tab := newTable(t, Config{}) // 4 cores, 1000 bytes
	spare := func(workers int, memory uint64) Terms {
		tm := terms(workers)
		tm.Kind, tm.Spare, tm.MemoryPerWorker = [32]byte{1}, true, memory
		return tm
	}
	refused := func(n byte, tm Terms) {
		t.Helper()
		if _, _, err := tab.Request(rid(n), tm, 0); !errors.Is(err, ErrBusy) {
			t.Errorf("%+v: %v, want ErrBusy", tm, err)
		}
	}
	refused(1, spare(3, 100)) // would leave one core
	refused(2, spare(1, 501)) // would leave less memory than it takes
	l, _, err := tab.Request(rid(3), spare(2, 100), 0)
	if err != nil {
		t.Fatal(err)
	}
	if c := tab.Capacity(); c.FreeCores != 4 || c.Leases != 0 || c.Cached != 1 {
		t.Errorf("capacity %+v: spare workers count as free", c)
	}
	taken := spare(2, 100)
	taken.Spare = false
	first, _, err := tab.Request(rid(4), taken, l.ID)
	if err != nil || first.Reuses != l.ID || !slices.EqualFunc(first.CPUs, l.CPUs, slices.Equal) {
		t.Fatalf("a lease on spare workers: %+v, %v", first, err)
	}
	// Two cores are free. They are enough for one spare worker, which the next lease evicts.
	one, _, err := tab.Request(rid(5), spare(1, 100), 0)
	if err != nil {
		t.Fatal(err)
	}
	refused(6, spare(1, 100))
	if next, _, err := tab.Request(rid(7), terms(2), 0); err != nil || !slices.Equal(next.Evict, []ID{one.ID}) {
		t.Errorf("a lease that needs the core of a spare worker: %+v, %v", next, err)
	}
	if err := tab.Reaped(one.ID); err != nil {
		t.Error(err)
	}
	if c := tab.Capacity(); c.FreeCores != 0 || c.Cached != 0 || c.Leases != 2 {
		t.Errorf("capacity at the end: %+v", c)
	}
}

// A client can read the id of the lease that its claim will get, and choose the request id of another lease accordingly.
func TestClaimedLeaseHasItsOwnRequestID(t *testing.T) {
	tab := newTable(t, Config{})
	kind := terms(1)
	kind.Kind = [32]byte{1}
	l := granted(t, tab, 1, kind)
	if _, err := tab.End(l.ID, Released, ""); err != nil {
		t.Fatal(err)
	}
	if err := tab.Keep(l.ID); err != nil {
		t.Fatal(err)
	}
	const id = 0x0807060504030201
	other, _, err := tab.Request(RequestID{1, 2, 3, 4, 5, 6, 7, 8}, terms(1), 0)
	if err == nil {
		_, err = tab.Grant(other.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tab.Claim(l.ID, id, time.Now()); err != nil {
		t.Fatal(err)
	}
	saved, err := tab.Save()
	if err != nil {
		t.Fatal(err)
	}
	if err := newTable(t, Config{}).Restore(saved); err != nil {
		t.Errorf("a program that takes over gets %d leases: %v", len(saved), err)
	}
}
