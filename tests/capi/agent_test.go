package capi

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// agentKills is how often tests kill an agent and clients.
var agentKills = flag.Int("agent-kills", 5, "how often tests kill an agent, and clients of one")

// led is a client process that does what the test says (testdata/agent_test.c).
type led struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Scanner
	error strings.Builder
}

// answer is what it says of one line.
type answer struct {
	status  int
	took    time.Duration
	longest time.Duration // of the calls
	median  time.Duration // of the first of them
	text    string
}

// agentProgram compiles testdata/agent_test.c.
func agentProgram(t *testing.T) string {
	t.Helper()
	return build(t, "gcc", "testdata/agent_test.c", c11...)
}

// lead starts a client with an environment of its own (later values win).
func lead(t *testing.T, workers, flags int, env ...string) *led {
	t.Helper()
	return leadWith(t, built(t, "build/functions/echo.so"), workers, flags, env...)
}

// leadWith is lead with another library of functions.
func leadWith(t *testing.T, library string, workers, flags int, env ...string) *led {
	t.Helper()
	return leadBy(t, exec.Command(agentProgram(t), library, strconv.Itoa(workers), strconv.Itoa(flags)), env...)
}

// leadBy starts a client by a command.
func leadBy(t *testing.T, cmd *exec.Cmd, env ...string) *led {
	t.Helper()
	c := &led{t: t, cmd: cmd}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr = &c.error
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.in.Close()
		c.cmd.Process.Kill()
		c.cmd.Wait()
	})
	return c
}

// say gives it a line without waiting for the answer.
func (c *led) say(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		c.t.Fatalf("%s: %v\n%s", line, err, c.error.String())
	}
}

// hear waits for the answer to a line.
func (c *led) hear(line string) (a answer) {
	c.t.Helper()
	if !c.out.Scan() {
		c.t.Fatalf("%s: the client has ended\n%s", line, c.error.String())
	}
	fields := strings.SplitN(c.out.Text(), " ", 3)
	a.status, _ = strconv.Atoi(fields[0])
	ms, _ := strconv.ParseFloat(fields[1], 64)
	a.took, a.text = time.Duration(ms*1e6), fields[2]
	if strings.HasPrefix(line, "calls") || line == "until" {
		times := strings.SplitN(a.text, " ", 3)
		longest, _ := strconv.ParseFloat(times[0], 64)
		median, _ := strconv.ParseFloat(times[1], 64)
		a.longest, a.median, a.text = time.Duration(longest*1e3), time.Duration(median*1e3), times[2]
	}
	return a
}

func (c *led) ask(line string) answer {
	c.t.Helper()
	c.say(line)
	return c.hear(line)
}

// do has it do these things, each of which must succeed.
func (c *led) do(lines ...string) {
	c.t.Helper()
	for _, line := range lines {
		if a := c.ask(line); a.status != 0 {
			c.t.Fatalf("%s: status %d: %s", line, a.status, a.text)
		}
	}
}

// cluster starts an executor with more arguments and an agent's socket, and returns the environment of its clients and the
// executor's address.
func agentCluster(t *testing.T, args ...string) (env []string, socket, address string) {
	t.Helper()
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	socket = filepath.Join(dir, "agent.sock")
	address = startExecutor(t, secret, args...)
	t.Cleanup(func() { stopAgent(t, socket) })
	return []string{"RFAAS_EXECUTOR=" + address, "RFAAS_MANAGER=", "RFAAS_SECRET_FILE=" + secret, "RFAAS_AGENT_SOCKET=" + socket}, socket, address
}

// agentReport is what `rfaas agent status --json` says, as far as tests want to know.
type agentReport struct {
	PID     int `json:"pid"`
	Clients []struct {
		PID    int `json:"pid"`
		Leases int `json:"leases"`
	} `json:"clients"`
	Executors int `json:"executors"`
	Cached    []struct {
		Executor string `json:"executor"`
		Library  string `json:"library"`
		Workers  int    `json:"workers"`
		Shared   bool   `json:"shared"`
		Orphaned bool   `json:"orphaned"`
		Spare    bool   `json:"spare"`
	} `json:"cached_leases"`
	Held int `json:"held_descriptors"`
}

