package etcd

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/tests/etcdtest"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// start starts etcd with an empty ledger.
func start(t *testing.T, args ...string) *etcdtest.Server {
	t.Helper()
	server := etcdtest.Start(t, etcdtest.Options{Args: args})
	if _, err := open(t, server.Endpoint, "init").Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	return server
}

func open(t *testing.T, endpoint, name string) *Cluster {
	t.Helper()
	c, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/test", Name: name, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func lead(t *testing.T, c *Cluster) *Leader {
	t.Helper()
	l, err := c.Lead(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Resign)
	return l
}

func ledger(t *testing.T, l *Leader) *accounting.Ledger {
	t.Helper()
	led, err := accounting.OpenReplicatedLedger(l, func(add func(accounting.Change) error) error { return l.Load(t.Context(), add) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { led.Close() })
	return led
}

var began = time.Unix(7200, 0)

// charge merges n leases of a tenant that have used n each, as of some hour.
func charge(t *testing.T, led *accounting.Ledger, tenant string, leases, n uint64, hour int) error {
	var all []accounting.Entry
	at := began.Add(time.Duration(hour) * time.Hour)
	for i := range leases {
		all = append(all, accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{1}, Lease: i + 1}, Tenant: tenant, Began: began, AsOf: at, Use: accounting.Use{n}})
	}
	return led.Merge(t.Context(), at, all...)
}

