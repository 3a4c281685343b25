package client

import (
	"context"
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// EventKind says what happened to a lease.
type EventKind int

// Kinds of events.
const (
	// EventWorkerDied: worker Worker died as Reason says. It is replaced in the background.
	EventWorkerDied EventKind = iota + 1
	// EventExpiring: the lease ends after In, unless Renew.
	EventExpiring
	// EventDraining: the node is needed and leaves after In. Calls that were sent finish, new ones fail with ErrLease and have
	// not started: take another lease.
	EventDraining
	// EventEnded: the lease is no more. Reason begins with how: released, expired, revoked or drained. With
	// LeaseOptions.Failover only its part on one executor is no more.
	EventEnded
	// EventMoved: with LeaseOptions.Failover, calls now go to workers elsewhere. Reason is their executor's address.
	EventMoved
)

var eventNames = [...]string{EventWorkerDied: "worker died", EventExpiring: "expiring", EventDraining: "draining", EventEnded: "ended",
	EventMoved: "moved"}

func (k EventKind) String() string {
	if k < EventWorkerDied || k > EventMoved {
		return fmt.Sprintf("event %d", int(k))
	}
	return eventNames[k]
}

// Event is one thing that happened to a lease.
type Event struct {
	Kind   EventKind
	Worker int
	In     time.Duration
	Reason string
}

// handle runs on the watch's goroutine.
func (l *Lease) handle(e grant.Event) {
	tell := Event{Worker: e.Worker, In: e.In, Reason: e.Reason}
	switch e.Kind {
	case grant.LeaseEnded:
		tell.Kind = EventEnded
		l.end(e.Status, e.Reason)
		l.lost()
	case grant.WorkerDied:
		tell.Kind, tell.Reason = EventWorkerDied, e.Death()
		if e.Worker >= 0 && e.Worker < len(l.workers) {
			l.workers[e.Worker].died(e)
		}
	case grant.Draining:
		tell.Kind = EventDraining
		l.leave(e)
		l.lost()
	case grant.Expiring:
		tell.Kind = EventExpiring
	}
	if tell.Kind != 0 {
		l.tell(tell)
	}
}

func (l *Lease) tell(e Event) {
	switch {
	case l.front != nil:
		l.front.mover.tell(e)
	case l.onEvent != nil:
		l.onEvent(e)
	}
}

// ---- workers that do not answer ----

// listenEvery is how often somebody looks whether workers leave calls unanswered.
const listenEvery = 250 * time.Millisecond

// listen reports workers that leave calls unanswered, so that one which lives but will never answer is found out.
func (l *Lease) listen() {
	tick := time.NewTicker(listenEvery)
	defer tick.Stop()
	told := make([]int64, len(l.workers))
	for {
		select {
		case <-l.healCtx.Done():
			return
		case <-tick.C:
		}
		for i, w := range l.workers {
			if since, at := w.ch.Silence(); at > told[i] {
				told[i] = at
				l.held.Unanswered(grant.Unanswered{Worker: i, Since: since, At: at})
			}
		}
	}
}

// ---- draining ----

// leave starts no calls any more and gives the lease back when the last one has ended.
func (l *Lease) leave(e grant.Event) {
	if l.leaving.Load() {
		return // told by another stream
	}
	l.mu.Lock()
	l.why = e.Reason
	l.mu.Unlock()
	l.close()
	l.background(func() {
		for _, w := range l.workers {
			if !w.quiet() {
				return
			}
		}
		// An error: the executor ends the lease by itself, and says so.
		_ = l.held.Finish(l.healCtx)
	})
}

// close has no call started any more.
func (l *Lease) close() {
	if !l.leaving.Swap(true) {
		close(l.closing)
	}
}

func (l *Lease) leavingError(op string) error {
	if err := l.endedError(op); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return fail(op, StatusLeaseEnded, "the node of %s leaves: %s", l.held.Address, l.why)
}

// quiet returns when no call is in flight on the worker, of a lease that starts none any more; false: the lease was
// released.
func (w *Worker) quiet() bool {
	for slice := int64(firstSlice); ; slice = min(2*slice, lastSlice) {
		if w.lease.healCtx.Err() != nil || w.claim(w.lease.healCtx, "leave") != nil {
			return false
		}
		busy := w.inFlight()
		if busy >= 0 {
			w.ch.Wait(uint32(busy), w.until(context.Background(), slice))
		}
		w.lease.give(w)
		if busy < 0 {
			return true
		}
	}
}

// inFlight returns the slot of a submitted call that has not ended, -1 if there is none. The claim's holder.
func (w *Worker) inFlight() int {
	if w.ch.Status() != dataplane.OK {
		return -1
	}
	for slot, s := range w.slots {
		if s.seq != 0 && !w.ch.Test(uint32(slot)) {
			return slot
		}
	}
	return -1
}
