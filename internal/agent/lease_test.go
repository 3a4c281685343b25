package agent

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// opened returns a process with session 1 at an executor.
func opened(t testing.TB, w *world, x *daemon) *process {
	t.Helper()
	p := w.connect()
	if err := p.open(1, protocol.Session{Executor: x.address}); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProcessesShareConnections(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	first, second := opened(t, w, x), opened(t, w, x)
	a, b := first.mustAcquire(1, 1), second.mustAcquire(1, 1)
	for _, l := range []*leased{a, b} {
		if err := l.call(0); err != nil {
			t.Error(err)
		}
	}
	if n := w.agent.pool.Connections(); n.Executors != 1 {
		t.Errorf("%d connections for two processes, want one", n.Executors)
	}
	for range 2 {
		name := protocol.SessionName{Session: 1}
		first.must(protocol.OpClose, name.Encode, nil)
		if err := first.open(1, protocol.Session{Executor: x.address}); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.call(0); err != nil {
		t.Errorf("after another process has closed its session: %v", err)
	}
}

// The end of a process releases its leases.
func TestEndOfProcessReleases(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	p.mustAcquire(1, 1)
	cached := p.mustAcquire(2, 1)
	if !cached.release(true) {
		t.Fatal("not cached")
	}
	began := time.Now()
	p.conn.Close()
	eventually(t, "both cores are free, and nothing is cached", func() bool { return x.free(t, w.secret) == 2 && w.agent.count() == 0 })
	t.Logf("free after %v", time.Since(began))
}

func TestReleaseWhileWaiting(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	l := p.mustAcquire(1, 2)
	a := protocol.Acquire{Key: 2, Session: 1, First: true, Spec: spec(1), WaitNs: int64(time.Hour), Provider: "shm",
		Offers: newChannels(t, "shm", 1).offers()}
	waiting := p.begin(protocol.OpAcquire, a.Encode, library(t))
	r := protocol.Release{Key: 2}
	p.must(protocol.OpRelease, r.Encode, nil)
	if _, err := p.end(protocol.OpAcquire, waiting); !isStatus(err, dataplane.StatusCancelled) {
		t.Errorf("the acquisition ended with %v, want that it was cancelled", err)
	}
	l.release(false)
	eventually(t, "both cores are free", func() bool { return x.free(t, w.secret) == 2 })
}

func isStatus(err error, st dataplane.Status) bool {
	var f *failure
	return errors.As(err, &f) && f.status == st
}

func TestRefusals(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	if err := p.open(1, protocol.Session{Executor: x.address}); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("a session with a name that is in use: %v", err)
	}
	if err := p.open(2, protocol.Session{Executor: "127.0.0.1:1"}); !errors.Is(err, dataplane.ErrConnection) {
		t.Errorf("a session with an address where nobody listens: %v", err)
	}
	if _, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(3)}); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("more cores than there are: %v", err)
	}
	if _, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1), Session: 9}); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("an unknown session: %v", err)
	}
	for name, content := range map[string]string{"empty": "", "no ELF": strings.Repeat("x", 100), "broken ELF": "\x7fELF" + strings.Repeat("x", 100)} {
		f := memory(t, 0, 0)
		f.WriteString(content)
		a := protocol.Acquire{Key: 1, Session: 1, First: true, Provider: "shm", Spec: spec(1), Offers: newChannels(t, "shm", 1).offers()}
		if _, err := p.ask(protocol.OpAcquire, a.Encode, f); !isStatus(err, dataplane.StatusBadLibrary) || !strings.Contains(err.Error(), "echo.so") {
			t.Errorf("%s library: %v", name, err)
		}
		f.Close()
	}
	r, pipe, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	defer r.Close()
	a := protocol.Acquire{Key: 1, Session: 1, First: true, Spec: spec(1)}
	if _, err := p.ask(protocol.OpAcquire, a.Encode, r); !isStatus(err, dataplane.StatusBadLibrary) {
		t.Errorf("a pipe as library: %v", err)
	}
	if _, err := p.ask(protocol.OpAcquire, a.Encode, nil); !isStatus(err, dataplane.StatusBadLibrary) {
		t.Errorf("no library: %v", err)
	}
	l := p.mustAcquire(1, 2)
	if _, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1)}); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("a key that is in use: %v", err)
	}
	if _, err := p.acquire(protocol.Acquire{Key: 2, Spec: spec(1)}); !isStatus(err, dataplane.StatusBusy) {
		t.Errorf("no free core: %v", err)
	}
	if err := l.call(1); err != nil {
		t.Error(err)
	}
	unknown := protocol.WorkerName{Key: 77}
	if _, err := p.ask(protocol.OpInspect, unknown.Encode, nil); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("an unknown lease: %v", err)
	}
}

