package client_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// within waits until cond holds, fails after d, and returns how long it took.
func within(t *testing.T, d time.Duration, what string, cond func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		late := time.Since(start) > d // before cond: a delay of this process does not count
		if cond() {
			break
		}
		if late {
			t.Errorf("not within %v: %s", d, what)
			break
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(start)
}

// promptly fails the test unless one of three attempts takes no longer than most. A machine that stands still makes an attempt longer, and hardly three
// in a row.
func promptly(t *testing.T, what string, most time.Duration, attempt func() time.Duration) {
	t.Helper()
	for try := 1; ; try++ {
		took := attempt()
		t.Logf("%s after %v", what, took.Round(time.Microsecond))
		if took <= most || t.Failed() {
			return
		}
		if try == 3 {
			t.Errorf("%s: each time after more than %v", what, most)
			return
		}
	}
}

// watched holds pidfds of processes. gone waits until all of them have ended.
func watched(t *testing.T, pids ...int) (gone func(d time.Duration, what string) time.Duration) {
	t.Helper()
	if far != "" { // pidfds do not work for another machine
		return func(d time.Duration, what string) time.Duration {
			t.Helper()
			const asking = 5 * time.Second // each query takes up to half a second
			return within(t, d+asking, what, func() bool { return !slices.ContainsFunc(pids, running) })
		}
	}
	var list []unix.PollFd
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatalf("process %d: %v", pid, err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		list = append(list, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	return func(d time.Duration, what string) time.Duration {
		t.Helper()
		start := time.Now()
		for i := range list {
			for {
				n, err := unix.Poll(list[i:i+1], int(max(time.Until(start.Add(d)), 0)/time.Millisecond))
				if n == 1 {
					break
				}
				if err == nil {
					t.Errorf("not within %v: %s", d, what)
					return d
				}
				if err != unix.EINTR {
					t.Fatal(err)
				}
			}
		}
		return time.Since(start)
	}
}

// zygote returns the executor's zygote: its only child that is not a worker of the lease.
func zygote(t *testing.T, w *world, l *client.Lease) int {
	t.Helper()
	for _, pid := range withoutGuards(children(t, w.pid())) {
		mine := false
		for i := range l.Workers() {
			mine = mine || l.Worker(i).PID() == pid
		}
		if !mine {
			return pid
		}
	}
	t.Fatal("the executor has no zygote")
	return 0
}

// When an executor is killed, its zygote and workers end too. Running calls end with a specific error within a second.
// The lease ends: its event says that it was lost, and later calls fail with an error that asks for a new lease.
func TestExecutorKilledLeavesNothing(t *testing.T) {
	promptly(t, "the calls ended", time.Second, func() time.Duration { return executorKilled(t) })
}

// executorKilled returns how long after the kill the calls ended.
func executorKilled(t *testing.T) time.Duration {
	w := newWorld(t, "--pool", "0")
	events := newRecorder()
	l := w.lease(t, client.LeaseOptions{Workers: 2, OnEvent: events.on})
	pids := children(t, w.pid())
	acting := withoutGuards(pids)
	if len(acting) != 3 {
		t.Fatalf("the executor has children %v, want a zygote and two workers", pids)
	}
	gone := watched(t, acting...)
	sleep := function(t, l, "sleep_ns")
	ended := make(chan error, 2)
	for i := range 2 {
		go func() {
			_, err := l.Worker(i).Invoke(context.Background(), sleep, u64(uint64(time.Minute)), make([]byte, 8))
			ended <- err
		}()
	}
	untilRuns(t, l.Worker(0), "sleep_ns")
	untilRuns(t, l.Worker(1), "sleep_ns")
	w.signal(syscall.SIGKILL)
	start := time.Now()
	for range 2 {
		err := ends(t, "a call", ended)
		var e *client.Error
		if !errors.As(err, &e) || !errors.Is(err, client.ErrConnection) || !e.Started {
			t.Errorf("a call whose executor was killed: %v", err)
		}
	}
	took := time.Since(start)
	more := gone(testkit.Bound, "zygote and workers are gone")
	t.Logf("the processes ended %v later", more.Round(time.Microsecond))
	if e := events.want(t, 0, client.EventEnded); !strings.HasPrefix(e.Reason, "lost: ") {
		t.Errorf("the event says %q, want lost: and why", e.Reason)
	}
	_, invoked := l.Worker(0).Invoke(t.Context(), sleep, u64(0), make([]byte, 8))
	_, submitted := l.Worker(1).Submit(t.Context(), sleep, u64(0), 8)
	for op, err := range map[string]error{"Invoke": invoked, "Submit": submitted, "Renew": l.Renew(t.Context(), 0), "Err": l.Err()} {
		var e *client.Error
		if !errors.As(err, &e) || !errors.Is(err, client.ErrLease) || e.Started || !strings.Contains(err.Error(), "lost: ") {
			t.Errorf("%s after the executor was killed: %v, want that the lease was lost", op, err)
		}
	}
	return took
}

// After SIGTERM running calls may finish. Calls that outlast the grace end with a lease error, and the executor exits
// with 0.
func TestExecutorStopsWithCallsInFlight(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	pids := children(t, w.pid())
	sleep := function(t, l, "sleep_ns")
	long := make(chan error, 1)
	go func() {
		_, err := l.Worker(1).Invoke(context.Background(), sleep, u64(uint64(time.Minute)), make([]byte, 8))
		long <- err
	}()
	untilRuns(t, l.Worker(1), "sleep_ns")
	short, err := l.Worker(0).Submit(t.Context(), sleep, u64(uint64(500*time.Millisecond)), 8)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	w.signal(syscall.SIGTERM)
	if err := outcome(short); err != nil {
		t.Errorf("a call that was running: %v", err)
	}
	if err := ends(t, "the long call", long); !errors.Is(err, client.ErrLease) || !strings.Contains(err.Error(), "draining") {
		t.Errorf("a call that did not finish: %v", err)
	}
	if d := time.Since(start); d < time.Second {
		t.Errorf("it ended after %v, the grace is 2 s", d)
	}
	ends(t, "the executor", w.done)
	if code := w.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the executor exited with %d", code)
	}
	for _, pid := range pids {
		if running(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
	if _, err := l.Worker(0).Invoke(t.Context(), sleep, nil, nil); !errors.Is(err, client.ErrLease) {
		t.Errorf("a call afterwards: %v, want lease", err)
	}
}

// Workers survive the death of the zygote, and dead workers are replaced through another zygote.
func TestZygoteKilled(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	l := w.lease(t, client.LeaseOptions{})
	echo, count := function(t, l, "echo"), function(t, l, "count")
	out := make([]byte, 8)
	if _, err := count.Invoke(t.Context(), nil, out); err != nil {
		t.Fatal(err)
	}
	old := zygote(t, w, l)
	kill(t, old, syscall.SIGKILL)
	if _, err := count.Invoke(t.Context(), nil, out); err != nil || out[0] != 2 {
		t.Errorf("a call after the zygote's death: %x, %v", out, err)
	}
	if _, err := function(t, l, "crash").Invoke(t.Context(), nil, out); !errors.Is(err, client.ErrConnection) {
		t.Errorf("crash: %v", err)
	}
	if n, err := echo.Invoke(t.Context(), []byte("again"), out); err != nil || string(out[:n]) != "again" {
		t.Errorf("on a worker of the next zygote: %q, %v", out[:n], err)
	}
	if next := zygote(t, w, l); next == old {
		t.Errorf("the zygote is still process %d", old)
	}
}

// A live worker whose connection broke is killed and replaced: user code has closed its sockets or the descriptors of
// its device. On shared memory the client notices, on verbs the executor does.
func TestUnreachableWorkerIsReplaced(t *testing.T) {
	soon := time.Second
	if provider() == "verbs" {
		soon = 5 * time.Second // about 1 s; the machine is emulated
	}
	w := newWorld(t, "--pool", "0")
	// Descriptor 3 stays open, because the executor would end the worker without it.
	library := compile(t, "closes.so", `#include <stdint.h>
#include <unistd.h>
uint32_t closes(void *a, uint32_t n, void *r) { (void)a; (void)n; (void)r; for (int fd = 4; fd < 256; fd++) close(fd); for (;;) pause(); }
uint32_t fine(void *a, uint32_t n, void *r) { (void)a; (void)n; *(char *)r = 1; return 1; }
`)
	l := w.lease(t, client.LeaseOptions{Library: library})
	closes, fine := function(t, l, "closes"), function(t, l, "fine")
	took, next := time.Hour, time.Hour
	for try := 0; try < 3 && (took > soon || next > 2*soon); try++ { // other load of the machine only makes it longer
		first := l.Worker(0).PID()
		start := time.Now()
		_, err := closes.Invoke(context.Background(), nil, nil)
		took = time.Since(start)
		if !errors.Is(err, client.ErrConnection) || provider() == "verbs" && !strings.Contains(err.Error(), "closed the descriptors") {
			t.Fatalf("a call whose connection broke: %v", err)
		}
		t.Logf("after %v: %v", took.Round(time.Millisecond), err)
		start = time.Now()
		out := make([]byte, 1)
		if _, err := fine.Invoke(t.Context(), nil, out); err != nil || out[0] != 1 {
			t.Fatalf("the next call: %x, %v", out, err)
		}
		next = time.Since(start)
		if running(first) {
			t.Errorf("the unreachable worker %d still runs", first)
		}
	}
	if took > soon || next > 2*soon {
		t.Errorf("at best the call ended after %v, want %v, and the next one took %v, want %v", took, soon, next, 2*soon)
	}
}

// TestClientProcess is not a test: TestClientKilled runs it as a separate process.
func TestClientProcess(t *testing.T) {
	address, secret := os.Getenv("TEST_CLIENT_OF"), os.Getenv("TEST_CLIENT_SECRET")
	if address == "" {
		t.Skip("only for TestClientKilled")
	}
	s, err := client.Connect(context.Background(), client.Options{Executor: address, SecretFile: secret, Provider: provider()})
	if err != nil {
		t.Fatal(err)
	}
	r := newRecorder()
	l, err := s.Lease(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2, OnEvent: r.on})
	if err != nil {
		t.Fatal(err)
	}
	// The event of a death shows that the event stream is open. Before that, a lease waits longer for its client.
	victim := l.Worker(1).PID()
	kill(t, victim, syscall.SIGKILL)
	echo, err := l.Function("echo")
	if err != nil {
		t.Fatal(err)
	}
	r.want(t, 0, client.EventWorkerDied)
	if _, err := l.Worker(1).Invoke(context.Background(), echo, nil, nil); err != nil || l.Replaced() != 1 || l.Worker(1).PID() == victim {
		t.Fatalf("%d workers replaced, %v", l.Replaced(), err)
	}
	f, err := l.Function("sleep_ns")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Worker(0).Submit(context.Background(), f, u64(uint64(time.Minute)), 8); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("workers %d %d\n", l.Worker(0).PID(), l.Worker(1).PID())
	select {}
}

// When a client is killed, its lease ends, its workers are reaped, even during a call, and the cores are free.
func TestClientKilled(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	cmd := exec.Command(os.Args[0], "-test.run=^TestClientProcess$")
	cmd.Env = append(os.Environ(), "TEST_CLIENT_OF="+w.Address, "TEST_CLIENT_SECRET="+w.secret)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pids [2]int
	said := ""
	for s := bufio.NewScanner(stdout); s.Scan(); {
		said += s.Text() + "\n"
		if n, _ := fmt.Sscanf(s.Text(), "workers %d %d", &pids[0], &pids[1]); n == 2 {
			break
		}
	}
	if pids[1] == 0 {
		cmd.Process.Kill()
		cmd.Wait()
		t.Fatalf("the client said:\n%s", said)
	}
	gone := watched(t, pids[:]...)
	cmd.Process.Kill()
	cmd.Wait()
	took := gone(testkit.Bound, "the workers have ended")
	var l *client.Lease
	took += within(t, testkit.Bound, "the cores are free", func() bool {
		l, err = w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2})
		return err == nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("everything was free %v after the kill", took.Round(time.Millisecond))
	if list := withoutGuards(children(t, w.pid())); len(list) != 3 {
		t.Errorf("the executor has children %v, want a zygote and two workers", list)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A closed session or lease stays closed, and calls on it fail with an error that says so.
func TestUseAfterClose(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	l := w.lease(t, client.LeaseOptions{})
	echo := function(t, l, "echo")
	buffer, err := l.Worker(0).Alloc(t.Context(), 64)
	if err != nil {
		t.Fatal(err)
	}
	call, err := l.Worker(0).Submit(t.Context(), echo, nil, 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.session.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.session.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("released after the session's end: %v", err)
	}
	if _, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so")}); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "closed") {
		t.Errorf("a lease in a closed session: %v", err)
	}
	for what, err := range map[string]error{
		"invoke":           second(echo.Invoke(t.Context(), nil, nil)),
		"invoke on worker": second(l.Worker(0).Invoke(t.Context(), echo, nil, nil)),
		"submit":           second(l.Worker(0).Submit(t.Context(), echo, nil, 0)),
		"wait":             call.Wait(t.Context()),
		"test":             second(call.Test()),
		"result":           second(call.Result(nil)),
		"alloc":            second(l.Worker(0).Alloc(t.Context(), 8)),
		"lease's error":    l.Err(),
	} {
		if !errors.Is(err, client.ErrLease) {
			t.Errorf("%s: %v, want lease", what, err)
		}
	}
	call.Cancel()
	if buffer.Bytes() != nil {
		t.Error("a buffer outlives its lease")
	}
	if err := buffer.Free(t.Context()); err != nil {
		t.Errorf("free: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }
