package executor

import (
	"context"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/lease"
)

// releaseGrace is how long the workers of a released lease may take to finish calls.
const releaseGrace = time.Second

// drainYield is how long a drain waits for clients to confirm that they start no more calls, before it asks their
// workers to finish. A call that is sent to a finishing worker may be lost.
const drainYield = 500 * time.Millisecond

// Run handles expiry and other deadlines of leases until ctx ends.
func (e *Executor) Run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		due, next := e.table.Due()
		for _, d := range due {
			e.due(d)
		}
		timer.Stop()
		switch {
		case len(due) > 0:
			timer.Reset(0) // there may be a new deadline
		case !next.IsZero():
			timer.Reset(next.Sub(e.now()))
		}
		select {
		case <-ctx.Done():
			return
		case <-e.table.Changed():
		case <-timer.C:
		}
	}
}

// due handles one deadline. Another goroutine may already have done so.
func (e *Executor) due(d lease.Due) {
	leave := e.turns.enter()
	later := func(end func()) {
		e.work.Go(func() {
			defer leave()
			end()
		})
	}
	switch d.State {
	case lease.Expiring:
		if l, err := e.table.Notice(d.ID); err == nil {
			if h := e.holding(d.ID); h != nil {
				h.expiring(l.Expires)
			}
		}
	case lease.Released: // its workers are cached
		later(func() { e.dropCached(d.ID) })
		return
	default:
		if h, err := e.beginEnd(context.Background(), d.ID, d.State, d.Reason); err == nil {
			later(func() { e.finishEnd(context.Background(), h, killed) })
			return
		}
	}
	leave()
}

// beginEnd ends a lease in the table, so that no other goroutine ends it. finishEnd must follow. ctx identifies the
// caller if it is that of a call.
func (e *Executor) beginEnd(ctx context.Context, id lease.ID, how lease.State, reason string) (*holding, error) {
	l, err := e.table.End(id, how, reason)
	if err != nil {
		return nil, err
	}
	e.metrics.leaseEnded(how)
	h := e.holding(id) // exists from before the grant until finishEnd
	e.auditEnd(ctx, h, &l, reason)
	h.end(how, reason)
	return h, nil
}

// finishEnd ends the workers, and returns the cores when the last one is reaped.
func (e *Executor) finishEnd(ctx context.Context, h *holding, how ending) {
	<-h.started // a claimed lease can end before book has given it its workers
	e.accounts.last(h.id)
	h.stopWorkers(ctx, how)
	if err := e.table.Reaped(h.id); err != nil {
		e.log.Error("cannot return the cores of an ended lease", "lease", uint64(h.id), "error", err)
	}
	e.accounts.end(h.id)
	e.forget(h)
	e.changed()
}

// forget drops a holding whose workers are gone.
func (e *Executor) forget(h *holding) {
	e.codes.release(h.code)
	e.tables.release(h.shared())
	e.remove(h)
}

// remove takes a holding off the lists, when its workers are gone or belong to another lease.
func (e *Executor) remove(h *holding) {
	h.mu.Lock()
	release := h.reserved
	h.reserved = nil
	h.mu.Unlock()
	if release != nil {
		release()
	}
	e.mu.Lock()
	delete(e.holdings, h.id)
	e.mu.Unlock()
	h.over()
}

// drainReason is the default reason that clients are told.
const drainReason = "the node is draining"

// drainRequest is an operator's request to drain.
type drainRequest struct {
	grace  time.Duration
	reason string
}

// DrainAsked returns a channel that receives an operator's request to drain.
func (e *Executor) DrainAsked() <-chan drainRequest { return e.asked }

// BeginDrain stops granting leases.
func (e *Executor) BeginDrain() {
	e.mu.Lock()
	e.draining = true
	e.table.Drain()
	e.mu.Unlock()
	e.claims.revokeAll()
}

func (e *Executor) isDraining() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.draining
}

// DrainUntil stops granting leases, notifies the clients, and lets the calls that were sent finish until ctx ends. It
// returns when every worker is reaped. Notified clients stop calling and release their leases. If a client does not do
// so within drainYield, its workers finish the calls that they have and end. The executor cannot be used afterwards.
func (e *Executor) DrainUntil(ctx context.Context, reason string) {
	until, bounded := ctx.Deadline()
	if !bounded {
		until = time.Now().Add(e.cfg.Settings.Grace)
	}
	e.BeginDrain()
	e.gate.Audit().Write(identity.AuditEntry{Event: identity.AuditDrain, Reason: reason,
		Detail: "grace " + time.Until(until).Round(time.Millisecond).String()})
	e.mu.Lock()
	e.until, e.grace = until, ctx
	var all []*holding
	for _, h := range e.holdings {
		all = append(all, h)
	}
	e.mu.Unlock()
	yield, cancel := context.WithTimeout(ctx, min(drainYield, time.Until(until)/4))
	defer cancel()
	var wg sync.WaitGroup
	for _, h := range all {
		h.drain(until, reason)
		wg.Go(func() {
			<-h.started
			select { // also wait for a client that has not opened its stream yet
			case <-h.gone:
			case <-yield.Done():
			}
			if _, err := e.beginEnd(ctx, h.id, lease.Drained, reason); err == nil {
				e.finishEnd(ctx, h, finished)
			}
			<-h.gone
		})
	}
	wg.Wait()
	e.dropAllCached()
	e.work.Wait()
	e.codes.close()
	e.published.close()
	e.lender.close() // first, to end the transfers
	e.fabric.close()
	e.tables.close()
}

// finishContext returns the context for the end of a lease whose calls may finish: it ends with the current drain, or
// after the grace.
func (e *Executor) finishContext() (context.Context, context.CancelFunc) {
	e.mu.Lock()
	until, ctx := e.until, e.grace
	e.mu.Unlock()
	if ctx == nil {
		until, ctx = time.Now().Add(e.cfg.Settings.Grace), context.Background()
	}
	return context.WithDeadline(ctx, until)
}
