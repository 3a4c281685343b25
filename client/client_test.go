package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

func TestInvoke(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2, Bulk: 4 << 20})
	echo := function(t, l, "echo")
	before, results := 0, 0
	if secondNode != "" {
		before = fromSecondNode(t)
	}
	for _, size := range []int{0, 1, 8, 64, 4096, 16 << 10, 16<<10 + 1, 1 << 20, 4 << 20} {
		in := make([]byte, size)
		for i := range in {
			in[i] = byte(i * 7)
		}
		out := make([]byte, size)
		for range 3 {
			n, err := echo.Invoke(context.Background(), in, out)
			if err != nil {
				t.Fatalf("%d bytes: %v", size, err)
			}
			if n != size || !bytes.Equal(in, out) {
				t.Fatalf("%d bytes: %d came back, equal %v", size, n, bytes.Equal(in, out))
			}
			results += n
		}
	}
	if secondNode != "" {
		if crossed := fromSecondNode(t) - before; crossed < results {
			t.Errorf("%d bytes of results came back, but only %d bytes have come from the second node", results, crossed)
		}
	}
}

func u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

func TestInvokeFromManyGoroutines(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2, WaitMode: client.Warm})
	echo := function(t, l, "echo")
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			out := make([]byte, 8)
			for i := range 200 {
				in := u64(uint64(g)<<32 | uint64(i))
				if n, err := echo.Invoke(t.Context(), in, out); err != nil || n != 8 || !bytes.Equal(in, out) {
					t.Errorf("goroutine %d, call %d: %d bytes %x, %v", g, i, n, out, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestInvokeMakesNoAllocation(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	echo := function(t, l, "echo")
	in, out := make([]byte, 64), make([]byte, 64)
	background := context.Background()
	cancellable, cancel := context.WithCancel(background)
	defer cancel()
	most := 0.0
	for name, ctx := range map[string]context.Context{"background": background, "cancellable": cancellable} {
		// AllocsPerRun also counts other goroutines, such as the lease's event stream, so take the least of several
		// tries.
		least := math.Inf(1)
		for try := 0; try < 5 && least > 0; try++ {
			least = min(least, testing.AllocsPerRun(200, func() {
				if _, err := echo.Invoke(ctx, in, out); err != nil {
					t.Fatal(err)
				}
			}))
		}
		if least != 0 {
			t.Errorf("%s: %v allocations per call, want 0", name, least)
		}
		most = max(most, least)
	}
	t.Logf("figure: go.call.allocations = %g", most)
}

// A worker that dies ends its call with a specific error within a second, and the next call gets a new worker.
func TestDeadWorkerIsNamedAndReplaced(t *testing.T) {
	w := newWorld(t)
	died := newRecorder()
	l := w.lease(t, client.LeaseOptions{OnEvent: died.only(client.EventWorkerDied)})
	count := function(t, l, "count")
	out := make([]byte, 8)
	for _, d := range []death{
		{"crash", nil, client.StatusWorkerDied, "SIGSEGV at address 0x8", "crash+0x", ""},
		{"call_abort", nil, client.StatusWorkerDied, "SIGABRT", "call_abort+0x", ""},
		{"call_exit", u64(7), client.StatusWorkerDied, "called exit(7)", "", ""},
		{"print_and_crash", []byte("last words"), client.StatusWorkerDied, "SIGSEGV", "", "last words"},
	} {
		t.Run(d.function, func(t *testing.T) {
			promptly(t, "heard of it", time.Second, func() time.Duration { return d.check(t, l, died) })
			if _, err := count.Invoke(context.Background(), nil, out); err != nil || !bytes.Equal(out, u64(1)) {
				t.Errorf("the worker has counted %x, want 1 in a new one; %v", out, err)
			}
		})
	}
	if n := uint64(died.count()); n < 4 || l.Replaced() != n {
		t.Errorf("%d workers were replaced, and %d have died", l.Replaced(), n)
	}
}

func TestKilledWorkerEndsCallsInFlight(t *testing.T) {
	for _, mode := range []client.WaitMode{client.Adaptive, client.Hot, client.Warm} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			w := newWorld(t)
			l := w.lease(t, client.LeaseOptions{WaitMode: mode})
			sleep, pid := function(t, l, "sleep_ns"), function(t, l, "pid")
			out := make([]byte, 8)
			promptly(t, "the calls ended", time.Second, func() time.Duration {
				if _, err := pid.Invoke(t.Context(), nil, out); err != nil {
					t.Fatal(err)
				}
				victim := int(binary.LittleEndian.Uint64(out))
				var calls []client.Call
				for range 3 {
					c, err := l.Worker(0).Submit(t.Context(), sleep, u64(uint64(time.Minute)), 8)
					if err != nil {
						t.Fatal(err)
					}
					calls = append(calls, c)
				}
				if victim != l.Worker(0).PID() {
					t.Logf("worker says it is process %d, the executor %d", victim, l.Worker(0).PID())
					victim = l.Worker(0).PID()
				}
				kill(t, victim, syscall.SIGKILL)
				killed := time.Now()
				bound, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				var errs []error
				for _, c := range calls {
					if err := c.Wait(bound); err != nil {
						t.Fatal(err)
					}
					errs = append(errs, second(c.Result(out)))
				}
				took := time.Since(killed)
				for i, err := range errs {
					var e *client.Error
					died := errors.As(err, &e) && e.Status == client.StatusWorkerDied && strings.Contains(err.Error(), "SIGKILL")
					late := e != nil && e.Status == client.StatusPeerGone && took >= 900*time.Millisecond // as in death.check
					if !died && !late {
						t.Errorf("call %d: %v", i, err)
					}
				}
				if _, err := pid.Invoke(t.Context(), nil, out); err != nil || bytes.Equal(out, u64(uint64(victim))) {
					t.Errorf("the next call: %x, %v", out, err)
				}
				return took
			})
		})
	}
}

