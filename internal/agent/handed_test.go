package agent

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// hand hands some channels of a lease over, with as many descriptors as files says.
func (l *leased) hand(m protocol.Hand, files int) {
	l.p.t.Helper()
	m.Key, m.Size, m.Channels = l.key, 2, make([]byte, 2*m.Count)
	var fds []int
	for range files {
		f := memory(l.p.t, 4096, unix.F_SEAL_SHRINK)
		defer f.Close()
		fds = append(fds, int(f.Fd()))
	}
	if _, _, err := l.p.conn.WriteMsgUnix(message(protocol.OpHand, 0, m.Encode), unix.UnixRights(fds...), nil); err != nil {
		l.p.t.Fatal(err)
	}
}

func (l *leased) releaseHanded() protocol.Released {
	l.p.t.Helper()
	m := protocol.Release{Key: l.key, Keep: true}
	r, err := protocol.DecodeReleased(l.p.must(protocol.OpRelease, m.Encode, nil))
	if err != nil || !r.Cached {
		l.p.t.Fatalf("released %+v: %v", r, err)
	}
	return r
}

// likely opens a session and returns the provider for which the library makes channels before its first lease.
func (p *process) likely(name uint64, x *daemon) string {
	p.t.Helper()
	m := protocol.Session{Session: name, Executor: x.address}
	provider, _, err := protocol.DecodeOpened(p.must(protocol.OpOpen, m.Encode, nil))
	if err != nil {
		p.t.Fatal(err)
	}
	return provider
}

// While the agent holds channels, a client makes none before it knows whether it gets these.
func TestLikelyProvider(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	if got := p.likely(2, x); got != "shm" {
		t.Errorf("likely provider %q, want shm", got)
	}
	l := p.mustAcquire(1, 1)
	l.hand(protocol.Hand{Count: 1, Files: 3}, 3)
	if r := l.releaseHanded(); !r.Handed {
		t.Fatal("the channels were not handed over")
	}
	if got := p.likely(3, x); got != "" {
		t.Errorf("likely provider %q although the agent holds channels", got)
	}
	f := protocol.Release{Key: 1}
	p.must(protocol.OpRelease, f.Encode, nil) // gives the cached workers up
	l.close()
	if got := p.likely(4, x); got != "shm" {
		t.Errorf("likely provider %q after the channels were closed, want shm", got)
	}
}

// After a wrong HAND message, channels are not handed over, and their descriptors are closed.
func TestChannelsThatAreNotHandedOver(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	one := protocol.Hand{Count: 1, Files: 3}
	two := protocol.Hand{First: 1, Count: 1, Files: 3}
	for i, k := range []struct {
		name  string
		hands []protocol.Hand
		files int
		good  bool
	}{
		{"none", nil, 3, false},
		{"all", []protocol.Hand{one, two}, 3, true},
		{"together", []protocol.Hand{{Count: 2, Files: 3}}, 3, true},
		{"again", []protocol.Hand{one, one, two}, 3, true},
		{"one of two", []protocol.Hand{one}, 3, false},
		{"the second alone", []protocol.Hand{two}, 3, false},
		{"wrong order", []protocol.Hand{two, one}, 3, false},
		{"too many", []protocol.Hand{one, two, {First: 2, Count: 1, Files: 3}}, 3, false},
		{"too few descriptors", []protocol.Hand{one, two}, 2, false},
		{"too many descriptors", []protocol.Hand{one, two}, 4, false},
		{"no descriptors", []protocol.Hand{one, two}, 0, false},
		{"held without being", []protocol.Hand{{Count: 1, Files: 3, Held: true}, two}, 3, false},
	} {
		l := p.mustAcquire(uint64(i+1), 2)
		for _, m := range k.hands {
			l.hand(m, k.files)
		}
		r := l.releaseHanded()
		n := w.agent.held.Load()
		if r.Handed != k.good || k.good != (n > 0) {
			t.Errorf("%s: %+v, %d descriptors held", k.name, r, n)
		}
		f := protocol.Release{Key: l.key}
		p.must(protocol.OpRelease, f.Encode, nil) // gives the cached workers up
		if n := w.agent.held.Load(); n != 0 {
			t.Errorf("%s: %d descriptors are left", k.name, n)
		}
		l.close()
	}
	// Descriptors are also closed when the lease ends in any other way.
	l := p.mustAcquire(100, 1)
	l.hand(one, 3)
	l.release(false)
	if n := w.agent.held.Load(); n != 0 {
		t.Errorf("after a release without caching %d descriptors are left", n)
	}
	p.mustAcquire(101, 1).hand(one, 3)
	p.conn.Close()
	eventually(t, "the descriptors of an ended client are closed", func() bool { return w.agent.count() == 0 && w.agent.held.Load() == 0 })
	if w.agent.hold(1 << 40) {
		t.Error("the agent holds more descriptors than it may have")
	}
}

