package zygote

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// lateReader counts reads after the end.
type lateReader struct {
	io.Reader
	over atomic.Bool
	late atomic.Int32
}

func (r *lateReader) Read(b []byte) (int, error) {
	if r.over.Load() {
		r.late.Add(1)
	}
	return r.Reader.Read(b)
}

// A copy has the bytes that were read, whatever the sizes of its segments are. With a wrong byte, or if reading fails, there is no copy. Nothing reads afterwards.
func TestCopySeedSegments(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 6 {
		c, data, end := &SeedCopy{Units: 2}, []byte(nil), uint64(0)
		for range 1 + random.IntN(9) {
			x := SeedSegment{Offset: end + seedPage*uint64(random.IntN(3)), Size: seedPage * uint64(1+random.IntN(400))}
			end = x.Offset + x.Size
			part := make([]byte, x.Size)
			for i := range part {
				part[i] = byte(random.Uint32())
			}
			c.Segments, data = append(c.Segments, x), append(data, part...)
		}
		c.SumSegments(data)
		try := func(from io.Reader) (*Seed, error) {
			t.Helper()
			r := &lateReader{Reader: from}
			s, err := CopySeed(c, r)
			r.over.Store(true)
			t.Cleanup(func() {
				if n := r.late.Load(); n > 0 {
					t.Errorf("%d reads after the end", n)
				}
			})
			return s, err
		}
		s, err := try(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		for _, x := range c.Segments {
			part, err := io.ReadAll(io.NewSectionReader(s.File, int64(x.Offset), int64(x.Size)))
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, part...)
		}
		if known, err := s.Contents(t.Context()); !bytes.Equal(got, data) || !s.Hashed() || err != nil || known.Sum() != c.Sum() {
			t.Fatalf("the copy differs: %v", err)
		}
		s.Close()
		at := random.IntN(len(data))
		data[at]++
		if _, err := try(bytes.NewReader(data)); err == nil || !strings.Contains(err.Error(), "was announced as SHA-256") {
			t.Errorf("byte %d of %d is wrong: %v", at, len(data), err)
		}
		data[at]--
		if _, err := try(bytes.NewReader(data[:at])); !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
			t.Errorf("%d of %d bytes: %v", at, len(data), err)
		}
	}
}

// Ranges are split into segments that can be hashed by themselves, but not into more than a description may have.
func TestSplit(t *testing.T) {
	for size, most := range map[uint64]uint64{seedPage: seedPage, segmentSize + seedPage: segmentSize, segmentSize * segmentsMost: segmentSize, segmentSize * (segmentsMost + 1): 2 * segmentSize,
		1 << 40: 1 << 28} {
		all := split([]SeedSegment{{Offset: seedPage, Size: size}})
		at := uint64(seedPage)
		for _, x := range all {
			if x.Offset != at || x.Size > most || x.Size == 0 {
				t.Fatalf("%d bytes: a segment of %d bytes at %d, want at most %d at %d", size, x.Size, x.Offset, most, at)
			}
			at += x.Size
		}
		if at != seedPage+size || len(all) > segmentsMost || all[0].Size != most {
			t.Errorf("%d bytes: %d segments, the first of %d bytes, to %d", size, len(all), all[0].Size, at)
		}
	}
}

// The bytes that are charged for a seed include its proofs, of which each segment has its own. They are the same before and after the seed is hashed.
func TestSeedMemoryOfFragments(t *testing.T) {
	const pages = 64
	fd, err := fixedMemfd("rfaas-seed", int(FileSize(2)), 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &Seed{File: os.NewFile(uintptr(fd), "seed"), Units: 2, Bytes: pages * seedPage}
	for i := range int64(pages) {
		if _, err := s.File.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, seedPage), i*(256<<10)); err != nil {
			t.Fatal(err)
		}
	}
	before := s.Memory()
	c, err := s.Contents(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := uint64(pages * (seedPage + sha256.Size + proofSize)); len(c.Segments) != pages || before != want || s.Memory() != want {
		t.Errorf("%d bytes, and %d after hashing %d segments, want %d", before, s.Memory(), len(c.Segments), want)
	}
	data := new(bytes.Buffer)
	for _, x := range c.Segments {
		if _, err := io.Copy(data, io.NewSectionReader(s.File, int64(x.Offset), int64(x.Size))); err != nil {
			t.Fatal(err)
		}
	}
	want := &SeedCopy{Units: 2, Segments: slices.Clone(c.Segments)}
	if want.SumSegments(data.Bytes()); want.Sum() != c.Sum() || !bytes.Equal(want.leaves, c.leaves) {
		t.Error("the hashes differ from those of the bytes")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Proofs(); !errors.Is(err, ErrReleased) {
		t.Errorf("proofs of a closed seed: %v", err)
	}
}

// Hashing ends with its context.
func TestContentsInterrupted(t *testing.T) {
	why := errors.New("the node drains")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	fd, err := fixedMemfd("rfaas-seed", int(FileSize(2)), 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &Seed{File: os.NewFile(uintptr(fd), "seed"), Units: 2}
	defer s.Close()
	if _, err := s.File.WriteAt(make([]byte, 16<<20), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Contents(ctx); !errors.Is(err, why) || s.Hashed() {
		t.Errorf("hashed %v, %v", s.Hashed(), err)
	}
}
