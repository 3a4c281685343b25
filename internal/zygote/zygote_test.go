package zygote

import (
	"github.com/rfaas-go/rfaas/internal/spawner"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"

	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestStart(t *testing.T) {
	check := leakCheck(t)
	z := startZygote(t)
	pid := current(t, z)
	t.Logf("%d verbs devices", z.VerbsDevices())
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if alive(pid) {
		t.Error("zygote alive after Close")
	}
	if err := z.Close(); err == nil {
		t.Error("second Close succeeded")
	}
	spec := Spec{Provider: "shm", ClientBlob: []byte{1}, Names: []string{"f"}, Code: os.Stdin}
	if _, err := z.Spawn(t.Context(), spec); !errors.Is(err, errClosed) {
		t.Errorf("Spawn after Close: %v", err)
	}
	check()
}

func TestStartFailures(t *testing.T) {
	silent := compile(t, "silent", writeSource(t, "silent", "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"))
	wire.OnStarterThread(func() {})
	check := leakCheck(t)
	for _, c := range []struct{ path, says string }{
		{"/nonexistent/rfaas-worker", "no such file"},
		{"/bin/true", "no greeting"},
		{"/bin/false", "exit status 1"},
	} {
		_, err := Start(t.Context(), Config{Path: c.path, Spawner: spawnerPath(t), Log: testLog(t)})
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", c.path, err, c.says)
		}
	}
	if testing.Short() {
		check()
		return
	}
	// The spawner ends only when it has waited 10 s for the greeting.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Start(ctx, Config{Path: silent, Spawner: spawnerPath(t), Log: testLog(t)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("silent program: %v", err)
	}
	check()
}

func TestCall(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	w := lease(t, z, c, func(s *Spec) { s.CPUs = []int{1} })
	if got := w.mustCall(t, fnEcho, []byte("hello")); string(got) != "hello" {
		t.Errorf("echo: %q", got)
	}
	around := w.mustCall(t, fnSurroundings, nil)
	word := func(i int) int { return int(int64(binary.LittleEndian.Uint64(around[8*i:]))) }
	if word(0) != 2 {
		t.Errorf("CPU mask %#x, want 0x2", word(0))
	}
	if word(1) != w.PID() {
		t.Errorf("session %d, pid %d", word(1), w.PID())
	}
	if spawner := z.spawner.process.Pid; word(2) != spawner {
		t.Errorf("parent %d, the spawner is %d", word(2), spawner)
	}
	if word(3) > 16 {
		t.Errorf("%d open descriptors", word(3))
	}
	if word(4) != 0 {
		t.Errorf("%d signals blocked", word(4))
	}
	if e := w.Exit(); e.Reason != "running" {
		t.Errorf("exit before the end: %+v", e)
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e := w.Exit(); e.Reason != "stopped" || e.Code != 0 || e.Signal != 0 || !e.Requested {
		t.Errorf("exit %+v", e)
	}
	if alive(w.PID()) {
		t.Error("alive after Stop")
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Errorf("second Stop: %v", err)
	}
	w.Kill()
}

func TestStopKillsWhatHangs(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	called := make(chan reply)
	go func() {
		r, _ := w.call(fnHangs, nil)
		called <- r
	}()
	eventually(t, "the call runs", func() bool { return w.Running() == "hangs" })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if err := w.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Stop: %v", err)
	}
	if e := w.Exit(); e.Signal != int(unix.SIGKILL) || e.Reason != "killed by the executor" {
		t.Errorf("exit %+v", e)
	}
	if r := <-called; r.status/100 != -5 {
		t.Errorf("call ended with %d", r.status)
	}
	if d := time.Since(begin); d > testBound/2 {
		t.Errorf("call ended after %v", d)
	}
}

