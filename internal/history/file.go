package history

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/rfaas-go/rfaas/accounting"
)

// Buckets of the file:
//
//	buckets  tier 1 | start in seconds since 1970, 8 bytes big endian -> counters and tenants, varints | CRC32C of key and value, 4 bytes little endian
//	nodes    name -> cores, time of the last report in seconds since 1970, varints | CRC32C likewise
var (
	inBuckets = []byte("buckets-1")
	inNodes   = []byte("nodes-1")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// file is where a history is stored. Without a database it is in memory only.
type file struct {
	mu    sync.Mutex // held by Save; taken before the history's lock
	path  string
	db    *bbolt.DB
	saved time.Time
	err   error // of the last Save
}

// errDamaged means that the file cannot be read.
var errDamaged = errors.New("damaged history")

// Open opens or creates a history in a file; empty: in memory. Damaged records are skipped. A file that cannot be read at all is
// renamed, with a warning in the log, because a resource manager must start without it. The error is of the file system, or
// says that another process has the file open for longer than timeout.
func Open(path string, timeout time.Duration, now time.Time, log *slog.Logger) (*History, error) {
	h := empty(log)
	if path == "" {
		return h, nil
	}
	h.file.path = path
	err := h.open(path, timeout, now)
	if errors.Is(err, errDamaged) {
		if err = h.setAside(now, err); err == nil {
			h = empty(log)
			h.file.path = path
			err = h.open(path, timeout, now)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("history %s: %w", path, err)
	}
	return h, nil
}

// setAside renames a damaged file.
func (h *History) setAside(now time.Time, why error) error {
	aside := fmt.Sprintf("%s.damaged-%d", h.file.path, now.Unix())
	h.log.Warn("the history is damaged; it begins a new file, and bills are not affected", "file", h.file.path, "kept", aside, "error", why)
	return os.Rename(h.file.path, aside)
}

// sound calls f, and returns errDamaged if a damaged page makes bbolt panic or read beyond the file.
func sound(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", errDamaged, r)
		}
	}()
	return f()
}

func (h *History) open(path string, timeout time.Duration, now time.Time) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	damaged := 0
	err := sound(func() error {
		if st, err := os.Stat(path); err == nil && st.Size() > 0 && st.Size() < int64(2*os.Getpagesize()) {
			return fmt.Errorf("%w: the file has only %d bytes", errDamaged, st.Size())
		}
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: timeout, FreelistType: bbolt.FreelistMapType})
		switch {
		case err == nil:
		case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
			return fmt.Errorf("%w: %w", errDamaged, err)
		case errors.Is(err, bolterrors.ErrTimeout):
			return fmt.Errorf("another process has had it open for %v, probably a resource manager with the same state directory (%w)", timeout, err)
		default: // for example too many open files or a full disk, which do not mean that the file is damaged
			return err
		}
		h.file.db = db
		return db.Update(func(tx *bbolt.Tx) error {
			if st, err := os.Stat(path); err == nil && st.Size() < tx.Size() {
				return fmt.Errorf("%w: the file has %d of %d bytes", errDamaged, st.Size(), tx.Size())
			}
			if err := create(tx); err != nil {
				return err
			}
			damaged, err = h.load(tx, now)
			return err
		})
	})
	if err != nil && h.file.db != nil {
		h.file.db.Close()
		h.file.db = nil
	}
	if damaged > 0 {
		h.log.Warn("dropped damaged records of the history; bills are not affected", "file", path, "records", damaged)
	}
	return err
}

