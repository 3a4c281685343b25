package faults

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Two nodes without virtual machines: two network namespaces, which a veth pair connects. Calls use provider tcp: `make test-tcp`.

const (
	serverAddress = "10.79.0.2"
	clientAddress = "10.79.0.1"
)

// nodes is a world with two nodes. Clients and their agent are on the node world.client.
type nodes struct {
	*world
	server    machine   // of the resource manager and the executors
	downUntil time.Time // when the storm sets the link up again; zero: the link is up
}

// newNodes makes two nodes without TLS, which end with the test process.
func newNodes(t *testing.T) *nodes {
	n := newCable(t)
	n.trust()
	n.startAgent()
	return n
}

// newCable is newNodes without settings for control messages and without an agent.
func newCable(t *testing.T) *nodes {
	testkit.Root(t, "makes network namespaces")
	n := &nodes{world: newWorld(t), server: machine{namespace: newNamespace(t), ip: serverAddress}}
	n.client = machine{namespace: newNamespace(t), ip: clientAddress}
	n.ip(n.client, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", n.server.namespace)
	for _, m := range []machine{n.client, n.server} {
		n.ip(m, "link", "set", "lo", "up")
		n.ip(m, "address", "add", m.ip+"/24", "dev", "cable")
		n.ip(m, "link", "set", "cable", "up")
	}
	n.env = append(n.env, "RFAAS_PROVIDER=auto")
	return n
}

// trust turns TLS off on both nodes.
func (n *nodes) trust() {
	n.apart = true
	n.env = append(n.env, "RFAAS_ALLOW_PLAINTEXT=1")
}

// identify gives the daemons of both nodes an identity and the client a token, so control connections use TLS.
func (n *nodes) identify() {
	n.Helper()
	cluster, node, token := filepath.Join(n.dir, "cluster"), filepath.Join(n.dir, "node"), filepath.Join(n.dir, "token")
	for _, args := range [][]string{{"cluster", "init", "--dir", cluster}, {"cluster", "node", n.server.ip, n.client.ip, "--dir", cluster, "--out", node},
		{"token", "issue", "--dir", cluster, "--tenant", "ann", "--out", token}} {
		if out, err := exec.Command(built(n, "bin/rfaas"), args...).CombinedOutput(); err != nil {
			n.Fatalf("rfaas %q: %v\n%s", args, err, out)
		}
	}
	n.env = append(n.env, "RFAAS_TOKEN_FILE="+token, "RFAAS_EXECUTOR_IDENTITY_DIR="+node, "RFAAS_MANAGER_IDENTITY_DIR="+node)
}

// startAgent starts the agent of the clients' node with the present settings.
func (n *nodes) startAgent() {
	n.env = append(n.env, n.newAgent(), "RFAAS_AGENT_START=never")
}

// newNamespace makes a network namespace and returns its file, which belongs to this process.
func newNamespace(t *testing.T) string {
	t.Helper()
	runtime.LockOSThread() // stays locked, and ends with this goroutine, unless the thread returns to its namespace
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	made, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { made.Close() })
	if err := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); err != nil {
		t.Fatalf("return from the network namespace: %v", err)
	}
	runtime.UnlockOSThread()
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), made.Fd())
}

// ip runs the program ip on a node.
func (n *nodes) ip(on machine, args ...string) {
	n.Helper()
	program, args := on.command(n.world, nil, "ip", args)
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		n.Fatalf("%s %q: %v\n%s", program, args, err, out)
	}
}

// link sets the link between the nodes up or down.
func (n *nodes) link(up bool) {
	n.Helper()
	state := map[bool]string{false: "down", true: "up"}[up]
	n.ip(n.client, "link", "set", "cable", state)
}

// flap takes the link down for 0.1 s to the longest time, each order of magnitude equally often. The storm's pass sets it up again.
func (s *storm) flap() {
	const shortest = 0.1
	d := time.Duration(shortest * math.Pow(longestFlapFlag.Seconds()/shortest, s.Float64()) * float64(time.Second))
	s.nodes.link(false)
	s.nodes.downUntil = time.Now().Add(d)
	s.flaps++
	s.down += d
}

// linkLeft is how much longer the link will be down, 0 while it is up.
func (s *storm) linkLeft() time.Duration {
	if s.nodes == nil || s.nodes.downUntil.IsZero() {
		return 0
	}
	return max(time.Until(s.nodes.downUntil), 1)
}

// mendLink sets the link up after downUntil.
func (s *storm) mendLink() {
	if s.nodes != nil && !s.nodes.downUntil.IsZero() && time.Now().After(s.nodes.downUntil) {
		s.nodes.link(true)
		s.nodes.downUntil = time.Time{}
	}
}

// The storm of TestRandomKills, with the clients on one node and everything else on another, and a link that also fails.
func TestBetweenNodesRandomKills(t *testing.T) {
	if testing.Short() {
		t.Skip("kills for a while")
	}
	n := newNodes(t)
	s := newStorm(t, n.world, "nodes")
	s.nodes, s.server, s.wantFlaps = n, n.server, *flapsFlag
	s.run()
}

