package lease

import (
	"errors"
	"testing"
)

// TestGrow grants a lease as many workers as there is room for, and adds the others one by one, within cores and memory.
func TestGrow(t *testing.T) {
	tab := newTable(t, Config{Memory: 400})
	other := granted(t, tab, 1, terms(3))
	tm := terms(3)
	tm.WorkersMin = 2
	if _, _, err := tab.Request(rid(2), tm, 0); !errors.Is(err, ErrBusy) {
		t.Errorf("fewer cores than the fewest workers need: %v", err)
	}
	tm.WorkersMin = 1
	l := granted(t, tab, 2, tm)
	if l.Present() != 1 || len(l.CPUs) != 3 {
		t.Fatalf("%d workers on CPUs %v, want one of three", l.Present(), l.CPUs)
	}
	if _, err := tab.Grow(l.ID, 1); !errors.Is(err, ErrBusy) {
		t.Errorf("a worker without a free core: %v", err)
	}
	end(t, tab, other.ID)
	if err := tab.SetAside(200); err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{ErrState, nil, ErrBusy, ErrInvalid} { // there is memory for one more
		if _, err := tab.Grow(l.ID, i); !errors.Is(err, want) {
			t.Errorf("worker %d: %v, want %v", i, err, want)
		}
	}
	if err := tab.Shrink(l.ID, 1); err != nil {
		t.Fatal(err)
	}
	if c := tab.Capacity(); c.FreeCores != 3 || c.FreeMemory != 100 {
		t.Errorf("after a worker that was not started: %+v", c)
	}
	for i, want := range []error{ErrState, ErrState, ErrState, ErrState} { // the first worker stays
		if err := tab.Shrink(l.ID, i); !errors.Is(err, want) {
			t.Errorf("take worker %d away: %v, want %v", i, err, want)
		}
	}
	tab.GiveBack(200)
	if _, err := tab.Grow(l.ID, 2); err != nil {
		t.Fatal(err)
	}
	saved, err := tab.Save()
	if err != nil {
		t.Fatal(err)
	}
	restored := newTable(t, Config{Memory: 400})
	if err := restored.Restore(saved); err != nil {
		t.Fatal(err)
	}
	if _, err := restored.Grow(l.ID, 1); err != nil {
		t.Errorf("after a handover: %v", err)
	}
	end(t, restored, l.ID)
	if c := restored.Capacity(); c.FreeCores != 4 || c.FreeMemory != 400 {
		t.Errorf("after the release: %+v", c)
	}
}

func end(t *testing.T, tab *Table, id ID) {
	t.Helper()
	if _, err := tab.End(id, Released, ""); err != nil {
		t.Fatal(err)
	}
	if err := tab.Reaped(id); err != nil {
		t.Fatal(err)
	}
}
