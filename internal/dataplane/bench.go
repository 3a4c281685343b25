package dataplane

/*
#include <stdlib.h>
#include "dp_bench.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// BenchKind is a bare round trip that the bench measures beside calls: dp_bench.h describes each.
type BenchKind int

// The kinds.
const (
	BenchFlag    BenchKind = C.DP_BENCH_FLAG
	BenchNear    BenchKind = C.DP_BENCH_NEAR
	BenchApart   BenchKind = C.DP_BENCH_APART
	BenchRing    BenchKind = C.DP_BENCH_RING
	BenchEventfd BenchKind = C.DP_BENCH_EVENTFD
	BenchFutex   BenchKind = C.DP_BENCH_FUTEX
	BenchImm     BenchKind = C.DP_BENCH_IMM
	BenchImmWarm BenchKind = C.DP_BENCH_IMM_WARM

	BenchImmWindow BenchKind = C.DP_BENCH_IMM_WINDOW
	BenchRead      BenchKind = C.DP_BENCH_READ
	BenchFetchAdd  BenchKind = C.DP_BENCH_FETCH_ADD
)

func (k BenchKind) String() string {
	switch k {
	case BenchFlag:
		return "flag ping-pong"
	case BenchNear:
		return "ping-pong, payload behind the flag"
	case BenchApart:
		return "ping-pong, payload apart from the flag"
	case BenchRing:
		return "two single-producer single-consumer rings"
	case BenchEventfd:
		return "eventfd ping-pong"
	case BenchFutex:
		return "futex ping-pong"
	case BenchImm:
		return "bare write-with-immediate ping-pong"
	case BenchImmWarm:
		return "bare write-with-immediate ping-pong, blocking on completion events"
	case BenchImmWindow:
		return "bare write-with-immediate, as many in flight"
	case BenchRead:
		return "bare read"
	case BenchFetchAdd:
		return "bare fetch-and-add"
	}
	return fmt.Sprintf("BenchKind(%d)", int(k))
}

// Functions of the bench's peer, as indices of Call.
const (
	BenchEcho  uint32 = C.DP_BENCH_FN_ECHO  // copies its payload to its result
	BenchEmpty uint32 = C.DP_BENCH_FN_EMPTY // returns as many bytes, untouched
	// BenchDelayed is BenchEmpty, but takes as long as Bench.Delay says.
	BenchDelayed uint32 = C.DP_BENCH_FN_DELAYED
)

// BulkRequestHeader is the bytes of header that a request carries whose payload or result does not fit a slot. Other
// requests that repeat the last one's header, and replies, carry none.
const BulkRequestHeader = C.DP_REQ_LONG

// BenchConfig sizes a Bench.
type BenchConfig struct {
	Slots   int // of the channel
	Depth   int // calls in flight, 1..Slots
	Eager   int
	Bulk    int64
	Payload int // the most bytes of one call
	Mode    WaitMode
	PeerCPU int // the peer pins itself there; -1: not
	// Registered: the C client's payloads lie in registered memory and results are left where they arrive.
	Registered bool
	CallsOnly  bool // no floors: nothing is made for them
}

// BenchFDs is what client and peer share: the two ends of a seqpacket socket, one each, a memfd of BenchMemory bytes and two
// eventfds. The peer program expects them as descriptors 3 to 6, in this order. A peer on another machine shares the socket
// only, whose messages somebody carries: Memory is -1 then.
type BenchFDs struct {
	Socket, Memory, Ping, Pong int
}

func (f BenchFDs) c() C.dp_bench_fds {
	return C.dp_bench_fds{socket: C.int(f.Socket), memory: C.int(f.Memory), ping: C.int(f.Ping), pong: C.int(f.Pong)}
}

// BenchMemory is the size of the shared memory for payloads of that size, depth of them in flight.
func BenchMemory(payload, depth int) int64 {
	return int64(C.dp_bench_memory(C.uint32_t(clampU32(payload)), C.uint32_t(clampU32(depth))))
}

// Bench measures calls of a channel and bare round trips between the same two threads. It belongs to the OS thread that
// opened it, but for Abort.
type Bench struct {
	c *C.dp_bench
}

// OpenBench connects to the peer at the other end of fds, which stay the caller's. o must be what the device was opened
// with: the peer opens the same.
func (d *Device) OpenBench(o Options, cfg BenchConfig, fds BenchFDs) (*Bench, error) {
	dev := C.CString(o.Device)
	defer C.free(unsafe.Pointer(dev))
	opts := o.c(dev)
	c := C.dp_bench_config{slots: C.uint32_t(clampU32(cfg.Slots)), depth: C.uint32_t(clampU32(cfg.Depth)),
		eager: C.uint32_t(clampU32(cfg.Eager)), payload: C.uint32_t(clampU32(cfg.Payload)), bulk: C.uint64_t(max(cfg.Bulk, 0)),
		mode: C.dp_wait_mode(cfg.Mode), peer_cpu: C.int(cfg.PeerCPU), registered: C.bool(cfg.Registered),
		calls_only: C.bool(cfg.CallsOnly)}
	cf := fds.c()
	var b Bench
	var e C.dp_error
	if C.dp_bench_open(d.c, &opts, &c, &cf, &b.c, &e) != 0 {
		return nil, cError("open bench", &e)
	}
	return &b, nil
}

// Close ends the connection, and with it the peer.
func (b *Bench) Close() {
	C.dp_bench_close(b.c)
	b.c = nil
}

// Abort ends whatever blocks in the bench, with an error: for whoever sees that the peer is gone. Any goroutine.
func (b *Bench) Abort() { C.dp_bench_abort(b.c) }

// Channel is the channel to the peer. It is the bench's: do not close it.
func (b *Bench) Channel() *Channel { return &Channel{c: C.dp_bench_channel(b.c)} }

func samplesOf(samples []int64, n int) (*C.int64_t, error) {
	if n < 1 || samples != nil && len(samples) < n {
		return nil, &Error{Op: "bench", Status: StatusInvalid, Detail: fmt.Sprintf("%d rounds, room for %d samples", n, len(samples))}
	}
	return (*C.int64_t)(unsafe.SliceData(samples)), nil
}

// Floor runs warm untimed bare round trips and then n, and returns the time of the n together in ns. With samples (nil or at
// least n long) each is timed by itself too.
func (b *Bench) Floor(k BenchKind, size, reply, warm, n int, samples []int64) (int64, error) {
	s, err := samplesOf(samples, n)
	if err != nil {
		return 0, err
	}
	var ns C.int64_t
	var e C.dp_error
	if C.dp_bench_floor(b.c, C.dp_bench_kind(k), C.uint32_t(size), C.uint32_t(reply), C.uint32_t(warm), C.uint32_t(n), s,
		&ns, &e) != 0 {
		return 0, cError("bench", &e)
	}
	return int64(ns), nil
}

// Calls is Floor for calls of a function, made in C: one call from Go for all of them.
func (b *Bench) Calls(fn uint32, size, warm, n int, samples []int64) (int64, error) {
	s, err := samplesOf(samples, n)
	if err != nil {
		return 0, err
	}
	var ns C.int64_t
	var e C.dp_error
	if C.dp_bench_calls(b.c, C.uint32_t(fn), C.uint32_t(size), C.uint32_t(warm), C.uint32_t(n), s, &ns, &e) != 0 {
		return 0, cError("bench", &e)
	}
	return int64(ns), nil
}

// Verify makes one echo call and compares every byte.
func (b *Bench) Verify(size int) error {
	var e C.dp_error
	if C.dp_bench_verify(b.c, C.uint32_t(size), &e) != 0 {
		return cError("bench", &e)
	}
	return nil
}

// Delay lets each call of BenchDelayed take that much longer than one of BenchEmpty. The peer must be on this machine.
func (b *Bench) Delay(ns int64) { C.dp_bench_delay(b.c, C.uint64_t(max(ns, 0))) }

// Blocked is how often client and peer have blocked while waiting for calls. A hot waiter does so only when it finds
// that its core is shared.
func (b *Bench) Blocked() (client, peer uint64) {
	var c, p C.uint64_t
	C.dp_bench_blocked(b.c, &c, &p)
	return uint64(c), uint64(p)
}

// BenchClock is the median cost of reading the clock in C, ns.
func BenchClock() float64 { return float64(C.dp_bench_clock_ns()) }

// BenchHere is what the peer's machine says instead of its client: the device, and the CPU that the peer pins itself to, -1:
// none.
type BenchHere struct {
	Device Options
	CPU    int
}

// ServeBench is the peer, for tests in one process; a measurement uses the program rfaas-bench-peer. It keeps its OS thread
// busy until the client closes. here is nil where the client chooses the device.
func ServeBench(fds BenchFDs, here *BenchHere) error {
	cf := fds.c()
	var e C.dp_error
	var own *C.dp_bench_here
	if here != nil {
		name := C.CString(here.Device.Device)
		defer C.free(unsafe.Pointer(name))
		own = (*C.dp_bench_here)(C.calloc(1, C.sizeof_dp_bench_here))
		defer C.free(unsafe.Pointer(own))
		own.device, own.cpu = here.Device.c(name), C.int(here.CPU)
	}
	if C.dp_bench_serve(&cf, own, &e) != 0 {
		return cError("serve bench", &e)
	}
	return nil
}
