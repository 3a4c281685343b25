package invoke

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Version of the protocol: headers, blobs and the order of things.
const Version = 1

// Limits of a channel.
const (
	MaxDepth = 1024      // slots
	MaxEager = 256 << 10 // bytes per slot
	MaxBulk  = 1 << 32   // bytes of the bulk area

	// HeaderSize is the fixed part of a channel blob; MaxBlob bounds the whole.
	HeaderSize = 56
	MaxBlob    = 256
)

const channelMagic = 0x48434652 // "RFCH"

// Provider is the number of a fabric provider in blobs.
type Provider uint8

// The providers.
const (
	ProviderSHM   Provider = 1
	ProviderVerbs Provider = 2
	ProviderTCP   Provider = 3
	ProviderOFI   Provider = 4
)

func (p Provider) String() string {
	switch p {
	case ProviderSHM:
		return "shm"
	case ProviderVerbs:
		return "verbs"
	case ProviderTCP:
		return "tcp"
	case ProviderOFI:
		return "ofi"
	}
	return fmt.Sprintf("provider %d", uint8(p))
}

// Role of the side that wrote a blob.
type Role uint8

// The roles.
const (
	RoleClient Role = 1
	RoleWorker Role = 2
	RoleBroker Role = 3 // a client whose connection passes through its agent at first, and moves to a queue pair of its own
)

// ChannelBlob is what one side of a channel tells the other to connect.
type ChannelBlob struct {
	Role       Role
	Provider   Provider
	Generation uint32 // of the channel, chosen by the client, never 0
	Depth      uint16 // slots
	Eager      uint32 // payload bytes per slot, a multiple of 64
	Bulk       uint64 // bytes of the bulk area, a multiple of 64
	SlotsAddr  uint64 // first slot, in the writer's memory
	SlotsRkey  uint32
	BulkAddr   uint64
	BulkRkey   uint32
	QueuePair  []byte // the provider's own
}

// ErrBlob is the class of every decoding error.
var ErrBlob = errors.New("bad channel blob")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Marshal encodes the blob. The layout is dp_channel_blob in dp_wire.h.
func (b *ChannelBlob) Marshal() []byte {
	le := binary.LittleEndian
	out := make([]byte, HeaderSize, HeaderSize+len(b.QueuePair))
	le.PutUint32(out[0:], channelMagic)
	le.PutUint16(out[4:], Version)
	out[6], out[7] = byte(b.Role), byte(b.Provider)
	le.PutUint32(out[8:], b.Generation)
	le.PutUint16(out[12:], b.Depth)
	le.PutUint16(out[14:], uint16(len(b.QueuePair)))
	le.PutUint32(out[16:], b.Eager)
	le.PutUint32(out[20:], b.SlotsRkey)
	le.PutUint64(out[24:], b.SlotsAddr)
	le.PutUint64(out[32:], b.Bulk)
	le.PutUint64(out[40:], b.BulkAddr)
	le.PutUint32(out[48:], b.BulkRkey)
	out = append(out, b.QueuePair...)
	le.PutUint32(out[52:], crc32.Checksum(out, castagnoli))
	return out
}

// UnmarshalChannelBlob decodes and checks a blob. Errors are ErrBlob and name the field and its value.
func UnmarshalChannelBlob(data []byte) (*ChannelBlob, error) {
	bad := func(format string, args ...any) (*ChannelBlob, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{ErrBlob}, args...)...)
	}
	if len(data) < HeaderSize || len(data) > MaxBlob {
		return bad("%d bytes, not %d..%d", len(data), HeaderSize, MaxBlob)
	}
	le := binary.LittleEndian
	if m := le.Uint32(data); m != channelMagic {
		return bad("magic %#x, not %#x", m, channelMagic)
	}
	if v := le.Uint16(data[4:]); v != Version {
		return bad("version %d, this side speaks %d", v, Version)
	}
	if n := int(le.Uint16(data[14:])); HeaderSize+n != len(data) { // before the checksum: a cut blob is to be called so
		return bad("%d bytes hold a queue-pair blob of %d", len(data), n)
	}
	sum := crc32.Update(0, castagnoli, data[:52])
	sum = crc32.Update(sum, castagnoli, []byte{0, 0, 0, 0})
	sum = crc32.Update(sum, castagnoli, data[56:])
	if got := le.Uint32(data[52:]); got != sum {
		return bad("checksum %#x, should be %#x", got, sum)
	}
	b := &ChannelBlob{
		Role: Role(data[6]), Provider: Provider(data[7]),
		Generation: le.Uint32(data[8:]), Depth: le.Uint16(data[12:]),
		Eager: le.Uint32(data[16:]), SlotsRkey: le.Uint32(data[20:]), SlotsAddr: le.Uint64(data[24:]),
		Bulk: le.Uint64(data[32:]), BulkAddr: le.Uint64(data[40:]), BulkRkey: le.Uint32(data[48:]),
		QueuePair: append([]byte(nil), data[HeaderSize:]...),
	}
	switch {
	case b.Role < RoleClient || b.Role > RoleBroker:
		return bad("role %d", b.Role)
	case b.Provider < ProviderSHM || b.Provider > ProviderOFI:
		return bad("provider %d", b.Provider)
	case b.Generation == 0:
		return bad("generation 0")
	case b.Depth == 0 || b.Depth > MaxDepth:
		return bad("depth %d, not 1..%d", b.Depth, MaxDepth)
	case b.Eager == 0 || b.Eager > MaxEager || b.Eager%64 != 0:
		return bad("eager size %d, not a multiple of 64 up to %d", b.Eager, MaxEager)
	case b.Bulk > MaxBulk || b.Bulk%64 != 0:
		return bad("bulk size %d, not a multiple of 64 up to %d", b.Bulk, uint64(MaxBulk))
	}
	return b, nil
}
