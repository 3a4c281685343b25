package client

import (
	"fmt"
	"time"
)

// EventKind says what happened to a lease.
type EventKind int

// Kinds of events; the numbers are those of rfaas.h.
const (
	// EventWorkerDied: worker Worker died as Reason says. The next call that wants it replaces it.
	EventWorkerDied EventKind = iota + 1
	// EventEnded: the lease is no more. Reason begins with how: released, expired, revoked or drained. With
	// LeaseOptions.Failover only its part on one executor is no more.
	EventEnded
	// EventDraining: the node is needed and leaves after In. Calls that were sent finish, new ones fail with ErrLease and have
	// not started: take another lease.
	EventDraining
	// EventExpiring: the lease ends after In, unless Renew.
	EventExpiring
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

// eventsEvery is how often a lease with OnEvent looks for events. The C library has no thread that could wait for them: whoever
// looks also reads what the agent has sent.
const eventsEvery = 10 * time.Millisecond

// watch tells events until the lease is released.
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
