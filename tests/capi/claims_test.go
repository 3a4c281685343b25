package capi

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

var (
	claimClients = flag.Int("claim-clients", 120, "clients that race for ten workers in TestClaimsRace")
	claimSeed    = flag.Uint64("claim-seed", 0, "seed of the random choices of TestClaimsRace; 0: a new one")
)

// racers are the processes of a tenant in TestClaimsRace, and what they have counted.
type racers struct {
	leases, calls, cached int
	heldUs                int64
}

// parse reads the counts that a process of the tenant has printed.
func (r *racers) parse(t *testing.T, out string) {
	t.Helper()
	if _, err := fmt.Sscanf(out, "leases %d\ncalls %d\ncached %d\nheld_us %d", &r.leases, &r.calls, &r.cached, &r.heldUs); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// raceCluster is what the processes of TestClaimsRace use.
type raceCluster struct {
	t   *testing.T
	env []string
}

// start starts a program of a tenant. Its output can be read when it has ended.
func (r *raceCluster) start(tenant, name string, arg ...string) (stop io.Closer, ended func() string) {
	r.t.Helper()
	var out, problems strings.Builder
	cmd := exec.Command(name, arg...)
	cmd.Env = append(slices.Clip(r.env), "USER="+tenant)
	cmd.Stdout, cmd.Stderr = &out, &problems
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stop, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return stop, func() string {
		r.t.Helper()
		if err := cmd.Wait(); err != nil {
			r.t.Errorf("%s of %s: %v\n%s", filepath.Base(name), tenant, err, problems.String())
		}
		return out.String()
	}
}

// bills returns the billed units by tenant and item.
func (r *raceCluster) bills() map[string]map[string]int64 {
	r.t.Helper()
	var list []struct {
		Tenant string
		Lines  []struct {
			Item  string
			Units int64 `json:",string"`
		}
	}
	_, ended := r.start("racer", built(r.t, "bin/rfaas"), "bill", "--json")
	if err := json.Unmarshal([]byte(ended()), &list); err != nil {
		r.t.Fatal(err)
	}
	bills := map[string]map[string]int64{}
	for _, b := range list {
		bills[b.Tenant] = map[string]int64{}
		for _, l := range b.Lines {
			bills[b.Tenant][l.Item] += l.Units
		}
	}
	return bills
}

// Clients of several processes take turns on ten workers by claims. Meanwhile the executor ends cached workers at random: because of cache-most, because
// some leases have other terms, and for leases of another tenant. No two clients have the same worker at once, no core is lost, and both bills are
// exact.
func TestClaimsRace(t *testing.T) {
	onNode(t)
	dir := t.TempDir()
	secret, socket, metrics, shared := filepath.Join(dir, "secret"), filepath.Join(dir, "agent.sock"), filepath.Join(dir, "http"), filepath.Join(dir, "shared")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	const cores, rounds = 10, 2
	began := time.Now()
	address, _, _ := startProcess(t, secret, "--manager", manager, "--http-listen", "unix:"+metrics, "--charge-interval", "100ms", "--share-cores", "5",
		"--cache-most", "6")
	t.Cleanup(func() { stopAgent(t, socket) })
	if err := errors.Join(os.WriteFile(shared, nil, 0o600), os.Truncate(shared, 1<<22)); err != nil {
		t.Fatal(err)
	}
	c := &raceCluster{t, append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_AGENT_SOCKET="+socket,
		"TEST_SHARED="+shared)}
	program, library := build(t, "gcc", "testdata/claims_test.c", c11...), built(t, "build/functions/echo.so")
	seed := cmp.Or(*claimSeed, rand.Uint64()|1)
	t.Logf("-claim-seed %d", seed)
	stop, taken := c.start("taker", program, library, fmt.Sprintf("take:%d", seed))
	_, raced := c.start("racer", program, library, fmt.Sprintf("race:%d:%d:%d", *claimClients, rounds, seed))
	racer, taker := &racers{}, &racers{}
	racer.parse(t, raced())
	took := time.Since(began)
	stop.Close()
	taker.parse(t, taken())
	claims, _ := strconv.Atoi(testkit.Metric(t, metrics, "rfaas_executor_claims_total"))
	t.Logf("%d leases of %d clients in %v beside %d of another tenant: %d on cached workers, %d of them by claims", racer.leases, *claimClients, took,
		taker.leases, racer.cached, claims)
	t.Logf("figure: claims.clients = %d", *claimClients)
	t.Logf("figure: claims.share = %.2f", float64(claims)/float64(racer.leases))
	if racer.leases != *claimClients*rounds || racer.calls != 3*racer.leases || claims < 10 || claims > racer.cached || taker.leases == 0 {
		t.Errorf("%+v and %+v, %d claims", *racer, *taker, claims)
	}
	eventually(t, "all cores are free", func() bool {
		return testkit.Metric(t, metrics, "rfaas_executor_free_cores") == strconv.Itoa(cores) && testkit.Metric(t, metrics, "rfaas_executor_leases") == "0"
	})
	tenants := map[string]*racers{"racer": racer, "taker": taker}
	var bills map[string]map[string]int64
	eventually(t, "the bills have every call and every byte", func() bool {
		bills = c.bills()
		done := true
		for name, r := range tenants {
			n := bills[name]["million-calls"]
			if n > int64(r.calls) {
				t.Fatalf("%s: %d calls are billed, want %d", name, n, r.calls)
			}
			done = done && n == int64(r.calls) && bills[name]["gb-in"] == 8*n && bills[name]["gb-out"] == 8*n
		}
		return done
	})
	// A lease is billed at least for the time in which its client used it, and all of them together for no more cores than there are.
	billed := int64(0)
	for name, r := range tenants {
		if billed += bills[name]["core-hour"]; bills[name]["core-hour"] < r.heldUs || bills[name]["million-failures"] != 0 {
			t.Errorf("%s: billed %v, held %d us", name, bills[name], r.heldUs)
		}
	}
	if most := cores * time.Since(began).Microseconds(); billed > most {
		t.Errorf("%d us are billed, and the cores had %d us", billed, most)
	}
}

