package capi

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// attempts is how many agents a client starts in one attempt to reach one: RFAAS_AGENT_ATTEMPTS.
const attempts = 5

// endingAgent is an agent's program that ends before it answers its clients, while `on` is a file.
type endingAgent struct {
	t       *testing.T
	env, on string
	ended   string // has a line for each process that has ended
}

func newEndingAgent(t *testing.T) *endingAgent {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "agent")
	a := &endingAgent{t, "RFAAS_AGENT=" + program, filepath.Join(dir, "on"), filepath.Join(dir, "ended")}
	script := fmt.Sprintf("#!/bin/sh\n[ -e %s ] && sleep 0.02 && echo >> %s && exit 3\nexec %s \"$@\"\n", a.on, a.ended, built(t, "libexec/rfaas-agent"))
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return a
}

// begin has the next agents end.
func (a *endingAgent) begin() {
	a.t.Helper()
	if err := os.WriteFile(a.on, nil, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// finish waits until n agents have ended, and has the next ones work.
func (a *endingAgent) finish(n int) {
	a.t.Helper()
	eventually(a.t, fmt.Sprintf("%d agents have ended at once", n), func() bool {
		lines, _ := os.ReadFile(a.ended)
		return len(lines) >= n
	})
	if err := os.Remove(a.on); err != nil {
		a.t.Fatal(err)
	}
}

// An agent is killed, and the next ones end before they have answered the client. The client goes on trying to reach an agent while it only makes
// calls, so its lease does not end.
func TestAgentEndsWhileItIsReached(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	agent := newEndingAgent(t)
	c := lead(t, 1, 0, append(env, agent.env)...)
	c.do("init", "session", "open", "calls 100")
	agent.begin()
	c.say("until")
	if !c.out.Scan() || c.out.Text() != "calling" {
		t.Fatalf("%q\n%s", c.out.Text(), c.error.String())
	}
	if err := syscall.Kill(agentStatus(t, socket).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	agent.finish(attempts + 1)
	eventually(t, "an agent holds the lease", func() bool {
		out, err := agentCommand(t, socket, "status", "--json") // an error while none listens
		var r agentReport
		return err == nil && json.Unmarshal(out, &r) == nil && len(r.Clients) == 1 && r.Clients[0].Leases == 1
	})
	c.say("renew")
	if calls, renewed := c.hear("until"), c.hear("renew"); calls.status != 0 || renewed.status != 0 {
		t.Fatalf("calls: %d %s, renew: %d %s", calls.status, calls.text, renewed.status, renewed.text)
	}
	c.do("release", "close")
}

// Calls that were given up occupy all slots of a worker. The worker is stopped and then killed, the agent too, and the next agents end before they have
// answered. The program only starts calls, which return RFAAS_BUSY until the client notices the death. Then they get another worker.
func TestBusyWithoutAgent(t *testing.T) {
	crosses(t)
	for _, how := range []string{"cancel", "deadline"} {
		t.Run(how, func(t *testing.T) {
			env, socket, _ := agentCluster(t)
			agent := newEndingAgent(t)
			c := lead(t, 1, 0, append(env, agent.env)...)
			c.do("init", "session", "open", "calls 100")
			var worker int
			if _, err := fmt.Sscanf(strings.TrimLeft(c.ask("who").text, "0123456789"), ":%d", &worker); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(worker, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			c.do("fill " + how)
			agent.begin()
			if err := syscall.Kill(agentStatus(t, socket).PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			c.say("again")
			agent.finish(attempts)
			a := c.hear("again")
			if a.status != 0 {
				t.Fatalf("status %d after %v: %s", a.status, a.took, a.text)
			}
			t.Logf("the next call succeeded after %v", a.took.Round(time.Millisecond))
			c.do("calls 100", "renew", "release", "close")
		})
	}
}
