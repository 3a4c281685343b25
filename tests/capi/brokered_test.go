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
	env            []string
	socket, listen string
}

func startBrokered(t *testing.T, pool string) *brokeredCluster {
	t.Helper()
	return startSpare(t, pool, "RFAAS_BROKER=1")
}

func startSpare(t *testing.T, pool string, env ...string) *brokeredCluster {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
		t.Skip("RFAAS_REQUIRE_VERBS is not set: this test runs in the lane softroce")
	}
	c := &brokeredCluster{t: t, listen: filepath.Join(t.TempDir(), "http")}
	c.env, c.socket, _ = agentCluster(t, "--pool", pool, "--share-cores", "4", "--http-listen", "unix:"+c.listen, "--providers", "verbs")
	c.env = append(append(c.env, "RFAAS_POOL=1", "RFAAS_PROVIDER=verbs"), env...)
	for range 2 { // demand
		first := lead(t, 1, 0, c.env...)
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
	l := lead(c.t, 1, 0, c.env...)
	l.do("init", "session", "open")
	if w := l.who(); w.start != pooledStart {
		c.t.Fatalf("a lease with %v, want a spare worker", w)
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

// TestBrokeredOff opens a lease with a spare worker that connects to the client's own queue pair.
func TestBrokeredOff(t *testing.T) {
	c := startSpare(t, "0")
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
	clusters := map[string]*brokeredCluster{"brokered": startBrokered(t, "0"), "own": startSpare(t, "0")}
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
