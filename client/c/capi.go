// Package c is the C library (rfaas.h) for Go: each function calls the C function of the same name once, with Go's types and
// errors. Programs use package client.
//
// The C files of this package use the headers of internal/dataplane. A program links the objects of both packages. But cgo also
// links each package alone, without the other's objects. The linker's flag --unresolved-symbols keeps that link from failing.
package c

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wno-unused-parameter -I${SRCDIR}/../../internal/dataplane
#cgo LDFLAGS: -Wl,--unresolved-symbols=ignore-all -ldl -pthread
#include <stdlib.h>
#include "shim.h"

#cgo noescape rfaas_shim_call
#cgo nocallback rfaas_shim_call
#cgo noescape rfaas_shim_invoke
#cgo nocallback rfaas_shim_invoke
#cgo nocallback rfaas_shim_start
#cgo noescape rfaas_shim_invoke_pieces
#cgo nocallback rfaas_shim_invoke_pieces
#cgo nocallback rfaas_shim_start_pieces
#cgo noescape rfaas_shim_waitany
#cgo nocallback rfaas_shim_waitany
*/
import "C"

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Error is a failed call. The text is that of rfaas_last_error.
type Error struct {
	Status  dataplane.Status
	Text    string
	Started bool  // of an invocation: the function may have run
	Code    int32 // that the function passed to rfaas_fail_code; 0: none
	Cause   error // context.DeadlineExceeded or context.Canceled where that is what ended it, or nil
}

func (e *Error) Error() string { return e.Text }

// Is reports whether target is the class of the error.
func (e *Error) Is(target error) bool { return target == e.Status.Class() }

// Unwrap returns the context's error, if that ended the operation.
func (e *Error) Unwrap() error { return e.Cause }

// take makes an error of what a shim returned, and frees that.
func take(f *C.rfaas_shim_error) *Error {
	e := &Error{Status: dataplane.Status(f.status), Text: C.GoString(f.text), Started: f.started == C.RFAAS_MAYBE_EXECUTED, Code: int32(f.code)}
	C.free(unsafe.Pointer(f))
	if e.Status == dataplane.StatusDeadline {
		e.Cause = context.DeadlineExceeded
	}
	return e
}

func errorOf(f *C.rfaas_shim_error) error {
	if f == nil {
		return nil
	}
	return take(f)
}

// Handles of the C library.
type (
	Session C.rfaas_session
	Lease   C.rfaas_lease
	Request uint64 // 0: none
)

func (s *Session) c() *C.rfaas_session { return (*C.rfaas_session)(s) }
func (l *Lease) c() *C.rfaas_lease     { return (*C.rfaas_lease)(l) }

// AnyWorker is the worker of a call that any worker may run.
const AnyWorker = C.RFAAS_ANY_WORKER

// Init starts the library; each needs a Finalize.
func Init() error { return errorOf(C.rfaas_shim_init()) }

// Finalize undoes one Init.
func Finalize() error { return errorOf(C.rfaas_shim_finalize()) }

// ---- sessions ----

// SessionOptions are rfaas_session_options.
type SessionOptions struct {
	Manager, Executor, Provider, Tenant, Device, SecretFile, TokenFile string
	Port, GIDIndex, PKeyIndex, TrafficClass, ServiceLevel, MTU         int
	AllowPlaintext, Local                                              bool
	DataEncryption                                                     int // RFAAS_DATA_ENCRYPTION_*
	Timeout                                                            time.Duration
	CachedLeases                                                       int
}

// strings keeps copies of texts for C.
type strings []*C.char

func (s *strings) c(text string) *C.char {
	if text == "" {
		return nil
	}
	c := C.CString(text)
	*s = append(*s, c)
	return c
}

func (s *strings) free() {
	for _, c := range *s {
		C.free(unsafe.Pointer(c))
	}
}