func TestSubmit(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Depth: 4})
	echo, sleep := function(t, l, "echo"), function(t, l, "sleep_ns")
	worker := l.Worker(0)
	out := make([]byte, 64)

	var calls []client.Call
	for i := range 4 {
		c, err := worker.Submit(t.Context(), echo, u64(uint64(i)), 8)
		if err != nil {
			t.Fatal(err)
		}
		calls = append(calls, c)
	}
	if _, err := worker.Submit(t.Context(), echo, nil, 8); !errors.Is(err, client.ErrBusy) {
		t.Errorf("a call more than the depth: %v, want busy", err)
	}
	for i := range calls { // in reverse order
		i := len(calls) - 1 - i
		if err := calls[i].Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if ended, err := calls[i].Test(); !ended || err != nil {
			t.Errorf("Test after Wait: %v, %v", ended, err)
		}
		if n, err := calls[i].Result(out); err != nil || !bytes.Equal(out[:n], u64(uint64(i))) {
			t.Errorf("call %d: %x, %v", i, out[:n], err)
		}
		if _, err := calls[i].Result(out); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("asked twice: %v, want invalid", err)
		}
		calls[i].Cancel() // no effect on a completed call
	}

	for nap, ended := 250*time.Millisecond, true; ended; nap *= 2 { // until it is long enough for this machine
		began := time.Now()
		c, err := worker.Submit(t.Context(), sleep, u64(uint64(nap)), 8)
		if err != nil {
			t.Fatal(err)
		}
		_, early := c.Result(out)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		bounded := c.Wait(ctx)
		cancel()
		if ended = time.Since(began) >= nap; !ended {
			if !errors.Is(early, client.ErrBusy) {
				t.Errorf("result of a running call: %v, want busy", early)
			}
			if !errors.Is(bounded, context.DeadlineExceeded) || !errors.Is(bounded, client.ErrFunction) {
				t.Errorf("wait with deadline: %v", bounded)
			}
			if err := outcome(c); err != nil { // the call was not affected
				t.Error(err)
			}
		}
		c.Cancel()
	}
	c, err := worker.Submit(t.Context(), sleep, u64(20e6), 8)
	if err != nil {
		t.Fatal(err)
	}
	c.Cancel()
	if err := c.Wait(t.Context()); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("wait after cancel: %v, want invalid", err)
	}
	if err := (client.Call{}).Wait(t.Context()); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("the zero call: %v, want invalid", err)
	}
	if n, err := echo.Invoke(t.Context(), []byte("after"), out); err != nil || string(out[:n]) != "after" {
		t.Errorf("after all: %q, %v", out[:n], err)
	}
}

