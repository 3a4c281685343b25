package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import (
	"bytes"
	"strings"
	"unsafe"
)

// Hello begins a connection. Its descriptor is the shared page.
type Hello struct {
	Version     string // of the library
	Directory   string // working directory, for relative paths in the environment
	Environment []string
}

// Encode appends the body of the message.
func (h *Hello) Encode(b []byte) []byte {
	c := C.rfaas_agent_hello{magic: Magic, protocol: Version}
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

// Greeting is what a hello of any version begins with.
type Greeting struct{ Magic, Protocol uint32 }

// DecodeGreeting decodes the beginning of a hello of any version.
func DecodeGreeting(b []byte) (Greeting, error) {
	var c struct{ magic, protocol C.uint32_t }
	if _, err := take(OpHello, b, &c); err != nil {
		return Greeting{}, err
	}
	return Greeting{uint32(c.magic), uint32(c.protocol)}, nil
}

// DecodeHello decodes the body of a hello of this version.
func DecodeHello(b []byte) (Hello, error) {
	var c C.rfaas_agent_hello
	rest, err := take(OpHello, b, &c)
	if err != nil {
		return Hello{}, err
	}
	if uint64(len(rest)) != uint64(c.environment_size) {
		return Hello{}, malformed(OpHello, "%d bytes of environment, want %d", len(rest), uint32(c.environment_size))
	}
	if len(rest) > 0 && rest[len(rest)-1] != 0 {
		return Hello{}, malformed(OpHello, "the environment does not end")
	}
	t := texts{op: OpHello}
	h := Hello{Version: t.of("version", c.version[:]), Directory: t.of("directory", c.directory[:])}
	if len(rest) > 0 {
		h.Environment = strings.Split(string(rest[:len(rest)-1]), "\x00")
	}
	return h, t.err
}

// Welcome answers a hello.
type Welcome struct {
	Protocol uint32
	PID      int
	Version  string // of the agent
}

// Encode appends the body of the message.
func (w *Welcome) Encode(b []byte) []byte {
	c := C.rfaas_agent_welcome{protocol: C.uint32_t(w.Protocol), pid: C.int32_t(w.PID)}
	set(c.version[:], w.Version)
	return put(b, &c)
}

// DecodeWelcome decodes the body of the message.
func DecodeWelcome(b []byte) (Welcome, error) {
	var c C.rfaas_agent_welcome
	err := exactly(OpHello, b, &c)
	t := texts{op: OpHello, err: err}
	return Welcome{uint32(c.protocol), int(c.pid), t.of("version", c.version[:])}, t.err
}

// EncodeReport appends the body of a reply to a request for the status.
func EncodeReport(b []byte, text []byte) []byte {
	return append(put(b, &C.rfaas_agent_report{text_size: C.uint32_t(len(text))}), text...)
}

// DecodeReport decodes the body of the message.
func DecodeReport(b []byte) ([]byte, error) {
	var c C.rfaas_agent_report
	rest, err := take(OpStatus, b, &c)
	if err == nil && uint64(len(rest)) != uint64(c.text_size) {
		err = malformed(OpStatus, "%d bytes of text, want %d", len(rest), uint32(c.text_size))
	}
	return bytes.Clone(rest), err
}

// Session opens a session.
type Session struct {
	Session                             uint64
	Flags                               uint32
	Keep                                int32
	TimeoutNs                           int64
	Manager, Executor, Tenant, Provider string
	SecretFile, TokenFile               string
}

// Encode appends the body of the message.
func (s *Session) Encode(b []byte) []byte {
	c := C.rfaas_agent_session{session: C.uint64_t(s.Session), flags: C.uint32_t(s.Flags), keep: C.int32_t(s.Keep),
		timeout_ns: C.int64_t(s.TimeoutNs)}
	set(c.manager[:], s.Manager)
	set(c.executor[:], s.Executor)
	set(c.tenant[:], s.Tenant)
	set(c.provider[:], s.Provider)
	set(c.secret_file[:], s.SecretFile)
	set(c.token_file[:], s.TokenFile)
	return put(b, &c)
}

// DecodeSession decodes the body of the message.
func DecodeSession(b []byte) (Session, error) {
	var c C.rfaas_agent_session
	t := texts{op: OpOpen, err: exactly(OpOpen, b, &c)}
	return Session{Session: uint64(c.session), Flags: uint32(c.flags), Keep: int32(c.keep), TimeoutNs: int64(c.timeout_ns),
		Manager: t.of("manager", c.manager[:]), Executor: t.of("executor", c.executor[:]), Tenant: t.of("tenant", c.tenant[:]),
		Provider: t.of("provider", c.provider[:]), SecretFile: t.of("secret file", c.secret_file[:]),
		TokenFile: t.of("token file", c.token_file[:])}, t.err
}

// SessionName names a session. Count is of CHANGES.
type SessionName struct{ Session, Count uint64 }

// Encode appends the body of the message.
func (s *SessionName) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_session_name{C.uint64_t(s.Session), C.uint64_t(s.Count)})
}

