// Package protocol has the messages between the client library and the agent as Go values. client/c/agent_protocol.h
// defines the messages. Sizes, offsets and numbers come from that header by cgo. Decoding checks each size, count and text
// against the bytes received and copies it, so no decoded value refers to received bytes.
package protocol

/*
#cgo CFLAGS: -std=gnu11 -I${SRCDIR}/../../../client/c -I${SRCDIR}/../../dataplane
#include <stddef.h>
#include "agent_protocol.h" // a link, so that go build notices changes
#include "rfaas.h"

enum {
    page_events = offsetof(rfaas_agent_page, events),
    page_connection = offsetof(rfaas_agent_page, connection),
    page_leases = offsetof(rfaas_agent_page, leases),
    line_draining = offsetof(rfaas_agent_lease_line, draining),
    line_busy = offsetof(rfaas_agent_lease_line, busy),
    line_key = offsetof(rfaas_agent_lease_line, key),
    line_claimed = offsetof(rfaas_agent_lease_line, claimed),
    line_lease_id = offsetof(rfaas_agent_lease_line, lease_id),
    line_until = offsetof(rfaas_agent_lease_line, until_ns),
};
*/
import "C"

import (
	"bytes"
	"fmt"
	"unsafe"
)

// Numbers of the protocol.
const (
	Magic      = C.RFAAS_AGENT_MAGIC
	Version    = C.RFAAS_AGENT_PROTOCOL
	MaxMessage = C.RFAAS_AGENT_MESSAGE_MAX // bytes
	MaxAddress = C.RFAAS_AGENT_ADDRESS - 1 // bytes, without the NUL
	MaxLeases  = C.RFAAS_AGENT_LEASES      // of one process
	MaxWorkers = C.RFAAS_AGENT_WORKERS     // of one lease
	MaxBlob    = C.RFAAS_AGENT_BLOB        // bytes
	MaxFiles   = C.RFAAS_AGENT_FDS         // descriptors of one message
	MaxText    = C.RFAAS_AGENT_TEXT - 1    // bytes, without the NUL
	MaxTables  = C.RFAAS_AGENT_TABLES      // of one session
	HeaderSize = C.sizeof_rfaas_agent_header
)

// Op is an operation.
type Op uint32

// The operations.
const (
	OpHello   Op = C.RFAAS_AGENT_HELLO
	OpStatus  Op = C.RFAAS_AGENT_STATUS
	OpStop    Op = C.RFAAS_AGENT_STOP
	OpOpen    Op = C.RFAAS_AGENT_OPEN
	OpClose   Op = C.RFAAS_AGENT_CLOSE
	OpAcquire Op = C.RFAAS_AGENT_ACQUIRE
	OpAdopt   Op = C.RFAAS_AGENT_ADOPT
	OpReplace Op = C.RFAAS_AGENT_REPLACE
	OpRelease Op = C.RFAAS_AGENT_RELEASE
	OpInspect Op = C.RFAAS_AGENT_INSPECT
	OpRenew   Op = C.RFAAS_AGENT_RENEW
	OpFinish  Op = C.RFAAS_AGENT_FINISH
	OpSpread  Op = C.RFAAS_AGENT_SPREAD
	OpChanges Op = C.RFAAS_AGENT_CHANGES
	OpSilent  Op = C.RFAAS_AGENT_SILENT
	OpEvent   Op = C.RFAAS_AGENT_EVENT
	OpHand    Op = C.RFAAS_AGENT_HAND

	OpTable     Op = C.RFAAS_AGENT_TABLE
	OpTableDrop Op = C.RFAAS_AGENT_TABLE_DROP
	OpRegion    Op = C.RFAAS_AGENT_REGION
	OpClaimed   Op = C.RFAAS_AGENT_CLAIMED

	OpSeedCreate  Op = C.RFAAS_AGENT_SEED_CREATE
	OpSeedFind    Op = C.RFAAS_AGENT_SEED_FIND
	OpSeedKeep    Op = C.RFAAS_AGENT_SEED_KEEP
	OpSeedRelease Op = C.RFAAS_AGENT_SEED_RELEASE
	OpTableSeed   Op = C.RFAAS_AGENT_TABLE_SEED
	OpAttach      Op = C.RFAAS_AGENT_ATTACH
)

// String is the operation's name in the header, in lower case.
func (o Op) String() string {
	names := [...]string{"?", "hello", "status", "stop", "open", "close", "acquire", "adopt", "replace", "release", "inspect",
		"renew", "finish", "spread", "changes", "silent", "event", "hand", "table", "table-drop",
		"region", "claimed", "seed-create", "seed-find", "seed-keep", "seed-release", "table-seed",
		"attach"}
	if int64(o) < int64(len(names)) {
		return names[o]
	}
	return fmt.Sprintf("operation %d", uint32(o))
}

// Flags of sessions and leases.
const (
	AllowPlaintext = C.RFAAS_SESSION_ALLOW_PLAINTEXT
	SessionLocal   = C.RFAAS_SESSION_LOCAL
	Reopen         = C.RFAAS_AGENT_REOPEN
	Renew          = C.RFAAS_LEASE_RENEW
	Reuse          = C.RFAAS_LEASE_REUSE
)

// Dropped is a kind of event that only the library sees, besides api.Event*.
const Dropped = C.RFAAS_AGENT_DROPPED

// Room is the kind of an event that reports room for another worker of a lease.
const Room = C.RFAAS_AGENT_ROOM