func TestDeadlineAndCancel(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	sleep, echo := function(t, l, "sleep_ns"), function(t, l, "echo")
	out := make([]byte, 8)
	var ctx context.Context
	var long time.Duration
	var e *client.Error
	for limit, good := 200*time.Millisecond, false; !good; limit *= 2 { // until it is long enough for this machine
		long = 3 * limit
		start := time.Now()
		bounded, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		ctx, e = bounded, nil
		_, err := l.Worker(0).Invoke(ctx, sleep, u64(uint64(long)), out)
		took := time.Since(start)
		if took < limit || err == nil && took < long || err != nil && (!errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || e.Status != client.StatusDeadline) {
			t.Fatalf("a deadline of %v for a call of %v: %v after %v", limit, long, err, took)
		}
		if good = err != nil && e.Started && took < long; !good && limit > 5*time.Second {
			t.Fatalf("the deadline of %v for a call of %v was noticed after %v: %v", limit, long, took, err)
		}
	}
	if _, err := echo.Invoke(ctx, nil, out); !errors.Is(err, context.DeadlineExceeded) || (errors.As(err, &e) && e.Started) {
		t.Errorf("a context that had ended: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	cancelled := make(chan error, 1)
	go func() { cancelled <- second(l.Worker(1).Invoke(ctx, sleep, u64(uint64(long)), make([]byte, 8))) }()
	untilRuns(t, l.Worker(1), "sleep_ns")
	stop()
	if err := ends(t, "the cancelled call", cancelled); !errors.Is(err, context.Canceled) || !errors.As(err, &e) || e.Status != client.StatusCancelled || !e.Started {
		t.Errorf("cancel: %v", err)
	}
	// Late replies are dropped.
	for i := range uint64(40) {
		if _, err := l.Worker(int(i%2)).Invoke(t.Context(), echo, u64(i), out); err != nil || !bytes.Equal(out, u64(i)) {
			t.Fatalf("call %d after the given up ones: %x, %v", i, out, err)
		}
	}
}

func TestFunctionErrors(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Bulk: 1 << 20})
	out := make([]byte, 64)
	_, err := function(t, l, "fail").Invoke(t.Context(), []byte("negative volatility"), out)
	var e *client.Error
	if !errors.Is(err, client.ErrFunction) || !errors.As(err, &e) || e.Status != client.StatusFunctionFailed {
		t.Errorf("failing function: %v", err)
	}
	if !strings.Contains(err.Error(), "negative volatility") {
		t.Errorf("%q does not have the function's message", err)
	}
	_, err = function(t, l, "fail").Invoke(context.Background(), []byte("negative volatility"), out)
	if !errors.Is(err, client.ErrFunction) || !strings.Contains(err.Error(), "negative volatility") {
		t.Errorf("synchronous: %q does not have the function's message", err)
	}
	n, err := function(t, l, "too_large").Invoke(t.Context(), nil, out)
	if !errors.As(err, &e) || e.Status != client.StatusResultTooLarge || n != 65 {
		t.Errorf("too large result: %d, %v", n, err)
	}
	n, err = function(t, l, "echo").Invoke(t.Context(), make([]byte, 100), out)
	if !errors.As(err, &e) || e.Status != client.StatusResultTooLarge {
		t.Errorf("result above the room: %d, %v", n, err)
	}
	_, err = function(t, l, "sum").Invoke(t.Context(), make([]byte, 1<<20+1), out)
	if !errors.Is(err, client.ErrInvalid) || !errors.As(err, &e) || e.Status != client.StatusTooLarge || !strings.Contains(err.Error(), "1048577") {
		t.Errorf("payload above the bulk area: %v", err)
	}
	if _, err := function(t, l, "echo").Invoke(t.Context(), []byte("ok"), out); err != nil {
		t.Errorf("after the errors: %v", err)
	}
}

