package zygote

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// detachPatience is how long a worker may delay a change of its mappings.
const detachPatience = 5 * time.Second

// againRate is how many pages a second the executor maps again for a worker that drops them, after it has mapped as many as the heap has. This rate takes 1 % to 2 % of a core.
const againRate = 1000

// ranges returns the parts of the heap that workers map from the file, as the seed's header names them. The header may have any content, because the tenant's user code could write to it.
func (p *paging) ranges() (list []SeedSegment, err error) {
	heap := uint64(p.c.Units) * SeedUnit
	b := make([]byte, seedExtents+16*seedExtentsMost)
	if _, err := p.file.ReadAt(b, int64(heap)); err != nil {
		return nil, fmt.Errorf("seed: read its header: %w", err)
	}
	le := binary.LittleEndian
	for i := range min(le.Uint32(b[seedExtents-8:]), seedExtentsMost) {
		at := b[seedExtents+16*i:]
		from, to := le.Uint64(at)&^(seedPage-1), min(le.Uint64(at[8:])&^(seedPage-1), heap)
		if from < to {
			list = append(list, SeedSegment{Offset: from, Size: to - from})
		}
	}
	return list, nil
}

// pager answers the page faults of a worker.
type pager struct {
	p    *paging
	w    *Worker
	file *os.File      // its userfaultfd
	poke chan struct{} // capacity 1: ready may have something

	// again limits the faults on pages that the worker had already, or that the seed does not have. A worker may drop such pages again and again, and mapping them is charged to nobody.
	again *rate.Limiter

	// Guarded by p.mu.
	shown    []bool          // leaves that the worker has had
	waits    map[uint32]bool // leaves for which the worker waits
	ready    []SeedRun       // runs that have arrived and are to be shown
	next     uint32          // leaf after the last window
	sequence uint32          // number of leaves in the windows that have followed each other
	series   series
}

