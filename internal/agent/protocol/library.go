package protocol

// The library's side: the messages that client/c encodes and decodes in C. Only tests use this code, as the peer of an agent, so the
// linker omits it from the programs. It is not a _test.go file because test files cannot use cgo.

/*
#include "agent_protocol.h"
*/
import "C"

import (
	"bytes"
	"slices"
	"strings"
)

// Encode appends the body of the message.
func (h *Hello) Encode(b []byte) []byte {
	c := C.rfaas_agent_hello{magic: Magic, protocol: Version, connection: C.uint32_t(h.Connection)}
	for _, e := range h.Environment {
		c.environment_size += C.uint32_t(len(e) + 1)
	}
	set(c.version[:], h.Version)
	set(c.directory[:], h.Directory)
	b = put(b, &c)
	for _, e := range h.Environment {
		b = append(append(b, e...), 0)
	}
	return b
}

// DecodeWelcome decodes the body of the message.
func DecodeWelcome(b []byte) (Welcome, error) {
	var c C.rfaas_agent_welcome
	err := exactly(OpHello, b, &c)
	t := texts{op: OpHello, err: err}
	return Welcome{uint32(c.protocol), int(c.pid), t.of("version", c.version[:])}, t.err
}

// Encode appends the body of the message.
func (s *Session) Encode(b []byte) []byte {
	c := C.rfaas_agent_session{session: C.uint64_t(s.Session), flags: C.uint32_t(s.Flags), keep: C.int32_t(s.Keep),
		timeout_ns: C.int64_t(s.TimeoutNs), data_encryption: C.uint32_t(slices.Index(encryptions[:], s.DataEncryption)),
		port: C.int32_t(s.Port), pkey_index: C.int32_t(s.PKeyIndex), traffic_class: C.int32_t(s.TrafficClass),
		service_level: C.int32_t(s.ServiceLevel), mtu: C.int32_t(s.MTU), gid: C.uint32_t(s.GID), virtual_pairs: C.uint32_t(s.VirtualPairs)}
	set(c.device[:], s.Device)
	set(c.manager[:], s.Manager)
	set(c.executor[:], s.Executor)
	set(c.tenant[:], s.Tenant)
	set(c.provider[:], s.Provider)
	set(c.secret_file[:], s.SecretFile)
	set(c.token_file[:], s.TokenFile)
	return put(b, &c)
}

// Encode appends the body of the message.
func (s *SessionName) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_session_name{C.uint64_t(s.Session), C.uint64_t(s.Count)})
}

// Encode appends the body of the message.
func (t *Table) Encode(b []byte) []byte {
	c := C.rfaas_agent_table{session: C.uint64_t(t.Session), size: C.uint64_t(t.Size), address: C.uint64_t(t.Address)}
	set(c.name[:], t.Name)
	return put(b, &c)
}

// Encode appends the body of the message.
func (t *TableSeed) Encode(b []byte) []byte {
	c := C.rfaas_agent_table_seed{session: C.uint64_t(t.Session)}
	set(c.name[:], t.Name)
	set(c.seed[:], t.Seed)
	return put(b, &c)
}

// Encode appends the body of the message.
func (s *Spread) Encode(b []byte) []byte {
	c := C.rfaas_agent_spread{session: C.uint64_t(s.Session), workers: C.uint64_t(s.Workers),
		cores_per_worker: C.uint64_t(s.CoresPerWorker), memory: C.uint64_t(s.Memory), duration_ns: C.int64_t(s.DurationNs),
		avoid: C.uint32_t(len(s.Avoid))}
	if s.One {
		c.one = 1
	}
	set(c.executor[:], s.Executor)
	b = put(b, &c)
	for _, x := range s.Avoid {
		var a address
		set(a[:], x)
		b = put(b, &a)
	}
	return b
}

