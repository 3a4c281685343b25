// Package raw measures calls of a channel and bare round trips of the same bytes, in C. bench.h describes how.
//
// Its C files use the headers of internal/dataplane. A program that imports this package links the objects of that package. cgo also
// links each package once by itself, without those objects; the linker's flag lets that succeed.
package raw

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wno-unused-parameter -I${SRCDIR}/../../internal/dataplane
#cgo LDFLAGS: -Wl,--unresolved-symbols=ignore-all
#include <stdlib.h>
#include "bench.h"
*/
import "C"

import (
	"fmt"
	"math"
	"syscall"
	"unsafe"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Kind is a bare round trip that the bench measures beside calls: bench.h describes each.
type Kind int

// The kinds.
const (
	Flag    Kind = C.DP_BENCH_FLAG
	Near    Kind = C.DP_BENCH_NEAR
	Apart   Kind = C.DP_BENCH_APART
	Ring    Kind = C.DP_BENCH_RING
	Eventfd Kind = C.DP_BENCH_EVENTFD
	Futex   Kind = C.DP_BENCH_FUTEX
	Imm     Kind = C.DP_BENCH_IMM
	ImmWarm Kind = C.DP_BENCH_IMM_WARM

	ImmWindow Kind = C.DP_BENCH_IMM_WINDOW
	Read      Kind = C.DP_BENCH_READ
	FetchAdd  Kind = C.DP_BENCH_FETCH_ADD
)

func (k Kind) String() string {
	switch k {
	case Flag:
		return "flag ping-pong"
	case Near:
		return "ping-pong, payload behind the flag"
	case Apart:
		return "ping-pong, payload apart from the flag"
	case Ring:
		return "two single-producer single-consumer rings"
	case Eventfd:
		return "eventfd ping-pong"
	case Futex:
		return "futex ping-pong"
	case Imm:
		return "bare write-with-immediate ping-pong"
	case ImmWarm:
		return "bare write-with-immediate ping-pong, blocking on completion events"
	case ImmWindow:
		return "bare write-with-immediate, as many in flight"
	case Read:
		return "bare read"
	case FetchAdd:
		return "bare fetch-and-add"
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// Functions of the bench's peer, as indices of Call.
const (
	FnEcho  uint32 = C.DP_BENCH_FN_ECHO  // copies its payload to its result
	FnEmpty uint32 = C.DP_BENCH_FN_EMPTY // returns as many bytes as are wanted without touching them
	FnReply uint32 = C.DP_BENCH_FN_REPLY // reads all of its payload, and writes a result of any size
	// FnDelayed is FnEmpty, but takes the time set by Bench.Delay.
	FnDelayed uint32 = C.DP_BENCH_FN_DELAYED
)

// BulkRequestHeader is the size of a request's header if its payload or result does not fit into a slot. Other requests that
// repeat the last one's header, and replies, carry no header.
const BulkRequestHeader = C.DP_REQ_LONG

// Config sizes a Bench.
type Config struct {
	Slots   int // of the channel
	Depth   int // calls in flight, 1..Slots
	Eager   int
	Bulk    int64
	Payload int // largest payload or result of a call, bytes
	Mode    dataplane.WaitMode
	PeerCPU int // to which the peer pins itself; -1: none
	// Registered: the C client's payloads are in registered memory and results are read where they arrive.
	Registered bool
	CallsOnly  bool // no floors, and no memory for them
}

// FDs are the descriptors that client and peer share: one end each of a seqpacket socket, a memfd of Memory bytes and two
// eventfds. The peer program expects them as descriptors 3 to 6, in this order. With a peer on another machine only the socket
// is shared, by a relay, and Memory is -1.
type FDs struct {
	Socket, Memory, Ping, Pong int
}

func (f FDs) c() C.dp_bench_fds {
	return C.dp_bench_fds{socket: C.int(f.Socket), memory: C.int(f.Memory), ping: C.int(f.Ping), pong: C.int(f.Pong)}
}

// options converts o for C. device is its name in C memory, which the caller frees.
func options(o dataplane.Options, device *C.char) C.dp_dev_options {
	return C.dp_dev_options{
		device: device, port: C.int(o.Port), gid_index: C.int(o.GIDIndex), pkey_index: C.int(o.PKeyIndex),
		traffic_class: C.int(o.TrafficClass), service_level: C.int(o.ServiceLevel), mtu: C.int(o.MTU),
	}
}

func failure(op string, e *C.dp_error) error {
	return &dataplane.Error{Op: op, Status: dataplane.Status(e.status), Detail: C.GoString(&e.msg[0]), Errno: syscall.Errno(e.sys_errno)}
}

// clampU32 maps numbers that do not fit to 0, which every size check refuses.
func clampU32(n int) uint32 {
	if n < 0 || int64(n) > math.MaxUint32 {
		return 0
	}
	return uint32(n)
}

// Memory is the size of the shared memory for payloads of that size, depth of them in flight.
func Memory(payload, depth int) int64 {
	return int64(C.dp_bench_memory(C.uint32_t(clampU32(payload)), C.uint32_t(clampU32(depth))))
}

// Bench measures calls of a channel and bare round trips between the same two threads. Only the OS thread that opened it may use
// it, except for Abort.
type Bench struct {
	c *C.dp_bench
}

// Open connects to the peer at the other end of fds, which stay the caller's. o must be what the device was opened
// with: the peer opens the same.
func Open(d *dataplane.Device, o dataplane.Options, cfg Config, fds FDs) (*Bench, error) {
	dev := C.CString(o.Device)
	defer C.free(unsafe.Pointer(dev))
	opts := options(o, dev)
	c := C.dp_bench_config{slots: C.uint32_t(clampU32(cfg.Slots)), depth: C.uint32_t(clampU32(cfg.Depth)),
		eager: C.uint32_t(clampU32(cfg.Eager)), payload: C.uint32_t(clampU32(cfg.Payload)), bulk: C.uint64_t(max(cfg.Bulk, 0)),
		mode: C.dp_wait_mode(cfg.Mode), peer_cpu: C.int(cfg.PeerCPU), registered: C.bool(cfg.Registered),
		calls_only: C.bool(cfg.CallsOnly)}
	cf := fds.c()
	var b Bench
	var e C.dp_error
	if C.dp_bench_open((*C.dp_dev)(d.Handle()), &opts, &c, &cf, &b.c, &e) != 0 {
		return nil, failure("open bench", &e)
	}
	return &b, nil
}

// Close ends the connection, and with it the peer.
func (b *Bench) Close() {
	C.dp_bench_close(b.c)
	b.c = nil
}

// Abort ends every blocked call of the bench with an error, when the peer has ended. Any goroutine may call it.
func (b *Bench) Abort() { C.dp_bench_abort(b.c) }

func samplesOf(samples []int64, n int) (*C.int64_t, error) {
	if n < 1 || samples != nil && len(samples) < n {
		return nil, &dataplane.Error{Op: "bench", Status: dataplane.StatusInvalid, Detail: fmt.Sprintf("%d rounds, room for %d samples", n, len(samples))}
	}
	return (*C.int64_t)(unsafe.SliceData(samples)), nil
}

// Floor makes warm untimed bare round trips and then n, and returns the time of the n together in ns. samples is nil or at least
// n long; with samples, each round trip is timed too.
func (b *Bench) Floor(k Kind, size, reply, warm, n int, samples []int64) (int64, error) {
	s, err := samplesOf(samples, n)
	if err != nil {
		return 0, err
	}
	var ns C.int64_t
	var e C.dp_error
	if C.dp_bench_floor(b.c, C.dp_bench_kind(k), C.uint32_t(size), C.uint32_t(reply), C.uint32_t(warm), C.uint32_t(n), s,
		&ns, &e) != 0 {
		return 0, failure("bench", &e)
	}
	return int64(ns), nil
}

// Calls is Floor for calls of a function, whose result must have reply bytes. C makes all of them in one call from Go.
func (b *Bench) Calls(fn uint32, size, reply, warm, n int, samples []int64) (int64, error) {
	s, err := samplesOf(samples, n)
	if err != nil {
		return 0, err
	}
	var ns C.int64_t
	var e C.dp_error
	if C.dp_bench_calls(b.c, C.uint32_t(fn), C.uint32_t(size), C.uint32_t(reply), C.uint32_t(warm), C.uint32_t(n), s, &ns, &e) != 0 {
		return 0, failure("bench", &e)
	}
	return int64(ns), nil
}

// Verify makes one echo call and compares every byte.
func (b *Bench) Verify(size int) error {
	var e C.dp_error
	if C.dp_bench_verify(b.c, C.uint32_t(size), &e) != 0 {
		return failure("bench", &e)
	}
	return nil
}

// Delay lets each call of FnDelayed take that much longer than one of FnEmpty. The peer must be on this machine.
func (b *Bench) Delay(ns int64) { C.dp_bench_delay(b.c, C.uint64_t(max(ns, 0))) }

// Blocked returns how often client and peer have blocked while waiting for calls. A hot waiter blocks only when its core is
// shared.
func (b *Bench) Blocked() (client, peer uint64) {
	var c, p C.uint64_t
	C.dp_bench_blocked(b.c, &c, &p)
	return uint64(c), uint64(p)
}

// Clock is the median cost of reading the clock in C, ns.
func Clock() float64 { return float64(C.dp_bench_clock_ns()) }
