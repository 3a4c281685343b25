package zygote

import (
	"github.com/rfaas-go/rfaas/internal/spawner"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"

	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Names of testdata/deaths.c.
var deathNames = []string{"echo", "segv", "bus", "fpe", "ill", "aborts", "frees_twice", "exits", "quits", "recurses",
	"large_frame", "jumps", "wild", "kills_itself", "stops_itself", "crashes_in_thread", "eats_memory", "loops",
	"loops_deaf", "sleeps", "scribbles", "falls_silent"}

func deathFunction(t testing.TB, name string) int {
	t.Helper()
	i := slices.Index(deathNames, name)
	if i < 0 {
		t.Fatalf("no function %q", name)
	}
	return i
}

// deathLease spawns a worker with the functions that crash.
func deathLease(t testing.TB, z *Zygote, c *client, change func(*Spec)) *leased {
	t.Helper()
	code := sealedFile(t, compile(t, "deaths.so", "-shared", "-fPIC", "testdata/deaths.c"))
	return lease(t, z, c, func(s *Spec) {
		s.Code, s.Names = code, deathNames
		if change != nil {
			change(s)
		}
	})
}

func u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

// What user code can do to its process comes back as a sentence, the functions on the stack and the last words.
func TestDeathIsExplained(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	const mib64 = 64 << 20
	for _, tc := range []struct {
		function string
		payload  []byte
		status   int32
		reason   string // begins with
		stack    string // these functions in this order
		tail     string // contains
	}{
		{"segv", nil, wire.StatusWorkerDied, "SIGSEGV at address 0x8", "library visible_middle segv", "about to crash\n"},
		{"bus", nil, wire.StatusWorkerDied, "SIGBUS at address 0x", "bus", ""},
		{"fpe", u64(7), wire.StatusWorkerDied, "SIGFPE at address 0x", "fpe", ""},
		{"ill", nil, wire.StatusWorkerDied, "SIGILL at address 0x", "ill", ""},
		{"aborts", nil, wire.StatusWorkerDied, "SIGABRT: abort was called", "abort aborts", ""},
		{"frees_twice", nil, wire.StatusWorkerDied, "SIGABRT: abort was called", "abort frees_twice", "free(): double free"},
		{"exits", []byte{3}, wire.StatusWorkerDied, "called exit(3)", "exit exits", ""},
		{"exits", []byte{exitClientGone}, wire.StatusWorkerDied, "called exit(91)", "exit exits", ""},
		{"quits", []byte{4}, wire.StatusWorkerDied, "called exit(4)", "", ""},
		{"quits", []byte{0}, wire.StatusWorkerDied, "called exit(0)", "", ""},
		{"recurses", nil, wire.StatusWorkerDied, "SIGSEGV at address 0x", "recurses ...", ""},
		{"large_frame", nil, wire.StatusWorkerDied, "SIGSEGV at address 0x", "large_frame", ""},
		{"jumps", nil, wire.StatusWorkerDied, "SIGSEGV at address 0x0", "0x0 jumps", ""},
		{"wild", nil, wire.StatusWorkerDied, "SIGSEGV at an address that cannot exist", "wild", ""},
		{"kills_itself", nil, wire.StatusWorkerDied, "SIGUSR1", "", ""},
		{"crashes_in_thread", nil, wire.StatusWorkerDied, "SIGSEGV at address 0x10", "library", ""},
		{"eats_memory", u64(80 << 20), wire.StatusMemoryLimit, "exceeded its memory limit of 64 MiB (SIGSEGV at address 0x0", "eats_memory", ""},
	} {
		var w *leased
		for try, late := 1, true; late; try++ { // a machine that stands still hardly does so three times in a row
			w = deathLease(t, z, c, func(s *Spec) { s.MemoryLimit = mib64 })
			begin := time.Now()
			r, err := w.call(deathFunction(t, tc.function), tc.payload)
			if err != nil || r.status/100 != -5 {
				t.Errorf("%s: status %d, %v", tc.function, r.status, err)
			}
			within(t, tc.function, w.Done())
			d := time.Since(begin)
			if late = d > 2*time.Second; late && try == 3 {
				t.Fatalf("%s: it took %v, and too long before", tc.function, d)
			}
		}
		x := w.Exit()
		if x.Status != tc.status || !strings.HasPrefix(x.Reason, tc.reason) || x.Requested || x.Function != tc.function {
			t.Errorf("%s: %+v", tc.function, x)
		}
		if strings.HasSuffix(tc.stack, "...") || tc.function == "large_frame" {
			if !strings.Contains(x.Reason, "stack overflow") {
				t.Errorf("%s: %q does not say what it was", tc.function, x.Reason)
			}
		}
		wantStack(t, x.Backtrace, tc.stack)
		if !strings.Contains(string(x.OutputTail), tc.tail) {
			t.Errorf("%s: it printed %q, want %q", tc.function, x.OutputTail, tc.tail)
		}
	}
}

// wantStack checks that the backtrace has lines for these functions, in this order.
func wantStack(t *testing.T, backtrace, functions string) {
	t.Helper()
	lines := strings.Split(backtrace, "\n")
	for _, f := range strings.Fields(functions) {
		i := slices.IndexFunc(lines, func(l string) bool { return l == f || strings.HasPrefix(l, f+"+0x") })
		if i < 0 {
			t.Errorf("no %s (of %s) where it should be in\n%s", f, functions, backtrace)
			return
		}
		lines = lines[i+1:]
	}
	if functions == "" && backtrace != "" {
		t.Errorf("a backtrace from nowhere:\n%s", backtrace)
	}
}

// A crash leaves its neighbours alone: they answer throughout.
func TestNeighboursOfACrash(t *testing.T) {
	z := startZygote(t)
	neighbour := deathLease(t, z, startClient(t), func(s *Spec) { s.WaitMode = 1 })
	stop := make(chan struct{})
	var calls int
	var longest time.Duration
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			begin := time.Now()
			r, err := neighbour.call(0, []byte("still here"))
			if err != nil || string(r.data) != "still here" {
				t.Errorf("call %d: %+v, %v", calls, r, err)
				return
			}
			longest = max(longest, time.Since(begin))
			calls++
		}
	})
	c := startClient(t)
	for _, name := range []string{"segv", "frees_twice", "exits", "recurses", "bus"} {
		w := deathLease(t, z, c, nil)
		w.call(deathFunction(t, name), []byte{1})
		within(t, name, w.Done())
	}
	close(stop)
	wg.Wait()
	t.Logf("%d calls of the neighbour, the longest took %v", calls, longest)
	if calls < 10 {
		t.Errorf("only %d calls", calls)
	}
}