func TestCachedWorkers(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	first := p.mustAcquire(1, 2)
	if err := first.call(0); err != nil {
		t.Fatal(err)
	}
	if !first.release(true) {
		t.Fatal("not cached")
	}
	again, err := p.acquireWith(protocol.Acquire{Key: 2, Spec: spec(2)}, first)
	if err != nil {
		t.Fatal(err)
	}
	if again.Workers[0].PID != first.Workers[0].PID || again.Workers[0].Start != 3 {
		t.Errorf("worker %+v, want process %d", again.Workers[0], first.Workers[0].PID)
	}
	if err := again.call(1); err != nil {
		t.Error(err)
	}

	// Workers that do not fit are given up.
	if !again.release(true) {
		t.Fatal("not cached")
	}
	other := spec(2)
	other.Memory = 100 << 20
	l, err := p.acquireWith(protocol.Acquire{Key: 3, Spec: other}, again)
	if err != nil {
		t.Fatal(err)
	}
	if e := p.event(); e.Kind != protocol.Dropped || e.Key != 2 {
		t.Errorf("event %+v, want that 2 is dropped", e)
	}
	if err := l.call(0); err != nil {
		t.Error(err)
	}

	// Workers whose lease is released again end without an event.
	if !l.release(true) {
		t.Fatal("not cached")
	}
	l.release(false)
	if s := w.agent.status(); s.Cached != 0 {
		t.Errorf("%d are cached", s.Cached)
	}
	name := protocol.SessionName{Session: 1}
	p.must(protocol.OpClose, name.Encode, nil)
	if len(p.events) > 0 {
		t.Errorf("event %+v", p.event())
	}
}