// load reads all records, and removes damaged ones.
func (h *History) load(tx *bbolt.Tx, now time.Time) (damaged int, err error) {
	var old, bad [][]byte
	var last []byte
	if err := tx.Bucket(inBuckets).ForEach(func(k, v []byte) error {
		if bytes.Compare(k, last) <= 0 {
			return fmt.Errorf("%w: record %x follows record %x, want ascending order", errDamaged, k, last)
		}
		last = slices.Clone(k)
		tier, b, ok := parseBucket(k, v)
		if !ok {
			bad = append(bad, slices.Clone(k))
		} else if s := &h.tiers[tier]; now.Sub(b.Start) <= time.Duration(s.Keep)*s.Width { // keys ascend
			s.buckets = append(s.buckets, b)
		} else {
			h.dirty[stored{tier, b.Start.Unix()}] = true // the next Save removes it
		}
		return nil
	}); err != nil {
		return 0, err
	}
	if err := tx.Bucket(inNodes).ForEach(func(k, v []byte) error {
		if b, ok := unsealed(k, v); ok {
			cores, n := binary.Uvarint(b)
			seen, m := binary.Uvarint(b[max(n, 0):])
			if at := time.Unix(int64(seen), 0); n > 0 && m > 0 && now.Sub(at) < forgetNode && len(h.nodes) < maxNodes {
				h.nodes[string(k)] = &node{cores: uint32(cores), seen: at, saved: at}
			} else {
				old = append(old, slices.Clone(k))
			}
		} else {
			bad = append(bad, slices.Clone(k))
		}
		return nil
	}); err != nil {
		return 0, err
	}
	for _, k := range append(old, bad...) {
		if err := errors.Join(tx.Bucket(inBuckets).Delete(k), tx.Bucket(inNodes).Delete(k)); err != nil {
			return 0, err
		}
	}
	return len(bad), nil
}

// sealed returns a value with its checksum.
func sealed(key, value []byte) []byte {
	return binary.LittleEndian.AppendUint32(value, crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, value))
}

// unsealed is the inverse of sealed. ok is false if the record is damaged.
func unsealed(key, b []byte) (value []byte, ok bool) {
	if len(b) < 4 {
		return nil, false
	}
	value = b[:len(b)-4]
	return value, binary.LittleEndian.Uint32(b[len(value):]) == crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, value)
}

func (s stored) key() []byte {
	return binary.BigEndian.AppendUint64([]byte{byte(s.tier)}, uint64(s.start))
}

func (b *Bucket) encode(key []byte) []byte {
	var v []byte
	b.each(func(n *uint64) { v = binary.AppendUvarint(v, *n) })
	v = binary.AppendUvarint(v, uint64(len(b.Tenants)))
	for _, tenant := range slices.Sorted(maps.Keys(b.Tenants)) {
		v = binary.AppendUvarint(v, uint64(len(tenant)))
		v = append(v, tenant...)
		for _, n := range b.Tenants[tenant] {
			v = binary.AppendUvarint(v, n)
		}
	}
	return sealed(key, v)
}

func parseBucket(key, b []byte) (tier int, bucket *Bucket, ok bool) {
	v, ok := unsealed(key, b)
	if !ok || len(key) != 9 || int(key[0]) >= len(Tiers) {
		return 0, nil, false
	}
	next := func() uint64 {
		n, size := binary.Uvarint(v)
		if size <= 0 {
			ok = false
			return 0
		}
		v = v[size:]
		return n
	}
	bucket = &Bucket{Start: time.Unix(int64(binary.BigEndian.Uint64(key[1:])), 0), Tenants: map[string]accounting.Use{}}
	bucket.each(func(n *uint64) { *n = next() })
	for range next() {
		size := next()
		if !ok || size > uint64(len(v)) || len(bucket.Tenants) > maxTenants {
			return 0, nil, false
		}
		name := string(v[:size])
		v = v[size:]
		var u accounting.Use
		for i := range u {
			u[i] = next()
		}
		bucket.Tenants[name] = u
	}
	return int(key[0]), bucket, ok && len(v) == 0
}

// saveEvery is how often Save writes: once for each bucket of the finest tier.
const saveEvery = 10 * time.Second