// DecodeSessionName decodes the body of the message.
func DecodeSessionName(op Op, b []byte) (SessionName, error) {
	var c C.rfaas_agent_session_name
	err := exactly(op, b, &c)
	return SessionName{uint64(c.session), uint64(c.count)}, err
}

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

// DecodeWorker decodes the body of a reply to REPLACE. A worker without a process is not there yet.
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

// EncodeOpened appends the body of a reply to OPEN.
func EncodeOpened(b []byte, provider string) []byte {
	var c C.rfaas_agent_opened
	set(c.provider[:], provider)
	return put(b, &c)
}

// EncodeUntil appends a body with the end of a lease.
func EncodeUntil(b []byte, ns int64) []byte { return put(b, &C.rfaas_agent_until{C.int64_t(ns)}) }

// DecodeUntil decodes the body of the message.
func DecodeUntil(op Op, b []byte) (int64, error) {
	var c C.rfaas_agent_until
	err := exactly(op, b, &c)
	return int64(c.until_ns), err
}

// Replace asks for a new worker.
type Replace struct {
	Key       uint64
	TimeoutNs int64
	Worker    uint32
	Offer     []byte
}

// Encode appends the body of the message.
func (r *Replace) Encode(b []byte) []byte {
	c := C.rfaas_agent_replace{key: C.uint64_t(r.Key), timeout_ns: C.int64_t(r.TimeoutNs), worker: C.uint32_t(r.Worker)}
	c.offer.size = C.uint32_t(copy(view(&c.offer.bytes), r.Offer))
	return put(b, &c)
}

// DecodeReplace decodes the body of the message.
func DecodeReplace(b []byte) (Replace, error) {
	var c C.rfaas_agent_replace
	if err := exactly(OpReplace, b, &c); err != nil {
		return Replace{}, err
	}
	blob, err := blobOf(OpReplace, &c.offer)
	return Replace{uint64(c.key), int64(c.timeout_ns), uint32(c.worker), blob}, err
}

// Release releases a lease.
type Release struct {
	Key  uint64
	Keep bool
}

// Encode appends the body of the message.
func (r *Release) Encode(b []byte) []byte {
	c := C.rfaas_agent_release{key: C.uint64_t(r.Key)}
	if r.Keep {
		c.keep = 1
	}
	return put(b, &c)
}

// DecodeRelease decodes the body of the message.
func DecodeRelease(b []byte) (Release, error) {
	var c C.rfaas_agent_release
	err := exactly(OpRelease, b, &c)
	return Release{uint64(c.key), c.keep != 0}, err
}

// EncodeReleased appends the body of a reply to RELEASE.
func EncodeReleased(b []byte, cached bool) []byte {
	var c C.rfaas_agent_released
	if cached {
		c.cached = 1
	}
	return put(b, &c)
}

// DecodeReleased decodes the body of the message.
func DecodeReleased(b []byte) (cached bool, err error) {
	var c C.rfaas_agent_released
	err = exactly(OpRelease, b, &c)
	return c.cached != 0, err
}