// A call that exceeds its limit ends with its worker, which says where it was; shorter ones are left alone.
func TestTimeLimit(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	for _, tc := range []struct {
		function string
		payload  []byte
		stack    string
		limit    time.Duration
		within   int // so many calls of a quarter of the limit go before
	}{
		{"loops", nil, "library loops", 1600 * time.Millisecond, 5}, // together longer than the limit
		{"loops_deaf", nil, "", 300 * time.Millisecond, 0},
		{"sleeps", u64(60_000), "sleeps", 300 * time.Millisecond, 0},
	} {
		limit := tc.limit
		w := deathLease(t, z, c, func(s *Spec) { s.CallLimit, s.InitLimit = limit, limit })
		for range tc.within {
			w.mustCall(t, 0, []byte("x"))
			if r, err := w.call(deathFunction(t, "sleeps"), u64(uint64(limit.Milliseconds()/4))); err != nil || r.status != 0 {
				t.Fatalf("a call within the limit: %+v, %v", r, err)
			}
		}
		begin := time.Now()
		r, err := w.call(deathFunction(t, tc.function), tc.payload)
		took := time.Since(begin)
		if err != nil || r.status/100 != -5 {
			t.Errorf("%s: %+v, %v", tc.function, r, err)
		}
		if took < limit || took > limit+testBound/2 {
			t.Errorf("%s: ended after %v, the limit is %v", tc.function, took, limit)
		}
		within(t, "exit", w.Done())
		x := w.Exit()
		if x.Status != wire.StatusTimeLimit || x.Reason != "exceeded its time limit of "+limit.String() || x.Function != tc.function || x.Requested {
			t.Errorf("%s: %+v", tc.function, x)
		}
		wantStack(t, x.Backtrace, tc.stack)
		t.Logf("%s ended after %v", tc.function, took.Round(time.Millisecond))
	}
}

// A stopped worker is killed after a moment; one that goes on in time is left alone.
func TestStoppedWorker(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	var w *leased
	for try, late := 0, true; late && try < 5; try++ { // the patience is over, when this machine stands still before the worker is let run
		w = deathLease(t, z, c, nil)
		stopped := time.Now()
		unix.Kill(w.PID(), unix.SIGSTOP)
		eventually(t, "the worker is stopped", func() bool { return processState(t, w.PID()) == 'T' })
		unix.Kill(w.PID(), unix.SIGCONT)
		late = time.Since(stopped) >= spawner.StopPatience
		for !late && time.Since(stopped) < 2*spawner.StopPatience { // it is looked at again meanwhile
			w.mustCall(t, 0, []byte("x"))
		}
	}
	w.mustCall(t, 0, []byte("x"))

	begin := time.Now()
	r, err := w.call(deathFunction(t, "stops_itself"), nil)
	if d := time.Since(begin); err != nil || r.status/100 != -5 || d < spawner.StopPatience {
		t.Errorf("a call that stops its worker: %+v, %v after %v", r, err, d)
	}
	within(t, "exit", w.Done())
	if x := w.Exit(); x.Reason != "was stopped (SIGSTOP) and killed" || x.Function != "stops_itself" || x.Status != wire.StatusWorkerDied {
		t.Errorf("%+v", x)
	}
}

