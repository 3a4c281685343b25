package board

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// local is a board in this process. tear, if set, may spoil what was read.
type local struct {
	b     []byte
	tear  func(b []byte, offset uint64)
	bytes int
	reads int
}

func (m *local) Read(b []byte, offset uint64) error {
	if offset+uint64(len(b)) > uint64(len(m.b)) {
		return fmt.Errorf("%d bytes at %d of %d", len(b), offset, len(m.b))
	}
	copy(b, m.b[offset:])
	m.reads++
	m.bytes += len(b)
	if m.tear != nil {
		m.tear(b, offset)
	}
	return nil
}

func (m *local) Size() uint64 { return uint64(len(m.b)) }

var clock = time.Unix(1_700_000_000, 0)

func newBoard(t testing.TB, slots int) (*Table, *local) {
	t.Helper()
	h, err := NewHeader(7, slots, 1000)
	if err != nil {
		t.Fatal(err)
	}
	m := &local{b: make([]byte, h.Size())}
	table, err := NewTable(m.b, h)
	if err != nil {
		t.Fatal(err)
	}
	return table, m
}

func executor(i int) (*Identity, *Line) {
	id := &Identity{Incarnation: [16]byte{byte(i), byte(i >> 8), 1}, Node: fmt.Sprintf("n%d", i), NodeID: fmt.Sprintf("boot/%d", i), Control: fmt.Sprintf("n%d:7465", i)}
	return id, &Line{Beat: 1, Incarnation: ShortIncarnation(id.Incarnation), Written: clock, Cores: 8, FreeCores: 8, MemoryMiB: 100, FreeMiB: 100, State: Open, Providers: SHM | Verbs}
}

