package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

func TestMap(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	echo := function(t, l, "echo")
	in, out := make([]uint64, 10_001), make([]uint64, 10_001)
	for i := range in {
		in[i] = uint64(i) * 7
	}
	if err := client.Map(client.Idempotent(t.Context(), 1), echo, in, out); err != nil || !bytes.Equal(client.Bytes(in), client.Bytes(out)) {
		t.Errorf("map: %v", err)
	}
	if err := echo.Map(t.Context(), nil, 8, nil, 8, client.MapOptions{}); err != nil {
		t.Errorf("nothing: %v", err)
	}
	for what, err := range map[string]error{
		"half an item":  echo.Map(t.Context(), make([]byte, 12), 8, make([]byte, 16), 8, client.MapOptions{}),
		"no item":       echo.Map(t.Context(), make([]byte, 8), 0, make([]byte, 8), 8, client.MapOptions{}),
		"too few rooms": echo.Map(t.Context(), make([]byte, 16), 8, make([]byte, 8), 8, client.MapOptions{}),
		"chunk":         echo.Map(t.Context(), make([]byte, 16), 8, make([]byte, 16), 8, client.MapOptions{Chunk: -1}),
	} {
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := function(t, l, "empty").Map(t.Context(), make([]byte, 16), 8, make([]byte, 16), 8, client.MapOptions{Chunk: 1}); !errors.Is(err, client.ErrFunction) {
		t.Errorf("results that are too small: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := function(t, l, "sleep_ns").Map(ctx, u64(uint64(10*time.Second)), 8, make([]byte, 8), 8, client.MapOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}
	if err := echo.Map(ctx, nil, 8, nil, 8, client.MapOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a context that had ended: %v", err)
	}
}

func TestReduce(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	echo := function(t, l, "echo")
	in := make([]float64, 10_001)
	want := 0.5
	for i := range in {
		in[i] = 1 / float64(i+3)
		want += in[i]
	}
	sum := []float64{0.5}
	if err := client.Reduce(client.Idempotent(t.Context(), 1), echo, in, sum, client.Sum); err != nil || sum[0] != want {
		t.Errorf("sum %v, want %v: %v", sum[0], want, err)
	}
	type pair = complex64 // of which each has two float32
	least := []float32{9, 9}
	if err := client.Reduce(t.Context(), echo, []pair{complex(3, 4), complex(5, -6)}, least, client.Min); err != nil || least[0] != 3 || least[1] != -6 {
		t.Errorf("minimum %v: %v", least, err)
	}
	most, few := []int32{0, 5}, []int64{-9}
	if err := client.Reduce(t.Context(), echo, []uint64{7, 1 << 32}, most, client.Max); err != nil || most[0] != 7 || most[1] != 5 {
		t.Errorf("maximum %v: %v", most, err)
	}
	if err := client.Reduce(t.Context(), echo, []int64{-3, 4}, few, client.Sum); err != nil || few[0] != -8 {
		t.Errorf("sum %v: %v", few, err)
	}
	if err := client.Reduce(t.Context(), echo, in, sum, client.Operation(4)); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("operation 4: %v", err)
	}
	if err := client.Reduce(t.Context(), echo, in, []int64{}, client.Sum); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no accumulator: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := client.Reduce(ctx, echo, in, sum, client.Sum); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that had ended: %v", err)
	}
}

func TestWaitAny(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2})
	sleep, echo := function(t, l, "sleep_ns"), function(t, l, "echo")
	calls := make([]client.Call, 3) // a zero Call is ignored
	for i, d := range []time.Duration{time.Hour, time.Microsecond} {
		var err error
		if calls[i], err = l.Worker(i).Submit(t.Context(), sleep, u64(uint64(d)), 8); err != nil {
			t.Fatal(err)
		}
	}
	out := make([]byte, 8)
	for range 2 { // the second time the executor knows the library
		if i, err := client.WaitAny(t.Context(), calls); i != 1 || err != nil {
			t.Fatal(i, err)
		}
	}
	if n, err := calls[1].Result(out); err != nil || n != 8 || binary.LittleEndian.Uint64(out) != uint64(time.Microsecond) {
		t.Error(n, err)
	}
	if i, err := client.WaitAny(t.Context(), calls); i != 1 || !errors.Is(err, client.ErrInvalid) {
		t.Errorf("one that was asked for: %d, %v", i, err)
	}
	calls[1] = client.Call{}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if i, err := client.WaitAny(ctx, calls); i != -1 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %d, %v", i, err)
	}
	if err := l.Worker(0).Replace(t.Context()); err != nil { // which ends the call of an hour
		t.Fatal(err)
	}
	if i, err := client.WaitAny(t.Context(), calls); i != 0 || err != nil {
		t.Error(i, err)
	}
	calls[0].Cancel()
	if i, err := client.WaitAny(t.Context(), make([]client.Call, 2)); i != -1 || err != nil {
		t.Errorf("none: %d, %v", i, err)
	}
	// The context's deadline applies to the call.
	var c client.Call
	for limit, err := 20*time.Millisecond, context.DeadlineExceeded; err != nil; limit *= 2 { // until it is long enough for Submit
		short, stop := context.WithTimeout(t.Context(), limit)
		defer stop()
		if c, err = l.Worker(0).Submit(short, sleep, u64(uint64(time.Minute)), 8); err != nil && (!errors.Is(err, context.DeadlineExceeded) || limit > 5*time.Second) {
			t.Fatal(err)
		}
	}
	if err := c.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := c.Result(out); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a submitted call with a deadline: %v", err)
	}
	if _, err := l.Worker(1).Invoke(t.Context(), echo, nil, nil); err != nil {
		t.Error(err)
	}
}