// The agent is stopped while a client claims, and killed before it reads the message about the claim. Calls go on, and the next agent
// has the lease.
func TestClaimAgentKilled(t *testing.T) {
	onNode(t)
	env, socket, _ := agentCluster(t, "--cache-awake", "0s") // the worker is frozen when the release returns
	c := lead(t, 1, reuse, env...)
	c.do("init", "session", "open", "calls 1")
	w := c.who()
	c.do("release")
	pid := agentStatus(t, socket).PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c.do("open", "calls 20") // a request to the agent would not be answered
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.do("calls 10000")
	if now := c.who(); now != (origin{cachedStart, w.pid}) {
		t.Errorf("worker %v, want that of %v", now, w)
	}
	eventually(t, "the next agent has the lease", func() bool {
		c.do("calls 100")
		if _, err := agentCommand(t, socket, "status"); err != nil {
			return false // it has not been started yet
		}
		r := agentStatus(t, socket)
		return len(r.Clients) == 1 && r.Clients[0].Leases == 1 && r.PID != pid
	})
	c.do("release", "open", "calls 1", "release", "close", "finalize")
}

// A client is killed after its first call in a claimed lease, of which the library has not told the agent yet. The agent finds the claim and releases
// the lease. Otherwise the executor would wait for the client's first use.
func TestClaimClientKilled(t *testing.T) {
	onNode(t)
	listen := filepath.Join(t.TempDir(), "http")
	env, _, _ := agentCluster(t, "--client-first-use", "1h", "--http-listen", "unix:"+listen)
	eventually(t, "a client was killed in a claimed lease", func() bool {
		c := lead(t, 1, reuse, env...)
		c.do("init", "session", "open", "calls 1", "release")
		before := testkit.Metric(t, listen, "rfaas_executor_claims_total")
		c.do("open", "calls 1") // on a busy machine the worker may not be cached yet, and the agent asks the executor
		if err := c.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the lease has ended", func() bool {
			text := testkit.Metrics(t, listen)
			return strings.Contains(text, "\nrfaas_executor_leases 0\n") && strings.Contains(text, "\nrfaas_executor_free_cores 2\n")
		})
		return testkit.Metric(t, listen, "rfaas_executor_claims_total") != before
	})
}

