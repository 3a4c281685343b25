package accounting

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

// begunSuffix names a file beside the ledger that says that there was a ledger.
const begunSuffix = ".begun"

// sound runs f, which uses a database that may be damaged. A panic, or a fault behind the end of the file, is an ErrLedger.
func sound(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: a page is damaged: %v (see rfaas ledger check, and rfaas ledger restore)", ErrLedger, r)
		}
	}()
	return f()
}

// checkBegun refuses a ledger that is missing or empty where there was one.
func checkBegun(path string) error {
	if st, err := os.Stat(path); err == nil && st.Size() > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil // opening it tells more
	}
	if _, err := os.Stat(path + begunSuffix); err != nil {
		return nil
	}
	return fmt.Errorf("%w: it is missing or empty, and there was one: bring a backup back with \"rfaas ledger restore\", or remove %s to begin a new one",
		ErrLedger, path+begunSuffix)
}

// begin notes that there is a ledger.
func begin(path string) error {
	if _, err := os.Stat(path + begunSuffix); err == nil {
		return nil
	}
	if err := os.WriteFile(path+begunSuffix, []byte("a file that rfaas made when it made the ledger\n"), 0o600); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// whole says whether the file has all pages that the database counts.
func whole(db *bbolt.DB, path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	return db.View(func(tx *bbolt.Tx) error {
		if st.Size() < tx.Size() {
			return fmt.Errorf("%w: the file has %d bytes, want at least %d: it was cut off", ErrLedger, st.Size(), tx.Size())
		}
		return nil
	})
}

// totalSum is the checksum of a record of the bucket hours.
func totalSum(key, value []byte) uint32 {
	return crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, value)
}

// LedgerReport is what CheckLedger has found.
type LedgerReport struct {
	Leases, Totals int      // records, good ones
	Bytes          int64    // of the file
	Damage         []string // what is wrong, at most maxDamage of it; none: the ledger is good
}

const maxDamage = 100

func (r *LedgerReport) wrong(err error) {
	if len(r.Damage) < maxDamage {
		r.Damage = append(r.Damage, err.Error())
	}
}

// openToRead opens a ledger that nobody may have open for writing, and does not make one.
func openToRead(path string, timeout time.Duration) (db *bbolt.DB, err error) {
	if err := checkBegun(path); err != nil {
		return nil, err
	}
	err = sound(func() error {
		db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: timeout, ReadOnly: true})
		return err
	})
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("%w: a resource manager has it open: stop it first", err)
	}
	return db, err
}

// CheckLedger reads all of the ledger at path, which nobody may have open for writing, and checks its structure and the checksum of
// every record. An error means that it could not be read at all; of what can be, the report says what is wrong.
func CheckLedger(path string, timeout time.Duration) (r LedgerReport, err error) {
	db, err := openToRead(path, timeout)
	if err != nil {
		return r, fmt.Errorf("ledger %s: %w", path, err)
	}
	defer db.Close()
	check(db, path, &r)
	return r, nil
}

func check(db *bbolt.DB, path string, r *LedgerReport) {
	err := sound(func() error {
		if err := whole(db, path); err != nil {
			return err
		}
		return db.View(func(tx *bbolt.Tx) error {
			r.Bytes = tx.Size()
			for _, name := range [][]byte{bucketMeta, bucketLeases, bucketHours} {
				if tx.Bucket(name) == nil {
					return fmt.Errorf("%w: it has no bucket %q", ErrLedger, name)
				}
			}
			old, err := oldVersion(tx)
			if err != nil {
				return err
			}
			if err := tx.Bucket(bucketLeases).ForEach(func(k, v []byte) error {
				if e, err := parseEntry(v); err != nil {
					r.wrong(fmt.Errorf("lease %x: %w", k, err))
				} else if string(ledgerKey(e.Key)) != string(k) {
					r.wrong(fmt.Errorf("lease %x: its record is that of lease %v", k, e.Key))
				} else {
					r.Leases++
				}
				return nil
			}); err != nil {
				return err
			}
			if err := tx.Bucket(bucketHours).ForEach(func(k, v []byte) error {
				if old {
					v = sealTotal(k, v)
				}
				if _, err := parseTotal(k, v); err != nil {
					r.wrong(err)
				} else {
					r.Totals++
				}
				return nil
			}); err != nil {
				return err
			}
			if owners := tx.Bucket(bucketOwners); owners != nil { // older ledgers have none
				if err := owners.ForEach(func(k, v []byte) error {
					if len(k) != 16 || len(v) < 8 {
						r.wrong(fmt.Errorf("%w: the owner of incarnation %x has a record of %d bytes, want at least 8", ErrLedger, k, len(v)))
					}
					return nil
				}); err != nil {
					return err
				}
			}
			for err := range tx.Check() {
				r.wrong(err)
			}
			return nil
		})
	})
	if err != nil {
		r.wrong(err)
	}
}

// BackupLedger writes a copy of the ledger at path, which nobody may have open for writing, to another file, which it replaces. A damaged
// ledger is not copied.
func BackupLedger(path, to string, timeout time.Duration) error {
	db, err := openToRead(path, timeout)
	if err != nil {
		return fmt.Errorf("ledger %s: %w", path, err)
	}
	defer db.Close()
	var r LedgerReport
	if check(db, path, &r); len(r.Damage) > 0 {
		return fmt.Errorf("ledger %s: %w: %s: not copied", path, ErrLedger, r.Damage[0])
	}
	return replaceFile(to, func(w io.Writer) error {
		return db.View(func(tx *bbolt.Tx) error {
			_, err := tx.WriteTo(w)
			return err
		})
	})
}

// RestoreLedger puts a backup, which must be good, in the place of the ledger at path, which nobody may have open. What was there is kept
// beside it, and kept is its name; empty: nothing was there.
func RestoreLedger(path, backup string, timeout time.Duration) (kept string, err error) {
	db, err := openToRead(backup, timeout)
	if err != nil {
		return "", fmt.Errorf("backup %s: %w", backup, err)
	}
	defer db.Close()
	var r LedgerReport
	if check(db, backup, &r); len(r.Damage) > 0 {
		return "", fmt.Errorf("backup %s: %w: %s", backup, ErrLedger, r.Damage[0])
	}
	there, err := os.OpenFile(path, os.O_RDWR, 0)
	switch {
	case err == nil:
		defer there.Close()
		if err := unix.Flock(int(there.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			return "", fmt.Errorf("ledger %s: %w: a resource manager has it open: stop it first", path, err)
		}
		kept = fmt.Sprintf("%s.replaced-%s", path, time.Now().UTC().Format("20060102T150405.000"))
		if err := os.Link(path, kept); err != nil {
			return "", err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}
	if err := replaceFile(path, func(w io.Writer) error {
		return db.View(func(tx *bbolt.Tx) error {
			_, err := tx.WriteTo(w)
			return err
		})
	}); err != nil {
		return kept, err
	}
	return kept, begin(path)
}

// replaceFile puts a file with what write writes in the place of another, whole or not at all. Its mode is 0600.
func replaceFile(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.new")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // if it is still there
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}
