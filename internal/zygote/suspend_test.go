package zygote

import (
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// freezing starts a zygote whose workers can be suspended, with the freezer of each available version.
func freezing(t *testing.T, test func(t *testing.T, z *Zygote)) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	var old string
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "0:") {
			old += line
		}
	}
	file := filepath.Join(t.TempDir(), "cgroup")
	if err := os.WriteFile(file, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, own := range map[string]string{"all groups": "", "groups of version 1": file} {
		t.Run(name, func(t *testing.T) {
			testSandbox = confined
			testSandbox.ownGroups = own
			defer func() { testSandbox = Sandbox{} }()
			z := startZygote(t)
			if !lease(t, z, startClient(t), nil).group.CanFreeze() {
				if own == "" {
					testkit.Lacks(t, "control groups have no freezer")
				}
				t.Skip("control groups have no freezer")
			}
			test(t, z)
		})
	}
}

// cpuTime returns the processor time of a process, including its threads.
func cpuTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|2, &ts); err != nil {
		t.Fatal(err)
	}
	return time.Duration(ts.Nano())
}

// runs waits until the worker, or any process of its group, has used CPU time in 8 intervals of 10 ms, or in none of 30 in a row.
func (l *leased) runs(t testing.TB) (runs bool) {
	t.Helper()
	looks, rests := 0, -1
	var last time.Duration
	for looks < 8 && rests < 30 {
		now := cpuTime(t, l.PID())
		if all, ok := l.group.CPUTime(); ok {
			now += all
		}
		if now > last && rests >= 0 {
			looks, rests = looks+1, -1
		}
		last, rests = now, rests+1
		time.Sleep(10 * time.Millisecond)
	}
	return looks >= 8
}

// A function that sends itself SIGCONT all the time, and whose child does so, uses no processor time while its worker
// is suspended.
func TestSuspendedWorkerRunsNoMore(t *testing.T) {
	freezing(t, func(t *testing.T, z *Zygote) {
		for _, children := range []byte{0, 1} {
			w := lease(t, z, startClient(t), nil)
			w.mustCall(t, fnRunsOn, []byte{children})
			eventually(t, "the function spins", func() bool { return w.runs(t) })
			for range 3 {
				if err := w.Suspend(t.Context()); err != nil {
					t.Fatal(err)
				}
				// The kernel reports a thread as frozen just before it leaves its processor, so each may run in a few more intervals.
				if w.runs(t) {
					t.Errorf("%d children: a suspended worker still runs", children)
				}
				w.resume(t, w.renew(t))
				w.mustCall(t, fnEcho, []byte("x"))
			}
			if err := w.Suspend(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.Kill()
			within(t, "a suspended worker is killed", w.Done())
		}
	})
}

// Processor time of child processes counts for their worker, also after they have ended.
func TestCPUTimeOfChildren(t *testing.T) {
	freezing(t, func(t *testing.T, z *Zygote) {
		w := lease(t, z, startClient(t), nil)
		w.mustCall(t, fnRunsOn, []byte{1})
		const enough = 100 * time.Millisecond
		var all time.Duration
		eventually(t, "the child's CPU time counts", func() bool {
			own := cpuTime(t, w.PID())
			used, ok := w.CPUTime()
			all = used
			return ok && used-own > enough
		})
		w.Kill()
		<-w.Done()
		if used, ok := w.CPUTime(); !ok || used < all {
			t.Errorf("%v, %v after its end, before %v", used, ok, all)
		}
	})
}

// Without a freezer no worker is suspended.
func TestSuspendNeedsAFreezer(t *testing.T) {
	w := lease(t, startZygote(t), startClient(t), nil)
	if err := w.Suspend(t.Context()); !errors.Is(err, sandbox.ErrNoFreezer) {
		t.Errorf("suspended without a control group: %v", err)
	}
	w.mustCall(t, fnEcho, []byte("x"))
}

func (l *leased) renew(t testing.TB) []byte {
	t.Helper()
	line, err := l.c.ask("renew %d", l.channel)
	if err != nil {
		t.Fatal(err)
	}
	blob, err := hex.DecodeString(line)
	if err != nil {
		t.Fatal(err)
	}
	return blob
}

func (l *leased) resume(t testing.TB, blob []byte) {
	t.Helper()
	if err := l.Resume(t.Context(), blob); err != nil {
		t.Fatal(err)
	}
	if _, err := l.c.ask("resume %d %x", l.channel, l.Blob()); err != nil {
		t.Fatal(err)
	}
}

const statusBadRequest = -205

// A worker serves one lease after the other over one queue pair, and stays frozen in between for any time.
func TestSuspend(t *testing.T) {
	freezing(t, func(t *testing.T, z *Zygote) {
		w := lease(t, z, startClient(t), nil)
		pid := w.PID()
		for i := range 20 {
			w.mustCall(t, fnEcho, []byte("in a lease"))
			w.mustCall(t, fnEcho, make([]byte, 700)) // by the queue pair
			if n := w.Counters().Calls; n != 2 {
				t.Errorf("lease %d: %d calls are counted, want its own 2", i, n)
			}
			if err := w.Suspend(t.Context()); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				time.Sleep(spawner.StopPatience + 200*time.Millisecond) // a worker that is stopped would be killed by then
			}
			w.resume(t, w.renew(t))
			if !w.Steps().Cached || w.Steps().Connect <= 0 {
				t.Errorf("steps %+v", w.Steps())
			}
		}
		if w.PID() != pid {
			t.Errorf("pid %d was %d", w.PID(), pid)
		}
	})
}

