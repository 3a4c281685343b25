package client

import (
	"context"
	"math/bits"
)

// Free workers.
//
// A worker is used by whoever cleared its bit. No lock: a claim is a compare-and-swap, and who finds nothing waits
// for a token. A releaser sets the bit before it looks for waiters, a waiter announces itself before it looks
// for bits; both are sequentially consistent, so that one of them sees the other.

func (l *Lease) tryAny() *Worker {
	for i := range l.free {
		for m := l.free[i].Load(); m != 0; m = l.free[i].Load() {
			if l.free[i].CompareAndSwap(m, m&(m-1)) {
				return l.workers[i*64+bits.TrailingZeros64(m)] // the lowest: it is the warmest
			}
		}
	}
	return nil
}

// tryOther is tryAny that takes `not` only if nobody else is free; nil: it makes no difference.
func (l *Lease) tryOther(not *Worker) *Worker {
	if not != nil {
		for _, w := range l.workers {
			if w != not && w.try() {
				return w
			}
		}
	}
	return l.tryAny()
}

// claimAny takes a free worker, waiting for one if need be.
func (l *Lease) claimAny(ctx context.Context, op string) (*Worker, error) {
	if w := l.tryAny(); w != nil {
		return w, nil
	}
	l.waiting.Add(1)
	defer l.waiting.Add(-1)
	for {
		if w := l.tryAny(); w != nil {
			return w, nil
		}
		select {
		case <-l.wake:
		case <-l.ctx.Done():
			return nil, fail(op, StatusLeaseEnded, "the lease was released")
		case <-l.closing:
			return nil, l.leavingError(op)
		case <-ctx.Done():
			return nil, contextError(ctx, op, "no worker became free", false)
		}
	}
}

// give makes a worker free again.
func (l *Lease) give(w *Worker) {
	l.free[w.index/64].Or(1 << (w.index % 64))
	if w.waiting.Load() > 0 {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
	if l.waiting.Load() > 0 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}