// DecodeShares decodes the body of the message.
func DecodeShares(b []byte) (shares []Share, err error) {
	var n C.rfaas_agent_count
	rest, err := take(OpSpread, b, &n)
	if err == nil {
		err = list[C.rfaas_agent_share](OpSpread, "shares", rest, uint64(n.count), MaxMessage)
	}
	t := texts{op: OpSpread, err: err}
	for t.err == nil && len(rest) > 0 {
		var c C.rfaas_agent_share
		rest, _ = take(OpSpread, rest, &c)
		shares = append(shares, Share{uint64(c.workers), t.of("executor", c.executor[:])})
	}
	return shares, t.err
}

// DecodeChanges decodes the body of the message.
func DecodeChanges(b []byte) (changes []Change, err error) {
	var n C.rfaas_agent_count
	rest, err := take(OpChanges, b, &n)
	if err == nil {
		err = list[C.rfaas_agent_change](OpChanges, "changes", rest, uint64(n.count), MaxChanges)
	}
	t := texts{op: OpChanges, err: err}
	for t.err == nil && len(rest) > 0 {
		var c C.rfaas_agent_change
		rest, _ = take(OpChanges, rest, &c)
		changes = append(changes, Change{uint32(c.state), t.of("executor", c.executor[:]), t.of("node", c.node[:])})
	}
	return changes, t.err
}

func (s *Spec) c() (c C.rfaas_agent_spec) {
	c = C.rfaas_agent_spec{workers: C.uint32_t(s.Workers), cores_per_worker: C.uint32_t(s.CoresPerWorker), workers_min: C.uint32_t(s.WorkersMin), init: C.uint32_t(s.Init),
		wait_mode: C.uint32_t(s.WaitMode), flags: C.uint32_t(s.Flags), depth: C.uint32_t(s.Depth), eager: C.uint32_t(s.Eager),
		memory: C.uint64_t(s.Memory), bulk: C.uint64_t(s.Bulk), duration_ns: C.int64_t(s.DurationNs),
		call_limit_ns: C.int64_t(s.CallLimitNs)}
	set(c.executor[:], s.Executor)
	set(c.library[:], s.Library)
	set(c.bundle[:], s.Bundle)
	set(c.runtime[:], s.Runtime)
	return c
}

func putBlob(b []byte, blob []byte) []byte {
	var c C.rfaas_agent_blob
	c.size = C.uint32_t(copy(view(&c.bytes), blob))
	return put(b, &c)
}

// Encode appends the body of the message.
func (a *Acquire) Encode(b []byte) []byte {
	c := C.rfaas_agent_acquire{key: C.uint64_t(a.Key), session: C.uint64_t(a.Session), from: C.uint64_t(a.From),
		cached: C.uint64_t(a.Cached), wait_ns: C.int64_t(a.WaitNs), offers: C.uint32_t(len(a.Offers)), status: C.int32_t(a.Status),
		spec: a.Spec.c(), seed_function: C.uint32_t(len(a.SeedFunction)), seed_payload: C.uint32_t(len(a.SeedPayload)),
		seed_limit_ns: C.int64_t(a.SeedLimitNs)}
	if a.First {
		c.first = 1
	}
	set(c.at[:], a.At)
	set(c.provider[:], a.Provider)
	set(c.reason[:], a.Reason)
	set(c.seed[:], a.SeedName)
	b = put(b, &c)
	for _, o := range a.Offers {
		b = putBlob(b, o)
	}
	return append(append(b, a.SeedFunction...), a.SeedPayload...)
}

