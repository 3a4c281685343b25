package zygote

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

const seedPage = 4096

// SeedCopy describes what a seed's file has. The rest of the file is zero.
type SeedCopy struct {
	Units    uint32        // of its heap
	Segments []SeedSegment // whole pages, in order. The bytes that each has are hashed by themselves, so that several CPUs can do it
	leaves   []byte        // hashes of all leaves (seedtree.go); nil: not known
}

// FileSize is the size of the file of a seed with such a heap.
func FileSize(units uint32) uint64 { return 2*uint64(units)*SeedUnit + seedData }

// Sum identifies the content.
func (c *SeedCopy) Sum() (sum [sha256.Size]byte) {
	h := sha256.New()
	_ = binary.Write(h, binary.LittleEndian, c.Units) // a hash returns no error
	for _, x := range c.Segments {
		_ = binary.Write(h, binary.LittleEndian, []uint64{x.Offset, x.Size})
		h.Write(x.Sum[:])
	}
	h.Sum(sum[:0])
	return sum
}

// Bytes is the sum of the sizes of the segments.
func (c *SeedCopy) Bytes() (n uint64) {
	for _, x := range c.Segments {
		n += x.Size
	}
	return n
}

// CopyMemory returns the bytes of memory that copying such a seed uses, in addition to the seed's own: the buffers of CopySeed or Fill, and what Fill notes about each leaf.
func (c *SeedCopy) CopyMemory() uint64 {
	const note = 4 // bytes for each leaf: valid, proved, seen and shown of a pager
	return hashersMost*hashBuffer(c.leafSize()) + uint64(c.count())*note
}

// Check checks a description that comes from another process.
func (c *SeedCopy) Check() error {
	if c.Units < SeedUnitsMin || c.Units > seedHeapMost/SeedUnit {
		return fmt.Errorf("a heap of %d units, want %d to %d", c.Units, SeedUnitsMin, seedHeapMost/SeedUnit)
	}
	if n := len(c.Segments); n < 1 || n > segmentsMost {
		return fmt.Errorf("%d segments, want 1 to %d", n, segmentsMost)
	}
	end, most := uint64(0), FileSize(c.Units)
	for i, x := range c.Segments {
		if x.Size == 0 || x.Offset%seedPage != 0 || x.Size%seedPage != 0 || x.Offset < end || x.Offset > most || x.Size > most-x.Offset {
			return fmt.Errorf("segment %d of %d bytes at %d, after %d, in a file of %d", i, x.Size, x.Offset, end, most)
		}
		end = x.Offset + x.Size
	}
	return nil
}

// Contents returns the hashed segments of the seed's file. Until a call has succeeded, each call hashes them again.
func (s *Seed) Contents(ctx context.Context) (*SeedCopy, error) {
	if c := s.contents.Load(); c != nil {
		return c, nil
	}
	if err := s.Whole(ctx); err != nil {
		return nil, err
	}
	found, err := s.find()
	if err != nil {
		return nil, err
	}
	c := &SeedCopy{Units: found.Units, Segments: slices.Clone(found.Segments)}
	if err := newCopying(ctx, s.File, c, nil).run(); err != nil {
		return nil, err
	}
	s.contents.Store(c)
	return c, nil
}

// Hashed reports whether Contents has succeeded.
func (s *Seed) Hashed() bool { return s.contents.Load() != nil }

// CopySeed makes a seed of the bytes of a copy's segments, which it reads in their order. It checks that they have the hashes of the copy. It returns when nothing reads
// any more. While bytes are read, earlier bytes are hashed and written.
func CopySeed(c *SeedCopy, from io.Reader) (*Seed, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	fd, err := fixedMemfd("rfaas-seed", int(FileSize(c.Units)), 0)
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memfd:rfaas-seed")
	defer f.Close()
	own := *c
	if err := newCopying(context.Background(), f, &own, from).run(); err != nil {
		return nil, err
	}
	s := &Seed{Units: c.Units}
	if err := s.seal(f); err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	s.contents.Store(&own)
	return s, nil
}

// copying copies the segments of a seed to a file, and checks their hashes. Without a source, the file has the segments already, and copying sets their hashes. Several goroutines
// take the parts of a source in turn. Each hashes its parts while others read or write. The executor runs Go code on one processor. So only system calls and C code run at the same time, and
// parts are large, so that each call takes long.
type copying struct {
	ctx  context.Context // ends the copying
	f    *os.File
	c    *SeedCopy
	leaf uint64
	left []atomic.Int64 // bytes of each segment that are not hashed yet
	at   []int          // where each segment's leaves are in c.leaves

	mu      sync.Mutex
	from    io.Reader // nil: no source
	segment int       // of the next part
	done    uint64    // offset of the next part in its segment
	err     error
}

