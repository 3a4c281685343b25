package accounting

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sync/atomic"
	"time"
	"unsafe"
)

// A cell is where the sums of one Key live in the resource manager's memory: 512 bytes that only the executor they belong to
// can reach.
//
//	0            64              384                512
//	+------------+---------------+------------------+
//	| 8 counters | head          | receipt          |
//	+------------+---------------+------------------+
//
// The executor adds to the counters by remote fetch-and-add and writes the head; the manager writes the receipt and
// nothing else. docs/BOARD.md has every byte.
const (
	CellSize        = 512
	CellHeadOffset  = 64
	CellHeadSize    = 320
	ReceiptOffset   = 384
	ReceiptSize     = 128
	headCRCOffset   = CellHeadSize - 4
	cellTenantStart = 49
)

// The parts of a cell fill it, and every tenant's name has room.
const (
	_ = uint(CellHeadOffset-NumCounters*8) + uint(NumCounters*8-CellHeadOffset)
	_ = uint(ReceiptOffset-CellHeadOffset-CellHeadSize) + uint(CellHeadOffset+CellHeadSize-ReceiptOffset)
	_ = uint(CellSize-ReceiptOffset-ReceiptSize) + uint(ReceiptOffset+ReceiptSize-CellSize)
	_ = uint(headCRCOffset - cellTenantStart - MaxName)
)

const (
	cellUsed  = 1
	cellFinal = 2
)

// CellHead identifies the lease and the tenant of a cell. The zero value is an unused cell.
type CellHead struct {
	Key
	Tenant string
	Began  time.Time
	Ended  time.Time // if Final
	Final  bool      // the counters do not change any more
}

func milli(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 0))
}

func seal(b []byte) {
	n := len(b) - 4
	binary.LittleEndian.PutUint32(b[n:], crc32.Checksum(b[:n], castagnoli))
}

func sealed(b []byte) bool {
	n := len(b) - 4
	return binary.LittleEndian.Uint32(b[n:]) == crc32.Checksum(b[:n], castagnoli)
}

// Encode writes the head into CellHeadSize bytes. The tenant's name must not be longer than MaxName.
func (h *CellHead) Encode(b []byte) {
	b = b[:CellHeadSize]
	clear(b)
	le := binary.LittleEndian
	if h.Lease != 0 {
		flags := uint32(cellUsed)
		if h.Final {
			flags |= cellFinal
		}
		le.PutUint64(b[0:], h.Lease)
		le.PutUint32(b[8:], h.Part)
		le.PutUint32(b[12:], flags)
		copy(b[16:], h.Incarnation[:])
		le.PutUint64(b[32:], milli(h.Began))
		le.PutUint64(b[40:], milli(h.Ended))
		b[48] = byte(len(h.Tenant))
		copy(b[cellTenantStart:cellTenantStart+MaxName], h.Tenant)
	}
	seal(b)
}

// ReadCell copies what the executor has written to a cell, which it may be writing to. used is false for a cell without an
// owner. An error means that the head is torn or nonsense; it is right again when the executor has finished writing.
// b must start at a multiple of 8.
func ReadCell(b []byte, node string, now time.Time) (e Entry, used bool, err error) {
	b = b[:CellSize]
	var before, after [CellHeadSize]byte
	copy(before[:], b[CellHeadOffset:])
	e.Use = loadUse(b)
	copy(after[:], b[CellHeadOffset:])
	le := binary.LittleEndian
	switch {
	case before == [CellHeadSize]byte{} && after == before:
		return Entry{}, false, nil // never written
	case before != after || !sealed(before[:]):
		return Entry{}, false, fmt.Errorf("%w: torn cell", ErrInvalid)
	case le.Uint32(before[12:])&cellUsed == 0:
		return Entry{}, false, nil
	}
	h := before[:]
	e.Lease, e.Part = le.Uint64(h), le.Uint32(h[8:])
	copy(e.Incarnation[:], h[16:])
	e.Tenant, e.Node = string(h[cellTenantStart:cellTenantStart+int(h[48])]), node
	e.Began, e.AsOf = time.UnixMilli(int64(le.Uint64(h[32:])&(1<<52-1))), now
	if le.Uint32(h[12:])&cellFinal != 0 {
		e.Final, e.AsOf = true, time.UnixMilli(int64(le.Uint64(h[40:])&(1<<52-1)))
	}
	return e, true, e.Check()
}

// loadUse reads counters that a network adapter or another process is adding to: each whole, and after what was
// read before and before what is read after.
func loadUse(b []byte) (u Use) {
	for i := range u {
		u[i] = atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[8*i])))
	}
	return u
}

// Receipt says that the ledger has sums of a Key on disk.
type Receipt struct {
	Key
	Final bool // and that it knows that they are final
	Use   Use
}

// Encode writes the receipt into ReceiptSize bytes.
func (r *Receipt) Encode(b []byte) {
	b = b[:ReceiptSize]
	clear(b)
	le := binary.LittleEndian
	le.PutUint64(b[0:], r.Lease)
	le.PutUint32(b[8:], r.Part)
	if r.Final {
		le.PutUint32(b[12:], cellFinal)
	}
	copy(b[16:], r.Incarnation[:])
	for i, n := range r.Use {
		le.PutUint64(b[32+8*i:], n)
	}
	seal(b)
}

// ParseReceipt reads a copy of a receipt. false: there is none, or the copy was torn.
func ParseReceipt(b []byte) (Receipt, bool) {
	var r Receipt
	b = b[:ReceiptSize]
	le := binary.LittleEndian
	if !sealed(b) || le.Uint64(b) == 0 {
		return r, false
	}
	r.Lease, r.Part = le.Uint64(b), le.Uint32(b[8:])
	r.Final = le.Uint32(b[12:])&cellFinal != 0
	copy(r.Incarnation[:], b[16:])
	for i := range r.Use {
		r.Use[i] = le.Uint64(b[32+8*i:])
	}
	return r, true
}

// Covers says whether the sums of an entry are on the ledger's disk, so that its journal may forget it.
func (r *Receipt) Covers(e *Entry) bool {
	return r.Key == e.Key && r.Use.Covers(e.Use) && (r.Final || !e.Final)
}
