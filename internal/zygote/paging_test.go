package zygote

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// errSpoil makes a source send a wrong byte.
var errSpoil = errors.New("spoil the bytes")

// source is the memory of another node's seed.
type source struct {
	seed *Seed
	c    *SeedCopy

	mu     sync.Mutex
	reads  []int // segments of which something was read
	bytes  uint64
	proofs []byte
	// before is called before something of a segment is read.
	before func(segment int) error
}

func newSource(t testing.TB, origin *Seed) *source {
	t.Helper()
	c, err := origin.Contents(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &source{seed: origin, c: c, proofs: make([]byte, c.ProofsSize())}
	c.Proofs(s.proofs)
	return s
}

func (s *source) read(parts []SeedPart, b []byte) error {
	for _, x := range parts {
		if err := s.readPart(x, b[:x.Size]); err != nil {
			return err
		}
		b = b[x.Size:]
	}
	return nil
}

func (s *source) readPart(x SeedPart, b []byte) error {
	s.mu.Lock()
	s.bytes += x.Size
	before := s.before
	if x.Segment >= 0 {
		s.reads = append(s.reads, x.Segment)
	}
	s.mu.Unlock()
	if before != nil {
		if err := before(x.Segment); err != nil && err != errSpoil {
			return err
		} else if err != nil {
			defer func() { b[len(b)-1]++ }()
		}
	}
	if x.Segment < 0 {
		copy(b, s.proofs[x.Offset:])
		return nil
	}
	_, err := s.seed.File.ReadAt(b, int64(s.c.Segments[x.Segment].Offset+x.Offset))
	return err
}

// count returns how many reads of segments there were.
func (s *source) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.reads)
}

// segment returns the segment that has the number of a page of the table.
func (s *source) segment(page int) int {
	want := binary.LittleEndian.AppendUint32(bytes.Repeat([]byte{byte(page)}, 8), uint32(page+1))
	for i, x := range s.c.Segments {
		b := make([]byte, x.Size)
		if _, err := s.seed.File.ReadAt(b, int64(x.Offset)); err == nil && bytes.Contains(b, want) {
			return i
		}
	}
	return -1
}

// pagedSeed is a seed whose pages come from another one.
type pagedSeed struct {
	*source
	z    *Zygote
	code *os.File
	copy *Seed
	over chan error // result of Fill
}

// pageSeed makes a seed and pages it into a second zygote. The segments that no worker waits for arrive after `rest` is closed.
func pageSeed(t *testing.T, rest <-chan struct{}, before func(*pagedSeed, int) error, options ...func(*PageOptions)) *pagedSeed {
	t.Helper()
	p := newPagedSeed(t)
	p.start(t, rest, before, options...)
	return p
}

// newPagedSeed makes the seed, but no copy of it.
func newPagedSeed(t *testing.T) *pagedSeed {
	t.Helper()
	testSandbox = confined
	t.Cleanup(func() { testSandbox = Sandbox{} })
	p := &pagedSeed{z: startZygote(t), code: seedLibrary(t, "paged.c"), over: make(chan error, 1)}
	if !p.z.FillsPages() {
		testkit.Lacks(t, "memory of workers cannot be filled on demand")
	}
	p.source = newSource(t, makeSeed(t, p.z, p.code))
	return p
}

// start begins to copy the seed.
func (p *pagedSeed) start(t *testing.T, rest <-chan struct{}, before func(*pagedSeed, int) error, options ...func(*PageOptions)) {
	t.Helper()
	o := PageOptions{Read: p.source.read}
	for _, change := range options {
		change(&o)
	}
	var err error
	if p.copy, err = PageSeed(p.c, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.copy.Close() })
	p.mu.Lock()
	p.before = func(i int) error {
		if before != nil {
			if err := before(p, i); err != nil {
				return err
			}
		}
		return nil
	}
	p.mu.Unlock()
	go func(copied *Seed) { p.over <- copied.Fill(t.Context(), rest) }(p.copy)
}

