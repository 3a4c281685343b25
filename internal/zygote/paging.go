package zygote

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// A seed that is copied from another node can be used before all of it has arrived. Its file then has holes. Workers map the file, and this process gets
// their page faults (worker/pages.h). The segments that workers wait for are read first, the others after them. A page is shown to a worker only when its
// segment has arrived and has the right hash. This process records which segments are valid. The file does not show it: a read through a
// mapping makes a page of zeros in a hole. When everything has arrived, the workers' memory becomes regular memory again.

const (
	seedHeapAt = 0x600000000000 // address of a seed's heap in workers (worker/seed/heap.h)
	// seedFirst is the part of the heap that a worker reads from the file.
	seedFirst = 64 << 10
	// Offset of the extents in the header, and their largest number.
	seedExtents     = 49184
	seedExtentsMost = 1024
	// detachPatience is how long a worker may delay a change of its mappings.
	detachPatience = 5 * time.Second
)

// errReleased ends the copying of a seed that is not needed any more.
var errReleased = errors.New("the seed is not needed any more")

// paging fills a seed's file.
type paging struct {
	c    *SeedCopy
	file *os.File // sealed against writing, except by mem
	mem  []byte   // the file, shared
	read func(segment int, b []byte) error

	over     chan struct{} // closed when no segment is read any more
	detached sync.WaitGroup
	finished chan struct{} // closed when nothing of the paging is left

	mu      sync.Mutex
	valid   []bool
	left    int   // number of segments that are not valid
	wanted  []int // segments that workers wait for, in the order of their faults
	touched []int // all segments that workers have waited for
	next    int   // all segments before this one are valid
	pagers  map[*pager]bool
	err     error         // why not all segments have arrived. Set before over is closed
	asked   chan struct{} // capacity 1: a worker waits for a segment
	stop    context.CancelCauseFunc
	stopped context.Context // ends when the seed is not needed any more
}

// PageSeed makes a seed of a copy's segments. `read` reads one segment. PageSeed returns when the segments that every worker needs at its start, and those of `first`, have
// arrived. Workers can start from the seed before Fill has read the others. The caller must call Fill.
func PageSeed(c *SeedCopy, first []uint32, read func(segment int, b []byte) error) (s *Seed, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	fd, err := fixedMemfd("rfaas-seed", int(FileSize(c.Units)), 0)
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	p := &paging{c: c, file: os.NewFile(uintptr(fd), "memfd:rfaas-seed"), read: read, over: make(chan struct{}), finished: make(chan struct{}), asked: make(chan struct{}, 1), valid: make([]bool, len(c.Segments)),
		left: len(c.Segments), pagers: map[*pager]bool{}}
	p.stopped, p.stop = context.WithCancelCause(context.Background())
	s = &Seed{Units: c.Units, Bytes: c.Bytes(), paging: p}
	if err = p.open(fd, s); err == nil {
		err = p.begin(first)
	}
	if err != nil {
		p.end(err)
		p.free()
		if s.File != nil {
			s.File.Close()
		}
		return nil, err
	}
	return s, nil
}

