package capi

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

const (
	cachedStart = "3" // RFAAS_START_CACHED
	reuse       = 8   // RFAAS_LEASE_REUSE
)

// origin is how a worker came to a lease.
type origin struct{ start, pid string }

// who returns the only worker of the client's lease.
func (c *led) who() origin {
	c.t.Helper()
	a := c.ask("who")
	start, pid, ok := strings.Cut(a.text, ":")
	if a.status != 0 || !ok || strings.Contains(pid, " ") {
		c.t.Fatalf("who: %+v", a)
	}
	return origin{start, pid}
}

// finish ends a client that has been asked to do nothing more, by its own end or by a signal.
func (c *led) finish(kill bool) {
	c.t.Helper()
	if kill {
		c.cmd.Process.Kill()
	}
	c.in.Close()
	if err := c.cmd.Wait(); err != nil && !kill {
		c.t.Errorf("the client ended with %v\n%s", err, c.error.String())
	}
}

// onNode ends a test on verbs, where a connection cannot leave its process. not_here in tests/run and the Makefile name these tests.
func onNode(t *testing.T) {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		testkit.Lacks(t, "verbs: connections belong to their process")
	}
}

// clusterFunc is agentCluster with a provider.
type clusterFunc func(args ...string) (env []string, socket, address string)

// handedOver runs a test on each provider whose connections can leave their process.
func handedOver(t *testing.T, test func(t *testing.T, provider string, cluster clusterFunc)) {
	t.Helper()
	onNode(t)
	onProviders(t, []string{"shm", "tcp"}, test)
}

func onProviders(t *testing.T, providers []string, test func(t *testing.T, provider string, cluster clusterFunc)) {
	t.Helper()
	agentProgram(t) // before a daemon is started (compileFlag)
	for _, p := range providers {
		t.Run(p, func(t *testing.T) {
			test(t, p, func(args ...string) ([]string, string, string) {
				env, socket, address := agentCluster(t, append(args, "--providers", p)...)
				return slices.Clip(append(env, "RFAAS_PROVIDER="+p)), socket, address // tests append to it more than once
			})
		})
	}
}

// leave has a client lease a worker, call it, release it, and end in one of three ways: after closing its session, without closing it, or
// by a signal.
func leave(t *testing.T, end string, env ...string) origin {
	t.Helper()
	a := lead(t, 1, reuse, env...)
	a.do("init", "session", "open", "calls 20")
	w := a.who()
	a.do("release")
	if end == "close" {
		a.do("close", "finalize")
	}
	a.finish(end == "kill")
	return w
}

// TestCachedLeaseOfEndedProcess takes leases on workers that other processes have left.
func TestCachedLeaseOfEndedProcess(t *testing.T) {
	handedOver(t, ofEndedProcess)
}

func ofEndedProcess(t *testing.T, _ string, cluster clusterFunc) {
	env, socket, address := cluster()
	first := leave(t, "close", env...)
	for _, end := range []string{"exit", "kill", "close"} {
		r := agentStatus(t, socket)
		if len(r.Cached) != 1 || r.Cached[0].Executor != address || r.Cached[0].Library != "echo.so" || r.Cached[0].Workers != 1 || !r.Cached[0].Shared ||
			r.Held == 0 {
			t.Fatalf("cached leases before %q: %+v, %d descriptors", end, r.Cached, r.Held)
		}
		if w := leave(t, end, env...); w != (origin{cachedStart, first.pid}) {
			t.Fatalf("the process that ends by %q has %v, the first one had %v", end, w, first)
		}
	}
	testkit.Eventually(t, "the last session is closed", func() bool { r := agentStatus(t, socket); return len(r.Cached) == 1 && r.Cached[0].Orphaned })
}

// TestCachedLeaseOfLivingProcess takes the worker that another process caches.
func TestCachedLeaseOfLivingProcess(t *testing.T) {
	handedOver(t, ofLivingProcess)
}

