package accounting

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/rfaas-go/rfaas/tests/smalldisk"
)

// now is later than anything in these tests.
var now = time.Unix(1e6, 0)

func openLedger(t *testing.T, path string) *Ledger {
	t.Helper()
	l, err := OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func units(t *testing.T, l *Ledger, tenant string, since time.Time, c Counter) int64 {
	t.Helper()
	totals, err := l.Totals(tenant, since)
	if err != nil {
		t.Fatal(err)
	}
	total := totals[tenant]
	return total.Of(c).Int64()
}

func TestLedger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	l := openLedger(t, path)
	if _, err := OpenLedger(path, 10*time.Millisecond); !errors.Is(err, berrors.ErrTimeout) || !strings.Contains(err.Error(), path) ||
		!strings.Contains(err.Error(), "another process has had it open") {
		t.Errorf("opened twice: %v", err)
	}
	bob := entry(2, 10)
	bob.Tenant = "bob"
	thief := entry(1, 1000)
	thief.Tenant = "bob"
	for range 3 {
		if err := l.Merge(t.Context(), now, entry(1, 3), entry(1, 2), bob); err != nil {
			t.Fatal(err)
		}
	}
	err := l.Merge(t.Context(), now, thief, Entry{}, entry(3, 1))
	if !errors.Is(err, ErrConflict) || !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
	later := entry(1, 4000) // an hour later
	later.Final = true
	if err := l.Merge(t.Context(), now, later); err != nil {
		t.Fatal(err)
	}
	stale := entry(1, 5)
	if err := l.Merge(t.Context(), now, stale); err != nil {
		t.Fatal(err)
	}
	l.Close()
	l = openLedger(t, path)
	defer l.Close()
	e, known, err := l.Lease(later.Key)
	if err != nil || !known || e != later {
		t.Errorf("%v %v %v", e, known, err)
	}
	if _, known, err := l.Lease(Key{Lease: 77}); known || err != nil {
		t.Errorf("%v %v", known, err)
	}
	for _, c := range []struct {
		tenant string
		since  int64
		want   int64
	}{{"ann", 0, 4001}, {"ann", 7200, 4001}, {"ann", 3 * 3600, 3997}, {"ann", 4 * 3600, 0}, {"bob", 0, 10}} {
		if got := units(t, l, c.tenant, time.Unix(c.since, 0), CoreMicros); got != c.want {
			t.Errorf("%s since %d: %d, want %d", c.tenant, c.since, got, c.want)
		}
	}
	var leases []uint64
	if err := l.Leases("ann", time.Unix(7202, 0), func(e Entry) bool { leases = append(leases, e.Lease); return true }); err != nil || len(leases) != 1 || leases[0] != 1 {
		t.Errorf("%v %v", leases, err)
	}
	leases = nil
	if err := l.Leases("", time.Time{}, func(e Entry) bool { leases = append(leases, e.Lease); return len(leases) < 2 }); err != nil || len(leases) != 2 {
		t.Errorf("%v %v", leases, err)
	}
	// A clock that is ahead books in the present hour.
	ahead := entry(9, 0)
	ahead.AsOf, ahead.Use[CoreMicros] = now.Add(1000*time.Hour), 6
	if err := l.Merge(t.Context(), now, ahead); err != nil || units(t, l, "ann", now, CoreMicros) != 6 || units(t, l, "ann", now.Add(time.Hour), CoreMicros) != 0 {
		t.Errorf("%v", err)
	}
}

// A temporary ledger works like any other, but creates no file, which a killed process would leave behind.
func TestTemporaryLedger(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	l, err := OpenTemporaryLedger()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var all []Entry
	for i := range uint64(2000) { // which do not fit into the first pages
		all = append(all, entry(i+1, 1))
	}
	if err := l.Merge(t.Context(), now, all...); err != nil {
		t.Fatal(err)
	}
	if got := units(t, l, "ann", time.Time{}, CoreMicros); got != int64(len(all)) {
		t.Errorf("%d units, want %d", got, len(all))
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("files of a temporary ledger: %v, %v", files, err)
	}
}

