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

// begunSuffix is the suffix of a file beside the ledger which records that there was a ledger.
const begunSuffix = ".begun"

// sound runs f on a database that may be damaged. It returns ErrLedger for a panic, and for a fault beyond the end of
// the file.
func sound(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: a page is damaged: %v (see rfaas ledger check, and rfaas ledger restore)", ErrLedger, r)
		}
	}()
	return f()
}

// checkBegun returns ErrLedger if the ledger is missing or empty although there was one.
func checkBegun(path string) error {
	if st, err := os.Stat(path); err == nil && st.Size() > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil // opening it returns the details
	}
	if _, err := os.Stat(path + begunSuffix); err != nil {
		return nil
	}
	return fmt.Errorf("%w: it is missing or empty, although there was one: restore a backup with \"rfaas ledger restore\", or remove %s to start a new one",
		ErrLedger, path+begunSuffix)
}

// begin records that there is a ledger.
func begin(path string) error {
	if _, err := os.Stat(path + begunSuffix); err == nil {
		return nil
	}
	if err := os.WriteFile(path+begunSuffix, []byte("rfaas created this file together with the ledger\n"), 0o600); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// whole returns an error if the file lacks pages that the database has.
func whole(db *bbolt.DB, path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	return db.View(func(tx *bbolt.Tx) error {
		if st.Size() < tx.Size() {
			return fmt.Errorf("%w: the file has %d bytes, want at least %d: it is truncated", ErrLedger, st.Size(), tx.Size())
		}
		return nil
	})
}

// totalSum returns the checksum of a record in the bucket hours.
func totalSum(key, value []byte) uint32 {
	return crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, value)
}

// LedgerReport is the result of CheckLedger.
type LedgerReport struct {
	Leases, Totals int      // valid records
	Bytes          int64    // of the file
	Unused         int64    // bytes of it without data
	Damage         []string // at most maxDamage errors; empty: the ledger is valid
}

const maxDamage = 100

func (r *LedgerReport) wrong(err error) {
	if len(r.Damage) < maxDamage {
		r.Damage = append(r.Damage, err.Error())
	}
}

// openToRead opens an existing ledger. It fails after timeout if another process has the ledger open for writing.
func openToRead(path string, timeout time.Duration) (db *bbolt.DB, err error) {
	if err := checkBegun(path); err != nil {
		return nil, err
	}
	err = sound(func() error {
		db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: timeout, ReadOnly: true, PreLoadFreelist: true})
		return err
	})
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("a resource manager has it open: stop the resource manager first (%w)", err)
	}
	return db, err
}

// CheckLedger reads all of the ledger at path, and checks its structure and the checksum of every record. No process
// may have it open for writing. It returns an error if the ledger cannot be opened. Damage to an opened ledger is in
// the report.
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
			st, err := os.Stat(path)
			if err != nil {
				return err
			}
			r.Bytes, r.Unused = st.Size(), unused(db)+st.Size()-tx.Size()
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
					r.wrong(fmt.Errorf("lease %x: the record belongs to lease %v", k, e.Key))
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

// BackupLedger copies the ledger at path to another file, which it replaces. No process may have the ledger open for
// writing. It returns an error for a damaged ledger.
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

// RestoreLedger replaces the ledger at path by a backup, which must be valid. No process may have the ledger open. The
// old ledger is kept beside it under the name kept; empty: there was none.
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
			return "", fmt.Errorf("ledger %s: %w: a resource manager has it open: stop the resource manager first", path, err)
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

// replaceFile atomically replaces a file by one with the output of write and mode 0600.
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
