// Package grant is the control side of a client. It finds an executor, asks it for a lease, and watches over the lease. The
// agent uses it, and passes it the addresses of the client's channels as blobs.
//
//	Open ──▶ Control ── Plan, Look ──▶ Pending ── Next, Grant ──▶ Held ── Watch, Replace ──▶ Release
//
// No call passes through this package.
package grant

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func fail(op string, st dataplane.Status, format string, args ...any) error {
	return &dataplane.Error{Op: op, Status: st, Detail: fmt.Sprintf(format, args...)}
}

// fromControl returns a typed error for the error of a control call. who is the address of the daemon that was called.
func fromControl(op, who string, err error) error {
	var typed *dataplane.Error
	if err == nil || errors.As(err, &typed) {
		return err
	}
	st, detail := dataplane.Status(control.StatusOf(err)), err.Error()
	var code codes.Code
	var foreign bool
	if s, ok := status.FromError(err); ok {
		detail, foreign = control.Unwrapped(s)
		code = s.Code()
	}
	switch {
	case code == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded):
		st, detail = dataplane.StatusDeadline, "no answer in time"
	case code == codes.Canceled || errors.Is(err, context.Canceled):
		st, detail = dataplane.StatusCancelled, "cancelled"
	case foreign:
		st = dataplane.StatusProtocol
	case st == dataplane.StatusConnection:
		st = dataplane.StatusPeerGone
	}
	if who != "" {
		detail = who + ": " + detail
	}
	if ctx := contextError(st); ctx != nil {
		return &ContextError{Err: &dataplane.Error{Op: op, Status: st, Detail: detail}, Cause: ctx}
	}
	return &dataplane.Error{Op: op, Status: st, Detail: detail}
}

// tryRun is the remedy in errors of programs that find no daemon.
const tryRun = "run the program by `rfaas run -- PROGRAM`"

// explainAbsent adds the remedy for a daemon that does not run, or for a wrong address, to an error. The program's options name the daemon.
func (c *shared) explainAbsent(err error, address string) error {
	e, ok := err.(*dataplane.Error)
	if !ok || e.Status != dataplane.StatusPeerGone || address != c.opts.Executor && address != c.opts.Manager {
		return err
	}
	daemon := "executor"
	if address == c.opts.Manager {
		daemon = "resource-manager"
	}
	told := *e
	if strings.Contains(told.Detail, "no such host") {
		told.Detail += ": check the host name in the address"
		return &told
	}
	if strings.Contains(told.Detail, "handshake failed") { // something runs there
		return err
	}
	told.Detail += ": if it does not run, start it (`" + daemon + "`), or " + tryRun
	return &told
}

func contextError(st dataplane.Status) error {
	switch st {
	case dataplane.StatusDeadline:
		return context.DeadlineExceeded
	case dataplane.StatusCancelled:
		return context.Canceled
	}
	return nil
}

// ContextError is an error caused by the end of a context. errors.Is finds both its class and the context's error.
type ContextError struct {
	Err   *dataplane.Error
	Cause error
}

// Error is the text of the typed error.
func (e *ContextError) Error() string { return e.Err.Error() }

// Unwrap returns both errors.
func (e *ContextError) Unwrap() []error { return []error{e.Err, e.Cause} }
