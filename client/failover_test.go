package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// grid is a manager with a changing set of executors.
type grid struct {
	t       *testing.T
	secret  string
	manager *daemon
	nodes   map[string]*daemon
}

func newGrid(t *testing.T) *grid {
	t.Helper()
	g := &grid{t: t, secret: secretFile(t), nodes: map[string]*daemon{}}
	g.manager = start(t, managerProgram, g.secret, "--heartbeat", "250ms", "--executors", "64")
	return g
}

// more starts an executor of two cores and waits until it has registered.
func (g *grid) more() *daemon {
	g.t.Helper()
	d := start(g.t, "bin/executor", g.secret, "--cores", "2", "--providers", provider(), "--grace", "5s", "--manager", g.manager.Address).joined(g.t)
	g.nodes[d.Address] = d
	return d
}

func (g *grid) lease(o client.LeaseOptions) (*client.Lease, *moves) {
	g.t.Helper()
	m := &moves{t: g.t, to: make(chan string, 16)}
	o.OnEvent = m.on
	o.Library = built(g.t, "build/functions/echo.so")
	l, err := g.manager.session(g.t, g.secret).Lease(g.t.Context(), o)
	if err != nil {
		g.t.Fatal(err)
	}
	m.echo = function(g.t, l, "echo")
	return l, m
}

// moves records the executors to which a lease moves.
type moves struct {
	t    *testing.T
	to   chan string
	echo *client.Function
}

func (m *moves) on(e client.Event) {
	if e.Kind == client.EventMoved {
		m.to <- e.Reason
	}
}

func (m *moves) want(address string) {
	m.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		select {
		case at := <-m.to:
			if at != address {
				m.t.Errorf("the lease went to %s, want %s", at, address)
			}
			return
		case <-time.After(20 * time.Millisecond): // a call makes the lease look for another executor
			_, _ = m.echo.Invoke(client.Idempotent(context.Background(), 3), nil, nil)
		}
		if time.Now().After(end) {
			m.t.Fatalf("the lease has not gone to %s within 20 s", address)
		}
	}
}

// flood makes idempotent calls from several goroutines while executors end.
type flood struct {
	t       *testing.T
	calls   atomic.Int64
	longest atomic.Int64  // longest time in ns without a completed call on one goroutine
	enough  chan struct{} // closed at `until` calls
	until   int64
	stop    atomic.Bool
	wg      sync.WaitGroup
}

func newFlood(t *testing.T, until int64) *flood {
	return &flood{t: t, until: until, enough: make(chan struct{})}
}

func (f *flood) count() {
	if f.calls.Add(1) == f.until {
		close(f.enough)
	}
}

func (f *flood) invoke(echo *client.Function, id uint64) {
	ctx, out := client.Idempotent(context.Background(), 3), make([]byte, 8)
	last := time.Now()
	for i := id << 32; !f.stop.Load(); i++ {
		in := u64(i)
		n, err := echo.Invoke(ctx, in, out)
		if err != nil || n != 8 || !bytes.Equal(in, out) {
			f.t.Errorf("call %x: %x, %v", i, out[:n], err)
			return
		}
		now := time.Now()
		gap := int64(now.Sub(last))
		for old := f.longest.Load(); gap > old && !f.longest.CompareAndSwap(old, gap); old = f.longest.Load() {
		}
		last = now
		f.count()
	}
}

// submit keeps calls in flight on one worker. If lossy is set, calls that are not idempotent may be lost, with an
// error.
func (f *flood) submit(l *client.Lease, echo *client.Function, lossy bool) {
	ctx, out := context.Background(), make([]byte, 8)
	for i := uint64(1); !f.stop.Load(); i++ {
		var flying [3]client.Call
		for k := range flying {
			how := client.Idempotent(ctx, 3)
			if k == 2 {
				how = ctx
			}
			c, err := l.Worker(1).Submit(how, echo, u64(i<<8+uint64(k)), 8)
			if err != nil {
				f.t.Errorf("submit: %v", err)
				return
			}
			flying[k] = c
		}
		for k, c := range flying {
			if err := c.Wait(ctx); err != nil {
				f.t.Errorf("wait: %v", err)
			}
			n, err := c.Result(out)
			var e *client.Error
			switch {
			case err == nil && n == 8 && bytes.Equal(out, u64(i<<8+uint64(k))):
			case lossy && k == 2 && errors.As(err, &e) && e.Started && (errors.Is(err, client.ErrLease) || errors.Is(err, client.ErrConnection)):
			default:
				f.t.Errorf("submitted call %d: %x, %v", i, out[:n], err)
			}
		}
		f.count()
	}
}

