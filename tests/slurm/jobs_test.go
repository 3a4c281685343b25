package slurm

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// follow starts the controller. kill ends it by SIGKILL.
func (c *cluster) follow(name string, args ...string) (kill func()) {
	c.t.Helper()
	line := append([]string{c.root + "/bin/rfaas", "slurm", "follow", "--partition", "idle", "--script", c.root + "/scripts/slurm/executor.sbatch",
		"--job-name", "rfaas-", "--again-most", "10s"}, args...)
	line = append(line, "--", "--comment="+name) // makes the arguments of this controller unique
	stop := c.daemon(name, "head", line...)
	return func() {
		for _, pid := range processes(strings.Join(line, "\x00")) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		stop()
	}
}

// Executors start on idle nodes. Many times a job takes two of the nodes, while every executor is in use. Exactly those two
// executors end and come back. The test also measures the times.
func TestJobsFollowIdleNodes(t *testing.T) {
	c := up(t, 4)
	// The floor: the same job on idle nodes.
	var floor []time.Duration
	for range max(3, *roundsFlag/2) {
		j := c.job(2, 0)
		floor = append(floor, j.started.Sub(j.submitted))
	}
	slices.Sort(floor)
	base := percentile(floor, 50)
	t.Logf("a job on idle nodes starts after %v (median), %v (p95)", base.Round(time.Millisecond), percentile(floor, 95).Round(time.Millisecond))

	c.manage()
	c.follow("follow")
	before := c.awaitAll(4)
	for node, e := range before {
		if left := time.Until(time.Unix(int64(e.Until), 0)); left < 3*time.Hour || left > 5*time.Hour {
			t.Errorf("the executor on %s is said to be available for %v more; its job has 4 hours", node, left)
		}
	}
	nodes := slices.Sorted(maps.Keys(before))
	load := c.callers(nodes...)

	waits, backs := c.takeTurns(*roundsFlag, 400*time.Millisecond, base)
	report(t, "a job's extra wait because of executors", waits)
	report(t, "from a node's last job's end to its executor in the list", backs)
	t.Logf("figure: slurm.extra_wait_p95_s = %.3f s", percentile(waits, 95).Seconds())
	t.Logf("figure: slurm.idle_to_board_p95_s = %.3f s", percentile(backs, 95).Seconds())
	c.checkLoad(load, len(waits))
	c.checkRecords(len(backs))
}

// checkLoad ends the callers. Each of their calls must have ended in time, with its result or a named error.
func (c *cluster) checkLoad(load *callers, rounds int) {
	t := c.t
	t.Helper()
	total := called{Errors: map[string]int{}}
	for node, stop := range load.stops {
		r := stop()
		if lost := r.Calls - r.Right - r.Wrong; lost != sum(r.Errors) || r.Wrong > 0 || r.Right == 0 {
			t.Errorf("%s: %d calls, %d right, %d wrong, errors %v", node, r.Calls, r.Right, r.Wrong, r.Errors)
		}
		if err := r.named(); err != nil {
			t.Errorf("%s: a call ended in %v", node, err)
		}
		if r.Longest > callBound/2 {
			t.Errorf("%s: a call took %v", node, r.Longest)
		}
		total.Calls, total.Right, total.Leases, total.Longest = total.Calls+r.Calls, total.Right+r.Right, total.Leases+r.Leases, max(total.Longest, r.Longest)
		for text, n := range r.Errors {
			total.Errors[text[:min(len(text), 60)]] += n
		}
	}
	t.Logf("%d calls with %d leases, %d finished, the longest %v; errors %v", total.Calls, total.Leases, total.Right, total.Longest.Round(time.Millisecond), total.Errors)
	if total.Leases < rounds {
		t.Errorf("%d leases in %d rounds: the callers were not where the jobs were", total.Leases, rounds)
	}
}

func sum(m map[string]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}

