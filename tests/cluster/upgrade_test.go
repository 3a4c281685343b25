package cluster

import (
	"fmt"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Directories that make test-upgrade fills: this revision, and an earlier one.
const (
	current = "../.."
	earlier = "../../build/earlier/tree"
)

const leases = 50 // of each client

// installed are the files of a node.
var installed = []string{"bin/resource-manager", "bin/executor", "libexec/rfaas-agent", "libexec/rfaas-spawner", "libexec/rfaas-worker"}

// TestRollingUpgrade upgrades a cluster while two clients call 100 leases: first the resource manager, then the executors, then the
// agents. One client is of the earlier revision, so it is also served by newer daemons, and the other is of this one, so it is also
// served by older ones. No call fails, and each call is billed once.
func TestRollingUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a build of an earlier revision: make test-upgrade")
	}
	c := newCluster(t)
	c.install(earlier)
	manager := c.start("bin/resource-manager", "--state-dir", filepath.Join(c.dir, "manager"))
	c.env = append(c.env, "RFAAS_MANAGER="+manager.address)
	var executors []*process
	for i := range 2 {
		executors = append(executors, c.start("bin/executor", "--manager", manager.address, "--cores", "2", "--share-cores", strconv.Itoa(leases), "--memory", "4GiB",
			"--providers", "shm", "--pool", "0", "--cache-time", "0s", "--charge-interval", "200ms", "--state-dir", filepath.Join(c.dir, fmt.Sprintf("executor-%d", i))))
	}
	c.listed(2)
	old := c.client("old", earlier, filepath.Join(c.root, "libexec/rfaas-agent"), leases)
	young := c.client("young", current, filepath.Join(current, "libexec/rfaas-agent"), leases)
	clients := []*client{old, young}
	for _, k := range clients {
		k.await(t, "ready")
	}
	progress := func(after string) {
		t.Helper()
		for _, k := range clients {
			k.rounds(t, after, 2)
		}
	}
	progress("the start")

	c.install(current)
	address := manager.address
	manager.end(t)
	progress("the end of the old resource manager")
	manager = c.startAt(address, "bin/resource-manager", "--state-dir", filepath.Join(c.dir, "manager"))
	c.listed(2)
	progress("the start of the new resource manager")

	for i, x := range executors {
		if x.runs(t, filepath.Join(c.root, "bin/executor")) {
			t.Fatalf("executor %d runs the new program before the handover", i)
		}
		x.signal(syscall.SIGUSR2)
		x.await(t, "msg=ready ", "not handed over")
		testkit.Eventually(t, "the executor runs the new program", func() bool { return x.runs(t, filepath.Join(c.root, "bin/executor")) })
		progress(fmt.Sprintf("the handover of executor %d", i))
	}
	c.listed(2)
	// The spawners and zygotes are still those of the earlier program. They start the workers of new leases.
	fresh := c.client("fresh", current, filepath.Join(current, "libexec/rfaas-agent"), leases)
	clients = append(clients, fresh)
	fresh.await(t, "ready")
	progress("the handovers")

	for _, k := range clients {
		pid := k.agent(c)
		if pid == 0 {
			t.Fatalf("client %s has no agent", k.name)
		}
		if out, err := c.command([]string{"RFAAS_AGENT_SOCKET=" + k.socket}, "agent", "stop"); err != nil {
			t.Fatalf("rfaas agent stop: %v\n%s", err, out)
		}
		testkit.Eventually(t, "another agent serves client "+k.name, func() bool { next := k.agent(c); return next != 0 && next != pid })
		if k == old && !sameProgram(t, k.agent(c), filepath.Join(c.root, "libexec/rfaas-agent")) {
			t.Error("the old client's agent is not the new program")
		}
		progress("the change of the agent of client " + k.name)
	}

	made := map[string]uint64{}
	for _, k := range clients {
		made[k.name] = k.finish(t)
	}
	for _, x := range executors {
		x.end(t) // charges what is left
	}
	billed := c.bill()
	for name, n := range made {
		t.Logf("client %s: %d calls, 0 failed, %d billed", name, n, billed[name])
		if billed[name] != n {
			t.Errorf("client %s made %d calls, and %d are billed", name, n, billed[name])
		}
	}
	manager.end(t)
}
