package grant

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// lookEvery is how often the goroutine polls the mailbox.
const lookEvery = 5 * time.Millisecond

// arrivals wakes the goroutines that wait for an executor when one registers. One goroutine polls the mailbox for all of them, while
// there are any.
type arrivals struct {
	mu      sync.Mutex
	changes *Changes
	count   uint64        // polls that found an executor which lends cores
	come    chan struct{} // closed when count grows
	waiting int
	looking bool
}

// Arrivals returns how often new executors were found so far.
func (c *shared) Arrivals() uint64 {
	c.arrivals.mu.Lock()
	defer c.arrivals.mu.Unlock()
	return c.arrivals.count
}

// AwaitArrival returns when Arrivals differs from seen, or when ctx ends. Without a manager, and while the manager is away, only ctx
// ends it. The first one of a session also counts the executors that are registered already.
func (c *shared) AwaitArrival(ctx context.Context, seen uint64) {
	a := &c.arrivals
	a.mu.Lock()
	if a.count != seen || c.opts.Manager == "" {
		a.mu.Unlock()
		if c.opts.Manager == "" {
			<-ctx.Done()
		}
		return
	}
	if a.come == nil {
		a.come = make(chan struct{})
	}
	if a.changes == nil {
		a.changes = c.changes(DefaultTimeout)
	}
	come := a.come
	a.waiting++
	if !a.looking {
		a.looking = true
		go a.look()
	}
	a.mu.Unlock()
	select {
	case <-come:
	case <-ctx.Done():
	}
	a.mu.Lock()
	a.waiting--
	a.mu.Unlock()
}

// look polls the mailbox while a goroutine waits.
func (a *arrivals) look() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for range tick.C {
		a.mu.Lock()
		if a.waiting == 0 {
			a.looking = false
			a.mu.Unlock()
			return
		}
		a.mu.Unlock()
		found, err := a.changes.Poll(context.Background())
		if errors.Is(err, dataplane.ErrUnsupported) || errors.Is(err, dataplane.ErrInvalid) { // no mailbox, or closed
			a.mu.Lock()
			a.looking = false // until another goroutine waits
			a.mu.Unlock()
			return
		}
		if !slices.ContainsFunc(found, func(c Change) bool { return c.State == board.Open }) {
			continue
		}
		a.mu.Lock()
		a.count++
		close(a.come)
		a.come = make(chan struct{})
		a.mu.Unlock()
	}
}