// open maps the file, and opens it for reading. Nobody else can open it for writing.
func (p *paging) open(fd int, s *Seed) error {
	err := p.file.Chmod(0o400)
	if err == nil {
		p.mem, err = unix.Mmap(fd, 0, int(FileSize(p.c.Units)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE)
	}
	if err == nil {
		s.File, err = os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	}
	if err != nil {
		return fmt.Errorf("seed: prepare its file: %w", err)
	}
	return nil
}

// begin reads what workers need at their start: everything but the heap, which they read from the file and not by faults.
func (p *paging) begin(first []uint32) error {
	buffer := make([]byte, 0, segmentSize)
	get := func(i int) (err error) {
		if !p.valid[i] {
			buffer, err = p.fetch(i, buffer)
		}
		return err
	}
	for i, x := range p.c.Segments {
		if x.Offset < seedFirst || x.Offset+x.Size > uint64(p.c.Units)*SeedUnit {
			if err := get(i); err != nil {
				return err
			}
		}
	}
	for _, i := range first {
		if uint64(i) < uint64(len(p.c.Segments)) {
			if err := get(int(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// fetch reads a segment, checks it, and puts it into the file.
func (p *paging) fetch(i int, buffer []byte) ([]byte, error) {
	x := p.c.Segments[i]
	buffer = slices.Grow(buffer[:0], int(x.Size))[:x.Size]
	if err := p.read(i, buffer); err != nil {
		return buffer, err
	}
	if got := sha256.Sum256(buffer); got != x.Sum {
		return buffer, fmt.Errorf("seed: segment %d was announced as SHA-256 %x, but the bytes have %x", i, x.Sum[:], got[:])
	}
	copy(p.mem[x.Offset:], buffer)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.valid[i] = true
	p.left--
	for g := range p.pagers {
		g.arrived(i)
	}
	return buffer, nil
}

// pick returns the segment to read next, or -1 if there is none. Without `all`, it returns only segments that a worker waits for.
func (p *paging) pick(all bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.wanted) > 0 {
		i := p.wanted[0]
		p.wanted = p.wanted[1:]
		if !p.valid[i] {
			return i
		}
	}
	for ; all && p.next < len(p.valid); p.next++ {
		if !p.valid[p.next] {
			return p.next
		}
	}
	return -1
}

// isWhole reports whether all segments are valid.
func (p *paging) isWhole() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.left == 0
}

// Fill reads all missing segments. It begins with segments that workers wait for. Until `rest` is closed, it reads only these. If reading fails, Fill ends the workers, because their
// memory is lost. Fill returns when no worker's memory is filled on demand any more.
func (s *Seed) Fill(ctx context.Context, rest <-chan struct{}) error {
	p := s.paging
	ctx, cancel := context.WithCancelCause(ctx)
	defer context.AfterFunc(p.stopped, func() { cancel(errReleased) })()
	p.end(p.fill(ctx, rest))
	cancel(nil)
	p.detached.Wait()
	if p.err == nil {
		s.contents.Store(p.c)
	}
	p.free()
	return p.err
}

func (p *paging) fill(ctx context.Context, rest <-chan struct{}) (err error) {
	buffer, all := make([]byte, 0, segmentSize), false
	for !p.isWhole() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if i := p.pick(all); i >= 0 {
			if buffer, err = p.fetch(i, buffer); err != nil {
				return err
			}
			continue
		}
		select {
		case <-p.asked:
		case <-rest:
			all = true
		case <-ctx.Done():
		}
	}
	return nil
}

// end ends the reading.
func (p *paging) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left > 0 {
		p.err = err
	}
	close(p.over)
}

// free frees what only the reading needs. A complete file is then sealed like that of any seed.
func (p *paging) free() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mem != nil {
		_ = unix.Munmap(p.mem) // cannot fail for a mapping
		p.mem = nil
	}
	_ = wire.Control(p.file, func(fd int) error {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SEAL)
		return err
	}) // no writable mapping and no other writable descriptor is left in any case
	p.file.Close()
	close(p.finished)
}

// Lost returns why the seed's pages cannot be read any more. It returns nil if they can be read, or if all have been read.
func (s *Seed) Lost() error {
	if s.paging == nil {
		return nil
	}
	select {
	case <-s.paging.over:
		return s.paging.err
	default:
		return nil
	}
}