// SessionOpen opens a session.
func SessionOpen(o *SessionOptions) (*Session, error) {
	var texts strings
	defer texts.free()
	c := C.rfaas_session_options{struct_size: C.sizeof_rfaas_session_options, port: C.int32_t(o.Port), manager: texts.c(o.Manager),
		executor: texts.c(o.Executor), provider: texts.c(o.Provider), tenant: texts.c(o.Tenant), device: texts.c(o.Device),
		gid_index: C.int32_t(o.GIDIndex), pkey_index: C.int32_t(o.PKeyIndex), traffic_class: C.int32_t(o.TrafficClass),
		service_level: C.int32_t(o.ServiceLevel), mtu: C.int32_t(o.MTU), timeout_ns: C.int64_t(o.Timeout),
		cached_leases: C.int32_t(o.CachedLeases), secret_file: texts.c(o.SecretFile), token_file: texts.c(o.TokenFile),
		data_encryption: C.uint32_t(o.DataEncryption)}
	if o.AllowPlaintext {
		c.flags |= C.RFAAS_SESSION_ALLOW_PLAINTEXT
	}
	if o.Local {
		c.flags |= C.RFAAS_SESSION_LOCAL
	}
	var s *C.rfaas_session
	err := errorOf(C.rfaas_shim_session_open(&c, &s))
	return (*Session)(s), err
}

// Close closes the session and releases its leases.
func (s *Session) Close() error { return errorOf(C.rfaas_shim_session_close(s.c())) }

// TablePut publishes the pieces as a table. Address 0: any.
func (s *Session) TablePut(name string, p *Pieces, address uint64) error {
	var texts strings
	defer texts.free()
	return errorOf(C.rfaas_shim_table_put(s.c(), texts.c(name), p.at(), C.size_t(len(p.all)), C.uint64_t(address)))
}

// TablePutSeed publishes the memory of a seed as a table.
func (s *Session) TablePutSeed(name, seed string) error {
	var texts strings
	defer texts.free()
	return errorOf(C.rfaas_shim_table_put_seed(s.c(), texts.c(name), texts.c(seed)))
}

// TableDrop withdraws a table.
func (s *Session) TableDrop(name string) error {
	var texts strings
	defer texts.free()
	return errorOf(C.rfaas_shim_table_drop(s.c(), texts.c(name)))
}

// Cached returns how many released leases the session caches; 0 for a closed session.
func (s *Session) Cached() int { return max(int(C.rfaas_session_cached(s.c())), 0) }

// Change is rfaas_change.
type Change struct {
	State          uint32
	Executor, Node string
}

// Changes takes what has happened to executors.
func (s *Session) Changes() ([]Change, error) {
	var found []Change
	for {
		var all [64]C.rfaas_change
		var n C.size_t
		if err := errorOf(C.rfaas_shim_session_changes(s.c(), &all[0], C.size_t(len(all)), &n)); err != nil {
			return found, err
		}
		for _, c := range all[:n] {
			found = append(found, Change{uint32(c.state), C.GoString(&c.executor[0]), C.GoString(&c.node[0])})
		}
		if int(n) < len(all) {
			return found, nil
		}
	}
}

// ---- leases ----

// LeaseOptions are rfaas_lease_options. Bulk below 0: none.
type LeaseOptions struct {
	Workers, CoresPerWorker, Depth, Eager, WaitMode uint32
	WorkersMin                                      uint32
	Bulk, BulkMax                                   int64
	Memory                                          uint64
	Duration, CallLimit, Wait                       time.Duration
	Library, Executor, Bundle, Runtime              string
	Code                                            []byte
	Renew, Failover, Local, Reuse                   bool
	Seed, SeedRequired                              bool
	SeedName                                        string
	InitFunction                                    string
	InitPayload                                     []byte
}