// agentStatus asks the agent at a socket.
func agentStatus(t *testing.T, socket string) (r agentReport) {
	t.Helper()
	out, err := agentCommand(t, socket, "status", "--json")
	if err != nil {
		t.Fatalf("rfaas agent status: %v\n%s", err, out)
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return r
}

func agentCommand(t *testing.T, socket string, args ...string) ([]byte, error) {
	t.Helper()
	cmd := exec.Command(built(t, "bin/rfaas"), append([]string{"agent"}, args...)...)
	cmd.Env = append(os.Environ(), "RFAAS_AGENT_SOCKET="+socket)
	return cmd.CombinedOutput()
}

// stopAgent ends the agent at a socket, if there is one, and waits until it has gone.
func stopAgent(t *testing.T, socket string) {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return
	}
	conn.Close()
	if out, err := agentCommand(t, socket, "stop"); err != nil {
		t.Errorf("rfaas agent stop: %v\n%s", err, out)
	}
}

// A process with a lease has no thread and no signal handler of the library's, and little of its memory, on shm and on tcp.
func TestClientAddsLittle(t *testing.T) {
	crosses(t)
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) {
			env, _, _ := agentCluster(t, "--providers", provider)
			clientAddsLittle(t, provider, append(env, "RFAAS_PROVIDER="+provider))
		})
	}
}

func clientAddsLittle(t *testing.T, provider string, env []string) {
	c := lead(t, 1, 0, env...)
	self := func() (threads, handlers, rss int64) {
		c.say("self")
		if !c.out.Scan() {
			t.Fatalf("the client has ended\n%s", c.error.String())
		}
		if _, err := fmt.Sscanf(c.out.Text(), "%d %x %d", &threads, &handlers, &rss); err != nil {
			t.Fatal(err)
		}
		return threads, handlers, rss
	}
	threads, handlers, before := self()
	c.do("init", "session", "open", "calls 1000")
	nowThreads, nowHandlers, after := self()
	t.Logf("figure: client.rss_kib.%s = %d", provider, after-before)
	if nowThreads != threads || nowHandlers != handlers {
		t.Errorf("%d threads and handlers %x with a lease, %d and %x without", nowThreads, nowHandlers, threads, handlers)
	}
	const most = 2<<10 + 768 // KiB: what is promised, and this lease's channel
	if grown := after - before; grown > most {
		t.Errorf("a lease has added %d KiB, want at most %d", grown, most)
	}
}

// TestFirstResult measures the time from a program's start to its first result, and that of its first contact with the agent. The agent knows the functions and has a spare lease, as after two programs.
func TestFirstResult(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	program := build(t, "gcc", "testdata/first.c", c11...)
	first := func() (result, contact time.Duration) {
		cmd := exec.Command(program, built(t, "build/functions/echo.so"))
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		_, scan := fmt.Sscan(string(out), &result, &contact)
		if err := errors.Join(err, scan); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return result * time.Microsecond, contact * time.Microsecond
	}
	first()
	first()
	programs := 5
	if os.Getenv("RFAAS_TEST_FIGURES") != "" {
		programs = 200
	}
	var times, contacts []time.Duration
	for range programs {
		testkit.Eventually(t, "a spare lease is ready", func() bool {
			report := agentStatus(t, socket)
			return report.spare() > 0
		})
		result, contact := first()
		times, contacts = append(times, result), append(contacts, contact)
	}
	t.Logf("figure: client.first_result_ms = %.2f", milliseconds(median(times)))
	t.Logf("figure: client.first_contact_ms = %.2f", milliseconds(median(contacts)))
}

