package manager

import (
	"errors"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// subscriber is a client process that reads the board. It is notified of changes if it has a mailbox.
type subscriber struct {
	conn    *dataplane.Conn
	mailbox dataplane.Ref // Size 0: none
	told    uint64        // number of changes that were posted to it
	gone    func()        // called when conn is closed; may be nil
	polls   bool          // writes arrive when the subscriber polls (tcp)
}

func (s *subscriber) close() {
	s.conn.Close()
	if s.gone != nil {
		s.gone()
	}
}

// Bounds for the work that change does itself.
const (
	// directMost is the largest number of subscribers that change notifies itself: one pass over them takes about as
	// long as waking another goroutine.
	directMost = 4096
	// directEvery is the shortest time between two such passes. Changes in between are written together.
	directEvery = time.Millisecond
)

// notifier writes changes into mailboxes. The goroutine that reports a change writes it to all subscribers at once, in
// one pass of asynchronous writes, without waking another goroutine. Changes that follow closely are left to run, which
// posts the newest state for all of them. A subscriber with earlier writes still in progress is skipped and gets the
// newest state later. A subscriber whose connection has failed is dropped. So a slow or dead subscriber delays no
// other.
type notifier struct {
	wake chan struct{} // capacity 1: work for run

	passing sync.Mutex // one pass at a time; taken before mu
	passed  time.Time  // end of the last pass, under passing

	mu   sync.Mutex
	box  board.Mailbox
	subs map[*subscriber]struct{}
	dead []*subscriber // removed from subs; run closes them, which may take a moment
}

func newNotifier(epoch uint64) *notifier {
	return &notifier{wake: make(chan struct{}, 1), box: board.Mailbox{Epoch: epoch}, subs: map[*subscriber]struct{}{}}
}

// change records a change and writes it, or leaves that to run. It does not block.
func (n *notifier) change(c board.Change) {
	n.mu.Lock()
	n.box.Changes++
	copy(n.box.Latest[1:], n.box.Latest[:])
	n.box.Latest[0] = c
	few := len(n.subs) <= directMost
	n.mu.Unlock()
	if few && n.passing.TryLock() {
		late := time.Since(n.passed) >= directEvery
		behind := late && n.pass()
		n.passing.Unlock()
		if late && !behind {
			return
		}
	}
	n.poke()
}

func (n *notifier) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// changes returns the number of changes so far.
func (n *notifier) changes() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.box.Changes
}

func (n *notifier) add(s *subscriber) {
	n.mu.Lock()
	n.subs[s] = struct{}{}
	n.mu.Unlock()
	n.poke()
}

// post updates every mailbox that accepts a write, and closes dropped subscribers. behind is true if some mailboxes
// must wait.
func (n *notifier) post() (behind bool) {
	n.passing.Lock()
	behind = n.pass()
	n.passing.Unlock()
	n.mu.Lock()
	dead := n.dead
	n.dead = nil
	n.mu.Unlock()
	for _, s := range dead {
		s.close()
	}
	return behind
}

// pass writes the current state to every mailbox that accepts a write and does not have it yet. The caller holds
// passing.
func (n *notifier) pass() (behind bool) {
	n.mu.Lock()
	box := n.box
	subs := make([]*subscriber, 0, len(n.subs))
	for s := range n.subs {
		subs = append(subs, s)
	}
	n.mu.Unlock()
	var line [board.MailboxSize]byte
	box.Encode(line[:])
	for _, s := range subs {
		// A new subscriber gets the current state, so that it knows the epoch and the number to count from.
		if s.mailbox.Size == 0 || s.told == box.Changes+1 {
			continue
		}
		switch err := s.conn.Post(line[:], s.mailbox.Addr, s.mailbox.Key); {
		case err == nil:
			s.told = box.Changes + 1
		case errors.Is(err, dataplane.ErrBusy):
			behind = behind || !s.polls // a subscriber that polls may take long, so sweep tries again
		default:
			n.drop(s)
		}
	}
	n.passed = time.Now()
	return behind
}

// sweep drops subscribers whose connection has failed, and writes to the polling subscribers that were skipped.
func (n *notifier) sweep() {
	late := false
	n.mu.Lock()
	subs := make([]*subscriber, 0, len(n.subs))
	for s := range n.subs {
		subs = append(subs, s)
	}
	n.mu.Unlock()
	for _, s := range subs {
		if s.conn.Err() != nil {
			n.drop(s)
		} else if _, err := s.conn.Posted(); err != nil {
			n.drop(s)
		} else if s.polls {
			late = true
		}
	}
	if late {
		n.poke()
	}
}

// drop removes a subscriber and leaves closing it to post.
func (n *notifier) drop(s *subscriber) {
	n.mu.Lock()
	if _, there := n.subs[s]; there {
		delete(n.subs, s)
		n.dead = append(n.dead, s)
	}
	n.mu.Unlock()
	n.poke()
}

// count returns the number of subscribers.
func (n *notifier) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.subs)
}

// close drops and closes all subscribers.
func (n *notifier) close() {
	n.mu.Lock()
	subs, dead := n.subs, n.dead
	n.subs, n.dead = map[*subscriber]struct{}{}, nil
	n.mu.Unlock()
	for s := range subs {
		s.close()
	}
	for _, s := range dead {
		s.close()
	}
}
