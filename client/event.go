package client

import (
	"fmt"
	"time"
)

// EventKind says what happened to a lease.
type EventKind int

// Kinds of events; the numbers are those of rfaas.h.
const (
	// EventWorkerDied: worker Worker died as Reason says. The next call that uses it replaces it.
	EventWorkerDied EventKind = iota + 1
	// EventEnded: the lease has ended. Reason begins with how: released, expired, revoked, drained or lost. With
	// LeaseOptions.Failover only the lease on one executor has ended.
	EventEnded
	// EventDraining: the node drains, and its executor ends after In. Calls that were sent finish. New calls fail with ErrLease,
	// not started: take another lease.
	EventDraining
	// EventExpiring: the lease ends after In, unless it is renewed.
	EventExpiring
	// EventMoved: with LeaseOptions.Failover, calls now go to workers of another executor. Reason is its address.
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

// eventsEvery is how often a lease with OnEvent polls for events. The C library has no thread that could wait for them: a poll also
// reads the agent's messages.
const eventsEvery = 10 * time.Millisecond

// watch reports events until the lease is released.
func (l *Lease) watch(tell func(Event)) {
	tick := time.NewTicker(eventsEvery)
	defer tick.Stop()
	for {
		select {
		case <-l.over:
			return
		case <-tick.C:
		}
		for !l.released.Load() {
			e, err := l.c.Event()
			if err != nil || e.Kind == 0 {
				break
			}
			tell(Event{Kind: EventKind(e.Kind), Worker: int(e.Worker), In: e.Left, Reason: e.Text})
		}
	}
}