// EncodeLeaseName appends a body that names a lease.
func EncodeLeaseName(b []byte, key uint64) []byte {
	return put(b, &C.rfaas_agent_lease_name{C.uint64_t(key)})
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

// Encode appends the body of the message.
func (w *WorkerName) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_worker_name{key: C.uint64_t(w.Key), worker: C.uint32_t(w.Worker)})
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

// Renewal renews a lease.
type Renewal struct {
	Key        uint64
	DurationNs int64
}

// Encode appends the body of the message.
func (r *Renewal) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_renewal{C.uint64_t(r.Key), C.int64_t(r.DurationNs)})
}

// DecodeRenewal decodes the body of the message.
func DecodeRenewal(b []byte) (Renewal, error) {
	var c C.rfaas_agent_renewal
	err := exactly(OpRenew, b, &c)
	return Renewal{uint64(c.key), int64(c.duration_ns)}, err
}

// Spread asks for executors with room.
type Spread struct {
	Session, Workers, CoresPerWorker, Memory uint64
	DurationNs                               int64
	One                                      bool // leases of one worker each
	Executor                                 string
	Avoid                                    []string
}

type address [C.RFAAS_AGENT_ADDRESS]C.char

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

// DecodeSpread decodes the body of the message.
func DecodeSpread(b []byte) (Spread, error) {
	var c C.rfaas_agent_spread
	rest, err := take(OpSpread, b, &c)
	if err == nil {
		err = list[address](OpSpread, "executors", rest, uint64(c.avoid), MaxMessage/uint64(unsafe.Sizeof(address{})))
	}
	t := texts{op: OpSpread, err: err}
	s := Spread{Session: uint64(c.session), Workers: uint64(c.workers), CoresPerWorker: uint64(c.cores_per_worker),
		Memory: uint64(c.memory), DurationNs: int64(c.duration_ns), One: c.one != 0, Executor: t.of("executor", c.executor[:])}
	for err == nil && len(rest) > 0 {
		var a address
		rest, _ = take(OpSpread, rest, &a)
		s.Avoid = append(s.Avoid, t.of("avoid", a[:]))
	}
	if t.err != nil {
		return Spread{}, t.err
	}
	return s, nil
}

// Share is room for workers at an executor.
type Share struct {
	Workers  uint64
	Executor string
}

// EncodeShares appends the body of a reply to SPREAD.
func EncodeShares(b []byte, shares []Share) []byte {
	b = put(b, &C.rfaas_agent_count{C.uint64_t(len(shares))})
	for _, s := range shares {
		c := C.rfaas_agent_share{workers: C.uint64_t(s.Workers)}
		set(c.executor[:], s.Executor)
		b = put(b, &c)
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

// Change is a change of an executor's state.
type Change struct {
	State          uint32
	Executor, Node string
}

// MaxChanges is how many changes a message holds.
const MaxChanges = (MaxMessage - HeaderSize - C.sizeof_rfaas_agent_count) / C.sizeof_rfaas_agent_change

// EncodeChanges appends the body of a reply to CHANGES.
func EncodeChanges(b []byte, changes []Change) []byte {
	b = put(b, &C.rfaas_agent_count{C.uint64_t(len(changes))})
	for _, x := range changes {
		c := C.rfaas_agent_change{state: C.uint32_t(x.State)}
		set(c.executor[:], x.Executor)
		set(c.node[:], x.Node)
		b = put(b, &c)
	}
	return b
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

// Silence reports a worker that does not answer. Times are of CLOCK_MONOTONIC.
type Silence struct {
	Key           uint64
	SinceNs, AtNs int64
	Worker        uint32
}

// Encode appends the body of the message.
func (s *Silence) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_silence{key: C.uint64_t(s.Key), since_ns: C.int64_t(s.SinceNs), at_ns: C.int64_t(s.AtNs),
		worker: C.uint32_t(s.Worker)})
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
