package slurm

import (
	"testing"
	"time"
)

// day is the replay that docs/slurm.md shows, with the times that make test-slurm measured.
func day() Replay {
	r := DefaultReplay()
	r.Policy = policy()
	r.Policy.Longest, r.Policy.LeastGap, r.Policy.MaxAhead = 4*time.Hour, 20*time.Second, 256
	return r
}

func TestReplay(t *testing.T) {
	got, err := day().Run()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("figure: slurm.replay_covered = %.2f %%", 100*got.CoveredLong)
	t.Logf("%d gaps, %.1f %% of the node time idle: %.1f %% of it covered, %.1f %% in the %d gaps over a minute; %d jobs; a wait of %v (p95 %v)", got.Gaps,
		100*got.IdleShare, 100*got.Covered, 100*got.CoveredLong, got.LongGaps, got.Jobs, got.WaitMedian, got.WaitP95)
	if got.CoveredLong < 0.9 || got.CoveredLong > 1 || got.Covered > 1 {
		t.Errorf("%+v", got)
	}
	small := day()
	small.Nodes = 20
	first, _ := small.Run()
	if again, _ := small.Run(); again != first {
		t.Errorf("another result by the same seed: %+v, %+v", first, again)
	}
	if got.Gaps < 1000 || got.IdleShare < 0.05 || got.IdleShare > 0.3 || got.Jobs < got.Gaps/2 || got.Preempted == 0 {
		t.Errorf("no day of a cluster: %+v", got)
	}
	// It can tell a bad controller from a good one.
	slow := small
	slow.Interval, slow.SchedDelay, slow.Policy.Ahead = 90*time.Second, 3*time.Second, false
	if bad, err := slow.Run(); err != nil || bad.CoveredLong > got.CoveredLong-0.05 {
		t.Errorf("of 20 nodes, a controller that looks every 90 s covers %.3f, %v; the good one %.3f", bad.CoveredLong, err, got.CoveredLong)
	}
}

func TestReplayRefuses(t *testing.T) {
	for name, change := range map[string]func(*Replay){
		"nodes": func(r *Replay) { r.Nodes = 0 }, "gap": func(r *Replay) { r.Gap.Median = 0 }, "order": func(r *Replay) { r.Start.P95 = 1 },
		"known": func(r *Replay) { r.Known = 1.1 }, "policy": func(r *Replay) { r.Policy.Rate = 0 }, "backfill": func(r *Replay) { r.Backfill = 0 },
	} {
		r := day()
		change(&r)
		if _, err := r.Run(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestSpread(t *testing.T) {
	s := Spread{time.Minute, 5 * time.Minute}
	r := newReplayRand(3)
	below, far := 0, 0
	for range 20000 {
		if d := s.draw(r); d < s.Median {
			below++
		} else if d > s.P95 {
			far++
		}
	}
	if below < 9700 || below > 10300 || far < 900 || far > 1100 {
		t.Errorf("of 20000 draws %d below the median, %d above p95", below, far)
	}
}
