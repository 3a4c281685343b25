package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// An idempotent call survives the death of its worker. A call that always kills its worker is repeated as often as
// permitted.
func TestIdempotent(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	crash, sleep := function(t, l, "crash"), function(t, l, "sleep_ns")
	deaths := func(ctx context.Context) int {
		t.Helper()
		before := l.Replaced()
		if _, err := crash.Invoke(ctx, nil, nil); !errors.Is(err, client.ErrConnection) {
			t.Errorf("crash: %v, want ErrConnection", err)
		}
		// Dead workers are replaced in the background. Each is one attempt.
		pids := [2]int{}
		within(t, 10*time.Second, "both workers are there", func() bool {
			for i := range pids {
				if !alive(l, i) {
					return false
				}
				pids[i] = l.Worker(i).PID()
			}
			return true
		})
		return int(l.Replaced() - before)
	}
	if n := deaths(t.Context()); n != 1 {
		t.Errorf("a call that kills its worker killed %d", n)
	}
	if n := deaths(client.Idempotent(t.Context(), 2)); n != 3 {
		t.Errorf("the same, made again twice, killed %d", n)
	}

	// The first worker is still busy, so two attempts go to the two workers. The context's deadline ends the third.
	const whole, attempt, long = 1200 * time.Millisecond, 400 * time.Millisecond, 1500 * time.Millisecond
	for try, repeated := 1, false; !repeated; try++ { // a client that does not run for so long may make no attempt, or only one
		before, began := l.Statistics().Repeated, time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), whole)
		defer cancel()
		var e *client.Error
		_, err := sleep.Invoke(client.IdempotentWithin(ctx, 5, attempt), u64(uint64(long)), make([]byte, 8))
		n, took := l.Statistics().Repeated-before, time.Since(began)
		if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || n > 2 || took < whole {
			t.Fatalf("attempts that take too long: %v, made again %d times in %v", err, n, took)
		}
		if repeated = e.Started && n > 0; !repeated && try == 3 {
			t.Fatalf("attempts that take too long: %v, made again %d times in %v", err, n, took)
		}
	}
	release(t, l)

	l = w.lease(t, client.LeaseOptions{Workers: 2}) // both workers are idle
	sleep = function(t, l, "sleep_ns")
	victims := [2]int{l.Worker(0).PID(), l.Worker(1).PID()}
	ended := make(chan error, 1)
	out := make([]byte, 8)
	var killed atomic.Bool
	go func() { // back to back, so that a call is in progress when the worker dies
		var err error
		for err == nil && !killed.Load() {
			clear(out)
			_, err = sleep.Invoke(client.Idempotent(context.Background(), 3), u64(uint64(300*time.Millisecond)), out)
		}
		ended <- err
	}()
	victim := 0
	within(t, 10*time.Second, "a worker runs sleep_ns", func() bool {
		for i := range victims {
			if x, err := l.Worker(i).Inspect(context.Background()); err == nil && x.Running == "sleep_ns" {
				victim = victims[i]
			}
		}
		return victim != 0
	})
	kill(t, victim, syscall.SIGKILL)
	killed.Store(true)
	if err := ends(t, "the call", ended); err != nil || binary.LittleEndian.Uint64(out) != uint64(300*time.Millisecond) {
		t.Errorf("an idempotent call whose worker was killed: %x, %v", out, err)
	}
}

// An attempt of a submitted call that takes too long counts as ended and is repeated, even if it had the only slot.
func TestSubmittedAttemptTakesTooLong(t *testing.T) {
	const attempt, long = 100 * time.Millisecond, 2 * time.Second
	w := newWorld(t)
	for name, depth := range map[string]int{"two slots": 2, "one slot": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits nearly all of its time
			l := w.lease(t, client.LeaseOptions{Depth: depth})
			sleep := function(t, l, "sleep_ns")
			submit := func(ctx context.Context, d time.Duration) client.Call {
				t.Helper()
				c, err := l.Worker(0).Submit(ctx, sleep, u64(uint64(d)), 8)
				if err != nil {
					t.Fatal(err)
				}
				return c
			}
			// There are enough attempts to outlast the call that keeps the worker busy. The repeated call is short and
			// is answered in time.
			ctx, cancel := context.WithTimeout(client.IdempotentWithin(t.Context(), 100, attempt), 20*time.Second)
			defer cancel()
			quick := submit(ctx, time.Microsecond)
			out := make([]byte, 8)
			if err := quick.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n, err := quick.Result(out); err != nil || n != 8 {
				t.Errorf("a quick call: %d, %v", n, err)
			}
			slow := submit(client.IdempotentWithin(t.Context(), 1, attempt), long)
			began, before := time.Now(), l.Statistics().Repeated
			if ended, err := slow.Test(); ended && time.Since(began) < attempt || err != nil {
				t.Errorf("it has ended at once: %v, %v", ended, err)
			}
			if err := slow.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			// The call is repeated as soon as a slot is free.
			if took := time.Since(began); took < 2*attempt || depth > 1 && took >= long {
				t.Errorf("two attempts that may take %v were waited for %v", attempt, took)
			}
			if ended, err := slow.Test(); !ended || err != nil {
				t.Errorf("after Wait: %v, %v", ended, err)
			}
			var e *client.Error
			if _, err := slow.Result(out); !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || !e.Started {
				t.Errorf("both attempts take too long: %v", err)
			}
			if n := l.Statistics().Repeated - before; n != 1 {
				t.Errorf("made again %d times, want once", n)
			}
			if _, err := slow.Result(out); !errors.Is(err, client.ErrInvalid) {
				t.Errorf("asked for twice: %v", err)
			}
			// Some attempts are given up while they are queued behind the worker's current call. A later one is
			// answered.
			if n, err := l.Worker(0).Invoke(ctx, sleep, u64(uint64(time.Millisecond)), out); err != nil || n != 8 || binary.LittleEndian.Uint64(out) != uint64(time.Millisecond) {
				t.Errorf("behind a slow call: %d, %x, %v", n, out, err)
			}
			// Wait has no bound if the context has none.
			c := submit(client.Idempotent(t.Context(), 1), long)
			if ended, err := c.Test(); ended || err != nil {
				t.Errorf("%v, %v", ended, err)
			}
			c.Cancel()
		})
	}
}

// alive reports whether a call on worker i succeeds.
func alive(l *client.Lease, i int) bool {
	echo, err := l.Function("echo")
	if err != nil {
		return false
	}
	_, err = l.Worker(i).Invoke(context.Background(), echo, nil, nil)
	return err == nil
}
