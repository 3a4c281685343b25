package accounting

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

// ErrConflict means that the Key of an entry belongs to another tenant.
var ErrConflict = errors.New("account entry of another tenant")

// ErrLedger means that a ledger file is damaged or not a ledger.
var ErrLedger = errors.New("bad ledger")

// Buckets of the ledger:
//
//	rfaas   "version" -> 2 (in version 1 hours had no checksums), "pruned" -> seconds since 1970, 8 bytes big endian: leases as of before that may have been forgotten
//	leases  incarnation 16 | lease 8 | part 4 (big endian) -> entry as in the journal, without padding
//	hours   hours since 1970, 4 bytes big endian | tenant  -> Total, 8 times lo 8 | hi 8 | CRC32C of key and total 4, little endian
//	owners  incarnation 16 -> time of the claim in seconds since 1970, 8 bytes big endian | owner
//
// hours is what the differences of leases' merges add up to, written in the same transaction.
var (
	bucketMeta    = []byte("rfaas")
	bucketLeases  = []byte("leases")
	bucketHours   = []byte("hours")
	bucketOwners  = []byte("owners")
	keyVersion    = []byte("version")
	keyPruned     = []byte("pruned")
	ledgerVersion = []byte{2}
)

// Ledger has the resource manager's accounts, in a file that survives a crash at any moment. Merging is idempotent and
// independent of the order. It is safe for concurrent use. Only one process at a time can open it.
type Ledger struct {
	db       *bbolt.DB
	updating chan struct{}         // capacity 1: full during a transaction that writes
	replica  Replica               // nil: the file has everything
	trouble  atomic.Pointer[error] // of the replica's last transaction; nil: it succeeded
	diverged atomic.Pointer[error] // not nil: the ledger cannot be used any more
	// Booked is called by Merge for each difference that it has written to disk. Set it before the first Merge. nil: nothing is called.
	Booked func(tenant, node string, u Use)
}

// OpenLedger opens or creates the ledger at path. It waits for at most timeout for another process that has it open.
// The error is ErrLedger if the file is too damaged to be read, or if it is missing or empty although there was one.
// Single damaged records are no error here: operations on them fail, and CheckLedger finds them.
func OpenLedger(path string, timeout time.Duration) (*Ledger, error) {
	l, err := openAt(path, timeout)
	if err != nil {
		return nil, fmt.Errorf("ledger %s: %w", path, err)
	}
	_ = begin(path) // a full disk must not prevent opening the ledger; the next OpenLedger tries again
	return l, nil
}

// OpenTemporaryLedger makes a ledger in memory. It is lost when it is closed or the process ends.
func OpenTemporaryLedger() (*Ledger, error) {
	fd, err := unix.MemfdCreate("rfaas-ledger", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("temporary ledger: %w", err)
	}
	defer unix.Close(fd) // the ledger opens it again
	l, err := openAt(fmt.Sprintf("/proc/self/fd/%d", fd), time.Second)
	if err != nil {
		return nil, fmt.Errorf("temporary ledger: %w", err)
	}
	return l, nil
}

