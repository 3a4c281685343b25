package zygote

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
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
	return 2*min(c.Bytes(), readChunk) + hashersMost*hashBuffer(c.leafSize()) + uint64(c.count())*note
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

// Contents returns the hashed segments of the seed's file. Until a call has succeeded, each call finds and hashes them again.
func (s *Seed) Contents(ctx context.Context) (*SeedCopy, error) {
	if c := s.contents.Load(); c != nil {
		return c, nil
	}
	if err := s.Whole(ctx); err != nil {
		return nil, err
	}
	c, err := s.segments(ctx)
	if err != nil {
		return nil, err
	}
	s.contents.Store(c)
	return c, nil
}

// Hashed reports whether Contents has succeeded.
func (s *Seed) Hashed() bool { return s.contents.Load() != nil }

// CopySeed makes a seed of the bytes of a copy's segments, which it reads in their order. It checks that they have the hashes of the copy. It returns when nothing reads
// any more. While bytes are read, those before are written and hashed.
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
	check := startHashing(f, &own)
	err = fillSegments(f, c, readAhead(from, c.Bytes()), check.add)
	if herr := check.wait(); err == nil {
		err = herr
	}
	if err != nil {
		return nil, err
	}
	s := &Seed{Units: c.Units}
	if err := s.seal(f); err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	s.contents.Store(&own)
	return s, nil
}

// readChunk is how much is read at a time.
const readChunk = 1 << 20

// ahead reads from a reader while the caller uses earlier bytes.
type ahead struct {
	full, free chan []byte
	err        error // set before full is closed
}

func readAhead(from io.Reader, size uint64) *ahead {
	a := &ahead{full: make(chan []byte), free: make(chan []byte, 2)}
	for range cap(a.free) {
		a.free <- make([]byte, min(size, readChunk))
	}
	go func() {
		defer close(a.full)
		for b := range a.free {
			b = b[:min(size, readChunk)]
			if len(b) == 0 {
				return
			}
			if _, a.err = io.ReadFull(from, b); a.err != nil {
				return
			}
			size -= uint64(len(b))
			a.full <- b
		}
	}()
	return a
}

// close returns when nothing is read any more.
func (a *ahead) close() {
	close(a.free)
	for range a.full {
	}
}

// fillSegments writes the segments to a file, and calls `filled` for each that the file has.
func fillSegments(f *os.File, c *SeedCopy, from *ahead, filled func(int) error) error {
	defer from.close()
	var b, rest []byte
	for i, x := range c.Segments {
		for at, end := x.Offset, x.Offset+x.Size; at < end; {
			if len(rest) == 0 {
				if b != nil {
					from.free <- b[:cap(b)]
				}
				var more bool
				if b, more = <-from.full; !more {
					return from.err
				}
				rest = b
			}
			n := min(uint64(len(rest)), end-at)
			if _, err := f.WriteAt(rest[:n], int64(at)); err != nil {
				return err
			}
			at, rest = at+n, rest[n:]
		}
		if err := filled(i); err != nil {
			return err
		}
	}
	return nil
}

// hashing checks the hashes of a file's segments on several CPUs.
type hashing struct {
	todo chan int
	done sync.WaitGroup
	once sync.Once
	bad  chan struct{} // closed when err is set
	err  error
}

// startHashing sets the leaves of c.
func startHashing(f *os.File, c *SeedCopy) *hashing {
	all, leaf := c.Segments, c.leafSize()
	h := &hashing{todo: make(chan int, len(all)), bad: make(chan struct{})}
	at := make([]int, len(all)+1) // where each segment's leaves are
	for i, x := range all {
		at[i+1] = at[i] + leavesOf(x, leaf)*sha256.Size
	}
	c.leaves = make([]byte, at[len(all)])
	for range max(1, min(runtime.GOMAXPROCS(0)-1, len(all), hashersMost)) { // reading needs a CPU, too
		h.done.Go(func() {
			buffer := make([]byte, hashBuffer(leaf))
			for i := range h.todo {
				got, err := hashSegment(context.Background(), f, all[i], leaf, buffer, c.leaves[at[i]:at[i]])
				if err == nil && root(got) != all[i].Sum {
					err = wrongSum(i, all[i], got)
				}
				if err != nil {
					h.once.Do(func() { h.err = err; close(h.bad) })
				}
			}
		})
	}
	return h
}

// wrongSum is the error of a segment whose leaves have other hashes than announced.
func wrongSum(i int, x SeedSegment, leaves []byte) error {
	got := root(leaves)
	return fmt.Errorf("seed: segment %d was announced as SHA-256 %x, but the bytes have %x", i, x.Sum[:], got[:])
}

// add hands over a segment to be checked. It returns an error if an earlier one has another hash.
func (h *hashing) add(i int) error {
	select {
	case <-h.bad:
		return h.err
	default:
		h.todo <- i
		return nil
	}
}

// wait returns when all segments that were added are checked.
func (h *hashing) wait() error {
	close(h.todo)
	h.done.Wait()
	return h.err
}

const (
	hashersMost = 4
	hashChunk   = 256 << 10
)

// hashBuffer returns the size of a buffer for leaves.
func hashBuffer(leaf uint64) uint64 { return max(leaf, hashChunk) }

// hashSegment appends the hashes of a segment's leaves.
func hashSegment(ctx context.Context, f *os.File, x SeedSegment, leaf uint64, buffer, leaves []byte) ([]byte, error) {
	for done := uint64(0); done < x.Size; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		b := buffer[:min(uint64(len(buffer)), x.Size-done)]
		if _, err := f.ReadAt(b, int64(x.Offset+done)); err != nil {
			return nil, fmt.Errorf("seed: read its segments: %w", err)
		}
		leaves = appendLeaves(leaves, b, leaf)
		done += uint64(len(b))
	}
	return leaves, nil
}
