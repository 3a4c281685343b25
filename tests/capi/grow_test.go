package capi

import (
	"slices"
	"strings"
	"syscall"
	"testing"
)

// TestLeaseGrows runs grow_test.c with an executor of four cores.
func TestLeaseGrows(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/grow_test.c", append([]string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}, c11...)...)
	functions := library(t, "../../client/testdata/stateful.c", "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread")
	runWith(t, []string{"--share-cores", "2"}, program, functions)
}

// A lease grows although its agent is killed: before there is room, and at any time after that.
func TestAgentKilledWhileLeaseGrows(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t, "--share-cores", "2")
	other := socket + "2"
	t.Cleanup(func() { stopAgent(t, other) })
	holder := lead(t, 3, 0, append(slices.Clone(env), "RFAAS_AGENT_SOCKET="+other)...)
	c := lead(t, 4, 0, env...)
	holder.do("init", "session")
	c.do("init", "session")
	for i := range *agentKills {
		holder.do("open")
		c.do("open 1", "calls 100")
		agent := agentStatus(t, socket).PID
		kill := func() {
			if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		if i == 0 {
			kill()
		}
		holder.do("release")
		for range i {
			c.do("calls 2000") // it may have any number of workers when the agent is killed
		}
		if i > 0 {
			kill()
		}
		eventually(t, "all workers are there", func() bool {
			c.do("calls 1000")
			return len(strings.Fields(c.ask("who").text)) == 4
		})
		c.do("release")
	}
}
