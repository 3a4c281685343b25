package manager

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/link"
)

// simClient is a client of a site.
type simClient struct {
	s      *site
	tenant string
	r      *rand.Rand

	c      *link.Client // nil: none
	board  *board.Reader
	epoch  uint64        // of the manager that the mailbox showed last
	epochs atomic.Uint64 // that it has shown

	used            accounting.Use
	leases, refused uint64
}

// chargesOfALease is how often a lease is charged.
const chargesOfALease = 20

func (c *simClient) close() {
	if c.c != nil {
		c.c.Close()
		c.c = nil
	}
}

// attach connects to the board if there is no connection, and says what the mailbox shows.
func (c *simClient) attach() (board.Mailbox, error) {
	if c.c != nil && c.c.Err() != nil {
		c.close()
	}
	if c.c == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		var err error
		if c.c, err = link.AttachClient(ctx, c.s.m, c.s.dev); err != nil {
			return board.Mailbox{}, err
		}
		if c.board, err = board.NewReader(c.c, ""); err != nil {
			c.close()
			return board.Mailbox{}, err
		}
	}
	box, err := c.c.Mailbox()
	if err == nil && box.Epoch != 0 && box.Epoch != c.epoch {
		c.epoch = box.Epoch
		c.epochs.Add(1)
	}
	return box, err
}

// place finds an executor that grants a lease; nil: none just now.
func (c *simClient) place() (*simExecutor, *simLease, error) {
	if _, err := c.attach(); err != nil {
		return nil, nil, err
	}
	refused := map[uint32]bool{}
	for range 8 {
		choice, err := c.board.Pick(board.Need{Cores: 1, Remote: board.Verbs}, refused, time.Now(), 8)
		if errors.Is(err, board.ErrNone) {
			return nil, nil, c.board.Refresh()
		}
		if err != nil {
			return nil, nil, err
		}
		id, err := c.board.Identity(&choice.Line)
		if errors.Is(err, board.ErrGone) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		e := c.s.executors[id.Control]
		if e == nil {
			return nil, nil, fmt.Errorf("the board has an executor %q that nobody registered", id.Control)
		}
		if l := e.grant(c.tenant); l != nil {
			return e, l, nil
		}
		c.refused++
		refused[choice.Line.Slot] = true
	}
	return nil, nil, nil
}

// work holds leases until there are enough charges. Without a manager no new lease is found, but one that is held is used on.
func (c *simClient) work() error {
	for end := time.Now().Add(2 * patience); !c.s.done(); {
		if time.Now().After(end) {
			return fmt.Errorf("%d charges after %v", c.s.charges.Load(), 2*patience)
		}
		e, l, err := c.place()
		if err != nil {
			c.close()
		}
		if l == nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		c.leases++
		for made := 0; made < chargesOfALease && time.Now().Before(end); {
			k, n := accounting.Counter(c.r.IntN(accounting.NumCounters)), 1+c.r.Uint64N(1000)
			c.used[k] += n
			if err := e.charge(l, k, n); err != nil {
				time.Sleep(20 * time.Millisecond)
				continue
			}
			c.s.charged()
			made++
		}
		e.release(l)
	}
	return nil
}

// told waits until the mailbox has so many changes, the last of them to a state.
func (c *simClient) told(changes uint64, s board.State) error {
	var box board.Mailbox
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if box, err = c.attach(); err == nil && box.Changes >= changes && box.Latest[0].State == s {
			return nil
		}
	}
	return fmt.Errorf("after %v the mailbox is %+v, want %d changes, the last to %v: %w", patience, box, changes, s, err)
}