// When the agent is killed, calls go on, the lease is handed to the next agent, and control operations work again.
func TestAgentKilled(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t, "--agent-grace", "2s") // the client that does not return stays connected to its worker
	c := lead(t, 1, 0, env...)
	c.do("init", "session", "open", "calls 100")
	var last int
	var gaps, longest []time.Duration
	for i := range *agentKills {
		pid := agentStatus(t, socket).PID
		if pid == last {
			t.Fatalf("round %d: the agent %d was killed and answers", i, pid)
		}
		last = pid
		if i == *agentKills-1 { // a client that does not return
			stopped := lead(t, 1, 0, env...)
			stopped.do("init", "session", "open")
			if err := stopped.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
		}
		c.say("until")
		if !c.out.Scan() || c.out.Text() != "calling" {
			t.Fatalf("round %d: %q\n%s", i, c.out.Text(), c.error.String())
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		killed := time.Now()
		eventually(t, "another agent holds the lease", func() bool {
			out, err := agentCommand(t, socket, "status", "--json") // an error while none listens
			var r agentReport
			if err != nil || json.Unmarshal(out, &r) != nil {
				return false
			}
			return r.PID != pid && len(r.Clients) == 1 && r.Clients[0].Leases == 1
		})
		gaps = append(gaps, time.Since(killed))
		c.say("renew")
		calls, renewed := c.hear("until"), c.hear("renew")
		if calls.status != 0 || renewed.status != 0 {
			t.Fatalf("round %d: calls: %d %s, renew: %d %s", i, calls.status, calls.text, renewed.status, renewed.text)
		}
		longest = append(longest, calls.longest)
	}
	t.Logf("figure: agent.killed_gap_ms = %.1f", milliseconds(slices.Max(gaps)))
	t.Logf("until another agent held the lease: median %v, longest %v; longest call %v", median(gaps), slices.Max(gaps), slices.Max(longest))
	next := lead(t, 1, 0, env...)
	next.do("init", "session")
	eventually(t, "the executor ends the lease of the client that does not return", func() bool { return next.ask("open").status == 0 })
	c.do("calls 1000", "renew", "release", "close")
}

// When the agent is stopped, calls go on, and control operations end in time with an error that says what to look at.
func TestAgentStopped(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	c := lead(t, 1, 0, env...)
	c.do("init", "session", "open", "calls 100")
	pid := agentStatus(t, socket).PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Kill(pid, syscall.SIGCONT) })
	c.do("calls 10000")
	if a := c.ask("renew"); a.status == 0 || !strings.Contains(a.text, "agent") || a.took > 15*time.Second {
		t.Errorf("renew with a stopped agent: status %d after %v: %s", a.status, a.took, a.text)
	}
	c.do("strand")
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	c.do("join")
	eventually(t, "the agent has given up the lease whose release did not reach it", func() bool {
		r := agentStatus(t, socket)
		return len(r.Clients) == 1 && r.Clients[0].Leases == 0
	})
	c.do("open")
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if a := c.ask("flood"); a.status != 0 {
		t.Errorf("fork() waits for a thread that waits for room in the agent's socket: status %d after %v", a.status, a.took)
	}
	c.do("calls 1000")
}

// TestAgentStoppedWithoutWorker kills the only worker while the agent is stopped. A call with repeats asks the agent for a new worker. The agent does not
// answer, so the library asks again. Then the agent continues.
func TestAgentStoppedWithoutWorker(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	c := lead(t, 1, 0, env...)
	c.do("init", "session", "open", "calls 100")
	agent := agentStatus(t, socket).PID
	worker, err := strconv.Atoi(c.who().pid)
	if err = errors.Join(err, syscall.Kill(agent, syscall.SIGSTOP)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Kill(agent, syscall.SIGCONT) })
	if err := syscall.Kill(worker, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if a := c.ask(fmt.Sprintf("resume %d", agent)); a.status != 0 {
		t.Errorf("a call that may be repeated: status %d after %v: %s", a.status, a.took, a.text)
	}
	c.do("calls 100", "release", "close", "finalize")
}

// When a client is killed its lease is released at once.
func TestClientKilled(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t, "--cores", "1")
	next := lead(t, 1, 0, env...)
	next.do("init", "session")
	var free []time.Duration
	for range *agentKills {
		c := lead(t, 1, 0, env...)
		c.do("init", "session", "open", "calls 10")
		if a := next.ask("open"); a.status != -100 {
			t.Fatalf("a second lease on one core: status %d %s", a.status, a.text)
		}
		c.cmd.Process.Kill()
		killed := time.Now()
		eventually(t, "the core is free", func() bool { return next.ask("open").status == 0 })
		free = append(free, time.Since(killed))
		c.cmd.Wait()
		next.do("calls 10", "release")
	}
	slices.Sort(free)
	t.Logf("figure: client.killed_free_p95_ms = %.1f", milliseconds(free[(len(free)-1)*95/100]))
	if n := len(agentStatus(t, socket).Clients); n != 1 {
		t.Errorf("the agent has %d clients, want 1", n)
	}
}

