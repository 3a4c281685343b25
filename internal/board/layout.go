package board

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Version of everything in this package.
const Version = 1

// Sizes and places. The assertions below and docs/BOARD.md have them too.
const (
	HeaderSize   = 64
	LineSize     = 64
	BucketSize   = 64
	IdentitySize = 1024
	MailboxSize  = 64

	// GroupLines are read together by a placement decision.
	GroupLines = 8
	// MaxSlots bounds a board.
	MaxSlots = 1 << 20

	linesOffset   = 4096 // lines start on a page
	bucketEntries = 7
)

// A line, a bucket and a mailbox are one cache line each, a group is a whole number of them, and a page holds whole groups.
const (
	_ = uint(LineSize-64) + uint(64-LineSize)
	_ = uint(BucketSize-64) + uint(64-BucketSize)
	_ = uint(MailboxSize-64) + uint(64-MailboxSize)
	_ = -(uint(linesOffset) % (GroupLines * LineSize))
	_ = uint(BucketSize - bucketEntries*8 - 8)
)

// ErrTorn is a record whose checksum is wrong: it was read while it was written. Read it again.
var ErrTorn = errors.New("torn read")

// ErrLayout reports memory that is not a board, or a board of another version.
var ErrLayout = errors.New("not a board of this version")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal puts the checksum of all that is before it into the last 4 bytes.
func seal(b []byte) {
	n := len(b) - 4
	binary.LittleEndian.PutUint32(b[n:], crc32.Checksum(b[:n], castagnoli))
}

// sealed says whether the last 4 bytes are the checksum of the rest.
func sealed(b []byte) bool {
	n := len(b) - 4
	return binary.LittleEndian.Uint32(b[n:]) == crc32.Checksum(b[:n], castagnoli)
}

// empty says whether nothing has been written to a record.
func empty(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// Header is the first record of a board.
type Header struct {
	Epoch       uint64 // random for each start of the manager
	Capacity    uint32 // slots
	Used        uint32 // only slots below it hold anything
	Buckets     uint32 // of the index, a power of two
	HeartbeatMS uint32 // how often a line is written at least
	Changes     uint32 // low half of the number of changes, as in mailboxes
}

const headerMagic = 0x44424652 // "RFBD"

// NewHeader sizes a board for a number of executors, rounded up to whole groups.
func NewHeader(epoch uint64, slots int, heartbeatMS uint32) (Header, error) {
	if slots < 1 || slots > MaxSlots {
		return Header{}, fmt.Errorf("board: %d slots, want 1 to %d", slots, MaxSlots)
	}
	h := Header{Epoch: epoch, Capacity: uint32((slots + GroupLines - 1) / GroupLines * GroupLines), Buckets: 1, HeartbeatMS: heartbeatMS}
	for h.Buckets*4 < h.Capacity {
		h.Buckets *= 2
	}
	return h, nil
}

// LineOffset is where the line of a slot is.
func (h *Header) LineOffset(slot uint32) uint64 { return linesOffset + uint64(slot)*LineSize }

// BucketOffset is where a bucket of the index is.
func (h *Header) BucketOffset(bucket uint32) uint64 {
	return h.LineOffset(h.Capacity) + uint64(bucket)*BucketSize
}

// IdentityOffset is where the identity of a slot is.
func (h *Header) IdentityOffset(slot uint32) uint64 {
	return h.BucketOffset(h.Buckets) + uint64(slot)*IdentitySize
}

// Size is the board's bytes.
func (h *Header) Size() uint64 { return h.IdentityOffset(h.Capacity) }

// Encode writes the header into HeaderSize bytes.
func (h *Header) Encode(b []byte) {
	_ = b[:HeaderSize]
	le := binary.LittleEndian
	clear(b[:HeaderSize])
	le.PutUint32(b[0:], headerMagic)
	le.PutUint16(b[4:], Version)
	le.PutUint64(b[8:], h.Epoch)
	le.PutUint32(b[16:], h.Capacity)
	le.PutUint32(b[20:], h.Used)
	le.PutUint32(b[24:], h.Buckets)
	le.PutUint32(b[28:], h.HeartbeatMS)
	le.PutUint32(b[32:], h.Changes)
	le.PutUint64(b[40:], h.Size())
	seal(b[:HeaderSize])
}

// ParseHeader reads a header; size is how many bytes the reader can reach.
func ParseHeader(b []byte, size uint64) (Header, error) {
	var h Header
	le := binary.LittleEndian
	switch {
	case len(b) < HeaderSize:
		return h, fmt.Errorf("%w: %d bytes", ErrLayout, len(b))
	case !sealed(b[:HeaderSize]):
		return h, fmt.Errorf("board header: %w", ErrTorn)
	case le.Uint32(b) != headerMagic || le.Uint16(b[4:]) != Version:
		return h, fmt.Errorf("%w: magic %08x version %d", ErrLayout, le.Uint32(b), le.Uint16(b[4:]))
	}
	h = Header{Epoch: le.Uint64(b[8:]), Capacity: le.Uint32(b[16:]), Used: le.Uint32(b[20:]), Buckets: le.Uint32(b[24:]),
		HeartbeatMS: le.Uint32(b[28:]), Changes: le.Uint32(b[32:])}
	switch {
	case h.Capacity == 0 || h.Capacity > MaxSlots || h.Capacity%GroupLines != 0:
		return h, fmt.Errorf("%w: capacity %d", ErrLayout, h.Capacity)
	case h.Used > h.Capacity:
		return h, fmt.Errorf("%w: %d of %d slots used", ErrLayout, h.Used, h.Capacity)
	case h.Buckets == 0 || h.Buckets > MaxSlots || h.Buckets&(h.Buckets-1) != 0:
		return h, fmt.Errorf("%w: %d buckets", ErrLayout, h.Buckets)
	case h.Size() != le.Uint64(b[40:]) || h.Size() > size:
		return h, fmt.Errorf("%w: %d bytes, its header says %d, %d can be reached", ErrLayout, h.Size(), le.Uint64(b[40:]), size)
	}
	return h, nil
}
