package dataplane

/*
#include "dp_status.h"
*/
import "C"

import (
	"errors"
	"strings"
	"syscall"
)

// Status is a result of the data plane: 0 or -(class*100 + detail). The numbers are those of dp_status.h and rfaas.h.
type Status int32

// The statuses; dp_status.h says what each means.
const (
	OK                   Status = C.DP_OK
	StatusBusy           Status = C.DP_BUSY
	StatusInvalid        Status = C.DP_INVALID
	StatusTooLarge       Status = C.DP_TOO_LARGE
	StatusNoFunction     Status = C.DP_NO_FUNCTION
	StatusBadBlob        Status = C.DP_BAD_BLOB
	StatusBadLibrary     Status = C.DP_BAD_LIBRARY
	StatusBadRequest     Status = C.DP_BAD_REQUEST
	StatusWrongThread    Status = C.DP_WRONG_THREAD
	StatusUnsupported    Status = C.DP_UNSUPPORTED
	StatusNoDevice       Status = C.DP_NO_DEVICE
	StatusFunctionFailed Status = C.DP_FUNCTION_FAILED
	StatusResultTooLarge Status = C.DP_RESULT_TOO_LARGE
	StatusDeadline       Status = C.DP_DEADLINE
	StatusCancelled      Status = C.DP_CANCELLED
	StatusConnection     Status = C.DP_CONNECTION
	StatusPeerGone       Status = C.DP_PEER_GONE
	StatusWorkerDied     Status = C.DP_WORKER_DIED
	StatusProtocol       Status = C.DP_PROTOCOL
	StatusTimeLimit      Status = C.DP_TIME_LIMIT
	StatusMemoryLimit    Status = C.DP_MEMORY_LIMIT
	StatusLeaseEnded     Status = C.DP_LEASE_ENDED
	StatusFatal          Status = C.DP_FATAL
	StatusCredential     Status = C.DP_CREDENTIAL
)

// The classes, by what the caller does next. Every *Error is one of them by errors.Is.
var (
	ErrBusy        = errors.New("busy")        // retry
	ErrInvalid     = errors.New("invalid")     // fix the call
	ErrUnsupported = errors.New("unsupported") // take another path
	ErrFunction    = errors.New("function")    // the call failed, the connection is good
	ErrConnection  = errors.New("connection")  // reconnect
	ErrLease       = errors.New("lease")       // acquire again
	ErrFatal       = errors.New("fatal")       // stop
	ErrCredential  = errors.New("credential")  // get another token, or set the clock
)

// Class is the sentinel of the status's class, nil for OK.
func (s Status) Class() error {
	if s >= 0 {
		return nil
	}
	switch -s / 100 {
	case 1:
		return ErrBusy
	case 2:
		return ErrInvalid
	case 3:
		return ErrUnsupported
	case 4:
		return ErrFunction
	case 5:
		return ErrConnection
	case 6:
		return ErrLease
	case 8:
		return ErrCredential
	}
	return ErrFatal
}

func (s Status) String() string { return C.GoString(C.dp_status_text(C.int(s))) }

// Error is a failed operation of the data plane.
type Error struct {
	Op      string // what was tried
	Status  Status
	Detail  string        // names the offending value
	Errno   syscall.Errno // of the failing system or verbs call, or 0
	Started bool          // of a call: the function may have run
	// Of a call whose worker died: what was on the stack, a line for each function, innermost first, and the last that
	// the worker printed. Empty where nothing is known.
	Backtrace, Output string
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	b.WriteString(": ")
	b.WriteString(e.Status.String())
	if e.Detail != "" {
		b.WriteString(": ")
		b.WriteString(e.Detail)
	}
	for _, more := range []struct{ title, text string }{{"on the stack", e.Backtrace}, {"its last output", e.Output}} {
		if more.text != "" {
			b.WriteString("\n" + more.title + ":\n    " + strings.ReplaceAll(more.text, "\n", "\n    "))
		}
	}
	return b.String()
}

// Is reports whether target is the class of the error.
func (e *Error) Is(target error) bool { return target == e.Status.Class() }

// Unwrap gives the errno, if any.
func (e *Error) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return e.Errno
}

func cError(op string, e *C.dp_error) error {
	return &Error{Op: op, Status: Status(e.status), Detail: C.GoString(&e.msg[0]), Errno: syscall.Errno(e.sys_errno)}
}