// Save writes what has changed to the file, at most every ten seconds unless last is set. If that fails, the history stays in memory and the next
// call tries again. The log says when it begins to fail and when it succeeds again.
func (h *History) Save(now time.Time, last bool) {
	h.file.mu.Lock()
	defer h.file.mu.Unlock()
	f := &h.file
	if f.path == "" {
		h.mu.Lock()
		defer h.mu.Unlock()
		clear(h.dirty)
		clear(h.forgotten)
		return
	}
	if since := now.Sub(f.saved); !last && since >= 0 && since < saveEvery {
		return
	}
	f.saved = now
	var err error
	if f.db == nil { // the last Save could not make a new file
		err = h.renew()
	}
	if err == nil {
		err = h.write(last)
	}
	if errors.Is(err, errDamaged) {
		// The damaged database is not closed, because that may wait for ever for locks of the failed update.
		f.db = nil
		if err = h.setAside(now, err); err == nil {
			err = h.renew()
		}
		if err == nil {
			err = h.write(true)
		}
	}
	switch {
	case err != nil && f.err == nil:
		h.log.Warn("cannot write the history; it stays in memory, and the resource manager tries again", "error", err)
	case err == nil && f.err != nil:
		h.log.Info("the history is written again")
	}
	f.err = err
}

// renew creates a new file for everything that is in memory.
func (h *History) renew() error {
	db, err := bbolt.Open(h.file.path, 0o600, &bbolt.Options{Timeout: time.Second, FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return err
	}
	if err := db.Update(create); err != nil {
		db.Close()
		return err
	}
	h.file.db = db
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.tiers {
		for _, b := range h.tiers[i].buckets {
			h.dirty[stored{i, b.Start.Unix()}] = true
		}
	}
	return nil
}

// create makes the buckets that are missing.
func create(tx *bbolt.Tx) error {
	for _, name := range [][]byte{inBuckets, inNodes} {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return err
		}
	}
	return nil
}

// write writes what has changed; all nodes if last is set.
func (h *History) write(last bool) error {
	puts := map[stored][]byte{}  // nil: remove
	nodes := map[string][]byte{} // nil: remove
	h.mu.Lock()
	for name := range h.forgotten {
		nodes[name] = nil
	}
	clear(h.forgotten)
	for s := range h.dirty {
		puts[s] = nil
	}
	for i := range h.tiers {
		for _, b := range h.tiers[i].buckets {
			if s := (stored{i, b.Start.Unix()}); h.dirty[s] {
				puts[s] = b.encode(s.key())
			}
		}
	}
	clear(h.dirty)
	for name, n := range h.nodes {
		if n.seen.Sub(n.saved) > time.Hour || last {
			n.saved = n.seen
			nodes[name] = sealed([]byte(name), binary.AppendUvarint(binary.AppendUvarint(nil, uint64(n.cores)), uint64(max(n.seen.Unix(), 0))))
		}
	}
	h.mu.Unlock()
	err := sound(func() error {
		return h.file.db.Update(func(tx *bbolt.Tx) error {
			for s, v := range puts {
				if err := put(tx.Bucket(inBuckets), s.key(), v); err != nil {
					return err
				}
			}
			for name, v := range nodes {
				if err := put(tx.Bucket(inNodes), []byte(name), v); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		h.mu.Lock()
		for s := range puts {
			h.dirty[s] = true
		}
		for name := range nodes {
			if n := h.nodes[name]; n != nil {
				n.saved = time.Time{}
			} else {
				h.forgotten[name] = true
			}
		}
		h.mu.Unlock()
	}
	return err
}

func put(b *bbolt.Bucket, k, v []byte) error {
	if v == nil {
		return b.Delete(k)
	}
	return b.Put(k, v)
}

// Close writes everything and closes the file.
func (h *History) Close(now time.Time) {
	h.Save(now, true)
	h.file.mu.Lock()
	defer h.file.mu.Unlock()
	if h.file.db != nil {
		h.file.db.Close()
		h.file.db = nil
	}
	h.file.path = ""
}
