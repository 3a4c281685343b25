package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// deaths compiles the library of functions that end their worker and returns its path.
func deaths(t *testing.T) string {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(root, "internal/zygote/testdata/deaths.c"))
	if err != nil {
		t.Fatal(err)
	}
	headers, err := filepath.Abs(filepath.Join(root, "worker"))
	if err != nil {
		t.Fatal(err)
	}
	return compile(t, "deaths.so", string(source), "-O1", "-g1", "-D_GNU_SOURCE", "-pthread", "-I"+headers)
}

// startCalls makes hot calls on a worker until stop is called, and at least 20. stop returns their number and the longest duration.
func startCalls(t *testing.T, w *client.Worker, echo *client.Function) (stop func() (int, time.Duration)) {
	t.Helper()
	over := make(chan struct{})
	var wg sync.WaitGroup
	var calls int
	var longest time.Duration
	pid := w.PID()
	wg.Go(func() {
		out := make([]byte, 8)
		for {
			select {
			case <-over:
				if calls >= 20 { // a busy machine may have let it make fewer so far
					return
				}
			default:
			}
			begin := time.Now()
			n, err := w.Invoke(context.Background(), echo, []byte("hot"), out)
			if err != nil || string(out[:n]) != "hot" {
				t.Errorf("call %d of the other worker: %q, %v", calls, out[:n], err)
				return
			}
			longest = max(longest, time.Since(begin))
			calls++
		}
	})
	return func() (int, time.Duration) {
		close(over)
		wg.Wait()
		if w.PID() != pid {
			t.Error("the other worker was replaced")
		}
		return calls, longest
	}
}

// death is a function that ends its worker, and what the error of the call must say.
type death struct {
	function      string
	in            []byte
	status        client.Status
	reason, stack string
	output        string
}

// check calls the function on worker 0. An event of the lease must report the reason, and the error of the call must have the status, the
// reason, the stack and the last output. If a client has waited 0.9 s without getting the event, its error only says that the worker is gone; check then
// repeats the call. Afterwards a new worker must serve calls. It returns how long the last call took.
func (d *death) check(t *testing.T, l *client.Lease, died *recorder) (took time.Duration) {
	t.Helper()
	echo, ends := function(t, l, "echo"), function(t, l, d.function)
	for attempt := 1; ; attempt++ {
		victim, earlier := l.Worker(0).PID(), died.count()
		begin := time.Now()
		_, err := l.Worker(0).Invoke(context.Background(), ends, d.in, make([]byte, 8))
		took = time.Since(begin)
		late := took >= 900*time.Millisecond
		if event := died.want(t, earlier, client.EventWorkerDied); event.Worker != 0 || !strings.Contains(event.Reason, d.reason) {
			t.Errorf("%s: event of worker %d: %q, want worker 0 and %q", d.function, event.Worker, event.Reason, d.reason)
		}
		var e *client.Error
		if !errors.As(err, &e) || !errors.Is(err, client.ErrConnection) || !e.Started {
			t.Fatalf("%s: %v (%#v)", d.function, err, e)
		}
		gaveUp := late && e.Status == client.StatusPeerGone
		if !gaveUp {
			d.checkError(t, e)
		}
		out := make([]byte, 8)
		if n, err := l.Worker(0).Invoke(context.Background(), echo, []byte("again"), out); err != nil || string(out[:n]) != "again" {
			t.Errorf("after %s: %q, %v", d.function, out[:n], err)
		}
		if now := l.Worker(0).PID(); now == victim || running(victim) {
			t.Errorf("after %s: worker %d, then %d", d.function, victim, now)
		}
		if !gaveUp || attempt == 3 {
			return took
		}
		t.Logf("%s: the event arrived too late for the call's error", d.function)
	}
}

func (d *death) checkError(t *testing.T, e *client.Error) {
	t.Helper()
	if e.Status != d.status {
		t.Fatalf("%s: status %v, want %v: %s", d.function, e.Status, d.status, e.Text)
	}
	if want := "function " + d.function + " of worker 0: "; !strings.Contains(e.Text, want) || !strings.Contains(e.Text, d.reason) {
		t.Errorf("%s: %q, want %q and %q", d.function, e.Text, want, d.reason)
	}
	rest := e.Text
	for f := range strings.FieldsSeq(d.stack) {
		var ok bool
		if _, rest, ok = strings.Cut(rest, f); !ok {
			t.Errorf("%s: no %s (of %s) in\n%s", d.function, f, d.stack, e.Text)
		}
	}
	if !strings.Contains(e.Text, d.output) {
		t.Errorf("%s: it printed %q, want %q", d.function, e.Text, d.output)
	}
}

