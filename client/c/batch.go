package c

/*
#include "shim.h"

#cgo noescape rfaas_shim_batch
#cgo nocallback rfaas_shim_batch
*/
import "C"

import (
	"time"
	"unsafe"
)

// Batch is a list of calls that cross into C together. Payloads and results are in memory of C, which C may use between two crossings.
type Batch struct {
	state  C.rfaas_batch
	calls  []C.rfaas_batch_call
	flying []uint32
	memory []byte
	used   int
}

// Add adds a call, with a copy of its payload. No call of the batch has been submitted.
func (b *Batch) Add(f uint32, in []byte, capacity int) {
	from := b.reserve(len(in))
	copy(b.memory[from:], in)
	b.calls = append(b.calls, C.rfaas_batch_call{in: C.uint64_t(from), out: C.uint64_t(b.reserve(capacity)), in_size: C.uint32_t(len(in)),
		capacity: C.uint32_t(capacity), function: C.uint32_t(f)})
	b.state.count++
}

// reserve returns the offset of free memory.
func (b *Batch) reserve(size int) (offset int) {
	const line = 64
	offset = b.used
	b.used += size
	if size >= line {
		b.used = (b.used + line - 1) &^ (line - 1)
	} else {
		b.used = (b.used + 7) &^ 7
	}
	if b.used > len(b.memory) {
		more := Memory(max(2*len(b.memory), b.used, 4096))
		copy(more, b.memory)
		FreeMemory(b.memory)
		b.memory = more
		b.state.memory = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(more))))
	}
	return offset
}

// Run submits the calls as slots become free and waits until all have ended, at most for patience (below 0: without a limit). Each Run
// passes the same o; its time-out begins with the first Run.
func (b *Batch) Run(l *Lease, o *CallOptions, patience time.Duration) {
	if len(b.flying) < len(b.calls) {
		b.flying = make([]uint32, cap(b.calls))
	}
	C.rfaas_shim_batch(l.number(), &b.state, unsafe.SliceData(b.calls), (*C.uint32_t)(unsafe.SliceData(b.flying)), C.uint32_t(o.Repeats),
		C.int64_t(o.Timeout), C.int64_t(o.Attempt), o.flags(), C.int64_t(patience))
}

// Len returns the number of calls.
func (b *Batch) Len() int { return len(b.calls) }

// Begun reports whether there was a Run, Ended whether all calls have ended.
func (b *Batch) Begun() bool { return b.state.begun != 0 || b.state.next != 0 }
func (b *Batch) Ended() bool { return b.state.next == b.state.count && b.state.n_flying == 0 }

// Failed returns how many calls have ended with an error.
func (b *Batch) Failed() int { return int(b.state.failed) }

// Has reports whether call i has ended.
func (b *Batch) Has(i int) bool { return i < int(b.state.next) && b.calls[i].request == 0 }

// Result returns the result of a call that has ended well, in the batch's memory, and its size, which may exceed its capacity.
func (b *Batch) Result(i int) (result []byte, size int) {
	c := &b.calls[i]
	size = int(c.size)
	return b.memory[c.out:][:min(size, int(c.capacity))], size
}

// TakeError returns the error of a call, once, or nil.
func (b *Batch) TakeError(i int) error {
	c := &b.calls[i]
	if c.error == 0 {
		return nil
	}
	err := take(C.rfaas_shim_error_of(c.error))
	c.error = 0
	return err
}

// Cancel gives up the calls in flight and submits no more. It calls gone with the index of each of them.
func (b *Batch) Cancel(gone func(i int, submitted bool)) {
	for _, i := range b.flying[b.state.flying:][:b.state.n_flying] {
		_ = Request(b.calls[i].request).Cancel() // an error: it has ended
		b.calls[i].request = 0
		gone(int(i), true)
	}
	b.state.n_flying = 0
	for ; b.state.next < b.state.count; b.state.next++ {
		gone(int(b.state.next), false)
	}
}

// Reset removes all calls. They have ended or are cancelled.
func (b *Batch) Reset() {
	if b.state.failed > 0 {
		for i := range b.calls {
			_ = b.TakeError(i) // frees it
		}
	}
	b.calls, b.used = b.calls[:0], 0
	b.state = C.rfaas_batch{memory: b.state.memory}
}

// Free frees the batch's memory.
func (b *Batch) Free() {
	b.Reset()
	FreeMemory(b.memory)
	b.memory, b.state.memory = nil, 0
}
