package capi

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// tlsCluster starts a resource manager and an executor with TLS identities, and returns the environment of a user's clients, the
// agent's socket, the executor's address and the manager's address for metrics.
func tlsCluster(t *testing.T, args ...string) (env []string, socket, address, metrics string) {
	t.Helper()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for _, command := range [][]string{
		{"cluster", "init", "--dir", in("cluster")},
		{"cluster", "node", "localhost", "127.0.0.1", "--dir", in("cluster"), "--out", in("node")},
		{"token", "issue", "--tenant", "ann", "--dir", in("cluster"), "--out", in("token")},
	} {
		if out, err := exec.Command(built(t, "bin/rfaas"), command...).CombinedOutput(); err != nil {
			t.Fatalf("rfaas %v: %v\n%s", command, err, out)
		}
	}
	socket, metrics = in("agent.sock"), in("http")
	secret := in("secret") // of the daemons themselves; clients have a token
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--identity-dir", in("node"), "--secret-file", secret, "--heartbeat", "250ms",
		"--http-listen", "unix:"+metrics)
	address, _, _ = startProcess(t, secret, append([]string{"--identity-dir", in("node"), "--manager", manager, "--sandbox", "off"}, args...)...)
	t.Cleanup(func() { stopAgent(t, socket) })
	return []string{"RFAAS_EXECUTOR=", "RFAAS_MANAGER=" + manager, "RFAAS_TOKEN_FILE=" + in("token"), "RFAAS_AGENT_SOCKET=" + socket},
		socket, address, metrics
}

// connections returns the number of TCP connections that processes of this machine have made to an IPv4 address.
func connections(t *testing.T, address string) (n int) {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil || host != "127.0.0.1" {
		t.Fatalf("address %q (%v), want one of 127.0.0.1", address, err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	const established = "01"
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 3 && f[2] == fmt.Sprintf("0100007F:%04X", number) && f[3] == established {
			n++
		}
	}
	return n
}

// Many processes that start at once have one agent. It has one TLS connection to the executor and is attached to the board once.
func TestManyClientsOneAgent(t *testing.T) {
	crosses(t)
	const clients = 128
	const goRuntime = 17 // MB: resident memory of a client whose library was a Go runtime, measured before the agent existed
	env, socket, address, metrics := tlsCluster(t, "--share-cores", "64")
	eventually(t, "the executor is on the board", func() bool { return testkit.Metric(t, metrics, `rfaas_manager_executors{state="open"}`) == "1" })
	all := make([]*led, clients)
	for i := range all {
		all[i] = lead(t, 1, 0, env...)
	}
	for _, c := range all {
		c.say("init")
		c.say("session")
	}
	for _, c := range all {
		for _, line := range []string{"init", "session"} {
			if a := c.hear(line); a.status != 0 {
				t.Fatalf("%s: %d %s", line, a.status, a.text)
			}
		}
	}
	const together = 16 // leases that are opened at the same time: more can take longer than the sessions' time-out
	for _, line := range []string{"open", "calls 100"} {
		for some := range slices.Chunk(all, together) {
			for _, c := range some {
				c.say(line)
			}
			for _, c := range some {
				if a := c.hear(line); a.status != 0 {
					t.Fatalf("%s: %d %s", line, a.status, a.text)
				}
			}
		}
	}
	r := agentStatus(t, socket)
	var sum int64
	for _, c := range all {
		sum += memoryOf(t, c.cmd.Process.Pid)
	}
	t.Logf("%d clients with a lease have %.1f MiB (PSS) together, the agent %.1f MiB; as many Go runtimes took %d MB (RSS)", clients,
		float64(sum)/1024, float64(memoryOf(t, r.PID))/1024, clients*goRuntime)
	if len(r.Clients) != clients {
		t.Errorf("the agent has %d clients, want %d", len(r.Clients), clients)
	}
	if n := connections(t, address); r.Executors != 1 || n != 1 {
		t.Errorf("the agent has connections to %d executors, and there are %d to %s, want 1 and 1", r.Executors, n, address)
	}
	const subscribers = "rfaas_manager_subscribers"
	eventually(t, "the metrics show the agent", func() bool { n := testkit.Metric(t, metrics, subscribers); return n != "" && n != "0" })
	if n := testkit.Metric(t, metrics, subscribers); n != "1" {
		t.Errorf("%s clients are attached to the board, want 1", n)
	}
}
