package zygote

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

func exact(o *PageOptions) { o.Exact = true }

// pages reads pages of the table in a worker, and checks their numbers.
func (p *pagedSeed) pages(t *testing.T, l *leased, pages ...uint32) {
	t.Helper()
	for _, page := range pages {
		if got := answers(l.mustCall(t, 0, ask('p', page))); got[0] != page+1 {
			t.Errorf("page %d has %d", page, got[0])
		}
	}
}

// every returns page numbers.
func every(step, from, end uint32) (list []uint32) {
	for ; from < end; from += step {
		list = append(list, from)
	}
	return list
}

// settled waits until all of PageOptions.First has been read.
func (p *pagedSeed) settled(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		g := p.copy.paging
		g.mu.Lock()
		left := len(g.first)
		if left == 0 { // what is being read at present has arrived, too
			for _, r := range g.o.First {
				left += len(g.missing(nil, r))
			}
		}
		g.mu.Unlock()
		if left == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d recorded runs have not arrived", left)
		}
	}
}

// With single pages, at most 1.2 times the touched bytes are read, whether the pages follow each other or not. What the first worker has touched is recorded, and read for a worker of another
// node with large reads, so that this worker waits for no page.
func TestPagesExact(t *testing.T) {
	told := make(chan []SeedRun, 16)
	p := pageSeed(t, nil, nil, exact, func(o *PageOptions) { o.Touched = func(list []SeedRun) { told <- list } })
	l := p.lease(t)
	p.pages(t, l, 4095)
	moves := func(what string, pages []uint32) {
		t.Helper()
		before := p.copy.Moved()
		p.pages(t, l, pages...)
		if moved, touched := p.copy.Moved()-before, uint64(len(pages))*seedPage; float64(moved) > 1.2*float64(touched) {
			t.Errorf("%s: %d bytes were read for %d bytes that were touched, %.2f times as many", what, moved, touched, float64(moved)/float64(touched))
		} else {
			t.Logf("%s: %.3f times the touched bytes, of a seed of %d", what, float64(moved)/float64(touched), p.c.Bytes())
		}
	}
	scattered, sequence := every(31, 0, 2000), every(1, 2048, 2560)
	moves("scattered pages", scattered)
	moves("a sequence", sequence)
	if missing := p.copy.Missing(); missing < p.c.Bytes()/2 {
		t.Errorf("%d bytes are missing", missing)
	}
	var list []SeedRun
	for first := range told {
		if list = first; slices.Equal(list, p.copy.Touched()) {
			break
		}
	}
	other := &pagedSeed{source: newSource(t, p.source.seed), z: p.z, code: p.code, over: make(chan error, 1)}
	var mu sync.Mutex
	reads := 0
	other.start(t, nil, nil, exact, func(o *PageOptions) {
		o.First, o.Read = list, func(parts []SeedPart, b []byte) error {
			mu.Lock()
			defer mu.Unlock()
			reads++
			return other.read(parts, b)
		}
	})
	other.settled(t)
	atStart := other.copy.Moved()
	if atStart > p.copy.Moved()+p.copy.Moved()/5 {
		t.Errorf("the recorded pages took %d bytes, the first worker's %d", atStart, p.copy.Moved())
	}
	if mu.Lock(); reads > 12 {
		t.Errorf("%d reads", reads)
	}
	mu.Unlock()
	l = other.lease(t)
	other.pages(t, l, slices.Concat(scattered, sequence)...)
	if more := other.copy.Moved() - atStart; more > 64<<10 {
		t.Errorf("%d bytes were read for pages that were recorded", more)
	}
	p.copy.Close()
	other.copy.Close()
	if err := other.finish(t); !errors.Is(err, ErrReleased) {
		t.Error(err)
	}
}

// Few bytes are read for scattered pages, and few reads for a sequence, also if everything is read in the end. With Exact, pages that have arrived earlier do not end a sequence.
func TestPagesWindows(t *testing.T) {
	for name, c := range map[string]struct {
		options []func(*PageOptions)
		reads   int
	}{"all": {nil, 30}, "exact": {[]func(*PageOptions){exact}, 60}} {
		t.Run(name, func(t *testing.T) {
			p := pageSeed(t, make(chan struct{}), nil, c.options...)
			l := p.lease(t)
			p.pages(t, l, 4095)
			moved, scattered := p.copy.Moved(), every(64, 10, 2000)
			p.pages(t, l, scattered...)
			if n := p.copy.Moved() - moved; float64(n) > 1.2*float64(len(scattered)*seedPage) {
				t.Errorf("%d bytes were read for %d scattered pages", n, len(scattered))
			}
			p.pages(t, l, every(50, 2400, 3000)...)
			before := p.count()
			p.pages(t, l, every(1, 2390, 3000)...)
			if n := p.count() - before; n > c.reads {
				t.Errorf("a sequence of 610 pages took %d reads", n)
			}
		})
	}
}

