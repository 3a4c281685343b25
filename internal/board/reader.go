package board

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Memory is a board that is somewhere else.
type Memory interface {
	// Read copies len(b) bytes from an offset on. What it copies may be torn.
	Read(b []byte, offset uint64) error
	// Size is how many bytes can be reached.
	Size() uint64
}

// tornTries is how often a torn record is read before it is given up: a writer that dies in the middle of one leaves it torn.
const tornTries = 8

// Reader is a client's side of a board. Not safe for concurrent use.
type Reader struct {
	mem   Memory
	head  Header
	self  string   // node id
	local []uint32 // slots of this node
	known map[uint32]*Identity
	rnd   *rand.Rand
	reads uint64
	buf   []byte
}

// NewReader reads the header and finds the executors of the node nodeID. Errors: ErrLayout, ErrTorn, and those of Memory.
func NewReader(m Memory, nodeID string) (*Reader, error) {
	r := &Reader{mem: m, self: nodeID, known: map[uint32]*Identity{}, rnd: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
		buf: make([]byte, max(GroupLines*LineSize, IdentitySize))}
	return r, r.Refresh()
}

// Header is the header as last read.
func (r *Reader) Header() Header { return r.head }

// Reads is how many reads the reader has made, in all.
func (r *Reader) Reads() uint64 { return r.reads }

func (r *Reader) read(b []byte, offset uint64) error {
	r.reads++
	if err := r.mem.Read(b, offset); err != nil {
		return fmt.Errorf("read board: %w", err)
	}
	return nil
}

// record reads until what it read is not torn.
func (r *Reader) record(size int, offset uint64, parse func([]byte) error) error {
	var err error
	for range tornTries {
		if err := r.read(r.buf[:size], offset); err != nil {
			return err
		}
		if err = parse(r.buf[:size]); !errors.Is(err, ErrTorn) {
			return err
		}
	}
	return err
}

// Refresh reads header and index again: after a change, and from time to time.
func (r *Reader) Refresh() error {
	err := r.record(HeaderSize, 0, func(b []byte) error {
		h, err := ParseHeader(b, r.mem.Size())
		if err == nil {
			if h.Epoch != r.head.Epoch {
				clear(r.known)
			}
			r.head = h
		}
		return err
	})
	if err != nil {
		return err
	}
	r.local = r.local[:0]
	if r.self == "" {
		return nil
	}
	hash := hashNode(r.self)
	for i := range min(indexReach, r.head.Buckets) {
		var entries []indexEntry
		err := r.record(BucketSize, r.head.BucketOffset(r.head.bucketOf(hash, i)), func(b []byte) (err error) {
			entries, err = parseBucket(b)
			return err
		})
		if err != nil && !errors.Is(err, ErrTorn) {
			return err
		}
		for _, e := range entries {
			if e.hash == uint32(hash>>32) && e.slot < r.head.Used {
				r.local = append(r.local, e.slot)
			}
		}
		if len(entries) < bucketEntries {
			break
		}
	}
	return nil
}

// Need is what a lease wants of one executor.
type Need struct {
	Cores     uint32
	MemoryMiB uint32
	Local     Providers     // usable if the executor is on this node
	Remote    Providers     // usable otherwise
	For       time.Duration // how long the node should stay; it may leave earlier than that
}

// Choice is where to ask for a lease.
type Choice struct {
	Line  Line
	Local bool // on this node
}

// ErrNone is a board on which no executor was found that fits.
var ErrNone = errors.New("no executor fits")

// Pick chooses an executor: one of this node if it has room, else the better of two random ones among those that fit in a
// random group of lines. Executors in refused are passed over. One attempt is at most two reads of together 576 bytes,
// however large the board; a group in which nothing fits is followed by the next, tries groups at most. now is this
// node's clock. ErrNone: nothing fits in what was read.
func (r *Reader) Pick(n Need, refused map[uint32]bool, now time.Time, tries int) (Choice, error) {
	heartbeat := time.Duration(r.head.HeartbeatMS) * time.Millisecond
	if n.Local != 0 {
		for _, slot := range r.local {
			if refused[slot] {
				continue
			}
			l, err := r.Line(slot)
			if err != nil && !errors.Is(err, ErrTorn) && !errors.Is(err, ErrLayout) {
				return Choice{}, err
			}
			if err == nil && n.fits(&l, n.Local) && !l.Stale(now, heartbeat) {
				return Choice{l, true}, nil
			}
			break // the next attempt may find another
		}
	}
	groups := (r.head.Used + GroupLines - 1) / GroupLines
	if groups == 0 || n.Remote == 0 && n.Local == 0 {
		return Choice{}, ErrNone
	}
	var doubtful []Line
	start := r.rnd.Uint32N(r.head.Used) / GroupLines
	for i := range min(uint32(max(tries, 1)), groups) {
		lines, err := r.group((start + i) % groups)
		if err != nil {
			return Choice{}, err
		}
		lines = slices.DeleteFunc(lines, func(l Line) bool { return refused[l.Slot] || !n.fits(&l, r.usable(n, l.Slot)) })
		fresh := slices.DeleteFunc(slices.Clone(lines), func(l Line) bool { return l.Stale(now, heartbeat) })
		if len(fresh) > 0 {
			return r.choice(r.better(n, fresh, now)), nil
		}
		doubtful = append(doubtful, lines...)
	}
	if len(doubtful) > 0 {
		return r.choice(r.better(n, doubtful, now)), nil
	}
	return Choice{}, ErrNone
}

