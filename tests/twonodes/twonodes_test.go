package twonodes

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

const (
	clientAddress   = "10.79.0.1"
	executorAddress = "10.79.0.2"
)

// nodes are two network namespaces that a veth pair connects.
type nodes struct {
	*testing.T
	client, executor string // names of the namespaces
	env              []string
	dir              string
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

func newNodes(t *testing.T) *nodes {
	t.Helper()
	n := &nodes{T: t, client: fmt.Sprintf("rfaas-c%d", os.Getpid()), executor: fmt.Sprintf("rfaas-e%d", os.Getpid()), dir: t.TempDir()}
	for _, ns := range []string{n.client, n.executor} {
		run(t, "ip", "netns", "add", ns)
		t.Cleanup(func() { run(t, "ip", "netns", "delete", ns) })
		run(t, "ip", "-n", ns, "link", "set", "lo", "up")
	}
	run(t, "ip", "link", "add", "cable", "netns", n.client, "type", "veth", "peer", "name", "cable", "netns", n.executor)
	run(t, "ip", "-n", n.client, "address", "add", clientAddress+"/24", "dev", "cable")
	run(t, "ip", "-n", n.executor, "address", "add", executorAddress+"/24", "dev", "cable")
	run(t, "ip", "-n", n.executor, "link", "set", "cable", "up")
	n.link(true)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RFAAS_") {
			n.env = append(n.env, kv)
		}
	}
	n.env = append(n.env, "RFAAS_SECRET_FILE="+filepath.Join(n.dir, "secret"), "RFAAS_ALLOW_PLAINTEXT=1")
	return n
}

// link sets the link between the nodes up or down.
func (n *nodes) link(up bool) {
	n.Helper()
	state := "down"
	if up {
		state = "up"
	}
	run(n.T, "ip", "-n", n.client, "link", "set", "cable", state)
}

// start starts a program on a node. line gets each line of its output. The program is killed at the end of the test.
func (n *nodes) start(node string, line func(string), program string, args ...string) *exec.Cmd {
	n.Helper()
	path, err := filepath.Abs(filepath.Join("../..", program))
	if err != nil {
		n.Fatal(err)
	}
	c := exec.Command("ip", append([]string{"netns", "exec", node, path}, args...)...) // ip becomes the program
	c.Env = n.env
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r, w, err := os.Pipe()
	if err != nil {
		n.Fatal(err)
	}
	c.Stdout, c.Stderr = w, w
	err = c.Start()
	w.Close()
	if err != nil {
		n.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer r.Close()
		for s := bufio.NewScanner(r); s.Scan(); {
			line(s.Text())
		}
	}()
	n.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		stop := time.AfterFunc(20*time.Second, func() { _ = c.Process.Kill() })
		_ = c.Wait()
		stop.Stop()
		<-read
	})
	return c
}

// startExecutor starts an executor that offers tcp, waits until it is ready, and sets RFAAS_EXECUTOR for later programs.
func (n *nodes) startExecutor(settings ...string) {
	n.Helper()
	file := filepath.Join(n.dir, "address")
	n.start(n.executor, func(s string) { n.Log("executor: " + s) }, "bin/executor", append([]string{"--listen", executorAddress + ":0", "--address-file", file,
		"--cores", "2", "--providers", "shm,tcp", "--data-listen", "0.0.0.0:7200-7299", "--data-advertise", executorAddress, "--grace", "1s",
		"--allow-plaintext"}, settings...)...)
	testkit.Eventually(n, "the executor is ready", func() bool {
		b, err := os.ReadFile(file)
		if err == nil && len(b) > 0 {
			n.env = append(n.env, "RFAAS_EXECUTOR="+strings.TrimSpace(string(b)))
		}
		return err == nil && len(b) > 0
	})
}

// caller is a program that calls a function again and again, and checks each result (tests/faults/testdata/caller.c).
type caller struct {
	n     *nodes
	right atomic.Int64
	wrong atomic.Int64
	lost  atomic.Int64 // calls that ended with an error
}

func (n *nodes) startCaller() *caller {
	n.Helper()
	n.startAgent()
	library, err := filepath.Abs("../../build/faults/work.so")
	if err != nil {
		n.Fatal(err)
	}
	c := &caller{n: n}
	n.start(n.client, c.line, "build/faults/caller", "steady", library, "7", "100000", "2000", "0", "3000")
	return c
}

// startAgent starts the agent of the client's node, which later programs use.
func (n *nodes) startAgent() {
	n.Helper()
	socket := filepath.Join(n.dir, "agent.sock")
	n.start(n.client, func(s string) { n.Log("agent: " + s) }, "libexec/rfaas-agent", "--socket", socket)
	testkit.Eventually(n, "the agent listens", func() bool { _, err := os.Stat(socket); return err == nil })
	n.env = append(n.env, "RFAAS_AGENT_SOCKET="+socket, "RFAAS_AGENT_START=never")
}

// rfaas runs `rfaas` on the client's node until it ends, and returns what it prints.
func (n *nodes) rfaas(args ...string) (output string, err error) {
	n.Helper()
	path, err := filepath.Abs("../../bin/rfaas")
	if err != nil {
		n.Fatal(err)
	}
	c := exec.Command("ip", append([]string{"netns", "exec", n.client, path}, args...)...)
	c.Env = n.env
	out, err := c.CombinedOutput()
	return string(out), err
}

func (c *caller) line(s string) {
	word, rest, _ := strings.Cut(s, " ")
	switch word {
	case "ok":
		var right int64
		if _, err := fmt.Sscan(rest, &right); err == nil {
			c.right.Store(right)
		}
	case "ready":
	case "err":
		c.lost.Add(1)
		c.n.Log("caller: " + s)
	case "end":
		c.n.Log("caller: " + s)
	default:
		c.wrong.Add(1)
		c.n.Log("caller: " + s)
	}
}

// served waits until the caller has received `more` further right results.
func (c *caller) served(more int64) {
	c.n.Helper()
	before := c.right.Load()
	testkit.Eventually(c.n, fmt.Sprintf("%d more right results after %d", more, before), func() bool { return c.right.Load() >= before+more })
	if n := c.wrong.Load(); n > 0 {
		c.n.Fatalf("%d wrong results", n)
	}
}

// A client calls workers on another node over Ethernet. A short outage of the link makes no call fail. In a long outage calls fail with an
// error. When the link is up again, calls succeed again.
func TestCallsBetweenNodes(t *testing.T) {
	n := newNodes(t)
	n.startExecutor()
	c := n.startCaller()
	c.served(200)
	for _, outage := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, time.Second} {
		n.link(false)
		time.Sleep(outage) // the length of the outage
		n.link(true)
		c.served(50)
	}
	if lost := c.lost.Load(); lost > 0 {
		t.Errorf("%d calls failed because of short outages", lost)
	}
	n.link(false)
	testkit.Eventually(t, "a call fails while the cable is out", func() bool { return c.lost.Load() > 0 })
	n.link(true)
	c.served(100)
}

// A client does not connect to its own node when an executor on another node says that its workers are there.
func TestLoopbackOfAnotherNode(t *testing.T) {
	for _, named := range []string{"127.0.0.1", clientAddress} {
		t.Run(named, func(t *testing.T) {
			n := newNodes(t)
			n.startExecutor("--data-advertise", named)
			n.startAgent()
			out, err := n.rfaas("invoke", "../../build/functions/echo.so", "echo", "--hex", "01")
			if err == nil || !strings.Contains(out, "names "+named+":72") || !strings.Contains(out, "set data-advertise") {
				t.Errorf("%v, %s", err, out)
			}
		})
	}
}
