package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/tests/etcdtest"
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
		if err := l.Merge(t.Context(), now, accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{1}, Lease: 1 + n}, Tenant: "ann", AsOf: now, Began: now, Use: accounting.Use{5}}); err != nil {
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

// A ledger moves from a state directory to etcd and back, and commands refuse what would leave two ledgers or none.
func TestLedgerEtcdCommands(t *testing.T) {
	server := etcdtest.Start(t, etcdtest.Options{})
	dir := t.TempDir()
	state, back := filepath.Join(dir, "state"), filepath.Join(dir, "back")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	run := func(want int, text string, args ...string) {
		t.Helper()
		var out bytes.Buffer
		code := Run(t.Context(), Env{Version: "test", Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &out},
			append([]string{"ledger", "etcd", "--etcd-endpoints", server.Endpoint}, args...))
		if code != want || !strings.Contains(out.String(), text) {
			t.Errorf("%v: code %d, want %d with %q\n%s", args, code, want, text, out.String())
		}
	}
	path := filepath.Join(state, "ledger")
	l, err := accounting.OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_700_000_000, 0)
	if err := l.Merge(t.Context(), now, accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{1}, Lease: 1}, Tenant: "ann", AsOf: now, Began: now, Use: accounting.Use{5}}); err != nil {
		t.Fatal(err)
	}
	run(1, "stop the resource manager first", "import", state)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	run(1, "etcd has no ledger", "check")
	run(1, "etcd has no ledger", "export", back)
	run(1, "", "import", filepath.Join(dir, "none"))
	run(0, "1 leases and 1 hourly totals are in etcd", "import", state)
	run(1, "missing or empty", "import", state) // a resource manager without etcd refuses the directory, too
	run(1, "there is a ledger", "init")
	run(0, "1 leases, 1 hourly totals", "check")
	run(0, "etcd has no ledger any more", "export", back)
	run(1, "it was exported to "+filepath.Join(back, "ledger"), "check")
	l, err = accounting.OpenLedger(filepath.Join(back, "ledger"), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	totals, err := l.Totals("", time.Time{})
	ann := totals["ann"]
	if ann.Of(0).Int64() != 5 || len(totals) != 1 || err != nil {
		t.Errorf("after import and export: %v, %v", totals, err)
	}
	l.Close()
	run(0, "are in etcd", "import", back)
	run(1, "there is one already", "export", filepath.Dir(exists(t, filepath.Join(dir, "other"))))
	run(1, "is not loopback", "check", "--etcd-endpoints", "192.0.2.1:2379")
	run(1, "is not host:port", "check", "--etcd-endpoints", "none")
}

// exists makes the file ledger in a directory.
func exists(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "ledger")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	return path
}
