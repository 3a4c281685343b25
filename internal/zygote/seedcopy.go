package zygote

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
)

const seedPage = 4096

// SeedCopy describes what a seed's file has. The rest of the file is zero.
type SeedCopy struct {
	Units    uint32        // of its heap
	Segments []SeedSegment // whole pages, in order
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

// Contents finds the segments of a seed's file, and hashes them.
func (s *Seed) Contents(ctx context.Context) (*SeedCopy, error) {
	all, err := s.Segments(ctx)
	return &SeedCopy{s.Units, all}, err
}

// CopySeed makes a seed of the bytes of a copy's segments. It checks that they have the hashes of the copy.
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
	for i, x := range c.Segments {
		h := sha256.New()
		if _, err := io.CopyN(io.MultiWriter(io.NewOffsetWriter(f, int64(x.Offset)), h), from, int64(x.Size)); err != nil {
			return nil, err
		}
		if got := [sha256.Size]byte(h.Sum(nil)); got != x.Sum {
			return nil, fmt.Errorf("seed: segment %d was announced as SHA-256 %x, but the bytes have %x", i, x.Sum[:], got[:])
		}
	}
	s := &Seed{Units: c.Units}
	if err := s.seal(f); err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	return s, nil
}