func total(t *testing.T, led *accounting.Ledger, tenant string) int64 {
	t.Helper()
	totals, err := led.Totals(tenant, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	sum := totals[tenant]
	return sum.Of(0).Int64()
}

// The next leader has every record of the one before, which writes nothing any more.
func TestLeaderIsFenced(t *testing.T) {
	server := start(t)
	first := lead(t, open(t, server.Endpoint, "first"))
	one := ledger(t, first)
	if err := charge(t, one, "ann", 300, 5, 0); err != nil { // several transactions
		t.Fatal(err)
	}
	if _, err := one.Claim(t.Context(), began, accounting.Claim{Incarnation: [16]byte{1}, Owner: "node1"}); err != nil {
		t.Fatal(err)
	}
	second := open(t, server.Endpoint, "second")
	next := make(chan *Leader)
	go func() {
		l, err := second.Lead(context.Background())
		if err != nil {
			t.Error(err)
		}
		next <- l
	}()
	// etcd ends the lease as if it had not heard from the first leader, which does not know it yet.
	if _, err := first.cluster.client.Revoke(t.Context(), first.lease); err != nil {
		t.Fatal(err)
	}
	l := <-next
	t.Cleanup(l.Resign)
	if err := charge(t, one, "ann", 1, 1000, 1); !errors.Is(err, ErrLost) {
		t.Errorf("a write of the earlier leader: %v", err)
	}
	two := ledger(t, l)
	if got := total(t, two, "ann"); got != 1500 {
		t.Errorf("%d units after the fail-over, want 1500", got)
	}
	if owner, known, err := two.Owner([16]byte{1}); owner != "node1" || !known || err != nil {
		t.Errorf("owner %q, %v", owner, err)
	}
	if err := charge(t, two, "ann", 300, 7, 1); err != nil {
		t.Fatal(err)
	}
	if got := total(t, two, "ann"); got != 2100 {
		t.Errorf("%d units, want 2100", got)
	}
	<-first.Lost()
	// Removed records are removed for the next leader, too.
	if n, err := two.Prune(t.Context(), began.Add(48*time.Hour)); err != nil || n != 300 {
		t.Errorf("pruned %d, %v", n, err)
	}
	l.Resign()
	three := ledger(t, lead(t, open(t, server.Endpoint, "third")))
	leases := 0
	if err := three.Leases("", time.Time{}, func(accounting.Entry) bool { leases++; return true }); err != nil || leases != 0 || total(t, three, "ann") != 2100 {
		t.Errorf("%d leases and %d units are left, want 0 and 2100; %v", leases, total(t, three, "ann"), err)
	}
}

// proxy stands between a client and etcd, and can keep replies back.
type proxy struct {
	to string
	l  net.Listener

	mu    sync.Mutex
	muted bool
	conns []net.Conn
}

func newProxy(t *testing.T, to string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{to: to, l: l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", p.to)
			if err != nil {
				c.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, c, s)
			p.mu.Unlock()
			wg.Go(func() { _, _ = io.Copy(s, c); s.Close() })
			wg.Go(func() {
				b := make([]byte, 1<<16)
				for {
					n, err := s.Read(b)
					p.mu.Lock()
					muted := p.muted
					p.mu.Unlock()
					if n > 0 && !muted {
						_, _ = c.Write(b[:n])
					}
					if err != nil {
						c.Close()
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.mute(false)
		wg.Wait()
	})
	return p
}

// mute(true) keeps replies back. mute(false) ends the connections, which have gaps, and lets later replies pass.
func (p *proxy) mute(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.muted = on
	if !on {
		for _, c := range p.conns {
			c.Close()
		}
		p.conns = nil
	}
}

// A write whose reply is lost counts once, even if the next write books the same lease to another hour.
func TestLostReply(t *testing.T) {
	server := start(t)
	p := newProxy(t, server.Endpoint)
	c := open(t, p.l.Addr().String(), "first")
	l := lead(t, c)
	led := ledger(t, l)
	if err := charge(t, led, "ann", 10, 5, 0); err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		p.mute(true)
		if err := charge(t, led, "ann", 10, uint64(10*(round+1)), round+1); err == nil {
			t.Fatal("a write without a reply succeeded")
		}
		if c.Trouble() == nil {
			t.Error("the lost reply is not reported")
		}
		p.mute(false)
		testkit.Eventually(t, "a later write succeeds", func() bool { return charge(t, led, "ann", 10, uint64(10*(round+1)+1), round+2) == nil })
		if got, want := total(t, led, "ann"), int64(10*(10*(round+1)+1)); got != want {
			t.Errorf("round %d: %d units, want %d", round, got, want)
		}
	}
	testkit.Eventually(t, "etcd answers", func() bool { return c.Trouble() == nil })
	want := total(t, led, "ann")
	l.Resign()
	if got := total(t, ledger(t, lead(t, open(t, server.Endpoint, "second"))), "ann"); got != want {
		t.Errorf("the next leader reads %d units, want %d", got, want)
	}
}

// While etcd is down, writes fail and the leadership stays. Afterwards writes succeed.
func TestEtcdIsDown(t *testing.T) {
	server := start(t)
	c := open(t, server.Endpoint, "first")
	l := lead(t, c)
	led := ledger(t, l)
	if err := charge(t, led, "ann", 10, 5, 0); err != nil {
		t.Fatal(err)
	}
	if err := l.Confirmed(); err != nil {
		t.Error(err)
	}
	server.Kill()
	for range 3 {
		if err := charge(t, led, "ann", 10, 6, 0); err == nil {
			t.Fatal("written without etcd")
		}
	}
	if n := len(l.pending); n > 1 {
		t.Errorf("%d writes are kept", n)
	}
	testkit.Eventually(t, "the leadership is not confirmed any more", func() bool { return errors.Is(l.Confirmed(), ErrLost) })
	server.Run()
	testkit.Eventually(t, "the leadership is confirmed again", func() bool { return l.Confirmed() == nil })
	testkit.Eventually(t, "a write succeeds", func() bool { return charge(t, led, "ann", 10, 7, 0) == nil })
	if got := total(t, led, "ann"); got != 70 {
		t.Errorf("%d units, want 70", got)
	}
	select {
	case <-l.Lost():
		t.Error("the leadership was lost")
	default:
	}
}

// The lease of a leader may end within two seconds of its latest renewal, although etcd has confirmed the leadership since then.
func TestConfirmedUntilTheLeaseMayEnd(t *testing.T) {
	now := time.Now()
	early := now.Add(-leaseSeconds * time.Second)
	for _, c := range []struct {
		confirmed, renewed time.Time
		leads              bool
	}{{now, now, true}, {now, early, false}, {early, now, false}} {
		l := &Leader{lost: make(chan struct{})}
		l.confirmed.Store(&c.confirmed)
		l.renewed.Store(&c.renewed)
		if err := l.Confirmed(); (err == nil) != c.leads || err != nil && !errors.Is(err, ErrLost) {
			t.Errorf("confirmed %v ago, renewed %v ago: %v", now.Sub(c.confirmed), now.Sub(c.renewed), err)
		}
	}
}

// Lead waits for etcd and ends with its context.
func TestLeadWithoutEtcd(t *testing.T) {
	c := open(t, "127.0.0.1:1", "first")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := c.Lead(ctx)
		done <- err
	}()
	testkit.Eventually(t, "the trouble is reported", func() bool { return c.Trouble() != nil })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
