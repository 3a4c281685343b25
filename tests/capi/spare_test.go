package capi

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

const pooledStart = "2" // RFAAS_START_POOLED

// spare counts the agent's spare leases.
func (r *agentReport) spare() (n int) {
	for _, k := range r.Cached {
		if k.Spare {
			n++
		}
	}
	return n
}

// TestSpareLease takes leases on workers that were started for the agent before any client asked for them. On verbs, the workers are sealed before
// they connect. The executor has no pool of its own, so no other start is pooled.
func TestSpareLease(t *testing.T) {
	providers := []string{"shm", "tcp"}
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		providers = []string{"verbs"}
	}
	onProviders(t, providers, aheadOfDemand)
}

func aheadOfDemand(t *testing.T, provider string, cluster clusterFunc) {
	listen := filepath.Join(t.TempDir(), "http")
	env, socket, _ := cluster("--pool", "0", "--share-cores", "3", "--http-listen", "unix:"+listen)
	has := func(line string) bool {
		return strings.Contains(testkit.Metrics(t, listen), "\nrfaas_executor_"+line+"\n")
	}
	begin := func(env ...string) (*led, origin) {
		t.Helper()
		c := lead(t, 1, 0, env...)
		c.do("init", "session", "open", "calls 5")
		return c, c.who()
	}
	one := append(env, "RFAAS_POOL=1")
	for range 2 {
		c, _ := begin(append(env, "RFAAS_POOL=0")...)
		c.do("release", "close", "finalize")
	}
	first, _ := begin(one...)
	if n := agentStatus(t, socket); n.spare() != 0 || !has("cached_leases 0") {
		t.Fatalf("spare leases before there is demand: %+v", n.Cached)
	}
	second, _ := begin(one...)
	ready := func() bool { r := agentStatus(t, socket); return r.spare() == 1 && has("cached_leases 1") }
	testkit.Eventually(t, "a spare lease is ready", ready)
	if !has("free_cores 4") || !has("leases 2") {
		t.Error("a spare lease holds cores")
	}
	// On tcp the agent connects to the claim region when it starts the first spare lease. Leases before that are requested by message.
	var third *led
	for n := 1; third == nil; n++ {
		c, w := begin(one...)
		if w.start != pooledStart {
			t.Errorf("a process with the same terms has %v, want a spare worker", w)
		}
		testkit.Eventually(t, "the lease is booked", func() bool { return has(fmt.Sprintf(`worker_starts_total{path="pooled"} %d`, n)) })
		if third = c; provider != "verbs" && !has("claims_total 1") {
			if provider == "shm" || n == 20 {
				t.Fatalf("none of %d spare leases was claimed", n)
			}
			c.do("release", "close", "finalize")
			third = nil
		}
		testkit.Eventually(t, "the next one is ready", ready)
	}

	// Another tenant's lease needs its core.
	large := lead(t, 3, 0, append(env, "USER=another", "RFAAS_POOL=0")...)
	large.do("init", "session", "open", "calls 5")
	if a := large.ask("who"); strings.Contains(a.text, pooledStart+":") {
		t.Errorf("another tenant has workers %q of this tenant's pool", a.text)
	}
	if !has("cached_leases 0") || !has("free_cores 0") {
		t.Error("the spare worker was not evicted")
	}
	fourth := lead(t, 1, 0, one...)
	fourth.do("init", "session")
	large.do("release")
	fourth.do("open", "calls 5") // although the workers of the agent's spare channels have ended
	testkit.Eventually(t, "demand has continued", ready)

	all := []*led{first, second, third, fourth}
	if provider == "verbs" { // a queue pair of the agent ends with it, and its lease soon afterwards
		for _, c := range all {
			testkit.Eventually(t, "its lease has a queue pair of its own", func() bool { c.do("calls 5"); return strings.HasPrefix(c.own(), "1:") })
		}
	}
	p, err := os.FindProcess(agentStatus(t, socket).PID)
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
	testkit.Eventually(t, "the spare worker has ended with its agent", func() bool { return has("cached_leases 0") })
	for _, c := range all {
		c.do("calls 5", "release")
	}
	testkit.Eventually(t, "all cores are free", func() bool { return has("free_cores 6") })
}

// TestSpareAhead opens leases while the agent is stopped: the release before has given the process a spare lease, which it claims by itself. Another
// process can take that spare lease first. The process that was given it then gets other workers.
func TestSpareAhead(t *testing.T) {
	onNode(t)
	onProviders(t, []string{"shm"}, givenAhead)
}

func givenAhead(t *testing.T, _ string, cluster clusterFunc) {
	listen := filepath.Join(t.TempDir(), "http")
	env, socket, _ := cluster("--pool", "0", "--share-cores", "4", "--http-listen", "unix:"+listen)
	env = append(env, "RFAAS_POOL=1")
	claims := func(n int) {
		t.Helper()
		testkit.Eventually(t, "the claim is booked", func() bool {
			return strings.Contains(testkit.Metrics(t, listen), fmt.Sprintf("\nrfaas_executor_claims_total %d\n", n))
		})
	}
	// After a claim, the executor has the next spare lease only when the agent knows that the last one is taken.
	ready := func() bool {
		r := agentStatus(t, socket)
		return testkit.Metric(t, listen, "rfaas_executor_cached_leases") == "1" && r.spare() == 1
	}
	c := lead(t, 1, 0, env...)
	c.do("init", "session", "open", "calls 5", "release", "open", "calls 5")
	open := func() {
		t.Helper()
		pid := agentStatus(t, socket).PID
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer syscall.Kill(pid, syscall.SIGCONT)
		c.do("open", "calls 1")
	}
	for n := 1; n <= 3; n++ {
		testkit.Eventually(t, "a spare lease is ready", ready)
		c.do("release")
		open()
		if w := c.who(); w.start != pooledStart {
			t.Errorf("the process has workers %v, want spare ones", w)
		}
		c.do("calls 5")
		claims(n)
	}
	testkit.Eventually(t, "a spare lease is ready", ready)
	c.do("release")
	other := lead(t, 1, 0, env...)
	other.do("init", "session", "open", "calls 5")
	if w := other.who(); w.start != pooledStart {
		t.Errorf("another process has workers %v, want the spare ones", w)
	}
	c.do("open", "calls 5", "release")
	other.do("release", "close", "finalize")
	testkit.Eventually(t, "no lease is left", func() bool { return testkit.Metric(t, listen, "rfaas_executor_leases") == "0" })
}