// Pages at even distances, in either direction, are read ahead, together with the page for which the worker waits. With Exact, at most 1.2 times the touched bytes are read.
func TestPagesInSeries(t *testing.T) {
	for name, c := range map[string]struct {
		options []func(*PageOptions)
		reads   int
	}{"all": {nil, 12}, "exact": {[]func(*PageOptions){exact}, 60}} {
		t.Run(name, func(t *testing.T) {
			p := newPagedSeed(t)
			var reads atomic.Int32
			count := func(o *PageOptions) {
				o.Read = func(parts []SeedPart, b []byte) error {
					reads.Add(1)
					return p.source.read(parts, b)
				}
			}
			p.start(t, make(chan struct{}), nil, append(c.options, count)...)
			l := p.lease(t)
			p.pages(t, l, 4095)
			up, down := every(20, 5, 1800), every(20, 2005, 3800)
			slices.Reverse(down)
			for _, pages := range [][]uint32{up, down} {
				before, moved := reads.Load(), p.copy.Moved()
				p.pages(t, l, pages...)
				if n := reads.Load() - before; int(n) > c.reads {
					t.Errorf("%d pages at even distances took %d reads", len(pages), n)
				}
				if n := p.copy.Moved() - moved; p.copy.paging.o.Exact && float64(n) > 1.2*float64(len(pages)*seedPage) {
					t.Errorf("%d bytes were read for %d pages", n, len(pages))
				}
			}
		})
	}
}

// A thread whose page has arrived does not wait until a page for another thread has been read.
func TestPagesReadAside(t *testing.T) {
	reading, hold := make(chan struct{}), make(chan struct{})
	p := newPaging(&SeedCopy{Units: 2, Segments: []SeedSegment{{Size: 2 * seedPage}}}, PageOptions{Read: func([]SeedPart, []byte) error {
		close(reading)
		<-hold
		return errors.New("the source is gone")
	}})
	p.valid[1] = true
	faults, events, err := os.Pipe() // in place of the worker's userfaultfd
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	g := &pager{p: p, file: faults, waits: map[uint32]bool{}, shown: make([]bool, 2), again: rate.NewLimiter(p.again, 2)}
	var listening sync.WaitGroup
	listening.Go(g.listen)
	touch := func(page uint64) {
		b := make([]byte, uffdMessage)
		b[0] = uffdPagefault
		binary.LittleEndian.PutUint64(b[16:], seedHeapAt+page*seedPage)
		if _, err := events.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	touch(0)
	<-reading
	touch(1)
	shown := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return g.shown[1]
	}
	for end := time.Now().Add(30 * time.Second); !shown(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the second thread waits for the page of the first")
		}
	}
	close(hold)
	listening.Wait()
	faults.Close()
}

// A page reaches the file, whether or not the file already has a page of zeros there, and also without a userfaultfd.
func TestPageFile(t *testing.T) {
	const size = 16 * seedPage
	for _, plain := range []bool{false, true} {
		fd, err := fixedMemfd("pages", size, 0)
		if err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(fd), "pages")
		defer file.Close()
		f, err := mapPages(fd, size)
		if err != nil {
			t.Fatal(err)
		}
		defer f.close()
		if _, err := os.Stat("/dev/userfaultfd"); err == nil && f.faults == nil {
			t.Error("this kernel has userfaultfd, but the file of pages has none")
		} else if !plain && f.faults == nil {
			testkit.NotTested(t, "pages of a seed that a userfaultfd writes: %v", err)
			continue
		}
		if plain && f.faults != nil {
			f.faults.Close() // its range is then regular memory
			f.faults = nil
		}
		for _, page := range []int64{0, 5, 6, 15} {
			if _, err := file.WriteAt(make([]byte, seedPage), page*seedPage); err != nil {
				t.Fatal(err)
			}
		}
		want := bytes.Repeat([]byte("page"), size/4)
		for _, part := range [][2]uint64{{0, 3}, {3, 9}, {12, 4}} {
			from, end := part[0]*seedPage, (part[0]+part[1])*seedPage
			if err := f.put(from, want[from:end]); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := io.ReadAll(io.NewSectionReader(file, 0, size)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("without a userfaultfd %v: the file differs, %v", plain, err)
		}
	}
}

