package client

import (
	"context"
	"time"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/api"
)

// Worker is the position of one worker in a lease: a remote process on its own cores, which is replaced when it dies. Safe for
// concurrent use. Calls on one worker run one after the other; calls up to the lease's depth may be submitted before the first
// has ended.
type Worker struct {
	lease *Lease
	index int
	turns turns
}

// Index is the worker's number in its lease.
func (w *Worker) Index() int { return w.index }

func (s Start) String() string {
	if s < 0 || int(s) >= len(api.StartNames) {
		s = StartUnknown
	}
	return api.StartNames[s]
}

// StartSteps has the durations of a worker's start, as its executor measured them.
type StartSteps struct {
	Start   Start
	Fork    time.Duration // from the request to the worker's first instruction, or until it has its lease
	Connect time.Duration // device, memory, queue pair
	Code    time.Duration // the library
	Sandbox time.Duration // credentials, namespaces, filters; 0: there is none, or by an executor that does not say
	// Unseeded says why a worker of a lease with Seed has not started from a seed. Empty: it has.
	Unseeded string
}

func (w *Worker) origin() (o c.Start) {
	if !w.lease.released.Load() {
		o, _ = w.lease.c.Origin(w.index) // an error: it was released just now
	}
	return o
}

// StartSteps returns the durations of the start of the present process.
func (w *Worker) StartSteps() StartSteps {
	o := w.origin()
	return StartSteps{Start: Start(o.Start), Fork: o.Fork, Connect: o.Connect, Code: o.Code, Sandbox: o.Sandbox, Unseeded: o.Unseeded}
}

// PID is the process id of the worker on its node, 0 while it is being replaced.
func (w *Worker) PID() int { return w.origin().PID }

// Replace kills the worker and starts a new one in its place. Use it when a function on the worker does not return. Calls in flight on it end
// with ErrConnection (StatusWorkerDied). State that functions kept in it is lost. Errors: ErrUnsupported (the lease is local), ErrLease,
// StatusDeadline (no new worker within the session's time-out; the replacement continues).
func (w *Worker) Replace(ctx context.Context) error {
	const op = "replace a worker"
	if w.lease.released.Load() {
		return fail(op, StatusLeaseEnded, "the lease was released")
	}
	_, err := during(ctx, w.lease.session, op, func() (struct{}, error) {
		return struct{}{}, w.lease.explain(w.lease.c.WorkerReplace(w.index))
	}, nil)
	return err
}

// Inspection says what a worker does and has printed. The worker counts by itself, so functions could forge the counters.
type Inspection = c.WorkerInfo

// Inspect asks the executor about the worker, also while it runs a function or has just died. It takes a control round
// trip and does not disturb the worker.
func (w *Worker) Inspect(ctx context.Context) (Inspection, error) {
	const op = "inspect a worker"
	if w.lease.released.Load() {
		return Inspection{}, fail(op, StatusLeaseEnded, "the lease was released")
	}
	return during(ctx, w.lease.session, op, func() (Inspection, error) {
		i, err := w.lease.c.WorkerInfo(w.index)
		return i, w.lease.explain(err)
	}, nil)
}
