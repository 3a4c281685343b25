package client_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// use makes a small call and a large call.
func use(t *testing.T, l *client.Lease) {
	t.Helper()
	echo := function(t, l, "echo")
	for _, size := range []int{8, 100 << 10} {
		in, out := make([]byte, size), make([]byte, size)
		in[size-1] = 7
		if n, err := echo.Invoke(context.Background(), in, out); err != nil || n != size || out[size-1] != 7 {
			t.Fatalf("call of %d bytes: %d, %v", size, n, err)
		}
	}
}

func release(t *testing.T, l *client.Lease) {
	t.Helper()
	if err := l.Release(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// A lease with different terms gets another worker. So does a lease with the same terms while the first one is held.
func TestCachedWorkersFitTheirKindOnly(t *testing.T) {
	w := newWorld(t, "--share-cores", "8", "--memory", "1600MiB")
	l := w.lease(t, client.LeaseOptions{Reuse: true})
	pid := l.Worker(0).PID()
	release(t, l)
	for what, o := range map[string]client.LeaseOptions{"depth": {Depth: 3}, "eager": {Eager: 128}, "bulk": {Bulk: -1}, "mode": {WaitMode: client.Warm},
		"memory": {Memory: 64 << 20}, "limit": {CallLimit: time.Minute}, "workers": {Workers: 2}} {
		o.Reuse = true
		other := w.lease(t, o)
		if other.Start() == client.StartCached || other.Worker(0).PID() == pid {
			t.Errorf("another %s: the same worker", what)
		}
		use := function(t, other, "echo")
		if _, err := use.Invoke(context.Background(), []byte("x"), make([]byte, 8)); err != nil {
			t.Errorf("another %s: %v", what, err)
		}
		defer release(t, other)
	}
	mine := w.lease(t, client.LeaseOptions{Reuse: true})
	if mine.Worker(0).PID() != pid {
		t.Error("the cached worker is gone")
	}
	second := w.lease(t, client.LeaseOptions{Reuse: true})
	if second.Worker(0).PID() == pid || second.Start() == client.StartCached {
		t.Error("two leases have one worker")
	}
	use(t, mine)
	use(t, second)
	release(t, second)
	release(t, mine)
	s := w.connect(t, client.Options{Executor: w.Address, Tenant: "somebody-else"})
	other, err := s.Lease(context.Background(), client.LeaseOptions{Reuse: true, Library: built(t, "build/functions/echo.so")})
	if err != nil || other.Start() == client.StartCached || other.Worker(0).PID() == pid {
		t.Errorf("another session: %v", err)
	}
}

// If cached workers die, end or are evicted, the next lease works.
func TestCachedWorkersAreGone(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	next := func(what string) {
		t.Helper()
		l := w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2})
		if l.Start() != client.StartCold {
			t.Errorf("%s: the next lease starts %v", what, l.Start())
		}
		use(t, l)
		release(t, l)
	}
	next("at first")
	var l *client.Lease
	within(t, 20*time.Second, "a lease starts cached", func() bool { // on a busy machine, workers may not freeze in time, and are then ended
		if l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2}); l.Start() != client.StartCached {
			release(t, l)
		}
		return l.Start() == client.StartCached
	})
	pid := l.Worker(1).PID()
	release(t, l)
	if running(pid) {
		kill(t, pid, syscall.SIGKILL)
	}
	within(t, 10*time.Second, "the killed worker is reaped, so that its sockets are closed", func() bool {
		_, err := readProc(pid, "stat")
		return err != nil
	})
	// On tcp the claim of a lease may come before the executor has noticed the death. The release of that lease ends the other worker.
	for l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2}); l.Start() == client.StartCached && provider() == "tcp"; {
		release(t, l)
		l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2})
	}
	use(t, l)
	if l.Start() != client.StartCold {
		t.Errorf("a cached worker was killed: the next lease starts %v", l.Start())
	}
	release(t, l)

	// A worker that is being killed may be granted. The lease then has a cached start, and a call replaces the worker.
	l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2})
	pid = l.Worker(1).PID()
	release(t, l)
	if running(pid) {
		kill(t, pid, syscall.SIGKILL)
	}
	l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2})
	_, err := l.Worker(1).Invoke(context.Background(), function(t, l, "echo"), []byte("x"), make([]byte, 8))
	if err != nil && !errors.Is(err, client.ErrConnection) {
		t.Error(err)
	}
	use(t, l)
	release(t, l)

	s := w.connect(t, client.Options{Executor: w.Address})
	other, err := s.Lease(context.Background(), client.LeaseOptions{Reuse: true, Library: built(t, "build/functions/echo.so")})
	if err != nil {
		t.Fatalf("cached workers are in another lease's way: %v", err)
	}
	release(t, other)
	next("evicted")
	s.Close()

	l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2})
	l.Worker(0).Invoke(context.Background(), function(t, l, "crash"), nil, nil)
	release(t, l) // one of them is dead or new
	l = w.lease(t, client.LeaseOptions{Reuse: true, Workers: 2})
	use(t, l)
	release(t, l)
}

