package manager

import (
	"errors"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// subscriber is a client process that reads the board, and is told of changes if it has a mailbox.
type subscriber struct {
	conn    *dataplane.Conn
	mailbox dataplane.Ref // Size 0: none
	told    uint64        // changes that have been posted to it
	gone    func()        // called when conn is closed; nil: nobody wants to know
}

func (s *subscriber) close() {
	s.conn.Close()
	if s.gone != nil {
		s.gone()
	}
}

// Bounds of what a change does itself, before it returns.
const (
	// directMost is to how many subscribers it writes: a pass over them takes about as long as waking somebody else would.
	directMost = 4096
	// directEvery is how long after a pass the next one may begin so: changes that come together are written together.
	directEvery = time.Millisecond
)

// notifier writes changes into mailboxes. A change is written to all subscribers at once, in one pass of writes that are not
// waited for, by whoever brings it: no other goroutine has to wake up for it. Only changes that follow closely on others are
// left to run, which then posts the newest state for all of them. A subscriber whose earlier writes are still under way is
// passed over and gets the newest state later, and one whose connection is over is dropped. So a slow or dead one delays
// nobody.
type notifier struct {
	wake chan struct{} // capacity 1: run has something to do

	passing sync.Mutex // one pass at a time; taken before mu
	passed  time.Time  // when the last one ended, under passing

	mu   sync.Mutex
	box  board.Mailbox
	subs map[*subscriber]struct{}
	dead []*subscriber // not in subs any more; run closes them, which may take a moment
}

func newNotifier(epoch uint64) *notifier {
	return &notifier{wake: make(chan struct{}, 1), box: board.Mailbox{Epoch: epoch}, subs: map[*subscriber]struct{}{}}
}

// change notes a change and writes it, or has it written; it does not block.
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

// post brings every mailbox up to date that takes it, closes what is over, and says whether some must wait.
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

// pass writes the present state to every mailbox that takes it and does not have it. Under passing.
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
	n.passed = time.Now()
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

// drop forgets a subscriber and has it closed.
func (n *notifier) drop(s *subscriber) {
	n.mu.Lock()
	if _, there := n.subs[s]; there {
		delete(n.subs, s)
		n.dead = append(n.dead, s)
	}
	n.mu.Unlock()
	n.poke()
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