func (r *Reader) choice(l Line) Choice { return Choice{l, slices.Contains(r.local, l.Slot)} }

func (r *Reader) usable(n Need, slot uint32) Providers {
	if slices.Contains(r.local, slot) {
		return n.Local
	}
	return n.Remote
}

func (n *Need) fits(l *Line, usable Providers) bool {
	return l.State == Open && l.FreeCores >= n.Cores && l.FreeMiB >= n.MemoryMiB && l.Providers&usable != 0
}

// better draws two lines and returns the one that stays long enough, or has more to give.
func (r *Reader) better(n Need, lines []Line, now time.Time) Line {
	a := lines[r.rnd.IntN(len(lines))]
	if len(lines) == 1 {
		return a
	}
	b := a
	for b.Slot == a.Slot {
		b = lines[r.rnd.IntN(len(lines))]
	}
	stays := func(l *Line) int {
		if l.Until.IsZero() || l.Until.Sub(now) >= n.For {
			return 1
		}
		return 0
	}
	if cmp.Or(cmp.Compare(stays(&a), stays(&b)), cmp.Compare(a.FreeCores, b.FreeCores), cmp.Compare(a.FreeMiB, b.FreeMiB)) < 0 {
		return b
	}
	return a
}

// group reads a group of lines, without those that are empty, torn or senseless.
func (r *Reader) group(g uint32) ([]Line, error) {
	b := r.buf[:GroupLines*LineSize]
	if err := r.read(b, r.head.LineOffset(g*GroupLines)); err != nil {
		return nil, err
	}
	var lines []Line
	for i := range uint32(GroupLines) {
		if l, err := ParseLine(b[i*LineSize:], g*GroupLines+i); err == nil && l.State != Empty {
			lines = append(lines, l)
		}
	}
	return lines, nil
}

// Line reads the line of a slot.
func (r *Reader) Line(slot uint32) (Line, error) {
	var l Line
	if slot >= r.head.Capacity {
		return l, fmt.Errorf("%w: slot %d of %d", ErrLayout, slot, r.head.Capacity)
	}
	err := r.record(LineSize, r.head.LineOffset(slot), func(b []byte) (err error) {
		l, err = ParseLine(b, slot)
		return err
	})
	return l, err
}

// ErrGone is an executor that has left its slot.
var ErrGone = errors.New("the executor is not there any more")

// Identity returns the identity of the executor that wrote a line. It is read once for each incarnation. ErrGone: the slot now belongs to
// another incarnation.
func (r *Reader) Identity(l *Line) (*Identity, error) {
	if i := r.known[l.Slot]; i != nil && ShortIncarnation(i.Incarnation) == l.Incarnation {
		return i, nil
	}
	if l.Slot >= r.head.Capacity {
		return nil, fmt.Errorf("%w: slot %d of %d", ErrLayout, l.Slot, r.head.Capacity)
	}
	var id Identity
	err := r.record(IdentitySize, r.head.IdentityOffset(l.Slot), func(b []byte) (err error) {
		if empty(b) {
			return ErrGone
		}
		id, err = ParseIdentity(b, l.Slot)
		return err
	})
	if err == nil && ShortIncarnation(id.Incarnation) != l.Incarnation {
		err = ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("slot %d: %w", l.Slot, err)
	}
	r.known[l.Slot] = &id
	return &id, nil
}

// All reads every line, for people: what it costs grows with the board. Torn lines are read again.
func (r *Reader) All() ([]Line, error) {
	if err := r.Refresh(); err != nil {
		return nil, err
	}
	var lines []Line
	for slot := uint32(0); slot < r.head.Used; slot += GroupLines {
		b := r.buf[:GroupLines*LineSize]
		if err := r.read(b, r.head.LineOffset(slot)); err != nil {
			return nil, err
		}
		var torn []uint32
		for i := range uint32(GroupLines) {
			switch l, err := ParseLine(b[i*LineSize:], slot+i); {
			case errors.Is(err, ErrTorn):
				torn = append(torn, slot+i)
			case err == nil && l.State != Empty:
				lines = append(lines, l)
			}
		}
		for _, s := range torn {
			if l, err := r.Line(s); err == nil && l.State != Empty {
				lines = append(lines, l)
			}
		}
	}
	return lines, nil
}
