package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

const forever = uint64(time.Hour)

// outcome waits for a call, and returns its error.
func outcome(c client.Call) error {
	if err := c.Wait(context.Background()); err != nil {
		return err
	}
	return second(c.Result(make([]byte, 8)))
}

func wantDeadline(t *testing.T, what string, err error, words ...string) {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) || e.Status != client.StatusDeadline {
		t.Errorf("%s: %v, want a deadline that has passed", what, err)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v, want %q in it", what, err, word)
		}
	}
}

// TestReplace kills a living worker, whose calls end with an error that says so, with one thread and with several.
func TestReplace(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	sleep, echo := function(t, l, "sleep_ns"), function(t, l, "echo")
	calls := make([]client.Call, 3)
	for i := range calls {
		var err error
		if calls[i], err = l.Worker(0).Submit(t.Context(), sleep, u64(forever), 8); err != nil {
			t.Fatal(err)
		}
	}
	untilRuns(t, l.Worker(0), "sleep_ns")
	running := make(chan error, 1)
	go func() {
		running <- second(l.Worker(1).Invoke(context.Background(), sleep, u64(forever), make([]byte, 8)))
	}()
	untilRuns(t, l.Worker(1), "sleep_ns")
	for i := range 2 {
		before := l.Worker(i).PID()
		if err := l.Worker(i).Replace(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Worker(i).Invoke(t.Context(), echo, u64(1), make([]byte, 8)); err != nil || l.Worker(i).PID() == before {
			t.Errorf("new worker %d: %v", i, err)
		}
	}
	errs := []error{ends(t, "the call on a replaced worker", running)}
	for i := range calls {
		err := outcome(calls[i])
		errs = append(errs, err)
	}
	for _, err := range errs {
		var e *client.Error
		if !errors.As(err, &e) || e.Status != client.StatusWorkerDied || !e.Started || !strings.Contains(err.Error(), "rfaas_worker_replace") {
			t.Errorf("a call on a replaced worker: %v", err)
		}
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := l.Worker(0).Replace(t.Context()); !errors.Is(err, client.ErrLease) {
		t.Errorf("a worker of a released lease: %v", err)
	}
	all := w.lease(t, client.LeaseOptions{Workers: 2})
	local := w.lease(t, client.LeaseOptions{Workers: 2, Local: true})
	if err := local.Worker(1).Replace(t.Context()); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "in this process") {
		t.Errorf("a worker of a local lease: %v", err)
	}
	_ = all.Release(t.Context())
}

// TestKillLate replaces workers whose calls have passed their deadlines.
func TestKillLate(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	sleep, echo := function(t, l, "sleep_ns"), function(t, l, "echo")
	ctx := client.KillLate(t.Context())
	for name, call := range map[string]func(ctx context.Context, w *client.Worker) error{
		"Invoke": func(ctx context.Context, w *client.Worker) error {
			return second(w.Invoke(ctx, sleep, u64(forever), make([]byte, 8)))
		},
		"Submit": func(ctx context.Context, w *client.Worker) error {
			c, err := w.Submit(ctx, sleep, u64(forever), 8)
			if err == nil {
				err = outcome(c)
			}
			return err
		},
	} {
		worker := l.Worker(1)
		before := worker.PID()
		var err error
		var e *client.Error
		for limit := 200 * time.Millisecond; (e == nil || !e.Started) && limit < 10*time.Second; limit *= 2 { // until it is long enough for the call to start
			bounded, cancel := context.WithTimeout(ctx, limit)
			err = call(bounded, worker)
			cancel()
			errors.As(err, &e)
		}
		wantDeadline(t, name, err, "sleep_ns", "the worker is killed and replaced")
		if _, err := worker.Invoke(t.Context(), echo, u64(1), make([]byte, 8)); err != nil || worker.PID() == before {
			t.Errorf("%s: the new worker: %v, pid %d, was %d", name, err, worker.PID(), before)
		}
	}
	if err := second(echo.Invoke(ctx, u64(1), make([]byte, 8))); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "RFAAS_CALL_KILL") {
		t.Errorf("without a deadline: %v", err)
	}
	attempts := client.KillLate(client.IdempotentWithin(t.Context(), 2, 100*time.Millisecond))
	if err := second(sleep.Invoke(attempts, u64(forever), make([]byte, 8))); err == nil {
		t.Error("a call of an hour has ended")
	}
	for i := range 2 {
		if _, err := l.Worker(i).Invoke(t.Context(), echo, u64(1), make([]byte, 8)); err != nil {
			t.Error(err)
		}
	}
}
