package client_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// cancelled makes a call whose context has no deadline and is cancelled soon, but not before runs has returned. It fails if the call does not end then.
func cancelled(t *testing.T, what string, started bool, runs func(), call func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- call(ctx) }()
	runs()
	select {
	case err := <-done:
		t.Fatalf("%s: ended before it was cancelled: %v", what, err)
	case <-time.After(50 * time.Millisecond):
	}
	cancel()
	// The end of the session's time-out or of the function would give another error.
	var e *client.Error
	if err := ends(t, what, done); !errors.Is(err, context.Canceled) || !errors.As(err, &e) || e.Started != started {
		t.Errorf("%s: %v", what, err)
	}
}

func TestCancelEndsAMap(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	sleep := function(t, l, "sleep_ns")
	items := bytes.Repeat(u64(uint64(time.Minute)), 3)
	one := func(ctx context.Context) error {
		return sleep.Map(ctx, items, 8, make([]byte, len(items)), 8, client.MapOptions{Chunk: 1})
	}
	runs := func() {
		for i := range 2 {
			untilRuns(t, l.Worker(i), "sleep_ns")
		}
	}
	cancelled(t, "a map", true, runs, one)
	for i := range 2 { // new workers run nothing
		if err := l.Worker(i).Replace(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	cancelled(t, "a map beside another one", true, runs, func(ctx context.Context) error {
		other := make(chan error, 1)
		go func() { other <- one(ctx) }()
		return errors.Join(one(ctx), <-other)
	})
}

func TestCancelEndsAWaitForAWorker(t *testing.T) {
	if provider() == "verbs" {
		t.Skip("only shared memory tells of a worker's death at once, and the replacing is the same")
	}
	w, l, call := deadWorker(t)
	echo := function(t, l, "echo")
	call.Cancel()
	nothing := func() {} // no worker can run the call
	cancelled(t, "Invoke", false, nothing, func(ctx context.Context) error { return second(echo.Invoke(ctx, nil, nil)) })
	cancelled(t, "Worker.Invoke", false, nothing, func(ctx context.Context) error { return second(l.Worker(0).Invoke(ctx, echo, nil, nil)) })
	cancelled(t, "Submit", false, nothing, func(ctx context.Context) error { return second(l.Worker(0).Submit(ctx, echo, nil, 8)) })
	cancelled(t, "Map", true, nothing, func(ctx context.Context) error {
		return echo.Map(ctx, make([]byte, 80), 8, make([]byte, 80), 8, client.MapOptions{Chunk: 1})
	})
	w.signal(syscall.SIGCONT)
	out := make([]byte, 8)
	if n, err := echo.Invoke(t.Context(), []byte("again"), out); err != nil || string(out[:n]) != "again" {
		t.Errorf("afterwards: %q, %v", out[:n], err)
	}
}

// A map that waits because all requests of a shared lease are in use ends with its context.
func TestMapWithoutRequestsIsCancelled(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 1})
	echo, sleep := function(t, l, "echo"), function(t, l, "sleep_ns")
	call := func() {
		if _, err := echo.Invoke(t.Context(), []byte("x"), make([]byte, 8)); err != nil {
			t.Error(err)
		}
	}
	other, done := make(chan func()), make(chan bool)
	go func() {
		runtime.LockOSThread()
		for f := range other {
			f()
			done <- true
		}
	}()
	defer close(other)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for range 12 { // both threads share the lease once they have called in turns
		call()
		other <- call
		<-done
	}
	var calls []client.Call
	for {
		c, err := l.Worker(0).Submit(t.Context(), sleep, u64(uint64(20*time.Second)), 8)
		if err != nil {
			break // all requests are in use
		}
		calls = append(calls, c)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	err := echo.Map(ctx, make([]byte, 80), 8, make([]byte, 80), 8, client.MapOptions{Chunk: 1})
	if !errors.Is(err, context.Canceled) { // as when the functions end, after 20 s
		t.Error(err)
	}
	for i := range calls {
		calls[i].Cancel()
	}
}