// with calls f with the options for C.
func (o *LeaseOptions) with(f func(*C.rfaas_lease_options) *C.rfaas_shim_error) error {
	var texts strings
	defer texts.free()
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rfaas_lease_options{struct_size: C.sizeof_rfaas_lease_options, workers: C.uint32_t(o.Workers),
		cores_per_worker: C.uint32_t(o.CoresPerWorker), depth: C.uint32_t(o.Depth), eager: C.uint32_t(o.Eager),
		wait_mode: C.uint32_t(o.WaitMode), bulk: C.uint64_t(o.Bulk), memory: C.uint64_t(o.Memory),
		duration_ns: C.int64_t(o.Duration), library: texts.c(o.Library), executor: texts.c(o.Executor),
		call_limit_ns: C.int64_t(o.CallLimit), wait_ns: C.int64_t(o.Wait), bulk_max: C.uint64_t(o.BulkMax), bundle: texts.c(o.Bundle),
		runtime: texts.c(o.Runtime), init_function: texts.c(o.InitFunction), seed: texts.c(o.SeedName), workers_min: C.uint32_t(o.WorkersMin)}
	if o.Bulk < 0 {
		c.bulk = C.RFAAS_NO_BULK
	}
	if len(o.Code) > 0 {
		pin.Pin(unsafe.SliceData(o.Code))
		c.library_data, c.library_size = unsafe.Pointer(unsafe.SliceData(o.Code)), C.size_t(len(o.Code))
	}
	if len(o.InitPayload) > 0 {
		pin.Pin(unsafe.SliceData(o.InitPayload))
		c.init_payload, c.init_size = unsafe.Pointer(unsafe.SliceData(o.InitPayload)), C.size_t(len(o.InitPayload))
	}
	for flag, on := range map[C.uint32_t]bool{C.RFAAS_LEASE_RENEW: o.Renew, C.RFAAS_LEASE_FAILOVER: o.Failover, C.RFAAS_LEASE_LOCAL: o.Local,
		C.RFAAS_LEASE_REUSE: o.Reuse, C.RFAAS_LEASE_SEED: o.Seed, C.RFAAS_LEASE_SEED_REQUIRED: o.SeedRequired} {
		if on {
			c.flags |= flag
		}
	}
	return errorOf(f(&c))
}

// LeaseOpen takes a lease, at this place and no other unless that is "".
func (s *Session) LeaseOpen(o *LeaseOptions, place string) (*Lease, error) {
	var l *C.rfaas_lease
	var texts strings
	defer texts.free()
	at := texts.c(place)
	err := o.with(func(c *C.rfaas_lease_options) *C.rfaas_shim_error { return C.rfaas_shim_lease_open(s.c(), c, at, &l) })
	return (*Lease)(l), err
}

// LeaseOpenAcross takes leases wherever workers fit, at most that many.
func (s *Session) LeaseOpenAcross(o *LeaseOptions, most int) ([]*Lease, error) {
	room := (*[1 << 20]*C.rfaas_lease)(C.calloc(C.size_t(most), C.size_t(unsafe.Sizeof((*C.rfaas_lease)(nil)))))
	defer C.free(unsafe.Pointer(room))
	var n C.size_t
	err := o.with(func(c *C.rfaas_lease_options) *C.rfaas_shim_error {
		return C.rfaas_shim_lease_open_across(s.c(), c, C.size_t(most), &room[0], &n)
	})
	if err != nil {
		return nil, err
	}
	leases := make([]*Lease, n)
	for i := range leases {
		leases[i] = (*Lease)(room[i])
	}
	return leases, nil
}

// Places finds executors with room for count leases.
func (s *Session) Places(o *LeaseOptions, count int) ([]string, error) {
	found := make([]C.rfaas_place, max(count, 1))
	err := o.with(func(c *C.rfaas_lease_options) *C.rfaas_shim_error {
		return C.rfaas_shim_places(s.c(), c, C.size_t(count), &found[0])
	})
	if err != nil {
		return nil, err
	}
	places := make([]string, count)
	for i := range places {
		places[i] = C.GoString(&found[i].executor[0])
	}
	return places, nil
}

// Release gives the workers back.
func (l *Lease) Release() error { return errorOf(C.rfaas_shim_lease_release(l.c())) }

