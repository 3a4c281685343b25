package client_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// handOver makes an executor continue as the installed program, and waits until that program is ready.
func (d *daemon) handOver(t testing.TB) {
	t.Helper()
	for len(d.readied) > 0 {
		<-d.readied
	}
	d.signal(syscall.SIGUSR2)
	select {
	case <-d.readied:
	case line := <-d.refused:
		t.Fatal(line)
	case <-d.done:
		t.Fatal("the executor ended")
	case <-time.After(30 * time.Second):
		t.Fatal("no program has taken over within 30 s")
	}
}

// callAlways calls echo on a worker until stop is called, which returns the number of calls. A failed call fails the
// test.
func callAlways(t testing.TB, w *client.Worker, f *client.Function) (stop func() uint64) {
	var calls atomic.Uint64
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		in, out := make([]byte, 64), make([]byte, 64)
		for ctx.Err() == nil {
			if n, err := w.Invoke(context.Background(), f, in, out); err != nil || n != len(in) {
				t.Errorf("call %d: %d bytes, %v", calls.Load(), n, err)
				return
			}
			calls.Add(1)
		}
	})
	return func() uint64 {
		cancel()
		wg.Wait()
		return calls.Load()
	}
}

// units returns the billed units of an item of a tenant.
func units(t testing.TB, m *daemon, secret, tenant string) map[string]uint64 {
	t.Helper()
	conn, err := control.Dial(m.Address, control.DialConfig{SecretFile: secret, AllowPlaintext: secondNode != ""})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r, err := control.NewManagerClient(conn).Bill(t.Context(), &control.BillRequest{Tenant: tenant})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]uint64{}
	for _, b := range r.GetBills() {
		for _, l := range b.GetLines() {
			n, err := strconv.ParseUint(l.GetUnits(), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			all[l.GetItem()] += n
		}
	}
	return all
}

// TestHandoverKeepsLeases hands an executor over twenty times while two leases are called all the time. No call fails, leases and
// workers stay the same, control operations work after each handover, and every call is billed once. On verbs it hands over six times,
// because a handover takes two seconds on the emulated processor.
func TestHandoverKeepsLeases(t *testing.T) {
	handovers := 20
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		handovers = 6
	}
	secret := filepath.Join(t.TempDir(), "secret")
	m := start(t, managerProgram, secret, "--executors", "8")
	d := start(t, "bin/executor", secret, "--cores", "2", "--share-cores", "2", "--providers", provider(), "--grace", "5s", "--manager", m.Address,
		"--charge-interval", "50ms", "--state-dir", filepath.Join(t.TempDir(), "state"))
	d.joined(t)
	w := &world{daemon: d, secret: secret}
	w.session = w.connect(t, client.Options{Executor: d.Address, Tenant: "ann"})
	var leases []*client.Lease
	var stops []func() uint64
	var pids []int
	var others time.Duration // of further leases
	var asked time.Time      // when the latest of these was requested. It is charged until the next handover, while its workers are cached and awake
	began := time.Now()
	for range 2 {
		l := w.lease(t, client.LeaseOptions{Duration: 10 * time.Minute})
		leases, pids = append(leases, l), append(pids, l.Worker(0).PID())
		stops = append(stops, callAlways(t, l.Worker(0), function(t, l, "echo")))
	}
	for i := range handovers {
		d.handOver(t)
		if !asked.IsZero() {
			others += time.Since(asked)
			asked = time.Time{}
		}
		for j, l := range leases {
			if err := l.Renew(t.Context(), 10*time.Minute); err != nil {
				t.Fatalf("handover %d: renew: %v", i, err)
			}
			if in, err := l.Worker(0).Inspect(t.Context()); err != nil || in.PID != pids[j] {
				t.Fatalf("handover %d: worker has pid %d, had %d: %v", i, in.PID, pids[j], err)
			}
		}
		if i%5 != 0 || i == handovers-1 {
			continue
		}
		asked = time.Now()
		other := w.lease(t, client.LeaseOptions{})
		if err := other.Release(t.Context()); err != nil {
			t.Fatalf("handover %d: %v", i, err)
		}
	}
	var calls uint64
	for i, l := range leases {
		calls += stops[i]()
		if err := l.Err(); err != nil {
			t.Error(err)
		}
		if l.Replaced() != 0 || l.Worker(0).PID() != pids[i] {
			t.Errorf("lease %d has another worker", l.ID())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	used := time.Since(began)
	d.signal(syscall.SIGTERM)
	ends(t, "the executor", d.done)
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	bill := units(t, m, secret, "ann")
	t.Logf("%d calls in %v, billed: %v", calls, used, bill)
	if bill["million-calls"] != calls {
		t.Errorf("%d calls are billed, %d were made", bill["million-calls"], calls)
	}
	if core := time.Duration(bill["core-hour"]) * time.Microsecond; core > 2*used+others || core < used {
		t.Errorf("%v of a core are billed for two leases of less than %v, and others of less than %v", core, used, others)
	}
}

// TestHandoverNoticesDeaths kills a worker around the time of a handover. Its client is notified and gets another
// worker.
func TestHandoverNoticesDeaths(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Duration: 10 * time.Minute})
	f := function(t, l, "echo")
	for i := range 6 {
		pid := l.Worker(0).PID()
		kill := func() {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		if i%2 == 0 {
			kill()
		}
		for len(w.readied) > 0 {
			<-w.readied
		}
		w.signal(syscall.SIGUSR2)
		if i%2 == 1 {
			kill()
		}
		ends(t, "the handover", w.readied)
		within(t, 20*time.Second, "a new worker answers", func() bool {
			_, err := l.Worker(0).Invoke(t.Context(), f, []byte("x"), make([]byte, 1))
			return err == nil && l.Worker(0).PID() != pid
		})
		in, err := l.Worker(0).Inspect(t.Context())
		if err != nil || in.PID != l.Worker(0).PID() {
			t.Errorf("kill %d: the executor names worker %d (%v), the client %d", i, in.PID, err, l.Worker(0).PID())
		}
	}
}

