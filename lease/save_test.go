package lease

import (
	"errors"
	"reflect"
	"testing"
	"time"
)

// TestSave saves a table with leases in every state that is saved, and restores it.
func TestSave(t *testing.T) {
	now := time.Unix(1000, 0)
	next := ID(0)
	cfg := Config{Cores: []Core{{CPUs: []int{2, 3}}, {CPUs: []int{0, 1}}, {CPUs: []int{4, 5}}}, Memory: 100, Share: 2, Now: func() time.Time { return now },
		NewID: func() ID { next++; return next }}
	table, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	grant := func(rid byte, workers int) ID {
		l, _, err := table.Request(RequestID{rid}, Terms{Workers: workers, CoresPerWorker: 1, MemoryPerWorker: 10, Duration: time.Hour, Tenant: "x"}, 0)
		if err == nil {
			l, err = table.Grant(l.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		return l.ID
	}
	grant(1, 1)
	active := grant(2, 2)
	over := grant(3, 1)
	presence, err := table.Open(active)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.End(over, Released, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Save(); !errors.Is(err, ErrState) {
		t.Errorf("saved an ended lease that has resources: %v", err)
	}
	if err := table.Reaped(over); err != nil {
		t.Fatal(err)
	}
	saved, err := table.Save()
	if err != nil {
		t.Fatal(err)
	}
	restored, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := restored.Restore(saved); err != nil {
		t.Fatal(err)
	}
	if a, b := table.Capacity(), restored.Capacity(); a != b {
		t.Errorf("capacity %+v, was %+v", b, a)
	}
	for _, id := range []ID{1, active} {
		a, _ := table.Get(id)
		b, err := restored.Get(id)
		a.rec, b.rec = nil, nil
		if err != nil || !reflect.DeepEqual(a, b) {
			t.Errorf("lease %+v (%v), was %+v", b, err, a)
		}
	}
	_, wantNext := table.Due()
	if _, got := restored.Due(); !got.Equal(wantNext) {
		t.Errorf("next deadline %v, was %v", got, wantNext)
	}
	if !restored.Away(active, presence, false) {
		t.Error("the presence of the client is lost")
	}
	if l, first, err := restored.Request(RequestID{2}, saved[0].Terms, 0); err == nil && first {
		t.Errorf("a repeated request got the new lease %d", l.ID)
	}
	if _, err := restored.End(active, Released, ""); err != nil {
		t.Fatal(err)
	}
	if err := restored.Reaped(active); err != nil {
		t.Fatal(err)
	}
	if c := restored.Capacity(); c.FreeCores != 5 || c.FreeMemory != 90 {
		t.Errorf("after the end of a restored lease: %+v", c)
	}
}

// TestRestoreInvalid restores leases that the node cannot have.
func TestRestoreInvalid(t *testing.T) {
	good := func() Saved {
		return Saved{Lease: Lease{ID: 1, RequestID: RequestID{1}, State: Active, Granted: time.Unix(1, 0), Expires: time.Unix(2, 0),
			Terms: Terms{Workers: 1, CoresPerWorker: 1, MemoryPerWorker: 10, Duration: time.Second}}, Shares: [][]int{{0}}}
	}
	for name, change := range map[string]func(s *Saved){
		"good":            func(*Saved) {},
		"no id":           func(s *Saved) { s.ID = 0 },
		"requested":       func(s *Saved) { s.State = Requested },
		"ended":           func(s *Saved) { s.State = Expired },
		"unknown state":   func(s *Saved) { s.State = 77 },
		"no core":         func(s *Saved) { s.Shares = nil },
		"unknown core":    func(s *Saved) { s.Shares = [][]int{{1}} },
		"negative core":   func(s *Saved) { s.Shares = [][]int{{-1}} },
		"too many cores":  func(s *Saved) { s.Shares = [][]int{{0, 0}} },
		"too much memory": func(s *Saved) { s.Terms.MemoryPerWorker = 11 },
		"no end":          func(s *Saved) { s.Expires = time.Time{} },
	} {
		table, err := New(Config{Cores: []Core{{CPUs: []int{0}}}, Memory: 10, NewID: func() ID { return 1 }})
		if err != nil {
			t.Fatal(err)
		}
		s := good()
		change(&s)
		if err := table.Restore([]Saved{s}); (err == nil) != (name == "good") {
			t.Errorf("%s: %v", name, err)
		}
		if name == "good" && table.Restore([]Saved{s}) == nil {
			t.Error("restored a lease twice")
		}
	}
}