func openAt(path string, timeout time.Duration) (*Ledger, error) {
	l := &Ledger{updating: make(chan struct{}, 1)}
	err := sound(func() (err error) {
		if l.db, err = openCurrent(path, timeout); err != nil {
			return err
		}
		if err := whole(l.db, path); err != nil {
			return err
		}
		if err := l.db.Update(prepare); err != nil {
			return err
		}
		return l.view(func(tx *bbolt.Tx) error { // read every page, to detect damage now
			for _, name := range [][]byte{bucketLeases, bucketHours, bucketOwners} {
				if err := tx.Bucket(name).ForEach(func([]byte, []byte) error { return nil }); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil && l.db != nil {
		l.db.Close()
	}
	return l, err
}

// openCurrent opens or creates the file at path. While it waits for another process, that process may replace the file, as
// CompactLedger and RestoreLedger do, or set it aside, as SetLedgerAside does.
func openCurrent(path string, timeout time.Duration) (*bbolt.DB, error) {
	if err := checkBegun(path); err != nil {
		return nil, err
	}
	for {
		var file *os.File
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: timeout, FreelistType: bbolt.FreelistMapType,
			OpenFile: func(name string, flags int, mode os.FileMode) (_ *os.File, err error) {
				file, err = os.OpenFile(name, flags, mode)
				return file, err
			}})
		if errors.Is(err, berrors.ErrTimeout) {
			return nil, fmt.Errorf("another process has had it open for %v, probably a resource manager with the same state directory: stop that process, or use another "+
				"directory (%w)", timeout, err)
		}
		if err != nil {
			return nil, err
		}
		opened, err := file.Stat()
		if err == nil {
			var current os.FileInfo
			if current, err = os.Stat(path); err == nil && os.SameFile(opened, current) {
				return db, nil
			}
		}
		db.Close()
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("%w: another process has renamed or removed it just now", ErrLedger)
		}
		if err != nil {
			return nil, err
		}
	}
}

// prepare creates the buckets and converts those of an older version.
func prepare(tx *bbolt.Tx) error {
	for _, name := range [][]byte{bucketMeta, bucketLeases, bucketHours, bucketOwners} {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return err
		}
	}
	meta := tx.Bucket(bucketMeta)
	if meta.Get(keyVersion) == nil {
		return meta.Put(keyVersion, ledgerVersion)
	}
	old, err := oldVersion(tx)
	if err != nil || !old {
		return err
	}
	hours := tx.Bucket(bucketHours)
	sealed := map[string][]byte{}
	if err := hours.ForEach(func(k, v []byte) error {
		sealed[string(k)] = sealTotal(k, v)
		return nil
	}); err != nil {
		return err
	}
	for k, v := range sealed {
		if err := hours.Put([]byte(k), v); err != nil {
			return err
		}
	}
	return meta.Put(keyVersion, ledgerVersion)
}

// oldVersion reports whether the totals have no checksums. It returns an error for an unknown version.
func oldVersion(tx *bbolt.Tx) (bool, error) {
	v := tx.Bucket(bucketMeta).Get(keyVersion)
	if !bytes.Equal(v, ledgerVersion) && !bytes.Equal(v, []byte{1}) {
		return false, fmt.Errorf("%w: version %x, this program knows %x", ErrLedger, v, ledgerVersion)
	}
	return bytes.Equal(v, []byte{1}), nil
}

// view runs a transaction that reads. A damaged page causes ErrLedger instead of a crash, here and in update.
func (l *Ledger) view(f func(*bbolt.Tx) error) error {
	if why := l.diverged.Load(); why != nil {
		return *why
	}
	return sound(func() error { return l.db.View(f) })
}

// Close closes the file.
func (l *Ledger) Close() error { return l.db.Close() }

// Size returns the size of the file in bytes; 0 if the ledger cannot be used any more.
func (l *Ledger) Size() (n int64) {
	_ = l.view(func(tx *bbolt.Tx) error {
		n = tx.Size()
		return nil
	})
	return n
}

// Merge merges entries of leases. If the error is nil, all of them are on disk. Entries that are ErrInvalid or
// ErrConflict, or that meet a damaged record (ErrLedger), are left out and all others are merged. With any other error
// nothing is merged, except that with a replica the first of many entries may be. now is the latest hour to which use is booked, since the clocks of
// nodes differ. If ctx ends, Merge ends soon with an error.
func (l *Ledger) Merge(ctx context.Context, now time.Time, entries ...Entry) error {
	var bad []error
	for some := range slices.Chunk(entries, l.most(2, max(len(entries), 1))) { // the lease and the hour
		more, err := l.mergeSome(ctx, now, some)
		if err != nil {
			return err
		}
		bad = append(bad, more...)
	}
	return errors.Join(bad...)
}

// mergeSome merges entries in one transaction. bad has an error for each entry that it has left out.
func (l *Ledger) mergeSome(ctx context.Context, now time.Time, entries []Entry) (bad []error, _ error) {
	booked := make([]Use, len(entries))
	err := l.update(ctx, func(tx *writing) error {
		bad = nil
		for i := range entries {
			u, err := merge(tx, now, &entries[i])
			booked[i] = u
			if errors.Is(err, ErrInvalid) || errors.Is(err, ErrConflict) || errors.Is(err, ErrLedger) {
				bad = append(bad, err)
			} else if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	for i, u := range booked {
		if l.Booked != nil && u != (Use{}) {
			l.Booked(entries[i].Tenant, entries[i].Node, u)
		}
	}
	return bad, nil
}

// merge merges an entry and returns the difference that it booked.
func merge(tx *writing, now time.Time, e *Entry) (Use, error) {
	if err := e.Check(); err != nil {
		return Use{}, err
	}
	leases := tx.Bucket(bucketLeases)
	key := ledgerKey(e.Key)
	merged := *e
	var before Use
	if leases.Get(key) == nil && e.AsOf.Unix() < pruned(tx.Tx) {
		return Use{}, fmt.Errorf("%w: lease %v as of %v is older than the leases that the ledger keeps, and may have been counted already", ErrInvalid, e.Key, e.AsOf.UTC().Format(time.RFC3339))
	}
	if b := leases.Get(key); b != nil {
		old, err := parseEntry(b)
		if err != nil {
			return Use{}, fmt.Errorf("%w: lease %v: %w", ErrLedger, e.Key, err)
		}
		if old.Tenant != e.Tenant {
			return Use{}, fmt.Errorf("%w: lease %v belongs to %q, not to %q", ErrConflict, e.Key, old.Tenant, e.Tenant)
		}
		if old.Use.Covers(e.Use) && (old.Final || !e.Final) {
			return Use{}, nil
		}
		before = old.Use
		old.merge(e)
		merged = old
	}
	if err := tx.put(bucketLeases, key, appendEntry(nil, &merged)); err != nil {
		return Use{}, err
	}
	u := merged.Use.Since(before)
	if err := book(tx, hourOf(e.AsOf, now), e.Tenant, u); err != nil {
		return Use{}, err
	}
	return u, nil
}

// pruned returns the time before which leases may have been pruned, in seconds since 1970.
func pruned(tx *bbolt.Tx) int64 {
	if b := tx.Bucket(bucketMeta).Get(keyPruned); len(b) == 8 {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

// clockSkew is how much the clocks of executors may differ from the resource manager's. The ledger's time of a lease
// may be by either clock, so a pruned lease may look that much younger in an executor's journal.
const clockSkew = time.Hour

// pruneMost is how many leases one transaction prunes.
const pruneMost = 10_000

// Prune removes leases that have used nothing since before, up to 10,000 of them, and returns their number. Bills do
// not change, since they come from the hours. Merge refuses later entries of removed leases, so that nothing counts
// twice, even if clocks differ by an hour: it refuses unknown leases that have used nothing since an hour after before.
// Their space in the file is reused. Prune also removes the owners of incarnations that were claimed before that time
// and have no lease left.
func (l *Ledger) Prune(ctx context.Context, before time.Time) (n int, err error) {
	var from []byte
	for limit := pruneMost; limit > 0; {
		most := max(1, l.most(1, limit)-1) // one change of the transaction is the time
		pruned, next, err := l.pruneSome(ctx, before, from, most)
		if n += pruned; err != nil || next == nil {
			return n, err
		}
		from = next
		limit -= pruned
	}
	return n, nil
}

// pruneSome removes at most `most` leases in one transaction, beginning at the key `from`. It returns their number and the key at which to continue. The key is nil if
// it has seen all leases. Then it has removed owners too.
func (l *Ledger) pruneSome(ctx context.Context, before time.Time, from []byte, most int) (n int, next []byte, err error) {
	err = l.update(ctx, func(tx *writing) error {
		n, next = 0, nil
		horizon := before.Unix()
		if horizon <= 0 {
			return nil
		}
		var old [][]byte
		c := tx.Bucket(bucketLeases).Cursor()
		for k, v := c.Seek(from); k != nil; k, v = c.Next() {
			if len(old) == most {
				next = bytes.Clone(k)
				break
			}
			if e, err := parseEntry(v); err == nil && e.AsOf.Unix() < horizon {
				old = append(old, bytes.Clone(k))
			}
		}
		for _, k := range old {
			if err := tx.remove(bucketLeases, k); err != nil {
				return err
			}
		}
		if err := disown(tx, horizon, most-len(old)); err != nil {
			return err
		}
		refused := horizon + int64(clockSkew/time.Second)
		if n = len(old); n == 0 || refused <= pruned(tx.Tx) {
			return nil
		}
		return tx.put(bucketMeta, keyPruned, binary.BigEndian.AppendUint64(nil, uint64(refused)))
	})
	if err != nil {
		return 0, nil, fmt.Errorf("ledger: %w", err)
	}
	return n, next, nil
}

// book adds to a tenant's total for an hour.
func book(tx *writing, hour uint32, tenant string, u Use) error {
	hours := tx.Bucket(bucketHours)
	key := append(binary.BigEndian.AppendUint32(nil, hour), tenant...)
	total, err := parseTotal(key, hours.Get(key))
	if err != nil {
		return err
	}
	total.Add(u)
	b := make([]byte, 0, totalSize)
	for _, n := range total {
		b = binary.LittleEndian.AppendUint64(b, n.Lo)
		b = binary.LittleEndian.AppendUint64(b, n.Hi)
	}
	return tx.put(bucketHours, key, sealTotal(key, b))
}

const totalSize = NumCounters * 16

// sealTotal returns a total with its checksum.
func sealTotal(key, b []byte) []byte {
	return binary.LittleEndian.AppendUint32(bytes.Clone(b), totalSum(key, b))
}

func parseTotal(key, b []byte) (Total, error) {
	var t Total
	if b == nil {
		return t, nil
	}
	if len(b) != totalSize+4 || binary.LittleEndian.Uint32(b[totalSize:]) != totalSum(key, b[:totalSize]) {
		return t, fmt.Errorf("%w: the total %x is damaged (%d bytes)", ErrLedger, key, len(b))
	}
	for i := range t {
		t[i].Lo = binary.LittleEndian.Uint64(b[16*i:])
		t[i].Hi = binary.LittleEndian.Uint64(b[16*i+8:])
	}
	return t, nil
}

func ledgerKey(k Key) []byte {
	b := append(make([]byte, 0, 28), k.Incarnation[:]...)
	b = binary.BigEndian.AppendUint64(b, k.Lease)
	return binary.BigEndian.AppendUint32(b, k.Part)
}

// hourOf returns the hour to which use as of t is booked: not before 1970 and not after now.
func hourOf(t, now time.Time) uint32 {
	if t.After(now) {
		t = now
	}
	return uint32(min(max(t.Unix(), 0)/3600, 1<<32-1))
}

// Lease returns the ledger's entry of a Key.
func (l *Ledger) Lease(k Key) (e Entry, known bool, err error) {
	err = l.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketLeases).Get(ledgerKey(k))
		if b == nil {
			return nil
		}
		known = true
		e, err = parseEntry(b)
		return err
	})
	if err != nil {
		return e, known, fmt.Errorf("ledger: %w", err)
	}
	return e, known, nil
}

// Leases calls f with every lease of a tenant ("" for all) that has used something at or after since, until f returns
// false. f must not change the ledger.
func (l *Ledger) Leases(tenant string, since time.Time, f func(Entry) bool) error {
	err := l.view(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketLeases).Cursor()
		for k, v := c.First(); k != nil; k, v = c.Next() {
			e, err := parseEntry(v)
			if err != nil {
				return fmt.Errorf("%w: lease %x: %w", ErrLedger, k, err)
			}
			if tenant != "" && e.Tenant != tenant || e.AsOf.Before(since) {
				continue
			}
			if !f(e) {
				break
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	return nil
}

// Totals returns the totals of tenants ("" for all) from the hour of since on.
func (l *Ledger) Totals(tenant string, since time.Time) (map[string]Total, error) {
	totals := map[string]Total{}
	err := l.view(func(tx *bbolt.Tx) error {
		first := binary.BigEndian.AppendUint32(nil, hourOf(since, since))
		c := tx.Bucket(bucketHours).Cursor()
		for k, v := c.Seek(first); k != nil; k, v = c.Next() {
			name := string(k[4:])
			if tenant != "" && name != tenant {
				continue
			}
			t, err := parseTotal(k, v)
			if err != nil {
				return err
			}
			sum := totals[name]
			sum.AddTotal(t)
			totals[name] = sum
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	return totals, nil
}
