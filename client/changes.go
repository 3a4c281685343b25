package client

import (
	"context"
	"errors"
	"time"

	"github.com/rfaas-go/rfaas/internal/grant"
)

// ExecutorChange is something that happened to an executor of the resource manager's.
type ExecutorChange struct {
	Executor string // control address
	Node     string // host name
	State    string // what it is now: "open", "draining", "silent" or "left"
}

// Changes is a subscription to what happens to executors: it begins with those that are there. The resource manager writes changes
// into this process's memory, so that looking costs no message. After a restart of the manager it goes on by itself. Safe
// for concurrent use, until the session is closed.
type Changes struct{ changes *grant.Changes }

// changesEvery is how often the mailbox is looked at for a channel or a callback.
const changesEvery = grant.LookEvery

// Changes subscribes. It blocks for nothing; the first Poll connects.
func (s *Session) Changes() *Changes { return &Changes{s.control.Changes()} }

// Poll returns what has happened since the last Poll, nil if nothing has. Errors: ErrUnsupported (there is no resource manager, or no
// way to its memory from here); any other: it is away, try again later.
func (c *Changes) Poll(ctx context.Context) ([]ExecutorChange, error) {
	found, err := c.changes.Poll(ctx)
	if err != nil {
		return nil, err
	}
	var changes []ExecutorChange
	for _, x := range found {
		changes = append(changes, ExecutorChange{Executor: x.Address, Node: x.Node, State: x.State.String()})
	}
	return changes, nil
}

// Each calls f with every change, one at a time, until ctx ends, and returns its error. While the manager is away it waits.
// Other errors of Poll end it.
func (c *Changes) Each(ctx context.Context, f func(ExecutorChange)) error {
	tick := time.NewTicker(changesEvery)
	defer tick.Stop()
	for {
		changes, err := c.Poll(ctx)
		if err != nil && ctx.Err() == nil && errors.Is(err, ErrUnsupported) {
			return err
		}
		for _, x := range changes {
			f(x)
		}
		pause := tick.C
		if err != nil {
			pause = time.After(20 * changesEvery)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-pause:
		}
	}
}

// Channel delivers every change until ctx ends, and is then closed. A slow receiver delays nobody else: what comes next is looked up
// when it is ready.
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