// Pages that a worker drops have the seed's bytes when it reads them again. The executor limits how often it maps them.
func TestPagesDropped(t *testing.T) {
	p := pageSeed(t, nil, nil, exact)
	p.copy.paging.again = 0 // so that the number of faults is known, which stay below the burst
	l := p.lease(t)
	p.pages(t, l, 5)
	if got := answers(l.mustCall(t, 0, ask('d', 0))); got[0] != 0 {
		t.Errorf("%d pages are wrong", got[0])
	}
	p.copy.paging.mu.Lock()
	defer p.copy.paging.mu.Unlock()
	for g := range p.copy.paging.pagers {
		if used := float64(g.again.Burst()) - g.again.Tokens(); used < 2*4096/leavesMost {
			t.Errorf("%g faults on dropped pages have counted", used)
		}
	}
}

// Whatever a list of touched pages contains, every page arrives, and the executor reads at most a quarter of the seed because of it.
func TestPagesRecordedHostile(t *testing.T) {
	p := newPagedSeed(t)
	leaves := newPaging(p.c, PageOptions{}).count()
	for what, list := range map[string][]SeedRun{
		"too large":  {{0, math.MaxUint32}, {1, math.MaxUint32}, {math.MaxUint32, math.MaxUint32}},
		"none there": {{leaves, 1}, {leaves + 5, 7}, {3, 0}},
		"many":       slices.Repeat([]SeedRun{{0, leaves}}, 3*touchedMost),
		"backwards":  {{leaves - 1, 5}, {leaves - 2, 5}, {0, 1}},
	} {
		if clean := cleanRuns(list, leaves); len(clean) > touchedMost {
			t.Errorf("%s: %d runs", what, len(clean))
		}
		p.start(t, nil, nil, exact, func(o *PageOptions) { o.First = list })
		p.pages(t, p.lease(t), 0, 77, 4095)
		p.settled(t)
		if moved := p.copy.Moved(); moved > p.c.Bytes()*3/8 {
			t.Errorf("%s: %d bytes were read, of %d", what, moved, p.c.Bytes())
		}
		p.copy.Close()
		if err := p.finish(t); err != nil && !errors.Is(err, ErrReleased) {
			t.Errorf("%s: %v", what, err)
		}
	}
	s := p.source.seed
	if s.Touched() != nil {
		t.Error("a seed of which nothing is recorded has touched pages")
	}
	honest := []SeedRun{{7, 3}, {1, 2}}
	s.Record(slices.Repeat([]SeedRun{{1, 1}}, 3*touchedMost))
	if s.Record(honest); !slices.Equal(s.Touched(), honest) {
		t.Errorf("%v is kept, a list that names one leaf again and again", s.Touched())
	}
	if s.Record([]SeedRun{{0, leaves}}); leavesIn(s.Touched()) > uint64(leaves/4) {
		t.Errorf("%d leaves of %d are kept", leavesIn(s.Touched()), leaves)
	}
}

// If something waits for all of a seed, the rest is read at once, even while workers start.
func TestPagesHurry(t *testing.T) {
	p := newPagedSeed(t)
	for what, wait := range map[string]func(context.Context) error{
		"a lease with the seed as a table": func(ctx context.Context) error { _, err := (&Table{Seed: p.copy}).file(ctx); return err },
		"a handover":                       func(context.Context) error { p.copy.Hurry(); return nil },
	} {
		rest := make(chan struct{})
		p.start(t, rest, nil, exact)
		g := p.copy.paging
		g.mu.Lock()
		g.hush(time.Now(), time.Hour) // as if workers started all the time
		g.mu.Unlock()
		if what == "a handover" {
			g.pace = time.Hour
			close(rest)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		if err := wait(ctx); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		cancel()
		if err := p.finish(t); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		p.copy.Close()
	}
}

// If the source is lost, or sends wrong bytes or wrong hashes, while a call waits for a page, another source is read. The call has the right result.
func TestPagesSecondSource(t *testing.T) {
	for what, spoil := range map[string]error{"gone": errors.New("the source is gone"), "wrong bytes": errSpoil, "wrong hashes": errSpoil} {
		for _, all := range []bool{false, true} {
			var once sync.Once
			var why error
			rest := make(chan struct{})
			if all {
				close(rest)
			}
			p := newPagedSeed(t)
			p.start(t, rest, func(p *pagedSeed, i int) (err error) {
				if (i < 0) == (what == "wrong hashes") {
					once.Do(func() { err = spoil })
				}
				return err
			}, exact, func(o *PageOptions) { o.Lost = func(err error) error { why = err; return nil } })
			p.pages(t, p.lease(t), 3000, 4, 3001)
			p.copy.Close()
			if err := p.finish(t); err != nil && !errors.Is(err, ErrReleased) {
				t.Errorf("%s: %v", what, err)
			}
			if want := map[string]string{"gone": "is gone", "wrong bytes": "announced as SHA-256", "wrong hashes": "announced"}[what]; !all && (why == nil || !strings.Contains(why.Error(), want)) {
				t.Errorf("%s: %v", what, why)
			}
		}
	}
}