// The executor is stopped while a client claims, and killed before it thaws the worker. Calls end with an error that names the executor.
func TestClaimExecutorKilled(t *testing.T) {
	onNode(t)
	secret, socket := filepath.Join(t.TempDir(), "secret"), filepath.Join(t.TempDir(), "agent.sock")
	address, executor, ended := startProcess(t, secret, "--cache-awake", "0s")
	t.Cleanup(func() { stopAgent(t, socket) })
	c := lead(t, 1, reuse, "RFAAS_EXECUTOR="+address, "RFAAS_MANAGER=", "RFAAS_SECRET_FILE="+secret, "RFAAS_AGENT_SOCKET="+socket)
	c.do("init", "session", "open", "calls 1", "release")
	if err := executor.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c.do("open")
	c.say("calls 1")
	if err := executor.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended
	// The worker is thawed to be killed, and may answer a call before its end. Later calls fail.
	for a := c.hear("calls 1"); ; a = c.ask("calls 1") {
		if a.status == 0 {
			continue
		}
		if !strings.Contains(a.text, "executor") && !strings.Contains(a.text, address) {
			t.Errorf("a call after the executor's end: %+v", a)
		}
		break
	}
	c.ask("release")
	c.do("close", "finalize")
}

// On tcp the agent claims for the client. The executor is stopped when the claim arrives, and then the agent or the executor is killed. The client's request
// is answered by the next agent, or ends with an error that names the executor. No core stays taken.
func TestClaimOnTCPKilled(t *testing.T) {
	onNode(t)
	claimKilled(t, "tcp")
}

// The same on verbs. No event tells that the claim has arrived, so the kill may come before it.
func TestVerbsClaimKilled(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
		t.Skip("RFAAS_REQUIRE_VERBS is not set: this test runs in the lane softroce")
	}
	claimKilled(t, "verbs")
}

// verbsCluster starts an executor on verbs, in a test that runs in the virtual machine only. It returns the environment of clients, the agent's socket, the
// executor, and where its metrics are.
func verbsCluster(t *testing.T, args ...string) (env []string, socket string, executor *exec.Cmd, metrics string) {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
		t.Skip("RFAAS_REQUIRE_VERBS is not set: this test runs in the lane softroce")
	}
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	socket, metrics = filepath.Join(dir, "agent.sock"), filepath.Join(dir, "http")
	address, executor, _ := startProcess(t, secret, append([]string{"--providers", "verbs", "--http-listen", "unix:" + metrics}, args...)...)
	t.Cleanup(func() { stopAgent(t, socket) })
	return []string{"RFAAS_EXECUTOR=" + address, "RFAAS_MANAGER=", "RFAAS_SECRET_FILE=" + secret, "RFAAS_AGENT_SOCKET=" + socket, "RFAAS_PROVIDER=verbs"}, socket, executor, metrics
}

func allFree(t *testing.T, metrics string) {
	t.Helper()
	eventually(t, "all cores are free", func() bool {
		return testkit.Metric(t, metrics, "rfaas_executor_free_cores") == "2" && testkit.Metric(t, metrics, "rfaas_executor_leases") == "0"
	})
}

// On verbs, the third lease of a process and each later one is claimed without the agent, which is stopped here. Two processes claim at the same time, and each
// gets its own worker. The agent follows these leases afterwards.
func TestVerbsOwnClaims(t *testing.T) {
	env, socket, _, metrics := verbsCluster(t)
	clients := []*led{lead(t, 1, reuse, env...), lead(t, 1, reuse, env...)}
	workers := make([]origin, len(clients))
	for i, c := range clients {
		c.do("init", "session", "open", "calls 1")
		workers[i] = c.who()
	}
	for _, c := range clients {
		c.do("release", "open", "calls 1", "release")
	}
	before, err := strconv.Atoi(testkit.Metric(t, metrics, "rfaas_executor_claims_total"))
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		pid := agentStatus(t, socket).PID
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		for _, c := range clients {
			c.say("open")
		}
		for i, c := range clients {
			if a := c.hear("open"); a.status != 0 {
				t.Fatalf("a lease while the agent is stopped: %+v", a)
			}
			c.do("calls 20")
			if w := c.who(); w != (origin{cachedStart, workers[i].pid}) {
				t.Errorf("worker %v, want that of %v", w, workers[i])
			}
		}
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the agent follows the leases", func() bool {
			r := agentStatus(t, socket)
			return len(r.Clients) == 2 && r.Clients[0].Leases == 1 && r.Clients[1].Leases == 1
		})
		for _, c := range clients {
			c.do("calls 1", "release")
		}
		eventually(t, "the claims are counted", func() bool {
			return testkit.Metric(t, metrics, "rfaas_executor_claims_total") == strconv.Itoa(before+(round+1)*len(clients))
		})
	}
	for _, c := range clients {
		c.do("close", "finalize")
	}
	allFree(t, metrics)
}

