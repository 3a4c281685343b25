package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import (
	"bytes"
	"strings"
)

// Spec has the terms of a lease.
type Spec struct {
	Workers, CoresPerWorker, WaitMode, Flags, Depth, Eager uint32
	Memory, Bulk                                           uint64
	DurationNs, CallLimitNs                                int64
	Executor, Library                                      string
}

func (s *Spec) c() (c C.rfaas_agent_spec) {
	c = C.rfaas_agent_spec{workers: C.uint32_t(s.Workers), cores_per_worker: C.uint32_t(s.CoresPerWorker),
		wait_mode: C.uint32_t(s.WaitMode), flags: C.uint32_t(s.Flags), depth: C.uint32_t(s.Depth), eager: C.uint32_t(s.Eager),
		memory: C.uint64_t(s.Memory), bulk: C.uint64_t(s.Bulk), duration_ns: C.int64_t(s.DurationNs),
		call_limit_ns: C.int64_t(s.CallLimitNs)}
	set(c.executor[:], s.Executor)
	set(c.library[:], s.Library)
	return c
}

func (t *texts) spec(c *C.rfaas_agent_spec) Spec {
	return Spec{uint32(c.workers), uint32(c.cores_per_worker), uint32(c.wait_mode), uint32(c.flags), uint32(c.depth),
		uint32(c.eager), uint64(c.memory), uint64(c.bulk), int64(c.duration_ns), int64(c.call_limit_ns),
		t.of("executor", c.executor[:]), t.of("library", c.library[:])}
}

func putBlob(b []byte, blob []byte) []byte {
	var c C.rfaas_agent_blob
	c.size = C.uint32_t(copy(view(&c.bytes), blob))
	return put(b, &c)
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
	At, Provider               string
	Spec                       Spec
	Offers                     [][]byte
}

// Encode appends the body of the message.
func (a *Acquire) Encode(b []byte) []byte {
	c := C.rfaas_agent_acquire{key: C.uint64_t(a.Key), session: C.uint64_t(a.Session), from: C.uint64_t(a.From),
		cached: C.uint64_t(a.Cached), wait_ns: C.int64_t(a.WaitNs), offers: C.uint32_t(len(a.Offers)), spec: a.Spec.c()}
	if a.First {
		c.first = 1
	}
	set(c.at[:], a.At)
	set(c.provider[:], a.Provider)
	b = put(b, &c)
	for _, o := range a.Offers {
		b = putBlob(b, o)
	}
	return b
}

