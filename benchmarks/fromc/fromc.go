// Package fromc takes leases from C, as a C program does, and measures the bare wake-ups of which a lease on frozen workers consists.
//
// Its C code uses rfaas.h, whose functions the program links because it imports package client. cgo also links each package once by
// itself, without those functions; the linker's flag lets that succeed.
package fromc

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -I${SRCDIR}/../../client/c
#cgo LDFLAGS: -Wl,--unresolved-symbols=ignore-all
#include <stdlib.h>
#include "fromc.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"time"
	"unsafe"
)

// Session is a session of the C library with an executor.
type Session struct{ s *C.rfaas_session }

// Terms are the terms of a lease. Rest is how long Lease sleeps before it requests the lease. Bulk is the size of each channel's bulk area in bytes;
// 0: the library's default, negative: none.
type Terms struct {
	Library, Function string
	Workers           int
	Bulk              int64
	Reuse, Hot        bool
	Rest              time.Duration
}

// Times are the times of a lease. Leased and Total begin with its request. Start is an RFAAS_START_* number. Fork, Sandbox, Connect and Code are the steps of
// the first worker's start.
type Times struct {
	Leased, Total, Release       time.Duration
	Start                        uint32
	Fork, Sandbox, Connect, Code time.Duration
}

func failure(what string, status C.int) error {
	if status == 0 {
		return nil
	}
	return fmt.Errorf("%s: status %d: %s", what, int(status), C.GoString(C.rfaas_last_error()))
}

// Open opens a session.
func Open(executor, provider, secretFile string) (*Session, error) {
	at, by, secret := C.CString(executor), C.CString(provider), C.CString(secretFile)
	defer C.free(unsafe.Pointer(at))
	defer C.free(unsafe.Pointer(by))
	defer C.free(unsafe.Pointer(secret))
	s := &Session{}
	return s, failure("session", C.fromc_session(at, by, secret, &s.s))
}

// Close closes the session.
func (s *Session) Close() { C.fromc_close(s.s) }

// Lease sleeps, takes a lease, makes one call, calls before unless it is nil, and releases the lease. The caller's goroutine must be locked to its thread.
func (s *Session) Lease(terms Terms, before func() error) (t Times, err error) {
	library, function := C.CString(terms.Library), C.CString(terms.Function)
	defer C.free(unsafe.Pointer(library))
	defer C.free(unsafe.Pointer(function))
	c := C.fromc_terms{library: library, function: function, workers: C.uint32_t(terms.Workers), bulk: C.uint64_t(max(terms.Bulk, 0)),
		rest_ns: C.int64_t(terms.Rest)}
	if terms.Bulk < 0 {
		c.bulk = C.RFAAS_NO_BULK
	}
	if terms.Reuse {
		c.flags = C.RFAAS_LEASE_REUSE
	}
	if terms.Hot {
		c.wait_mode = C.RFAAS_WAIT_HOT
	}
	var times C.fromc_times
	var lease *C.rfaas_lease
	if err := failure("lease", C.fromc_lease(s.s, &c, &times, &lease)); err != nil {
		return t, err
	}
	if before != nil {
		err = before()
	}
	var release C.int64_t
	err = errors.Join(err, failure("release", C.fromc_release(lease, &release)))
	return Times{time.Duration(times.leased), time.Duration(times.total), time.Duration(release), uint32(times.start.start), time.Duration(times.start.fork_ns),
		time.Duration(times.start.sandbox_ns), time.Duration(times.start.connect_ns), time.Duration(times.start.code_ns)}, err
}
