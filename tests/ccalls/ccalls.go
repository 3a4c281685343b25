// Package ccalls calls functions in a loop in C, on the lease of a Go program, for tests that compare the two.
//
// Its C code uses rfaas.h, whose functions the program links because it imports package client. cgo also links each package once by
// itself, without those functions; the linker's flag lets that succeed.
package ccalls

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -I${SRCDIR}/../../client/c
#cgo LDFLAGS: -Wl,--unresolved-symbols=ignore-all
#include <time.h>
#include "rfaas.h"

static int64_t now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Returns the time of the calls in ns, or the status of one that failed.
static int64_t invoke(void *lease, rfaas_function f, const void *in, size_t size, void *out, size_t capacity, int calls) {
	int64_t began = now();
	for (int i = 0; i < calls; i++) {
		size_t got;
		int status = rfaas_invoke(lease, f, in, size, out, capacity, &got, NULL);
		if (status)
			return status;
	}
	return now() - began;
}

// The same with as many calls in flight as the window is wide. Waits for the oldest.
static int64_t in_flight(void *lease, rfaas_function f, const void *in, size_t size, void *out, size_t capacity, int calls, int window) {
	rfaas_request r[256];
	int64_t began = now();
	for (int i = 0; i < calls + window; i++) {
		int status = RFAAS_OK;
		if (i >= window)
			status = rfaas_wait(&r[i % window], NULL);
		if (!status && i < calls)
			status = rfaas_iinvoke(lease, f, in, size, (char *)out + i % window * capacity, capacity, NULL, &r[i % window]);
		if (status)
			return status;
	}
	return now() - began;
}
*/
import "C"

import (
	"fmt"
	"time"
	"unsafe"
)

// Invoke calls function f of an rfaas_lease one call after the other, and returns how long they took.
func Invoke(lease unsafe.Pointer, f uint32, in, out []byte, calls int) (time.Duration, error) {
	ns := C.invoke(lease, C.rfaas_function(f), unsafe.Pointer(unsafe.SliceData(in)), C.size_t(len(in)), unsafe.Pointer(unsafe.SliceData(out)),
		C.size_t(len(out)), C.int(calls))
	if ns < 0 {
		return 0, fmt.Errorf("rfaas_invoke: status %d", ns)
	}
	return time.Duration(ns), nil
}

// InFlight is Invoke with up to 256 calls in flight. out has room for as many results of capacity bytes.
func InFlight(lease unsafe.Pointer, f uint32, in, out []byte, capacity, calls, window int) (time.Duration, error) {
	if window < 1 || window > 256 || window > calls || len(out) < window*capacity {
		return 0, fmt.Errorf("%d of %d calls in flight, room for %d bytes", window, calls, len(out))
	}
	ns := C.in_flight(lease, C.rfaas_function(f), unsafe.Pointer(unsafe.SliceData(in)), C.size_t(len(in)), unsafe.Pointer(unsafe.SliceData(out)),
		C.size_t(capacity), C.int(calls), C.int(window))
	if ns < 0 {
		return 0, fmt.Errorf("rfaas_iinvoke or rfaas_wait: status %d", ns)
	}
	return time.Duration(ns), nil
}
