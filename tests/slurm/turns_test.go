package slurm

import (
	"slices"
	"testing"
	"time"
)

// Bounds for 95 of 100 times that takeTurns measures.
const (
	mostWait = 1500 * time.Millisecond // from a job's submission to its start
	mostAway = 3 * time.Second         // from a node's last job's end to its executor in the list
)

// takeTurns runs jobs that each take two of the four nodes, and checks that exactly their executors end and come back. Jobs last
// 0 to 3 steps. It returns each job's wait from submission to start beyond base, and how long after a job's end each node's
// executor was in the list again. The p95 of few jobs is the slowest one, so if it is above the bound, up to three times as many
// jobs run.
func (c *cluster) takeTurns(rounds int, step, base time.Duration) (waits, backs []time.Duration) {
	c.t.Helper()
	above := func() bool {
		return percentile(slices.Sorted(slices.Values(waits)), 95) > mostWait || percentile(slices.Sorted(slices.Values(backs)), 95) > mostAway
	}
	for round := 0; round < rounds || round < 3*rounds && above(); round++ {
		before := c.awaitAll(4)
		j := c.job(2, time.Duration(round%4)*step)
		waits = append(waits, j.started.Sub(j.submitted)-base)
		for _, node := range j.nodes {
			gone := c.await(node+" given up", j.submitted, func(up map[string]listed) bool {
				return up[node].Incarnation != before[node].Incarnation
			})
			if gone.At.After(j.started.Add(mostWait)) {
				c.t.Errorf("round %d: %s was in the list until %v after the job's start", round, node, gone.At.Sub(j.started))
			}
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

// judge prints a measurement and fails when its 95th percentile is above its bound.
func judge(t *testing.T, what string, list []time.Duration, most time.Duration) {
	t.Helper()
	slices.Sort(list)
	p50, p95 := percentile(list, 50), percentile(list, 95)
	verdict := "within"
	if p95 > most {
		verdict = "ABOVE"
	}
	t.Logf("%s: median %v, p95 %v, most %v (%d times), %s the bound of %v for p95", what, p50.Round(time.Millisecond), p95.Round(time.Millisecond),
		list[len(list)-1].Round(time.Millisecond), len(list), verdict, most)
	if p95 > most && *strictFlag {
		t.Errorf("%s: p95 %v is above %v", what, p95, most)
	}
}