// newCopying sets the size of the leaves of c.
func newCopying(ctx context.Context, f *os.File, c *SeedCopy, from io.Reader) *copying {
	x := &copying{ctx: ctx, f: f, c: c, leaf: c.leafSize(), from: from, left: make([]atomic.Int64, len(c.Segments)), at: make([]int, len(c.Segments)+1)}
	for i, s := range c.Segments {
		x.left[i].Store(int64(s.Size))
		x.at[i+1] = x.at[i] + leavesOf(s, x.leaf)*sha256.Size
	}
	c.leaves = make([]byte, x.at[len(c.Segments)])
	return x
}

func (x *copying) run() error {
	var copiers sync.WaitGroup
	// The first access to each page of a new buffer is a page fault. So small seeds have small buffers.
	size := min(hashBuffer(x.leaf), max(x.c.Bytes()/4/x.leaf*x.leaf, bufferLeast, x.leaf))
	most := min(uint64(max(runtime.NumCPU(), 2)), hashersMost, (x.c.Bytes()+size-1)/size)
	if x.from == nil { // the buffers of a copy are charged, but not those of hashing
		most = 1
	}
	for range most {
		copiers.Go(func() {
			var list []copyPart
			for buffer := make([]byte, size); ; {
				if list = x.read(buffer, list[:0]); len(list) == 0 {
					return
				}
				if err := x.put(list, buffer); err != nil {
					x.fail(err)
					return
				}
			}
		})
	}
	copiers.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.err
}

// fail keeps the first error. Nothing is read after it.
func (x *copying) fail(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err == nil {
		x.err = err
	}
}

// copyPart is a part of a segment. It begins with a leaf.
type copyPart struct {
	segment  int
	at, size uint64
}

// read takes the next parts, appends them to a list, and reads them from the source into a buffer, one after the other. No parts: nothing is left, or there was an error.
func (x *copying) read(buffer []byte, list []copyPart) []copyPart {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err == nil && x.segment < len(x.c.Segments) {
		x.err = context.Cause(x.ctx)
	}
	if x.err != nil {
		return nil
	}
	room := uint64(len(buffer))
	for x.segment < len(x.c.Segments) {
		left := x.c.Segments[x.segment].Size - x.done
		size := min(left, room/x.leaf*x.leaf)
		if size == 0 {
			break
		}
		list = append(list, copyPart{x.segment, x.done, size})
		room -= size
		if x.done += size; size == left {
			x.segment, x.done = x.segment+1, 0
		}
	}
	if x.from == nil {
		return list
	}
	if _, x.err = io.ReadFull(x.from, buffer[:uint64(len(buffer))-room]); x.err != nil {
		return nil
	}
	return list
}

// put hashes parts, which are in a buffer or in the file, and writes those of the buffer to the file. With the last part of a segment, it checks or sets the segment's hash.
func (x *copying) put(list []copyPart, buffer []byte) error {
	size := uint64(0)
	for _, p := range list {
		b := buffer[size:][:p.size]
		var err error
		if at := int64(x.c.Segments[p.segment].Offset + p.at); x.from == nil {
			_, err = x.f.ReadAt(b, at)
		} else {
			_, err = x.f.WriteAt(b, at)
		}
		if err != nil {
			return fmt.Errorf("seed: segment %d: %w", p.segment, err)
		}
		size += p.size
	}
	whole := x.leaf == seedPage // then no leaf is shorter than others, and one call hashes the leaves of all parts
	if whole {
		x.hash(list[0], buffer[:size])
	}
	for _, p := range list {
		if !whole {
			x.hash(p, buffer[:p.size])
			buffer = buffer[p.size:]
		}
		s, leaves := &x.c.Segments[p.segment], x.c.leaves[x.at[p.segment]:x.at[p.segment+1]]
		switch left := x.left[p.segment].Add(-int64(p.size)); {
		case left > 0:
		case x.from == nil:
			s.Sum = root(leaves)
		case root(leaves) != s.Sum:
			return wrongSum(p.segment, *s, leaves)
		}
	}
	return nil
}

// hash hashes the leaves of bytes that begin with a part.
func (x *copying) hash(p copyPart, b []byte) {
	to := x.c.leaves[x.at[p.segment]+int(p.at/x.leaf)*sha256.Size:]
	appendLeaves(to[:0], b, x.leaf)
}

// wrongSum is the error of a segment whose leaves have other hashes than announced.
func wrongSum(i int, x SeedSegment, leaves []byte) error {
	got := root(leaves)
	return fmt.Errorf("seed: segment %d was announced as SHA-256 %x, but the bytes have %x", i, x.Sum[:], got[:])
}

const (
	hashersMost = 4
	hashChunk   = 1 << 20
	bufferLeast = 256 << 10
)

// hashBuffer returns the size of a buffer for leaves.
func hashBuffer(leaf uint64) uint64 { return max(leaf, hashChunk) }