// Cached workers end with their executor, and the executor that replaces it serves the next lease.
func TestCachedWorkersOfAnEarlierExecutor(t *testing.T) {
	w := newWorld(t)
	release(t, w.lease(t, client.LeaseOptions{Reuse: true}))
	w.signal(syscall.SIGKILL)
	<-w.done
	// The workers end a moment after their executor. Until then the client can claim them, and its calls may succeed.
	dead, err := w.session.Lease(context.Background(), client.LeaseOptions{Reuse: true, Library: built(t, "build/functions/echo.so")})
	if err == nil {
		var f *client.Function
		if f, err = dead.Function("echo"); err == nil {
			within(t, 10*time.Second, "a call has failed", func() bool {
				_, err = f.Invoke(context.Background(), []byte("x"), make([]byte, 8))
				return err != nil
			})
		}
		if errors.Is(err, client.ErrLease) {
			err = client.ErrConnection
		}
		_ = dead.Release(context.Background())
	}
	if !errors.Is(err, client.ErrConnection) {
		t.Errorf("without an executor: %v, want class connection", err)
	}
	args := []string{"--listen", w.Address, "--cores", "2", "--providers", provider(), "--grace", "2s"}
	if w.manager != "" { // it soon reports the earlier executor as silent, so the next one must register
		args = append(args, "--manager", w.manager)
	}
	next := start(t, "bin/executor", w.secret, args...)
	if next.Address != w.Address {
		t.Fatalf("the next executor is at %s, not %s", next.Address, w.Address)
	}
	var l *client.Lease
	within(t, 10*time.Second, "the session has found the next executor", func() (ok bool) {
		var err error
		l, err = w.session.Lease(context.Background(), client.LeaseOptions{Reuse: true, Library: built(t, "build/functions/echo.so")})
		return err == nil
	})
	if l == nil {
		return
	}
	use(t, l)
	release(t, l)
	l = w.lease(t, client.LeaseOptions{Reuse: true})
	if l.Start() != client.StartCached {
		t.Errorf("the next executor keeps nothing: %v", l.Start())
	}
	use(t, l)
	release(t, l)
}

// A session caches a limited number of leases, the latest ones, for a limited time.
func TestCachedWorkersAreLimited(t *testing.T) {
	w := newWorld(t, "--share-cores", "4", "--cache-time", "2s")
	s := w.connect(t, client.Options{Executor: w.Address, CachedLeases: 2})
	lease := func(depth int) *client.Lease {
		l, err := s.Lease(context.Background(), client.LeaseOptions{Reuse: true, Library: built(t, "build/functions/echo.so"), Depth: depth})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	for depth := 1; depth <= 3; depth++ {
		release(t, lease(depth))
	}
	if n := s.Cached(); n != 2 {
		t.Errorf("%d leases are cached, want 2", n)
	}
	l := lease(1)
	if l.Start() == client.StartCached {
		t.Error("the oldest of three is cached")
	}
	release(t, l)
	within(t, 10*time.Second, "the cached leases end after the cache time", func() bool { return s.Cached() == 0 })
	none := w.connect(t, client.Options{Executor: w.Address, CachedLeases: -1})
	l, err := none.Lease(context.Background(), client.LeaseOptions{Reuse: true, Library: built(t, "build/functions/echo.so")})
	if err != nil {
		t.Fatal(err)
	}
	release(t, l)
	if n := none.Cached(); n != 0 {
		t.Errorf("%d leases are cached, none is wanted", n)
	}
}
