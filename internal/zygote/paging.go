package zygote

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// A seed that is copied from another node can be used before all of it has arrived. Its file then has holes. Workers map the file, and this process gets
// their page faults (pager.go). What workers wait for is read first. Then come the pages that the first worker of another node has used, and last the others, if they are to be
// read at all. A page is shown to a worker only when it has arrived and has the right hash (seedtree.go). This process records which leaves are valid. The file does not
// show it: a read through a mapping makes a page of zeros in a hole. When everything has arrived, the workers' memory becomes regular memory again.

const (
	seedHeapAt = 0x600000000000 // address of a seed's heap in workers (worker/seed/heap.h)
	// seedFirst is the part of the heap that a worker reads from the file.
	seedFirst = 64 << 10
	// Offset of the extents in the header, and their largest number.
	seedExtents     = 49184
	seedExtentsMost = 1024
	// fetchMost is how many bytes one read takes. A worker may have to wait for a whole read before its own page is read.
	fetchMost = 256 << 10
	// The rest is read when no worker has waited for a page for faultQuiet, and none has started for startQuiet, so that reading it does not delay them. If there is no such pause,
	// a part of the rest is read every restEvery.
	faultQuiet = 2 * time.Millisecond
	startQuiet = 10 * time.Millisecond
	restEvery  = 10 * time.Millisecond
	// PageOptions.Touched is called when no worker has touched a further page for touchedQuiet. After each call, this time is doubled, up to touchedQuietMost.
	touchedQuiet     = 20 * time.Millisecond
	touchedQuietMost = 320 * time.Millisecond
	// touchedMost is the largest number of runs that are recorded.
	touchedMost = 8192
)

// ErrReleased ends the copying of a seed that is not needed any more.
var ErrReleased = errors.New("the seed is not needed any more")

// PageOptions says how the pages of a seed are read.
type PageOptions struct {
	// Read reads parts of the source, and writes their bytes to b, one part after the other.
	Read func(parts []SeedPart, b []byte) error
	// Lost is called if reading has failed, or wrong bytes have come. If it returns nil, there is another source, and Fill tries again. If Lost is nil, there is never another source.
	Lost func(error) error
	// First lists leaves that are read before the rest, for example those that the first worker of another node has touched. It need not be valid.
	First []SeedRun
	// Exact: single pages are read, and few for which no worker waits. Otherwise, up to 256 KiB around a page are read.
	Exact bool
	// Touched is called with the leaves that workers have touched, when they have touched no further ones for a moment, and at the end. It may be nil.
	Touched func([]SeedRun)
}

// paging fills a seed's file. The fields above reading do not change.
type paging struct {
	c      *SeedCopy
	o      PageOptions
	leaf   uint64     // bytes of a leaf
	again  rate.Limit // of a pager
	pace   time.Duration
	base   []uint32 // number of each segment's first leaf, and the number of all leaves
	proofs []uint64 // where each segment's proofs are
	file   *os.File // sealed against writing, except by pages

	reading sync.Mutex // held while something is read, and while the source is replaced. Locked before mu
	pages   *pageFile  // nil: nothing is read any more
	proved  []bool     // leaves whose hash is in c.leaves
	buffer  []byte

	over     chan struct{} // closed when nothing is read any more
	detached sync.WaitGroup
	finished chan struct{} // closed when nothing of the paging is left

	mu      sync.Mutex
	valid   []bool    // leaves that have arrived
	left    int       // number of leaves that are not valid
	moved   uint64    // bytes that were read
	wanted  []SeedRun // that workers wait for, in the order of their faults
	first   []SeedRun // the part of o.First that has not been read
	rest    []SeedRun // all that has not been read, and parts that have
	all     bool      // the rest is read, too
	calm    time.Time // when the rest may be read
	seen    []bool    // leaves that are in touched
	touched []SeedRun // that workers have used, in this order
	touches int       // number of leaves in touched
	pagers  map[*pager]bool
	failed  error          // error of a pager that has read for its worker, which still waits
	err     error          // why not everything has arrived. Set before over is closed
	asked   chan struct{}  // capacity 1: a worker waits for something, or everything has arrived, or the recording begins
	asks    map[uint32]int // faults for which something was read, by the first leaf of their window
	latest  time.Time      // when a worker has touched a further leaf
	records bool           // Fill waits until workers touch no further leaves
	hurry   func()         // closes hurried
	hurried chan struct{}  // closed when something waits for all of the seed
	stop    context.CancelCauseFunc
	stopped context.Context // ends when the seed is not needed any more
}

