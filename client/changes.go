package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
)

// ExecutorChange is a change of an executor's state.
type ExecutorChange struct {
	Executor string // control address
	Node     string // host name
	State    string // the new state: "open", "draining", "silent" or "left"
}

// Changes reports changes of executors. The first changes name the registered executors. Each change is reported once for each session,
// by one of the Changes of the session. Changes continues after a restart of the manager. Safe for concurrent use, until the session is
// closed.
type Changes struct{ session *Session }

// Pauses between two polls for a channel or a callback; longer while the manager is away.
const (
	changesEvery     = 5 * time.Millisecond
	changesEveryAway = 100 * time.Millisecond
)

// Changes subscribes. It does not block.
func (s *Session) Changes() *Changes { return &Changes{s} }

// Poll returns the changes since the last Poll; nil: none. Errors: ErrUnsupported (there is no resource manager, or its memory cannot be
// reached from here); after any other error the manager is away, try again later.
func (c *Changes) Poll(ctx context.Context) ([]ExecutorChange, error) {
	return during(ctx, c.session, "changes", func() ([]ExecutorChange, error) {
		found, err := c.session.c.Changes()
		var changes []ExecutorChange
		for _, x := range found {
			state := fmt.Sprintf("state %d", x.State)
			if x.State > 0 && int(x.State) < len(api.ExecutorNames) {
				state = api.ExecutorNames[x.State]
			}
			changes = append(changes, ExecutorChange{Executor: x.Executor, Node: x.Node, State: state})
		}
		if len(changes) > 0 {
			err = nil // it comes again
		}
		return changes, err
	}, nil)
}

// Each calls f with every change, one at a time, until ctx ends, and returns its error. While the manager is away it waits.
// Other errors of Poll end it.
func (c *Changes) Each(ctx context.Context, f func(ExecutorChange)) error {
	for {
		changes, err := c.Poll(ctx)
		if ctx.Err() == nil && (errors.Is(err, ErrUnsupported) || errors.Is(err, ErrInvalid)) {
			return err
		}
		for _, x := range changes {
			f(x)
		}
		pause := changesEvery
		if err != nil {
			pause = changesEveryAway
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// Channel delivers every change until ctx ends, and is then closed.
func (c *Changes) Channel(ctx context.Context) <-chan ExecutorChange {
	out := make(chan ExecutorChange)
	go func() {
		defer close(out)
		_ = c.Each(ctx, func(x ExecutorChange) {
			select {
			case out <- x:
			case <-ctx.Done():
			}
		})
	}()
	return out
}