func TestBufferPayloads(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Bulk: 1 << 20})
	worker, sum := l.Worker(0), function(t, l, "sum")
	b, err := worker.Alloc(t.Context(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Bytes() {
		b.Bytes()[i] = 1
	}
	out := make([]byte, 8)
	for _, size := range []int{0, 8, 4096, 100_000, 1 << 20} {
		if _, err := worker.Invoke(t.Context(), sum, b.Bytes()[:size], out); err != nil || !bytes.Equal(out, u64(uint64(size))) {
			t.Errorf("%d bytes: %x, %v", size, out, err)
		}
	}
	if err := b.Free(t.Context()); err != nil {
		t.Error(err)
	}
	if err := b.Free(t.Context()); err != nil {
		t.Error(err)
	}
}

// Calls in place in all ways, with their limits; elsewhere than on shm they are copied.
func TestInPlace(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Bulk: 1 << 20})
	b, err := l.Alloc(t.Context(), 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	in, out, echo := b.Bytes()[:4<<20], b.Bytes()[4<<20:], function(t, l, "echo")
	ctx, cancel := context.WithCancel(client.InPlace(t.Context()))
	defer cancel()
	for i, ctx := range []context.Context{client.InPlace(context.Background()), ctx, client.Idempotent(client.InPlace(t.Context()), 2),
		client.InPlace(client.Idempotent(t.Context(), 2))} {
		for _, size := range []int{0, 100, 4096, 1 << 20, 4 << 20} {
			clear(out)
			for j := range in[:size] {
				in[j] = byte(i + j)
			}
			n, err := echo.Invoke(ctx, in[:size], out)
			if size > 1<<20 && provider() != "shm" {
				if !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "4194304") {
					t.Errorf("%d bytes: %d, %v", size, n, err)
				}
			} else if err != nil || !bytes.Equal(out[:n], in[:size]) {
				t.Errorf("%d bytes: %d, %v", size, n, err)
			}
		}
	}
	if _, err := echo.Invoke(client.InPlace(t.Context()), in[:4096], in[64:]); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "overlap") {
		t.Errorf("payload and result that overlap: %v", err)
	}
	if _, err := echo.Invoke(client.InPlace(t.Context()), in[1:4097], out); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "multiple of 64") {
		t.Errorf("payload that is not aligned: %v", err)
	}
	if _, err := echo.Invoke(client.InPlace(client.IdempotentWithin(t.Context(), 1, time.Minute)), in[:4096], out); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a limit of each attempt: %v", err)
	}
	call, err := l.Worker(0).Submit(client.InPlace(t.Context()), echo, in[:1<<20], 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	result := make([]byte, 1<<20)
	if err := call.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if n, err := call.Result(result); err != nil || n != len(result) || !bytes.Equal(result, in[:1<<20]) {
		t.Errorf("submitted: %d bytes, %v", n, err)
	}
	if err := b.Free(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestReleaseEndsCalls(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	sleep := function(t, l, "sleep_ns")
	ended := make(chan error, 2)
	for i := range 2 {
		go func() {
			_, err := l.Worker(i).Invoke(context.Background(), sleep, u64(uint64(time.Minute)), nil)
			ended <- err
		}()
	}
	untilRuns(t, l.Worker(0), "sleep_ns")
	untilRuns(t, l.Worker(1), "sleep_ns")
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := ends(t, "a call of the lease", ended); !errors.Is(err, client.ErrLease) {
			t.Errorf("a call in flight ended with %v, want lease", err)
		}
	}
	if _, err := sleep.Invoke(t.Context(), nil, nil); !errors.Is(err, client.ErrLease) {
		t.Errorf("a call after release: %v, want lease", err)
	}
	if l.Err() == nil {
		t.Error("a released lease has no error")
	}
	// The cores are free again.
	again := w.lease(t, client.LeaseOptions{Workers: 2})
	if err := again.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestLeaseExpires(t *testing.T) {
	w := newWorld(t)
	promptly(t, "the call ended", 2*time.Second, func() time.Duration {
		l := w.lease(t, client.LeaseOptions{Duration: 800 * time.Millisecond})
		start := time.Now()
		_, err := function(t, l, "sleep_ns").Invoke(context.Background(), u64(uint64(time.Minute)), make([]byte, 8))
		took := time.Since(start)
		if !errors.Is(err, client.ErrLease) || !strings.Contains(err.Error(), "expired") {
			t.Errorf("a call in an expiring lease: %v", err)
		}
		if !errors.Is(l.Err(), client.ErrLease) {
			t.Errorf("lease's error: %v", l.Err())
		}
		return took
	})
}

func TestExecutorKilled(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	ended := make(chan error, 1)
	go func() {
		_, err := function(t, l, "sleep_ns").Invoke(context.Background(), u64(uint64(time.Minute)), make([]byte, 8))
		ended <- err
	}()
	untilRuns(t, l.Worker(0), "sleep_ns")
	w.signal(syscall.SIGKILL)
	err := ends(t, "the call", ended)
	if !errors.Is(err, client.ErrConnection) && !errors.Is(err, client.ErrLease) {
		t.Errorf("a call whose executor was killed: %v", err)
	}
	start := time.Now()
	if _, err := function(t, l, "echo").Invoke(context.Background(), nil, nil); err == nil {
		t.Error("a call without an executor worked")
	}
	if d := time.Since(start); d > 12*time.Second {
		t.Errorf("the next call ended after %v", d)
	}
	// Releasing a lease that has ended is no error.
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("release: %v", err)
	}
	if err := w.session.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

func TestManagerFindsExecutor(t *testing.T) {
	secret := secretFile(t)
	manager := start(t, "bin/resource-manager", secret)
	w := &world{secret: secret}
	w.session = w.connect(t, client.Options{Manager: manager.Address, Provider: "auto"})
	_, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so")})
	if !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), "executor --manager "+manager.Address) {
		t.Errorf("a manager without executors: %v", err)
	}
	for range 2 {
		start(t, "bin/executor", secret, "--cores", "2", "--providers", provider(), "--manager", manager.Address).joined(t)
	}
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	second := w.lease(t, client.LeaseOptions{Workers: 2})
	if l.Executor() == second.Executor() {
		t.Errorf("both leases are on %s, which has two cores", l.Executor())
	}
	if _, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2}); !errors.Is(err, client.ErrBusy) {
		t.Errorf("a lease of what is not free: %v, want busy", err)
	}
	if _, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 3}); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a lease larger than every node: %v, want invalid", err)
	}
	out := make([]byte, 2)
	if _, err := function(t, second, "echo").Invoke(t.Context(), []byte("hi"), out); err != nil || string(out) != "hi" {
		t.Errorf("%q, %v", out, err)
	}
}