// PageSeed makes a seed from a description. It returns when the pages that every worker needs at its start have arrived. Workers can start from the seed before Fill has read
// the others. The caller must call Fill.
func PageSeed(c *SeedCopy, o PageOptions) (s *Seed, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	fd, err := fixedMemfd("rfaas-seed", int(FileSize(c.Units)), 0)
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	p := newPaging(c, o)
	p.file = os.NewFile(uintptr(fd), "memfd:rfaas-seed")
	s = &Seed{Units: c.Units, Bytes: c.Bytes(), paging: p}
	if err = p.open(fd, s); err == nil {
		err = p.begin()
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

func newPaging(c *SeedCopy, o PageOptions) *paging {
	p := &paging{c: &SeedCopy{Units: c.Units, Segments: c.Segments}, o: o, leaf: c.leafSize(), again: againRate, pace: restEvery, base: []uint32{0}, proofs: []uint64{0}, over: make(chan struct{}), finished: make(chan struct{}),
		asked: make(chan struct{}, 1), asks: map[uint32]int{}, hurried: make(chan struct{}), pagers: map[*pager]bool{}}
	p.hurry = sync.OnceFunc(func() { close(p.hurried) })
	for i, x := range c.Segments {
		n := leavesOf(x, p.leaf)
		p.base, p.proofs = append(p.base, p.base[i]+uint32(n)), append(p.proofs, p.proofs[i]+uint64(groupsOf(n))*proofSize)
	}
	p.left = int(p.count())
	p.o.First = p.windows(cleanRuns(o.First, p.count()))
	p.first, p.rest = slices.Clone(p.o.First), []SeedRun{{0, p.count()}}
	p.valid, p.proved, p.seen, p.c.leaves = make([]bool, p.left), make([]bool, p.left), make([]bool, p.left), make([]byte, p.left*sha256.Size)
	p.stopped, p.stop = context.WithCancelCause(context.Background())
	return p
}

// open maps the file, and opens it for reading. Nobody else can open it for writing.
func (p *paging) open(fd int, s *Seed) error {
	err := p.file.Chmod(0o400)
	if err == nil {
		p.pages, err = mapPages(fd, FileSize(p.c.Units))
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

// begin reads what workers need at their start: everything outside of the heap, and the heap's first seedFirst bytes. Workers read these from the file and not by faults.
func (p *paging) begin() error {
	p.reading.Lock()
	defer p.reading.Unlock()
	var need []SeedRun
	for i, whole := range p.c.Segments {
		for l := p.base[i]; l < p.base[i+1]; {
			switch x := p.bytes(SeedRun{l, 1}); {
			case whole.Offset >= seedFirst && whole.Offset+whole.Size <= uint64(p.c.Units)*SeedUnit:
				l = p.base[i+1]
			case x.Offset >= seedFirst && x.Offset+x.Size <= uint64(p.c.Units)*SeedUnit:
				l++
			default:
				w := p.window(l)
				need = append(need, w)
				l = w.First + w.Count
			}
		}
	}
	for need = join(need); len(need) > 0; {
		if err := p.fetch(p.take(&need), false); err != nil {
			return err
		}
	}
	return nil
}

// isWhole reports whether everything has arrived.
func (p *paging) isWhole() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.left == 0
}

// Fill reads what workers wait for, and then the leaves of PageOptions.First. After `rest` is closed, it reads everything, but slowly while workers start or wait for pages. After
// Hurry, it reads everything at once. If reading fails and there is no other source, Fill ends the workers, because their memory is lost. Fill returns when no worker's memory is
// filled on demand any more.
func (s *Seed) Fill(ctx context.Context, rest <-chan struct{}) error {
	p := s.paging
	ctx, cancel := context.WithCancelCause(ctx)
	defer context.AfterFunc(p.stopped, func() { cancel(ErrReleased) })()
	p.end(p.fill(ctx, rest))
	cancel(nil)
	p.detached.Wait()
	if p.err == nil {
		s.contents.Store(p.c)
	}
	p.free()
	return p.err
}

func (p *paging) fill(ctx context.Context, rest <-chan struct{}) error {
	all, told, hurried := false, 0, p.hurried
	var lastRest time.Time
	tell := func() {
		list, n := p.touchedRuns()
		if n > told && p.o.Touched != nil {
			p.o.Touched(list)
		}
		told = n
	}
	pause := touchedQuiet
	quiet := time.NewTimer(pause)
	quiet.Stop()
	defer quiet.Stop()
	records := false
	for !p.isWhole() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		delay := time.Duration(0)
		if now := time.Now(); all && hurried != nil {
			delay = min(p.busy(now), p.pace-now.Sub(lastRest))
		}
		some, last, err := p.step(all, delay <= 0)
		if err != nil {
			return err
		}
		if last {
			lastRest = time.Now()
		}
		if some {
			select {
			case <-hurried:
				all, hurried = true, nil
			default:
			}
			continue
		}
		var over <-chan time.Time
		if delay > 0 {
			over = time.After(delay)
		}
		begin := rest
		if all {
			begin = nil
		}
		if !records && p.recording() {
			records = true
			quiet.Reset(pause)
		}
		select {
		case <-p.asked:
		case now := <-quiet.C:
			if left := p.untilQuiet(now, pause); left > 0 {
				quiet.Reset(left)
				break
			}
			tell()
			records, pause = false, min(2*pause, touchedQuietMost)
		case <-over:
		case <-begin:
			all = true
		case <-hurried:
			all, hurried = true, nil
		case <-ctx.Done():
		}
	}
	tell()
	return nil
}

// step reads the next runs, if there are any. See pick for all, now and last. If reading fails, it looks for another source. If there is none, it returns an error.
func (p *paging) step(all, now bool) (some, last bool, err error) {
	p.reading.Lock()
	defer p.reading.Unlock()
	runs, show, last, err := p.pick(all, now)
	if err == nil && len(runs) == 0 {
		return false, false, nil
	}
	if err == nil {
		err = p.fetch(runs, show)
	}
	if err == nil {
		return true, last, nil
	}
	if p.o.Lost == nil {
		return false, false, err
	}
	if err := p.o.Lost(err); err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.failed = err // so no pager reads any more
		return false, false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = append(runs, p.wanted...)
	return true, last, nil
}

// recording reports whether workers have touched leaves that Touched does not know yet.
func (p *paging) recording() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.records
}

// untilQuiet returns how long to wait for further leaves before the recorded list is passed on. 0: the recording is over.
func (p *paging) untilQuiet(now time.Time, pause time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := p.latest.Add(pause).Sub(now); left > 0 {
		return left
	}
	p.records = false
	return 0
}

// ask wakes Fill.
func (p *paging) ask() {
	select {
	case p.asked <- struct{}{}:
	default:
	}
}

// busy returns for how long the rest should still wait for workers.
func (p *paging) busy(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calm.Sub(now)
}

// hush delays the reading of the rest. The caller holds mu.
func (p *paging) hush(now time.Time, pause time.Duration) {
	if t := now.Add(pause); t.After(p.calm) {
		p.calm = t
	}
}

// starting notes that a worker begins to start from the seed.
func (s *Seed) starting() {
	if p := s.paging; p != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.hush(time.Now(), startQuiet)
	}
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
	p.reading.Lock()
	defer p.reading.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pages != nil {
		p.pages.close()
		p.pages = nil
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

// Hurry makes Fill read all pages as fast as it can, even while workers start.
func (s *Seed) Hurry() {
	if s.paging != nil {
		s.paging.hurry()
	}
}

// Whole makes Fill read all pages at once, and waits until they have been read.
func (s *Seed) Whole(ctx context.Context) error {
	if s.paging == nil {
		return nil
	}
	s.Hurry()
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

// Missing returns how many bytes of the seed have not arrived and are only read when a worker needs them.
func (s *Seed) Missing() (n uint64) {
	p := s.paging
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all || !p.o.Exact {
		return 0
	}
	return uint64(p.left) * p.leaf
}

// Moved returns how many bytes have been read from the source.
func (s *Seed) Moved() uint64 {
	s.paging.mu.Lock()
	defer s.paging.mu.Unlock()
	return s.paging.moved
}

// Record keeps a list of leaves that workers on another node have touched, for Touched. If there is a list already, the one with more leaves is kept. A list need not be valid: Record
// keeps its valid part. Contents must have succeeded.
func (s *Seed) Record(list []SeedRun) {
	list = cleanRuns(list, s.contents.Load().count())
	before := s.recorded.Load()
	if len(list) > 0 && (before == nil || leavesIn(list) > leavesIn(*before)) {
		s.recorded.CompareAndSwap(before, &list)
	}
}

func leavesIn(list []SeedRun) (n uint64) {
	for _, r := range list {
		n += uint64(r.Count)
	}
	return n
}

// Touched returns the leaves that workers have touched while the seed arrived here, or else those of Record.
func (s *Seed) Touched() []SeedRun {
	if s.paging != nil {
		if list, n := s.paging.touchedRuns(); n > 0 {
			return list
		}
	}
	if list := s.recorded.Load(); list != nil {
		return *list
	}
	return nil
}

// touchedRuns returns what workers have touched, and how many leaves that are.
func (p *paging) touchedRuns() ([]SeedRun, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.touched), p.touches
}

// touch records that a worker has used a run of which a page was absent. The caller holds mu.
func (p *paging) touch(r SeedRun, now time.Time) {
	for l := r.First; l < r.First+r.Count; l++ {
		n := len(p.touched) - 1
		switch {
		case p.seen[l]:
			continue
		case n >= 0 && p.touched[n].First+p.touched[n].Count == l:
			p.touched[n].Count++
		case n+1 < touchedMost:
			p.touched = append(p.touched, SeedRun{l, 1})
		default:
			return
		}
		p.seen[l] = true
		p.touches++
		if p.latest = now; !p.records {
			p.records = true
			p.ask()
		}
	}
}
