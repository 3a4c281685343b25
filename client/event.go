package client

import (
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
)

func (k EventKind) String() string {
	if k < EventWorkerDied || k > EventWorkerAdded {
		return fmt.Sprintf("event %d", int(k))
	}
	return api.EventNames[k]
}

// Event is one thing that happened to a lease.
type Event struct {
	Kind   EventKind
	Worker int           // EventWorkerDied, EventWorkerAdded: index of the worker
	In     time.Duration // EventDraining, EventExpiring: time until the end
	Reason string
	Lost   int // number of earlier events that were dropped because OnEvent blocked
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
			tell(Event{Kind: EventKind(e.Kind), Worker: int(e.Worker), In: e.Left, Reason: e.Text, Lost: int(e.Lost)})
		}
	}
}
