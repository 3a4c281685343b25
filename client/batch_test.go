package client_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/ccalls"
)

func add(t *testing.T, b *client.Batch, f *client.Function, in []byte, capacity int) {
	t.Helper()
	if err := b.Add(f, in, capacity); err != nil {
		t.Fatal(err)
	}
}

func newBatch(t *testing.T, l *client.Lease) *client.Batch {
	t.Helper()
	b := l.NewBatch()
	t.Cleanup(b.Free)
	return b
}

// status is that of a call's error, and whether the call may have run.
func status(t *testing.T, b *client.Batch, i int) (client.Status, bool) {
	t.Helper()
	_, err := b.Result(i, make([]byte, 64))
	var e *client.Error
	if err != nil && !errors.As(err, &e) {
		t.Fatal(err)
	}
	if err == nil {
		return 0, true
	}
	return e.Status, e.Started
}

// More calls than slots, with payloads of many sizes.
func TestBatch(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2, Depth: 4})
	echo := function(t, l, "echo")
	b := newBatch(t, l)
	payload := func(round, i int) []byte { return bytes.Repeat(u64(uint64(round)<<32|uint64(i)), i*i%2200) }
	for round := range 3 {
		for i := range 300 {
			add(t, b, echo, payload(round, i), len(payload(round, i)))
		}
		if round == 1 {
			if err := b.Submit(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		ctx := t.Context()
		if round == 2 {
			ctx = context.Background()
		}
		if err := b.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		out := make([]byte, 8*2200)
		for i := range b.Len() {
			if n, err := b.Result(i, out); err != nil || !bytes.Equal(out[:n], payload(round, i)) {
				t.Fatalf("round %d, call %d: %d bytes, %v", round, i, n, err)
			}
		}
		b.Reset()
	}
}

// Each call has its own outcome, and wrong uses are refused.
func TestBatchErrors(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Bulk: -1})
	echo, fails := function(t, l, "echo"), function(t, l, "fail")
	b := newBatch(t, l)
	add(t, b, echo, u64(1), 8)
	add(t, b, fails, []byte("as told"), 8)
	add(t, b, echo, u64(2), 4)
	add(t, b, echo, make([]byte, 1<<20), 8)
	add(t, b, echo, u64(3), 8)
	var e *client.Error
	if _, err := b.Result(0, nil); !errors.Is(err, client.ErrBusy) {
		t.Errorf("the result of a call that was not submitted: %v", err)
	}
	if err := b.Wait(client.InPlace(t.Context())); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("in place: %v", err)
	}
	if err := b.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	out := make([]byte, 64)
	for _, i := range []int{0, 4} {
		if n, err := b.Result(i, out); n != 8 || err != nil {
			t.Errorf("call %d: %d bytes, %v", i, n, err)
		}
	}
	for range 2 { // the error stays
		if _, err := b.Result(1, out); !errors.As(err, &e) || e.Status != client.StatusFunctionFailed || !bytes.Contains([]byte(e.Text), []byte("as told")) {
			t.Errorf("a function that failed: %v", err)
		}
	}
	if n, err := b.Result(2, out); !errors.As(err, &e) || e.Status != client.StatusResultTooLarge || n != 8 {
		t.Errorf("too large a result: %d, %v", n, err)
	}
	if n, err := b.Result(0, out[:4]); !errors.As(err, &e) || e.Status != client.StatusResultTooLarge || n != 8 {
		t.Errorf("too little room for a result: %d, %v", n, err)
	}
	if got, started := status(t, b, 3); got != client.StatusTooLarge || started {
		t.Errorf("too large a payload: %v, started %v", got, started)
	}
	for what, err := range map[string]error{
		"a batch that was submitted": b.Add(echo, u64(1), 8), "no function": b.Add(nil, nil, 0), "capacity": b.Add(echo, nil, -1),
		"index": second(b.Result(5, out)), "negative index": second(b.Result(-1, out)),
		"another lease": b.Add(function(t, w.lease(t, client.LeaseOptions{}), "echo"), nil, 0)} {
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", what, err)
		}
	}
	b.Free()
	if err := b.Add(echo, u64(1), 8); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("after Free: %v", err)
	}
	b = newBatch(t, l)
	add(t, b, echo, u64(1), 8)
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"Wait": b.Wait(t.Context()), "Add": b.Add(echo, nil, 0), "Submit": l.NewBatch().Submit(t.Context())} {
		if !errors.Is(err, client.ErrLease) {
			t.Errorf("%s after the release: %v", what, err)
		}
	}
}