// set makes *to the segment of a page.
func (s *source) set(to *int, page int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*to = s.segment(page)
}

func (s *source) is(target *int, segment int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *target == segment
}

func ask(what byte, page uint32) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, uint32(what)), page)
}

func answers(b []byte) (n [2]uint32) {
	n[0], n[1] = binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	return n
}

func (p *pagedSeed) lease(t *testing.T) *leased {
	t.Helper()
	return seeded(t, p.z, startClient(t), p.code, p.copy, false)
}

func (p *pagedSeed) finish(t *testing.T) error {
	t.Helper()
	select {
	case err := <-p.over:
		return err
	case <-time.After(30 * time.Second):
		t.Fatal("the pages are still being read")
		return nil
	}
}

// A worker starts before its seed's pages have arrived, and gets the pages that it reads. A second worker on the node causes no further reads of these
// pages. When all pages have arrived, the file is sealed, and the workers go on.
func TestPagesOnDemand(t *testing.T) {
	rest := make(chan struct{})
	p := pageSeed(t, rest, nil)
	first := p.lease(t)
	for _, page := range []uint32{0, 4095, 2000} {
		if got := answers(first.mustCall(t, 0, ask('p', page))); got[0] != page+1 {
			t.Errorf("page %d has %d", page, got[0])
		}
	}
	if got := answers(first.mustCall(t, 0, ask('s', 1000))); got != [2]uint32{1001, 1501} {
		t.Errorf("system calls on absent pages: %d", got)
	}
	if n, all := p.count(), len(p.c.Segments); n > all/2 {
		t.Errorf("%d of %d segments were read", n, all)
	}
	before := p.count()
	second := p.lease(t)
	for _, page := range []uint32{0, 4095, 2000} {
		if got := answers(second.mustCall(t, 0, ask('p', page))); got[0] != page+1 {
			t.Errorf("second worker: page %d has %d", page, got[0])
		}
	}
	if n := p.count(); n != before {
		t.Errorf("the second worker needed %d reads", n-before)
	}
	if !p.copy.Filling() || len(p.copy.Touched()) == 0 {
		t.Error("nothing was left to be filled")
	}
	close(rest)
	if err := p.finish(t); err != nil {
		t.Fatal(err)
	}
	if n, all := p.copy.Moved(), p.c.Bytes(); n < all || n > all+all/32 {
		t.Errorf("%d bytes were read, of a seed of %d", n, all)
	}
	const all = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	if seals, err := unix.FcntlInt(p.copy.File.Fd(), unix.F_GET_SEALS, 0); err != nil || seals&all != all {
		t.Errorf("seals %#x, %v", seals, err)
	}
	for i, l := range []*leased{first, second, p.lease(t)} {
		// The first worker has overwritten a word of page 1500.
		if got := answers(l.mustCall(t, 0, ask('w', 0))); got[0] != 0 {
			t.Errorf("worker %d: %d pages are wrong", i, got[0])
		}
	}
	if got, err := p.copy.Contents(t.Context()); err != nil || got.Sum() != p.c.Sum() {
		t.Errorf("the copy differs: %v", err)
	}
}

// A process that a function forks has all pages, and one that it makes by a bare system call has none of them, instead of zeros.
func TestPagesForked(t *testing.T) {
	p := pageSeed(t, make(chan struct{}), nil)
	l := p.lease(t)
	if got := answers(l.mustCall(t, 0, ask('c', 0))); got[0] != 100+uint32(unix.SIGSEGV) {
		t.Errorf("a process of a bare system call: %d", got[0])
	}
	if got := answers(l.mustCall(t, 0, ask('f', 0))); got[0] != 0 {
		t.Errorf("a forked process: %d", got[0])
	}
	if p.finish(t) != nil {
		t.Error("not all pages have arrived")
	}
	if got := answers(l.mustCall(t, 0, ask('f', 0))); got[0] != 0 {
		t.Errorf("a second forked process: %d", got[0])
	}
}

