package accounting

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
)

// MaxName is the most bytes of a tenant's or a node's name.
const MaxName = 255

// Entry is the account of a Key: the tenant that pays, the times, and the use so far.
type Entry struct {
	Key
	Tenant string    // 1 to MaxName bytes
	Node   string    // at most MaxName bytes, for readers
	Began  time.Time // of the lease
	AsOf   time.Time // of Use
	Final  bool      // Use does not grow any more
	Use    Use
}

// ErrInvalid reports an entry that is not valid.
var ErrInvalid = errors.New("invalid account entry")

// Check returns an error that wraps ErrInvalid if the entry is not valid.
func (e *Entry) Check() error {
	switch {
	case e.Lease == 0:
		return fmt.Errorf("%w: %v: lease 0", ErrInvalid, e.Key)
	case e.Incarnation == [16]byte{}:
		return fmt.Errorf("%w: %v: no incarnation", ErrInvalid, e.Key)
	case e.Tenant == "" || len(e.Tenant) > MaxName:
		return fmt.Errorf("%w: %v: the tenant's name has %d bytes, want 1 to %d", ErrInvalid, e.Key, len(e.Tenant), MaxName)
	case len(e.Node) > MaxName:
		return fmt.Errorf("%w: %v: the node's name has %d bytes, want at most %d", ErrInvalid, e.Key, len(e.Node), MaxName)
	}
	return nil
}

// merge takes in another state of the same Key.
func (e *Entry) merge(o *Entry) {
	e.Use = e.Use.Max(o.Use)
	e.Final = e.Final || o.Final
	if o.AsOf.After(e.AsOf) {
		e.AsOf = o.AsOf
	}
	if o.Began.Before(e.Began) {
		e.Began = o.Began
	}
}

// An entry on disk, in the journal and in the ledger:
//
//	0      4      8             24       32     36     40       48       56              120
//	+------+------+-------------+--------+------+------+--------+--------+---------------+-------------------
//	| RFA1 | crc  | incarnation | lease  | part |flags | began  | as of  | 8 counters    |tl|nl|tenant|node
//	+------+------+-------------+--------+------+------+--------+--------+---------------+-------------------
//
// Little endian; times in nanoseconds since 1970; crc is CRC32C of everything behind it. In the journal a record is
// padded with zeros to recordSize, so that one that is damaged does not hide the next.
const (
	entryMagic  = "RFA1"
	entryFixed  = 122
	recordSize  = 640
	flagFinal   = 1
	entryMaxLen = entryFixed + 2*MaxName
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func appendEntry(b []byte, e *Entry) []byte {
	start := len(b)
	b = append(b, entryMagic...)
	b = append(b, 0, 0, 0, 0)
	b = append(b, e.Incarnation[:]...)
	le := binary.LittleEndian
	b = le.AppendUint64(b, e.Lease)
	b = le.AppendUint32(b, e.Part)
	var flags uint32
	if e.Final {
		flags |= flagFinal
	}
	b = le.AppendUint32(b, flags)
	b = le.AppendUint64(b, uint64(e.Began.UnixNano()))
	b = le.AppendUint64(b, uint64(e.AsOf.UnixNano()))
	for _, n := range e.Use {
		b = le.AppendUint64(b, n)
	}
	b = append(b, byte(len(e.Tenant)), byte(len(e.Node)))
	b = append(b, e.Tenant...)
	b = append(b, e.Node...)
	le.PutUint32(b[start+4:], crc32.Checksum(b[start+8:], castagnoli))
	return b
}

// parseEntry reads what appendEntry wrote; b may be longer.
func parseEntry(b []byte) (Entry, error) {
	var e Entry
	if len(b) < entryFixed || string(b[:4]) != entryMagic {
		return e, fmt.Errorf("%w: the %d bytes do not begin with the fixed part of an entry", ErrInvalid, len(b))
	}
	tenant, node := int(b[120]), int(b[121])
	end := entryFixed + tenant + node
	if len(b) < end {
		return e, fmt.Errorf("%w: %d bytes, want %d", ErrInvalid, len(b), end)
	}
	le := binary.LittleEndian
	if got, want := crc32.Checksum(b[8:end], castagnoli), le.Uint32(b[4:]); got != want {
		return e, fmt.Errorf("%w: checksum %08x, want %08x", ErrInvalid, got, want)
	}
	copy(e.Incarnation[:], b[8:24])
	e.Lease, e.Part = le.Uint64(b[24:]), le.Uint32(b[32:])
	e.Final = le.Uint32(b[36:])&flagFinal != 0
	e.Began, e.AsOf = time.Unix(0, int64(le.Uint64(b[40:]))), time.Unix(0, int64(le.Uint64(b[48:])))
	for i := range e.Use {
		e.Use[i] = le.Uint64(b[56+8*i:])
	}
	e.Tenant = string(b[entryFixed : entryFixed+tenant])
	e.Node = string(b[entryFixed+tenant : end])
	return e, e.Check()
}
