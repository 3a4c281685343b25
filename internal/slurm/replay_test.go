package slurm

import (
	"reflect"
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
	if again, _ := small.Run(); !reflect.DeepEqual(again, first) {
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

// Executors that stay on their nodes use gaps of seconds.
func TestReplayYielding(t *testing.T) {
	r := day()
	r.Gap, r.Busy, r.Yield = Spread{10 * time.Second, time.Minute}, Spread{5 * time.Minute, 20 * time.Minute}, 200*time.Millisecond
	r.Nodes = 20
	got, err := r.Run()
	if err != nil {
		t.Fatal(err)
	}
	var idle, lent float64
	for _, c := range got.ByLength {
		t.Logf("%d gaps from %v: %.1f %% of the idle time", c.Gaps, c.From, 100*c.Covered)
		if c.From >= 5*time.Second {
			idle, lent = idle+float64(c.Idle), lent+c.Covered*float64(c.Idle)
		}
		if c.Covered < 0 || c.Covered > 1 {
			t.Errorf("%+v", c)
		}
	}
	t.Logf("figure: slurm.replay_seconds_covered = %.2f %%", 100*lent/idle)
	if lent/idle < 0.9 || got.Jobs != 0 {
		t.Errorf("%.3f of the idle time in gaps of 5 s or more, by %d jobs", lent/idle, got.Jobs)
	}
	jobs := r
	jobs.Yield = 0
	if other, err := jobs.Run(); err != nil || other.Covered > got.Covered-0.2 {
		t.Errorf("executors that are jobs use %.3f of such gaps, %v", other.Covered, err)
	}
}

func TestReplayRefuses(t *testing.T) {
	for name, change := range map[string]func(*Replay){
		"nodes": func(r *Replay) { r.Nodes = 0 }, "gap": func(r *Replay) { r.Gap.Median = 0 }, "order": func(r *Replay) { r.Start.P95 = 1 },
		"known": func(r *Replay) { r.Known = 1.1 }, "policy": func(r *Replay) { r.Policy.Rate = 0 }, "backfill": func(r *Replay) { r.Backfill = 0 }, "yield": func(r *Replay) { r.Yield = -1 },
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
