package lease

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

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
		tab.Away(b.ID, p, false)
		time.Sleep(time.Second)
		p2, err := tab.Open(b.ID)
		if err != nil {
			t.Fatal(err)
		}
		tab.Away(b.ID, p, false) // late news of the first stream
		time.Sleep(3 * time.Second)
		due(c.ID)
		time.Sleep(time.Second)
		due(a.ID, c.ID)
		tab.Away(b.ID, p2, false)
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
	tab.Away(l.ID, p, false)
	select {
	case <-tab.Changed():
	default:
		t.Fatal("no notice of the deadline after the client left")
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
		if got := l.Expires.Sub(l.ClientEnd); got != time.Second {
			t.Errorf("the client stops %v before the executor, want the margin of 1s", got)
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
		if got := l.Expires.Sub(l.ClientEnd); got != 600*time.Millisecond {
			t.Errorf("the client of a short lease stops %v before the executor, want a tenth of its 6s", got)
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

// A client that comes back during its last seconds is still told.
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
		tab.Away(l.ID, p, false)
		if _, next := tab.Due(); time.Until(next) != 2*time.Second {
			t.Fatalf("next deadline in %v, want 2s: the client is away", time.Until(next))
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
