package grant

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Change is a change of an executor's state.
type Change struct {
	Address string // control address
	Node    string
	State   board.State // the new state; Left: it is no longer on the board
}

// Changes is a subscription to changes of executors. The manager writes into this process's mailbox, so a poll that finds nothing new
// sends no message. The first poll returns the registered executors. After a restart of the manager, the first poll that succeeds
// returns the changes since then. Safe for concurrent use.
type Changes struct {
	c       *shared
	timeout time.Duration

	mu    sync.Mutex
	epoch uint64 // 0: nothing is known
	seen  uint64
	known map[uint32]seenExecutor // by slot
}

type seenExecutor struct {
	incarnation uint64
	change      Change
}

// Changes makes a subscription.
func (c *Control) Changes() *Changes {
	return c.changes(c.opts.Timeout)
}

func (c *shared) changes(timeout time.Duration) *Changes {
	return &Changes{c: c, timeout: timeout, known: map[uint32]seenExecutor{}}
}

// Poll returns the changes since the last Poll. Only changes of one executor are in order. Errors: ErrUnsupported (the manager's memory
// cannot be reached from here), ErrConnection (the manager is away; try again).
func (w *Changes) Poll(ctx context.Context) ([]Change, error) {
	const op = "watch executors"
	w.mu.Lock()
	defer w.mu.Unlock()
	p := &w.c.places
	if w.c.opts.Manager == "" {
		return nil, fail(op, dataplane.StatusUnsupported, "the session has no resource manager")
	}
	bounded, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	if err := p.lock(bounded); err != nil {
		return nil, fromControl(op, w.c.opts.Manager, err)
	}
	defer p.unlock()
	if p.client != nil && p.client.Err() != nil {
		p.drop()
	}
	if err := w.c.attach(bounded); err != nil {
		if errors.Is(err, errNoBoard) {
			return nil, fail(op, dataplane.StatusUnsupported, "this node cannot reach the board of the resource manager %s by any provider", w.c.opts.Manager)
		}
		return nil, fromControl(op, w.c.opts.Manager, err)
	}
	box, err := p.client.Mailbox()
	var changes []Change
	if err == nil {
		changes, err = w.poll(&box, p.reader)
	}
	if err != nil {
		p.drop()
		return nil, fail(op, dataplane.StatusConnection, "%v", err)
	}
	return changes, nil
}

// poll compares the lines that the mailbox names, or the whole board, with what was known. After an error everything is compared again.
func (w *Changes) poll(box *board.Mailbox, r *board.Reader) ([]Change, error) {
	if box.Epoch == w.epoch && box.Changes == w.seen || box.Epoch == 0 {
		return nil, nil // nothing, or the first write is still on its way
	}
	lines, gone, some := w.named(box, r)
	if !some {
		var err error
		if lines, err = r.All(); err != nil {
			return nil, err
		}
	}
	var changes []Change
	known := maps.Clone(w.known)
	left := func(slot uint32) {
		c := known[slot].change
		c.State = board.Left
		changes = append(changes, c)
		delete(known, slot)
	}
	there := map[uint32]bool{}
	for i := range lines {
		l := &lines[i]
		if slices.ContainsFunc(gone, func(c board.Change) bool { return c.Slot == l.Slot && c.Incarnation == uint32(l.Incarnation) }) {
			l.State = board.Empty // whatever it has written since
		}
		there[l.Slot] = true
		old, was := known[l.Slot]
		if was && (old.incarnation != l.Incarnation || l.State == board.Empty) {
			left(l.Slot)
			was = false
		}
		if l.State == board.Empty || was && old.change.State == l.State {
			continue
		}
		id, err := r.Identity(l)
		if errors.Is(err, board.ErrGone) {
			continue // the next change tells
		} else if err != nil {
			return nil, err
		}
		now := seenExecutor{l.Incarnation, Change{Address: id.Control, Node: id.Node, State: l.State}}
		known[l.Slot] = now
		changes = append(changes, now.change)
	}
	if !some {
		for slot := range known {
			if !there[slot] {
				left(slot)
			}
		}
	}
	w.epoch, w.seen, w.known = box.Epoch, box.Changes, known
	return changes, nil
}

// named reads the lines that a mailbox names, and returns the incarnations that it says have gone; false if it cannot name all that
// has changed.
func (w *Changes) named(box *board.Mailbox, r *board.Reader) (lines []board.Line, gone []board.Change, some bool) {
	if box.Epoch != w.epoch || box.Changes < w.seen {
		return nil, nil, false
	}
	named, all := box.Since(w.seen)
	if !all {
		return nil, nil, false
	}
	for i, c := range named {
		later := func(same func(board.Change) bool) bool { return slices.ContainsFunc(named[i+1:], same) }
		if c.State == board.Left && !later(func(x board.Change) bool { return x.Slot == c.Slot && x.Incarnation == c.Incarnation }) {
			gone = append(gone, c)
		}
		if later(func(x board.Change) bool { return x.Slot == c.Slot }) {
			continue
		}
		l, err := r.Line(c.Slot)
		if err != nil {
			return nil, nil, false
		}
		lines = append(lines, l)
	}
	return lines, gone, true
}
