package dataplane

/*
#include "dp_status.h"
*/
import "C"

import "syscall"

// Status is a result of the data plane: 0 or -(class*100 + detail). Its values and classes are in status_gen.go.
type Status int32

func (s Status) String() string { return C.GoString(C.dp_status_text(C.int(s))) }

// Error is a failed operation of the data plane.
type Error struct {
	Op     string // what was tried
	Status Status
	Detail string        // names the offending value
	Errno  syscall.Errno // of the failing system or verbs call, or 0
}

func (e *Error) Error() string {
	text := e.Op + ": " + e.Status.String()
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	return text
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
