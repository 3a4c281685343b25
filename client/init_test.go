package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// stateful compiles testdata/stateful.c.
func stateful(t *testing.T) string {
	t.Helper()
	return compile(t, "stateful.so", "", "testdata/stateful.c", "-std=gnu11", "-pthread", "-O2", "-Wall", "-Werror", "-I../worker")
}

func u32(values ...uint32) (b []byte) {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

// inits returns how often a worker has executed the init call.
func inits(t testing.TB, l *client.Lease, worker int) uint64 {
	t.Helper()
	out := make([]byte, 8)
	if _, err := l.Worker(worker).Invoke(client.Idempotent(context.Background(), 3), function(t, l, "init_count"), nil, out); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(out)
}

// Each worker of a lease executes the init call before its first call, whether it is new, replaces a dead worker, or is reused.
func TestInitCall(t *testing.T) {
	w := newWorld(t)
	o := client.LeaseOptions{Library: stateful(t), Workers: 2, InitFunction: "make_rows", InitPayload: u32(5), Reuse: true}
	l := w.lease(t, o)
	for i := range 2 {
		if n := inits(t, l, i); n != 1 {
			t.Errorf("worker %d has executed the init call %d times, want 1", i, n)
		}
	}
	pid := l.Worker(1).PID()
	if _, err := l.Worker(1).Invoke(context.Background(), function(t, l, "die"), nil, nil); !errors.Is(err, client.ErrConnection) {
		t.Errorf("die: %v", err)
	}
	if n := inits(t, l, 1); n != 1 || l.Worker(1).PID() == pid {
		t.Errorf("the replacement %d of worker %d has executed the init call %d times, want 1", l.Worker(1).PID(), pid, n)
	}
	release(t, l)
	again := w.lease(t, o)
	for i := range 2 {
		if n := inits(t, again, i); n != 2 || again.Start() != client.StartCached {
			t.Errorf("reused worker %d has executed the init call %d times, want 2; started %v", i, n, again.Start())
		}
	}
	release(t, again)
	many := w.lease(t, client.LeaseOptions{Library: stateful(t), InitFunction: "init_returns_much"})
	if n := inits(t, many, 0); n != 1 {
		t.Errorf("an init call with a large result was executed %d times, want 1", n)
	}
	release(t, many)
	large := w.lease(t, client.LeaseOptions{Library: stateful(t), InitFunction: "init_returns_much", InitPayload: make([]byte, 2<<20)})
	if n := inits(t, large, 0); n != 1 {
		t.Errorf("an init call with 2 MiB of payload was executed %d times, want 1", n)
	}
	release(t, large)
}

// A lease whose init call fails is not opened. The error names the init call and the cause, and nothing stays leased.
func TestInitCallFails(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name   string
		o      client.LeaseOptions
		status client.Status
		code   int32
		texts  []string
	}{
		{"unknown", client.LeaseOptions{InitFunction: "make_row"}, client.StatusNoFunction, 0,
			[]string{`init call: "make_row" is not in the library`, `did you mean "make_rows"?`}},
		{"code", client.LeaseOptions{InitFunction: "init_fails", InitPayload: []byte("poisson")}, client.StatusFunctionFailed, -42,
			[]string{"init call init_fails on worker 0 failed: no matrix of the name poisson"}},
		{"too large", client.LeaseOptions{InitFunction: "make_rows", InitPayload: make([]byte, 2<<20+1), Bulk: 2 << 20}, client.StatusTooLarge, 0,
			[]string{"payload of 2097153 bytes for the init call make_rows, this lease carries up to 2097152", "raise bulk_max"}},
		{"no function", client.LeaseOptions{InitPayload: u32(3)}, dataplane.StatusInvalid, 0, []string{"init_size is 4 without init_function"}},
		{"crash", client.LeaseOptions{InitFunction: "init_crashes"}, client.StatusWorkerDied, 0,
			[]string{"init call init_crashes on worker ", "SIGABRT: abort was called"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.o.Library, c.o.Workers, c.o.Local = stateful(t), 2, false
			l, err := w.session.Lease(context.Background(), c.o)
			if err == nil {
				release(t, l)
			}
			var e *client.Error
			if !errors.As(err, &e) || e.Status != c.status || e.Code != c.code || e.Started {
				t.Fatalf("%+v, want status %v, code %d, not started", err, c.status, c.code)
			}
			for _, text := range c.texts {
				if !strings.Contains(e.Text, text) {
					t.Errorf("%q does not contain %q", e.Text, text)
				}
			}
			release(t, w.lease(t, client.LeaseOptions{Workers: 2})) // all cores are free
		})
	}
}

// An init call that does not return ends the opening of the lease after the session's time-out.
func TestInitCallHangs(t *testing.T) {
	w := newWorld(t)
	s := w.connect(t, client.Options{Executor: w.Address, Timeout: 2 * time.Second})
	_, err := s.Lease(context.Background(), client.LeaseOptions{Library: stateful(t), InitFunction: "init_hangs"})
	var e *client.Error
	if !errors.As(err, &e) || e.Status != client.StatusDeadline || !strings.Contains(e.Text, "init call init_hangs on worker 0 has not returned within 2000 ms") {
		t.Errorf("%v", err)
	}
	release(t, w.lease(t, client.LeaseOptions{Workers: 2}))
}