// One of two executors is killed or drained at a time, under idempotent calls, and new executors replace them. All
// results are right. Without any executor a call fails with an error, and a new executor is found afterwards.
func TestFailover(t *testing.T) {
	rounds, calls := 3, int64(20_000)
	switch {
	case provider() == "verbs":
		rounds, calls = 1, 1000 // the machine is emulated
	case testing.Short():
		rounds = 2
	}
	for how, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "drained": syscall.SIGTERM} {
		t.Run(how, func(t *testing.T) {
			g := newGrid(t)
			g.more()
			l, moved := g.lease(client.LeaseOptions{Workers: 2, Failover: true})
			echo := function(t, l, "echo")
			for round := range rounds {
				next := g.more()
				f := newFlood(t, calls)
				for id := range uint64(2) {
					f.wg.Go(func() { f.invoke(echo, id) })
				}
				f.wg.Go(func() { f.submit(l, echo, signal == syscall.SIGKILL) })
				within(t, 60*time.Second, "the load runs", func() bool { return f.calls.Load() > calls/5 })
				victim := g.nodes[l.Executor()]
				victim.signal(signal)
				moved.want(next.Address)
				select {
				case <-f.enough:
				case <-time.After(60 * time.Second):
					t.Errorf("%d calls in 60 s", f.calls.Load())
				}
				f.stop.Store(true)
				f.wg.Wait()
				t.Logf("round %d: %d calls, longest gap %.1f ms", round, f.calls.Load(), float64(f.longest.Load())/1e6)
			}
			s := l.Statistics()
			t.Logf("%+v", s)
			if s.Moved != uint64(rounds) {
				t.Errorf("moved %d times, want %d", s.Moved, rounds)
			}

			g.nodes[l.Executor()].signal(syscall.SIGKILL)
			within(t, 60*time.Second, "a call says that nobody is left", func() bool { // until the client notices the loss, a call ends for another reason
				ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
				defer cancel()
				_, err := echo.Invoke(client.Idempotent(ctx, 3), u64(1), make([]byte, 8))
				switch {
				case err != nil && !errors.Is(err, context.DeadlineExceeded):
					t.Errorf("a call with nobody left: %v", err)
				case err != nil:
					return strings.Contains(err.Error(), "no other executor until the deadline")
				}
				return false
			})
			last := g.more()
			registered := time.Now()
			moved.want(last.Address)
			t.Logf("the lease was there %.1f ms after its executor had registered", float64(time.Since(registered))/1e6)
			if n, err := l.Worker(0).Invoke(t.Context(), echo, []byte("there"), make([]byte, 8)); err != nil || n != 5 || l.Executor() != last.Address {
				t.Errorf("%d bytes on %s, %v", n, l.Executor(), err)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
			if _, err := echo.Invoke(t.Context(), nil, nil); !errors.Is(err, client.ErrLease) {
				t.Errorf("a call after release: %v", err)
			}
		})
	}
}