// A short outage of the link between two nodes makes no call fail. In a long outage calls fail with a named error. When the link is up
// again, the client is served again, and the executor has kept nothing of the lost lease.
func TestBetweenNodesLinkOutages(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for what falls silent")
	}
	t.Parallel()
	n := newNodes(t)
	p := newPairIn(n.world, "c", n.server, n.server, n.client)
	second := p.newCaller(callerOptions{language: "go", steady: true, seed: 2, maxBytes: 4096, pause: 20 * time.Millisecond, timeout: callerBound,
		on: n.client})
	p.ready(second)
	callers := []*caller{p.caller, second}
	for _, outage := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, time.Second} {
		began := time.Now()
		n.link(false)
		time.Sleep(outage)
		n.link(true)
		down := time.Since(began)
		for _, c := range callers {
			p.served(c, waitBound)
			if failed := c.failures(); len(failed) > 0 && down < 1500*time.Millisecond { // longer on a busy machine
				t.Errorf("an outage of %v made a call of %s fail: %+v", down, c.name, failed)
			}
		}
	}
	n.link(false)
	hit := time.Now()
	for _, c := range callers {
		e := p.fails(c, hit, lost, client.StatusPeerGone, statusConnection, client.StatusWorkerDied)
		if !e.started {
			t.Errorf("a call that was running is not said to have started: %s", e.text)
		}
	}
	n.link(true)
	for _, c := range callers {
		t.Logf("%s is served again %v after the link was back", c.name, p.served(c, recoverBound).Round(time.Millisecond))
		r := c.finish(waitBound)
		if d := time.Duration(max(r.CallNS, r.ControlNS)); d > waitBound {
			t.Errorf("caller %s waited %v", c.name, d)
		}
	}
	p.free(waitBound)
}

// The programs of TestProgramsAcrossMachines between two nodes: the tests of the C API, C++ and Fortran, and the MPI examples.
func TestBetweenNodesPrograms(t *testing.T) {
	t.Parallel()
	n := newNodes(t)
	n.programs(n.server, "tcp")
}

// A client does not connect to an address of its own node, if an executor on another node names that address for its workers. The
// executor itself refuses to name a loopback address.
func TestBetweenNodesLoopback(t *testing.T) {
	n := newNodes(t)
	d := n.newExecutorOn(n.server, "executor", "--data-advertise", clientAddress)
	n.env = append(n.env, "RFAAS_EXECUTOR="+d.address)
	out, err := n.rfaas("invoke", built(n, "build/functions/echo.so"), "echo", "--hex", "01")
	if err == nil || !strings.Contains(out, "names "+clientAddress+":72") || !strings.Contains(out, "set data-advertise") {
		t.Errorf("%v, %s", err, out)
	}
	out, _ = n.rfaas("doctor")
	if !strings.Contains(out, "its data address "+clientAddress+":72") || !strings.Contains(out, "the executor is on another node") {
		t.Errorf("the doctor says nothing of it: %s", out)
	}
}

// The manager is on one node, an executor and a client on the other. The executor reports, and the client finds it, by the manager's memory
// over tcp. After an outage of the link both do so again.
func TestBetweenNodesMemory(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("waits for what falls silent")
	}
	n := newNodes(t)
	n.newManagerOn(n.server, "--heartbeat", "250ms")
	d := n.newExecutorOn(n.client, "executor")
	said := func(text string, times int) func() bool {
		return func() bool { return strings.Count(d.log.tail(1<<20), text) >= times }
	}
	listed := func() bool {
		out, err := n.rfaas("executors", "--json")
		n.lastly = out
		return err == nil && strings.Contains(out, `"by": "memory"`) && strings.Contains(out, `"state": "idle"`)
	}
	n.eventually(waitBound, "the executor has registered over tcp", said("by=memory provider=tcp", 1))
	n.eventually(waitBound, "the executor is on the board", listed)
	n.link(false)
	n.eventually(waitBound, "the executor loses the memory while the link is down", said("memory cannot be reached any more", 1))
	if listed() {
		t.Error("the executor is found while the link is down")
	}
	n.link(true)
	n.eventually(recoverBound, "the executor has registered over tcp again", said("by=memory provider=tcp", 2))
	n.eventually(waitBound, "the executor is on the board again", listed)
}

// A data port that does not answer, as behind a firewall, makes the client ask another executor. Without another one, the error says why.
func TestBetweenNodesSilentDataPort(t *testing.T) {
	t.Parallel()
	n := newNodes(t)
	n.newManagerOn(n.server)
	const nobody = "10.79.0.99" // no node has this address
	n.newExecutorOn(n.server, "unreachable", "--data-advertise", nobody)
	invoke := func() bool {
		out, err := n.rfaas("invoke", built(n, "build/functions/echo.so"), "echo", "--hex", "01")
		n.lastly = out
		return err == nil
	}
	n.eventually(waitBound, "the executor is asked", func() bool {
		if invoke() {
			t.Fatalf("there is a lease: %s", n.lastly)
		}
		return !strings.Contains(n.lastly, "knows no executor")
	})
	for _, word := range []string{"cannot connect to its workers", nobody, "data-listen"} {
		if !strings.Contains(n.lastly, word) {
			t.Errorf("the error does not contain %q: %s", word, n.lastly)
		}
	}
	n.newExecutorOn(n.server, "reachable")
	n.eventually(waitBound, "the other executor grants a lease", invoke)
}

// rfaas runs `rfaas` on the client's node until it ends, and returns what it prints.
func (n *nodes) rfaas(args ...string) (output string, err error) {
	n.Helper()
	program, args := n.client.command(n.world, nil, built(n, "bin/rfaas"), args)
	c := exec.Command(program, args...)
	c.Env = n.env
	out, err := c.CombinedOutput()
	return string(out), err
}