func ofLivingProcess(t *testing.T, _ string, cluster clusterFunc) {
	env, socket, _ := cluster()
	a, b := lead(t, 1, reuse, env...), lead(t, 1, reuse, env...)
	a.do("init", "session", "open", "calls 20")
	first := a.who()
	a.do("release")
	b.do("init", "session", "open")
	if w := b.who(); w != (origin{cachedStart, first.pid}) {
		t.Errorf("the other process has %v, want the worker of %v", w, first)
	}
	a.do("open", "calls 20")
	if w := a.who(); w.pid == first.pid {
		t.Errorf("both processes have worker %v", w)
	}
	b.do("calls 20", "release")
	a.do("calls 20", "release")
	// Each has cached a lease: a process prefers its own.
	for range 3 {
		a.do("open", "calls 3")
		if w := a.who(); w.start != cachedStart || w.pid == first.pid {
			t.Errorf("the process has %v, want the worker that it has used last", w)
		}
		a.do("release")
	}
	if r := agentStatus(t, socket); len(r.Cached) != 2 {
		t.Errorf("%d leases are cached, want 2", len(r.Cached))
	}
	// A worker that was replaced is handed over with its new connection.
	a.do("open", "calls 1")
	pid, _ := strconv.Atoi(a.who().pid)
	p, _ := os.FindProcess(pid)
	p.Kill()
	testkit.Eventually(t, "the worker is replaced", func() bool { return a.ask("calls 1").status == 0 })
	next := a.who()
	a.do("release")
	b.finish(true)
	a.finish(true)
	testkit.Eventually(t, "both sessions are closed", func() bool {
		r := agentStatus(t, socket)
		return len(r.Cached) == 2 && r.Cached[0].Orphaned && r.Cached[1].Orphaned
	})
	c, d := lead(t, 1, reuse, env...), lead(t, 1, reuse, env...)
	c.do("init", "session", "open", "calls 20")
	d.do("init", "session", "open", "calls 20")
	if x, y := c.who(), d.who(); x.start != cachedStart || y.start != cachedStart || x.pid == y.pid || x.pid != next.pid && y.pid != next.pid {
		t.Errorf("two processes have %v and %v, want the cached workers, one of them %v", x, y, next)
	}
}

// TestCachedLeaseDiffers asks for leases with other terms or credentials, which get no cached workers.
func TestCachedLeaseDiffers(t *testing.T) {
	onNode(t)
	env, _, _ := agentCluster(t)
	code, err := os.ReadFile(built(t, "build/functions/echo.so"))
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "echo.so")
	if err := os.WriteFile(other, append(code, 0), 0o755); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	for _, v := range env {
		if from, ok := strings.CutPrefix(v, "RFAAS_SECRET_FILE="); ok {
			if b, err := os.ReadFile(from); err != nil || os.WriteFile(secret, b, 0o600) != nil {
				t.Fatal(err)
			}
		}
	}
	for name, c := range map[string]*led{
		"tenant":      lead(t, 1, reuse, append(env, "USER=another")...),
		"library":     leadWith(t, other, 1, reuse, env...),
		"flag":        lead(t, 1, 0, env...),
		"workers":     lead(t, 2, reuse, env...),
		"secret file": lead(t, 1, reuse, append(env, "RFAAS_SECRET_FILE="+secret)...),
		"no caching":  lead(t, 1, reuse, append(env, "RFAAS_CACHED_LEASES=0")...),
	} {
		first := leave(t, "close", env...)
		c.do("init", "session", "open", "calls 5")
		if a := c.ask("who"); a.status != 0 || strings.Contains(a.text, cachedStart+":") || strings.Contains(a.text, ":"+first.pid) {
			t.Errorf("another %s: workers %q, of another lease: %v", name, a.text, first)
		}
		if name != "workers" { // these need all cores
			if w := leave(t, "close", env...); w != (origin{cachedStart, first.pid}) {
				t.Errorf("the same terms beside another %s: %v, want the worker of %v", name, w, first)
			}
		}
		c.do("release", "close", "finalize")
		c.finish(false)
	}
}

// TestCachedLeaseEndsWithAgent kills the agent that holds the connections of a worker.
func TestCachedLeaseEndsWithAgent(t *testing.T) {
	handedOver(t, endsWithAgent)
}

func endsWithAgent(t *testing.T, _ string, cluster clusterFunc) {
	env, socket, _ := cluster()
	a := lead(t, 1, reuse, env...)
	a.do("init", "session", "open", "calls 20", "release")
	first := leave(t, "close", env...)
	p, err := os.FindProcess(agentStatus(t, socket).PID)
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
	testkit.Eventually(t, "the worker has ended", func() bool { _, err := os.Stat("/proc/" + first.pid); return err != nil })
	if w := leave(t, "close", env...); w.start == cachedStart {
		t.Errorf("at the next agent the worker is %v", w)
	}
	a.do("open", "calls 20")
}