func workerOf(c *C.rfaas_agent_worker, blob []byte) Worker {
	return Worker{uint64(c.pid), uint32(c.start), blob, int64(c.fork_ns), int64(c.sandbox_ns), int64(c.connect_ns), int64(c.code_ns),
		C.GoString(&c.unseeded[0])}
}

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
	d := Candidate{Granted: c.granted != 0, Handed: c.handed != 0, Claim: decodeClaim(&c.claim), LeaseID: uint64(c.lease_id), UntilNs: int64(c.until_ns),
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

// Encode appends the body of the message.
func (a *Adopt) Encode(b []byte) []byte {
	c := C.rfaas_agent_adopt{key: C.uint64_t(a.Key), session: C.uint64_t(a.Session), lease_id: C.uint64_t(a.LeaseID),
		until_ns: C.int64_t(a.UntilNs), present: C.uint32_t(a.Present), cached: C.uint64_t(a.Cached), spec: a.Spec.c()}
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

// DecodeUntil decodes the body of the message.
func DecodeUntil(op Op, b []byte) (int64, error) {
	var c C.rfaas_agent_until
	err := exactly(op, b, &c)
	return int64(c.until_ns), err
}

// Encode appends the body of the message.
func (r *Replace) Encode(b []byte) []byte {
	c := C.rfaas_agent_replace{key: C.uint64_t(r.Key), timeout_ns: C.int64_t(r.TimeoutNs), worker: C.uint32_t(r.Worker)}
	c.offer.size = C.uint32_t(copy(view(&c.offer.bytes), r.Offer))
	return put(b, &c)
}

// Encode appends the body of the message.
func (r *Release) Encode(b []byte) []byte {
	c := C.rfaas_agent_release{key: C.uint64_t(r.Key)}
	switch {
	case r.Own:
		c.keep = C.RFAAS_AGENT_KEEP_OWN
	case r.Keep:
		c.keep = 1
	}
	if r.Ahead {
		c.ahead = 1
	}
	return put(b, &c)
}

// DecodeOpened decodes the body of the message.
func DecodeOpened(b []byte) (provider string, encrypt int, err error) {
	var c C.rfaas_agent_opened
	if err := exactly(OpOpen, b, &c); err != nil {
		return "", 0, err
	}
	var t texts
	return t.of("provider", c.provider[:]), int(c.encrypt), t.err
}

// Encode appends the body of the message.
func (a *Attach) Encode(b []byte) []byte {
	c := C.rfaas_agent_attach{key: C.uint64_t(a.Key)}
	c.blob.size = C.uint32_t(copy(view(&c.blob.bytes), a.Blob))
	return put(b, &c)
}

// DecodeAttached decodes the body of the message.
func DecodeAttached(b []byte) (Attached, error) {
	var c C.rfaas_agent_attached
	if err := exactly(OpAttach, b, &c); err != nil {
		return Attached{}, err
	}
	blob, err := blobOf(OpAttach, &c.blob)
	return Attached{uint64(c.addr), uint32(c.rkey), blob}, err
}

// DecodeReleased decodes the body of the message.
func DecodeReleased(b []byte) (Released, error) {
	var c C.rfaas_agent_released
	rest, err := take(OpRelease, b, &c)
	if err != nil {
		return Released{}, err
	}
	r := Released{Cached: c.cached != 0, Handed: c.handed != 0, Claim: decodeClaim(&c.claim), May: c.own == C.RFAAS_AGENT_OWN_MAY}
	if c.own == C.RFAAS_AGENT_OWN_CLAIM {
		var own C.rfaas_agent_own_claim
		err = exactly(OpRelease, rest, &own)
		r.Own = &OwnClaim{uint64(own.lease_id), int64(own.client_ns)}
		return r, err
	}
	if err = list[C.uint64_t](OpRelease, "workers", rest, uint64(c.spare), MaxWorkers); err != nil {
		return Released{}, err
	}
	for len(rest) > 0 {
		var pid C.uint64_t
		rest, _ = take(OpRelease, rest, &pid)
		r.Spare = append(r.Spare, uint64(pid))
	}
	return r, nil
}

// EncodeLeaseName appends a body that names a lease.
func EncodeLeaseName(b []byte, key uint64) []byte {
	return put(b, &C.rfaas_agent_lease_name{C.uint64_t(key)})
}

// Encode appends the body of the message.
func (w *WorkerName) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_worker_name{key: C.uint64_t(w.Key), worker: C.uint32_t(w.Worker)})
}