func TestBrokenHandsEndTheConnection(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	for name, m := range map[string]protocol.Hand{
		"no channels":          {Files: 3},
		"too many channels":    {Count: protocol.MaxWorkers + 1, Files: 3},
		"channels beyond":      {First: protocol.MaxWorkers, Count: 1, Files: 3},
		"too many descriptors": {Count: 1, Files: protocol.MaxFiles + 1},
		"no descriptors":       {Count: 1},
	} {
		p := opened(t, w, x)
		p.mustAcquire(1, 1).hand(m, 3)
		<-p.ended
		eventually(t, name+": nothing is left", func() bool { return w.agent.count() == 0 && w.agent.held.Load() == 0 })
	}
}

// A client gets the channels that another one has handed over, and may refuse them.
func TestHandedChannelsAreGivenOnce(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	a, b := opened(t, w, x), opened(t, w, x)
	l := a.mustAcquire(1, 1)
	l.hand(protocol.Hand{Count: 1, Files: 5}, 5)
	if r := l.releaseHanded(); !r.Handed {
		t.Fatal("not handed over")
	}
	s := w.agent.status()
	if len(s.Leases) != 1 || !s.Leases[0].Shared || s.Leases[0].Orphaned || s.Leases[0].Executor != x.address || s.Held != 5 {
		t.Errorf("status %+v", s)
	}
	m := b.mustAcquire(7, 1) // offers new channels when it gets those
	if len(b.hands) != 1 || b.hands[0].Key != 7 || b.hands[0].Files != 5 || b.hands[0].Held || !slices.Equal(b.hands[0].Channels, []byte{0, 0}) {
		t.Errorf("the other client got %+v", b.hands)
	}
	if err := m.call(0); err != nil {
		t.Error(err)
	}
	if e := a.event(); e.Kind != protocol.Dropped || e.Key != 1 {
		t.Errorf("event %+v", e)
	}
	if n := w.agent.held.Load(); n != 0 {
		t.Errorf("%d descriptors are held, for a lease that was refused", n)
	}
	// If a client ends before it accepts or refuses the channels, they are closed.
	m.hand(protocol.Hand{Count: 1, Files: 5}, 5)
	m.releaseHanded()
	f := protocol.Acquire{Key: 9, Session: 1, First: true, Spec: spec(1)}
	d, err := protocol.DecodeCandidate(a.must(protocol.OpAcquire, f.Encode, library(t)))
	if err != nil || d.Granted || !d.Handed || len(a.hands) != 1 || w.agent.held.Load() != 5 {
		t.Fatalf("candidate %+v, %d messages: %v", d, len(a.hands), err)
	}
	a.conn.Close()
	eventually(t, "the channels are closed", func() bool { return w.agent.held.Load() == 0 })
	eventually(t, "the workers are ended", func() bool { return x.free(t, w.secret) == 2 })
}

// An agent without clients keeps running as long as it holds the channels of an ended client.
func TestAgentLingersForCachedWorkers(t *testing.T) {
	w := newWorld(t, time.Hour)
	x := executor(t, w.secret, "--cache-time", "1s")
	p := opened(t, w, x)
	l := p.mustAcquire(1, 1)
	l.hand(protocol.Hand{Count: 1, Files: 3}, 3)
	l.releaseHanded()
	p.conn.Close()
	eventually(t, "the client is gone", func() bool { return w.agent.count() == 0 })
	if s := w.agent.status(); len(s.Leases) != 1 || !s.Leases[0].Orphaned {
		t.Errorf("status %+v", s)
	}
	if _, gone := w.agent.lastLook(); gone {
		t.Fatal("the agent would end")
	}
	eventually(t, "the lease is given up after the cache time", func() bool { return len(w.agent.status().Leases) == 0 && w.agent.held.Load() == 0 })
	if _, gone := w.agent.lastLook(); !gone {
		t.Error("the agent would stay")
	}
}