func TestCrashes(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	for _, tc := range []struct {
		function     int
		payload      []byte
		signal, code int
		reason, tail string
	}{
		{fnCrash, nil, 11, 0, "SIGSEGV at address 0x8", "about to crash\n"},
		{fnAborts, nil, 6, 0, "SIGABRT: abort was called", ""},
		{fnExits, []byte{0}, 0, 0, "called exit(0)", ""},
		{fnExits, []byte{3}, 0, 3, "called exit(3)", ""},
	} {
		const most = time.Second
		var w *leased
		for try := 1; ; try++ { // what a machine that stands still adds is not the worker's
			w = lease(t, z, c, nil)
			begin := time.Now()
			r, err := w.call(tc.function, tc.payload)
			d := time.Since(begin)
			if err != nil || r.status/100 != -5 {
				t.Errorf("%s: status %d, %v", testNames[tc.function], r.status, err)
			}
			if d <= most {
				break
			}
			t.Logf("%s: call ended after %v", testNames[tc.function], d)
			if try == 3 {
				t.Errorf("%s: calls end after more than %v", testNames[tc.function], most)
				break
			}
		}
		within(t, testNames[tc.function], w.Done())
		e := w.Exit()
		if e.Signal != tc.signal || e.Code != tc.code || e.Reason != tc.reason || e.Requested ||
			string(e.OutputTail) != tc.tail {
			t.Errorf("%s: %+v, tail %q", testNames[tc.function], e, e.OutputTail)
		}
	}
}

func TestKilledFromOutside(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	unix.Kill(w.PID(), unix.SIGKILL)
	within(t, "exit", w.Done())
	if e := w.Exit(); e.Signal != 9 || !strings.HasPrefix(e.Reason, "SIGKILL") {
		t.Errorf("%+v", e)
	}
}

// A batch system sends SIGTERM to all processes of a job, and more than once. Only the executor heeds it.
func TestTermIsForTheExecutor(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	w := lease(t, z, c, nil)
	first := current(t, z)
	for range 3 {
		unix.Kill(w.PID(), unix.SIGTERM)
		unix.Kill(first, unix.SIGTERM)
		if got := w.mustCall(t, fnEcho, []byte("still")); string(got) != "still" {
			t.Errorf("echo: %q", got)
		}
		if got := lease(t, z, c, nil).mustCall(t, fnEcho, []byte("new")); string(got) != "new" {
			t.Errorf("echo of a new worker: %q", got)
		}
	}
	if current(t, z) != first {
		t.Error("the zygote was replaced")
	}
	// What a function starts can be ended by SIGTERM: a handler ends with execve, ignoring would not.
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"SigIgn", "SigBlk"} {
		_, rest, _ := strings.Cut(string(status), field+":\t")
		var mask uint64
		if _, err := fmt.Sscanf(rest, "%x", &mask); err != nil || mask&(1<<(unix.SIGTERM-1)) != 0 {
			t.Errorf("%s %x, %v", field, mask, err)
		}
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestClientKilled(t *testing.T) {
	z := startZygote(t)
	for _, mode := range []uint8{1, 2} {
		c := startClient(t)
		w := lease(t, z, c, func(s *Spec) { s.WaitMode = mode })
		w.mustCall(t, fnEcho, []byte("x"))
		c.cmd.Process.Kill()
		within(t, "exit", w.Done())
		if e := w.Exit(); e.Code != exitClientGone || !strings.Contains(e.Reason, "client is gone") {
			t.Errorf("mode %d: %+v", mode, e)
		}
	}
}

func TestZygoteKilledWorkersLiveOn(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	w := lease(t, z, c, nil)
	first := current(t, z)
	for range 3 {
		unix.Kill(current(t, z), unix.SIGKILL)
		// Spawn works through the gap, or with the successor.
		next := lease(t, z, c, nil)
		if got := next.mustCall(t, fnEcho, []byte("new")); string(got) != "new" {
			t.Errorf("echo of the new: %q", got)
		}
		if got := w.mustCall(t, fnEcho, []byte("old")); string(got) != "old" {
			t.Errorf("echo of the old: %q", got)
		}
	}
	if current(t, z) == first {
		t.Error("zygote not replaced")
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

// killAtRandom kills the zygotes in turn until the returned function is called. The pauses between the kills are first + n * step ms, for n from 0 to 6.
func (z *Zygote) killAtRandom(first, step int) (stop func()) {
	ended := make(chan struct{})
	var killer sync.WaitGroup
	killer.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-ended:
				return
			case <-time.After(time.Duration(first+i%7*step) * time.Millisecond):
			}
			z.mu.Lock()
			pid := z.zygotes[i%len(z.zygotes)].pid
			z.mu.Unlock()
			if pid != 0 {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
	})
	return func() {
		close(ended)
		killer.Wait()
	}
}

// Zygotes are killed at random moments while workers are spawned: every spawn succeeds or fails cleanly.
func TestZygoteKilledDuringSpawns(t *testing.T) {
	c := startClient(t)
	code := sealedFile(t, testLibrary(t))
	wire.OnStarterThread(func() {})
	check := leakCheck(t)
	z := startZygote(t)
	stop := z.killAtRandom(1, 3)
	good := 0
	for range 60 {
		spec, channel := c.spec(t, code)
		w, err := z.Spawn(t.Context(), spec)
		if err == nil {
			good++
			if err := c.connect(w, channel); err != nil {
				t.Error(err)
			}
			w.Kill()
			<-w.Done()
		} else if !errors.Is(err, errZygoteDied) {
			t.Error(err)
		}
		c.ask("close %d", channel)
	}
	stop()
	t.Logf("%d of 60 spawns succeeded", good)
	// How many succeed is for the machine to say; afterwards they all do.
	spec, channel := c.spec(t, code)
	w, err := z.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.connect(w, channel); err != nil {
		t.Error(err)
	}
	(&leased{w, c, channel}).mustCall(t, fnEcho, []byte("x"))
	w.Kill()
	<-w.Done()
	c.ask("close %d", channel)
	z.Close()
	check()
}

func TestZygoteHangs(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	w := lease(t, z, c, nil)
	code := sealedFile(t, testLibrary(t))
	var stopped int
	var err error
	for try, late := 1, true; late && try <= 3; try++ { // until Spawn ends before the spawner replaces the zygote unasked
		spec, _ := c.spec(t, code)
		stopped = current(t, z)
		began := time.Now()
		unix.Kill(stopped, unix.SIGSTOP)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		var other *Worker
		other, err = z.Spawn(ctx, spec)
		cancel()
		late = time.Since(began) >= spawner.StopPatience
		if err == nil {
			other.Kill()
			<-other.Done()
		}
	}
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting for the process that starts workers") {
		t.Errorf("Spawn by a stopped zygote: %v", err)
	}
	// Nothing of a worker is left or can come any more: the zygote was killed.
	if unix.Kill(stopped, 0) != unix.ESRCH {
		eventually(t, "hung zygote reaped", func() bool { return unix.Kill(stopped, 0) == unix.ESRCH })
	}
	w.mustCall(t, fnEcho, []byte("x"))
	if got := lease(t, z, c, nil).mustCall(t, fnEcho, []byte("y")); string(got) != "y" {
		t.Errorf("echo: %q", got)
	}
	eventually(t, "no other worker", func() bool { return z.started(t) == 3 }) // zygote, two workers
}

