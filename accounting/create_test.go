package accounting

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The copy of a ledger gets its name only after the original has ended. If that is not known, the copy stays, and the error names it.
func TestCreateLedgerTakesOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	load := func(add func(Change) error) error {
		for _, r := range NewRecords() {
			if err := add(r); err != nil {
				return err
			}
		}
		return nil
	}
	left := func() []string {
		found, err := filepath.Glob(path + "*")
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	broken := errors.New("broken")
	if _, err := CreateLedger(path, load, func() (bool, error) { return false, broken }); !errors.Is(err, broken) || len(left()) > 0 {
		t.Errorf("the original goes on: %v, and %q is there", err, left())
	}
	_, err := CreateLedger(path, load, func() (bool, error) {
		if _, err := os.Lstat(path); err == nil {
			t.Error("the copy has its name before the original has ended")
		}
		return true, broken
	})
	if there := left(); !errors.Is(err, broken) || len(there) != 1 || !strings.Contains(err.Error(), filepath.Join(there[0], "ledger")) {
		t.Errorf("the original may have ended: %v, and %q is there", err, there)
	}
	if _, err := CreateLedger(path, load, func() (bool, error) { return false, nil }); err != nil {
		t.Fatal(err)
	}
	l, err := OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