// If the source is lost, or sends wrong bytes, while a call waits for a page, the call fails by name. Nothing else gets the page, and later workers start without the seed.
func TestPagesLost(t *testing.T) {
	for text, spoil := range map[string]error{"the source is gone": errors.New("the source is gone"), "was announced as SHA-256": errSpoil} {
		t.Run(text, func(t *testing.T) {
			var spoiled sync.Once
			target := -2 // none
			p := pageSeed(t, make(chan struct{}), func(p *pagedSeed, i int) (err error) {
				if p.is(&target, i) {
					spoiled.Do(func() { err = spoil })
				}
				return err
			})
			l := p.lease(t)
			p.set(&target, 3000)
			if got := answers(l.mustCall(t, 0, ask('p', 0))); got[0] != 1 {
				t.Fatalf("page 0 has %d", got[0])
			}
			if r, err := l.call(0, ask('w', 0)); err == nil && r.status == 0 {
				t.Error("a call without its pages has returned")
			}
			<-l.Done()
			if x := l.Exit(); !strings.Contains(x.Reason, "lost the pages of its seed") || !strings.Contains(x.Reason, text) {
				t.Errorf("the worker %s", x.Reason)
			}
			if err := p.finish(t); err == nil || p.copy.Lost() == nil {
				t.Error("nothing was lost")
			}
			if page := p.copy.paging; page.valid[page.base[target]] {
				t.Error("the segment counts as valid")
			}
			later := lease(t, p.z, startClient(t), func(spec *Spec) {
				spec.Code, spec.Names, spec.Seed, spec.MemoryLimit = p.code, []string{"query", "setup"}, p.copy, seedMemory
			})
			if s := later.Steps(); s.Seeded || !strings.Contains(s.Unseeded, text) {
				t.Errorf("a later worker: %+v", s)
			}
		})
	}
}

// A worker that is killed while it waits for a page leaves nothing behind, and others go on.
func TestPagesWorkerKilled(t *testing.T) {
	hold, asked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	target := -2 // none
	p := pageSeed(t, make(chan struct{}), func(p *pagedSeed, i int) error {
		if p.is(&target, i) {
			once.Do(func() { close(asked); <-hold })
		}
		return nil
	})
	dies, lives := p.lease(t), p.lease(t)
	p.set(&target, 3000)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		if r, err := dies.call(0, ask('p', 3000)); err == nil && r.status == 0 {
			t.Error("a call without its page has returned")
		}
	}()
	<-asked
	dies.Kill()
	<-dies.Done()
	<-answered
	close(hold)
	for _, page := range []uint32{3000, 10} {
		if got := answers(lives.mustCall(t, 0, ask('p', page))); got[0] != page+1 {
			t.Errorf("page %d has %d", page, got[0])
		}
	}
	eventually(t, "only the faults of the other worker are answered", func() bool {
		p.copy.paging.mu.Lock()
		defer p.copy.paging.mu.Unlock()
		return len(p.copy.paging.pagers) <= 1
	})
}

// A worker can neither send a descriptor once user code may run, nor ask twice.
func TestPagesDescriptor(t *testing.T) {
	z := startZygote(t)
	w := z.newWorker(1, 0)
	ours, theirs, err := wire.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	w.conn = ours
	w.ready = true
	w.serves.Store(&Spec{})
	m := wire.Message{Type: wire.Pages, ID: 1}
	file := sealedFile(t, testLibrary(t))
	if err := unix.Sendmsg(theirs, m.Encode(), unix.UnixRights(int(file.Fd())), nil, 0); err != nil {
		t.Fatal(err)
	}
	unix.Close(theirs)
	if err := w.hear(t.Context(), func(*wire.Message) bool { return false }); err == nil || !strings.Contains(err.Error(), "unexpected message of type 28") {
		t.Errorf("%v", err)
	}
	if w.pages.Load() != nil {
		t.Error("the descriptor was taken")
	}
	if !bytes.Equal(m.Encode()[:4], []byte("RFWK")) {
		t.Error("magic")
	}
}