// A stopped zygote is replaced before the executor asks it for a worker.
func TestStoppedZygote(t *testing.T) {
	z := startZygote(t)
	first := current(t, z)
	unix.Kill(first, unix.SIGSTOP)
	eventually(t, "the stopped zygote's end", func() bool { return !alive(first) })
	deathLease(t, z, startClient(t), nil).mustCall(t, 0, []byte("x"))
}

// Whatever a worker writes into its page, the executor stays calm.
func TestHostilePage(t *testing.T) {
	mem := bytes.Repeat([]byte{0xff}, pageSize)
	w := &Worker{page: &page{mem: mem}, output: &output{}}
	w.serves.Store(&Spec{Names: deathNames, MemoryLimit: 1})
	exit := func(st wire.Exit, function string) Exit {
		x := w.makeExit(&st)
		if x.Reason == "" || len(x.Backtrace) > 3*textMax || x.Function != function || x.Status != wire.StatusWorkerDied {
			t.Errorf("%+v: %+v", st, x)
		}
		return x
	}
	statuses := []wire.Exit{{}, {Code: 91}, {Signal: int32(unix.SIGSEGV)}, {Signal: int32(unix.SIGALRM)}, {Signal: 77}}
	for _, st := range statuses {
		if x := exit(st, ""); x.Backtrace != "" {
			t.Errorf("garbage became a backtrace: %q", x.Backtrace)
		}
	}
	// The same in a record that seems to be one.
	binary.LittleEndian.PutUint32(mem[pageDeath:], deathTraced)
	binary.LittleEndian.PutUint64(mem, 0xfff0000|uint64(len(deathNames)-1))
	last := deathNames[len(deathNames)-1]
	binary.LittleEndian.PutUint64(mem[8:], 0xffe)
	for _, st := range statuses {
		exit(st, last)
	}
	copy(mem[pageDeath+deathText:], "one\x00\x1b[31m\ntwo\n")
	if x := exit(wire.Exit{}, last); strings.ContainsAny(x.Backtrace, "\x00\x1b") || !strings.HasPrefix(x.Backtrace, "one  [31m\ntwo\n") {
		t.Errorf("%q", x.Backtrace)
	}
}

// The reason distinguishes a worker that exceeded its memory limit from one that was killed because others used too
// much.
func TestKilledForMemory(t *testing.T) {
	w := &Worker{page: &page{mem: make([]byte, pageSize)}, output: &output{}}
	w.serves.Store(&Spec{MemoryLimit: 64 << 20})
	for _, c := range []struct {
		end    wire.Exit
		status int32
		text   string
	}{
		{wire.Exit{Signal: int32(unix.SIGKILL), Killed: 1, Full: true}, wire.StatusMemoryLimit, "exceeded its memory limit of 64 MiB"},
		{wire.Exit{Signal: int32(unix.SIGKILL), Killed: 1}, wire.StatusWorkerDied, "a control group around the executor, had no memory left"},
		{wire.Exit{Signal: int32(unix.SIGKILL)}, wire.StatusWorkerDied, "killed from outside"},
	} {
		if x := w.makeExit(&c.end); x.Status != c.status || !strings.Contains(x.Reason, c.text) {
			t.Errorf("%+v: status %d, %q; want %d, %q", c.end, x.Status, x.Reason, c.status, c.text)
		}
	}
}

// What the worker counts is what was done.
func TestCounters(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	w.mustCall(t, fnEcho, []byte("four"))
	w.call(fnFails, []byte("x"))
	running := make(chan struct{})
	go func() { w.call(fnHangs, nil); close(running) }()
	eventually(t, "the call runs", func() bool { return w.Running() == "hangs" })
	if got, want := w.Counters(), (Counters{Calls: 2, Failed: 1, BytesIn: 5, BytesOut: 4}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	w.Kill()
	<-w.Done()
	<-running
	if x := w.Exit(); x.Function != "hangs" || x.Counters.Calls != 2 || w.Running() != "hangs" {
		t.Errorf("%+v, %q", x, w.Running())
	}
}

// If no zygote starts in time, ready returns a time-out, because a later start may succeed. A killed zygote is not a fatal error.
func TestWaitingForAZygote(t *testing.T) {
	z := newZygote(Config{Log: testLog(t)}, nil)
	z.zygotes[0].pid = 1
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	for _, reason := range []string{"the zygote ended: signal: killed", "no greeting: signal: killed"} { // while it runs, and while it starts
		z.zygoteEnded(0, &wire.Error{Status: wire.StatusFatal, Text: reason})
		var fatal *WorkerError
		err := z.ready(late, 0)
		if !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &fatal) || !strings.Contains(err.Error(), reason) {
			t.Errorf("%v (%T), want a time-out that names the reason", err, err)
		}
	}
}
