package grant

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
)

// near is a board in this process. fail, if set, says which reads do not succeed.
type near struct {
	b    []byte
	fail func(offset uint64) error
}

func (m *near) Read(b []byte, offset uint64) error {
	if m.fail != nil {
		if err := m.fail(offset); err != nil {
			return err
		}
	}
	copy(b, m.b[offset:])
	return nil
}

func (m *near) Size() uint64 { return uint64(len(m.b)) }

// told is a manager without a process: its table, the mailbox as it would be written, and one subscriber.
type told struct {
	t     *testing.T
	mem   *near
	table *board.Table
	box   board.Mailbox
	r     *board.Reader
	w     Changes
}

func newTold(t *testing.T) *told {
	h, err := board.NewHeader(7, 8, 1000)
	if err != nil {
		t.Fatal(err)
	}
	w := &told{t: t, mem: &near{b: make([]byte, h.Size())}, box: board.Mailbox{Epoch: 7}, w: Changes{known: map[uint32]seenExecutor{}}}
	if w.table, err = board.NewTable(w.mem.b, h); err != nil {
		t.Fatal(err)
	}
	if w.r, err = board.NewReader(w.mem, ""); err != nil {
		t.Fatal(err)
	}
	return w
}

// tell writes what the manager writes into a mailbox.
func (w *told) tell(l *board.Line, s board.State) {
	w.box.Changes++
	copy(w.box.Latest[1:], w.box.Latest[:])
	w.box.Latest[0] = board.Change{Slot: l.Slot, Incarnation: uint32(l.Incarnation), State: s}
}

// come has executor i take a slot.
func (w *told) come(i byte) *board.Line {
	w.t.Helper()
	id := &board.Identity{Incarnation: [16]byte{i}, Node: "n", NodeID: "boot/1", Control: fmt.Sprintf("n:%d", i)}
	l := &board.Line{Beat: 1, Incarnation: board.ShortIncarnation(id.Incarnation), Written: time.Unix(1e9, 0), Cores: 1, State: board.Open}
	if _, err := w.table.Take(id, l); err != nil {
		w.t.Fatal(err)
	}
	w.tell(l, board.Open)
	return l
}

func (w *told) leave(l *board.Line) {
	w.table.Release(l.Slot)
	w.tell(l, board.Left)
}

func (w *told) want(changes ...string) {
	w.t.Helper()
	found, err := w.w.poll(&w.box, w.r)
	var got []string
	for _, c := range found {
		got = append(got, c.Address+" "+c.State.String())
	}
	if !slices.Equal(got, changes) || err != nil {
		w.t.Errorf("got %q and %v, want %q", got, err, changes)
	}
}

func TestChangesOfABoard(t *testing.T) {
	w := newTold(t)
	w.want()
	a, b := w.come(1), w.come(2)
	w.want("n:1 open", "n:2 open")
	w.want()
	// What it writes once more after it has left changes nothing, now and when the next has its slot.
	w.leave(a)
	w.table.WriteLine(a)
	w.want("n:1 left")
	w.want()
	c := w.come(3)
	if c.Slot != a.Slot {
		t.Fatalf("slots %d and %d", a.Slot, c.Slot)
	}
	w.want("n:3 open")
	// One executor deregisters, and another one gets its slot before the reader looks.
	w.leave(b)
	w.come(4)
	w.want("n:2 left", "n:4 open")
	// Also where the one that has left writes over the line of the next, which the manager mends.
	w.leave(c)
	d := w.come(9)
	w.table.WriteLine(c)
	w.want("n:3 left")
	w.table.WriteLine(d)
	w.tell(d, board.Open)
	w.want("n:9 open")
	w.leave(d)
	c = w.come(3)
	w.want("n:9 left", "n:3 open")
	// One leaves and comes again as itself.
	w.leave(c)
	c = w.come(3)
	w.want()
	w.leave(c)
	w.want("n:3 left")
	c = w.come(3)
	w.want("n:3 open")
	// More than a mailbox shows.
	w.leave(c)
	for i := range byte(4) {
		w.come(5 + i)
	}
	w.want("n:3 left", "n:5 open", "n:6 open", "n:7 open", "n:8 open")
}

// A poll that fails in the middle has shown nothing, and the next one shows everything.
func TestChangesAfterAFailedPoll(t *testing.T) {
	w := newTold(t)
	a := w.come(1)
	w.want("n:1 open")
	w.leave(a)
	w.come(2)
	b := w.come(3)
	broken := errors.New("broken")
	head := w.r.Header()
	w.mem.fail = func(offset uint64) error {
		if offset == head.IdentityOffset(b.Slot) {
			return broken
		}
		return nil
	}
	if found, err := w.w.poll(&w.box, w.r); !errors.Is(err, broken) || found != nil || !strings.Contains(err.Error(), "slot 1") {
		t.Errorf("%v %v", found, err)
	}
	w.mem.fail = nil
	w.want("n:1 left", "n:2 open", "n:3 open")
}