func TestExecutorKilled(t *testing.T) {
	c := startClient(t)
	_, blob, err := c.offer()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "ZYGOTE_TEST_EXECUTOR="+workerPath(t), "ZYGOTE_TEST_CODE="+testLibrary(t),
		"ZYGOTE_TEST_BLOB="+hex.EncodeToString(blob))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	line, _ := bufio.NewReader(out).ReadString('\n')
	var zygote, worker int
	if _, err := fmt.Sscanf(line, "pids %d %d", &zygote, &worker); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	if !alive(zygote) || !alive(worker) {
		t.Fatal("not running")
	}
	cmd.Process.Kill()
	eventually(t, "zygote and worker dead", func() bool { return !alive(zygote) && !alive(worker) })
}

func TestCloseKillsWorkers(t *testing.T) {
	c := startClient(t)
	code := testLibrary(t)
	wire.OnStarterThread(func() {})
	check := leakCheck(t)
	z, err := Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(code)
	if err != nil {
		t.Fatal(err)
	}
	memfd, err := SealedMemfd("code", f, 1<<30)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		spec, _ := c.spec(t, memfd)
		if _, err := z.Spawn(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
	}
	memfd.Close()
	z.Close()
	check()
}

func TestManySpawnsLeakNothing(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	code := sealedFile(t, testLibrary(t))
	bad := sealed(t, []byte("not a library"))
	check := leakCheck(t)
	zygote := current(t, z)
	zygoteFDs := openFDs(t, zygote)
	var took [2][]time.Duration // not pinned, pinned: only the latter waits for a certain core
	for i := range 200 {
		spec, channel := c.spec(t, code)
		pinned := i / 4 % 2
		if pinned == 1 {
			spec.CPUs = []int{i % 2}
		}
		if i%4 == 3 {
			spec.Code = bad
		}
		begin := time.Now()
		w, err := z.Spawn(t.Context(), spec)
		if i%4 == 3 {
			if err == nil {
				t.Fatal("loaded a file that is not a library")
			}
		} else {
			if err != nil {
				t.Fatal(err)
			}
			took[pinned] = append(took[pinned], time.Since(begin))
			if i%4 == 0 {
				if err := c.connect(w, channel); err != nil {
					t.Fatal(err)
				}
				(&leased{w, c, channel}).mustCall(t, fnEcho, []byte("x"))
			}
			if i%4 == 1 {
				w.Kill()
				<-w.Done()
			} else if err := w.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.ask("close %d", channel); err != nil {
			t.Fatal(err)
		}
	}
	for pinned, d := range took {
		slices.Sort(d)
		t.Logf("spawn to LOADED, pinned %d: p10 %v, median %v, p90 %v, max %v of %d", pinned, d[len(d)/10], d[len(d)/2],
			d[len(d)*9/10], d[len(d)-1], len(d))
	}
	z.dropParts()
	check()
	eventually(t, "zygote has no more descriptors than before", func() bool {
		return openFDs(t, zygote) == zygoteFDs
	})
	z.mu.Lock()
	defer z.mu.Unlock()
	if n := len(z.workers); n != 0 {
		t.Errorf("%d workers still known", n)
	}
}

func TestConcurrentSpawns(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	code := sealedFile(t, testLibrary(t))
	var specs []Spec
	for range 16 {
		spec, _ := c.spec(t, code)
		specs = append(specs, spec)
	}
	var wg sync.WaitGroup
	for _, spec := range specs {
		wg.Go(func() {
			w, err := z.Spawn(t.Context(), spec)
			if err != nil {
				t.Error(err)
				return
			}
			if err := w.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestSpawnCancelled(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	code := sealedFile(t, library(t, "hang.so", hangingConstructor+emptyFunction))
	check := leakCheck(t)
	spec, channel := c.spec(t, code)
	spec.Names = []string{"f"}
	// interrupted starts a worker. The time is over while the executor waits for it and it loads its library.
	interrupted := func(cause error, start func(context.Context) (*Worker, error)) error {
		ctx, watched, expire := newExpiring(t, cause)
		failed := make(chan error, 1)
		go func() {
			_, err := start(ctx)
			failed <- err
		}()
		within(t, "waiting for the worker", watched)
		eventually(t, "loading the library", func() bool {
			z.mu.Lock()
			defer z.mu.Unlock()
			for _, w := range z.workers {
				if w.page.phase() == phaseLoading {
					return true
				}
			}
			return false
		})
		expire()
		return <-failed
	}
	err := interrupted(context.DeadlineExceeded, func(ctx context.Context) (*Worker, error) { return z.Spawn(ctx, spec) })
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "loading the library") {
		t.Errorf("hanging constructor: %v", err)
	}
	c.ask("close %d", channel)

	// The same when the time for a spawn is over.
	spec, channel = c.spec(t, code)
	spec.Names = []string{"f"}
	body, err := spawnBody(&spec)
	if err != nil {
		t.Fatal(err)
	}
	names, err := NamesMemfd(spec.Names)
	if err != nil {
		t.Fatal(err)
	}
	err = interrupted(errSpawnTimeout, func(ctx context.Context) (*Worker, error) { return z.spawn(ctx, &spec, body, names) })
	names.Close()
	wantError(t, err, wire.StatusBadLibrary, "hangs while loading the library")
	if !strings.Contains(err.Error(), "timed out after 10s") {
		t.Errorf("%q does not say how long it took", err)
	}
	c.ask("close %d", channel)

	spec, _ = c.spec(t, code)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := z.Spawn(ctx, spec); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
	check()
}
