package accounting

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// worthCompacting is the size from which Wasteful considers a ledger, in bytes.
const worthCompacting = 16 << 20

// Wasteful reports whether more than half of a ledger of at least 16 MiB is unused, for example after Prune.
func (l *Ledger) Wasteful() bool {
	return l.Size() >= worthCompacting && l.Unused() > l.Size()/2
}

// Unused returns how many bytes of the file have no data. New records use them first.
func (l *Ledger) Unused() int64 { return unused(l.db) }

// unused returns the size of the free pages. Pages that the last transaction has freed count, too.
func unused(db *bbolt.DB) int64 {
	s := db.Stats()
	return int64(s.FreePageN+s.PendingPageN) * int64(db.Info().PageSize)
}

// compactStep is how many bytes one transaction of CompactLedger copies.
const compactStep = 4 << 20

// CompactLedger replaces the ledger at path by a copy without unused space, and returns the sizes of the file before
// and after. No process may have the ledger open for writing. If the ledger is damaged, if the file system has too
// little space for the copy, or if anything else fails, the ledger stays as it is.
func CompactLedger(path string, timeout time.Duration) (before, after int64, err error) {
	fail := func(err error) (int64, int64, error) {
		return 0, 0, fmt.Errorf("compact ledger %s: %w", path, err)
	}
	db, err := openToRead(path, timeout)
	if err != nil {
		return fail(err)
	}
	defer db.Close()
	var old LedgerReport
	if check(db, path, &old); len(old.Damage) > 0 {
		return fail(fmt.Errorf("%w: %s", ErrLedger, old.Damage[0]))
	}
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.new")
	if err != nil {
		return fail(err)
	}
	copied := file.Name()
	defer os.Remove(copied) // if it is still there
	file.Close()
	if err := roomFor(filepath.Dir(path), old.Bytes-old.Unused); err != nil {
		return fail(err)
	}
	fresh, err := copyCompacted(copied, db)
	if err != nil {
		return fail(err)
	}
	if fresh.Leases != old.Leases || fresh.Totals != old.Totals || len(fresh.Damage) > 0 {
		return fail(fmt.Errorf("the copy has %d leases and %d totals, want %d and %d %q", fresh.Leases, fresh.Totals, old.Leases, old.Totals, fresh.Damage))
	}
	if err := os.Rename(copied, path); err != nil {
		return fail(err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return fail(err)
	}
	return old.Bytes, fresh.Bytes, nil
}

// copyCompacted copies a ledger to an empty file, and checks the copy.
func copyCompacted(path string, from *bbolt.DB) (r LedgerReport, err error) {
	to, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second, NoSync: true, FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return r, err
	}
	defer to.Close()
	if err := sound(func() error { return bbolt.Compact(to, from, compactStep) }); err != nil {
		return r, err
	}
	if err := to.Sync(); err != nil {
		return r, err
	}
	check(to, path, &r)
	return r, nil
}

// roomFor returns an error if a file system has less space than a copy of n bytes needs.
func roomFor(dir string, n int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", dir, err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < n {
		return fmt.Errorf("%w: the copy needs about %d bytes, and %s has %d: free some space, or move the ledger to a larger file system", unix.ENOSPC, n, dir, free)
	}
	return nil
}