// Renew makes the lease last at least so long from now on.
func (l *Lease) Renew(d time.Duration) error {
	return errorOf(C.rfaas_shim_lease_renew(l.c(), C.int64_t(d)))
}

// Status is nil while the lease lasts.
func (l *Lease) Status() error { return errorOf(C.rfaas_shim_lease_status(l.c())) }

// Event is rfaas_event. Kind 0: none.
type Event struct {
	Kind, Worker, Lost uint32
	Left               time.Duration
	Text               string
}

// Event takes the oldest event.
func (l *Lease) Event() (Event, error) {
	c := C.rfaas_event{struct_size: C.sizeof_rfaas_event}
	err := errorOf(C.rfaas_shim_lease_event(l.c(), &c))
	if err != nil || c.kind == C.RFAAS_EVENT_NONE {
		return Event{}, err
	}
	return Event{uint32(c.kind), uint32(c.worker), uint32(c.lost), time.Duration(c.left_ns), C.GoString(&c.text[0])}, nil
}

// Info is rfaas_lease_details.
type Info struct {
	Workers, Depth, Eager, Functions, Replaced int
	Wanted                                     int // number of workers when all have been added
	Bulk, ID                                   uint64
	Node, Executor, Provider                   string
	Left                                       time.Duration
	LocalReason                                string
}

// Info describes the lease.
func (l *Lease) Info() (Info, error) {
	c := C.rfaas_lease_details{struct_size: C.sizeof_rfaas_lease_details}
	err := errorOf(C.rfaas_shim_lease_info(l.c(), &c))
	if err != nil {
		return Info{}, err
	}
	return Info{int(c.workers), int(c.depth), int(c.eager), int(c.functions), int(c.replaced), int(c.workers_wanted), uint64(c.bulk), uint64(c.lease_id),
		C.GoString(&c.node_name[0]), C.GoString(&c.executor_address[0]), C.GoString(&c.provider[0]), time.Duration(c.left_ns),
		C.GoString(&c.local_reason[0])}, nil
}

// Workers returns the number of workers that the lease has now; a negative status after an error.
func (l *Lease) Workers() int { return int(C.rfaas_lease_workers(l.c())) }

// Function finds a function by name.
func (l *Lease) Function(name string) (uint32, error) {
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	var f C.rfaas_function
	err := errorOf(C.rfaas_shim_lease_function(l.c(), text, &f))
	return uint32(f), err
}

// Chain makes a chain of two functions.
func (l *Lease) Chain(first, second uint32) (uint32, error) {
	var f C.rfaas_function
	err := errorOf(C.rfaas_shim_lease_chain(l.c(), C.rfaas_function(first), C.rfaas_function(second), &f))
	return uint32(f), err
}

// FunctionName is the name of a function, "" if there is none.
func (l *Lease) FunctionName(f uint32) string {
	return C.GoString(C.rfaas_lease_function_name(l.c(), C.rfaas_function(f)))
}

// Start is rfaas_worker_start.
type Start struct {
	Start                        uint32
	PID                          int
	Fork, Sandbox, Connect, Code time.Duration
	Unseeded                     string
}

// Origin tells how a worker came to the lease.
func (l *Lease) Origin(worker int) (Start, error) {
	c := C.rfaas_worker_start{struct_size: C.sizeof_rfaas_worker_start}
	err := errorOf(C.rfaas_shim_worker_origin(l.c(), C.int(worker), &c))
	return Start{uint32(c.start), int(c.pid), time.Duration(c.fork_ns), time.Duration(c.sandbox_ns), time.Duration(c.connect_ns),
		time.Duration(c.code_ns), C.GoString(&c.unseeded[0])}, err
}

// WorkerInfo is rfaas_worker_details.
type WorkerInfo struct {
	PID                                       int
	Calls, Failed, Refused, BytesIn, BytesOut uint64
	Running                                   string
	Output                                    []byte
}

// WorkerReplace kills a worker and starts a new one.
func (l *Lease) WorkerReplace(worker int) error {
	return errorOf(C.rfaas_shim_worker_replace(l.c(), C.int(worker)))
}

