package executor

import (
	"context"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/lease"
)

// releaseGrace is how long a released lease's workers may take to finish what their holder no longer wants.
const releaseGrace = time.Second

// drainYield is how long a drain waits for holders to say that they start no more calls, before it asks their workers to
// finish: a call that is sent to a worker that is leaving may be lost.
const drainYield = 500 * time.Millisecond

// Run does to leases what is due, until ctx ends.
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
			timer.Reset(0) // what was done may have brought another deadline
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

// due does one thing. Whoever was faster has done it.
func (e *Executor) due(d lease.Due) {
	switch d.State {
	case lease.Expiring:
		l, err := e.table.Notice(d.ID)
		if err != nil {
			return
		}
		if h := e.holding(d.ID); h != nil {
			h.expiring(l.Expires)
		}
	case lease.Released: // and kept
		e.work.Go(func() { e.dropKept(d.ID) })
	default:
		if h, err := e.beginEnd(context.Background(), d.ID, d.State, d.Reason); err == nil {
			e.work.Go(func() { e.finishEnd(context.Background(), h, killed) })
		}
	}
}

// beginEnd ends a lease in the books; nobody else will end it again. finishEnd must follow. ctx says who asked for it, if it is that of
// a call.
func (e *Executor) beginEnd(ctx context.Context, id lease.ID, how lease.State, reason string) (*holding, error) {
	l, err := e.table.End(id, how, reason)
	if err != nil {
		return nil, err
	}
	e.metrics.ended.WithLabelValues(how.String()).Inc()
	h := e.holding(id) // there since before the grant, until finishEnd
	e.auditEnd(ctx, h, &l, reason)
	h.end(how, reason)
	return h, nil
}

// finishEnd ends the workers, and only when the last one is reaped gives the cores back.
func (e *Executor) finishEnd(ctx context.Context, h *holding, how ending) {
	e.accounts.last(h.id)
	h.stopWorkers(ctx, how)
	if err := e.table.Reaped(h.id); err != nil {
		e.log.Error("cores of an ended lease not returned", "lease", uint64(h.id), "error", err)
	}
	e.accounts.end(h.id)
	e.forget(h)
	e.report()
}

// forget drops what is left of a holding whose workers are gone.
func (e *Executor) forget(h *holding) {
	e.codes.release(h.code)
	e.remove(h)
}

// remove takes a holding whose workers are gone, or not its own any more, off the books.
func (e *Executor) remove(h *holding) {
	h.mu.Lock()
	giveBack := h.reserved
	h.reserved = nil
	h.mu.Unlock()
	if giveBack != nil {
		giveBack()
	}
	e.mu.Lock()
	delete(e.holdings, h.id)
	e.mu.Unlock()
	h.over()
}

// drainReason is what holders are told unless somebody gave another reason.
const drainReason = "the node is draining"

// drainRequest is what somebody asked for by the control port.
type drainRequest struct {
	grace  time.Duration
	reason string
}

// DrainAsked receives when somebody has asked for a drain.
func (e *Executor) DrainAsked() <-chan drainRequest { return e.asked }

// BeginDrain gives out no more leases from now on.
func (e *Executor) BeginDrain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.draining = true
	e.table.Drain()
}

func (e *Executor) isDraining() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.draining
}

// DrainUntil gives out no more leases, tells the holders why, lets the calls that were sent finish until ctx ends, and returns
// when every worker is reaped. Holders stop calling when they are told and give their leases back; the workers of one that
// does not within drainYield finish what they have got and end. The executor is of no use afterwards.
func (e *Executor) DrainUntil(ctx context.Context, reason string) {
	until, bounded := ctx.Deadline()
	if !bounded {
		until = time.Now().Add(e.cfg.Settings.Grace)
	}
	e.BeginDrain()
	e.gate.Audit().Write(identity.AuditEntry{Event: identity.AuditDrain, Reason: reason,
		Detail: "grace " + time.Until(until).Round(time.Millisecond).String()})
	e.mu.Lock()
	e.until = until
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
			select { // a holder that has not opened its stream yet is on its way
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
	e.dropAllKept()
	e.work.Wait()
	e.codes.close()
}

// finishContext bounds the end of a lease whose calls may finish: by the present drain, or else by the grace.
func (e *Executor) finishContext() (context.Context, context.CancelFunc) {
	e.mu.Lock()
	until := e.until
	e.mu.Unlock()
	if until.IsZero() {
		until = time.Now().Add(e.cfg.Settings.Grace)
	}
	return context.WithDeadline(context.Background(), until)
}
