package accounting

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/smalldisk"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// fill merges n leases of one incarnation, each a minute after the one before, in transactions of 500.
func fill(t *testing.T, l *Ledger, n int, tenant string) {
	t.Helper()
	var batch []Entry
	for i := range n {
		e := entry(uint64(i)+1, 1)
		e.Tenant, e.AsOf = tenant, time.Unix(int64(i)*60, 0)
		if batch = append(batch, e); len(batch) == 500 || i == n-1 {
			if err := l.Merge(t.Context(), time.Unix(1e9, 0), batch...); err != nil {
				t.Fatal(err)
			}
			batch = batch[:0]
		}
	}
}

// A compacted ledger is smaller and has the same records, and nothing of the copy is left beside it.
func TestCompactLedger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	l := openLedger(t, path)
	fill(t, l, 5000, "ann")
	totals, err := l.Totals("", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := l.Prune(t.Context(), time.Unix(4900*60, 0)); err != nil || n != 4900 {
		t.Fatalf("pruned %d, %v", n, err)
	}
	if l.Unused() < l.Size()/2 {
		t.Fatalf("%d of %d bytes are unused after pruning", l.Unused(), l.Size())
	}
	if _, _, err := CompactLedger(path, 10*time.Millisecond); err == nil {
		t.Fatal("compacted under a process that has it open")
	}
	l.Close()
	before, after, err := CompactLedger(path, time.Second)
	if err != nil || after > before/2 {
		t.Fatalf("%d bytes, before %d: %v", after, before, err)
	}
	l = openLedger(t, path)
	defer l.Close()
	if again, err := l.Totals("", time.Time{}); err != nil || !maps.Equal(again, totals) {
		t.Errorf("totals %v, before %v: %v", again, totals, err)
	}
	leases := 0
	if err := l.Leases("", time.Time{}, func(Entry) bool { leases++; return true }); err != nil || leases != 100 {
		t.Errorf("%d leases, want 100: %v", leases, err)
	}
	old := entry(1, 1000)
	old.AsOf = time.Unix(60, 0)
	if err := l.Merge(t.Context(), time.Unix(1e9, 0), old); !errors.Is(err, ErrInvalid) {
		t.Errorf("a pruned lease is counted again: %v", err)
	}
	if names, _ := filepath.Glob(path + ".*"); len(names) != 1 { // the file .begun
		t.Errorf("beside the ledger are %q", names)
	}
}

// A process that waits for the ledger while it is replaced opens the new file.
func TestOpenDuringCompaction(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	l := openLedger(t, path)
	fill(t, l, 10, "ann")
	opened := make(chan *Ledger)
	go func() {
		other, err := OpenLedger(path, time.Minute)
		if err != nil {
			t.Error(err)
		}
		opened <- other
	}()
	// What CompactLedger does under the lock: another file takes the place.
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path+".new", b, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	other := <-opened
	if err := other.Merge(t.Context(), now, entry(77, 1)); err != nil {
		t.Fatal(err)
	}
	other.Close()
	again := openLedger(t, path)
	defer again.Close()
	if _, known, err := again.Lease(entry(77, 1).Key); err != nil || !known {
		t.Errorf("the lease went into the file that was replaced: %v", err)
	}
}

// A process that waits for a ledger that is set aside meanwhile does not create a new one.
func TestOpenWhileSetAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	l := openLedger(t, path)
	opened := make(chan error)
	go func() {
		_, err := OpenLedger(path, time.Minute)
		opened <- err
	}()
	testkit.Eventually(t, "the other one waits for the lock", func() bool {
		fds, err := filepath.Glob("/proc/self/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, fd := range fds {
			if to, err := os.Readlink(fd); err == nil && to == path {
				n++
			}
		}
		return n == 2
	})
	aside, err := SetLedgerAside(path)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := <-opened; !errors.Is(err, ErrLedger) {
		t.Errorf("the process that waited: %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is a ledger at the old path: %v", err)
	}
	if err := os.Rename(aside, path); err != nil {
		t.Fatal(err)
	}
	openLedger(t, path).Close()
}