// WorkerInfo asks the executor about a worker.
func (l *Lease) WorkerInfo(worker int) (WorkerInfo, error) {
	c := C.rfaas_worker_details{struct_size: C.sizeof_rfaas_worker_details}
	if err := errorOf(C.rfaas_shim_worker_info(l.c(), C.int(worker), &c)); err != nil {
		return WorkerInfo{}, err
	}
	return WorkerInfo{int(c.pid), uint64(c.calls), uint64(c.failed), uint64(c.refused), uint64(c.bytes_in), uint64(c.bytes_out),
		C.GoString(&c.running[0]), C.GoBytes(unsafe.Pointer(&c.output[0]), C.int(c.output_size))}, nil
}

// Statistics are rfaas_statistics.
type Statistics struct {
	Replaced, Calls, Replies, Abandoned, Late, Busy, BytesIn, BytesOut, Blocked, Repeated, Moved, Local, Cold, Pooled, Cached,
	QueuePairs, CachedLeases, Seeded uint64
	Open time.Duration
}

// Statistics sums up the lease.
func (l *Lease) Statistics() (Statistics, error) {
	c := C.rfaas_statistics{struct_size: C.sizeof_rfaas_statistics}
	err := errorOf(C.rfaas_shim_lease_statistics(l.c(), &c))
	return Statistics{uint64(c.replaced), uint64(c.calls), uint64(c.replies), uint64(c.abandoned), uint64(c.late), uint64(c.busy),
		uint64(c.bytes_in), uint64(c.bytes_out), uint64(c.blocked), uint64(c.repeated), uint64(c.moved), uint64(c.local),
		uint64(c.cold), uint64(c.pooled), uint64(c.cached), uint64(c.queue_pairs), uint64(c.cached_leases), uint64(c.seeded), time.Duration(c.open_ns)}, err
}

// ---- memory ----

// Alloc returns registered memory.
func (l *Lease) Alloc(size int) ([]byte, error) {
	var at unsafe.Pointer
	if err := errorOf(C.rfaas_shim_alloc(l.c(), C.size_t(size), &at)); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(at), size), nil
}

// Free frees what Alloc returned.
func (l *Lease) Free(b []byte) error {
	return errorOf(C.rfaas_shim_free(l.c(), unsafe.Pointer(unsafe.SliceData(b))))
}

// Memory returns memory that C may keep; it panics if there is none.
func Memory(size int) []byte { return unsafe.Slice((*byte)(C.malloc(C.size_t(size))), size) }

// FreeMemory frees it.
func FreeMemory(b []byte) { C.free(unsafe.Pointer(unsafe.SliceData(b))) }

// ---- calls ----

// CallOptions are rfaas_call_options.
type CallOptions struct {
	Worker  int32 // or AnyWorker
	Repeats uint32
	Kill    bool          // RFAAS_CALL_KILL
	Timeout time.Duration // 0: none
	Attempt time.Duration // 0: none
	InPlace bool          // RFAAS_CALL_IN_PLACE
	Keep    int           // most bytes of a result that KeptResult returns; only for Start
}

func (o *CallOptions) flags() (flags C.uint32_t) {
	if o.Kill {
		flags |= C.RFAAS_CALL_KILL
	}
	if o.InPlace {
		flags |= C.RFAAS_CALL_IN_PLACE
	}
	return flags
}

func at(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(b))) }

// Call calls a function on any worker and waits. n is also the size of a result that is too large.
func (l *Lease) Call(f uint32, in, out []byte) (n int, err error) {
	var r C.rfaas_shim_result
	from, to := at(in), at(out)
	C.rfaas_shim_call(l.number(), C.uint32_t(f), from, C.size_t(len(in)), to, C.size_t(len(out)), &r)
	if r.error != 0 {
		err = failed(&r)
	}
	return int(r.size), err
}

