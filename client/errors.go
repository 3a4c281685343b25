package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// The classes of errors, by what the caller does next.
var (
	ErrBusy        = dataplane.ErrBusy        // try again after some progress
	ErrInvalid     = dataplane.ErrInvalid     // put the call right
	ErrUnsupported = dataplane.ErrUnsupported // take another path
	ErrFunction    = dataplane.ErrFunction    // this call failed, the lease is good
	ErrConnection  = dataplane.ErrConnection  // the worker is replaced; repeat the call if it may run twice
	ErrLease       = dataplane.ErrLease       // take a new lease
	ErrFatal       = dataplane.ErrFatal       // stop
	ErrCredential  = dataplane.ErrCredential  // get another token, or set the clock
)

// Error is the typed detail of every error of this package: Status, Text, Started, which says of a call that the function may
// have run (false means that it has not and will not), and Code, the number that a failed function passed to rfaas_fail_code.
type Error = c.Error

// Status is the exact reason of an Error; the numbers are those of rfaas.h.
type Status = dataplane.Status

// Statuses that callers tell apart more often than others.
const (
	StatusTooLarge       = dataplane.StatusTooLarge       // payload above the lease's limits
	StatusNoFunction     = dataplane.StatusNoFunction     // the library has no such function
	StatusBadLibrary     = dataplane.StatusBadLibrary     // the library cannot be read or loaded
	StatusFunctionFailed = dataplane.StatusFunctionFailed // the function reported a failure; the text has its message
	StatusResultTooLarge = dataplane.StatusResultTooLarge // the result exceeds the room given
	StatusDeadline       = dataplane.StatusDeadline
	StatusCancelled      = dataplane.StatusCancelled
	StatusPeerGone       = dataplane.StatusPeerGone
	StatusProtocol       = dataplane.StatusProtocol    // the other side does not keep to what was agreed
	StatusWorkerDied     = dataplane.StatusWorkerDied  // the text says how, with the stack and the last output
	StatusTimeLimit      = dataplane.StatusTimeLimit   // the function ran too long, and its worker was killed
	StatusMemoryLimit    = dataplane.StatusMemoryLimit // the function needed too much memory and died of it
	StatusLeaseEnded     = dataplane.StatusLeaseEnded
	StatusFatal          = dataplane.StatusFatal
)

func fail(op string, st Status, format string, args ...any) error {
	return &Error{Status: st, Text: op + ": " + fmt.Sprintf(format, args...)}
}

// contextError is the error of an operation that ended with its context.
func contextError(ctx context.Context, op, detail string, started bool) error {
	e := &Error{Status: StatusCancelled, Text: op + ": cancelled: " + detail, Started: started, Cause: context.Canceled}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		e.Status, e.Text, e.Cause = StatusDeadline, op+": deadline passed: "+detail, context.DeadlineExceeded
	}
	return e
}

// explain completes an error of the C library for an operation on this lease: the answer for a handle that is gone means that the
// lease was released.
func (l *Lease) explain(err error) error {
	if e, ok := err.(*Error); ok && e.Status == dataplane.StatusInvalid && l.released.Load() {
		e.Status = StatusLeaseEnded
	}
	return err
}