// Whole waits until all pages of the seed have been read.
func (s *Seed) Whole(ctx context.Context) error {
	if s.paging == nil {
		return nil
	}
	select {
	case <-s.paging.finished:
		return s.paging.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Filling reports whether pages of the seed are still being read.
func (s *Seed) Filling() bool {
	if s.paging == nil {
		return false
	}
	select {
	case <-s.paging.over:
		return false
	default:
		return true
	}
}

// Touched returns the segments for which workers have waited, in that order.
func (s *Seed) Touched() (list []uint32) {
	s.paging.mu.Lock()
	defer s.paging.mu.Unlock()
	for _, i := range s.paging.touched {
		list = append(list, uint32(i))
	}
	return list
}

// segmentAt returns the segment that contains an offset of the file, or -1 if the offset is in a hole.
func (p *paging) segmentAt(offset uint64) int {
	i, _ := slices.BinarySearchFunc(p.c.Segments, offset, func(x SeedSegment, at uint64) int {
		if x.Offset+x.Size <= at {
			return -1
		}
		return 1
	})
	if i < len(p.c.Segments) && p.c.Segments[i].Offset <= offset {
		return i
	}
	return -1
}

// ranges returns the parts of the heap that workers map from the file, as the seed's header names them. The header may have any content, because the tenant's user code could write to it.
func (p *paging) ranges() (list []SeedSegment) {
	heap := uint64(p.c.Units) * SeedUnit
	b := p.mem[heap:][:seedExtents+16*seedExtentsMost]
	le := binary.LittleEndian
	for i := range min(le.Uint32(b[seedExtents-8:]), seedExtentsMost) {
		at := b[seedExtents+16*i:]
		from, to := le.Uint64(at)&^(seedPage-1), min(le.Uint64(at[8:])&^(seedPage-1), heap)
		if from < to {
			list = append(list, SeedSegment{Offset: from, Size: to - from})
		}
	}
	return list
}

// pager answers the page faults of a worker.
type pager struct {
	p    *paging
	w    *Worker
	file *os.File      // its userfaultfd
	poke chan struct{} // capacity 1: ready may have something

	// Guarded by p.mu.
	waits map[int]bool // segments
	ready []int        // segments that have arrived
}

// attach begins to answer the faults of a worker that has mapped the seed's heap, and nothing else in the heap's range of addresses. If no segment is read any more, it
// only returns the error of the reading, nil if the seed is whole.
func (p *paging) attach(ctx context.Context, w *Worker) error {
	file := w.pages.Swap(nil)
	if file == nil {
		return errors.New("the worker has no userfaultfd")
	}
	g := &pager{p: p, w: w, file: file, poke: make(chan struct{}, 1), waits: map[int]bool{}}
	p.mu.Lock()
	select {
	case <-p.over:
		p.mu.Unlock()
		file.Close()
		return p.err
	default:
	}
	ranges := p.ranges()
	p.pagers[g] = true
	p.detached.Add(1)
	p.mu.Unlock()
	registered := make(chan error, 1)
	go g.serve(ranges, registered)
	select { // the worker could delay the registration without a limit
	case err := <-registered:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-w.done:
		return errors.New("the worker has ended")
	}
}

// serve answers faults until the worker has ended or all segments have arrived.
func (g *pager) serve(ranges []SeedSegment, registered chan<- error) {
	defer g.leave()
	for _, x := range ranges {
		if err := registerRange(g.file, seedHeapAt+x.Offset, x.Size); err != nil {
			registered <- fmt.Errorf("fill its memory on demand: %w", err)
			return
		}
	}
	registered <- nil
	go g.listen()
	for {
		select {
		case <-g.poke:
			g.p.mu.Lock()
			ready := g.ready
			g.ready = nil
			g.p.mu.Unlock()
			for _, i := range ready {
				g.show(i)
			}
		case <-g.p.over:
			g.finish()
			return
		case <-g.w.done:
			return
		}
	}
}

// finish makes the worker's memory regular memory, or ends the worker if its pages are lost.
func (g *pager) finish() {
	if err := g.p.err; err != nil {
		g.w.end(verdict{wire.StatusWorkerDied, "lost the pages of its seed: " + err.Error()})
		<-g.w.done // until then its faults must not be answered with zeros
		return
	}
	late := time.AfterFunc(detachPatience, func() {
		g.w.end(verdict{wire.StatusWorkerDied, fmt.Sprintf("has delayed a change of its mappings for %v", detachPatience)})
	})
	defer late.Stop()
	if err := unregisterRange(g.file, seedHeapAt, uint64(g.p.c.Units)*SeedUnit); err != nil {
		g.w.end(verdict{wire.StatusWorkerDied, "has changed the mappings of its seed's heap while pages of it were missing"})
		<-g.w.done
	}
}

func (g *pager) leave() {
	g.p.mu.Lock()
	delete(g.p.pagers, g)
	g.p.mu.Unlock()
	g.file.Close() // so listen ends
	g.p.detached.Done()
}

// listen reads the faults.
func (g *pager) listen() {
	events := make([]byte, 16*uffdMessage)
	for {
		n, err := g.file.Read(events)
		if err != nil {
			return
		}
		for _, at := range faults(events[:n]) {
			g.fault(at)
		}
	}
}

// fault answers a fault. A fault outside of the heap can only come from a mapping that the worker has moved.
func (g *pager) fault(address uint64) {
	offset := (address - seedHeapAt) &^ (seedPage - 1)
	if offset >= uint64(g.p.c.Units)*SeedUnit {
		return
	}
	p := g.p
	p.mu.Lock()
	i := p.segmentAt(offset)
	wait := i >= 0 && !p.valid[i]
	if wait && !g.waits[i] {
		g.waits[i] = true
		if !slices.Contains(p.wanted, i) {
			p.wanted = append(p.wanted, i)
		}
		select {
		case p.asked <- struct{}{}:
		default:
		}
		if !slices.Contains(p.touched, i) {
			p.touched = append(p.touched, i)
		}
	}
	p.mu.Unlock()
	switch {
	case wait:
	case i < 0: // the source has no memory there either
		showZeros(g.file, seedHeapAt+offset)
	default:
		g.show(i)
	}
}

// arrived notes that a segment has arrived. Under p.mu.
func (g *pager) arrived(i int) {
	if !g.waits[i] {
		return
	}
	delete(g.waits, i)
	g.ready = append(g.ready, i)
	select {
	case g.poke <- struct{}{}:
	default:
	}
}

// show maps a segment that has arrived into the worker.
func (g *pager) show(i int) {
	x := g.p.c.Segments[i]
	end := min(x.Offset+x.Size, uint64(g.p.c.Units)*SeedUnit)
	showPages(g.file, seedHeapAt+x.Offset, end-x.Offset)
}