// DecodeAcquire decodes the body of the message.
func DecodeAcquire(b []byte) (Acquire, error) {
	var c C.rfaas_agent_acquire
	rest, err := take(OpAcquire, b, &c)
	if err == nil {
		err = list[C.rfaas_agent_blob](OpAcquire, "offers", rest, uint64(c.offers), MaxWorkers)
	}
	if err != nil {
		return Acquire{}, err
	}
	t := texts{op: OpAcquire}
	a := Acquire{Key: uint64(c.key), Session: uint64(c.session), From: uint64(c.from), Cached: uint64(c.cached), WaitNs: int64(c.wait_ns),
		First: c.first != 0, At: t.of("at", c.at[:]), Provider: t.of("provider", c.provider[:])}
	if a.First && a.From == 0 {
		a.Spec = t.spec(&c.spec)
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

// Worker is one worker of a lease.
type Worker struct {
	PID   uint64
	Start uint32
	Blob  []byte
	// What its start took.
	ForkNs, SandboxNs, ConnectNs, CodeNs int64
}

func workerOf(c *C.rfaas_agent_worker, blob []byte) Worker {
	return Worker{uint64(c.pid), uint32(c.start), blob, int64(c.fork_ns), int64(c.sandbox_ns), int64(c.connect_ns), int64(c.code_ns)}
}

func putWorker(b []byte, w *Worker) []byte {
	c := C.rfaas_agent_worker{pid: C.uint64_t(w.PID), start: C.uint32_t(w.Start), fork_ns: C.int64_t(w.ForkNs),
		sandbox_ns: C.int64_t(w.SandboxNs), connect_ns: C.int64_t(w.ConnectNs), code_ns: C.int64_t(w.CodeNs)}
	c.blob.size = C.uint32_t(copy(view(&c.blob.bytes), w.Blob))
	return put(b, &c)
}

// EncodeWorker appends the body of a reply to REPLACE.
func EncodeWorker(b []byte, w *Worker) []byte { return putWorker(b, w) }

// DecodeWorker decodes the body of a reply to REPLACE. A worker with PID 0 has not started yet.
func DecodeWorker(b []byte) (Worker, error) {
	var c C.rfaas_agent_worker
	err := exactly(OpReplace, b, &c)
	if err != nil || c.pid == 0 {
		return Worker{}, err
	}
	blob, err := blobOf(OpReplace, &c.blob)
	return workerOf(&c, blob), err
}

// Candidate answers an ACQUIRE: the next candidate with the provider that it needs, or the lease if Granted is set.
type Candidate struct {
	Granted                  bool
	LeaseID                  uint64
	UntilNs                  int64
	Library                  [32]byte
	Executor, Node, Provider string
	Workers                  []Worker
	Functions                []string
}

// Encode appends the body of the message.
func (d *Candidate) Encode(b []byte) []byte {
	c := C.rfaas_agent_candidate{workers: C.uint32_t(len(d.Workers)), functions: C.uint32_t(len(d.Functions)),
		lease_id: C.uint64_t(d.LeaseID), until_ns: C.int64_t(d.UntilNs)}
	if d.Granted {
		c.granted = 1
	}
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

// DecodeCandidate decodes the body of the message.
func DecodeCandidate(b []byte) (Candidate, error) {
	var c C.rfaas_agent_candidate
	rest, err := take(OpAcquire, b, &c)
	if err != nil {
		return Candidate{}, err
	}
	names := uint64(c.names_size)
	if names > uint64(len(rest)) {
		return Candidate{}, malformed(OpAcquire, "%d bytes of names in %d", names, len(rest))
	}
	workers, functions := rest[:uint64(len(rest))-names], rest[uint64(len(rest))-names:]
	if err := list[C.rfaas_agent_worker](OpAcquire, "workers", workers, uint64(c.workers), MaxWorkers); err != nil {
		return Candidate{}, err
	}
	t := texts{op: OpAcquire}
	d := Candidate{Granted: c.granted != 0, LeaseID: uint64(c.lease_id), UntilNs: int64(c.until_ns),
		Executor: t.of("executor", c.executor[:]), Node: t.of("node", c.node[:]), Provider: t.of("provider", c.provider[:])}
	copy(d.Library[:], view(&c.library))
	for range uint32(c.workers) {
		var w C.rfaas_agent_worker
		workers, _ = take(OpAcquire, workers, &w)
		blob, err := blobOf(OpAcquire, &w.blob)
		if err != nil {
			return Candidate{}, err
		}
		d.Workers = append(d.Workers, workerOf(&w, blob))
	}
	if len(functions) > 0 && functions[len(functions)-1] != 0 || uint64(bytes.Count(functions, []byte{0})) != uint64(c.functions) {
		return Candidate{}, malformed(OpAcquire, "%d bytes of names are not those of %d functions", names, uint32(c.functions))
	}
	if len(functions) > 0 {
		d.Functions = strings.Split(string(functions[:len(functions)-1]), "\x00")
	}
	return d, t.err
}

// Adopt names a lease that another agent held. Its descriptor is the library.
type Adopt struct {
	Key, Session, LeaseID uint64
	UntilNs               int64
	Library               [32]byte
	At, Node, Provider    string
	Spec                  Spec
	PIDs                  []uint64
}

// Encode appends the body of the message.
func (a *Adopt) Encode(b []byte) []byte {
	c := C.rfaas_agent_adopt{key: C.uint64_t(a.Key), session: C.uint64_t(a.Session), lease_id: C.uint64_t(a.LeaseID),
		until_ns: C.int64_t(a.UntilNs), spec: a.Spec.c()}
	copy(view(&c.library), a.Library[:])
	set(c.at[:], a.At)
	set(c.node[:], a.Node)
	set(c.provider[:], a.Provider)
	b = put(b, &c)
	for _, pid := range a.PIDs {
		b = put(b, &pid)
	}
	return b
}

// DecodeAdopt decodes the body of the message.
func DecodeAdopt(b []byte) (Adopt, error) {
	var c C.rfaas_agent_adopt
	rest, err := take(OpAdopt, b, &c)
	if err == nil {
		err = list[C.uint64_t](OpAdopt, "workers", rest, uint64(c.spec.workers), MaxWorkers)
	}
	t := texts{op: OpAdopt, err: err}
	a := Adopt{Key: uint64(c.key), Session: uint64(c.session), LeaseID: uint64(c.lease_id), UntilNs: int64(c.until_ns),
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

// DecodeUntil decodes the body of the message.
func DecodeUntil(op Op, b []byte) (int64, error) {
	var c C.rfaas_agent_until
	err := exactly(op, b, &c)
	return int64(c.until_ns), err
}
