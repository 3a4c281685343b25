package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
)

// A ledger is backed up, found damaged, and restored. The commands do not touch a ledger that a resource manager has
// open.
func TestLedgerCommands(t *testing.T) {
	dir := t.TempDir()
	state, backup := filepath.Join(dir, "state"), filepath.Join(dir, "backup")
	path := filepath.Join(state, "ledger")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := accounting.OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_700_000_000, 0)
	for n := range uint64(10) {
		if err := l.Merge(now, accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{1}, Lease: 1 + n}, Tenant: "ann", AsOf: now, Began: now, Use: accounting.Use{5}}); err != nil {
			t.Fatal(err)
		}
	}
	run := func(want int, text string, args ...string) string {
		t.Helper()
		var out bytes.Buffer
		code := Run(t.Context(), Env{Version: "test", Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &out}, append([]string{"ledger"}, args...))
		if code != want || !strings.Contains(out.String(), text) {
			t.Errorf("%v: code %d, want %d with %q\n%s", args, code, want, text, out.String())
		}
		return out.String()
	}
	for _, args := range [][]string{{"check", state}, {"backup", state, backup}, {"compact", state}} {
		run(1, "stop the resource manager first", args...)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	run(0, "10 leases, 1 hourly totals", "check", state)
	run(0, "", "backup", state, backup)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	run(1, "missing or empty", "check", state)
	run(1, "missing or empty", "backup", state, backup)
	run(1, "", "restore", state, filepath.Join(dir, "none"))
	run(0, "the old ledger is "+path+".replaced-", "restore", state, backup)
	run(0, "10 leases, 1 hourly totals", "check", state)
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	said := run(0, fmt.Sprintf(" bytes, before %d\n", before.Size()), "compact", state)
	if after, err := os.Stat(path); err != nil || !strings.Contains(said, fmt.Sprintf(": %d bytes, before ", after.Size())) {
		t.Errorf("compact says %q, but the file has %d bytes: %v", said, after.Size(), err)
	}
	run(0, "10 leases, 1 hourly totals", "check", state)
	run(1, "", "compact", filepath.Join(dir, "none"))
	run(2, "accepts 1 arg", "check")
}
