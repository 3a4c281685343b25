package slurm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// hooked starts a cluster with the prolog and epilog of scripts/slurm, a manager, and a node daemon on each node.
func hooked(t *testing.T, nodes int, args ...string) *cluster {
	t.Helper()
	hooks := t.TempDir()
	for _, hook := range []string{"prolog", "epilog"} {
		// The cluster's directory is not known yet, and the hook's environment is empty. The hook finds the directory by $0 and /proc.
		text := fmt.Sprintf(`#!/bin/sh
export RFAAS=%s/bin/rfaas RFAAS_SLURM_SOCKET=$(dirname "$SLURM_CONF")/local/rfaas/slurm.sock
exec %[1]s/scripts/slurm/%s
`, root(t), hook)
		if err := os.WriteFile(filepath.Join(hooks, hook), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c := up(t, nodes, append([]string{"--hooks", hooks}, args...)...)
	c.manage()
	for n := range nodes {
		node := fmt.Sprint("n", n+1)
		c.daemon("node-daemon-"+node, node, c.root+"/bin/rfaas", "slurm", "node", "--name", node, "--resync", "2m", "--", "--listen", "0.0.0.0:7465",
			"--allow-plaintext", "--grace", "1s")
	}
	c.awaitAll(nodes)
	return c
}

// The prolog ends the executor before the job starts, and the epilog brings it back, many times while it is in use. Other nodes
// are not affected.
func TestHooksFollowJobs(t *testing.T) {
	c := hooked(t, 4)
	load := c.callers("n1", "n2", "n3", "n4")
	waits, backs := c.takeTurns(max(3, *roundsFlag/2), 300*time.Millisecond, 0)
	report(t, "hooks: from a job's submission to its start", waits)
	report(t, "hooks: from a node's last job's end to its executor in the list", backs)
	c.checkLoad(load, len(waits))
	for node := range c.awaitAll(4) {
		if out := c.must("head", "sinfo", "-h", "-n", node, "-p", "batch", "-o", "%t"); out != "idle" {
			t.Errorf("%s is %s: hooks must never fail", node, out)
		}
	}
}

// The executor lends exactly the CPUs and bytes that no job has. Processes that functions left behind are gone when a job starts.
func TestHooksLendTheRestExactly(t *testing.T) {
	c := hooked(t, 1)
	whole := c.awaitAll(1)["n1"]
	if whole.Memory != 2048<<20 {
		t.Errorf("an idle node of 2048 MiB lends %d MiB", whole.Memory>>20)
	}
	load := c.callers("n1")
	wait(t, "functions have left something behind", func() bool { return len(load.deserters("n1")) > 0 })
	lends := func(what string, cores uint32, mib uint64) {
		t.Helper()
		c.await(what, time.Now(), func(up map[string]listed) bool { return up["n1"].Cores == cores && up["n1"].Memory == mib<<20 })
	}
	old := load.deserters("n1")
	// The job lists the processes as soon as it starts.
	out := c.must("head", "srun", "--quiet", "-p", "batch", "-N1", "--exclusive", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
	if strings.Contains(out, load.mark) || strings.Contains(out, "rfaas-worker") {
		t.Errorf("the job of a whole node found processes of the executor: %s", out)
	}
	if now := load.deserters("n1"); slices.ContainsFunc(old, func(pid int) bool { return slices.Contains(now, pid) }) {
		t.Errorf("processes that functions left behind are still there: %v of %v", now, old)
	}
	if whole.Cores < 2 {
		t.Logf("one CPU only: nothing is left of a node with a job")
		return
	}
	lends("all of an idle node", whole.Cores, 2048)
	// The name looks like Slurm's description of nodes, but does not hide any of the job's resources.
	first := c.must("head", "sbatch", "--parsable", "-p", "batch", "-n1", "--mem=300", "-o", "/dev/null", "-J", "x\n Nodes=n1 CPU_IDs= Mem=1 GRES=", "--wrap", "sleep 600")
	lends("the rest of a node with a job", whole.Cores-1, 1748)
	if status := c.must("n1", c.root+"/bin/rfaas", "slurm", "status"); !strings.Contains(status, `"running":true`) {
		t.Errorf("status says %s", status)
	}
	c.must("head", "scancel", first)
	load.stops["n1"]() // an executor in use would keep its size for a while
	lends("all of it again", whole.Cores, 2048)
}

// The prolog kills a node daemon that hangs. A node without a node daemon runs jobs as usual.
func TestHooksWithoutNodeDaemon(t *testing.T) {
	c := hooked(t, 1)
	daemons := processes(strings.Join([]string{"slurm", "node", "--name", "n1"}, "\x00"))
	stopped := 0
	for _, pid := range daemons {
		// The node daemon itself, not the program that started it on the node.
		if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); filepath.Base(exe) == "rfaas" && signal(pid, "STOP") == nil {
			stopped++
		}
	}
	if stopped == 0 {
		t.Fatal("no node daemon found")
	}
	j := c.job(1, 0)
	hung := j.started.Sub(j.submitted)
	if hung < 2*time.Second {
		t.Errorf("with a hung node daemon the job started after %v; want the prolog's 3 s and the scheduler's time", hung)
	}
	c.await("the executor's end", j.submitted, func(up map[string]listed) bool { return len(up) == 0 })
	j = c.job(1, 0)
	if d := j.started.Sub(j.submitted); d >= hung {
		t.Errorf("without a node daemon the job started after %v, with a hung one after %v", d, hung)
	}
	wait(t, "the node is idle", func() bool { return c.must("head", "sinfo", "-h", "-p", "batch", "-o", "%t") == "idle" })
}