// A client process is killed in a lease that it has claimed itself and of which the agent, which is stopped, does not know yet. The agent finds the claim and
// releases the lease. Otherwise the executor would wait for the client's first use.
func TestVerbsOwnClaimClientKilled(t *testing.T) {
	env, socket, _, metrics := verbsCluster(t, "--client-first-use", "1h")
	c := lead(t, 1, reuse, env...)
	c.do("init", "session", "open", "release", "open", "release")
	pid := agentStatus(t, socket).PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c.do("open", "calls 1")
	if err := errors.Join(c.cmd.Process.Kill(), syscall.Kill(pid, syscall.SIGCONT)); err != nil {
		t.Fatal(err)
	}
	allFree(t, metrics)
}

// The executor is stopped while a client process claims, so the process does not learn the outcome. It asks by message. The executor then finds the claim first
// and refuses the message, and the agent releases the lease of the claim. The process gets a lease, and no core stays taken. Later leases are claimed again.
func TestVerbsOwnClaimUnknown(t *testing.T) {
	env, socket, executor, metrics := verbsCluster(t, "--client-first-use", "1h")
	c := lead(t, 1, reuse, env...)
	c.do("init", "session", "open", "release", "open", "release")
	if err := executor.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "every thread of the executor has stopped", func() bool { return testkit.AllStopped(executor.Process.Pid) })
	c.say("open")
	eventually(t, "the agent is asked", func() bool {
		r := agentStatus(t, socket)
		return len(r.Clients) == 1 && r.Clients[0].Leases == 1
	})
	if err := executor.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if a := c.hear("open"); a.status != 0 {
		t.Fatalf("%+v", a)
	}
	c.do("calls 1", "release")
	pid := agentStatus(t, socket).PID
	eventually(t, "a lease is claimed without the agent", func() bool { // after a pause
		c.do("open", "calls 1", "release", "open", "calls 1", "release")
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		a := c.ask("open")
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		return a.status == 0
	})
	c.do("calls 1", "release", "close", "finalize")
	allFree(t, metrics)
}

func claimKilled(t *testing.T, provider string) {
	for _, killed := range []string{"agent", "executor"} {
		t.Run(killed, func(t *testing.T) {
			dir := t.TempDir()
			secret, socket, listen := filepath.Join(dir, "secret"), filepath.Join(dir, "agent.sock"), filepath.Join(dir, "http")
			data := fmt.Sprintf("127.%d.%d.%d", 100+rand.IntN(100), rand.IntN(256), 1+rand.IntN(254))
			address, executor, ended := startProcess(t, secret, "--providers", provider, "--data-listen", data+":0", "--http-listen", "unix:"+listen)
			t.Cleanup(func() { stopAgent(t, socket) })
			c := lead(t, 1, reuse, "RFAAS_EXECUTOR="+address, "RFAAS_MANAGER=", "RFAAS_SECRET_FILE="+secret, "RFAAS_AGENT_SOCKET="+socket, "RFAAS_PROVIDER="+provider)
			c.do("init", "session")
			eventually(t, "leases are claimed", func() bool {
				c.do("open", "calls 1", "release")
				return testkit.Metric(t, listen, "rfaas_executor_claims_total") != "0"
			})
			pid := agentStatus(t, socket).PID
			if err := executor.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			eventually(t, "every thread of the executor has stopped", func() bool { return testkit.AllStopped(executor.Process.Pid) })
			c.say("open")
			if provider == "tcp" {
				eventually(t, "the claim has arrived", func() bool { return unread(t, data) })
			}
			if killed == "agent" {
				if err := errors.Join(syscall.Kill(pid, syscall.SIGKILL), executor.Process.Signal(syscall.SIGCONT)); err != nil {
					t.Fatal(err)
				}
				if a := c.hear("open"); a.status != 0 && provider == "tcp" {
					t.Fatalf("the next agent: %+v", a)
				} else if a.status != 0 { // in an emulated machine, the next agent may take longer than the session permits
					eventually(t, "the next agent grants a lease", func() bool { return c.ask("open").status == 0 })
				}
				c.do("calls 1", "release")
				eventually(t, "all cores are free", func() bool {
					return testkit.Metric(t, listen, "rfaas_executor_free_cores") == "2" && testkit.Metric(t, listen, "rfaas_executor_leases") == "0"
				})
			} else {
				if err := executor.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				<-ended
				if a := c.hear("open"); a.status == 0 || !strings.Contains(a.text, address) {
					t.Errorf("a lease of an executor that was killed: %+v", a)
				}
			}
			c.do("close", "finalize")
		})
	}
}

