package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import "bytes"

// Replace asks for a new worker.
type Replace struct {
	Key       uint64
	TimeoutNs int64
	Worker    uint32
	Kill      bool // end the old worker at once
	Offer     []byte
}

// DecodeReplace decodes the body of the message.
func DecodeReplace(b []byte) (Replace, error) {
	var c C.rfaas_agent_replace
	if err := exactly(OpReplace, b, &c); err != nil {
		return Replace{}, err
	}
	blob, err := blobOf(OpReplace, &c.offer)
	return Replace{uint64(c.key), int64(c.timeout_ns), uint32(c.worker), c.kill != 0, blob}, err
}

// Release releases a lease.
type Release struct {
	Key   uint64
	Keep  bool // cache the workers
	Own   bool // with Keep: the session is a claimant of the executor
	Ahead bool // if they are not cached, the client can take a spare lease with the same terms
}

// DecodeRelease decodes the body of the message.
func DecodeRelease(b []byte) (Release, error) {
	var c C.rfaas_agent_release
	err := exactly(OpRelease, b, &c)
	return Release{uint64(c.key), c.keep != 0, c.keep == C.RFAAS_AGENT_KEEP_OWN, c.ahead != 0}, err
}

// DecodeLeaseName decodes the body of the message.
func DecodeLeaseName(op Op, b []byte) (key uint64, err error) {
	var c C.rfaas_agent_lease_name
	err = exactly(op, b, &c)
	return uint64(c.key), err
}

// WorkerName names a worker.
type WorkerName struct {
	Key    uint64
	Worker uint32
}

// DecodeWorkerName decodes the body of the message.
func DecodeWorkerName(op Op, b []byte) (WorkerName, error) {
	var c C.rfaas_agent_worker_name
	err := exactly(op, b, &c)
	return WorkerName{uint64(c.key), uint32(c.worker)}, err
}

// Inspection describes a worker.
type Inspection struct {
	PID                                       int
	Calls, Failed, Refused, BytesIn, BytesOut uint64
	Running                                   string
	Output                                    []byte // the end of it, if it is too long
}

// Encode appends the body of the message.
func (i *Inspection) Encode(b []byte) []byte {
	c := C.rfaas_agent_inspection{pid: C.int32_t(i.PID), calls: C.uint64_t(i.Calls), failed: C.uint64_t(i.Failed),
		refused: C.uint64_t(i.Refused), bytes_in: C.uint64_t(i.BytesIn), bytes_out: C.uint64_t(i.BytesOut)}
	set(c.running[:], i.Running)
	room := len(c.output) - 1
	c.output_size = C.uint32_t(copy(view(&c.output)[:room], i.Output[max(len(i.Output)-room, 0):]))
	return put(b, &c)
}

// Renewal renews a lease.
type Renewal struct {
	Key        uint64
	DurationNs int64
}

// DecodeRenewal decodes the body of the message.
func DecodeRenewal(b []byte) (Renewal, error) {
	var c C.rfaas_agent_renewal
	err := exactly(OpRenew, b, &c)
	return Renewal{uint64(c.key), int64(c.duration_ns)}, err
}

// Silence reports a worker that does not answer. Times are of CLOCK_MONOTONIC.
type Silence struct {
	Key           uint64
	SinceNs, AtNs int64
	Worker        uint32
}

// DecodeSilence decodes the body of the message.
func DecodeSilence(b []byte) (Silence, error) {
	var c C.rfaas_agent_silence
	err := exactly(OpSilent, b, &c)
	return Silence{uint64(c.key), int64(c.since_ns), int64(c.at_ns), uint32(c.worker)}, err
}

// Event is an event of a lease, or of the workers that are cached under its key.
type Event struct {
	Key, PID uint64
	InNs     int64
	Kind     uint32
	Status   int32
	Worker   uint32
	Text     string
	Details  string // lines below the error text
}

// Encode appends the body of the message. Details that do not fit into a message are cut.
func (e *Event) Encode(b []byte) []byte {
	c := C.rfaas_agent_event{key: C.uint64_t(e.Key), pid: C.uint64_t(e.PID), in_ns: C.int64_t(e.InNs), kind: C.uint32_t(e.Kind),
		status: C.int32_t(e.Status), worker: C.uint32_t(e.Worker)}
	details := e.Details[:min(len(e.Details), MaxMessage-HeaderSize-C.sizeof_rfaas_agent_event)]
	c.details_size = C.uint32_t(len(details))
	set(c.text[:], e.Text)
	return append(put(b, &c), details...)
}

// Released answers a RELEASE.
type Released struct {
	Cached bool // the workers are cached
	Handed bool // the agent holds the channels
	Claim  Claim
	Spare  []uint64  // the pids of the workers of a spare lease that the client gets
	Own    *OwnClaim // the client can claim the workers over its own queue pair. Claim has the line
	May    bool      // the client could do so if it sent ATTACH before
}

