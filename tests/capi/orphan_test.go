package capi

import (
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"
)

// returnPatience is the client-return of these tests' executors: how long they wait for a client that is not connected to its worker.
const returnPatience = 200 * time.Millisecond

// A process that does nothing in the library keeps its lease when its agent is killed.
func TestLeaseOutlivesItsAgent(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t, "--client-return", returnPatience.String())
	c := lead(t, 1, 0, env...)
	c.do("init", "session", "open", "calls 100")
	for range 2 {
		if err := syscall.Kill(agentStatus(t, socket).PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * returnPatience) // no reply shows that an executor keeps waiting
		c.do("calls 10000", "renew")
	}
	c.do("release", "open", "calls 100", "release", "close")
}

// Without agent and client, the cores of a lease are free after the patience for a client that is not connected.
func TestAgentAndClientKilled(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t, "--cores", "1", "--client-return", returnPatience.String())
	other := filepath.Join(t.TempDir(), "agent.sock")
	t.Cleanup(func() { stopAgent(t, other) })
	next := lead(t, 1, 0, append(slices.Clone(env), "RFAAS_AGENT_SOCKET="+other)...)
	next.do("init", "session")
	var free []time.Duration
	for range *agentKills {
		c := lead(t, 1, 0, env...)
		c.do("init", "session", "open", "calls 10")
		agent := agentStatus(t, socket).PID
		if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		c.cmd.Process.Kill()
		killed := time.Now()
		c.cmd.Wait()
		eventually(t, "the core is free", func() bool { return next.ask("open").status == 0 })
		free = append(free, time.Since(killed))
		next.do("calls 10", "release")
	}
	slices.Sort(free)
	t.Logf("until the core was free: median %v, longest %v, of which the executor waited %v for another agent", free[len(free)/2], free[len(free)-1],
		returnPatience)
}