func TestLedgerOfAnotherVersionOrKind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	l := openLedger(t, path)
	set := func(bucket, key, value []byte) {
		if err := l.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Put(key, value) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Merge(t.Context(), now, entry(1, 1)); err != nil {
		t.Fatal(err)
	}
	set(bucketLeases, ledgerKey(entry(1, 1).Key), []byte("garbage"))
	if err := l.Merge(t.Context(), now, entry(2, 1), entry(1, 2)); !errors.Is(err, ErrLedger) {
		t.Errorf("%v", err)
	}
	if _, known, _ := l.Lease(entry(2, 1).Key); !known {
		t.Error("one damaged record stops the others")
	}
	if _, _, err := l.Lease(entry(1, 1).Key); err == nil {
		t.Error("garbage was read")
	}
	if err := l.Leases("", time.Time{}, func(Entry) bool { return true }); !errors.Is(err, ErrLedger) {
		t.Errorf("%v", err)
	}
	set(bucketHours, binary.BigEndian.AppendUint32(nil, 7), []byte("short"))
	if _, err := l.Totals("", time.Time{}); !errors.Is(err, ErrLedger) {
		t.Errorf("%v", err)
	}
	set(bucketMeta, keyVersion, []byte{9})
	l.Close()
	if _, err := OpenLedger(path, time.Second); !errors.Is(err, ErrLedger) || !strings.Contains(err.Error(), "09") {
		t.Errorf("%v", err)
	}
	if err := os.WriteFile(path, []byte("not a database"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenLedger(path, time.Second); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("%v", err)
	}
}

// Executors with journals, a network that loses, repeats, delays and reorders, a manager with a ledger; all of them crash.
// When everybody has calmed down, the ledger has what was used to the unit: never more, and of an executor that crashed
// at least what it had written.
func TestModel(t *testing.T) {
	dir := t.TempDir()
	seeds := uint64(40)
	if testing.Short() {
		seeds = 8
	}
	for seed := range seeds {
		model(t, filepath.Join(dir, string(rune('a'+seed))), seed)
	}
}

type modelExecutor struct {
	disk        *crashDisk
	journal     *Journal
	incarnation byte
	leases      map[uint64]Entry // running
	next        uint64
}

func model(t *testing.T, path string, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 2))
	l := openLedger(t, path)
	l.db.NoSync = true    // the process crashes, not the disk; bbolt's own tests crash disks
	used := map[Key]Use{} // the truth
	safe := map[Key]Use{} // what may not be lost any more
	var network []Entry
	var executors []*modelExecutor
	starts := byte(0)
	start := func(x *modelExecutor) {
		starts++
		x.incarnation, x.leases, x.journal = starts, map[uint64]Entry{}, x.disk.open(t)
	}
	for range 3 {
		x := &modelExecutor{disk: &crashDisk{r: r, file: &crashFile{}}}
		executors = append(executors, x)
		start(x)
	}
	// settle drops what the ledger covers.
	settle := func(x *modelExecutor) {
		for _, e := range x.journal.Live() {
			got, known, err := l.Lease(e.Key)
			if err != nil {
				t.Fatal(err)
			}
			if _, running := x.leases[e.Lease]; known && got.Use.Covers(e.Use) && !(running && e.Incarnation[0] == x.incarnation) {
				x.journal.Drop(e.Key)
			}
		}
	}
	deliver := func(i int) {
		if err := l.Merge(t.Context(), now, network[i]); err != nil {
			t.Fatal(err)
		}
	}
	for range 400 {
		x := executors[r.IntN(len(executors))]
		switch r.IntN(10) {
		case 0:
			x.next++
			e := entry(x.next, 0)
			e.Incarnation = [16]byte{x.incarnation}
			x.leases[x.next] = e
		case 1, 2: // work
			for id, e := range x.leases {
				e.Use[r.IntN(NumCounters)] += r.Uint64N(1000)
				x.leases[id], used[e.Key] = e, e.Use
			}
		case 3, 4: // an interval is over
			for id, e := range x.leases {
				if e.Final = r.IntN(4) == 0; e.Final {
					delete(x.leases, id)
				}
				if err := x.journal.Put(e); err != nil {
					t.Fatal(err)
				}
				safe[e.Key] = e.Use
			}
		case 5: // reports all it has
			network = append(network, x.journal.Live()...)
		case 6:
			if len(network) > 0 {
				i := r.IntN(len(network))
				deliver(i)
				if r.IntN(3) > 0 { // else it will come again
					network[i] = network[len(network)-1]
					network = network[:len(network)-1]
				}
			}
		case 7:
			settle(x)
		case 8:
			if r.IntN(3) == 0 {
				x.disk.crash()
				start(x)
			}
		case 9:
			if r.IntN(3) == 0 {
				l.Close()
				l = openLedger(t, path)
				l.db.NoSync = true
				network = network[:len(network)/2]
			}
		}
	}
	for _, x := range executors { // calm
		if err := l.Merge(t.Context(), now, x.journal.Live()...); err != nil {
			t.Fatal(err)
		}
		settle(x)
		for _, e := range x.journal.Live() {
			if _, running := x.leases[e.Lease]; !running {
				t.Errorf("seed %d: %v stays in the journal", seed, e.Key)
			}
		}
	}
	for i := range network { // and what was late
		deliver(i)
	}
	var sum Total
	for k, u := range used {
		e, known, err := l.Lease(k)
		if err != nil {
			t.Fatal(err)
		}
		if s := safe[k]; !known && s != (Use{}) || !e.Use.Covers(s) || !u.Covers(e.Use) {
			t.Errorf("seed %d: %v: ledger %v, safe %v, used %v", seed, k, e.Use, s, u)
		}
		sum.Add(e.Use)
	}
	totals, err := l.Totals("", time.Time{})
	if err != nil || totals["ann"] != sum {
		t.Errorf("seed %d: hours add up to %v, leases to %v (%v)", seed, totals["ann"], sum, err)
	}
	l.Close()
}