// Invoke is Call with options.
func (l *Lease) Invoke(f uint32, in, out []byte, o CallOptions) (n int, err error) {
	var r C.rfaas_shim_result
	from, to := at(in), at(out)
	C.rfaas_shim_invoke(l.number(), C.uint32_t(f), from, C.size_t(len(in)), to, C.size_t(len(out)), C.int32_t(o.Worker),
		C.uint32_t(o.Repeats), C.int64_t(o.Timeout), C.int64_t(o.Attempt), o.flags(), &r)
	if r.error != 0 {
		err = failed(&r)
	}
	return int(r.size), err
}

// number returns the handle for functions whose argument cgo must not check (shim.h). It is the address of memory of C.
func (l *Lease) number() C.uintptr_t { return C.uintptr_t(uintptr(unsafe.Pointer(l))) }

func failed(r *C.rfaas_shim_result) error { return take(C.rfaas_shim_error_of(r.error)) }

// Start starts a call and waits for up to patience for its end; done says that it has ended. With wait above 0, it waits at most that long
// before the call starts, for example for a new worker, and then returns StatusDeadline, not started. A call that has not ended goes on: C
// keeps out, and also in if the call may be repeated or in lies in memory of Alloc.
func (l *Lease) Start(f uint32, in, out []byte, o CallOptions, wait, patience time.Duration) (r Request, n int, done bool, err error) {
	return begun(C.rfaas_shim_start(l.c(), C.uint32_t(f), at(in), C.size_t(len(in)),
		at(out), C.size_t(len(out)), C.int32_t(o.Worker), C.uint32_t(o.Repeats), C.int64_t(o.Timeout),
		C.int64_t(o.Attempt), o.flags(), C.uint64_t(o.Keep), C.int64_t(wait), C.int64_t(patience)))
}

// KeptResult copies to out the result of the last call for which this thread has waited, if it was larger than the call's capacity but at most Keep. out has the size of the
// result.
func KeptResult(out []byte) error {
	return errorOf(C.rfaas_shim_kept_result(at(out), C.size_t(len(out))))
}

func begun(c C.rfaas_shim_started) (r Request, n int, done bool, err error) {
	if c.error != nil {
		return 0, int(c.size), true, take(c.error)
	}
	return Request(c.request), int(c.size), c.request == 0, nil
}

// AwaitSlot waits a while until a call that was ErrBusy may find a free slot on the worker, or with AnyWorker on any.
func (l *Lease) AwaitSlot(worker int32, patience time.Duration) {
	C.rfaas_shim_await_slot(l.c(), C.int32_t(worker), C.int64_t(patience))
}

// WaitAny waits a while for one of several requests to end: its place, or -1. A request that has ended is 0 afterwards.
func WaitAny(requests []Request, patience time.Duration) (i, n int, err error) {
	c := C.rfaas_shim_waitany(C.size_t(len(requests)), (*C.rfaas_request)(unsafe.SliceData(requests)), C.int64_t(patience))
	if c.error != nil {
		return int(c.index), int(c.size), take(c.error)
	}
	return int(c.index), int(c.size), nil
}

// Cancel gives a request up.
func (r Request) Cancel() error {
	c := C.rfaas_request(r)
	return errorOf(C.rfaas_shim_cancel(&c))
}

// Interrupt has the threads inside the lease look whether their maps were cancelled.
func (l *Lease) Interrupt() { C.rfaas_api_interrupt(l.c()) }

// Map calls a function on the items of an array. A goroutine that sets *cancelled, which may be nil, and calls Interrupt ends it.
func (l *Lease) Map(f uint32, in []byte, inItem int, out []byte, outItem, count, chunk int, timeout time.Duration, repeats uint32,
	cancelled *atomic.Uint32) error {
	c := C.rfaas_map_options{struct_size: C.sizeof_rfaas_map_options, chunk: C.size_t(chunk), timeout_ns: C.int64_t(timeout),
		repeats: C.uint32_t(repeats)}
	return errorOf(C.rfaas_shim_map(l.c(), C.rfaas_function(f), at(in), C.size_t(inItem),
		at(out), C.size_t(outItem), C.size_t(count), &c, (*C.uint32_t)(unsafe.Pointer(cancelled))))
}