func TestDeadWorkerIsReplaced(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	l := p.mustAcquire(1, 1)
	before := p.page.events().Load()
	if err := syscall.Kill(int(l.Workers[0].PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e := p.event()
	if e.Kind != api.EventWorkerDied || e.Key != 1 || e.PID != l.Workers[0].PID || e.Status != int32(dataplane.StatusWorkerDied) || !strings.Contains(e.Text, "worker 0") {
		t.Errorf("event %+v", e)
	}
	eventually(t, "the page counts the event", func() bool { return p.page.events().Load() == before+1 })
	if err := l.all[0].Reset(); err != nil {
		t.Fatal(err)
	}
	r := protocol.Replace{Key: 1, TimeoutNs: int64(20 * time.Second), Offer: l.offers()[0]}
	fresh, err := protocol.DecodeWorker(p.must(protocol.OpReplace, r.Encode, nil))
	if err != nil || fresh.PID == 0 || fresh.PID == l.Workers[0].PID {
		t.Fatalf("replaced by %+v, %v", fresh, err)
	}
	same, err := protocol.DecodeWorker(p.must(protocol.OpReplace, r.Encode, nil))
	if err != nil || same.PID != fresh.PID {
		t.Errorf("the same offer got process %d, then %d: %v", fresh.PID, same.PID, err)
	}
	if err := l.all[0].Connect(fresh.Blob); err != nil {
		t.Fatal(err)
	}
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	r.Worker = 1
	if _, err := p.ask(protocol.OpReplace, r.Encode, nil); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("a worker that the lease does not have: %v", err)
	}
}

// A request that waits for a lease gets it when an executor with room appears.
func TestWaitForExecutor(t *testing.T) {
	for _, provider := range []string{"shm", "tcp"} { // by which the manager's memory is reached
		t.Run(provider, func(t *testing.T) { waitForExecutor(t, provider) })
	}
}

func waitForExecutor(t *testing.T, provider string) {
	w := newWorld(t, 0)
	m := start(t, "bin/resource-manager", w.secret, "--providers", provider)
	p := w.connect("RFAAS_MANAGER=" + m.address)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1), WaitNs: int64(50 * time.Millisecond)}); !isStatus(err, dataplane.StatusBusy) {
		t.Errorf("without an executor: %v", err)
	}
	a := protocol.Acquire{Key: 2, Session: 1, First: true, Spec: spec(1), WaitNs: int64(time.Hour)}
	waiting := p.begin(protocol.OpAcquire, a.Encode, library(t))
	eventually(t, "the request waits", func() bool { return w.agent.status().Clients[0].Leases == 1 })
	x := executor(t, w.secret, "--manager", m.address)
	b, err := p.end(protocol.OpAcquire, waiting)
	if err != nil {
		t.Fatal(err)
	}
	if d, err := protocol.DecodeCandidate(b); err != nil || d.Granted || d.Executor != x.address || d.Provider != "shm" {
		t.Errorf("candidate %+v, %v", d, err)
	}
	// With channels, which the first step did not have.
	l, err := p.acquire(protocol.Acquire{Key: 3, Spec: spec(1)})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	if s := w.agent.status(); !s.Board || s.BoardBy != provider || s.Executors != 1 {
		t.Errorf("status %+v, want the board by %s and one executor", s, provider)
	}
	eventually(t, "the executor reports by "+provider, func() bool { return strings.Contains(x.log.String(), "by=memory provider="+provider) })

	// A lease to whose workers the client cannot connect is searched for elsewhere, with the same terms and without the library.
	x.process.Kill()
	if e := p.event(); e.Kind != api.EventEnded || e.Key != 3 || e.Status != int32(dataplane.StatusPeerGone) {
		t.Errorf("event %+v", e)
	}
	from := protocol.Acquire{Key: 4, Session: 1, From: 3, First: true, Reason: "no route", WaitNs: int64(time.Hour)}
	waiting = p.begin(protocol.OpAcquire, from.Encode, nil)
	second := executor(t, w.secret, "--manager", m.address)
	if b, err = p.end(protocol.OpAcquire, waiting); err != nil {
		t.Fatal(err)
	}
	if d, err := protocol.DecodeCandidate(b); err != nil || d.Executor != second.address {
		t.Errorf("candidate %+v, %v", d, err)
	}
}

// The executor of a lease to whose workers the client cannot connect is not asked again, although it has room, and the error names it.
func TestContinueBeyondExecutor(t *testing.T) {
	w := newWorld(t, 0)
	m := start(t, "bin/resource-manager", w.secret)
	x := executor(t, w.secret, "--manager", m.address)
	p := w.connect("RFAAS_MANAGER=" + m.address)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1), WaitNs: int64(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		wait     time.Duration
		st, want dataplane.Status
	}{
		{0, dataplane.StatusPeerGone, dataplane.StatusConnection},
		{50 * time.Millisecond, dataplane.StatusConnection, dataplane.StatusConnection},
		{0, dataplane.StatusUnsupported, dataplane.StatusUnsupported},
		{0, dataplane.StatusBadBlob, dataplane.StatusConnection},
		{0, 0, dataplane.StatusConnection},
	} {
		from := protocol.Acquire{Key: 2, Session: 1, From: 1, First: true, Status: int32(c.st), Reason: "no route", WaitNs: int64(c.wait)}
		_, err := p.ask(protocol.OpAcquire, from.Encode, nil)
		if !isStatus(err, c.want) || !strings.Contains(err.Error(), "executor "+x.address) || !strings.Contains(err.Error(), "no route") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	unknown := protocol.Acquire{Key: 2, Session: 1, From: 9, First: true}
	if _, err := p.ask(protocol.OpAcquire, unknown.Encode, nil); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("after a lease that does not exist: %v", err)
	}
	waiting := protocol.Acquire{Key: 3, Session: 1, First: true, Spec: spec(2), WaitNs: int64(time.Hour)}
	p.begin(protocol.OpAcquire, waiting.Encode, library(t))
	from := protocol.Acquire{Key: 4, Session: 1, From: 3, First: true}
	if _, err := p.ask(protocol.OpAcquire, from.Encode, nil); !isStatus(err, dataplane.StatusInvalid) {
		t.Errorf("after a lease that is not granted: %v", err)
	}
}