// A full disk is an error. It loses no earlier record, and ends when there is room again.
func TestDiskFull(t *testing.T) { smalldisk.Run(t, "256k", diskFull) }

func diskFull(t *testing.T, dir string) {
	l := openLedger(t, filepath.Join(dir, "ledger"))
	j, err := OpenJournal(dir, "n")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Merge(t.Context(), now, entry(1, 1)), j.Put(entry(1, 1))); err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for block := make([]byte, 512); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	f.Close()
	var ledgerErr, journalErr error
	fits := uint64(1) // entries until each is full
	for i := uint64(2); i < 2000 && (ledgerErr == nil || journalErr == nil); i++ {
		if journalErr == nil {
			journalErr = j.Put(entry(i, i))
		}
		if ledgerErr == nil {
			if ledgerErr = l.Merge(t.Context(), now, entry(i, i)); ledgerErr == nil {
				fits = i
			}
		}
	}
	if !errors.Is(ledgerErr, syscall.ENOSPC) || !errors.Is(journalErr, syscall.ENOSPC) {
		t.Fatalf("ledger: %v, journal: %v", ledgerErr, journalErr)
	}
	if e, known, err := l.Lease(entry(fits, 0).Key); err != nil || !known || e != entry(fits, fits) {
		t.Errorf("%v %v %v", e, known, err)
	}
	if _, known, err := l.Lease(entry(fits+1, 0).Key); known || err != nil {
		t.Errorf("there is what was refused: %v", err)
	}
	n := len(j.Live()) // in memory, the refused one included
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Merge(t.Context(), now, entry(fits+1, 7)), j.Put(entry(1, 9))); err != nil {
		t.Fatal(err)
	}
	l.Close()
	j.Close()
	l = openLedger(t, filepath.Join(dir, "ledger"))
	defer l.Close()
	if j, err = OpenJournal(dir, "n"); err != nil || len(j.Live()) != n {
		t.Fatalf("%v: %d in the journal, want %d", err, len(j.Live()), n)
	}
	j.Close()
	want := int64(7)
	for i := int64(1); i <= int64(fits); i++ {
		want += i
	}
	if got := units(t, l, "ann", time.Time{}, CoreMicros); got != want {
		t.Errorf("%d units in the ledger, want %d", got, want)
	}
}