// Goroutines that wait for a worker occupy no threads, and stop waiting when their contexts or the lease end.
func TestManyGoroutinesFewThreads(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{WaitMode: client.Warm})
	sleep := function(t, l, "sleep_ns")
	threads := func() int {
		list, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := threads()
	ctx, cancel := context.WithCancel(t.Context())
	const many = 300
	ended := make(chan error, 2*many)
	var begun sync.WaitGroup
	for i := range 2 * many {
		begun.Add(1)
		go func() {
			c := ctx
			if i < many {
				c = context.Background()
			}
			begun.Done()
			_, err := sleep.Invoke(c, u64(uint64(time.Minute)), make([]byte, 8))
			ended <- err
		}()
	}
	begun.Wait()
	untilRuns(t, l.Worker(0), "sleep_ns")
	if n := threads() - before; n > 30 {
		t.Errorf("%d threads for %d goroutines that wait for one worker", n, 2*many)
	}
	cancel()
	for range many - 1 { // one may be the call that runs
		if err := ends(t, "a cancelled call", ended); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	release(t, l)
	for range many + 1 {
		if err := ends(t, "a call", ended); !errors.Is(err, client.ErrLease) && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
}

func TestLeaseAtAPlace(t *testing.T) {
	m, _, secret := cluster(t, 2)
	s := m.session(t, secret)
	o := client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2}
	leaseSoon(t, s, 2).Release(context.Background())
	var places []client.Place
	within(t, 20*time.Second, "there is room for two", func() (ok bool) {
		var err error
		places, err = s.Places(t.Context(), o, 2)
		return err == nil
	})
	if len(places) != 2 || places[0] == places[1] {
		t.Fatalf("places %v", places)
	}
	for _, p := range places {
		l, err := s.LeaseAt(t.Context(), o, p)
		if err != nil || l.Executor() != string(p) {
			t.Fatalf("at %s: %v", p, err)
		}
		use(t, l)
	}
	if _, err := s.LeaseAt(t.Context(), o, places[0]); !errors.Is(err, client.ErrBusy) {
		t.Errorf("a place that is full: %v", err)
	}
	if _, err := s.Places(t.Context(), o, 3); !errors.Is(err, client.ErrBusy) {
		t.Errorf("three places: %v", err)
	}
	if _, err := s.Places(t.Context(), o, 0); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no place: %v", err)
	}
}

// An operation returns when its context ends. Its resources are released in the background.
func TestOperationsEndWithTheirContexts(t *testing.T) {
	w := newWorld(t)
	release(t, w.lease(t, client.LeaseOptions{})) // now the executor has the library
	w.signal(syscall.SIGSTOP)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := w.session.Lease(ctx, client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2})
	if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took >= 10*time.Second { // the session's time-out
		t.Errorf("%v after %v", err, took)
	}
	w.signal(syscall.SIGCONT)
	within(t, 20*time.Second, "the cores are free", func() bool {
		l, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2, Depth: 3})
		if err != nil {
			return false
		}
		release(t, l)
		return true
	})
}
