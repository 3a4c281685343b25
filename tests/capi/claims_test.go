package capi

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

var claimClients = flag.Int("claim-clients", 60, "clients that race for ten workers in TestClaimsRace")

// Clients of two processes take turns on ten workers by claims. Meanwhile the executor ends cached workers, because of cache-most and because some
// leases have other terms. No two clients have the same worker at once, no core is lost, and the bill has every call.
func TestClaimsRace(t *testing.T) {
	onNode(t)
	dir := t.TempDir()
	secret, socket, metrics := filepath.Join(dir, "secret"), filepath.Join(dir, "agent.sock"), filepath.Join(dir, "http")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	address, _, _ := startProcess(t, secret, "--manager", manager, "--http-listen", "unix:"+metrics, "--charge-interval", "100ms", "--share-cores", "5",
		"--cache-most", "6")
	t.Cleanup(func() { stopAgent(t, socket) })
	run := func(name string, arg ...string) []byte {
		t.Helper()
		cmd := exec.Command(name, arg...)
		cmd.Env = append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_AGENT_SOCKET="+socket)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, cmd.Stderr)
		}
		return out
	}
	const rounds = 4
	out := run(build(t, "gcc", "testdata/claims_test.c", c11...), built(t, "build/functions/echo.so"), fmt.Sprintf("race:%d:%d", *claimClients, rounds))
	var leases, calls, cached int
	if _, err := fmt.Sscanf(string(out), "leases %d\ncalls %d\ncached %d", &leases, &calls, &cached); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	claims, _ := strconv.Atoi(gauge(t, metrics, "rfaas_executor_claims_total"))
	t.Logf("figure: claims.share = %.2f", float64(claims)/float64(leases))
	if leases != *claimClients*rounds || calls != 3*leases || claims < leases/10 || claims > cached {
		t.Errorf("%d leases of %d clients, %d calls, %d on cached workers, %d of them by claims", leases, *claimClients, calls, cached, claims)
	}
	eventually(t, "all cores are free", func() bool {
		return gauge(t, metrics, "rfaas_executor_free_cores") == "10" && gauge(t, metrics, "rfaas_executor_leases") == "0"
	})
	eventually(t, "the bill has every call", func() bool {
		var bill []struct {
			Lines []struct{ Item, Units string } `json:"lines"`
		}
		if err := json.Unmarshal(run(built(t, "bin/rfaas"), "bill", "--json"), &bill); err != nil {
			t.Fatal(err)
		}
		billed := 0
		for _, b := range bill {
			for _, l := range b.Lines {
				if strings.HasSuffix(l.Item, "-calls") {
					n, _ := strconv.Atoi(l.Units)
					billed += n
				}
			}
		}
		if billed > calls {
			t.Fatalf("%d calls are billed, want %d", billed, calls)
		}
		return billed == calls
	})
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
	c := lead(t, 1, reuse, env...)
	c.do("init", "session", "open", "calls 1", "release", "open", "calls 1")
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the claimed lease has ended", func() bool {
		text := metricsOf(t, listen)
		return strings.Contains(text, "\nrfaas_executor_claims_total 1\n") && strings.Contains(text, "\nrfaas_executor_leases 0\n") &&
			strings.Contains(text, "\nrfaas_executor_free_cores 2\n")
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

// A lease that is opened after a table was published has the table, although there are cached workers without it.
func TestClaimSeesTables(t *testing.T) {
	onNode(t)
	env, _, _ := agentCluster(t)
	c := leadWith(t, tableLibrary(t), 1, reuse, env...)
	c.do("init", "session", "open", "release", "table", "open", "look", "release", "open", "look", "release", "close", "finalize")
}
