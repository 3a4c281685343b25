package board

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
)

// Table is the manager's side of a board: it hands out slots and writes what executors do not write themselves. It owns no
// memory. Not safe for concurrent use; lines may be written from afar meanwhile.
type Table struct {
	mem   []byte
	head  Header
	slots []string // node id of the executor that has the slot; "" and !taken: free
	taken []bool
	free  []uint32 // released slots below head.Used, ascending
	high  uint32   // slots that were ever used
}

// ErrFull is a board without a free slot.
var ErrFull = errors.New("the board is full")

// NewTable lays a board out in zeroed memory of at least h.Size() bytes.
func NewTable(mem []byte, h Header) (*Table, error) {
	if uint64(len(mem)) < h.Size() {
		return nil, fmt.Errorf("board: %d bytes, %d slots need %d", len(mem), h.Capacity, h.Size())
	}
	t := &Table{mem: mem, head: h, slots: make([]string, h.Capacity), taken: make([]bool, h.Capacity)}
	t.writeHeader()
	for b := range h.Buckets {
		t.writeBucket(b, nil)
	}
	return t, nil
}

// Header is the board's header as it stands.
func (t *Table) Header() Header { return t.head }

func (t *Table) writeHeader() { t.head.Encode(t.mem) }

func (t *Table) line(slot uint32) []byte {
	return t.mem[t.head.LineOffset(slot):][:LineSize]
}

// Take gives a slot to an executor and writes its identity, whose Slot it sets, its line and its entry of the index.
// Slots are handed out from below, so that the used ones stay close together.
func (t *Table) Take(id *Identity, l *Line) (uint32, error) {
	slot := t.head.Used
	switch {
	case len(t.free) > 0:
		slot = t.free[0]
	case slot == t.head.Capacity:
		return 0, fmt.Errorf("%w: %d slots", ErrFull, t.head.Capacity)
	}
	id.Slot, l.Slot = slot, slot
	var record [IdentitySize]byte
	if err := id.Encode(record[:]); err != nil {
		return 0, err
	}
	if len(t.free) > 0 {
		t.free = t.free[1:]
	} else {
		t.head.Used++
		t.high = max(t.high, t.head.Used)
	}
	t.taken[slot], t.slots[slot] = true, id.NodeID
	copy(t.mem[t.head.IdentityOffset(slot):], record[:])
	t.WriteLine(l)
	t.index(id.NodeID, slot)
	t.writeHeader()
	return slot, nil
}

// Release empties a slot. Nobody may write its line from afar any more.
func (t *Table) Release(slot uint32) {
	if slot >= t.head.Capacity || !t.taken[slot] {
		return
	}
	clear(t.line(slot))
	t.unindex(t.slots[slot], slot)
	clear(t.mem[t.head.IdentityOffset(slot):][:IdentitySize])
	t.taken[slot], t.slots[slot] = false, ""
	at, _ := slices.BinarySearch(t.free, slot)
	t.free = slices.Insert(t.free, at, slot)
	for len(t.free) > 0 && t.free[len(t.free)-1] == t.head.Used-1 {
		t.free = t.free[:len(t.free)-1]
		t.head.Used--
	}
	t.writeHeader()
}

// Tidy empties the lines of free slots, and returns the executors that have written to one. On shm, an executor may write once more
// before it learns that its rights have ended.
func (t *Table) Tidy() (late []Change) {
	for slot := range t.high {
		if !t.taken[slot] && !empty(t.line(slot)) {
			if l, err := t.ReadLine(slot); err == nil {
				late = append(late, Change{Slot: slot, Incarnation: uint32(l.Incarnation), State: Left})
			}
			clear(t.line(slot))
		}
	}
	return late
}

// WriteLine writes a line for an executor that does not write its own, or the first one.
func (t *Table) WriteLine(l *Line) {
	var b [LineSize]byte
	l.Encode(b[:])
	copy(t.line(l.Slot), b[:])
}

// ReadLine reads the line of a slot as an executor has written it.
func (t *Table) ReadLine(slot uint32) (Line, error) {
	var b [LineSize]byte
	copy(b[:], t.line(slot))
	return ParseLine(b[:], slot)
}

// Mark changes the state in a line, unless it has been written since l was read: then false.
func (t *Table) Mark(l Line, s State) bool {
	if now, err := t.ReadLine(l.Slot); err != nil || now.Beat != l.Beat || now.Incarnation != l.Incarnation {
		return false
	}
	l.State = s
	t.WriteLine(&l)
	return true
}

// Changed counts a change in the header.
func (t *Table) Changed(total uint64) {
	t.head.Changes = uint32(total)
	t.writeHeader()
}

// The index is a hash table of node ids. A bucket has 7 entries of (hash, slot + 1), 0 for none. A full bucket overflows into the
// next ones, up to indexReach buckets. The index is a hint: a client finds an executor that is not in it only by chance, and checks the
// identity behind each entry.
const indexReach = 4

type indexEntry struct{ hash, slot uint32 }

func hashNode(nodeID string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(nodeID))
	// FNV's low bits are good enough for the bucket, its high ones for telling entries apart.
	return h.Sum64()
}

func (h *Header) bucketOf(hash uint64, i uint32) uint32 { return (uint32(hash) + i) & (h.Buckets - 1) }

func parseBucket(b []byte) ([]indexEntry, error) {
	if !sealed(b[:BucketSize]) {
		return nil, fmt.Errorf("index: %w", ErrTorn)
	}
	var entries []indexEntry
	for i := range bucketEntries {
		e := indexEntry{binary.LittleEndian.Uint32(b[8*i:]), binary.LittleEndian.Uint32(b[8*i+4:])}
		if e.slot != 0 {
			e.slot--
			entries = append(entries, e)
		}
	}
	return entries, nil
}

func (t *Table) readBucket(b uint32) []indexEntry {
	entries, _ := parseBucket(t.mem[t.head.BucketOffset(b):][:BucketSize]) // nobody else writes it
	return entries
}

func (t *Table) writeBucket(b uint32, entries []indexEntry) {
	var record [BucketSize]byte
	for i, e := range entries {
		binary.LittleEndian.PutUint32(record[8*i:], e.hash)
		binary.LittleEndian.PutUint32(record[8*i+4:], e.slot+1)
	}
	seal(record[:])
	copy(t.mem[t.head.BucketOffset(b):], record[:])
}

func (t *Table) index(nodeID string, slot uint32) {
	hash := hashNode(nodeID)
	for i := range min(indexReach, t.head.Buckets) {
		b := t.head.bucketOf(hash, i)
		if entries := t.readBucket(b); len(entries) < bucketEntries {
			t.writeBucket(b, append(entries, indexEntry{uint32(hash >> 32), slot}))
			return
		}
	}
}

func (t *Table) unindex(nodeID string, slot uint32) {
	hash := hashNode(nodeID)
	for i := range min(indexReach, t.head.Buckets) {
		b := t.head.bucketOf(hash, i)
		entries := t.readBucket(b)
		if at := slices.Index(entries, indexEntry{uint32(hash >> 32), slot}); at >= 0 {
			t.writeBucket(b, slices.Delete(entries, at, at+1))
			return
		}
	}
}