// DecodeInspection decodes the body of the message.
func DecodeInspection(b []byte) (Inspection, error) {
	var c C.rfaas_agent_inspection
	t := texts{op: OpInspect, err: exactly(OpInspect, b, &c)}
	i := Inspection{int(c.pid), uint64(c.calls), uint64(c.failed), uint64(c.refused), uint64(c.bytes_in), uint64(c.bytes_out),
		t.of("running", c.running[:]), nil}
	if t.err == nil && int(c.output_size) >= len(c.output) {
		t.err = malformed(OpInspect, "%d bytes of output, want less than %d", uint32(c.output_size), len(c.output))
	}
	if t.err != nil {
		return Inspection{}, t.err
	}
	i.Output = bytes.Clone(view(&c.output)[:c.output_size])
	return i, nil
}

// Encode appends the body of the message.
func (r *Renewal) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_renewal{C.uint64_t(r.Key), C.int64_t(r.DurationNs)})
}

// Encode appends the body of the message.
func (s *Silence) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_silence{key: C.uint64_t(s.Key), since_ns: C.int64_t(s.SinceNs), at_ns: C.int64_t(s.AtNs),
		worker: C.uint32_t(s.Worker)})
}

// DecodeEvent decodes the body of the message.
func DecodeEvent(b []byte) (Event, error) {
	var c C.rfaas_agent_event
	rest, err := take(OpEvent, b, &c)
	if err == nil && uint64(len(rest)) != uint64(c.details_size) {
		err = malformed(OpEvent, "%d bytes of details, want %d", len(rest), uint32(c.details_size))
	}
	t := texts{op: OpEvent, err: err}
	return Event{uint64(c.key), uint64(c.pid), int64(c.in_ns), uint32(c.kind), int32(c.status), uint32(c.worker),
		t.of("text", c.text[:]), string(rest)}, t.err
}

// Encode appends the body of the message.
func (s *SeedCreate) Encode(b []byte) []byte {
	c := C.rfaas_agent_seed_create{key: C.uint64_t(s.Key), limit_ns: C.int64_t(s.LimitNs), ttl_ns: C.int64_t(s.TTLNs), function: C.uint32_t(len(s.Function)),
		payload: C.uint32_t(len(s.Payload))}
	set(c.name[:], s.Name)
	return append(append(put(b, &c), s.Function...), s.Payload...)
}

// Encode appends the body of the message.
func (s *SeedName) Encode(b []byte) []byte {
	c := C.rfaas_agent_seed_name{session: C.uint64_t(s.Session)}
	set(c.name[:], s.Name)
	return put(b, &c)
}

// DecodeSeed decodes the body of the message.
func DecodeSeed(b []byte) (Seed, error) {
	var c C.rfaas_agent_seed
	rest, err := take(OpSeedFind, b, &c)
	if err != nil {
		return Seed{}, err
	}
	t := texts{op: OpSeedFind}
	s := Seed{Bytes: uint64(c.bytes), Memory: uint64(c.memory), LoadNs: int64(c.load_ns), SetupNs: int64(c.setup_ns), CaptureNs: int64(c.capture_ns), LeftNs: int64(c.left_ns),
		Version: uint32(c.version), Children: uint32(c.children), Name: t.of("name", c.name[:]), Executor: t.of("executor", c.executor[:]), Node: t.of("node", c.node[:])}
	if behind := len(s.Node) + 1; behind < len(c.node) {
		s.Warning = t.of("warning", c.node[behind:])
	}
	if t.err != nil {
		return Seed{}, t.err
	}
	s.Function, s.Payload, err = setup(OpSeedFind, rest, uint32(c.function), uint32(c.payload))
	return s, err
}