// What a line of the shared page says about draining.
const (
	DrainNot  = C.RFAAS_AGENT_DRAIN_NOT
	DrainSoon = C.RFAAS_AGENT_DRAIN_SOON
	DrainTold = C.RFAAS_AGENT_DRAIN_TOLD
)

// Layout of the shared page.
const (
	PageSize         = C.sizeof_rfaas_agent_page
	LineSize         = C.sizeof_rfaas_agent_lease_line
	OffsetEvents     = C.page_events
	OffsetConnection = C.page_connection
	OffsetLines      = C.page_leases
	OffsetDraining   = C.line_draining // in a line
	OffsetBusy       = C.line_busy
	OffsetKey        = C.line_key
	OffsetClaimed    = C.line_claimed
	OffsetLeaseID    = C.line_lease_id
	OffsetUntil      = C.line_until
)

// Line returns which line of the page a key names.
func Line(key uint64) int { return int(key % MaxLeases) }

// Error is the error for a message that breaks the protocol.
type Error struct {
	Op   Op
	Text string
}

// Error names the operation.
func (e *Error) Error() string { return fmt.Sprintf("malformed %v message: %s", e.Op, e.Text) }

func malformed(op Op, format string, args ...any) error {
	return &Error{op, fmt.Sprintf(format, args...)}
}

// Header begins each message.
type Header struct {
	Size   int // of the whole message
	Op     Op
	ID     uint32
	Status int32
}

// DecodeHeader decodes the header of a message. b has HeaderSize bytes.
func DecodeHeader(b []byte) (Header, error) {
	var c C.rfaas_agent_header
	if rest, err := take(0, b, &c); err != nil || len(rest) > 0 {
		return Header{}, malformed(0, "%d bytes of header, want %d", len(b), HeaderSize)
	}
	h := Header{int(c.size), Op(c.op), uint32(c.id), int32(c.status)}
	if h.Size < HeaderSize || h.Size > MaxMessage {
		return h, malformed(h.Op, "size %d, want %d to %d", h.Size, HeaderSize, MaxMessage)
	}
	return h, nil
}

// Begin begins a message: it appends a header to b. End completes it.
func Begin(b []byte, op Op, id uint32, status int32) []byte {
	return put(b, &C.rfaas_agent_header{op: C.uint32_t(op), id: C.uint32_t(id), status: C.int32_t(status)})
}

// End sets the size of a message that begins at b[at]. It returns false if the message is too large.
func End(b []byte, at int) bool {
	n := len(b) - at
	if n > MaxMessage {
		return false
	}
	size := C.uint32_t(n)
	copy(b[at+int(unsafe.Offsetof(C.rfaas_agent_header{}.size)):], view(&size))
	return true
}

// Failure returns a failed reply.
func Failure(op Op, id uint32, status int32, text string) []byte {
	b := Begin(make([]byte, 0, HeaderSize+C.RFAAS_AGENT_TEXT), op, id, status)
	b = append(b, text[:min(len(text), MaxText)]...)
	b = append(b, make([]byte, HeaderSize+C.RFAAS_AGENT_TEXT-len(b))...)
	End(b, 0)
	return b
}

// DecodeFailure returns the text of a failed reply.
func DecodeFailure(op Op, b []byte) (string, error) {
	if len(b) != C.RFAAS_AGENT_TEXT {
		return "", malformed(op, "a failed reply has %d bytes, want %d", len(b), C.RFAAS_AGENT_TEXT)
	}
	n := bytes.IndexByte(b, 0)
	if n < 0 {
		return "", malformed(op, "the text does not end")
	}
	return string(b[:n]), nil
}

// ---- helpers ----

// view returns the bytes of a C value.
func view[T any](c *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(c)), unsafe.Sizeof(*c))
}

// put appends a C structure.
func put[T any](b []byte, c *T) []byte { return append(b, view(c)...) }

// take copies a C structure from the beginning of b and returns the rest.
func take[T any](op Op, b []byte, c *T) ([]byte, error) {
	if n := int(unsafe.Sizeof(*c)); len(b) < n {
		return nil, malformed(op, "%d bytes, want at least %d", len(b), n)
	}
	return b[copy(view(c), b):], nil
}

func flag(set bool) C.uint32_t {
	if set {
		return 1
	}
	return 0
}

// exactly is take for a message that ends with the structure.
func exactly[T any](op Op, b []byte, c *T) error {
	if n := int(unsafe.Sizeof(*c)); len(b) != n {
		return malformed(op, "%d bytes, want %d", len(b), n)
	}
	copy(view(c), b)
	return nil
}

// texts decodes NUL-terminated texts and keeps the first error.
type texts struct {
	op  Op
	err error
}

func (t *texts) of(name string, c []C.char) string {
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(c))), len(c))
	n := bytes.IndexByte(b, 0)
	if n < 0 {
		if t.err == nil {
			t.err = malformed(t.op, "the text %s does not end within %d bytes", name, len(b))
		}
		return ""
	}
	return string(b[:n])
}

// set stores a text, cut to the field.
func set(c []C.char, s string) {
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(c))), len(c))
	b[copy(b[:len(b)-1], s)] = 0
}

// list checks that rest has count elements of type T.
func list[T any](op Op, what string, rest []byte, count, most uint64) error {
	var t T
	size := uint64(unsafe.Sizeof(t))
	if count > most {
		return malformed(op, "%d %s, want at most %d", count, what, most)
	}
	if uint64(len(rest)) != count*size {
		return malformed(op, "%d bytes of %d %s of %d bytes", len(rest), count, what, size)
	}
	return nil
}