// If no connection to the manager's memory can be made, executors and agents use messages.
func TestMemoryOutOfReach(t *testing.T) {
	w := newWorld(t, 0)
	m := start(t, "bin/resource-manager", w.secret, "--providers", "tcp", "--data-advertise", "127.0.0.2") // nothing listens there
	x := executor(t, w.secret, "--manager", m.address)
	eventually(t, "the executor reports by messages", func() bool { return strings.Contains(x.log.String(), `by=messages reason="connect: `) })
	p := w.connect("RFAAS_MANAGER=" + m.address)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	l, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1)})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	if s := w.agent.status(); s.Board || s.BoardBy != "" || s.Executors != 1 {
		t.Errorf("status %+v, want no board and one executor", s)
	}
}

func TestSpreadAndChanges(t *testing.T) {
	for _, provider := range []string{"shm", "tcp"} { // by which the manager's memory is reached
		t.Run(provider, func(t *testing.T) { spreadAndChanges(t, provider) })
	}
}

func spreadAndChanges(t *testing.T, provider string) {
	w := newWorld(t, 0)
	m := start(t, "bin/resource-manager", w.secret, "--providers", provider)
	p := w.connect("RFAAS_MANAGER=" + m.address)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	a, b := executor(t, w.secret, "--manager", m.address), executor(t, w.secret, "--manager", m.address)
	there := map[string]bool{}
	eventually(t, "both executors are told of", func() bool {
		name := protocol.SessionName{Session: 1, Count: 1}
		changes, err := protocol.DecodeChanges(p.must(protocol.OpChanges, name.Encode, nil))
		if err != nil || len(changes) > 1 {
			t.Fatalf("%v, %v", changes, err)
		}
		for _, c := range changes {
			there[c.Executor] = c.State == 1
		}
		return there[a.address] && there[b.address]
	})
	s := protocol.Spread{Session: 1, Workers: 4, CoresPerWorker: 1}
	shares, err := protocol.DecodeShares(p.must(protocol.OpSpread, s.Encode, nil))
	if err != nil || len(shares) != 2 || shares[0].Workers+shares[1].Workers != 4 {
		t.Errorf("shares %+v, %v", shares, err)
	}
	for _, s := range []protocol.Spread{{Session: 1, Workers: 1, CoresPerWorker: 1, Memory: 100 << 40},
		{Session: 1, Workers: 1, CoresPerWorker: 1, Memory: 100 << 40, One: true}, {Session: 1, Workers: 1, CoresPerWorker: 3}} {
		if _, err := p.ask(protocol.OpSpread, s.Encode, nil); !isStatus(err, dataplane.StatusInvalid) {
			t.Errorf("more than any executor lends: %+v: %v", s, err)
		}
	}
	s.Avoid = []string{a.address}
	if _, err := p.ask(protocol.OpSpread, s.Encode, nil); !isStatus(err, dataplane.StatusBusy) {
		t.Errorf("with one executor left out: %v", err)
	}
	one := protocol.Spread{Session: 1, Workers: 3, One: true, Executor: b.address}
	if shares, err := protocol.DecodeShares(p.must(protocol.OpSpread, one.Encode, nil)); err != nil || len(shares) != 1 || shares[0] != (protocol.Share{Workers: 3, Executor: b.address}) {
		t.Errorf("shares %+v, %v", shares, err)
	}
}

