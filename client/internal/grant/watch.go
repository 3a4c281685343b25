package grant

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// watchBound is how long a broken event stream may stay broken before the executor counts as gone.
const watchBound = 3 * time.Second

// EventKind says what happened to a lease.
type EventKind int

// Kinds of events.
const (
	WorkerDied EventKind = iota + 1
	LeaseEnded           // Status says why: the lease ended, or the executor is gone
	Draining
)

// Event is one thing that happened to a lease.
type Event struct {
	Kind   EventKind
	Worker int
	PID    int              // of the worker that died
	Status dataplane.Status // what calls in flight end with
	Reason string
	// Of a worker that died:
	Function  string // that ran, "" for none
	Backtrace string // a line for each function on the stack, innermost first
	Output    []byte // last bytes that it printed
}

// Death is the sentence about a worker that died.
func (e *Event) Death() string {
	if e.Function != "" {
		return fmt.Sprintf("function %s of worker %d: %s", e.Function, e.Worker, e.Reason)
	}
	return fmt.Sprintf("worker %d: %s", e.Worker, e.Reason)
}

// deathStatus is the status of an event, as far as a death can have it.
func deathStatus(st int32) dataplane.Status {
	switch s := dataplane.Status(st); s {
	case dataplane.StatusTimeLimit, dataplane.StatusMemoryLimit:
		return s
	}
	return dataplane.StatusWorkerDied
}

type watch struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// Watch calls handle for every event, one at a time on one goroutine, until the lease ends (the last event is then
// LeaseEnded) or is released. Call it once. handle must not call Release.
func (h *Held) Watch(handle func(Event)) {
	ctx, cancel := context.WithCancel(context.Background())
	h.watch = &watch{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(h.watch.done)
		if last, ended := h.follow(ctx, handle); ended {
			handle(last)
		}
	}()
}

// StopWatch ends the watch and returns when its goroutine has ended: no event comes after it. Release does it too.
func (h *Held) StopWatch() {
	if h.watch != nil {
		h.watch.cancel()
		<-h.watch.done
	}
}

// follow keeps an event stream open. It returns the event that ended the lease, or false when ctx ended it.
func (h *Held) follow(ctx context.Context, handle func(Event)) (Event, bool) {
	var brokenSince time.Time
	pause := 20 * time.Millisecond
	for {
		end, opened, err := h.stream(ctx, handle)
		switch {
		case ctx.Err() != nil:
			return Event{}, false
		case end != nil:
			return *end, true
		case errors.Is(err, dataplane.ErrLease):
			return Event{Kind: LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: "the executor does not know the lease any more"}, true
		}
		if nobodyListens(err) { // its process has ended, and its workers with it
			return Event{Kind: LeaseEnded, Status: dataplane.StatusPeerGone, Reason: "executor " + err.Error()}, true
		}
		now := time.Now()
		if opened || brokenSince.IsZero() {
			brokenSince, pause = now, 20*time.Millisecond
		}
		if now.Sub(brokenSince) > watchBound {
			return Event{Kind: LeaseEnded, Status: dataplane.StatusPeerGone, Reason: "executor " + err.Error()}, true
		}
		select {
		case <-ctx.Done():
			return Event{}, false
		case <-time.After(pause):
		}
		pause = min(2*pause, 500*time.Millisecond)
	}
}

// stream follows one event stream until it breaks; opened says whether it was ever in place.
func (h *Held) stream(ctx context.Context, handle func(Event)) (end *Event, opened bool, err error) {
	const op = "follow the lease"
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := h.cl.Events(ctx, &control.EventsRequest{LeaseId: h.ID})
	for err == nil {
		var e *control.Event
		if e, err = s.Recv(); err != nil {
			break
		}
		switch e.Kind {
		case control.Event_KIND_OPEN:
			opened = true
		case control.Event_KIND_WORKER_DIED:
			handle(Event{Kind: WorkerDied, Worker: int(e.Worker), PID: int(e.Pid), Status: deathStatus(e.Status), Reason: e.Reason,
				Function: e.Function, Backtrace: e.Backtrace, Output: e.OutputTail})
		case control.Event_KIND_DRAINING:
			handle(Event{Kind: Draining, Reason: e.Reason})
		case control.Event_KIND_LEASE_ENDED:
			return &Event{Kind: LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: e.Reason}, opened, nil
		}
	}
	return nil, opened, fromControl(op, h.Address, err)
}

// nobodyListens says that the node answered, and that there is no executor at the address: unlike silence, which a
// network in trouble gives, that is certain.
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
