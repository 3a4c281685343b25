package invoke

import "encoding/binary"

// Sizes of headers in bytes. A request has the short form unless a bulk flag is set.
const (
	RequestLong  = 32
	RequestShort = 24
	ReplySize    = 16
)

// Request flags.
const (
	FlagBulkIn    = 1 // the payload is in the worker's bulk area
	FlagBulkOut   = 2 // the result goes to the client's bulk area
	FlagExclusive = 4 // no other call of the channel is outstanding or unread
)

// Request is the header before a payload.
type Request struct {
	InOffset, OutOffset uint32 // in 64-byte units
	Generation, CallID  uint32
	Size, Capacity      uint32 // bytes
	Function, Flags     uint16
}

// Marshal encodes the header in its short or long form.
func (r *Request) Marshal() []byte {
	le := binary.LittleEndian
	out := make([]byte, RequestLong)
	le.PutUint32(out[0:], r.InOffset)
	le.PutUint32(out[4:], r.OutOffset)
	le.PutUint32(out[8:], r.Generation)
	le.PutUint32(out[12:], r.CallID)
	le.PutUint32(out[16:], r.Size)
	le.PutUint32(out[20:], r.Capacity)
	le.PutUint16(out[24:], r.Function)
	le.PutUint16(out[26:], r.Flags)
	if r.Flags&(FlagBulkIn|FlagBulkOut) != 0 {
		return out
	}
	return out[RequestLong-RequestShort:]
}

// Reply is the header before a result.
type Reply struct {
	Generation, CallID uint32
	Status             int32 // 0, or a status of dp_status.h
	Size               uint32
}

// Marshal encodes the header.
func (r *Reply) Marshal() []byte {
	le := binary.LittleEndian
	out := make([]byte, ReplySize)
	le.PutUint32(out[0:], r.Generation)
	le.PutUint32(out[4:], r.CallID)
	le.PutUint32(out[8:], uint32(r.Status))
	le.PutUint32(out[12:], r.Size)
	return out
}

// Immediate is the immediate value of both directions: slot and a tag that is the low half of the call id.
func Immediate(slot uint16, callID uint32) uint32 { return uint32(slot)<<16 | callID&0xffff }
