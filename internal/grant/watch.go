package grant

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

const (
	// watchBound is how long an event stream may stay broken before the executor counts as lost.
	watchBound = 3 * time.Second
	// openBound is how long a stream may take to begin. After a break, all attempts together may take that long.
	openBound = 6 * time.Second
	// An executor says how often it sends events, at most maxPromise. It counts as lost after silentTimes such intervals without
	// an event.
	silentTimes = 5
	maxPromise  = 10 * time.Second
)

// EventKind is the kind of an event.
type EventKind int

// Kinds of events; the numbers are those of rfaas.h.
const (
	WorkerDied EventKind = api.EventWorkerDied
	LeaseEnded EventKind = api.EventEnded    // Reason begins with released, expired, revoked, drained or lost
	Draining   EventKind = api.EventDraining // the executor stops after In: start no calls, finish, release
	Expiring   EventKind = api.EventExpiring // the lease ends after In unless it is renewed
)

// Event is an event of a lease.
type Event struct {
	Kind   EventKind
	Worker int
	PID    int              // of the worker that died
	Status dataplane.Status // with which calls in flight end
	In     time.Duration
	Reason string
	// Of a worker that died:
	Function  string // function that ran, "" for none
	Backtrace string // a line for each function on the stack, innermost first
	Output    []byte // last bytes that it printed
}

// Death returns a sentence that says how the worker died.
func (e *Event) Death() string {
	if e.Function != "" {
		return fmt.Sprintf("function %s of worker %d: %s", e.Function, e.Worker, e.Reason)
	}
	return fmt.Sprintf("worker %d: %s", e.Worker, e.Reason)
}

// deathStatus returns the status of a death: one that a death can have, else StatusWorkerDied.
func deathStatus(st int32) dataplane.Status {
	switch s := dataplane.Status(st); s {
	case dataplane.StatusTimeLimit, dataplane.StatusMemoryLimit:
		return s
	}
	return dataplane.StatusWorkerDied
}

type watch struct {
	cancel  context.CancelFunc
	done    chan struct{}
	renewed chan struct{} // capacity 1: the end has moved
}

func (w *watch) wake() {
	select {
	case w.renewed <- struct{}{}:
	default:
	}
}

// Watch calls handle for every event, one after the other on one goroutine, until the lease is released or ends. The last event of a
// lease that ends is LeaseEnded. The lease also ends at Until, without an event of the executor. Call it once. handle must not call
// Release.
func (h *Held) Watch(handle func(Event)) {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watch{cancel: cancel, done: make(chan struct{}), renewed: make(chan struct{}, 1)}
	h.mu.Lock()
	h.watch = w
	h.mu.Unlock()
	events, deaths := make(chan Event), make(chan Event)
	var wg sync.WaitGroup
	wg.Go(func() {
		h.judge(ctx, func(e Event) {
			select {
			case deaths <- e:
			case <-ctx.Done():
			}
		})
	})
	wg.Go(func() {
		defer close(events)
		tell := func(e Event) {
			select {
			case events <- e:
			case <-ctx.Done():
			}
		}
		if last, ended := h.follow(ctx, tell); ended {
			tell(last)
		}
	})
	if h.renew {
		wg.Go(func() { h.keep(ctx) })
	}
	go func() {
		defer close(w.done)
		defer wg.Wait()
		defer cancel()
		h.handle(ctx, events, deaths, w.renewed, handle)
	}()
}

// handle passes events on until the last one.
func (h *Held) handle(ctx context.Context, events, deaths <-chan Event, renewed <-chan struct{}, handle func(Event)) {
	timer := time.NewTimer(time.Until(h.Until()))
	defer timer.Stop()
	for {
		select {
		case e, more := <-events:
			if !more {
				return
			}
			if h.leaving.Load() {
				continue
			}
			h.note(e)
			handle(e)
			if e.Kind == LeaseEnded {
				return
			}
		case e := <-deaths:
			if !h.leaving.Load() {
				handle(e)
			}
		case <-renewed:
			timer.Reset(time.Until(h.Until()))
		case <-timer.C:
			if left := time.Until(h.Until()); left > 0 {
				timer.Reset(left)
				continue
			}
			if h.leaving.Load() {
				continue
			}
			e := Event{Kind: LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: h.expiry("expired: its time is up")}
			h.note(e)
			handle(e)
			return
		case <-ctx.Done():
			return
		}
	}
}

// keep renews the lease whenever half of its remaining time has passed, until ctx ends or the executor refuses. If the executor
// does not answer, or refuses a token that the user may still renew, it asks again until the lease expires.
func (h *Held) keep(ctx context.Context) {
	pause := time.Until(h.Until()) / 2
	refused := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(pause, time.Millisecond)):
		}
		left := time.Until(h.Until())
		if left <= 0 {
			return
		}
		bound, cancel := context.WithTimeout(ctx, left)
		err := h.Renew(bound, 0)
		cancel()
		h.noteRenewal(err)
		switch {
		case errors.Is(err, dataplane.ErrCredential):
			pause = min(untilRefused(refused), time.Until(h.Until())/2)
			refused++
			continue
		case err == nil, errors.Is(err, dataplane.ErrConnection):
			pause = time.Until(h.Until()) / 2
		default: // the lease has ended, or the node drains and renews no lease
			return
		}
		refused = 0
	}
}

// StopWatch ends the watch, and returns when its goroutine has ended, so that no event follows. Release calls it.
func (h *Held) StopWatch() {
	h.mu.Lock()
	w := h.watch
	h.mu.Unlock()
	if w != nil {
		w.cancel()
		<-w.done
	}
}

