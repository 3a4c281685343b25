package zygote

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The header of a seed's file (worker/seed/seed.h), at the end of its heap.
const (
	seedMagic = 0x4445455352
	// SeedVersion is the version of the seeds that the zygote of this program makes. After a handover, the zygote of an earlier program continues, and
	// its seeds may have an earlier version. The header has not changed since seedVersionLeast.
	SeedVersion      = 5
	seedVersionLeast = 4
	// Offsets and sizes.
	seedModules    = 2072
	seedModuleSize = 184
	seedModuleName = 96
	seedModulesMax = 256
	seedRoot       = 65568
	seedHeader     = seedRoot + 16
)

// SeedLayout says which process a seed is of. Workers compare it with their own, so it is information only.
type SeedLayout struct {
	Size          uint64 // of the file, with its holes
	ThreadPointer uint64
	Processor     [4]uint64 // what code may choose by
	Modules       []SeedModule
	RootSize      uint64 // size of the root, which rfaas_table returns in workers that map the heap; 0: the setup function has not called rfaas_set_root
}

// SeedModule is an object that was loaded when the seed was made.
type SeedModule struct {
	Name           string
	Build          [20]byte // build id; zero: none
	Base           uint64
	Data, DataSize uint64 // its data in the file; 0: it stays each process's own
	TLS, TLSSize   uint64
}

// Layout reads the layout of the process that made the seed. User code of the tenant could have written it.
func (s *Seed) Layout() (*SeedLayout, error) {
	st, err := s.File.Stat()
	if err != nil {
		return nil, err
	}
	h := make([]byte, seedHeader)
	if _, err := s.File.ReadAt(h, int64(s.Units)*SeedUnit); err != nil {
		return nil, fmt.Errorf("seed: read its header: %w", err)
	}
	le := binary.LittleEndian
	v, n := le.Uint32(h[8:]), le.Uint32(h[12:])
	if le.Uint64(h) != seedMagic || v < seedVersionLeast || v > SeedVersion || n > seedModulesMax || le.Uint64(h[16:]) != uint64(s.Units)*SeedUnit {
		return nil, fmt.Errorf("seed: its header is damaged: version %d, %d modules, a heap of %d bytes", v, n, le.Uint64(h[16:]))
	}
	l := &SeedLayout{Size: uint64(st.Size()), ThreadPointer: le.Uint64(h[24:]), RootSize: le.Uint64(h[seedRoot+8:])}
	for i := range l.Processor {
		l.Processor[i] = le.Uint64(h[32+8*i:])
	}
	for i := range int(n) {
		b := h[seedModules+i*seedModuleSize:][:seedModuleSize]
		name, _, _ := bytes.Cut(b[:seedModuleName], []byte{0})
		m := SeedModule{Name: strings.ToValidUTF8(string(name), "?"), Base: le.Uint64(b[120:]), Data: le.Uint64(b[128:]), DataSize: le.Uint64(b[136:]), TLS: le.Uint64(b[160:]),
			TLSSize: le.Uint64(b[168:])}
		copy(m.Build[:], b[seedModuleName:])
		l.Modules = append(l.Modules, m)
	}
	return l, nil
}

// SeedSegment is a range of a seed's file, with the hash of its bytes, which is the root of a tree (seedtree.go).
type SeedSegment struct {
	Offset, Size uint64
	Sum          [sha256.Size]byte
}

// segmentsMost bounds the number of segments, and extentsMost those that are not adjacent. Segments have at most segmentSize bytes, or more if there would be too many of them.
const (
	segmentsMost = 4096
	extentsMost  = 1024
	segmentSize  = 256 << 10
)

// find finds the data in the seed's file. Everything else in the file is zero. The segments have no hashes yet. Workers may make pages of zeros later, which
// the segments do not need, so only the first call looks at the file.
func (s *Seed) find() (*SeedCopy, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for gap := int64(64 << 10); s.found == nil; gap *= 4 {
		all, err := extents(s.File, gap)
		if err != nil {
			return nil, fmt.Errorf("seed: find its segments: %w", err)
		}
		if len(all) <= extentsMost {
			s.found = &SeedCopy{Units: s.Units, Segments: split(all)}
		}
	}
	return s.found, nil
}

// split makes segments of ranges.
func split(ranges []SeedSegment) []SeedSegment {
	for most := uint64(segmentSize); ; most *= 2 {
		var all []SeedSegment
		for _, x := range ranges {
			for at := uint64(0); at < x.Size; at += most {
				all = append(all, SeedSegment{Offset: x.Offset + at, Size: min(most, x.Size-at)})
			}
		}
		if len(all) <= segmentsMost {
			return all
		}
	}
}

// extents returns the ranges of a file that have memory. Those with gaps of at most `gap` bytes between them are one.
func extents(f *os.File, gap int64) (all []SeedSegment, err error) {
	at := int64(0)
	for {
		from, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		to, err := f.Seek(from, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		if to <= from {
			return nil, errors.New("the file has no holes or data to find")
		}
		if last := len(all) - 1; last >= 0 && from-int64(all[last].Offset+all[last].Size) <= gap {
			all[last].Size = uint64(to) - all[last].Offset
		} else {
			all = append(all, SeedSegment{Offset: uint64(from), Size: uint64(to - from)})
		}
		if at = to; len(all) > 64*extentsMost {
			return all, nil // too many with this gap
		}
	}
}
