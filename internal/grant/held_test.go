package grant

import (
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// dying is an executor that ends while it handles a release.
type dying struct {
	*lessor
	end func()
}

func (x *dying) Release(ctx context.Context, _ *control.ReleaseRequest) (*control.ReleaseReply, error) {
	go x.end()
	<-ctx.Done()
	return nil, ctx.Err()
}

// The lease of an executor that ends during the release has ended too, so the release succeeds.
func TestReleaseWhileTheExecutorEnds(t *testing.T) {
	x := &dying{lessor: &lessor{}}
	c, port, _, _ := lessee(t, x)
	x.end = port.Server.Stop
	conn, err := c.dial("release", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	h := &Held{Candidate: Candidate{Address: port.Address}, ID: 1, c: c, cl: control.NewExecutorClient(conn)}
	if err := h.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A request is repeated while the executor closes connections before its first answer, but not if another program listens at the address.
func TestRepeatWhileConnectionsClose(t *testing.T) {
	c, port, _, _ := lessee(t, &lessor{})
	good, err := c.dial("inspect", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	for name, foreign := range map[string]bool{"busy executor": false, "another program": true} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			var closed atomic.Int32 // connections
			go func() {
				for {
					from, err := l.Accept()
					if err != nil {
						return
					}
					if foreign {
						_, _ = io.WriteString(from, strings.Repeat("220 mail\r\n", 10))
					}
					from.Close()
					closed.Add(1)
				}
			}()
			conn, err := c.dial("inspect", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			err = repeat(t.Context(), func() error {
				to := conn
				if closed.Load() >= 3 && !foreign {
					to = good
				}
				_, err := control.NewExecutorClient(to).Info(t.Context(), &control.InfoRequest{})
				return err
			})
			switch {
			case !foreign && err != nil:
				t.Errorf("after %d closed connections: %v", closed.Load(), err)
			case foreign && (err == nil || !strings.Contains(control.Text(err), "does not speak the control protocol")):
				t.Errorf("another program: %v", err)
			}
		})
	}
}

// caching is an executor whose releases wait for the test. The test says whether the executor caches the workers.
type caching struct {
	*lessor
	cached chan bool
}

func (x *caching) Release(context.Context, *control.ReleaseRequest) (*control.ReleaseReply, error) {
	cached := <-x.cached
	return &control.ReleaseReply{Cached: cached, CacheMs: 60_000}, nil
}

// A search waits for the release of a lease with the same terms. A second search does not wait for the same release.
func TestSearchAwaitsARelease(t *testing.T) {
	x := &caching{&lessor{}, make(chan bool)}
	c, port, _, _ := lessee(t, x)
	c.opts.Keep = 1
	conn, err := c.dial("release", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	p := &Pending{c: c, spec: Spec{Workers: 1}}
	other := &Pending{c: c, spec: Spec{Workers: 2}}
	for name, cached := range map[uint64]bool{1: true, 2: false} {
		h := &Held{Candidate: Candidate{Address: port.Address}, ID: name, c: c, cl: control.NewExecutorClient(conn), key: p.key()}
		released, found := make(chan *Cached, 1), make(chan *Cached, 1)
		go func() {
			k, err := h.ReleaseCached(t.Context(), name, io.NopCloser(nil), false)
			if err != nil {
				t.Error(err)
			}
			released <- k
		}()
		awaited := func(yes bool) bool {
			c.cache.mu.Lock()
			defer c.cache.mu.Unlock()
			return len(c.cache.releasing) == 1 && c.cache.releasing[0].awaited == yes
		}
		testkit.Eventually(t, "the release is under way", func() bool { return awaited(false) })
		go func() { found <- p.awaitHanded(t.Context()) }()
		testkit.Eventually(t, "the search waits", func() bool { return awaited(true) })
		if k := p.TakeHanded(t.Context()); k != nil {
			t.Errorf("a second search found %+v", k)
		}
		if k := other.TakeHanded(t.Context()); k != nil {
			t.Errorf("a search with other terms found %+v", k)
		}
		x.cached <- cached
		k, want := <-found, <-released
		if k != want || (k != nil) != cached {
			t.Errorf("cached %v: found %v, released %v", cached, k, want)
		}
		if k != nil {
			k.timer.Stop()
		}
	}
}

// A session without Broker, such as that of a library that does not know virtual queue pairs, takes no lease whose channels pass through the agent.
func TestTakeHandedWithoutBroker(t *testing.T) {
	c := &Control{shared: &shared{}, opts: Options{Keep: 1}}
	p := &Pending{c: c, spec: Spec{Workers: 1}}
	for provider, taken := range map[string]bool{dataplane.Verbs: false, dataplane.TCP: true} {
		k := &Cached{name: 1, key: p.key(), cand: Candidate{Provider: provider}, handed: io.NopCloser(nil), timer: time.NewTimer(time.Hour)}
		c.cache.all = []*Cached{k}
		if got := p.takeHanded(); (got == k) != taken {
			t.Errorf("%s: %v was taken, want %v", provider, got, taken)
		}
		c.opts.Broker = true
		if got := p.takeHanded(); (got == k) == taken {
			t.Errorf("%s with Broker: %v was taken", provider, got)
		}
		c.opts.Broker = false
	}
}