// Old leases are forgotten, their use is not, and what is said of them again does not count again.
func TestPrune(t *testing.T) {
	l, err := OpenLedger(filepath.Join(t.TempDir(), "ledger"), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	now := time.Unix(1_700_000_000, 0)
	entry := func(lease uint64, age time.Duration, calls uint64) Entry {
		return Entry{Key: Key{Incarnation: [16]byte{1}, Lease: lease}, Tenant: "ann", Began: now.Add(-age), AsOf: now.Add(-age), Final: true,
			Use: Use{Calls: calls}}
	}
	old, young := entry(1, 100*24*time.Hour, 5), entry(2, time.Hour, 7)
	calls := func() string {
		t.Helper()
		totals, err := l.Totals("", time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		total := totals["ann"]
		return total.Of(Calls).String()
	}
	if err := l.Merge(t.Context(), now, old, young); err != nil {
		t.Fatal(err)
	}
	size := l.Size()
	for want := range 2 { // nothing is that old; then one is
		if n, err := l.Prune(t.Context(), now.Add(-time.Duration(200-150*want)*24*time.Hour)); err != nil || n != want {
			t.Errorf("%d forgotten, want %d: %v", n, want, err)
		}
	}
	if _, known, err := l.Lease(old.Key); known || err != nil {
		t.Errorf("the old lease: %v %v", known, err)
	}
	if _, known, err := l.Lease(young.Key); !known || err != nil {
		t.Errorf("the young lease: %v %v", known, err)
	}
	if calls() != "12" || size == 0 {
		t.Errorf("%s calls in %d bytes", calls(), size)
	}
	if err := l.Merge(t.Context(), now, old, entry(3, 99*24*time.Hour, 1), young, entry(4, time.Minute, 1)); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "older than the leases that the ledger keeps") {
		t.Errorf("said again: %v", err)
	}
	if calls() != "13" {
		t.Errorf("%s calls", calls())
	}
	if n, err := l.Prune(t.Context(), time.Time{}); n != 0 || err != nil {
		t.Errorf("%d %v", n, err)
	}
}

// A transaction of Prune continues where the one before has ended. So many small transactions, as with a replica, read each lease once.
func TestPruneContinues(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	const leases, most = 95, 10
	f := &fakeReplica{most: most, commit: func(context.Context, []Change) error { return nil }}
	l := f.open(t)
	var all []Entry
	for i := range uint64(leases) {
		at := now
		if i%2 == 1 {
			at = now.Add(-100 * 24 * time.Hour)
		}
		all = append(all, Entry{Key: Key{Incarnation: [16]byte{1}, Lease: i + 1}, Tenant: "ann", Began: at, AsOf: at, Use: Use{1}})
	}
	if err := l.Merge(t.Context(), now, all...); err != nil {
		t.Fatal(err)
	}
	before := now.Add(-50 * 24 * time.Hour)
	n, next, err := l.pruneSome(t.Context(), before, nil, 3)
	if want := ledgerKey(all[6].Key); n != 3 || !bytes.Equal(next, want) || err != nil {
		t.Errorf("%d leases pruned, continue at %x, want 3 and %x; %v", n, next, want, err)
	}
	if n, next, err = l.pruneSome(t.Context(), before, ledgerKey(all[90].Key), most); n != 2 || next != nil || err != nil {
		t.Errorf("%d leases at the end, continue at %x; %v", n, next, err)
	}
	if n, err := l.Prune(t.Context(), before); n != leases/2-5 || err != nil {
		t.Errorf("%d leases pruned, want %d; %v", n, leases/2-5, err)
	}
	left := 0
	if err := l.Leases("", time.Time{}, func(Entry) bool { left++; return true }); left != leases-leases/2 || err != nil {
		t.Errorf("%d leases are left, want %d; %v", left, leases-leases/2, err)
	}
}

// The ledger's time of a pruned lease may be by the resource manager's clock, and that of the executor's journal by the
// executor's clock. If the executor's clock is ahead, the journal's entry looks younger, but must still not count
// again.
func TestPruneWithSkewedClocks(t *testing.T) {
	l, err := OpenLedger(filepath.Join(t.TempDir(), "ledger"), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	now := time.Unix(1_700_000_000, 0)
	charged := now.Add(-50 * 24 * time.Hour)
	e := Entry{Key: Key{Incarnation: [16]byte{1}, Lease: 1}, Tenant: "ann", Began: charged.Add(-time.Minute), AsOf: charged, Use: Use{Calls: 5}}
	if err := l.Merge(t.Context(), now, e); err != nil {
		t.Fatal(err)
	}
	if n, err := l.Prune(t.Context(), charged.Add(time.Second)); n != 1 || err != nil {
		t.Fatalf("%d forgotten: %v", n, err)
	}
	again := e
	again.Final, again.AsOf = true, charged.Add(50*time.Minute)
	if err := l.Merge(t.Context(), now, again); !errors.Is(err, ErrInvalid) {
		t.Errorf("by a clock that is ahead: %v", err)
	}
	totals, err := l.Totals("", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if total := totals["ann"]; total.Of(Calls).String() != "5" {
		t.Errorf("%s calls were charged, and 5 were made", total.Of(Calls))
	}
}

// damaged returns a closed ledger of n leases, for tests that damage its file.
func damaged(t *testing.T, n uint64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ledger")
	l, err := OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var entries []Entry
	for i := range n {
		entries = append(entries, entry(1+i, 7))
	}
	if err := errors.Join(l.Merge(t.Context(), now, entries...), l.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// A missing or empty ledger is an error, and not silently recreated.
func TestLedgerThatIsGone(t *testing.T) {
	for name, harm := range map[string]func(string) error{
		"empty":   func(path string) error { return os.Truncate(path, 0) },
		"missing": os.Remove,
	} {
		path := damaged(t, 3)
		if err := harm(path); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenLedger(path, time.Second); !errors.Is(err, ErrLedger) || !strings.Contains(err.Error(), "rfaas ledger restore") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := CheckLedger(path, time.Second); !errors.Is(err, ErrLedger) {
			t.Errorf("%s: check: %v", name, err)
		}
		if err := os.Remove(path + begunSuffix); err != nil { // as the error says
			t.Fatal(err)
		}
		l, err := OpenLedger(path, time.Second)
		if err != nil {
			t.Fatalf("%s: begun anew: %v", name, err)
		}
		l.Close()
	}
}

// Damage anywhere in the file is an error of the operation that reads it, and never a crash. A changed total is not
// billed. CheckLedger and a backup find the damage.
func TestDamagedLedger(t *testing.T) {
	path := damaged(t, 500)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := CheckLedger(path, time.Second); err != nil || r.Leases != 500 || r.Totals != 1 || len(r.Damage) != 0 {
		t.Fatalf("%+v %v", r, err)
	}
	l, err := OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	want, err := l.Totals("", time.Time{})
	if err = errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	r := rand.New(rand.NewPCG(1, 2))
	found := 0
	for i := range 150 {
		b := bytes.Clone(good)
		switch i % 3 {
		case 0: // a bit
			b[r.IntN(len(b))] ^= 1 << r.IntN(8)
		case 1: // a piece of zeros, as of a lost sector
			at := r.IntN(len(b)/512) * 512
			clear(b[at : at+512])
		case 2: // the end
			b = b[:r.IntN(len(b))]
		}
		path := filepath.Join(dir, strconv.Itoa(i))
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		report, checkErr := CheckLedger(path, time.Second)
		bad := checkErr != nil || len(report.Damage) > 0
		if bad {
			found++
		}
		if err := BackupLedger(path, path+".backup", time.Second); (err != nil) != bad {
			t.Errorf("%d: backup: %v; check %v %q", i, err, checkErr, report.Damage)
		}
		path += ".copy" // a failed open may keep its lock until the program ends
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := OpenLedger(path, time.Second)
		if err != nil {
			continue
		}
		totals, err := l.Totals("", time.Time{})
		if err == nil && !bad && !maps.Equal(totals, want) {
			t.Errorf("%d: another bill, and nothing was found", i)
		}
		if err == nil && totals["ann"] != want["ann"] && len(totals) > 0 {
			t.Errorf("%d: a changed total is billed", i)
		}
		l.Merge(t.Context(), now, entry(1000, 1)) // an error or not
		sound(l.Close)
	}
	if found < 50 {
		t.Errorf("only %d of 150 were found", found)
	}
	t.Logf("%d of 150 were found, the others hit free pages", found)
}

// A ledger from before checksums is converted, with its bills.
func TestLedgerOfVersionOne(t *testing.T) {
	path := damaged(t, 3)
	l, err := OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	want, err := l.Totals("", time.Time{})
	if err != nil || len(want) != 1 {
		t.Fatal(want, err)
	}
	if err := l.db.Update(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketHours).Cursor()
		k, v := c.First()
		if err := tx.Bucket(bucketHours).Put(bytes.Clone(k), bytes.Clone(v[:totalSize])); err != nil {
			return err
		}
		return tx.Bucket(bucketMeta).Put(keyVersion, []byte{1})
	}); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := CheckLedger(path, time.Second); err != nil || r.Totals != 1 || len(r.Damage) != 0 {
		t.Errorf("%+v %v", r, err)
	}
	if l, err = OpenLedger(path, time.Second); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got, err := l.Totals("", time.Time{}); err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, want %v: %v", got, want, err)
	}
}
