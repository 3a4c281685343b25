package accounting

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
)

// IDBucket and IDKey name the record with the id of a ledger that is not in a file. Processes recognize the ledger by this random text.
const (
	IDBucket = "rfaas"
	IDKey    = "id"
)

// NewRecords returns the records of a new ledger, except for its id.
func NewRecords() []Change {
	return []Change{{string(bucketMeta), string(keyVersion), ledgerVersion}}
}

// Records calls f with every record, ordered by bucket and key.
func (l *Ledger) Records(f func(Change) error) error {
	err := l.view(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketHours, bucketLeases, bucketOwners, bucketMeta} {
			if err := tx.Bucket(name).ForEach(func(k, v []byte) error {
				return f(Change{string(name), string(k), bytes.Clone(v)})
			}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	return nil
}

// Digest identifies the content of a ledger, so that two copies can be compared. Add all records, ordered by bucket and key. Its zero value
// has no records.
type Digest struct {
	Leases, Totals int
	sum            hash.Hash
}

// Add adds a record.
func (d *Digest) Add(c Change) {
	if c.Bucket == IDBucket && c.Key == IDKey {
		return // a copy may get its id later
	}
	if d.sum == nil {
		d.sum = sha256.New()
	}
	for _, part := range []string{c.Bucket, c.Key, string(c.Value)} {
		var size [8]byte
		binary.LittleEndian.PutUint64(size[:], uint64(len(part)))
		d.sum.Write(size[:])
		d.sum.Write([]byte(part))
	}
	switch c.Bucket {
	case string(bucketLeases):
		d.Leases++
	case string(bucketHours):
		d.Totals++
	}
}

// Sum returns the checksum of the records.
func (d *Digest) Sum() string {
	if d.sum == nil {
		return ""
	}
	return hex.EncodeToString(d.sum.Sum(nil))
}

// SetLedgerAside renames the ledger at path, so that it is not used any more, and returns its new name. The caller must have the ledger open.
func SetLedgerAside(path string) (aside string, err error) {
	aside = fmt.Sprintf("%s.imported-%s", path, time.Now().UTC().Format("20060102T150405.000"))
	if err := os.Rename(path, aside); err != nil {
		return "", err
	}
	return aside, syncDir(filepath.Dir(path)) // a crash of the node must not bring back the old name
}

// CreateLedger makes the ledger file path from the records that load adds. The file must not exist. CreateLedger checks the records, and that the
// file has all of them. Then it calls take, which ends the ledger from which the records come, and renames the file to path. So at most one of the
// two ledgers can be used at any time. If take fails and reports open, the other ledger may have ended. Then the file keeps its temporary name,
// which the error gives.
func CreateLedger(path string, load func(add func(Change) error) error, take func() (open bool, err error)) (Digest, error) {
	var want, got Digest
	fail := func(err error) (Digest, error) { return got, fmt.Errorf("ledger %s: %w", path, err) }
	if _, err := os.Lstat(path); err == nil {
		return fail(fmt.Errorf("%w: there is one already", os.ErrExist))
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), filepath.Base(path)+".*.new")
	if err != nil {
		return fail(err)
	}
	keep := false
	defer func() {
		if !keep {
			os.RemoveAll(dir)
		}
	}()
	made := filepath.Join(dir, "ledger")
	l, err := openAt(made, time.Second)
	if err != nil {
		return fail(err)
	}
	err = l.fill(func(add func(Change) error) error {
		return load(func(c Change) error {
			want.Add(c)
			return add(c)
		})
	})
	if err == nil {
		err = l.Records(func(c Change) error {
			got.Add(c)
			return nil
		})
	}
	if cerr := l.Close(); err == nil {
		err = cerr
	}
	if err == nil && got.Sum() != want.Sum() {
		err = fmt.Errorf("%w: the records in the file differ from those that were written", ErrLedger)
	}
	if err != nil {
		return fail(err)
	}
	r, err := CheckLedger(made, time.Second)
	if err == nil && len(r.Damage) > 0 {
		err = fmt.Errorf("%w: %s", ErrLedger, r.Damage[0])
	}
	if err == nil {
		err = errors.Join(syncDir(dir), syncDir(filepath.Dir(path)))
	}
	if err != nil {
		return fail(err)
	}
	keep = true
	if open, err := take(); err != nil {
		if keep = open; open {
			err = fmt.Errorf("%w; the copy of its records is %s", err, made)
		}
		return fail(err)
	}
	if err := os.Link(made, path); err != nil { // unlike a rename, replaces nothing
		return fail(fmt.Errorf("%w; the ledger is %s: rename it to %s", err, made, path))
	}
	keep = false
	if err := errors.Join(begin(path), syncDir(filepath.Dir(path))); err != nil {
		return fail(err)
	}
	return got, nil
}
