package manager

import (
	"errors"
	"sync"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// subscriber is a client process that reads the board, and is told of changes if it has a mailbox.
type subscriber struct {
	conn    *dataplane.Conn
	mailbox dataplane.Ref // Size 0: none
	told    uint64        // changes that have been posted to it
}

// notifier writes changes into mailboxes. A change is put down by any goroutine without waiting; one goroutine (run) posts
// the newest state to every subscriber that does not have it. Posting does not wait either: a subscriber whose earlier
// writes are still under way is passed over and gets the newest state later, and one whose connection is over is
// dropped. So a slow or dead one delays nobody.
type notifier struct {
	wake chan struct{} // capacity 1

	mu   sync.Mutex
	box  board.Mailbox
	subs map[*subscriber]struct{}
}

func newNotifier(epoch uint64) *notifier {
	return &notifier{wake: make(chan struct{}, 1), box: board.Mailbox{Epoch: epoch}, subs: map[*subscriber]struct{}{}}
}

// change notes a change; it does not block.
func (n *notifier) change(c board.Change) {
	n.mu.Lock()
	n.box.Changes++
	copy(n.box.Latest[1:], n.box.Latest[:])
	n.box.Latest[0] = c
	n.mu.Unlock()
	n.poke()
}

func (n *notifier) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// changes is how many there have been.
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

// post brings every mailbox up to date that takes it, and says whether some must wait.
func (n *notifier) post() (behind bool) {
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
		// A new subscriber gets the state as it is, so that it knows the epoch and from where to count.
		if s.mailbox.Size == 0 || s.told == box.Changes+1 {
			continue
		}
		switch err := s.conn.Post(line[:], s.mailbox.Addr, s.mailbox.Key); {
		case err == nil:
			s.told = box.Changes + 1
		case errors.Is(err, dataplane.ErrBusy):
			behind = true
		default:
			n.drop(s)
		}
	}
	return behind
}

// sweep drops subscribers that are gone.
func (n *notifier) sweep() {
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
		}
	}
}

func (n *notifier) drop(s *subscriber) {
	n.mu.Lock()
	delete(n.subs, s)
	n.mu.Unlock()
	s.conn.Close()
}

// count is how many subscribers there are.
func (n *notifier) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.subs)
}

// close drops everybody.
func (n *notifier) close() {
	n.mu.Lock()
	subs := n.subs
	n.subs = map[*subscriber]struct{}{}
	n.mu.Unlock()
	for s := range subs {
		s.conn.Close()
	}
}