// The context of Submit has the deadline of the calls. That of Wait bounds only the waiting.
func TestBatchDeadline(t *testing.T) {
	w := newWorld(t)
	limit := 300 * time.Millisecond
	for !batchDeadline(t, w, limit) {
		if limit *= 2; limit > 10*time.Second {
			t.Fatal("no call ends before its deadline")
		}
	}
}

// batchDeadline returns false if the deadline was so short that it passed before the test saw the calls in flight.
func batchDeadline(t *testing.T, w *world, limit time.Duration) bool {
	l := w.lease(t, client.LeaseOptions{Depth: 2})
	defer release(t, l)
	sleep, echo := function(t, l, "sleep_ns"), function(t, l, "echo")
	b := newBatch(t, l)
	add(t, b, echo, u64(1), 8)
	add(t, b, sleep, u64(forever), 8)
	add(t, b, echo, u64(2), 8)
	add(t, b, echo, u64(3), 8)
	ended, end := context.WithCancel(t.Context())
	end()
	if err := b.Submit(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("submitted with a context that has ended: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := b.Submit(ctx); errors.Is(err, context.DeadlineExceeded) {
		return false
	} else if err != nil {
		t.Fatal(err)
	}
	for running := ""; running != "sleep_ns"; {
		if ctx.Err() != nil {
			return false
		}
		if i, err := l.Worker(0).Inspect(t.Context()); err == nil {
			running = i.Running
		}
	}
	waited := b.Wait(ended)
	_, early := b.Result(1, nil)
	if ctx.Err() != nil {
		return false
	}
	if !errors.Is(waited, context.Canceled) {
		t.Errorf("waited with a context that has ended: %v", waited)
	}
	if !errors.Is(early, client.ErrBusy) {
		t.Errorf("the result of a call in flight: %v", early)
	}
	if err := b.Wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got, _ := status(t, b, 0); got != 0 {
		t.Errorf("the call before: %v", got)
	}
	if got, started := status(t, b, 1); got != client.StatusDeadline || !started {
		t.Errorf("the late call: %v, started %v", got, started)
	}
	if got, _ := status(t, b, 2); got != client.StatusDeadline {
		t.Errorf("the call behind the late one: %v", got)
	}
	if got, started := status(t, b, 3); got != client.StatusDeadline || started {
		t.Errorf("a call without a slot: %v, started %v", got, started)
	}
	return true
}

// When its context ends, Wait returns and the calls go on, until Cancel.
func TestBatchCancelled(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Depth: 2})
	sleep, echo := function(t, l, "sleep_ns"), function(t, l, "echo")
	b := newBatch(t, l)
	for range 3 {
		add(t, b, sleep, u64(forever), 8)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error, 1)
	go func() { waited <- b.Wait(ctx) }()
	untilRuns(t, l.Worker(0), "sleep_ns")
	cancel()
	if err := ends(t, "Wait", waited); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	b.Cancel()
	for i := range 3 {
		if got, started := status(t, b, i); got != client.StatusCancelled || started != (i < 2) {
			t.Errorf("call %d: %v, started %v", i, got, started)
		}
	}
	if err := b.Wait(t.Context()); err != nil {
		t.Errorf("after Cancel: %v", err)
	}
	if err := l.Worker(0).Replace(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Reset()
	add(t, b, echo, u64(7), 8)
	if err := errors.Join(b.Wait(t.Context()), second(b.Result(0, make([]byte, 8)))); err != nil {
		t.Errorf("the next batch: %v", err)
	}
}

// A worker that dies ends its calls in flight. The batch goes on with others and with the new worker.
func TestBatchWorkerDies(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2, Depth: 4})
	echo, crash := function(t, l, "echo"), function(t, l, "crash")
	b := newBatch(t, l)
	const calls, bad = 400, 40
	for i := range calls {
		if i == bad {
			add(t, b, crash, nil, 8)
		} else {
			add(t, b, echo, u64(uint64(i)), 8)
		}
	}
	if err := b.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	lost, out := 0, make([]byte, 8)
	for i := range calls {
		n, err := b.Result(i, out)
		switch {
		case errors.Is(err, client.ErrConnection):
			lost++
		case i == bad || err != nil || !bytes.Equal(out[:n], u64(uint64(i))):
			t.Errorf("call %d: %x, %v", i, out[:n], err)
		}
	}
	if got, started := status(t, b, bad); got != client.StatusWorkerDied || !started || lost < 1 || lost > 4 {
		t.Errorf("the function that crashed: %v, started %v; %d calls lost, want those of one worker, at most 4", got, started, lost)
	}
	b.Reset()
	for i := range calls {
		add(t, b, echo, u64(uint64(i)), 8)
	}
	err := b.Wait(t.Context())
	for i := range calls {
		err = errors.Join(err, second(b.Result(i, out)))
	}
	if err != nil {
		t.Errorf("the next batch: %v", err)
	}
}