// TestCachedLeaseOfShortProcesses has many processes use one worker, one after another. No party keeps anything of an ended process.
func TestCachedLeaseOfShortProcesses(t *testing.T) {
	onNode(t)
	env, socket, _ := agentCluster(t)
	first := leave(t, "close", env...)
	testkit.Eventually(t, "nobody is connected", func() bool { return len(agentStatus(t, socket).Clients) == 0 })
	agent := agentStatus(t, socket)
	files := func(pid string) int {
		all, err := os.ReadDir("/proc/" + pid + "/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	maps := func(pid string) int {
		b, err := os.ReadFile("/proc/" + pid + "/maps")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "memfd")
	}
	agentPID := strconv.Itoa(agent.PID)
	held, agentFiles, workerFiles, workerMaps := agent.Held, files(agentPID), files(first.pid), maps(first.pid)
	for i := range 50 {
		if w := leave(t, []string{"close", "kill", "exit"}[i%3], env...); w != (origin{cachedStart, first.pid}) {
			t.Fatalf("process %d has %v, want the worker of %v", i, w, first)
		}
	}
	testkit.Eventually(t, "the agent has forgotten the processes", func() bool {
		r := agentStatus(t, socket)
		return len(r.Clients) == 0 && r.Held == held && files(agentPID) <= agentFiles+1
	})
	if n, m := files(first.pid), maps(first.pid); n != workerFiles || m != workerMaps {
		t.Errorf("the worker has %d descriptors and %d mappings, had %d and %d", n, m, workerFiles, workerMaps)
	}
}

// TestCachedLeaseAlternates has two processes take the same worker in turn, and counts what they keep.
func TestCachedLeaseAlternates(t *testing.T) {
	onNode(t)
	env, _, _ := agentCluster(t)
	all := []*led{lead(t, 1, reuse, env...), lead(t, 1, reuse, env...)}
	files := func(c *led) int {
		d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	var first origin
	var before [2]int
	for i := range 20 {
		for k, c := range all {
			if i == 0 {
				c.do("init", "session")
			}
			c.do("open", "calls 5")
			if w := c.who(); i+k == 0 {
				first = w
			} else if w != (origin{cachedStart, first.pid}) {
				t.Fatalf("turn %d of process %d: %v, want the worker of %v", i, k, w, first)
			}
			c.do("release")
			if i == 1 {
				before[k] = files(c)
			}
			if n := files(c); i > 1 && n > before[k] {
				t.Fatalf("turn %d of process %d: %d descriptors, had %d", i, k, n, before[k])
			}
		}
	}
	// A child of a process that caches a lease does not use the parent's.
	all[1].do("fork", "open", "calls 5")
	all[1].do("release", "close", "finalize")
	all[0].do("close", "finalize")
}

// TestCachedLeaseOfManyWorkers hands over more channels than fit into a message, and more than an endpoint has completion queues.
func TestCachedLeaseOfManyWorkers(t *testing.T) {
	onNode(t)
	const workers = 70
	env, socket, _ := agentCluster(t, "--share-cores", "40", "--pool", "0")
	var first string
	for i := range 3 {
		c := lead(t, workers, reuse, env...)
		c.do("init", "session", "open", fmt.Sprintf("calls %d", 3*workers))
		a := c.ask("who")
		switch want := strings.ReplaceAll(first, "1:", cachedStart+":"); {
		case a.status != 0 || strings.Count(a.text, ":") != workers:
			t.Fatalf("who: %+v", a)
		case i == 0:
			first = a.text
		case a.text != want:
			t.Errorf("process %d has %s, want %s", i, a.text, want)
		}
		c.do("release", "close", "finalize")
		c.finish(false)
	}
	if r := agentStatus(t, socket); len(r.Cached) != 1 || r.Cached[0].Workers != workers || !r.Cached[0].Orphaned || r.Held < 6*workers {
		t.Errorf("cached leases %+v, %d descriptors", r.Cached, r.Held)
	}
}
