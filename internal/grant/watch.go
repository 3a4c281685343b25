package grant

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

const (
	// openBound is how long a stream may take to begin, and how long attempts to reopen a broken one may take together.
	openBound = 6 * time.Second
	// lossBound is how long after an executor's last event these attempts may go on. They may always take watchBound, because a stream that
	// has been silent for long may break although the executor lives.
	lossBound = 8 * time.Second
	// watchBound is the time after a break in which new attempts may begin.
	watchBound = 3 * time.Second
	// An executor names the interval at which it sends events. 0, and any longer interval than maxPromise, count as maxPromise. The executor
	// counts as lost after silentTimes such intervals without an event.
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
	ctx     context.Context // until the lease ends or is released
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
	w := &watch{ctx: ctx, cancel: cancel, done: make(chan struct{}), renewed: make(chan struct{}, 1)}
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
	const op, shortest, longest = "follow the lease", 20 * time.Millisecond, 500 * time.Millisecond
	heard, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	quiet := newSilenceTimer(openBound)
	go quiet.run(heard, cancel)
	pause, refusals := shortest, 0 // refusals in a row
	for first := true; ; first = false {
		end, opened, err := h.stream(heard, handle, quiet)
		var silence *silence
		switch {
		case ctx.Err() != nil:
			return Event{}, false
		case end != nil:
			return *end, true
		case errors.As(context.Cause(heard), &silence):
			return lost(fail(op, dataplane.StatusPeerGone, "%s: %v", h.Address, silence)), true
		}
		err = fromControl(op, h.Address, err)
		if errors.Is(err, dataplane.ErrLease) {
			return Event{Kind: LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: "lost: executor " + h.Address + " does not know the lease any more"}, true
		}
		if nobodyListens(err) { // the executor's process has ended, and its workers with it
			return lost(err), true
		}
		wait := pause
		pause = min(2*pause, longest)
		if opened {
			wait, pause, refusals = shortest, 2*shortest, 0
		}
		switch {
		case errors.Is(err, dataplane.ErrCredential): // the executor answers; the user may renew the token
			wait = untilRefused(refusals)
			refusals++
			quiet.heard(wait + openBound)
		case opened, first:
			quiet.broke()
		case quiet.broken() > watchBound:
			return lost(err), true
		}
		select {
		case <-heard.Done():
		case <-time.After(wait):
		}
	}
}

// lost returns the event of a lease whose executor cannot be reached. The detail of err begins with the executor's address.
func lost(err error) Event {
	why := err.Error()
	var e *dataplane.Error
	if errors.As(err, &e) && e.Detail != "" {
		why = e.Detail
	}
	return Event{Kind: LeaseEnded, Status: dataplane.StatusPeerGone, Reason: "lost: executor " + why}
}

// stream follows one event stream until it breaks. opened reports whether it was established.
func (h *Held) stream(ctx context.Context, handle func(Event), quiet *silenceTimer) (end *Event, opened bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	limit := openBound
	s, err := h.cl.Events(ctx, &control.EventsRequest{LeaseId: h.ID})
	for err == nil {
		var e *control.Event
		if e, err = s.Recv(); err != nil {
			break
		}
		if e.Kind == control.Event_KIND_OPEN {
			opened = true
			limit = silentTimes * promise(e.InMs)
		}
		quiet.heard(limit)
		switch e.Kind {
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
	return nil, opened, err
}

// promise returns the longest time between two events of an executor that names an interval.
func promise(ms uint64) time.Duration {
	if ms == 0 {
		return maxPromise
	}
	return min(milliseconds(ms), maxPromise)
}

// silenceTimer measures for how long an executor has sent nothing, over all event streams of a lease. It does not count time in which this
// process could not read because it or the whole node was stopped: events may have arrived then that it has not read yet.
type silenceTimer struct {
	mu     sync.Mutex
	limit  time.Duration
	silent time.Duration // length of the silence at the time `looked`
	looked time.Time
	pause  time.Duration // until the next look
	before time.Duration // silence before the stream broke
}

// silence is the error of an executor that sends nothing.
type silence struct{ lasted time.Duration }

func (s *silence) Error() string { return fmt.Sprintf("it sent nothing for %v", s.lasted) }

func newSilenceTimer(limit time.Duration) *silenceTimer {
	return &silenceTimer{limit: limit, looked: time.Now()}
}

// heard notes an event: from now on, limit may pass until the next one.
func (e *silenceTimer) heard(limit time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.limit, e.silent, e.looked = limit, 0, time.Now()
}

// broke notes that the stream has broken, and sets the limit of the silence.
func (e *silenceTimer) broke() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.before = e.look()
	e.limit = e.before + min(max(lossBound-e.before, watchBound), openBound)
}

// broken returns the time since broke.
func (e *silenceTimer) broken() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.look() - e.before
}

// look returns how long the silence has lasted. The caller holds the lock.
func (e *silenceTimer) look() time.Duration {
	now := time.Now()
	e.silent += min(now.Sub(e.looked), 2*e.pause)
	e.looked = now
	return e.silent
}

// next returns the limit of the silence, whether it is reached, and the time until the next look.
func (e *silenceTimer) next() (limit time.Duration, reached bool, pause time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	left := e.limit - e.look()
	e.pause = min(time.Second, max(min(e.limit/8, left), 5*time.Millisecond))
	return e.limit, left <= 0, e.pause
}

// run cancels ctx with a *silence when a silence reaches its limit. It returns when ctx ends.
func (e *silenceTimer) run(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		limit, reached, pause := e.next()
		if reached {
			cancel(&silence{limit.Round(10 * time.Millisecond)})
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
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