func take(t testing.TB, table *Table, i int, change func(*Line)) uint32 {
	t.Helper()
	id, l := executor(i)
	if change != nil {
		change(l)
	}
	slot, err := table.Take(id, l)
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

func newReader(t testing.TB, m Memory, node string) *Reader {
	t.Helper()
	r, err := NewReader(m, node)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

var one = Need{Cores: 1, Local: SHM | Verbs, Remote: Verbs}

func TestSlots(t *testing.T) {
	table, m := newBoard(t, 9) // 16
	for i := range 16 {
		if slot := take(t, table, i, nil); slot != uint32(i) {
			t.Errorf("executor %d has slot %d", i, slot)
		}
	}
	id, l := executor(99)
	if _, err := table.Take(id, l); !errors.Is(err, ErrFull) {
		t.Errorf("%v", err)
	}
	for _, s := range []uint32{3, 15, 9, 14, 3, 77} {
		table.Release(s)
	}
	if got := table.Header().Used; got != 14 {
		t.Errorf("%d slots used", got)
	}
	if a, b, c := take(t, table, 20, nil), take(t, table, 21, nil), take(t, table, 22, nil); a != 3 || b != 9 || c != 14 {
		t.Errorf("slots %d %d %d, want the lowest free ones", a, b, c)
	}
	r := newReader(t, m, "boot/20")
	if !slices.Equal(r.local, []uint32{3}) {
		t.Errorf("the executor of this node is in slots %v", r.local)
	}
	lines, err := r.All()
	if err != nil || len(lines) != 15 {
		t.Errorf("%d lines, %v", len(lines), err)
	}
	line, err := r.Line(3)
	if err != nil {
		t.Fatal(err)
	}
	who, err := r.Identity(&line)
	if err != nil || who.Control != "n20:7465" {
		t.Errorf("%+v %v", who, err)
	}
	before := r.Reads()
	if _, err := r.Identity(&line); err != nil || r.Reads() != before {
		t.Errorf("reloaded the identity: %v", err)
	}
	old := line
	table.Release(3)
	ghost := old // of one that does not know yet
	ghost.Encode(table.line(3))
	ghost.Encode(table.line(15)[:LineSize])
	if late := table.Tidy(); len(late) != 1 || late[0] != (Change{Slot: 3, Incarnation: uint32(old.Incarnation), State: Left}) {
		t.Errorf("late writers: %+v", late)
	}
	if late := table.Tidy(); late != nil {
		t.Errorf("late writers again: %+v", late)
	}
	for _, s := range []uint32{3, 15} {
		if l, err := table.ReadLine(s); err != nil || l.State != Empty {
			t.Errorf("%+v %v", l, err)
		}
	}
	if l, err := table.ReadLine(9); err != nil || l.State != Open {
		t.Errorf("%+v %v", l, err)
	}
	take(t, table, 23, nil)
	if _, err := newReader(t, m, "").Identity(&old); !errors.Is(err, ErrGone) {
		t.Errorf("the identity of another: %v", err)
	}
	// A reader that knows the identity of the slot's earlier executor notices by the line that it is stale, and reads the new one.
	if line, err = r.Line(3); err != nil {
		t.Fatal(err)
	}
	before = r.Reads()
	if who, err := r.Identity(&line); err != nil || who.Control != "n23:7465" || r.Reads() != before+1 {
		t.Errorf("after a change of the slot's executor: %+v %v, %d reads", who, err, r.Reads()-before)
	}
	table.Release(3)
	if _, err := newReader(t, m, "").Identity(&old); !errors.Is(err, ErrGone) {
		t.Errorf("the identity of nobody: %v", err)
	}
}

// The manager's mark does not hide a write that came after the line was judged.
func TestMark(t *testing.T) {
	table, _ := newBoard(t, 8)
	slot := take(t, table, 1, nil)
	seen, err := table.ReadLine(slot)
	if err != nil {
		t.Fatal(err)
	}
	next := seen
	next.Beat++
	table.WriteLine(&next)
	if table.Mark(seen, Silent) {
		t.Error("marked what has been written since")
	}
	if l, err := table.ReadLine(slot); err != nil || l.State != Open {
		t.Errorf("%+v %v", l, err)
	}
	if !table.Mark(next, Silent) {
		t.Error("not marked")
	}
	if l, err := table.ReadLine(slot); err != nil || l.State != Silent || l.Beat != next.Beat {
		t.Errorf("%+v %v", l, err)
	}
}

func TestPick(t *testing.T) {
	table, m := newBoard(t, 64)
	for i := range 40 {
		take(t, table, i, func(l *Line) {
			switch i {
			case 5:
				l.State = Draining
			case 6:
				l.State = Silent
			case 7:
				l.Providers = SHM // of another node: not reachable
			case 8:
				l.FreeCores = 0
			}
		})
	}
	never := map[uint32]bool{5: true, 6: true, 7: true, 8: true}
	r := newReader(t, m, "boot/nowhere")
	got := map[uint32]int{}
	for range 4000 {
		c, err := r.Pick(one, nil, clock, 1)
		if err != nil {
			t.Fatal(err)
		}
		if never[c.Line.Slot] || c.Local {
			t.Fatalf("picked %+v", c)
		}
		got[c.Line.Slot]++
	}
	if len(got) != 36 {
		t.Errorf("only %d of 36 executors were ever picked", len(got))
	}
	// This node first, also by what only this node can use; then others when it has refused.
	r = newReader(t, m, "boot/7")
	for range 50 {
		if c, err := r.Pick(one, nil, clock, 1); err != nil || !c.Local || c.Line.Slot != 7 {
			t.Fatalf("%+v %v", c, err)
		}
		if c, err := r.Pick(one, map[uint32]bool{7: true}, clock, 1); err != nil || c.Local {
			t.Fatalf("%+v %v", c, err)
		}
	}
	r = newReader(t, m, "boot/8") // this node is full
	if c, err := r.Pick(one, nil, clock, 8); err != nil || c.Local {
		t.Errorf("%+v %v", c, err)
	}
	if _, err := r.Pick(Need{Cores: 9, Remote: Verbs}, nil, clock, 99); !errors.Is(err, ErrNone) {
		t.Errorf("%v", err)
	}
	if _, err := r.Pick(Need{Cores: 1}, nil, clock, 99); !errors.Is(err, ErrNone) {
		t.Errorf("%v", err)
	}
	if _, err := r.Pick(Need{Cores: 1, MemoryMiB: 101, Remote: Verbs}, nil, clock, 99); !errors.Is(err, ErrNone) {
		t.Errorf("%v", err)
	}
	// A line that is old by the clock is taken only when there is no other.
	if c, err := r.Pick(one, nil, clock.Add(time.Hour), 99); err != nil || c.Line.Slot == 8 {
		t.Errorf("all are doubtful: %+v %v", c, err)
	}
	l, _ := table.ReadLine(20)
	l.Written, l.Beat = clock.Add(time.Hour), 2
	table.WriteLine(&l)
	for range 20 {
		if c, err := r.Pick(one, nil, clock.Add(time.Hour), 99); err != nil || c.Line.Slot != 20 {
			t.Fatalf("%+v %v", c, err)
		}
	}
	empty, me := newBoard(t, 8)
	if _, err := newReader(t, me, "").Pick(one, nil, clock, 3); !errors.Is(err, ErrNone) {
		t.Errorf("%v", err)
	}
	take(t, empty, 1, nil)
}

// The better of two: more free cores, and above that one that stays.
func TestPickIsTheBetterOfTwo(t *testing.T) {
	table, m := newBoard(t, 8)
	take(t, table, 0, func(l *Line) { l.FreeCores = 8; l.Until = clock.Add(time.Minute) })
	take(t, table, 1, func(l *Line) { l.FreeCores = 2; l.Until = clock.Add(time.Hour) })
	r := newReader(t, m, "")
	for range 50 {
		if c, err := r.Pick(Need{Cores: 1, Remote: Verbs, For: 10 * time.Minute}, nil, clock, 1); err != nil || c.Line.Slot != 1 {
			t.Fatalf("%+v %v", c, err)
		}
		if c, err := r.Pick(Need{Cores: 1, Remote: Verbs, For: time.Second}, nil, clock, 1); err != nil || c.Line.Slot != 0 {
			t.Fatalf("%+v %v", c, err)
		}
	}
}

// With many clients, each of whom sees what the one before took, the fullest executor is little fuller than the mean.
func TestPickBalances(t *testing.T) {
	table, m := newBoard(t, 1000)
	for i := range 1000 {
		take(t, table, i, func(l *Line) { l.Cores, l.FreeCores = 1000, 1000 })
	}
	r := newReader(t, m, "")
	for range 10_000 {
		c, err := r.Pick(one, nil, clock, 1)
		if err != nil {
			t.Fatal(err)
		}
		l := c.Line
		l.FreeCores--
		table.WriteLine(&l)
	}
	lines, err := r.All()
	if err != nil {
		t.Fatal(err)
	}
	least := slices.MinFunc(lines, func(a, b Line) int { return int(a.FreeCores) - int(b.FreeCores) })
	if taken := 1000 - least.FreeCores; taken > 20 { // purely random: about 22 to 25
		t.Errorf("one executor got %d of 10000 leases, the mean is 10", taken)
	}
}

// The bytes and reads of a decision do not depend on how many executors there are, nor do those of looking up an executor that was not read before.
func TestPickCost(t *testing.T) {
	cost := func(n int) (bytes, reads int) {
		table, m := newBoard(t, n)
		for i := range n {
			take(t, table, i, nil)
		}
		r := newReader(t, m, "boot/3")
		l, _ := table.ReadLine(3)
		l.FreeCores = 0 // look elsewhere
		table.WriteLine(&l)
		m.bytes, m.reads = 0, 0
		if _, err := r.Pick(one, nil, clock, 1); err != nil {
			t.Fatal(err)
		}
		return m.bytes, m.reads
	}
	b10, r10 := cost(10)
	b10k, r10k := cost(10_000)
	if b10 != b10k || r10 != r10k || r10 > 2 || b10 != 576 {
		t.Errorf("%d bytes in %d reads with 10 executors, %d bytes in %d reads with 10000", b10, r10, b10k, r10k)
	}
	for _, n := range []int{10, 10_000} {
		table, m := newBoard(t, n)
		for i := range n {
			take(t, table, i, nil)
		}
		for _, self := range []string{"boot/3", ""} { // an executor on this node, or any other
			r := newReader(t, m, self)
			m.bytes, m.reads = 0, 0
			choice, err := r.Pick(one, nil, clock, 1)
			if err == nil {
				_, err = r.Identity(&choice.Line)
			}
			want := IdentitySize + LineSize
			if self == "" {
				want = IdentitySize + GroupLines*LineSize
			}
			if err != nil || m.reads != 2 || m.bytes != want {
				t.Errorf("%d executors, node %q: %d bytes in %d reads, want %d in 2 (%v)", n, self, m.bytes, m.reads, want, err)
			}
		}
	}
}

// Reads that are torn anywhere are repeated, never believed.
func TestTornReads(t *testing.T) {
	table, m := newBoard(t, 64)
	for i := range 40 {
		take(t, table, i, nil)
	}
	r := rand.New(rand.NewPCG(3, 4))
	m.tear = func(b []byte, _ uint64) {
		if r.IntN(3) == 0 {
			b[r.IntN(len(b))] ^= byte(1 + r.IntN(255))
		}
	}
	var reader *Reader
	for try := 0; ; try++ {
		var err error
		if reader, err = NewReader(m, "boot/9"); err == nil {
			break
		}
		if !errors.Is(err, ErrTorn) || try > 100 {
			t.Fatal(err)
		}
	}
	for range 3000 {
		c, err := reader.Pick(one, nil, clock, 1)
		if err != nil {
			t.Fatal(err)
		}
		if c.Line.FreeCores != 8 || c.Line.Slot >= 40 || c.Line.Incarnation&0xff != uint64(c.Line.Slot) {
			t.Fatalf("%+v", c.Line)
		}
		clear(reader.known)
		who, err := reader.Identity(&c.Line)
		if err == nil && who.Control != fmt.Sprintf("n%d:7465", c.Line.Slot) {
			t.Fatalf("%+v", who)
		} else if err != nil && !errors.Is(err, ErrTorn) {
			t.Fatal(err)
		}
	}
	// A writer that died in the middle of a record: it stays torn, and costs a reader no more than a few reads.
	m.tear = nil
	table.line(9)[5] ^= 1
	before := reader.Reads()
	if _, err := reader.Line(9); !errors.Is(err, ErrTorn) || reader.Reads()-before != tornTries {
		t.Errorf("%v after %d reads", err, reader.Reads()-before)
	}
	if c, err := reader.Pick(one, nil, clock, 8); err != nil || c.Local {
		t.Errorf("%+v %v", c, err)
	}
	lines, err := reader.All()
	if err != nil || len(lines) != 39 {
		t.Errorf("%d lines, %v", len(lines), err)
	}
	if _, err := reader.Line(1000); !errors.Is(err, ErrLayout) {
		t.Errorf("%v", err)
	}
	m.b = m.b[:100]
	if _, err := reader.Pick(one, nil, clock, 1); err == nil {
		t.Error("read outside of the board")
	}
}

// A node's executors are found by its id at any load of the index.
func TestIndex(t *testing.T) {
	table, m := newBoard(t, 2000)
	for i := range 2000 {
		take(t, table, i, nil)
	}
	found := 0
	for i := range 2000 {
		r := newReader(t, m, fmt.Sprintf("boot/%d", i))
		if slices.Contains(r.local, uint32(i)) {
			found++
		}
		if len(r.local) > 2 {
			t.Errorf("node %d has slots %v", i, r.local)
		}
	}
	if found < 1990 {
		t.Errorf("only %d of 2000 are found", found)
	}
	for i := range 2000 {
		table.Release(uint32(i))
	}
	for b := range table.head.Buckets {
		if e := table.readBucket(b); len(e) > 0 {
			t.Fatalf("bucket %d keeps %v", b, e)
		}
	}
}

func BenchmarkPick(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			table, m := newBoard(b, n)
			for i := range n {
				take(b, table, i, nil)
			}
			r := newReader(b, m, "")
			for b.Loop() {
				if _, err := r.Pick(one, nil, clock, 1); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