// The limit of the lease's calls does not concern the init call of a new worker, and the executor's init-limit concerns nothing else.
func TestInitLimit(t *testing.T) {
	w := newWorld(t, "--init-limit", "1500ms")
	o := client.LeaseOptions{Library: stateful(t), InitFunction: "init_sleeps", InitPayload: u32(600), CallLimit: 200 * time.Millisecond}
	l := w.lease(t, o)
	sleepIn := func(l *client.Lease, ms uint32) error {
		_, err := l.Worker(0).Invoke(context.Background(), function(t, l, "init_sleeps"), u32(ms), nil)
		return err
	}
	sleep := func(ms uint32) error { return sleepIn(l, ms) }
	isTimeLimit := func(err error, texts ...string) bool {
		var e *client.Error
		return errors.As(err, &e) && e.Status == client.StatusTimeLimit && !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(e.Text, text) })
	}
	for range 2 { // also in the worker that replaces a dead one
		if err := sleep(0); err != nil {
			t.Fatal(err)
		}
		if err := sleep(60000); !isTimeLimit(err, "200ms") {
			t.Fatalf("a call that takes too long: %v", err)
		}
	}
	release(t, l)
	o.Reuse = true
	for _, c := range []struct {
		init   string
		cached bool
	}{{"", false}, {"init_sleeps", false}, {"init_sleeps", true}, {"", true}} { // each init call in a worker has the limit
		o.InitFunction, o.InitPayload = c.init, nil
		if c.init != "" {
			o.InitPayload = u32(600)
		}
		l := w.lease(t, o)
		if cached := l.Start() == client.StartCached; cached != c.cached {
			t.Errorf("reuse with init call %q: started %v", c.init, l.Start())
		}
		if err := sleepIn(l, 0); err != nil {
			t.Fatal(err)
		}
		release(t, l)
	}
	l = w.lease(t, o)
	if err := sleep(60000); !isTimeLimit(err, "200ms") {
		t.Errorf("a call of a reused worker that takes too long: %v", err)
	}
	release(t, l)
	o.Reuse = false
	o.InitFunction, o.InitPayload = "init_hangs", nil
	if _, err := w.session.Lease(context.Background(), o); !isTimeLimit(err, "init call init_hangs on worker 0", "1.5s") {
		t.Fatalf("an init call that takes too long: %v", err)
	}
	o.InitFunction, o.CallLimit = "", 3*time.Second
	l = w.lease(t, o)
	if err := sleep(2000); err != nil {
		t.Errorf("a lease without an init call: %v", err)
	}
	release(t, l)
}

// If the init call of a replacement fails, the call that needs it fails with that error, not started, and the next call tries again.
func TestInitCallOfReplacementFails(t *testing.T) {
	w := newWorld(t)
	var l *client.Lease
	var until time.Time
	for d := 2 * time.Second; l == nil; d *= 2 {
		until = time.Now().Add(d)
		var err error
		l, err = w.session.Lease(context.Background(), client.LeaseOptions{Library: stateful(t), InitFunction: "init_until",
			InitPayload: u64(uint64(until.UnixNano()))})
		var e *client.Error
		if err != nil && (!errors.As(err, &e) || e.Code != 3) {
			t.Fatal(err)
		}
	}
	count := function(t, l, "init_count")
	if _, err := l.Worker(0).Invoke(context.Background(), count, nil, make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Until(until)) // the init call depends on the time
	if _, err := l.Worker(0).Invoke(context.Background(), function(t, l, "die"), nil, nil); !errors.Is(err, client.ErrConnection) {
		t.Errorf("die: %v", err)
	}
	for range 2 {
		_, err := l.Worker(0).Invoke(context.Background(), count, nil, make([]byte, 8))
		var e *client.Error
		if !errors.As(err, &e) || e.Status != client.StatusFunctionFailed || e.Code != 3 || e.Started ||
			!strings.Contains(e.Text, "init call init_until on worker 0 failed: too late, 8 bytes") {
			t.Errorf("%+v", err)
		}
	}
	if n := l.Statistics().Replaced; n != 2 {
		t.Errorf("%d workers replaced, want 2", n)
	}
	release(t, l)
}

// vector is a vector of the solver.
type vector []float64

func (x vector) dot(y vector) (sum float64) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

// add returns x + a*y.
func (x vector) add(a float64, y vector) vector {
	z := slices.Clone(x)
	for i := range z {
		z[i] += a * y[i]
	}
	return z
}