// What may be wrong with the agent's socket, program and directory gives an error that names it.
func TestAgentOutOfReach(t *testing.T) {
	crosses(t)
	env, _, _ := agentCluster(t)
	env = slices.DeleteFunc(env, func(v string) bool { return strings.HasPrefix(v, "RFAAS_AGENT_SOCKET=") })
	refused := func(name, word string, more ...string) {
		t.Run(name, func(t *testing.T) {
			c := lead(t, 1, 0, append(slices.Clone(env), more...)...)
			c.do("init")
			if a := c.ask("session"); a.status == 0 || !strings.Contains(a.text, word) || a.took > 15*time.Second {
				t.Errorf("status %d after %v: %q, want one that names %q", a.status, a.took, a.text, word)
			}
		})
	}
	dir := t.TempDir()
	refused("no program", "RFAAS_AGENT", "RFAAS_AGENT_SOCKET="+dir+"/a.sock", "RFAAS_AGENT="+dir+"/none")
	refused("not to be started", "RFAAS_AGENT_START", "RFAAS_AGENT_SOCKET="+dir+"/b.sock", "RFAAS_AGENT_START=never")
	refused("path too long", "RFAAS_AGENT_SOCKET", "RFAAS_AGENT_SOCKET="+dir+"/"+strings.Repeat("x", 120))
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("a file", "is not a socket", "RFAAS_AGENT_SOCKET="+file)
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	refused("no directory", "RFAAS_AGENT_SOCKET", "RFAAS_AGENT_SOCKET="+dir+"/none/a.sock")
	open := t.TempDir()
	if err := os.Chmod(open, 0o1777); err != nil {
		t.Fatal(err)
	}
	refused("directory of all", "others can write", "RFAAS_AGENT_SOCKET="+open+"/a.sock")
	program := filepath.Join(dir, "ends")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexit 3\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	refused("program that ends", "ended", "RFAAS_AGENT_SOCKET="+dir+"/c.sock", "RFAAS_AGENT="+program)

	t.Run("runtime directory of others", func(t *testing.T) {
		runtime := t.TempDir()
		if err := os.Mkdir(filepath.Join(runtime, "rfaas"), 0o755); err != nil {
			t.Fatal(err)
		}
		os.Chmod(filepath.Join(runtime, "rfaas"), 0o777)
		c := lead(t, 1, 0, append(slices.Clone(env), "XDG_RUNTIME_DIR="+runtime, "HOME=")...)
		c.do("init", "session", "open", "calls 10") // by /tmp
		entries, err := os.ReadDir(filepath.Join(runtime, "rfaas"))
		if err != nil || len(entries) != 0 {
			t.Errorf("%v, %v in a directory that everybody may write to", entries, err)
		}
		c.do("release", "close", "finalize")
		socket, err := agent.Path(func(string) string { return "" })
		if err != nil {
			t.Fatal(err)
		}
		stopAgent(t, socket)
	})
	t.Run("stale socket", func(t *testing.T) {
		socket := filepath.Join(t.TempDir(), "agent.sock")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
		t.Cleanup(func() { stopAgent(t, socket) })
		lead(t, 1, 0, append(slices.Clone(env), "RFAAS_AGENT_SOCKET="+socket)...).do("init", "session", "open", "calls 10", "release")
	})
	t.Run("silent agent", func(t *testing.T) {
		socket := filepath.Join(t.TempDir(), "agent.sock")
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		refusedAt := lead(t, 1, 0, append(slices.Clone(env), "RFAAS_AGENT_SOCKET="+socket)...)
		refusedAt.do("init")
		if a := refusedAt.ask("session"); a.status == 0 || !strings.Contains(a.text, "hello") || a.took > 25*time.Second {
			t.Errorf("status %d after %v: %s", a.status, a.took, a.text)
		}
	})
}

// memoryOf returns a process's share of memory (PSS) in KiB.
func memoryOf(t *testing.T, pid int) (kib int64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "Pss:"); ok {
			kib, _ = strconv.ParseInt(strings.Fields(value)[0], 10, 64)
		}
	}
	return kib
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func median(d []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(d))
	return sorted[len(sorted)/2]
}

// eventually waits for a state that has no event.
var eventually = testkit.Eventually

// A program finalizes the library and initialises it again. When the agent is killed then, the library does not touch the leases of the time before.
func TestAgentKilledAfterFinalize(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	c := lead(t, 1, 0, env...)
	c.do("init", "session", "open", "calls 1", "release", "close", "finalize", "init", "session")
	if err := syscall.Kill(agentStatus(t, socket).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.do("open", "calls 1", "release", "close", "finalize")
}
