package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// An idempotent call survives the death of its worker, and one that always kills its worker is made as often as permitted.
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
				if pids[i] = l.Worker(i).PID(); pids[i] == 0 || !alive(l, i) {
					return false
				}
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

	// Two attempts go to the two workers, since the first one is still asleep, and the context's own deadline ends the third.
	before, began := l.Statistics().Repeated, time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
	defer cancel()
	var e *client.Error
	_, err := sleep.Invoke(client.IdempotentWithin(ctx, 5, 100*time.Millisecond), u64(uint64(400*time.Millisecond)), make([]byte, 8))
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || !e.Started {
		t.Errorf("attempts that take too long: %v", err)
	}
	if n, took := l.Statistics().Repeated-before, time.Since(began); n < 1 || n > 2 || took < 250*time.Millisecond {
		t.Errorf("made again %d times in %v", n, took)
	}

	victims := [2]int{l.Worker(0).PID(), l.Worker(1).PID()}
	ended := make(chan error, 1)
	out := make([]byte, 8)
	go func() {
		_, err := sleep.Invoke(client.Idempotent(context.Background(), 3), u64(uint64(300*time.Millisecond)), out)
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
	if err := <-ended; err != nil || binary.LittleEndian.Uint64(out) != uint64(300*time.Millisecond) {
		t.Errorf("an idempotent call whose worker was killed: %x, %v", out, err)
	}
}

// alive says whether a call on worker i ends well.
func alive(l *client.Lease, i int) bool {
	echo, err := l.Function("echo")
	if err != nil {
		return false
	}
	_, err = l.Worker(i).Invoke(context.Background(), echo, nil, nil)
	return err == nil
}
