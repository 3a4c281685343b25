package client

import (
	"context"
	"errors"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// repeats is what a context says of the calls that are made with it.
type repeats struct {
	times   int           // that are left
	attempt time.Duration // 0: an attempt has no bound of its own
}

type idempotentKey struct{}

// Idempotent is a context for calls of functions that may run more than once. An Invoke of a function or worker, or the Result of a
// submitted call, makes such a call again, up to times times, when it may have been executed but its worker died or its lease ended (ErrConnection, ErrLease): on
// another worker if one is free, and elsewhere if the lease goes on there (LeaseOptions.Failover). Without Failover a lease
// that has ended ends its calls nevertheless. Calls that cannot have been executed are made again anyway where that helps.
func Idempotent(ctx context.Context, times int) context.Context {
	return IdempotentWithin(ctx, times, 0)
}

// IdempotentWithin is Idempotent with a bound for each attempt: one that takes longer is given up and counts as failed. The first
// attempt of a submitted call begins with Submit. Where what was given up still takes all slots, the next attempt waits for one, at
// most for the session's time-out. The context's own deadline bounds the whole call. 0: no bound.
func IdempotentWithin(ctx context.Context, times int, attempt time.Duration) context.Context {
	if times <= 0 {
		times, attempt = 0, 0
	}
	return context.WithValue(ctx, idempotentKey{}, repeats{times, max(attempt, 0)})
}

func repeatsOf(ctx context.Context) repeats {
	r, _ := ctx.Value(idempotentKey{}).(repeats)
	return r
}

func doNothing() {}

// bound is the context of one attempt.
func (r repeats) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if r.attempt == 0 {
		return ctx, doNothing
	}
	return context.WithTimeout(ctx, r.attempt)
}

// again says whether a call that failed with e may be made again, by its reason.
func (r repeats) again(ctx context.Context, e *Error) bool {
	if e.Status == StatusDeadline {
		return r.attempt > 0 && ctx.Err() == nil
	}
	class := e.Status.Class()
	return (class == ErrConnection || class == ErrLease) && ctx.Err() == nil
}

// movesMax bounds how often one call follows a lease that moves.
const movesMax = 8

// invokeAgain makes a call as often as r and its lease allow. place is a worker's number or anyWorker.
func (f *Function) invokeAgain(ctx context.Context, r repeats, place int, in, out []byte) (n int, err error) {
	var (
		home  = f.lease
		m     = home.mover
		left  = r.times
		moves = 0
		ran   = false // some attempt may have been executed
		last  *Worker
		busy  time.Time // since when all slots are taken
	)
	for {
		if m != nil {
			if home, err = m.where(ctx, f.op(), nil); err != nil {
				return 0, maybeRan(err, ran)
			}
		}
		g := f.on(home)
		if g == nil {
			return 0, maybeRan(fail(f.op(), StatusNoFunction, "the library on %s has none of this name", home.held.Node), ran)
		}
		attempt, cancel := r.bound(ctx)
		n, last, err = g.attempt(attempt, place, in, out, last)
		cancel()
		if err == nil {
			return n, nil
		}
		var e *Error
		if !errors.As(err, &e) {
			return n, maybeRan(err, ran)
		}
		if e.Status == dataplane.StatusBusy && r.attempt > 0 {
			if busy.IsZero() {
				busy = time.Now()
			}
			if time.Since(busy) < f.lease.session.control.Timeout() {
				slotsComeBack(ctx)
				continue
			}
		}
		busy = time.Time{}
		if !r.again(ctx, e) {
			return n, maybeRan(err, ran)
		}
		ran = ran || e.Started
		if e.Status == StatusDeadline && !e.Started {
			continue // no worker was free for as long as an attempt may take
		}
		lost := e.Status.Class() == ErrLease || !e.Started
		if e.Started || m == nil {
			if left == 0 || m == nil && e.Status.Class() == ErrLease {
				return n, maybeRan(err, ran)
			}
			left--
			f.lease.repeated.Add(1)
		}
		if m == nil || !lost && home.good() {
			continue
		}
		if moves++; moves > movesMax {
			return n, maybeRan(err, ran)
		}
		if _, err := m.where(ctx, f.op(), home); err != nil {
			return n, maybeRan(err, ran)
		}
	}
}

// busyPause is how often a call looks for a slot while those that were given up have them all.
const busyPause = time.Millisecond

// slotsComeBack waits a moment for slots of attempts that were given up.
func slotsComeBack(ctx context.Context) {
	select {
	case <-ctx.Done(): // as the next attempt will say
	case <-time.After(busyPause):
	}
}

// maybeRan is the error of a call that was made more than once: what any attempt may have done, the call may have.
func maybeRan(err error, ran bool) error {
	var e *Error
	if ran && errors.As(err, &e) {
		e.Started = true
	}
	return err
}
