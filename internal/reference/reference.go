// Package reference measures how much workers slow down other programs of their node. A thread of normal priority does a fixed piece of work
// twice: beside the workers, and while further threads of this process occupy the workers' CPUs. Since workers have idle priority, the kernel does not
// run them meanwhile. Each run takes a fraction of a millisecond. The runs follow each other within milliseconds, so the clock frequency and the node's
// other programs affect both.
package reference

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra
#cgo LDFLAGS: -pthread
#include "reference.h"
*/
import "C"

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Times are the results of a measurement.
type Times struct {
	Complete bool          // false: another program interrupted it, and Beside and Alone say nothing
	Beside   time.Duration // processor time of the work beside workers
	Alone    time.Duration // processor time of the work while no worker runs
	Waited   bool          // false: the kernel does not report Wait
	Wait     time.Duration // time that the thread waited for its CPU when it woke there
	Cost     time.Duration // processor time of the measurement
}

// settled is longer than a measurement takes unless other programs use its CPUs.
const settled = 20 * time.Millisecond

// Work is the memory that the fixed piece of work reads. Close frees it.
type Work struct{ buffer []byte }

// New allocates the memory of the work, and writes to it, so that all of its pages exist.
func New() (*Work, error) {
	b, err := unix.Mmap(-1, 0, C.REFERENCE_BUFFER, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("allocate the memory of the reference: %w", err)
	}
	return &Work{buffer: b}, nil
}

// Close frees the memory. No measurement may be running.
func (w *Work) Close() { _ = unix.Munmap(w.buffer) }

// Measure does the work on a CPU. others are the other CPUs on which workers may run. aloneFirst: the run without workers comes first. Measure takes about
// 20 ms, and sleeps for most of this time.
func (w *Work) Measure(cpu int, others []int, aloneFirst bool) (Times, error) {
	list := make([]C.int, len(others)+1)
	for i, o := range others {
		list[i] = C.int(o)
	}
	var r *C.reference
	if e := C.reference_start(&r, unsafe.Pointer(&w.buffer[0]), C.int(cpu), &list[0], C.int(len(others)), C.bool(aloneFirst)); e != 0 {
		return Times{}, fmt.Errorf("start the threads of the reference: %w", syscall.Errno(e))
	}
	time.Sleep(settled) // a call into C that waits would keep the runtime's only processor for a while
	t := C.reference_finish(r)
	return Times{Complete: bool(t.complete), Beside: time.Duration(t.beside), Alone: time.Duration(t.alone), Waited: bool(t.waited), Wait: time.Duration(t.wait),
		Cost: time.Duration(t.cost)}, nil
}