// Reduce calls a function on the items of an array, and combines the results with the accumulator, which is the result of one item.
func (l *Lease) Reduce(f uint32, in []byte, inItem int, accumulator []byte, count, operation, kind int, timeout time.Duration, repeats uint32,
	cancelled *atomic.Uint32) error {
	c := C.rfaas_map_options{struct_size: C.sizeof_rfaas_map_options, timeout_ns: C.int64_t(timeout), repeats: C.uint32_t(repeats)}
	return errorOf(C.rfaas_shim_reduce(l.c(), C.rfaas_function(f), at(in), C.size_t(inItem), at(accumulator), C.size_t(len(accumulator)),
		C.size_t(count), C.int(operation), C.int(kind), &c, (*C.uint32_t)(unsafe.Pointer(cancelled))))
}

// Types of the elements that Reduce combines.
const (
	Int32  = C.RFAAS_INT32
	Int64  = C.RFAAS_INT64
	Float  = C.RFAAS_FLOAT32
	Double = C.RFAAS_FLOAT64
)

// ---- pieces ----

// pinnerRoom is how many objects a runtime.Pinner pins without an allocation.
const pinnerRoom = 5

// Pieces are the arrays of rfaas_piece of a call: first the payload's pieces, then the result's. Their memory is pinned until Clear. The
// arrays are reused, so that they need an allocation only when they grow.
type Pieces struct {
	all    []C.rfaas_piece
	in     int
	pins   []runtime.Pinner
	pinned int
}

// Add appends count elements of size bytes, stride bytes apart, the first at the beginning of b, which contains them all.
func (p *Pieces) Add(b []byte, size, count, stride int) {
	piece := C.rfaas_piece{size: C.size_t(size), count: C.size_t(count), stride: C.ptrdiff_t(stride)}
	if len(b) > 0 {
		if p.pinned == len(p.pins)*pinnerRoom {
			p.pins = append(p.pins, runtime.Pinner{})
		}
		p.pins[p.pinned/pinnerRoom].Pin(unsafe.SliceData(b))
		p.pinned++
		piece.base = unsafe.Pointer(unsafe.SliceData(b))
	}
	p.all = append(p.all, piece)
}

// EndOfPayload says that the pieces added from now on receive the result.
func (p *Pieces) EndOfPayload() { p.in = len(p.all) }

// Clear removes all pieces.
func (p *Pieces) Clear() {
	for i := range p.pins {
		p.pins[i].Unpin()
	}
	clear(p.all)
	p.all, p.in, p.pinned = p.all[:0], 0, 0
}

func (p *Pieces) at() *C.rfaas_piece { return unsafe.SliceData(p.all) }

// InvokePieces is Invoke with payload and result in pieces.
func (l *Lease) InvokePieces(f uint32, p *Pieces, o CallOptions) (n int, err error) {
	var r C.rfaas_shim_result
	C.rfaas_shim_invoke_pieces(l.c(), C.uint32_t(f), p.at(), C.size_t(p.in), C.size_t(len(p.all)-p.in), C.int32_t(o.Worker),
		C.uint32_t(o.Repeats), C.int64_t(o.Timeout), C.int64_t(o.Attempt), o.flags(), &r)
	if r.error != 0 {
		err = failed(&r)
	}
	return int(r.size), err
}

// StartPieces is Start with payload and result in pieces. C keeps their memory, and not the arrays.
func (l *Lease) StartPieces(f uint32, p *Pieces, o CallOptions, wait, patience time.Duration) (r Request, n int, done bool, err error) {
	return begun(C.rfaas_shim_start_pieces(l.c(), C.uint32_t(f), p.at(), C.size_t(p.in), C.size_t(len(p.all)-p.in), C.int32_t(o.Worker),
		C.uint32_t(o.Repeats), C.int64_t(o.Timeout), C.int64_t(o.Attempt), o.flags(), C.int64_t(wait), C.int64_t(patience)))
}