// checkRecords checks how the executors' jobs ended: with status 0, within the grace.
func (c *cluster) checkRecords(least int) {
	left := 0
	for _, r := range c.records() {
		if !strings.HasPrefix(r.name, "rfaas-") {
			continue
		}
		if left++; r.exit != "0:0" || r.state != "COMPLETED" && r.state != "PREEMPTED" {
			c.t.Errorf("the executor's job %s ended as %s with %s", r.name, r.state, r.exit)
		}
	}
	if left < least {
		c.t.Errorf("%d executor jobs have ended, want at least %d", left, least)
	}
}

// A job gets the whole node: no process of an executor is left when the job starts, not even processes that functions have left
// behind in other sessions.
func TestJobsLeaveNothingBehind(t *testing.T) {
	c := up(t, 2)
	c.manage()
	c.follow("follow")
	c.awaitAll(2)
	load := c.callers("n1", "n2")
	wait(t, "functions have left something behind", func() bool { return len(load.deserters("n1")) > 0 && len(load.deserters("n2")) > 0 })
	left := load.deserters("n2")
	// The job lists the processes of its node before it does anything else.
	out := c.must("head", "srun", "--quiet", "-p", "batch", "-w", "n1", "-N1", "--exclusive", "sh", "-c",
		"cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
	for _, text := range []string{load.mark, "rfaas-worker", "executor", "slurm run"} {
		if strings.Contains(out, text) {
			t.Errorf("the job found a process with %q on its node: %s", text, out)
		}
	}
	if !strings.Contains(out, "slurmd") {
		t.Errorf("the job saw no processes of its node: %q", out)
	}
	if len(load.deserters("n2")) == 0 {
		t.Error("the processes left behind on the other node are gone too")
	}
	// Slurm sends SIGKILL to all processes of the job that it knows, without any grace.
	ids := c.must("head", "squeue", "-h", "-t", "R", "-n", "rfaas-n2", "-o", "%A")
	c.must("head", "scancel", "--signal=KILL", "--full", ids)
	wait(t, "what functions left on n2 has ended", func() bool { // the next executor's functions leave others
		return !slices.ContainsFunc(left, func(pid int) bool { return slices.Contains(load.deserters("n2"), pid) })
	})
}

// Killing and restarting the controller, or starting a second one, changes nothing: there is one job for each node, and the same executors.
func TestControllerKilledAndDoubled(t *testing.T) {
	c := up(t, 4)
	c.manage()
	kill := c.follow("first")
	before := c.awaitAll(4)
	for i := range 3 {
		kill()
		kill = c.follow(fmt.Sprintf("again-%d", i))
	}
	killTwin := c.follow("twin")
	defer killTwin()
	// A job runs while there are two controllers, and another one while there is none.
	j := c.job(2, time.Second)
	c.awaitAll(4)
	kill()
	killTwin()
	c.job(2, 0, "--nodelist="+strings.Join(j.nodes, ","))
	kill = c.follow("last")
	defer kill()
	after := c.awaitAll(4)
	for node, e := range before {
		if !slices.Contains(j.nodes, node) && after[node].Incarnation != e.Incarnation {
			t.Errorf("the executor on %s is another one, and no job was there", node)
		}
	}
	// When all is quiet, each node has exactly one job, which runs.
	var jobs []string
	wait(t, "one job for each node", func() bool {
		jobs = strings.Fields(c.must("head", "squeue", "-h", "-p", "idle", "-o", "%j/%T"))
		slices.Sort(jobs)
		return strings.Join(jobs, " ") == "rfaas-n1/RUNNING rfaas-n2/RUNNING rfaas-n3/RUNNING rfaas-n4/RUNNING"
	})
	for _, l := range c.lists {
		count := map[string]int{}
		for _, e := range l.Executors {
			if count[e.Node]++; count[e.Node] > 1 && e.State == "up" {
				t.Fatalf("two executors on %s: %+v", e.Node, l.Executors)
			}
		}
	}
	// The controller, which is still running, ends and submits no more jobs. The executors leave nothing behind.
	traces := c.traces()
	asked := time.Now()
	if out := c.must("head", c.root+"/bin/rfaas", "slurm", "stop", "--partition", "idle"); !strings.Contains(out, " jobs cancelled") {
		t.Errorf("stop said %q", out)
	}
	c.await("an empty list", asked, func(up map[string]listed) bool { return len(up) == 0 })
	wait(t, "the controller's end", func() bool {
		return len(processes(strings.Join([]string{"slurm", "follow", "--partition", "idle"}, "\x00"))) == 0
	})
	wait(t, "no job is left", func() bool { return c.must("head", "squeue", "-h", "-p", "idle") == "" })
	traces.gone(4)
}

// The executor of a drained node ends, and the node is used again when it is resumed. Other nodes are not affected. On
// a cluster without waiting jobs the scheduler may not shorten executor jobs.
func TestJobsLeaveDrainingNodes(t *testing.T) {
	c := up(t, 2)
	c.manage()
	c.follow("follow")
	before := c.awaitAll(2)
	for line := range strings.Lines(c.must("head", "squeue", "-h", "-p", "idle", "--Format=TimeLimit:|,MinTime:|")) {
		if strings.TrimSpace(line) != "4:00:00|0:00|" {
			t.Errorf("a job has the limits %q, want four hours and no least limit", line)
		}
	}
	asked := time.Now()
	c.must("head", "scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=service")
	l := c.await("n1 is left", asked, func(up map[string]listed) bool { return up["n1"].Node == "" && up["n2"].Node != "" })
	t.Logf("the executor left the draining node after %v", l.At.Sub(asked).Round(time.Millisecond))
	wait(t, "n1 is drained", func() bool { return c.must("head", "sinfo", "-h", "-n", "n1", "-p", "idle", "-o", "%T") == "drained" })
	if out := c.must("head", "squeue", "-h", "-n", "rfaas-n1"); out != "" {
		t.Errorf("the drained node has a job: %s", out)
	}
	c.must("head", "scontrol", "update", "NodeName=n1", "State=RESUME")
	if after := c.awaitAll(2); after["n2"].Incarnation != before["n2"].Incarnation {
		t.Error("the executor on n2 is another one, and nothing happened to its node")
	}
}

// If Slurm's plan changes when a job gets a node, the node's line on the board changes too. Other lines stay.
func TestPlanIsPublished(t *testing.T) {
	c := up(t, 2)
	c.manage()
	c.follow("follow", "--plan-interval", "1s")
	before := c.awaitAll(2)
	until := func(what, node string, from, to time.Duration) {
		t.Helper()
		asked := time.Now()
		l := c.await(what, asked, func(up map[string]listed) bool {
			left := time.Until(time.Unix(int64(up[node].Until), 0))
			return left > from && left < to
		})
		t.Logf("%s: on the board after %v", what, max(0, l.At.Sub(asked)).Round(time.Millisecond))
	}
	until("four hours", "n1", 3*time.Hour, 5*time.Hour)
	c.must("head", "scontrol", "create", "reservation", "ReservationName=service", "StartTime=now+30minutes", "Duration=60", "Nodes=n1", "Users=root", "Flags=ignore_jobs")
	until("a reservation in half an hour", "n1", 25*time.Minute, 31*time.Minute)
	c.must("head", "scontrol", "update", "ReservationName=service", "StartTime=now+90minutes")
	until("an hour later", "n1", 85*time.Minute, 91*time.Minute)
	c.must("head", "scontrol", "delete", "ReservationName=service")
	until("the reservation is deleted", "n1", 3*time.Hour, 5*time.Hour)
	for node, e := range c.awaitAll(2) {
		if e.Incarnation != before[node].Incarnation || node == "n2" && e.Until != before[node].Until {
			t.Errorf("%s was %+v and is %+v", node, before[node], e)
		}
	}
}
