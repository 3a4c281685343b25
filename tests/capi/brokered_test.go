package capi

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// brokeredCluster is an executor on verbs whose agent keeps a spare lease. begin opens a lease in a new process, in which the first calls pass
// through the agent.
type brokeredCluster struct {
	t              *testing.T
	workers        int
	env            []string
	socket, listen string
}

func startBrokered(t *testing.T, pool string) *brokeredCluster {
	t.Helper()
	return startSpare(t, pool, 1)
}

func startSpare(t *testing.T, pool string, workers int, env ...string) *brokeredCluster {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
		t.Skip("RFAAS_REQUIRE_VERBS is not set: this test runs in the lane softroce")
	}
	c := &brokeredCluster{t: t, workers: workers, listen: filepath.Join(t.TempDir(), "http")}
	c.env, c.socket, _ = agentCluster(t, "--pool", pool, "--share-cores", "4", "--http-listen", "unix:"+c.listen, "--providers", "verbs")
	c.env = append(append(c.env, "RFAAS_POOL=1", "RFAAS_PROVIDER=verbs"), env...)
	for range 2 { // demand
		first := lead(t, workers, 0, c.env...)
		first.do("init", "session", "open", "calls 3", "release", "close", "finalize")
	}
	c.ready()
	return c
}

func (c *brokeredCluster) ready() {
	c.t.Helper()
	testkit.Eventually(c.t, "a spare lease is ready", func() bool {
		r := agentStatus(c.t, c.socket)
		return r.spare() == 1 && c.has("cached_leases 1")
	})
}

func (c *brokeredCluster) has(line string) bool {
	return strings.Contains(testkit.Metrics(c.t, c.listen), "\nrfaas_executor_"+line+"\n")
}

func (c *brokeredCluster) begin() *led {
	c.t.Helper()
	l := lead(c.t, c.workers, 0, c.env...)
	l.do("init", "session", "open")
	if w := l.ask("who"); strings.Count(w.text, pooledStart+":") != c.workers {
		c.t.Fatalf("a lease with %+v, want spare workers", w)
	}
	return l
}

func (c *brokeredCluster) free() {
	c.t.Helper()
	testkit.Eventually(c.t, "all cores are free", func() bool { return c.has("free_cores 8") && c.has("leases 0") })
}

// own returns the number of queue pairs that the lease has made in its process, and whether the process has loaded libibverbs.
func (c *led) own() string {
	c.t.Helper()
	a := c.ask("own")
	if a.status != 0 {
		c.t.Fatalf("own: %+v", a)
	}
	return a.text
}

// TestBrokeredLease makes its first calls through the agent. The process opens no device before its first result. Later it has a queue pair of its own,
// and the agent may end.
func TestBrokeredLease(t *testing.T) {
	for _, pool := range []string{"0", "1"} {
		t.Run("pool "+pool, func(t *testing.T) { brokeredLease(t, startBrokered(t, pool)) })
	}
}

