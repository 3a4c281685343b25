package capi

import (
	"syscall"
	"testing"
)

const leaseLocal = 4 // RFAAS_LEASE_LOCAL

func tableLibrary(t *testing.T) string {
	t.Helper()
	return library(t, "testdata/table.c", "-O2", "-Wall", "-Werror")
}

// TestTableOutlivesAgent kills the agent of a client that has published a table. Leases of the next agent have the table too, on an executor that
// has never seen it.
func TestTableOutlivesAgent(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	c := leadWith(t, tableLibrary(t), 1, 0, env...)
	c.do("init", "session", "table", "open", "look")
	if err := syscall.Kill(agentStatus(t, socket).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.do("look", "renew", "look", "release", "open", "look", "release", "drop", "table", "open", "look", "release", "close")
}

// TestTableOfKilledClients kills clients at any moment of publishing and leasing. The agent and the executor serve others, and keep nothing.
func TestTableOfKilledClients(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	library := tableLibrary(t)
	for i := range *agentKills {
		c := leadWith(t, library, 1, 0, env...)
		c.do("init", "session")
		c.say("table")
		if i%2 == 0 {
			c.hear("table")
			c.say("open")
		}
		c.finish(true)
	}
	c := leadWith(t, library, 1, 0, env...)
	c.do("init", "session", "table", "open", "look", "release", "close")
	eventually(t, "the agent has no client but this one", func() bool { return len(agentStatus(t, socket).Clients) == 1 })
	c.do("finalize")
}

// TestTableInThisProcess calls functions in the client's own process, which find its tables.
func TestTableInThisProcess(t *testing.T) {
	crosses(t)
	env, _, _ := agentCluster(t)
	other := leadWith(t, tableLibrary(t), 2, 0, env...)
	other.do("init", "session", "open")
	c := leadWith(t, tableLibrary(t), 1, leaseLocal, env...)
	c.do("init", "session", "table", "open", "look")
	if w := c.who(); w.start != "0" {
		t.Fatalf("the lease has a worker: %+v", w)
	}
	c.do("release", "close")
}