// A call that is not idempotent ends with an error that says that it may have been executed. The next call has not
// started anywhere and moves to the next executor by itself. Results of calls that ended before the move can still be
// read, and buffers stay valid.
func TestFailoverOfOtherCalls(t *testing.T) {
	g := newGrid(t)
	g.more()
	l, moved := g.lease(client.LeaseOptions{Workers: 1, Failover: true})
	echo, sleep, pid := function(t, l, "echo"), function(t, l, "sleep_ns"), function(t, l, "pid")
	worker := l.Worker(0)
	early, err := worker.Submit(t.Context(), echo, []byte("early"), 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := early.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	buffer, err := worker.Alloc(t.Context(), 100_000)
	if err != nil {
		t.Fatal(err)
	}
	copy(buffer.Bytes(), "kept")
	ended := make(chan error, 1)
	go func() {
		_, err := sleep.Invoke(context.Background(), u64(uint64(time.Minute)), make([]byte, 8))
		ended <- err
	}()
	untilRuns(t, worker, "sleep_ns")
	next := g.more()
	before := worker.PID()
	g.nodes[l.Executor()].signal(syscall.SIGKILL)
	var e *client.Error
	if err := ends(t, "the call in flight", ended); !errors.As(err, &e) || !e.Started || !errors.Is(err, client.ErrLease) && !errors.Is(err, client.ErrConnection) {
		t.Errorf("a call in flight: %v", err)
	}
	if _, err := pid.Invoke(t.Context(), nil, make([]byte, 8)); err != nil {
		t.Errorf("the next call: %v", err)
	}
	moved.want(next.Address)
	if worker.PID() == before || l.Err() != nil {
		t.Errorf("worker 0 is still process %d; %v", before, l.Err())
	}
	out := make([]byte, 100_000)
	if n, err := early.Result(out); err != nil || string(out[:n]) != "early" {
		t.Errorf("the result of before: %q, %v", out[:n], err)
	}
	if n, err := worker.Invoke(t.Context(), echo, buffer.Bytes(), out); err != nil || n != len(out) || !strings.HasPrefix(string(out), "kept") {
		t.Errorf("a buffer of before: %d bytes %q, %v", n, out[:4], err)
	}
	if err := buffer.Free(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := worker.Alloc(t.Context(), 64); err != nil {
		t.Error(err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// untilHandedOver waits until the executor has closed its own descriptors of its workers' TCP connections. A worker can answer before
// that. If the executor is stopped with such a descriptor open, the connection stays open when the worker dies.
func untilHandedOver(t *testing.T, w *world) {
	t.Helper()
	grpc := fmt.Sprintf(":%04X", netip.MustParseAddrPort(w.Address).Port())
	within(t, 10*time.Second, "the executor has closed its descriptors of connections", func() bool {
		held := map[string]bool{}
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", w.pid()))
		for _, f := range files {
			link, _ := os.Readlink(f)
			held[strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")] = true
		}
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", w.pid()))
		if err != nil || len(files) == 0 {
			t.Fatalf("%d descriptors of the executor, %v", len(files), err)
		}
		for line := range strings.Lines(string(table)) {
			const local, state, inode = 1, 3, 9
			if f := strings.Fields(line); len(f) > inode && f[state] == "01" && held[f[inode]] && !strings.HasSuffix(f[local], grpc) {
				return false
			}
		}
		return true
	})
}

// deadWorker returns a lease whose only worker was killed during a call, which has ended. The executor is stopped, so that it neither
// reports the death nor starts another worker.
func deadWorker(t *testing.T) (*world, *client.Lease, client.Call) {
	t.Helper()
	w := newWorld(t, "--pool", "0")
	l := w.lease(t, client.LeaseOptions{})
	victim := l.Worker(0).PID()
	call, err := l.Worker(0).Submit(t.Context(), function(t, l, "sleep_ns"), u64(uint64(time.Minute)), 8)
	if err != nil {
		t.Fatal(err)
	}
	untilHandedOver(t, w)
	w.signal(syscall.SIGSTOP)
	t.Cleanup(func() { w.signal(syscall.SIGCONT) })
	kill(t, victim, syscall.SIGKILL)
	bound, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := call.Wait(bound); err != nil {
		t.Fatal(err)
	}
	return w, l, call
}

// A call waits for a new worker no longer than its context allows. The worker is started nevertheless.
func TestReplacementWithinTheContext(t *testing.T) {
	if provider() == "verbs" {
		t.Skip("only shared memory tells of a worker's death at once, and the replacing is the same")
	}
	const sessionTimeout = 10 * time.Second // the default
	w, l, call := deadWorker(t)
	echo := function(t, l, "echo")
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { return second(echo.Invoke(ctx, nil, nil)) },
		func(ctx context.Context) error { return second(l.Worker(0).Submit(ctx, echo, nil, 8)) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		start := time.Now()
		err := call(ctx)
		cancel()
		var e *client.Error
		if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || e.Started {
			t.Errorf("a call while nobody replaces the worker: %v", err)
		}
		if d := time.Since(start); d >= sessionTimeout {
			t.Errorf("the call has waited %v, and so for the session's time-out instead of its deadline of 100 ms", d)
		}
	}
	w.signal(syscall.SIGCONT)
	out := make([]byte, 8)
	if n, err := echo.Invoke(t.Context(), []byte("again"), out); err != nil || string(out[:n]) != "again" {
		t.Errorf("afterwards: %q, %v", out[:n], err)
	}
	if _, err := call.Result(out); !errors.Is(err, client.ErrConnection) {
		t.Errorf("the call in flight: %v", err)
	}
	if n := l.Replaced(); n != 1 {
		t.Errorf("%d workers were replaced, want 1", n)
	}
}