// OwnClaim says what a claim over the client's own queue pair gets.
type OwnClaim struct {
	LeaseID  uint64
	ClientNs int64 // how long the client may use that lease, from the claim on
}

// Encode appends the body of the message.
func (r *Released) Encode(b []byte) []byte {
	c := C.rfaas_agent_released{cached: flag(r.Cached), handed: flag(r.Handed), spare: C.uint32_t(len(r.Spare)), own: flag(r.May), claim: r.Claim.encode()}
	if r.Own != nil {
		c.own = C.RFAAS_AGENT_OWN_CLAIM
	}
	if b = put(b, &c); r.Own != nil {
		return put(b, &C.rfaas_agent_own_claim{C.uint64_t(r.Own.LeaseID), C.int64_t(r.Own.ClientNs)})
	}
	for _, pid := range r.Spare {
		b = put(b, &pid)
	}
	return b
}

// Claim says how cached workers are claimed. Region 0: they are not.
type Claim struct {
	Region, Line uint32
	Sequence     uint64
}

func (c Claim) encode() C.rfaas_agent_claim {
	return C.rfaas_agent_claim{region: C.uint32_t(c.Region), line: C.uint32_t(c.Line), sequence: C.uint64_t(c.Sequence)}
}

func decodeClaim(c *C.rfaas_agent_claim) Claim {
	return Claim{uint32(c.region), uint32(c.line), uint64(c.sequence)}
}

// Attach makes a session a claimant of a granted lease's executor.
type Attach struct {
	Key  uint64
	Blob []byte // of the client's queue pair
}

// DecodeAttach decodes the body of the message.
func DecodeAttach(b []byte) (Attach, error) {
	var c C.rfaas_agent_attach
	if err := exactly(OpAttach, b, &c); err != nil {
		return Attach{}, err
	}
	blob, err := blobOf(OpAttach, &c.blob)
	return Attach{uint64(c.key), blob}, err
}

// Attached answers an ATTACH.
type Attached struct {
	Addr uint64 // of the cell
	Key  uint32
	Blob []byte // of the executor's queue pair, at most MaxBlob bytes
}

// Encode appends the body of the message.
func (a *Attached) Encode(b []byte) []byte {
	c := C.rfaas_agent_attached{addr: C.uint64_t(a.Addr), rkey: C.uint32_t(a.Key)}
	c.blob.size = C.uint32_t(copy(view(&c.blob.bytes), a.Blob))
	return put(b, &c)
}

// EncodeRegion appends a body that names a claim region.
func EncodeRegion(b []byte, number uint32) []byte {
	return put(b, &C.rfaas_agent_region{number: C.uint32_t(number)})
}

// Hand describes some channels of a lease at rest.
type Hand struct {
	Key      uint64
	First    int
	Count    int
	Size     int    // of each, bytes
	Files    int    // descriptors that belong to them
	Held     bool   // the agent has the descriptors
	Channels []byte // Count descriptions, which only libraries read
}

// Encode appends the body of the message.
func (h *Hand) Encode(b []byte) []byte {
	b = put(b, &C.rfaas_agent_hand{key: C.uint64_t(h.Key), first: C.uint32_t(h.First), count: C.uint32_t(h.Count),
		size: C.uint32_t(h.Size), fds: C.uint32_t(h.Files), held: flag(h.Held)})
	return append(b, h.Channels...)
}

// maxPacked bounds the description of a channel, in bytes. The agent keeps it and does not read it.
const maxPacked = 4096

// DecodeHand decodes the body of the message.
func DecodeHand(b []byte) (Hand, error) {
	var c C.rfaas_agent_hand
	rest, err := take(OpHand, b, &c)
	switch {
	case err != nil:
		return Hand{}, err
	case c.count < 1 || c.count > MaxWorkers || c.first > MaxWorkers-c.count:
		return Hand{}, malformed(OpHand, "%d channels from %d on, want 1 to %d", uint32(c.count), uint32(c.first), MaxWorkers)
	case c.fds < 1 || c.fds > MaxFiles:
		return Hand{}, malformed(OpHand, "%d descriptors, want 1 to %d", uint32(c.fds), MaxFiles)
	case c.size < 1 || c.size > maxPacked || uint64(len(rest)) != uint64(c.count)*uint64(c.size):
		return Hand{}, malformed(OpHand, "%d bytes of %d channels of %d bytes", len(rest), uint32(c.count), uint32(c.size))
	}
	return Hand{uint64(c.key), int(c.first), int(c.count), int(c.size), int(c.fds), c.held != 0, bytes.Clone(rest)}, nil
}
