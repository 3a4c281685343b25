package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import "bytes"

// Spec has the terms of a lease.
type Spec struct {
	Workers, CoresPerWorker, WaitMode, Flags, Depth, Eager uint32
	WorkersMin, Init                                       uint32
	Memory, Bulk                                           uint64
	DurationNs, CallLimitNs                                int64
	Executor, Library                                      string
	Bundle                                                 string // absolute paths, separated by colons
	Runtime                                                string
}

func (t *texts) spec(c *C.rfaas_agent_spec) Spec {
	return Spec{uint32(c.workers), uint32(c.cores_per_worker), uint32(c.wait_mode), uint32(c.flags), uint32(c.depth),
		uint32(c.eager), uint32(c.workers_min), uint32(c.init), uint64(c.memory), uint64(c.bulk), int64(c.duration_ns), int64(c.call_limit_ns),
		t.of("executor", c.executor[:]), t.of("library", c.library[:]), t.of("bundle", c.bundle[:]), t.of("runtime", c.runtime[:])}
}

func blobOf(op Op, c *C.rfaas_agent_blob) ([]byte, error) {
	if c.size < 1 || c.size > MaxBlob {
		return nil, malformed(op, "a blob of %d bytes, want 1 to %d", uint32(c.size), MaxBlob)
	}
	return bytes.Clone(view(&c.bytes)[:c.size]), nil
}

// Acquire is one step towards a lease. Its descriptor, of the first step unless it has From, is the library.
type Acquire struct {
	Key, Session, From, Cached uint64
	WaitNs                     int64
	First                      bool
	Status                     int32 // with From: the dataplane.Status of the failed connection
	At, Provider, Reason       string
	Spec                       Spec
	Offers                     [][]byte
	// The seed from which the workers start; no function: none.
	SeedFunction string
	SeedPayload  []byte
	SeedName     string // in full; "": it has none
	SeedLimitNs  int64
}

// DecodeAcquire decodes the body of the message.
func DecodeAcquire(b []byte) (Acquire, error) {
	var c C.rfaas_agent_acquire
	rest, err := take(OpAcquire, b, &c)
	if err != nil {
		return Acquire{}, err
	}
	rest, seed, err := cutSeed(&c, rest)
	if err == nil {
		err = list[C.rfaas_agent_blob](OpAcquire, "offers", rest, uint64(c.offers), MaxWorkers)
	}
	if err != nil {
		return Acquire{}, err
	}
	t := texts{op: OpAcquire}
	a := Acquire{Key: uint64(c.key), Session: uint64(c.session), From: uint64(c.from), Cached: uint64(c.cached), WaitNs: int64(c.wait_ns),
		First: c.first != 0, Status: int32(c.status), At: t.of("at", c.at[:]), Provider: t.of("provider", c.provider[:]), Reason: t.of("reason", c.reason[:])}
	if a.First && a.From == 0 {
		a.Spec = t.spec(&c.spec)
		a.SeedName = t.of("seed", c.seed[:])
		a.SeedFunction, a.SeedLimitNs = string(seed[:c.seed_function]), int64(c.seed_limit_ns)
		if c.seed_payload > 0 {
			a.SeedPayload = bytes.Clone(seed[c.seed_function:])
		}
	}
	if t.err != nil {
		return Acquire{}, t.err
	}
	if c.offers > 0 {
		a.Offers = make([][]byte, 0, c.offers)
	}
	for range uint32(c.offers) {
		var o C.rfaas_agent_blob
		rest, _ = take(OpAcquire, rest, &o)
		blob, err := blobOf(OpAcquire, &o)
		if err != nil {
			return Acquire{}, err
		}
		a.Offers = append(a.Offers, blob)
	}
	return a, nil
}

// cutSeed returns the offers of an ACQUIRE, and the function and the payload of its seed.
func cutSeed(c *C.rfaas_agent_acquire, rest []byte) (offers, seed []byte, err error) {
	size := uint64(c.seed_function) + uint64(c.seed_payload)
	if c.seed_payload > C.RFAAS_AGENT_SEED_MAX || size > uint64(len(rest)) {
		return nil, nil, malformed(OpAcquire, "a seed with %d bytes of payload, after %d bytes of offers and seed", uint32(c.seed_payload), len(rest))
	}
	at := uint64(len(rest)) - size
	return rest[:at], rest[at:], nil
}