// unread reports whether a TCP connection with this local IPv4 address has bytes that its process has not read.
func unread(t *testing.T, address string) bool {
	t.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	ip := netip.MustParseAddr(address).As4()
	row := fmt.Sprintf("(?m)^ *[0-9]+: %08X:[0-9A-F]{4} [0-9A-F:]{13} 01 [0-9A-F]{8}:(?:[0-9A-F]*[1-9A-F][0-9A-F]*) ", binary.NativeEndian.Uint32(ip[:]))
	return regexp.MustCompile(row).Match(table)
}

// A lease that is opened after a table was published has the table, although there are cached workers without it.
func TestClaimSeesTables(t *testing.T) {
	onNode(t)
	env, _, _ := agentCluster(t)
	c := leadWith(t, tableLibrary(t), 1, reuse, env...)
	c.do("init", "session", "open", "release", "table", "open", "look", "release", "open", "look", "release", "close", "finalize")
}

// A lease that claims workers does not open the library's file unless the file has changed, and reuses the memory of an earlier lease.
func TestClaimIsLight(t *testing.T) {
	onNode(t)
	env, _, _ := agentCluster(t)
	file := filepath.Join(t.TempDir(), "library.so")
	content, err := os.ReadFile(built(t, "build/functions/echo.so"))
	if err == nil {
		err = os.WriteFile(file, content, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := leadWith(t, file, 1, reuse, env...)
	c.do("init", "session", "open", "release")
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err == nil {
		defer unix.Close(fd)
		_, err = unix.InotifyAddWatch(fd, file, unix.IN_OPEN)
	}
	if err != nil {
		t.Fatal(err)
	}
	opened := func() bool {
		n, _ := unix.Read(fd, make([]byte, 4096))
		return n > 0
	}
	light := false // workers that are just being frozen are reused by a message, for which the library is opened
	for n := 0; n < 100 && !light; n++ {
		opened()
		c.do("open", "calls 3", "release")
		light = !opened()
	}
	if !light {
		t.Error("each lease on cached workers has opened the library")
	}
	rss := func() (kib int) {
		var threads int
		var caught string
		c.say("self")
		if !c.out.Scan() {
			t.Fatalf("the client has ended: %s", c.error.String())
		}
		if _, err := fmt.Sscan(c.out.Text(), &threads, &caught, &kib); err != nil {
			t.Fatal(err)
		}
		return kib
	}
	again := slices.Repeat([]string{"open", "release"}, 100)
	c.do(again...)
	before := rss()
	c.do(slices.Concat(again, again)...)
	if more := rss() - before; more > 1024 {
		t.Errorf("200 leases, one after the other, took %d KiB", more)
	}
	opened()
	if now := time.Now().Add(time.Hour); os.Chtimes(file, now, now) != nil {
		t.Fatal("the time of the library cannot be set")
	}
	c.do("open", "release")
	if !opened() {
		t.Error("a lease with a changed library has not opened it")
	}
	c.do("close", "finalize")
}
