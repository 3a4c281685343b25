package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
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

// Error is the typed detail of every error of this package. Started says, for calls, that the function may have
// run; false means that it has not and will not.
type Error = dataplane.Error

// Status is the exact reason of an Error; the numbers are those of rfaas.h.
type Status = dataplane.Status

// Statuses that callers tell apart more often than others.
const (
	StatusTooLarge       = dataplane.StatusTooLarge       // payload above the lease's limits
	StatusNoFunction     = dataplane.StatusNoFunction     // the library has no such function
	StatusBadLibrary     = dataplane.StatusBadLibrary     // the library cannot be read or loaded
	StatusFunctionFailed = dataplane.StatusFunctionFailed // the function said so; Detail is its message
	StatusResultTooLarge = dataplane.StatusResultTooLarge // the result exceeds the room given
	StatusDeadline       = dataplane.StatusDeadline
	StatusCancelled      = dataplane.StatusCancelled
	StatusPeerGone       = dataplane.StatusPeerGone
	StatusProtocol       = dataplane.StatusProtocol    // the other side does not keep to what was agreed
	StatusWorkerDied     = dataplane.StatusWorkerDied  // Detail says how, Backtrace and Output where
	StatusTimeLimit      = dataplane.StatusTimeLimit   // the function ran too long, and its worker was killed
	StatusMemoryLimit    = dataplane.StatusMemoryLimit // the function needed too much memory and died of it
	StatusLeaseEnded     = dataplane.StatusLeaseEnded
)

func fail(op string, st Status, format string, args ...any) error {
	return &Error{Op: op, Status: st, Detail: fmt.Sprintf(format, args...)}
}

// contextError is the error of an operation that ended with its context.
func contextError(ctx context.Context, op, detail string, started bool) error {
	e := &Error{Op: op, Status: StatusCancelled, Detail: detail, Started: started}
	cause := context.Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) || ctx.Err() == nil { // nil: our clock was a little ahead
		e.Status, cause = StatusDeadline, context.DeadlineExceeded
	}
	return &grant.ContextError{Err: e, Cause: cause}
}