// Worker is one worker of a lease.
type Worker struct {
	PID   uint64
	Start uint32
	Blob  []byte
	// What its start took.
	ForkNs, SandboxNs, ConnectNs, CodeNs int64
	Unseeded                             string // why it has not started from the lease's seed
}

func putWorker(b []byte, w *Worker) []byte {
	c := C.rfaas_agent_worker{pid: C.uint64_t(w.PID), start: C.uint32_t(w.Start), fork_ns: C.int64_t(w.ForkNs),
		sandbox_ns: C.int64_t(w.SandboxNs), connect_ns: C.int64_t(w.ConnectNs), code_ns: C.int64_t(w.CodeNs)}
	c.blob.size = C.uint32_t(copy(view(&c.blob.bytes), w.Blob))
	set(c.unseeded[:], w.Unseeded)
	return put(b, &c)
}

// EncodeWorker appends the body of a reply to REPLACE.
func EncodeWorker(b []byte, w *Worker) []byte { return putWorker(b, w) }

// Candidate answers an ACQUIRE: the next candidate with the provider that it needs, or the lease if Granted is set.
type Candidate struct {
	Granted                  bool
	Handed                   bool // granted: the agent holds the channels' descriptors; otherwise: channels came in messages before
	LeaseID                  uint64
	UntilNs                  int64
	Library                  [32]byte
	Executor, Node, Provider string
	Workers                  []Worker
	Functions                []string
	Claim                    Claim // handed: how the workers can be claimed; Workers and Functions are set then too
}

// Encode appends the body of the message.
func (d *Candidate) Encode(b []byte) []byte {
	c := C.rfaas_agent_candidate{workers: C.uint32_t(len(d.Workers)), functions: C.uint32_t(len(d.Functions)),
		lease_id: C.uint64_t(d.LeaseID), until_ns: C.int64_t(d.UntilNs), granted: flag(d.Granted), handed: flag(d.Handed), claim: d.Claim.encode()}
	for _, f := range d.Functions {
		c.names_size += C.uint32_t(len(f) + 1)
	}
	copy(view(&c.library), d.Library[:])
	set(c.executor[:], d.Executor)
	set(c.node[:], d.Node)
	set(c.provider[:], d.Provider)
	b = put(b, &c)
	for i := range d.Workers {
		b = putWorker(b, &d.Workers[i])
	}
	for _, f := range d.Functions {
		b = append(append(b, f...), 0)
	}
	return b
}

// Adopt names a lease that another agent held, or that the client has claimed. Its descriptor is the library.
type Adopt struct {
	Key, Session, LeaseID uint64
	Cached                uint64 // claimed: key of the cached lease, or Key if the agent has sent its channels
	UntilNs               int64
	Present               uint32 // workers that have been granted or added
	Library               [32]byte
	At, Node, Provider    string
	Spec                  Spec
	PIDs                  []uint64
}

// DecodeAdopt decodes the body of the message.
func DecodeAdopt(b []byte) (Adopt, error) {
	var c C.rfaas_agent_adopt
	rest, err := take(OpAdopt, b, &c)
	if err == nil {
		err = list[C.uint64_t](OpAdopt, "workers", rest, uint64(c.spec.workers), MaxWorkers)
	}
	t := texts{op: OpAdopt, err: err}
	a := Adopt{Key: uint64(c.key), Session: uint64(c.session), LeaseID: uint64(c.lease_id), UntilNs: int64(c.until_ns), Present: uint32(c.present), Cached: uint64(c.cached),
		At: t.of("at", c.at[:]), Node: t.of("node", c.node[:]), Provider: t.of("provider", c.provider[:]), Spec: t.spec(&c.spec)}
	copy(a.Library[:], view(&c.library))
	if t.err != nil {
		return Adopt{}, t.err
	}
	for len(rest) > 0 {
		var pid C.uint64_t
		rest, _ = take(OpAdopt, rest, &pid)
		a.PIDs = append(a.PIDs, uint64(pid))
	}
	return a, nil
}

// EncodeUntil appends a body with the end of a lease.
func EncodeUntil(b []byte, ns int64) []byte { return put(b, &C.rfaas_agent_until{C.int64_t(ns)}) }