// When the executor and its spawner end while a call waits for a page, the worker ends. It does not see zeros when the executor's descriptors are closed.
func TestPagesExecutorEnds(t *testing.T) {
	hold, asked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	target := -2 // none
	p := pageSeed(t, make(chan struct{}), func(p *pagedSeed, i int) error {
		if p.is(&target, i) {
			once.Do(func() { close(asked); <-hold })
		}
		return nil
	})
	l := p.lease(t)
	p.set(&target, 3000)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		if r, err := l.call(0, ask('p', 3000)); err == nil && r.status == 0 {
			t.Errorf("the call has returned %d", answers(r.data))
		}
	}()
	<-asked
	p.copy.paging.mu.Lock()
	for g := range p.copy.paging.pagers {
		g.file.Close()
	}
	p.copy.paging.mu.Unlock()
	p.z.spawner.process.Kill()
	<-l.Done()
	<-answered
	close(hold)
}

// User code can make a seed's header name the whole heap. Even so, the executor allocates no pages that the seed does not have.
func TestPagesUnused(t *testing.T) {
	testSandbox = confined
	t.Cleanup(func() { testSandbox = Sandbox{} })
	z, code := startZygote(t), seedLibrary(t, "paged.c")
	if !z.FillsPages() {
		testkit.Lacks(t, "memory of workers cannot be filled on demand")
	}
	origin := makeSeed(t, z, code)
	c, err := origin.Contents(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	heap, proofs := origin.Heap(), make([]byte, c.ProofsSize())
	c.Proofs(proofs)
	header := slices.IndexFunc(c.Segments, func(x SeedSegment) bool { return x.Offset <= heap && heap < x.Offset+x.Size })
	read := func(i int, b []byte) error {
		_, err := origin.File.ReadAt(b, int64(c.Segments[i].Offset))
		if i == header {
			h := b[heap-c.Segments[i].Offset:]
			binary.LittleEndian.PutUint32(h[seedExtents-8:], 1)
			binary.LittleEndian.PutUint64(h[seedExtents:], 0)
			binary.LittleEndian.PutUint64(h[seedExtents+8:], heap)
		}
		return err
	}
	forged := &SeedCopy{Units: c.Units, Segments: slices.Clone(c.Segments)}
	b := make([]byte, c.Segments[header].Size)
	if err := read(header, b); err != nil {
		t.Fatal(err)
	}
	forged.Segments[header].Sum = root(appendLeaves(nil, b, forged.leafSize()))
	s, err := PageSeed(forged, PageOptions{Read: func(parts []SeedPart, b []byte) error {
		for _, x := range parts {
			whole := make([]byte, c.Segments[max(x.Segment, 0)].Size)
			if x.Segment < 0 {
				copy(b, proofs[x.Offset:][:x.Size])
			} else if err := read(x.Segment, whole); err != nil {
				return err
			}
			if x.Segment >= 0 {
				copy(b, whole[x.Offset:][:x.Size])
			}
			b = b[x.Size:]
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	go s.Fill(t.Context(), nil)
	l := seeded(t, z, startClient(t), code, s, false)
	l.mustCall(t, 0, ask('p', 0))
	var before, after unix.Stat_t
	fd := int(s.File.Fd())
	if err := unix.Fstat(fd, &before); err != nil {
		t.Fatal(err)
	}
	if got := answers(l.mustCall(t, 0, ask('u', uint32(heap/seedPage-2000)))); got[0] != 0 {
		t.Errorf("%d unused pages are not zero", got[0])
	}
	if err := unix.Fstat(fd, &after); err != nil {
		t.Fatal(err)
	}
	if grown := (after.Blocks - before.Blocks) * 512; grown > 1000*seedPage {
		t.Errorf("the seed's file has grown by %d bytes", grown)
	}
}