// follow keeps an event stream open. It returns the event that ended the lease, or false when ctx ended it.
func (h *Held) follow(ctx context.Context, handle func(Event)) (Event, bool) {
	var brokenSince time.Time
	pause, tries := 20*time.Millisecond, 0 // tries: refusals in a row
	bound := openBound
	for {
		end, opened, err := h.stream(ctx, handle, bound)
		switch {
		case ctx.Err() != nil:
			return Event{}, false
		case end != nil:
			return *end, true
		case errors.Is(err, dataplane.ErrLease):
			return Event{Kind: LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: "lost: executor " + h.Address + " does not know the lease any more"}, true
		}
		if nobodyListens(err) { // the executor's process has ended, and its workers with it
			return lost(err), true
		}
		now := time.Now()
		refused := errors.Is(err, dataplane.ErrCredential) // the executor answers; the user may renew the token
		if opened || brokenSince.IsZero() || refused {
			brokenSince = now
		}
		if opened {
			pause, tries = 20*time.Millisecond, 0
		}
		if now.Sub(brokenSince) > watchBound {
			return lost(err), true
		}
		select {
		case <-ctx.Done():
			return Event{}, false
		case <-time.After(pause):
		}
		pause = min(2*pause, 500*time.Millisecond)
		bound = reopenBound(time.Since(brokenSince))
		if refused {
			pause = untilRefused(tries)
			tries++
			bound = openBound
		}
	}
}

// reopenBound returns how long the next attempt to open a stream may take that has been broken for so long. Without it, an attempt that begins
// late would make the loss of an executor known later than a client waits for a new worker.
func reopenBound(broken time.Duration) time.Duration { return max(openBound-broken, watchBound) }

// lost returns the event of a lease whose executor cannot be reached. The detail of err begins with the executor's address.
func lost(err error) Event {
	why := err.Error()
	var e *dataplane.Error
	if errors.As(err, &e) && e.Detail != "" {
		why = e.Detail
	}
	return Event{Kind: LeaseEnded, Status: dataplane.StatusPeerGone, Reason: "lost: executor " + why}
}

// stream follows one event stream until it breaks. It may take until bound to begin. opened reports whether it was established.
func (h *Held) stream(ctx context.Context, handle func(Event), bound time.Duration) (end *Event, opened bool, err error) {
	const op = "follow the lease"
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ear := newEar(bound)
	go ear.listen(ctx, cancel)
	s, err := h.cl.Events(ctx, &control.EventsRequest{LeaseId: h.ID})
	for err == nil {
		var e *control.Event
		if e, err = s.Recv(); err != nil {
			break
		}
		ear.heard()
		switch e.Kind {
		case control.Event_KIND_OPEN:
			opened = true
			ear.bound(silentTimes * min(milliseconds(e.InMs), maxPromise))
		case control.Event_KIND_WORKER_DIED:
			handle(Event{Kind: WorkerDied, Worker: int(e.Worker), PID: int(e.Pid), Status: deathStatus(e.Status), Reason: e.Reason,
				Function: e.Function, Backtrace: e.Backtrace, Output: e.OutputTail})
		case control.Event_KIND_DRAINING:
			handle(Event{Kind: Draining, In: milliseconds(e.InMs), Reason: e.Reason})
		case control.Event_KIND_EXPIRING:
			handle(Event{Kind: Expiring, In: milliseconds(e.InMs), Reason: h.expiry(e.Reason)})
		case control.Event_KIND_LEASE_ENDED:
			return &Event{Kind: LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: e.Reason}, opened, nil
		}
	}
	var silent *silence
	if errors.As(context.Cause(ctx), &silent) {
		e := lost(fail(op, dataplane.StatusPeerGone, "%s: %v", h.Address, silent))
		return &e, opened, nil
	}
	return nil, opened, fromControl(op, h.Address, err)
}

// ear notices that a stream is silent. It does not count time in which this process could not read, because it or the whole node was
// stopped: events of that time are still to be read.
type ear struct {
	limit atomic.Int64  // ns; 0: no limit
	count atomic.Uint64 // events received
}

// silence is the error of a stream without events.
type silence struct{ lasted time.Duration }

func (s *silence) Error() string { return fmt.Sprintf("it sent nothing for %v", s.lasted) }

func newEar(limit time.Duration) *ear {
	e := &ear{}
	e.limit.Store(int64(limit))
	return e
}

func (e *ear) heard() { e.count.Add(1) }

// bound changes how long the silence may last; 0: without a limit.
func (e *ear) bound(limit time.Duration) { e.limit.Store(int64(limit)) }

// listen cancels ctx with a *silence after too long a silence. It returns when ctx ends, or when there is no limit.
func (e *ear) listen(ctx context.Context, cancel context.CancelCauseFunc) {
	var lasted time.Duration
	heard, last := e.count.Load(), time.Now()
	for {
		limit := time.Duration(e.limit.Load())
		pause := min(max(limit/8, 5*time.Millisecond), time.Second)
		if limit == 0 {
			return // the executor promised no interval
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		now := time.Now()
		passed := min(now.Sub(last), 2*pause)
		last = now
		if n := e.count.Load(); n != heard {
			heard, lasted = n, 0
			continue
		}
		if lasted += passed; limit > 0 && lasted >= limit {
			cancel(&silence{limit})
			return
		}
	}
}

// nobodyListens reports whether the node answered that no process listens at the executor's address. This is certain, unlike silence,
// which a broken network also causes.
func nobodyListens(err error) bool {
	return err != nil && containsAny(err.Error(), "connect: connection refused", "connect: no such file or directory")
}

func containsAny(s string, parts ...string) bool {
	for _, p := range parts {
		if strings.Contains(s, p) {
			return true
		}
	}
	return false
}
