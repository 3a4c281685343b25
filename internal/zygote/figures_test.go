package zygote

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// TestSeedPageFigures prints how long pages of a seed of 16 MiB take to arrive on demand, and how many workers a second start from a seed without the sandbox. There is no network: the
// source is a file of this node.
func TestSeedPageFigures(t *testing.T) {
	testkit.Figures(t)
	const pages, rounds = 4096, 7
	p := newPagedSeed(t)
	read := func(l *leased) float64 { // us for each page
		began := time.Now()
		if got := answers(l.mustCall(t, 0, ask('w', 0))); got[0] != 0 {
			t.Fatalf("%d pages are wrong", got[0])
		}
		return float64(time.Since(began).Nanoseconds()) / 1e3 / pages
	}
	var first, cached, reads, ratio []float64
	for range rounds {
		p.start(t, make(chan struct{}), nil)
		first = append(first, read(p.lease(t)))
		before := p.count()
		cached = append(cached, read(p.lease(t)))
		reads = append(reads, float64(p.count()-before))
		p.copy.Close()
		<-p.over

		p.start(t, make(chan struct{}), nil, exact)
		l := p.lease(t)
		p.pages(t, l, 4095)
		moved, touched := p.copy.Moved(), every(31, 0, 2000)
		p.pages(t, l, touched...)
		ratio = append(ratio, float64(p.copy.Moved()-moved)/float64(len(touched)*seedPage))
		p.copy.Close()
		<-p.over
	}
	copied, fresh, hashed := copyFloors(t, pages)
	testkit.Figure("first fetch of a page, 64 at a time, without the network", median(first), 6, false, "us", fmt.Sprintf("copying a page, and again into a new memory file: %.2f us; hashing it: %.2f us", copied+fresh, hashed))
	testkit.Figure("page that the node has", median(cached), 0.5, false, "us", fmt.Sprintf("copying a page: %.2f us", copied))
	testkit.Figure("remote reads for a second worker on the node", slices.Max(reads), 0, false, "reads", "")
	testkit.Figure("bytes read, scattered pages, seed-fill=touched", median(ratio), 1.2, false, "times the touched bytes", "")

	testSandbox = Sandbox{}
	z := startZygote(t)
	s := makeSeed(t, z, p.code)
	var overlay []float64 // us
	rate := func(s *Seed) float64 {
		const starts = 100
		var took time.Duration
		var c *client
		for i := range starts {
			if i%10 == 0 {
				c = startClient(t)
			}
			spec, _ := c.spec(t, p.code)
			spec.Names, spec.Seed, spec.MemoryLimit = []string{"query", "setup"}, s, seedMemory
			began := time.Now()
			w, err := z.Spawn(t.Context(), spec)
			took += time.Since(began)
			if err != nil {
				t.Fatal(err)
			}
			overlay = append(overlay, float64(w.Steps().Overlay.Nanoseconds())/1e3)
			w.Kill()
			<-w.Done()
		}
		return starts / took.Seconds()
	}
	plain := rate(nil)
	overlay = nil
	seeded := rate(s)
	testkit.Figure("overlay of a seed of 16 MiB", median(overlay)/1e3, 0.1, false, "ms", "without the steps before it: placing the libraries, opening the heap, loading the library")
	testkit.Figure("starts from a seed of 16 MiB, one after the other, without the sandbox", seeded, 4000, true, "a second", fmt.Sprintf("without a seed: %.0f; fork of a process of that size: %s", plain, testkit.ForkFloor(t, filepath.Join(filepath.Dir(workerPath(t)), "rfaas-bench-peer"))))
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// copyFloors returns how long copying a page takes, into memory that exists and into a new memory file, and how long hashing it takes, in us.
func copyFloors(t *testing.T, pages int) (copied, fresh, hashed float64) {
	t.Helper()
	from, to := make([]byte, pages*seedPage), make([]byte, pages*seedPage)
	for i := range from {
		from[i], to[i] = byte(i), 1
	}
	var a, b, h []float64
	for range 7 {
		began := time.Now()
		copy(to, from)
		a = append(a, float64(time.Since(began).Nanoseconds())/1e3/float64(pages))
		began = time.Now()
		appendLeaves(nil, from, seedPage)
		h = append(h, float64(time.Since(began).Nanoseconds())/1e3/float64(pages))
		fd, err := fixedMemfd("floor", len(from), 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "floor")
		m, err := mapPages(fd, uint64(len(from)))
		if err != nil {
			t.Fatal(err)
		}
		began = time.Now()
		for at := 0; at < len(from); at += segmentSize {
			if err := m.put(uint64(at), from[at:at+segmentSize]); err != nil {
				t.Fatal(err)
			}
		}
		b = append(b, float64(time.Since(began).Nanoseconds())/1e3/float64(pages))
		m.close()
		f.Close()
	}
	return median(a), median(b), median(h)
}
