package agent

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/channel"
)

// channels are what a lease's workers are called by.
type channels struct {
	t   testing.TB
	dev *dataplane.Device
	ep  *channel.Endpoint
	all []*channel.Channel
}

const testDepth, testEager = 2, 4096

func newChannels(t testing.TB, provider string, n int) *channels {
	t.Helper()
	c := &channels{t: t}
	var err error
	if c.dev, err = dataplane.Open(provider, dataplane.Options{GIDIndex: -1, ActiveOnly: provider == dataplane.TCP}); err != nil {
		t.Fatal(err)
	}
	if c.ep, err = channel.NewEndpoint(c.dev, n, testDepth); err != nil {
		t.Fatal(err)
	}
	for range n {
		ch, err := c.ep.NewChannel(testDepth, testEager)
		if err != nil {
			t.Fatal(err)
		}
		c.all = append(c.all, ch)
	}
	t.Cleanup(c.close)
	return c
}

func (c *channels) close() {
	if c.dev == nil {
		return
	}
	for _, ch := range c.all {
		ch.Close()
	}
	c.ep.Close()
	c.dev.Close()
	c.dev = nil
}

func (c *channels) offers() (all [][]byte) {
	c.t.Helper()
	for _, ch := range c.all {
		b, err := ch.Offer()
		if err != nil {
			c.t.Fatal(err)
		}
		all = append(all, b)
	}
	return all
}

// call calls echo on a worker.
func (l *leased) call(worker int) error {
	out := make([]byte, 64)
	n, st := l.all[worker].Call(uint32(slices.Index(l.Functions, "echo")), []byte("hello"), out, dataplane.Now()+int64(20*time.Second))
	if n = min(max(n, 0), len(out)); st != dataplane.OK || string(out[:n]) != "hello" {
		return fmt.Errorf("status %v, %q", st, out[:n])
	}
	return nil
}

func spec(workers uint32) protocol.Spec {
	return protocol.Spec{Workers: workers, CoresPerWorker: 1, Depth: testDepth, Eager: testEager, Flags: protocol.Reuse, Library: "echo.so"}
}

func library(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Open(built(t, "build/functions/echo.so"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// leased is a granted lease.
type leased struct {
	*channels
	protocol.Candidate
	p    *process
	key  uint64
	spec protocol.Spec
}

// acquire acquires a lease as the library does: offers, and others as long as it gets candidates.
func (p *process) acquire(a protocol.Acquire) (*leased, error) {
	p.t.Helper()
	return p.acquireWith(a, nil)
}

// acquireWith offers the channels of a cached lease first, if that is not nil.
func (p *process) acquireWith(a protocol.Acquire, cached *leased) (*leased, error) {
	p.t.Helper()
	a.First = true
	if a.Session == 0 {
		a.Session = 1
	}
	n := int(a.Spec.Workers)
	if n == 0 {
		n = 1
	}
	var f *os.File
	if a.From == 0 {
		f = library(p.t)
		defer f.Close() // long tests take many leases
	}
	a.Provider = "shm"
	p.page.line(a.Key).key.Store(a.Key)
	for {
		var ch *channels
		if cached != nil {
			ch, a.Cached = cached.channels, cached.key
			for _, c := range ch.all {
				if err := c.Renew(); err != nil {
					return nil, err
				}
			}
		} else {
			ch = newChannels(p.t, a.Provider, n)
		}
		a.Offers = ch.offers()
		b, err := p.ask(protocol.OpAcquire, a.Encode, f)
		if err != nil {
			ch.close()
			return nil, err
		}
		d, err := protocol.DecodeCandidate(b)
		if err != nil {
			return nil, err
		}
		if !d.Granted {
			ch.close()
			a.First, a.Provider, f, cached = false, d.Provider, nil, nil
			continue
		}
		for i, w := range d.Workers {
			connect := ch.all[i].Connect
			if cached != nil {
				connect = ch.all[i].Resume
			}
			if err := connect(w.Blob); err != nil {
				ch.close()
				return nil, err
			}
		}
		return &leased{ch, d, p, a.Key, a.Spec}, nil
	}
}

func (p *process) mustAcquire(key uint64, workers uint32) *leased {
	p.t.Helper()
	l, err := p.acquire(protocol.Acquire{Key: key, Spec: spec(workers)})
	if err != nil {
		p.t.Fatalf("acquire: %v", err)
	}
	return l
}

func (l *leased) release(keep bool) (cached bool) {
	l.p.t.Helper()
	r := protocol.Release{Key: l.key, Keep: keep}
	released, err := protocol.DecodeReleased(l.p.must(protocol.OpRelease, r.Encode, nil))
	if err != nil {
		l.p.t.Fatal(err)
	}
	return released.Cached
}