// The agent finishes a lease whose node drains, unless a thread of the process is inside.
func TestDrain(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret, "--grace", "30s")
	p := opened(t, w, x)
	idle, busy := p.mustAcquire(4096+1, 1), p.mustAcquire(4096+2, 1)
	p.page.line(busy.key).busy.Store(1)
	x.process.Signal(syscall.SIGTERM)
	for range 2 {
		if e := p.event(); e.Kind != api.EventDraining || e.InNs <= 0 {
			t.Errorf("event %+v", e)
		}
	}
	if e := p.event(); e.Kind != api.EventEnded || e.Key != idle.key {
		t.Errorf("event %+v, want the end of the idle lease", e)
	}
	if got := p.page.line(idle.key).draining.Load(); got != protocol.DrainTold {
		t.Errorf("the idle line says %d, want %d", got, protocol.DrainTold)
	}
	if got := p.page.line(busy.key).draining.Load(); got != protocol.DrainSoon {
		t.Errorf("the busy line says %d, want %d", got, protocol.DrainSoon)
	}
	if err := busy.call(0); err != nil {
		t.Errorf("a call on the busy lease: %v", err)
	}
	p.page.line(busy.key).draining.Store(protocol.DrainTold)
	if err := sendMessage(p.conn, message(protocol.OpFinish, 0, func(b []byte) []byte { return protocol.EncodeLeaseName(b, busy.key) }), nil); err != nil {
		t.Fatal(err)
	}
	if e := p.event(); e.Kind != api.EventEnded || e.Key != busy.key {
		t.Errorf("event %+v, want the end of the other lease", e)
	}
	<-x.done // all leases were released, long before its grace is over
}

// A thread of the client that has read the flag of the lease that used the line before does not end the present one.
func TestFinishOfALeaseThatDoesNotDrain(t *testing.T) {
	w := newWorld(t, 0)
	p := opened(t, w, executor(t, w.secret))
	l := p.mustAcquire(4096+1, 1)
	line := p.page.line(l.key)
	line.key.Store(l.key)
	line.draining.Store(protocol.DrainTold)
	if err := sendMessage(p.conn, message(protocol.OpFinish, 0, func(b []byte) []byte { return protocol.EncodeLeaseName(b, l.key) }), nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lease starts calls again", func() bool { return line.draining.Load() == protocol.DrainNot })
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	l.release(false)
}

// When a line has another lease, the drain of the old lease's node does not change it.
func TestDrainOfALeaseThatHasMoved(t *testing.T) {
	f := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK)
	defer f.Close()
	p, err := mapPage(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	const old, successor = protocol.MaxLeases + 3, 2*protocol.MaxLeases + 3
	l := p.line(old)
	l.key.Store(successor)
	if p.drain(old) || l.draining.Load() != protocol.DrainNot {
		t.Error("another lease drains")
	}
	if !p.drain(successor) || l.draining.Load() != protocol.DrainSoon {
		t.Error("the lease does not drain")
	}
	if !p.drain(successor) {
		t.Error("an agent that takes over does not finish what the one before it began")
	}
	l.busy.Store(1)
	if p.left(successor) {
		t.Error("a thread is inside, and the agent finishes the lease")
	}
	l.busy.Store(0)
	if !p.left(successor) || l.draining.Load() != protocol.DrainTold {
		t.Error("nobody is inside, and the agent does not finish the lease")
	}
	if p.left(successor) || p.drain(successor) {
		t.Error("a lease is finished twice")
	}
}