func brokeredLease(t *testing.T, c *brokeredCluster) {
	for range 3 {
		l := c.begin()
		before := l.who()
		l.do("calls 1")
		if own := l.own(); own != "0:0" {
			t.Errorf("after the first call: queue pairs and libibverbs %s, want 0:0", own)
		}
		testkit.Eventually(t, "the lease has its own queue pair", func() bool { l.do("calls 20"); return l.own() == "1:1" })
		l.do("calls 500")
		if after := l.who(); after != before {
			t.Errorf("the worker has changed from %v to %v", before, after)
		}
		l.do("release", "open", "calls 100", "release", "close", "finalize") // cached, with the own queue pair
		c.ready()
	}
	l := c.begin()
	testkit.Eventually(t, "the lease has its own queue pair", func() bool { l.do("calls 20"); return l.own() == "1:1" })
	worker := l.who()
	if err := syscall.Kill(agentStatus(t, c.socket).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	l.do("calls 500")
	if after := l.who(); after != worker {
		t.Errorf("after the agent's end, the worker has changed from %v to %v", worker, after)
	}
	l.do("release", "close", "finalize")
	c.free()
}

// TestBrokeredKilled kills the agent, the client and the executor while calls pass through the agent.
func TestBrokeredKilled(t *testing.T) {
	c := startBrokered(t, "0")

	l := c.begin()
	l.do("calls 1")
	if err := syscall.Kill(agentStatus(t, c.socket).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if a := l.ask("calls 5"); a.status != 0 && !strings.Contains(a.text, "peer gone") { // it fails if it was posted before the agent's end was noticed
		t.Errorf("calls after the agent's end: %+v", a)
	}
	l.do("calls 100")
	if own := l.own(); own != "1:1" {
		t.Errorf("after the agent's end: queue pairs and libibverbs %s, want 1:1", own)
	}
	l.do("release", "close", "finalize")
	c.free()

	for range 2 {
		first := lead(t, 1, 0, c.env...)
		first.do("init", "session", "open", "calls 3", "release", "close", "finalize")
	}
	c.ready()
	l = c.begin()
	l.do("calls 1")
	if err := l.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	c.free()
	c.ready()

	l = c.begin()
	l.do("calls 1")
	pid, err := strconv.Atoi(l.who().pid)
	if err = errors.Join(err, syscall.Kill(pid, syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	if a := l.ask("calls 5"); a.status != 0 && !strings.Contains(a.text, "worker died") {
		t.Errorf("calls after the worker's end: %+v", a)
	}
	l.do("calls 100", "release", "close", "finalize")
	c.free()
}

// spread makes a call on each worker, and does something while they run. It returns the statuses of the calls.
func (c *led) spread(line string, meanwhile func()) string {
	c.t.Helper()
	c.say(line)
	if !c.out.Scan() || c.out.Text() != "calling" {
		c.t.Fatalf("%s: %q, want calling\n%s", line, c.out.Text(), c.error.String())
	}
	meanwhile()
	a := c.hear(line)
	if a.status != 0 {
		c.t.Fatalf("%s: %+v", line, a)
	}
	return a.text
}

// TestBrokeredSpread kills the agent while calls on several workers of a lease pass through it. The lease goes on, with its own queue pairs.
func TestBrokeredSpread(t *testing.T) {
	c := startSpare(t, "0", 3, "CONTROL_SECONDS=60")                                         // a new worker may take longer than 2 s on a busy machine
	const lost = "-501 -502"                                                                 // RFAAS_PEER_GONE; RFAAS_WORKER_DIED: the worker has noticed the agent's end and has ended itself
	for line, allowed := range map[string]string{"spread 1000": lost, "threads 1000": "0"} { // the calls of threads are repeated
		l := c.begin()
		agent := agentStatus(t, c.socket).PID
		got := l.spread(line, func() {
			if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		})
		for _, status := range strings.Fields(got) {
			if !slices.Contains(strings.Fields(allowed), status) {
				t.Errorf("%s: statuses %s, want %s\n%s", line, got, allowed, l.error.String())
			}
		}
		if got := l.spread("spread 1", func() {}); got != "0 0 0" {
			t.Errorf("after the agent's end: statuses %s, want 0 each\n%s", got, l.error.String())
		}
		if own := l.own(); own != "3:1" {
			t.Errorf("after the agent's end: queue pairs and libibverbs %s, want 3:1", own)
		}
		l.do("calls 100", "release", "close", "finalize")
		c.free()
		for range 2 {
			first := lead(t, c.workers, 0, c.env...)
			first.do("init", "session", "open", "calls 3", "release", "close", "finalize")
		}
		c.ready()
	}

	l := c.begin()
	l.do("calls 1")
	_, second, _ := strings.Cut(strings.Fields(l.ask("who").text)[1], ":")
	pid, err := strconv.Atoi(second)
	if err = errors.Join(err, syscall.Kill(pid, syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	got := l.spread("spread 300", func() {})
	if f := strings.Fields(got); f[0] != "0" || f[2] != "0" {
		t.Errorf("a worker died: statuses %s, want 0 on the others", got)
	}
	if got := l.spread("threads 1", func() {}); got != "0 0 0" {
		t.Errorf("after a worker's death: statuses %s, want 0 each", got)
	}
	testkit.Eventually(t, "the lease has its own queue pairs", func() bool { l.do("calls 20"); return l.own() == "3:1" })
	l.do("calls 100", "release", "close", "finalize")
	c.free()
}

// TestBrokeredStopped stops the agent while calls pass through it. The call in flight and the next one end without a deadline, by an error that names the
// agent. When the agent goes on, the lease goes on with its own queue pair.
func TestBrokeredStopped(t *testing.T) {
	c := startBrokered(t, "0")
	for _, line := range []string{"calls 1", "spread 1000"} {
		l := c.begin()
		l.do("calls 1")
		agent := agentStatus(t, c.socket).PID
		stop := func() {
			if err := syscall.Kill(agent, syscall.SIGSTOP); err != nil {
				t.Error(err)
			}
			testkit.Eventually(t, "all threads of the agent have stopped", func() bool { return threadsStopped(t, agent) })
		}
		t.Cleanup(func() { syscall.Kill(agent, syscall.SIGCONT) })
		if line == "calls 1" {
			stop()
			if a := l.ask(line); a.status != -501 || !strings.Contains(a.text, "agent") { // RFAAS_PEER_GONE
				t.Errorf("a call while the agent is stopped: %+v", a)
			}
		} else {
			if got := l.spread(line, stop); got != "-501" { // executed, but the agent delivers no reply
				t.Errorf("a call that runs when the agent is stopped: status %s", got)
			}
			if a := l.ask("calls 1"); a.status == 0 || !strings.Contains(a.text, "agent") {
				t.Errorf("the next call: %+v", a)
			}
		}
		if err := syscall.Kill(agent, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "calls succeed", func() bool { return l.ask("calls 1").status == 0 })
		testkit.Eventually(t, "the lease has its own queue pair", func() bool { l.do("calls 20"); return l.own() == "1:1" })
		l.do("release", "close", "finalize")
		c.free()
		for range 2 {
			first := lead(t, 1, 0, c.env...)
			first.do("init", "session", "open", "calls 3", "release", "close", "finalize")
		}
		c.ready()
	}
}

// threadsStopped reports whether no thread of a process runs, after SIGSTOP.
func threadsStopped(t *testing.T, pid int) bool {
	t.Helper()
	stats, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
	if err != nil || len(stats) == 0 {
		t.Fatalf("threads of process %d: %v, %v", pid, stats, err)
	}
	for _, stat := range stats {
		b, err := os.ReadFile(stat)
		if err != nil {
			t.Fatal(err)
		}
		if _, state, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(state, "T") {
			return false
		}
	}
	return true
}

// moveLimit is MOVE_NS of client/c/promote.c: how long one call waits for the workers' answers.
const moveLimit = 2 * time.Millisecond

// TestBrokeredMoveBound stops a worker before it is asked to move. Calls on the other worker return, and at most one of them waits for the answer. A call
// that waits takes moveLimit at least, because the stopped worker does not answer. So most calls must take less than that. The executor ends a worker that
// is stopped for a second, so on a busy machine the test may need several attempts.
func TestBrokeredMoveBound(t *testing.T) {
	c := startSpare(t, "0", 2)
	for end := time.Now().Add(testkit.Bound); time.Now().Before(end); {
		if c.moveBound() {
			return
		}
		c.ready()
	}
	t.Error("the executor has ended the stopped worker each time")
}

// moveBound returns false if the executor has ended the stopped worker.
func (c *brokeredCluster) moveBound() bool {
	l := c.begin()
	l.do("calls 1")
	_, second, _ := strings.Cut(strings.Fields(l.ask("who").text)[1], ":")
	pid, err := strconv.Atoi(second)
	if err = errors.Join(err, syscall.Kill(pid, syscall.SIGSTOP)); err != nil {
		c.t.Fatal(err)
	}
	moved := func(n string) func() bool { return func() bool { l.do("calls 5"); return l.own() == n+":1" } }
	testkit.Eventually(c.t, "the first worker has moved", moved("1"))
	least := moveLimit // the least median of 20 calls
	for end := time.Now().Add(300 * time.Millisecond); least >= moveLimit && time.Now().Before(end); {
		least = min(least, l.ask("calls 20").median)
	}
	still := l.own() == "1:1" && syscall.Kill(pid, syscall.SIGCONT) == nil
	if still {
		testkit.Eventually(c.t, "the second worker has moved", moved("2"))
		if least >= moveLimit {
			c.t.Errorf("while another worker does not answer, most calls take %v or more", moveLimit)
		}
		if got := l.spread("threads 1", func() {}); got != "0 0" {
			c.t.Errorf("statuses %s, want 0 each", got)
		}
	}
	l.do("release", "close", "finalize")
	c.free()
	return still
}

// TestBrokeredOff opens a lease with a spare worker that connects to the client's own queue pair.
func TestBrokeredOff(t *testing.T) {
	c := startSpare(t, "0", 1, "RFAAS_BROKER=0")
	l := c.begin()
	l.do("calls 1")
	if own := l.own(); own != "1:1" {
		t.Errorf("queue pairs and libibverbs %s, want 1:1", own)
	}
	l.do("release", "close", "finalize")
	c.free()
}

// TestBrokeredFigures measures new processes in turn: the first calls pass through the agent, or the process connects its own queue pair. It judges
// nothing.
func TestBrokeredFigures(t *testing.T) {
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
	clusters := map[string]*brokeredCluster{"brokered": startBrokered(t, "0"), "own": startSpare(t, "0", 1, "RFAAS_BROKER=0")}
	times := map[string][]float64{}
	note := func(name string, d time.Duration) { times[name] = append(times[name], float64(d.Microseconds())/1000) }
	for range 8 {
		for kind, c := range clusters {
			began := time.Now()
			l := lead(t, 1, 0, c.env...)
			l.do("init", "session")
			session := time.Now()
			open := l.ask("open")
			first := l.ask("calls 1")
			if open.status != 0 || first.status != 0 {
				t.Fatalf("%+v %+v", open, first)
			}
			note(kind+".from-start", time.Since(began))
			note(kind+".from-request", time.Since(session))
			note(kind+".open", open.took)
			note(kind+".first-call", first.took)
			call := l.ask("calls 1")
			note(kind+".second-call", call.took)
			var longest time.Duration
			testkit.Eventually(t, "the lease has its own queue pair", func() bool {
				longest = max(longest, l.ask("calls 20").longest)
				return l.own() == "1:1"
			})
			note(kind+".longest-call", longest)
			c.ready()
			for range 3 {
				note(kind+".calls-200", l.ask("calls 200").took)
			}
			l.do("release", "close", "finalize")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(times)) {
		slices.Sort(times[name])
		t.Logf("figure: %s median %.2f ms, least %.2f", name, times[name][len(times[name])/2], times[name][0])
	}
}
