package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// recorder records the events of a lease.
type recorder struct {
	mu   sync.Mutex
	list []client.Event
	more chan struct{}
}

func newRecorder() *recorder { return &recorder{more: make(chan struct{}, 100)} }

func (r *recorder) on(e client.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, e)
	r.more <- struct{}{}
}

// only returns a callback that records events of one kind.
func (r *recorder) only(kind client.EventKind) func(client.Event) {
	return func(e client.Event) {
		if e.Kind == kind {
			r.on(e)
		}
	}
}

// count returns the number of recorded events.
func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.list)
}

// want waits for the n-th event, counted from 0, and checks its kind.
func (r *recorder) want(t *testing.T, n int, kind client.EventKind) client.Event {
	t.Helper()
	for {
		r.mu.Lock()
		list := r.list
		r.mu.Unlock()
		if len(list) > n {
			if list[n].Kind != kind {
				t.Errorf("event %d is %v, want %v; all: %v", n, list[n].Kind, kind, list)
			}
			return list[n]
		}
		select {
		case <-r.more:
		case <-time.After(20 * time.Second):
			t.Fatalf("no event %d (%v) within 20 s; all: %v", n, kind, list)
		}
	}
}

// A lease without a duration, or with Renew, lasts as long as it is held. A lease with a duration ends by itself, for
// its client before its executor.
func TestRenewal(t *testing.T) {
	// Half of each duration is longer than a slow machine may delay this test or the executor.
	const byDefault, first, renewed, margin = 1500 * time.Millisecond, 1400 * time.Millisecond, 2 * time.Second, 100 * time.Millisecond
	w := newWorld(t, "--lease-default", byDefault.String(), "--lease-margin", margin.String())
	kept, short := newRecorder(), newRecorder()
	l := w.lease(t, client.LeaseOptions{OnEvent: kept.on})
	asked := time.Now()
	s := w.lease(t, client.LeaseOptions{Duration: first, OnEvent: short.on})
	echo := function(t, s, "echo")
	if until := s.Until(); until.Before(asked.Add(first/2)) || !until.Before(time.Now().Add(first)) {
		t.Errorf("a lease of %v ends for its client %v after it was asked for", first, until.Sub(asked))
	}
	if err := s.Renew(t.Context(), -time.Second); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("renewed for -1 s: %v", err)
	}
	if err := s.Renew(t.Context(), 1000*time.Hour); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "3600000000") {
		t.Errorf("renewed for 1000 h: %v", err)
	}
	if err := s.Renew(t.Context(), renewed); err != nil {
		t.Errorf("renewed: %v", err)
	}
	until := s.Until()
	if e := short.want(t, 0, client.EventExpiring); e.In > renewed/3+time.Millisecond || e.In == 0 {
		t.Errorf("told %v before the end of a lease of %v, want at most a third", e.In, renewed)
	}
	if _, err := echo.Invoke(t.Context(), []byte("x"), make([]byte, 1)); err != nil {
		t.Errorf("a call on an expiring lease: %v", err)
	}
	if e := short.want(t, 1, client.EventEnded); !strings.HasPrefix(e.Reason, "expired") {
		t.Errorf("ended: %q", e.Reason)
	}
	if d := time.Since(until); d < 0 {
		t.Errorf("the end came %v before the client's", -d)
	}
	if err := s.Err(); !errors.Is(err, client.ErrLease) {
		t.Errorf("Err: %v", err)
	}
	var e *client.Error
	if _, err := echo.Invoke(t.Context(), []byte("x"), make([]byte, 1)); !errors.Is(err, client.ErrLease) || !errors.As(err, &e) || e.Started {
		t.Errorf("a call after the end: %v", err)
	}
	if err := s.Renew(t.Context(), time.Second); !errors.Is(err, client.ErrLease) {
		t.Errorf("renewed after the end: %v", err)
	}
	if _, err := function(t, l, "echo").Invoke(t.Context(), []byte("x"), make([]byte, 1)); err != nil {
		t.Errorf("a call on a lease that is renewed: %v", err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := l.Renew(t.Context(), 0); !errors.Is(err, client.ErrLease) {
		t.Errorf("renewed after the release: %v", err)
	}
	if d := time.Since(asked); d < byDefault {
		t.Errorf("only %v have passed: nothing is shown of a lease of %v", d, byDefault)
	}
	kept.mu.Lock()
	defer kept.mu.Unlock()
	for _, e := range kept.list { // a late renewal causes a warning
		if e.Kind != client.EventExpiring {
			t.Errorf("events of a lease that is renewed: %v", kept.list)
		}
	}
}

// While OnEvent blocks, the library keeps 16 events. The next event says how many older ones it dropped.
func TestDroppedEventsAreCounted(t *testing.T) {
	const kept, dropped = 16, 3
	w := newWorld(t)
	r, resume := newRecorder(), make(chan struct{})
	l := w.lease(t, client.LeaseOptions{OnEvent: func(e client.Event) {
		r.on(e)
		<-resume
	}})
	crash := func() {
		if _, err := function(t, l, "crash").Invoke(t.Context(), nil, make([]byte, 8)); !errors.Is(err, client.ErrConnection) {
			t.Errorf("crash: %v", err)
		}
	}
	crash()
	first := r.want(t, 0, client.EventWorkerDied)
	for range kept + dropped {
		crash()
	}
	close(resume)
	if next := r.want(t, 1, client.EventWorkerDied); first.Lost != 0 || next.Lost < 1 || next.Lost > dropped {
		t.Errorf("lost %d before the first event and %d before the next one, want 0 and 1 to %d", first.Lost, next.Lost, dropped)
	}
}

func TestEventOfADeath(t *testing.T) {
	w := newWorld(t)
	r := newRecorder()
	l := w.lease(t, client.LeaseOptions{Workers: 2, OnEvent: r.on})
	if _, err := l.Worker(1).Invoke(t.Context(), function(t, l, "crash"), nil, make([]byte, 8)); !errors.Is(err, client.ErrConnection) {
		t.Errorf("crash: %v", err)
	}
	if e := r.want(t, 0, client.EventWorkerDied); e.Worker != 1 || !strings.Contains(e.Reason, "SIGSEGV") {
		t.Errorf("event %+v", e)
	}
	w.signal(syscall.SIGKILL)
	if e := r.want(t, 1, client.EventEnded); e.Reason == "" {
		t.Errorf("event %+v", e)
	}
}

// drainLoad makes synchronous and asynchronous calls until the lease refuses them. Every call must have its right
// result, or must not have started.
type drainLoad struct {
	l              *client.Lease
	calls, refused atomic.Int64
	wg             sync.WaitGroup
}

func (d *drainLoad) refusedWell(t *testing.T, err error) {
	t.Helper()
	var e *client.Error
	if !errors.Is(err, client.ErrLease) || !errors.As(err, &e) || e.Started {
		t.Errorf("a call was lost: %v", err)
		return
	}
	d.refused.Add(1)
}

func (d *drainLoad) sync(t *testing.T, f *client.Function, size int) {
	in, out := bytes.Repeat([]byte{7}, size), make([]byte, size)
	for i := uint64(0); ; i++ {
		binary.LittleEndian.PutUint64(in, i)
		n, err := f.Invoke(context.Background(), in, out)
		if err != nil {
			d.refusedWell(t, err)
			return
		}
		if !bytes.Equal(out[:n], in) {
			t.Errorf("call %d: %d bytes that differ", i, n)
		}
		d.calls.Add(1)
	}
}

// async keeps several calls in flight on one worker and collects their results later.
func (d *drainLoad) async(t *testing.T, w *client.Worker, f *client.Function) {
	var flying []client.Call
	end := func(c client.Call) {
		out := make([]byte, 8)
		if err := c.Wait(context.Background()); err != nil {
			t.Errorf("wait: %v", err)
		}
		if n, err := c.Result(out); err != nil || n != 8 {
			t.Errorf("a call was lost: %d bytes, %v", n, err)
		}
		d.calls.Add(1)
	}
	for i := uint64(1); ; i++ {
		c, err := w.Submit(context.Background(), f, u64(uint64(time.Millisecond)), 8)
		switch {
		case err == nil:
			flying = append(flying, c)
			if len(flying) < 4 {
				continue
			}
		case !errors.Is(err, client.ErrBusy):
			d.refusedWell(t, err)
			for _, c := range flying {
				end(c)
			}
			return
		}
		if len(flying) > 0 {
			end(flying[0])
			flying = flying[1:]
		}
	}
}

// After SIGTERM under load no call is lost, and the executor exits with 0 long before the grace ends.
func TestDrainUnderLoad(t *testing.T) {
	for _, mode := range []client.WaitMode{client.Hot, client.Warm} {
		w := newWorld(t, "--grace", "10s")
		r := newRecorder()
		d := &drainLoad{l: w.lease(t, client.LeaseOptions{Workers: 2, WaitMode: mode, OnEvent: r.on})}
		echo, sleep := function(t, d.l, "echo"), function(t, d.l, "sleep_ns")
		d.wg.Go(func() { d.sync(t, echo, 64) })
		d.wg.Go(func() { d.sync(t, echo, 200_000) })
		d.wg.Go(func() { d.async(t, d.l.Worker(0), sleep) })
		d.wg.Go(func() { d.async(t, d.l.Worker(1), sleep) })
		within(t, 10*time.Second, "the load runs", func() bool { return d.calls.Load() > 200 })
		w.signal(syscall.SIGTERM)
		began := time.Now()
		d.wg.Wait()
		refused := time.Since(began)
		select {
		case <-w.done:
		case <-time.After(12 * time.Second):
			t.Fatal("the executor is still there")
		}
		if code, took := w.cmd.ProcessState.ExitCode(), time.Since(began); code != 0 || took > 10*time.Second+500*time.Millisecond {
			t.Errorf("the executor exited with %d after %v; the grace is 10 s", code, took)
		}
		if e := r.want(t, 0, client.EventDraining); e.In == 0 || e.In > 10*time.Second {
			t.Errorf("event %+v", e)
		}
		if e := r.want(t, 1, client.EventEnded); !strings.HasPrefix(e.Reason, "drained") {
			t.Errorf("event %+v", e)
		}
		t.Logf("figure: drain.after_grace_s = %.3f s", (time.Since(began) - 10*time.Second).Seconds())
		t.Logf("%d calls ended well, the last callers were refused after %v, the executor ended after %v", d.calls.Load(),
			refused.Round(time.Microsecond), time.Since(began).Round(time.Microsecond))
	}
}
