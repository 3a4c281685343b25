package client

import (
	"context"
	"errors"
	"time"
)

// repeats is what a context says of the calls that are made with it.
type repeats struct {
	times   int
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

// IdempotentWithin is Idempotent with a bound for each attempt: one that takes longer is given up and counts as failed. The context's
// own deadline bounds the whole call. 0: no bound.
func IdempotentWithin(ctx context.Context, times int, attempt time.Duration) context.Context {
	return context.WithValue(ctx, idempotentKey{}, repeats{max(times, 0), max(attempt, 0)})
}

func repeatsOf(ctx context.Context) repeats {
	r, _ := ctx.Value(idempotentKey{}).(repeats)
	return r
}

func doNothing() {}

// bound is the context of one attempt.
func (r repeats) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if r.times == 0 || r.attempt == 0 {
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
		if !errors.As(err, &e) || !r.again(ctx, e) {
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

// maybeRan is the error of a call that was made more than once: what any attempt may have done, the call may have.
func maybeRan(err error, ran bool) error {
	var e *Error
	if ran && errors.As(err, &e) {
		e.Started = true
	}
	return err
}
