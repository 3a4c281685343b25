package accounting

import (
	"errors"
	"path/filepath"
	"testing"
	"time"
)

// An incarnation belongs to its first claimant, also after a restart, for as long as the ledger has a lease of it.
func TestOwners(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	var l *Ledger
	open := func() {
		t.Helper()
		var err error
		if l, err = OpenLedger(path, time.Second); err != nil {
			t.Fatal(err)
		}
	}
	open()
	day := time.Unix(1e9, 0)
	claim := func(at time.Time, incarnation byte, owner string, some bool) error {
		t.Helper()
		refused, err := l.Claim(t.Context(), at, Claim{[16]byte{incarnation}, owner, some})
		if err != nil {
			t.Fatal(err)
		}
		return refused[0]
	}
	for range 2 {
		if err := errors.Join(claim(day, 1, "a", false), claim(day, 2, "b", false), claim(day, 1, "operator", true)); err != nil {
			t.Error(err)
		}
		if err := claim(day, 1, "b", false); !errors.Is(err, ErrOwner) {
			t.Errorf("another's: %v", err)
		}
		l.Close()
		open()
	}
	defer func() { l.Close() }()
	if refused, err := l.Claim(t.Context(), day, Claim{Incarnation: [16]byte{3}, Owner: "a"}, Claim{Incarnation: [16]byte{3}, Owner: "b"}); err != nil ||
		refused[0] != nil || !errors.Is(refused[1], ErrOwner) {
		t.Errorf("claimed by two at once: %v, %v", refused, err)
	}
	if _, err := l.Claim(t.Context(), day, Claim{Incarnation: [16]byte{4}, Owner: string(make([]byte, maxOwner+1))}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a name that is too long: %v", err)
	}
	if err := l.Merge(t.Context(), day, Entry{Key: Key{Incarnation: [16]byte{1}, Lease: 1}, Tenant: "ann", AsOf: day.Add(48 * time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Prune(t.Context(), day.Add(24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	for incarnation, want := range map[byte]string{1: "a", 2: "", 3: ""} {
		if got, _, err := l.Owner([16]byte{incarnation}); got != want || err != nil {
			t.Errorf("owner of %d after the others were forgotten: %q, want %q, %v", incarnation, got, want, err)
		}
	}
}