func TestCompactDamagedLedger(t *testing.T) {
	path := damaged(t, 100)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(before, []byte(entryMagic))
	if at < 0 {
		t.Fatal("no record found")
	}
	before[at+60]++
	if err := os.WriteFile(path, before, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := CompactLedger(path, time.Second); err == nil {
		t.Error("compacted")
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the ledger has changed: %v", err)
	}
	if names, _ := filepath.Glob(path + ".*.new"); len(names) > 0 {
		t.Errorf("%q are left", names)
	}
}

func TestCompactOnFullDisk(t *testing.T) { smalldisk.Run(t, "4m", compactOnFullDisk) }

func compactOnFullDisk(t *testing.T, dir string) {
	path := filepath.Join(dir, "ledger")
	l := openLedger(t, path)
	fill(t, l, 3000, "ann")
	l.Close()
	if _, _, err := CompactLedger(path, time.Second); err != nil {
		t.Fatalf("while there is space: %v", err)
	}
	other, err := os.Create(filepath.Join(dir, "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for err == nil {
		_, err = other.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if _, _, err := CompactLedger(path, time.Second); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("on a full disk: %v", err)
	}
	if names, _ := filepath.Glob(path + ".*.new"); len(names) > 0 {
		t.Errorf("%q are left", names)
	}
	if r, err := CheckLedger(path, time.Second); err != nil || r.Leases != 3000 || len(r.Damage) > 0 {
		t.Errorf("afterwards: %+v %v", r, err)
	}
}

// The sizes that docs/operations.md states: bytes for each ended lease, and for each hour in which a tenant uses something.
func TestLedgerSizes(t *testing.T) {
	const leases, tenants, days = 30_000, 20, 60
	size := func(name string, fill func(*Ledger)) int64 {
		path := filepath.Join(t.TempDir(), name)
		l := openLedger(t, path)
		fill(l)
		l.Close()
		r, err := CheckLedger(path, time.Second)
		if err != nil || len(r.Damage) > 0 {
			t.Fatalf("%+v %v", r, err)
		}
		t.Logf("%s: %d leases, %d totals, %d bytes, %d unused", name, r.Leases, r.Totals, r.Bytes, r.Unused)
		return r.Bytes - r.Unused
	}
	merge := func(l *Ledger, entries []Entry) {
		for len(entries) > 0 {
			n := min(len(entries), 1000)
			if err := l.Merge(t.Context(), time.Unix(1e9, 0), entries[:n]...); err != nil {
				t.Fatal(err)
			}
			entries = entries[n:]
		}
	}
	rnd := rand.New(rand.NewPCG(7, 8))
	empty := size("empty", func(*Ledger) {})
	perLease := float64(size("leases", func(l *Ledger) { // of 100 executors, in the order of time
		var all []Entry
		for i := range leases {
			e := entry(uint64(i/100)+1, 1)
			e.Incarnation[0], e.Incarnation[1] = byte(1+rnd.IntN(100)), 1
			e.Lease, e.Tenant, e.Node = uint64(i)+1, fmt.Sprintf("tenant-%02d", i%tenants), "node-0123.cluster"
			e.AsOf, e.Final = time.Unix(7200, 0), true
			all = append(all, e)
		}
		merge(l, all)
	})-empty) / leases
	perDay := float64(size("totals", func(l *Ledger) { // one lease for each tenant
		var all []Entry
		for hour := range uint64(24 * days) {
			for tenant := range uint64(tenants) {
				e := entry(tenant+1, hour+1)
				e.Tenant, e.AsOf = fmt.Sprintf("tenant-%02d", tenant), time.Unix(int64(hour)*3600, 0)
				all = append(all, e)
			}
		}
		merge(l, all)
	})-empty) / tenants / days
	t.Logf("%.0f bytes for a lease, %.0f for a day of a tenant", perLease, perDay)
	const docLease, docDay = 450, 10_000
	if perLease > docLease || perLease < docLease/2 || perDay > docDay || perDay < docDay/2 {
		t.Errorf("%.0f bytes for a lease and %.0f for a day of a tenant; docs/operations.md says up to %d and %d", perLease, perDay, docLease, docDay)
	}
}