// solve runs conjugate gradients with the matrix that the workers keep, and returns the residual of each step. before is called before
// each step.
func solve(t *testing.T, l *client.Lease, side, steps int, before func(step int)) (residuals []uint64) {
	n, parts := side*side, l.Workers()
	multiply := function(t, l, "multiply")
	product := func(x vector) vector {
		y := make(vector, 0, n)
		calls := make([]client.Call, parts)
		for i := range parts {
			in := u32(uint32(n*i/parts), uint32(n*(i+1)/parts))
			for _, v := range x {
				in = binary.LittleEndian.AppendUint64(in, math.Float64bits(v))
			}
			var err error
			if calls[i], err = l.Worker(i).Submit(client.Idempotent(context.Background(), 20), multiply, in, n*8); err != nil {
				t.Fatalf("submit: %v", err)
			}
		}
		for i := range calls {
			out := make([]byte, n*8)
			err := calls[i].Wait(context.Background())
			size := 0
			if err == nil {
				size, err = calls[i].Result(out)
			}
			if err != nil {
				t.Fatalf("part %d: %v", i, err)
			}
			for out = out[:size]; len(out) > 0; out = out[8:] {
				y = append(y, math.Float64frombits(binary.LittleEndian.Uint64(out)))
			}
		}
		return y
	}
	x, r := make(vector, n), make(vector, n)
	for i := range r {
		r[i] = 1 + float64(i%13)
	}
	p, rr := slices.Clone(r), r.dot(r)
	for step := range steps {
		before(step)
		q := product(p)
		alpha := rr / p.dot(q)
		x, r = x.add(alpha, p), r.add(-alpha, q)
		next := r.dot(r)
		p, rr = r.add(next/rr, p), next
		residuals = append(residuals, math.Float64bits(rr))
	}
	return residuals
}

// A solver whose workers keep the matrix gets the same residuals, to the last bit, although its workers and executors are killed.
func TestSolverSurvivesKills(t *testing.T) {
	const side, steps = 24, 30
	g := newGrid(t)
	g.more()
	o := client.LeaseOptions{Library: stateful(t), Workers: 2, Failover: true, InitFunction: "make_rows", InitPayload: u32(side)}
	s := g.manager.session(t, g.secret)
	open := func() *client.Lease {
		l, err := s.Lease(context.Background(), o)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := open()
	want := solve(t, l, side, steps, func(int) {})
	release(t, l)
	if first, last := math.Float64frombits(want[0]), math.Float64frombits(want[steps-1]); !(last < first/1e6) {
		t.Fatalf("the residual went from %g to %g", first, last)
	}
	l = open()
	got := solve(t, l, side, steps, func(step int) {
		switch {
		case step%10 == 3 || step%10 == 6:
			victim := l.Worker(step % 2).PID()
			gone := watched(t, victim)
			if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
				t.Errorf("kill worker %d: %v", victim, err)
			}
			gone(20*time.Second, "the worker has ended")
		case step%10 == 8:
			at := l.Executor()
			g.more()
			gone := watched(t, l.Worker(0).PID(), l.Worker(1).PID())
			g.nodes[at].signal(syscall.SIGKILL)
			gone(20*time.Second, "the workers have ended with their executor")
			delete(g.nodes, at)
		}
	})
	if !slices.Equal(got, want) {
		t.Errorf("residuals %x, want %x", got, want)
	}
	if st := l.Statistics(); st.Replaced < 3 || st.Moved != 3 {
		t.Errorf("%d workers replaced, %d moves", st.Replaced, st.Moved)
	}
	release(t, l)
}

// No lease sees the state that functions of another lease have left in a worker, unless both leases have Reuse. A worker that has executed no
// function may serve any lease.
func TestStateEndsWithLease(t *testing.T) {
	const rounds = 300
	w := newWorld(t)
	lib := stateful(t)
	fresh := []uint64{0, 17, 0, 0, 0, 0, 0}
	reused, clean := 0, 0
	for i := range rounds {
		o := client.LeaseOptions{Library: lib, Reuse: i%3 == 2}
		l := w.lease(t, o)
		cached := l.Start() == client.StartCached
		if i%7 == 0 { // executes nothing
			release(t, l)
			continue
		}
		mark := uint64(1000 + i)
		if o.Reuse {
			mark = uint64(1_000_000 + i)
		}
		leave := function(t, l, "leave_state")
		for call := range 2 {
			out := make([]byte, 8*len(fresh))
			if _, err := leave.Invoke(context.Background(), u64(mark), out); err != nil {
				t.Fatal(err)
			}
			for k, want := range fresh {
				got := binary.LittleEndian.Uint64(out[8*k:])
				switch {
				case call == 1 && got != mark:
					t.Errorf("lease %d: state %d is %d in the second call, want %d", i, k, got, mark)
				case call == 0 && got != want && !(o.Reuse && cached && got >= 1_000_000 && got < mark):
					t.Errorf("lease %d, reuse %t: state %d is %d in the first call, want %d", i, o.Reuse, k, got, want)
				case call == 0 && k == 0 && got != want:
					reused++
				case call == 0 && k == 0 && cached:
					clean++
				}
			}
		}
		release(t, l)
	}
	if reused == 0 || clean == 0 {
		t.Errorf("%d leases got workers with state, %d workers without; want some of both", reused, clean)
	}
}
