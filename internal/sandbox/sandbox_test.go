package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMode(t *testing.T) {
	for _, m := range []Mode{Off, On, Require, Auto} {
		var got Mode
		if err := got.UnmarshalText([]byte(m.String())); err != nil || got != m {
			t.Errorf("%v is read as %v, %v", m, got, err)
		}
	}
	for _, text := range []string{"", "ON", "true", "yes", "on "} {
		var m Mode
		if err := m.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is read as %v", text, m)
		}
	}
}

func TestAutoMode(t *testing.T) {
	for _, tc := range []struct {
		set            Mode
		root, identity bool
		want           Mode
	}{
		{Auto, false, false, On}, {Auto, true, false, Require}, {Auto, false, true, Require}, {Auto, true, true, Require},
		{Off, true, true, Off}, {On, true, true, On}, {Require, false, false, Require},
	} {
		if got := tc.set.Resolve(tc.root, tc.identity); got != tc.want {
			t.Errorf("%v, root %v, identity %v: %v, want %v", tc.set, tc.root, tc.identity, got, tc.want)
		}
	}
}

func TestRange(t *testing.T) {
	for text, want := range map[string]Range{"": {}, "7-7": {First: 7, N: 1}, " 1000-1999": {First: 1000, N: 1000}, "4294967294-4294967294": {First: 4294967294, N: 1}} {
		var r Range
		if err := r.UnmarshalText([]byte(text)); err != nil || r != want {
			t.Errorf("%q: %+v, %v", text, r, err)
		}
		var again Range
		if err := again.UnmarshalText([]byte(r.String())); err != nil || again != r {
			t.Errorf("%v is read as %v, %v", r, again, err)
		}
	}
	for _, text := range []string{"7", "0-7", "7-6", "-1-7", "1-4294967295", "a-b", "1-2-3", "1-1048577"} {
		var r Range
		if err := r.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q: %+v", text, r)
		}
	}
}

// No id is given out twice at a time, all are given out, and ids that come back are given out again.
func TestUIDs(t *testing.T) {
	u := NewUIDs(Range{First: 100, N: 5})
	seen := map[uint32]bool{}
	for range 5 {
		id, err := u.Take()
		if err != nil || id < 100 || id > 104 || seen[id] {
			t.Fatalf("%d, %v after %v", id, err, seen)
		}
		seen[id] = true
	}
	if id, err := u.Take(); !errors.Is(err, ErrNoUID) {
		t.Errorf("a sixth one of five: %d, %v", id, err)
	}
	u.Give(103)
	if id, err := u.Take(); err != nil || id != 103 {
		t.Errorf("%d, %v, want 103", id, err)
	}
	if _, err := NewUIDs(Range{}).Take(); !errors.Is(err, ErrNoUID) {
		t.Errorf("of an empty range: %v", err)
	}
	// One that was given back rests for as long as there are others.
	u = NewUIDs(Range{First: 1, N: 3})
	a, _ := u.Take()
	u.Give(a)
	if b, _ := u.Take(); a == b {
		t.Errorf("%d again at once", a)
	}
}

// If the ranges of two executors of a node overlap, each user id still has one owner. An id that an executor returns, or has when it ends, is free
// for the other executor.
func TestSharedUIDs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run", "uids")
	open := func(r Range) *UIDs {
		u := NewUIDs(r)
		if err := u.Share(file); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(u.Close)
		return u
	}
	a, b := open(Range{First: 4_000_000_000, N: 4}), open(Range{First: 4_000_000_002, N: 4})
	taken := map[uint32]*UIDs{}
	take := func(u *UIDs, n int) {
		t.Helper()
		for range n {
			id, err := u.Take()
			if err != nil || taken[id] != nil {
				t.Fatalf("%d, %v after %v", id, err, taken)
			}
			taken[id] = u
		}
	}
	none := func(u *UIDs) {
		t.Helper()
		if id, err := u.Take(); !errors.Is(err, ErrNoUID) {
			t.Errorf("one more: %d, %v after %v", id, err, taken)
		}
	}
	take(a, 4)
	take(b, 2)
	none(a)
	none(b)
	a.Give(4_000_000_004) // not its own
	none(a)
	a.Give(4_000_000_003)
	delete(taken, 4_000_000_003)
	take(b, 1)
	none(a)
	a.Close()
	delete(taken, 4_000_000_002)
	take(b, 1)
	none(b)

	if err := NewUIDs(Range{First: 1, N: 1}).Share(filepath.Join(file, "x")); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("below a file: %v", err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 || st.Size() != 0 {
		t.Errorf("the file: %+v, %v", st, err)
	}
}