// Nothing that a client sends between leases, or of an earlier lease, is executed, even if the process is let run.
func TestSuspendedServesNobody(t *testing.T) { freezing(t, testSuspendedServesNobody) }

func testSuspendedServesNobody(t *testing.T, z *Zygote) {
	w := lease(t, z, startClient(t), nil)
	w.mustCall(t, fnEcho, []byte("x"))
	if err := w.Suspend(t.Context()); err != nil {
		t.Fatal(err)
	}
	refused := func(when string, size int) {
		if r, err := w.call(fnEcho, make([]byte, size)); err != nil || r.status != statusBadRequest {
			t.Errorf("%s: a call of %d bytes: status %d, %v, want %d", when, size, r.status, err, statusBadRequest)
		}
	}
	// The next lease has a generation that this client does not use.
	blob := w.renew(t)
	w.renew(t)
	if err := w.group.Thaw(); err != nil {
		t.Fatal(err)
	}
	var call sync.WaitGroup
	call.Go(func() { refused("suspended", 8) })
	if err := w.Resume(t.Context(), blob); err != nil {
		t.Fatal(err)
	}
	call.Wait()
	refused("of another lease", 8)
	refused("of another lease", 700)
	if n := w.Counters().Calls; n != 0 {
		t.Errorf("%d calls of another lease were executed", n)
	}
}

// A call that arrives before the worker has resumed is executed when it has. The executor does not wait for that.
func TestCallBeforeTheWorkerHasResumed(t *testing.T) {
	freezing(t, func(t *testing.T, z *Zygote) {
		w := lease(t, z, startClient(t), nil)
		for range 20 {
			if err := w.Suspend(t.Context()); err != nil {
				t.Fatal(err)
			}
			blob := w.renew(t)
			if _, err := w.c.ask("resume %d %x", w.channel, w.Blob()); err != nil {
				t.Fatal(err)
			}
			var call sync.WaitGroup
			call.Go(func() { w.mustCall(t, fnEcho, []byte("early")) })
			if err := w.Resume(t.Context(), blob); err != nil {
				t.Fatal(err)
			}
			call.Wait()
		}
	})
}

// A suspended worker exits when it is told to stop, and is not killed only after the time limit for its calls.
func TestStopOfASuspendedWorker(t *testing.T) {
	freezing(t, func(t *testing.T, z *Zygote) {
		for what, end := range map[string]func(*Worker, context.Context) error{"stop": (*Worker).Stop, "finish": (*Worker).Finish} {
			w := lease(t, z, startClient(t), nil)
			w.mustCall(t, fnEcho, []byte("x"))
			if err := w.Suspend(t.Context()); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // a guard
			if err := end(w.Worker, ctx); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			cancel()
		}
	})
}

// Only the client that a worker is connected to can have it back.
func TestResumeRefuses(t *testing.T) { freezing(t, testResumeRefuses) }

func testResumeRefuses(t *testing.T, z *Zygote) {
	c := startClient(t)
	_, other, err := c.offer()
	if err != nil {
		t.Fatal(err)
	}
	for _, wrong := range []struct {
		what   string
		blob   []byte
		reason string
	}{
		{"another channel's blob", other, "the blob is not that of the client"},
		{"nonsense", []byte("nonsense"), "channel blob of 8 bytes"},
		{"nothing", nil, "channel blob of 0 bytes"},
	} {
		w := lease(t, z, c, nil)
		w.mustCall(t, fnEcho, []byte("x"))
		if err := w.Suspend(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := w.Resume(t.Context(), wrong.blob); err != nil {
			t.Errorf("%s: %v", wrong.what, err)
		}
		<-w.Done()
		if x := w.Exit(); !strings.Contains(x.Reason, wrong.reason) {
			t.Errorf("%s: the worker ended with %q, want %q", wrong.what, x.Reason, wrong.reason)
		}
	}
	// A worker that hangs in a call is not suspended.
	w := lease(t, z, c, nil)
	go w.call(fnHangs, nil)
	eventually(t, "the call runs", func() bool { return w.Running() == "hangs" })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := w.Suspend(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("suspend while a call runs: %v", err)
	}
	w.Kill()
	<-w.Done()
	if err := w.Suspend(t.Context()); err == nil {
		t.Error("a dead worker was suspended")
	}
}
