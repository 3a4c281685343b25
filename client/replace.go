package client

import (
	"context"
	"fmt"

	"github.com/rfaas-go/rfaas/internal/grant"
)

// ---- replacing dead workers ----

// background runs f on a goroutine that the lease's release waits for; false: it is being released.
func (l *Lease) background(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.heal.Go(f)
	return true
}

// stopHealing returns when nothing runs in the background any more.
func (l *Lease) stopHealing() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.stopHeal()
	l.heal.Wait()
}

// repairSoon replaces the worker in the background, with the caller's claim, which is given back.
func (w *Worker) repairSoon() {
	if !w.lease.background(func() {
		_ = w.repair() // whoever uses it next tries again and gets the error
		w.lease.give(w)
	}) {
		w.lease.give(w)
	}
}

// repairWithin is repair for a call: when the context ends first, the replacement goes on in the background. mine says
// whether the claim is still the caller's; it is without an error.
func (w *Worker) repairWithin(ctx context.Context, op string) (mine bool, err error) {
	if ctx.Done() == nil {
		if err = w.repair(); err != nil {
			err = fmt.Errorf("%s: %w", op, err)
		}
		return true, err
	}
	done := make(chan error)
	if !w.lease.background(func() {
		err := w.repair()
		select {
		case done <- err:
		case <-ctx.Done():
			w.lease.give(w)
		}
	}) {
		return true, fail(op, StatusLeaseEnded, "the lease was released")
	}
	select {
	case err = <-done:
		if err != nil {
			err = fmt.Errorf("%s: %w", op, err)
		}
		return true, err
	case <-ctx.Done():
		return false, contextError(ctx, op, fmt.Sprintf("replace worker %d: not done until then", w.index), false)
	}
}

// repair puts a new worker in the place of one whose connection failed. The claim's holder.
func (w *Worker) repair() error {
	op := fmt.Sprintf("replace worker %d", w.index)
	if err := w.lease.endedError(op); err != nil {
		return err
	}
	w.settle()
	w.mu.Lock()
	for w.failing > 0 {
		changed := w.changed
		w.mu.Unlock()
		<-changed
		w.mu.Lock()
	}
	w.pid = 0
	w.mu.Unlock()
	if err := w.ch.Reset(); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	blob, err := w.ch.Offer()
	var g grant.Worker
	if err == nil {
		// Not bound to the caller's context: given up half-way it would leave a worker that nobody is connected to.
		g, err = w.lease.held.Replace(w.lease.healCtx, w.index, blob)
	}
	if err == nil {
		err = w.connect(g)
	}
	if err != nil {
		w.ch.Fail(StatusPeerGone) // so that the next use tries again
		return fmt.Errorf("%s: %w", op, err)
	}
	w.lease.replaced.Add(1)
	return nil
}