// Several goroutines use a lease: batches, and calls in between.
func TestBatchesAtTheSameTime(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Workers: 2, Depth: 4})
	echo := function(t, l, "echo")
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			b, out := l.NewBatch(), make([]byte, 8)
			defer b.Free()
			for range 20 {
				for i := range 50 {
					if err := b.Add(echo, u64(uint64(g)<<32|uint64(i)), 8); err != nil {
						t.Error(err)
					}
				}
				if err := b.Wait(t.Context()); err != nil {
					t.Error(err)
				}
				for i := range 50 {
					if n, err := b.Result(i, out); err != nil || !bytes.Equal(out[:n], u64(uint64(g)<<32|uint64(i))) {
						t.Errorf("call %d of goroutine %d: %x, %v", i, g, out[:n], err)
					}
				}
				b.Reset()
				if _, err := echo.Invoke(t.Context(), u64(1), out); err != nil && !errors.Is(err, client.ErrBusy) { // the others' batches fill all slots
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestBatchMakesNoAllocation(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	echo := function(t, l, "echo")
	b := newBatch(t, l)
	in, out := make([]byte, 64), make([]byte, 64)
	for name, ctx := range map[string]context.Context{"background": context.Background(), "cancellable": t.Context()} {
		least := math.Inf(1) // other goroutines allocate, too
		for try := 0; try < 5 && least > 0; try++ {
			least = min(least, testing.AllocsPerRun(50, func() {
				for range 20 {
					add(t, b, echo, in, len(out))
				}
				if err := b.Wait(ctx); err != nil {
					t.Fatal(err)
				}
				for i := range 20 {
					if _, err := b.Result(i, out); err != nil {
						t.Fatal(err)
					}
				}
				b.Reset()
			}))
		}
		if least != 0 {
			t.Errorf("%s: %v allocations per batch, want 0", name, least)
		}
	}
}

// A batch keeps 64 calls in flight at most of the rate of rfaas_iinvoke and rfaas_wait from C, on the same lease. The figure is the
// median of interleaved pairs.
func TestBatchKeepsUpWithC(t *testing.T) {
	const calls, window = 5000, 64
	pairs := 11
	if os.Getenv("RFAAS_TEST_FIGURES") != "" {
		pairs = 101
	}
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{WaitMode: client.Hot, Depth: window})
	echo := function(t, l, "echo")
	in, out, results := make([]byte, 8), make([]byte, 8), make([]byte, 8*window)
	b := newBatch(t, l)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fromC := func() float64 {
		d, err := ccalls.InFlight(client.Handle(l), client.Index(echo), in, results, 8, calls, window)
		if err != nil {
			t.Fatal(err)
		}
		return float64(d) / calls
	}
	fromGo := func() float64 {
		runtime.Gosched() // the scheduler interrupts a goroutine after 10 ms, which takes long on a locked thread
		began := time.Now()
		for range calls {
			if err := b.Add(echo, in, 8); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.Wait(context.Background()); err != nil {
			t.Fatal(err)
		}
		for i := range calls {
			if _, err := b.Result(i, out); err != nil {
				t.Fatal(err)
			}
		}
		b.Reset()
		return float64(time.Since(began)) / calls
	}
	var share, rate []float64
	for i := range pairs {
		var c, g float64
		if i%2 == 0 {
			c, g = fromC(), fromGo()
		} else {
			g, c = fromGo(), fromC()
		}
		share, rate = append(share, c/g), append(rate, 1e3/c)
	}
	slices.Sort(share)
	slices.Sort(rate)
	t.Logf("%.1f million calls a second from C", rate[pairs/2])
	t.Logf("figure: go.batch_share = %.2f", share[pairs/2])
	if share[pairs/2] < 0.2 {
		t.Errorf("a batch makes %.2f of the calls that C makes in the same time", share[pairs/2])
	}
}