// However a function ends its worker, the caller's error has the reason, the stack and the last output, and the worker is replaced. Another
// worker of the lease serves hot calls all the time.
func TestDeathsAreReported(t *testing.T) {
	w := newWorld(t)
	died := newRecorder()
	l := w.lease(t, client.LeaseOptions{Library: deaths(t), Workers: 2, WaitMode: client.Hot, Memory: 64 << 20, OnEvent: died.only(client.EventWorkerDied)})
	stop := startCalls(t, l.Worker(1), function(t, l, "echo"))
	source, err := os.ReadFile(filepath.Join(root, "internal/zygote/testdata/deaths.c"))
	if err != nil {
		t.Fatal(err)
	}
	line := func(code string) string { // its number in the source
		before, _, ok := strings.Cut(string(source), code)
		if !ok {
			t.Fatalf("deaths.c does not have %q", code)
		}
		return strconv.Itoa(1 + strings.Count(before, "\n"))
	}
	for _, d := range []death{
		{"segv", nil, client.StatusWorkerDied, "SIGSEGV at address 0x8", "hidden_inner+0x x.c:" + line("*p = 1;") + " visible_middle+0x x.c:" + line("hidden_inner(p);") + " segv+0x x.c:" + line("visible_middle((int *)8)"), "about to crash"},
		{"bus", nil, client.StatusWorkerDied, "SIGBUS at address 0x", "bus+0x", ""},
		{"fpe", u64(5), client.StatusWorkerDied, "SIGFPE at address 0x", "fpe+0x", ""},
		{"ill", nil, client.StatusWorkerDied, "SIGILL at address 0x", "ill+0x", ""},
		{"aborts", nil, client.StatusWorkerDied, "SIGABRT: abort was called", "abort+0x aborts+0x", ""},
		{"frees_twice", nil, client.StatusWorkerDied, "SIGABRT", "frees_twice+0x", "double free"},
		{"exits", []byte{3}, client.StatusWorkerDied, "called exit(3)", "exits+0x", ""},
		{"quits", []byte{4}, client.StatusWorkerDied, "called exit(4)", "", ""},
		{"recurses", nil, client.StatusWorkerDied, "stack overflow", "recurses+0x", ""},
		{"stops_itself", nil, client.StatusWorkerDied, "was stopped (SIGSTOP) and killed", "", ""},
		{"eats_memory", u64(80 << 20), client.StatusMemoryLimit, "exceeded its memory limit of 64 MiB", "eats_memory+0x", ""},
	} {
		if far != "" && !slices.Contains([]string{"segv", "exits", "eats_memory"}, d.function) {
			continue // the other deaths are reported by the same messages
		}
		d.check(t, l, died)
	}
	calls, longest := stop()
	t.Logf("%d calls of the other worker meanwhile, the longest took %v", calls, longest.Round(time.Microsecond))
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	// A separate lease, because the call limit would also apply to the worker that stops itself, which is killed only after a second, and
	// to the calls of the other worker.
	l = w.lease(t, client.LeaseOptions{Library: deaths(t), WaitMode: client.Hot, CallLimit: 2 * time.Second, OnEvent: died.only(client.EventWorkerDied)})
	loops := death{"loops", nil, client.StatusTimeLimit, "exceeded its time limit of 2s", "spin_here+0x loops+0x", ""}
	loops.check(t, l, died)
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A function overwrites all memory that it can: slots, rings, the mailbox, the library's own data, and in a sandbox also its device's
// queues. Its call ends. The client and the other worker are not affected.
func TestScribblingFunction(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Library: deaths(t), Workers: 2, WaitMode: client.Hot})
	echo, scribbles := function(t, l, "echo"), function(t, l, "scribbles")
	stop := startCalls(t, l.Worker(1), echo)
	for _, what := range []uint32{0, 0xff, 1, 0x100, 0x1ff, 0x101} {
		for _, size := range []int{4, 1 << 10, 64 << 10} { // in the mailbox, a slot, the bulk area
			if far != "" && size != 1<<10 {
				continue // to save time
			}
			in := make([]byte, size)
			binary.LittleEndian.PutUint32(in, what)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			begin := time.Now()
			result := make([]byte, size)
			n, err := l.Worker(0).Invoke(ctx, scribbles, in, result)
			written := binary.LittleEndian.Uint32(result)
			t.Logf("%#x, %d bytes: %v after %v, %d mappings", what, size, err, time.Since(begin).Round(time.Millisecond), written)
			if err == nil && n == 4 && written == 0 {
				t.Errorf("%#x, %d bytes: it has not overwritten all that it could", what, size)
			}
			if ctx.Err() != nil {
				t.Errorf("%#x, %d bytes: the call did not end", what, size)
			}
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
			out := make([]byte, 8)
			n, err = l.Worker(0).Invoke(ctx, echo, []byte("again"), out)
			if err != nil {
				n, err = l.Worker(0).Invoke(ctx, echo, []byte("again"), out)
			}
			if err != nil || string(out[:n]) != "again" {
				t.Errorf("after %#x, %d bytes: %q, %v", what, size, out[:n], err)
			}
			cancel()
		}
	}
	calls, longest := stop()
	t.Logf("%d calls of the other worker meanwhile, the longest took %v", calls, longest.Round(time.Microsecond))
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A worker that is alive but never answers is replaced, whether its callers still wait or have given up all its slots. A worker that runs a
// long function is not replaced, nor is an idle one.
func TestWorkerThatNeverAnswers(t *testing.T) {
	w := newWorld(t, "--share-cores", "2")
	l := w.lease(t, client.LeaseOptions{Library: deaths(t), Workers: 3, Depth: 2})
	echo, silent := function(t, l, "echo"), function(t, l, "falls_silent")
	long, idle := l.Worker(1), l.Worker(2)
	pids := [...]int{long.PID(), idle.PID()}
	sleeping, err := long.Submit(t.Context(), function(t, l, "sleeps"), u64(600_000), 8)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	dead := func(what string, began time.Time, err error) {
		t.Helper()
		var e *client.Error
		if !errors.As(err, &e) || e.Status != client.StatusWorkerDied || !e.Started || !strings.Contains(e.Text, "alive but runs no function") {
			t.Fatalf("%s: %v", what, err)
		}
		t.Logf("%s: %v after %v", what, err, time.Since(began).Round(time.Millisecond))
	}
	waited := make(chan error, 1) // the client also probes the worker of the long call while a caller waits for it
	go func() { waited <- sleeping.Wait(ctx) }()

	victim, began := l.Worker(0).PID(), time.Now()
	_, err = l.Worker(0).Invoke(context.Background(), silent, nil, make([]byte, 8))
	dead("a call that never ends", began, err)
	out := make([]byte, 8)
	if n, err := l.Worker(0).Invoke(ctx, echo, []byte("again"), out); err != nil || string(out[:n]) != "again" {
		t.Fatalf("the next call: %q, %v", out[:n], err)
	}
	if now := l.Worker(0).PID(); now == victim || running(victim) {
		t.Errorf("worker %d, then %d", victim, now)
	}

	victim, began = l.Worker(0).PID(), time.Now()
	for _, f := range []*client.Function{silent, echo} {
		var e *client.Error
		for e == nil || !e.Started { // a call whose deadline passes too early takes no slot
			short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			_, err := l.Worker(0).Invoke(short, f, nil, out)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || ctx.Err() != nil {
				t.Fatalf("%s with a deadline: %v", f.Name(), err)
			}
		}
	}
	within(t, 30*time.Second, "calls work again", func() bool {
		n, err := l.Worker(0).Invoke(ctx, echo, []byte("again"), out)
		if err != nil && !errors.Is(err, client.ErrBusy) && !errors.Is(err, client.ErrConnection) {
			t.Errorf("%v", err)
		}
		return err == nil && string(out[:n]) == "again"
	})
	t.Logf("all slots given up: works again after %v", time.Since(began).Round(time.Millisecond))
	if now := l.Worker(0).PID(); now == victim || running(victim) {
		t.Errorf("worker %d, then %d", victim, now)
	}
	if now := [...]int{long.PID(), idle.PID()}; now != pids {
		t.Errorf("the others were workers %v and are %v", pids, now)
	}
	select {
	case err := <-waited:
		t.Errorf("the long call has ended: %v", err)
	default:
	}
	sleeping.Cancel()
	if n := l.Replaced(); n != 2 {
		t.Errorf("%d workers were replaced", n)
	}
	cancel()
	<-waited
}

// Inspect reports the output of a worker, the function that it runs, and its counters.
func TestInspect(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	worker := l.Worker(0)
	if _, err := worker.Invoke(t.Context(), function(t, l, "print"), []byte("some words"), nil); err != nil {
		t.Fatal(err)
	}
	within(t, testkit.Bound, "the output arrives", func() bool {
		i, err := worker.Inspect(t.Context())
		return err == nil && string(i.Output) == "some words\n"
	})
	call, err := worker.Submit(t.Context(), function(t, l, "sleep_ns"), u64(uint64(time.Minute)), 8)
	if err != nil {
		t.Fatal(err)
	}
	var i client.Inspection
	within(t, testkit.Bound, "the function runs", func() bool {
		i, err = worker.Inspect(t.Context())
		return err == nil && i.Running == "sleep_ns"
	})
	if i.PID != worker.PID() || i.Calls != 1 || i.Failed != 0 || i.Refused != 0 || i.BytesIn != 10 || i.BytesOut != 0 {
		t.Errorf("%+v", i)
	}
	call.Cancel()
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := worker.Inspect(t.Context()); !errors.Is(err, client.ErrLease) {
		t.Errorf("after the release: %v", err)
	}
}
