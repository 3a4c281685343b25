package slurm

import (
	"slices"
	"testing"
	"time"
)

// takeTurns runs jobs that each take two of the four nodes, and checks that exactly their executors end and come back. Jobs last
// 0 to 3 steps. It returns each job's wait from submission to start beyond base, and how long after a job's end each node's
// executor was in the list again.
func (c *cluster) takeTurns(rounds int, step, base time.Duration) (waits, backs []time.Duration) {
	c.t.Helper()
	for round := range rounds {
		before := c.awaitAll(4)
		j := c.job(2, time.Duration(round%4)*step)
		waits = append(waits, j.started.Sub(j.submitted)-base)
		for _, node := range j.nodes {
			c.await(node+" given up", j.submitted, func(up map[string]listed) bool {
				return up[node].Incarnation != before[node].Incarnation
			})
			back := c.await(node+" back", j.ended, func(up map[string]listed) bool {
				return up[node].Incarnation != "" && up[node].Incarnation != before[node].Incarnation
			})
			backs = append(backs, max(0, back.At.Sub(j.ended)))
		}
		for node, e := range c.awaitAll(4) {
			if !slices.Contains(j.nodes, node) && e.Incarnation != before[node].Incarnation {
				c.t.Errorf("round %d: the job had %v, and the executor on %s is another one", round, j.nodes, node)
			}
		}
	}
	return waits, backs
}

// percentile is a percentile of a sorted list, by nearest rank.
func percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, (len(sorted)*p+99)/100-1)]
}

// report prints measured times. Tests do not judge them: `make bench` compares them with the promises in benchmarks/report.
func report(t *testing.T, what string, list []time.Duration) {
	t.Helper()
	slices.Sort(list)
	t.Logf("%s: median %v, p95 %v, most %v (%d times)", what, percentile(list, 50).Round(time.Millisecond),
		percentile(list, 95).Round(time.Millisecond), list[len(list)-1].Round(time.Millisecond), len(list))
}