// TestHandoverWithoutRoot hands over twice an executor that another user has started. The spawner belongs to that user too, so the kernel
// would kill it with the thread that started it.
func TestHandoverWithoutRoot(t *testing.T) {
	testkit.Root(t, "starts a program as another user")
	const nobody = 65534
	dir, err := os.MkdirTemp("/tmp", "handover")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{secret: filepath.Join(t.TempDir(), "secret")}
	secret := filepath.Join(dir, "secret")
	for _, path := range []string{w.secret, secret} {
		if err := os.WriteFile(path, bytes.Repeat([]byte("0f"), 32), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Copies, because that user may be unable to enter the directory of the programs.
	paths := []string{dir, secret}
	for _, name := range []string{"bin/executor", "libexec/rfaas-worker", "libexec/rfaas-spawner"} {
		content, err := os.ReadFile(built(t, name))
		path := filepath.Join(dir, name)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(path), 0o755)
		}
		if err == nil {
			err = os.WriteFile(path, content, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, filepath.Dir(path), path)
	}
	script := filepath.Join(dir, "start")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups "+paths[3]+` "$@"`), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if err := os.Chown(path, nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	w.daemon = start(t, script, w.secret, "--secret-file", secret, "--cores", "2", "--providers", provider())
	w.session = w.connect(t, client.Options{Executor: w.Address})
	l := w.lease(t, client.LeaseOptions{Duration: 10 * time.Minute})
	pid := l.Worker(0).PID()
	stop := callAlways(t, l.Worker(0), function(t, l, "echo"))
	for range 3 {
		w.handOver(t)
	}
	if in, err := l.Worker(0).Inspect(t.Context()); err != nil || in.PID != pid {
		t.Errorf("the worker has pid %d, had %d: %v", in.PID, pid, err)
	}
	stop()
}

// TestHandoverRefused asks for handovers that are impossible. The executor says why and goes on, and a later handover succeeds.
func TestHandoverRefused(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} { // an executor that was root executes the program as another user
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	good, err := os.ReadFile(built(t, "bin/executor"))
	if err != nil {
		t.Fatal(err)
	}
	program, settings := filepath.Join(dir, "executor"), filepath.Join(dir, "executor.yaml")
	install := func(path string, content []byte, mode os.FileMode) {
		t.Helper()
		err := os.WriteFile(path+".new", content, mode)
		if err == nil {
			err = os.Rename(path+".new", path)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	install(program, good, 0o755)
	install(settings, []byte("grace: 2s\n"), 0o644)
	w := &world{secret: filepath.Join(dir, "secret")}
	w.daemon = start(t, program, w.secret, "--cores", "2", "--providers", provider(), "--worker", built(t, "libexec/rfaas-worker"), "--config", settings)
	w.session = w.connect(t, client.Options{Executor: w.Address})
	l := w.lease(t, client.LeaseOptions{Duration: 10 * time.Minute})
	pid := l.Worker(0).PID()
	stop := callAlways(t, l.Worker(0), function(t, l, "echo"))
	const prefix = "rfaas takes over executor state version "
	at := bytes.Index(good, []byte(prefix))
	if at < 0 {
		t.Fatal("the executor does not say which state it takes over")
	}
	mark := good[at : at+len(prefix)+2] // version and semicolon
	other := slices.Clone(mark)
	other[len(prefix)]++
	for _, c := range []struct {
		change func()
		text   string
	}{
		{func() { install(settings, []byte("grace: 2s\nshare-cores: 2\n"), 0o644) }, "share-cores was 1 and is 2 now"},
		{func() { os.Remove(program) }, "no such file"},
		{func() { install(program, good, 0o644) }, "cannot be executed"},
		{func() { install(program, []byte("#!/bin/sh\n"), 0o755) }, "does not take over"},
		{func() {
			install(program, bytes.ReplaceAll(good, mark, other), 0o755)
		}, "does not take over"},
		{func() {
			install(program, good, 0o755)
			install(settings, []byte("grace: soon\n"), 0o644)
		}, "soon"},
	} {
		c.change()
		w.signal(syscall.SIGUSR2)
		if line := ends(t, "the attempt", w.refused); !strings.Contains(line, c.text) {
			t.Errorf("it said %q, want %q", line, c.text)
		}
		if err := l.Renew(t.Context(), 10*time.Minute); err != nil {
			t.Errorf("%s: renew: %v", c.text, err)
		}
	}
	install(settings, []byte("grace: 2s\n"), 0o644)
	install(program, mark, 0o755) // passes the check, but the kernel does not execute it
	w.handOver(t)
	install(program, good, 0o755)
	w.handOver(t)
	if in, err := l.Worker(0).Inspect(t.Context()); err != nil || in.PID != pid {
		t.Errorf("worker has pid %d, had %d: %v", in.PID, pid, err)
	}
	if stop() == 0 {
		t.Error("no call was made")
	}
}

// holdExec makes the kernel hold the next execve of a file until allow is called.
func holdExec(t *testing.T, path string) (reached <-chan struct{}, allow func()) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		t.Fatalf("fanotify_init: %v", err)
	}
	events := os.NewFile(uintptr(fd), "fanotify") // when it is closed the kernel allows what it holds
	t.Cleanup(func() { events.Close() })
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_EXEC_PERM, unix.AT_FDCWD, path); err != nil {
		t.Fatalf("fanotify_mark %s: %v", path, err)
	}
	held := make(chan struct{})
	go func() {
		var e unix.FanotifyEventMetadata
		if n, err := events.Read(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e))); err == nil && n > 0 {
			unix.Close(int(e.Fd))
			close(held)
		}
	}()
	return held, func() { events.Close() }
}

// TestHandoverKeepsSIGTERM sends SIGTERM to an executor that has saved its state and is in execve. The new program drains and ends.
func TestHandoverKeepsSIGTERM(t *testing.T) {
	testkit.Root(t, "holds execve by fanotify")
	program := filepath.Join(t.TempDir(), "executor")
	content, err := os.ReadFile(built(t, "bin/executor"))
	if err == nil {
		err = os.WriteFile(program, content, 0o755)
	}
	if err == nil {
		err = os.Chmod(filepath.Dir(program), 0o755)
	}
	if err == nil {
		err = os.Chmod(filepath.Dir(filepath.Dir(program)), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	d := start(t, program, filepath.Join(t.TempDir(), "secret"), "--cores", "1", "--worker", built(t, "libexec/rfaas-worker"))
	reached, allow := holdExec(t, program)
	d.signal(syscall.SIGUSR2)
	ends(t, "the preparation of the handover", reached)
	d.signal(syscall.SIGTERM)
	allow()
	ends(t, "the executor", d.done)
	if code := d.cmd.ProcessState.ExitCode(); code != 0 || len(d.readied) != 2 {
		t.Errorf("exit status %d after %d programs were ready, want 0 and 2", code, len(d.readied))
	}
}
