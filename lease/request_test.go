package lease

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

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