// attach begins to answer the faults of a worker that has mapped the seed's heap, and nothing else in the heap's range of addresses. If the reading has ended, it
// only returns the error with which it ended, nil if the seed is whole.
func (p *paging) attach(ctx context.Context, w *Worker) error {
	file := w.pages.Swap(nil)
	if file == nil {
		return errors.New("the worker has no userfaultfd")
	}
	g := &pager{p: p, w: w, file: file, poke: make(chan struct{}, 1), waits: map[uint32]bool{}, shown: make([]bool, p.count()), again: rate.NewLimiter(p.again, int(p.count())+int(p.c.Units)*(SeedUnit/seedPage))}
	p.mu.Lock()
	select {
	case <-p.over:
		p.mu.Unlock()
		file.Close()
		return p.err
	default:
	}
	ranges, err := p.ranges()
	if err != nil {
		p.mu.Unlock()
		file.Close()
		return err
	}
	p.pagers[g] = true
	if g.ready = p.o.First; len(g.ready) > 0 {
		g.poke <- struct{}{}
	}
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

// serve answers faults until the worker or the reading has ended.
func (g *pager) serve(ranges []SeedSegment, registered chan<- error) {
	defer g.leave()
	for _, x := range ranges {
		if err := registerRange(g.file, seedHeapAt+x.Offset, x.Size, uffdModes); err != nil {
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
			for _, r := range ready {
				g.show(r)
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
		all := faults(events[:n])
		for _, at := range all {
			if !g.fault(at, len(all) == 1) {
				return
			}
		}
	}
}

// inlineMost is how long the goroutine that reads the faults may spend on reading a page itself. After this time, another goroutine begins to read the faults.
const inlineMost = time.Millisecond

// fault answers a fault. A fault outside of the heap can only come from a mapping that the worker has moved. alone: no other fault was read together with it. It returns false
// if another goroutine reads the faults from now on.
func (g *pager) fault(address uint64, alone bool) (listens bool) {
	offset := (address - seedHeapAt) &^ (seedPage - 1)
	if offset >= uint64(g.p.c.Units)*SeedUnit {
		return true
	}
	p := g.p
	l, has := p.leafAt(offset)
	if !has { // the source has no memory there either
		time.Sleep(g.again.Reserve().Delay())
		showZeros(g.file, seedHeapAt+offset)
		return true
	}
	now, used := time.Now(), SeedRun{l, 1}
	p.mu.Lock()
	wait, again, reads := !p.valid[l], g.shown[l], false
	var runs, ahead []SeedRun
	if wait && !g.waits[l] {
		r := used
		if len(p.wanted) == 0 { // otherwise, workers wait for pages that Fill has not read yet
			ahead = g.series.ahead(p, l)
		}
		if len(ahead) == 0 {
			r = g.window(l)
		}
		if p.o.Exact { // otherwise, a node that gets the list chooses by itself what it reads around the page
			used = r
		}
		if reads = alone && len(p.wanted) == 0 && p.failed == nil && p.reading.TryLock(); reads {
			runs = p.missing(nil, r)
			for _, x := range ahead {
				runs = p.missing(runs, x)
			}
		} else {
			g.want(l, r)
			for _, x := range ahead {
				g.want(x.First, x)
			}
		}
	}
	p.touch(used, now)
	for _, x := range ahead {
		p.touch(x, now)
	}
	p.hush(now, faultQuiet)
	p.mu.Unlock()
	if again {
		time.Sleep(g.again.Reserve().Delay())
	}
	listens = true
	if reads {
		relief := time.AfterFunc(inlineMost, g.listen)
		wait = !g.read(l, runs)
		listens = relief.Stop()
	}
	if !wait {
		for _, x := range ahead { // first, because the worker continues when its page is shown, and would wait for them, too
			g.show(x)
		}
		g.show(SeedRun{l, 1})
	}
	return listens
}

// want has Fill read a run that contains leaf l, for which the worker waits, or will probably wait next. The caller holds p.mu.
func (g *pager) want(l uint32, r SeedRun) {
	g.waits[l] = true
	if !slices.Contains(g.p.wanted, r) {
		g.p.wanted = append(g.p.wanted, r)
	}
	g.p.ask()
}

// read reads runs, one of which has a leaf for which the worker waits. It does so in its own goroutine, which saves waking the goroutine of Fill. Nothing else is read
// meanwhile. If reading fails, Fill handles the error. The caller has locked p.reading, which read unlocks.
func (g *pager) read(l uint32, runs []SeedRun) bool {
	p := g.p
	defer p.reading.Unlock()
	select {
	case <-p.over:
		return false
	default:
	}
	err := p.fetch(runs, false)
	if err == nil {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = err
	for _, r := range runs {
		g.want(l, r)
	}
	return false
}

// window returns what is read and shown for a leaf that has not arrived. The caller holds p.mu.
func (g *pager) window(l uint32) SeedRun {
	p := g.p
	if !p.o.Exact {
		return p.grow(l)
	}
	// If the worker has waited for a sequence of leaves, further leaves are read too, an eighth of the length of the sequence. Leaves that have arrived earlier do not
	// end a sequence.
	for g.next < l && l-g.next <= sequenceGap && p.valid[g.next] {
		g.next++
	}
	if l != g.next {
		g.sequence = 0
	}
	r := SeedRun{l, min(1+g.sequence/8, p.base[p.segment(l)+1]-l)}
	g.next, g.sequence = l+r.Count, g.sequence+r.Count
	return r
}

// series are faults of a worker at even distances, for example on a column of a matrix.
type series struct {
	last, distance int64  // in leaves
	count          uint32 // faults and leaves read ahead at this distance
}

const (
	// seriesLeast is how many distances in a row must be the same until leaves are read ahead.
	seriesLeast = 3
	// seriesExact is how many leaves a series must have for each leaf that is read ahead with PageOptions.Exact. The proofs of such leaves already take an eighth of their bytes, and at
	// most 1.2 times the touched bytes may be read.
	seriesExact = 16
)

// ahead notes a fault on a leaf that has not arrived. It returns leaves for which the worker will probably wait next: as many as the series has, or with Exact, a sixteenth. A read takes at
// most fetchMost bytes. The caller holds p.mu.
func (s *series) ahead(p *paging, l uint32) (runs []SeedRun) {
	at, count := int64(l), int64(p.count())
	for range sequenceGap { // leaves that have arrived earlier do not end a series
		next := s.last + s.distance
		if s.distance == 0 || next == at || next < 0 || next >= count || !p.valid[next] {
			break
		}
		s.last = next
	}
	distance := at - s.last
	s.last = at
	if max(distance, -distance) < groupLeaves || l > 0 && p.valid[l-1] { // window reads larger parts around such leaves
		s.distance, s.count = 0, 0
		return nil
	}
	if distance != s.distance {
		s.distance, s.count = distance, 0
	}
	s.count++
	most := min(s.count, uint32(fetchMost/p.leaf))
	if p.o.Exact {
		most = s.count / seriesExact
	}
	if s.count < seriesLeast {
		return nil
	}
	for range most {
		next := s.last + distance
		if next < 0 || next >= count {
			break
		}
		s.last, s.count = next, s.count+1
		runs = append(runs, SeedRun{uint32(next), 1})
	}
	return runs
}

// sequenceGap is the most leaves in a row that a sequence may contain although they have arrived earlier.
const sequenceGap = 64

// arrived notes that runs have arrived. If show is set, the worker gets them even if it does not wait for them. The caller holds p.mu.
func (g *pager) arrived(runs []SeedRun, show bool) {
	before := len(g.ready)
	for l := range g.waits {
		if g.p.valid[l] {
			delete(g.waits, l)
			g.ready = append(g.ready, SeedRun{l, 1})
		}
	}
	if show {
		g.ready = append(g.ready, runs...)
	}
	if len(g.ready) == before {
		return
	}
	select {
	case g.poke <- struct{}{}:
	default:
	}
}

// show maps the leaves of a run that have arrived into the worker, together with valid leaves before and after them.
func (g *pager) show(r SeedRun) {
	p := g.p
	for l := r.First; l < r.First+r.Count; l++ {
		p.mu.Lock()
		part := p.around(l)
		for k := range part.Count {
			g.shown[part.First+k] = true
		}
		p.mu.Unlock()
		if part.Count == 0 {
			continue
		}
		x := p.bytes(part)
		if end := min(x.Offset+x.Size, uint64(p.c.Units)*SeedUnit); x.Offset < end {
			showPages(g.file, seedHeapAt+x.Offset, end-x.Offset)
		}
		l = part.First + part.Count - 1
	}
}
