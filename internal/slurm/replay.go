package slurm

import (
	"cmp"
	"container/heap"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Spread is a log-normal distribution, given by its median and 95th percentile. It is a constant if both are equal.
type Spread struct{ Median, P95 time.Duration }

func (s Spread) draw(r *rand.Rand) time.Duration {
	sigma := math.Log(float64(s.P95)/float64(s.Median)) / 1.6449 // the normal distribution's 95th percentile
	return time.Duration(float64(s.Median) * math.Exp(sigma*r.NormFloat64()))
}

func (s Spread) check(name string) error {
	if s.Median <= 0 || s.P95 < s.Median {
		return fmt.Errorf("%s: median %v, p95 %v: want 0 < median <= p95", name, s.Median, s.P95)
	}
	return nil
}

// Replay simulates the Planner on synthetic idle gaps of a cluster, event by event, with times that were measured on a
// real one.
//
// Each node is alternately busy and idle. Both lengths are drawn independently. For the share Known of the gaps, the
// scheduler's plan shows the end from the start on. Slurm then starts executors only in its backfill, with a time limit
// in whole minutes that fits. The other gaps end without notice, by preemption. An executor lends its node from its
// appearance in the list until it ends. Failures of nodes and partly used nodes are not modelled.
type Replay struct {
	Seed       uint64
	Nodes      int
	Length     time.Duration
	Gap, Busy  Spread // lengths of idle gaps, and of the busy times between them
	Known      float64
	Start      Spread // from the time when a waiting job could start until its executor is in the list
	Drain      Spread // from preemption to the start of the job that wants the node
	Grace      time.Duration
	SchedDelay time.Duration // Slurm's batch_sched_delay, for jobs submitted to idle nodes
	Backfill   time.Duration // Slurm's bf_interval
	Interval   time.Duration // of the controller
	Policy     Policy
	// Yield is the yield-after of executors that stay on their nodes beside Slurm's jobs, and Lease how long a lease takes to start. Then the controller
	// and the times of jobs play no part. 0: executors are Slurm's jobs.
	Yield, Lease time.Duration
}

// yieldSteps is how much of a gap passes, in tenths of Yield, before an executor lends a core that a job has left: twice Yield, and one measurement.
const yieldSteps = 22

// DefaultReplay returns a day of a hundred nodes. The gaps are short on purpose, because these are hard to use: half of
// them below two minutes, their mean about five. Start and drain are the times that make test-slurm measured on a busy
// machine. batch_sched_delay and bf_interval are Slurm's defaults. The caller sets Policy.
func DefaultReplay() Replay {
	return Replay{Seed: 1, Nodes: 100, Length: 24 * time.Hour,
		Gap: Spread{2 * time.Minute, 1115 * time.Second}, Busy: Spread{30 * time.Minute, 2 * time.Hour}, Known: 0.5,
		Start: Spread{900 * time.Millisecond, 1800 * time.Millisecond}, Drain: Spread{280 * time.Millisecond, 530 * time.Millisecond},
		Lease: time.Millisecond, Grace: time.Second, SchedDelay: 3 * time.Second, Backfill: 30 * time.Second, Interval: time.Second}
}

func newReplayRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 17)) }

// ReplayResult is the result of a Replay.
type ReplayResult struct {
	Gaps        int           `json:"gaps"`
	LongGaps    int           `json:"gaps_over_a_minute"`
	Idle        time.Duration `json:"idle_ns"` // node time
	IdleShare   float64       `json:"idle_share"`
	Covered     float64       `json:"covered"` // share of the idle time
	ByLength    []GapClass    `json:"by_length"`
	CoveredLong float64       `json:"covered_over_a_minute"`
	Jobs        int           `json:"jobs"`
	Preempted   int           `json:"preempted"`
	WaitMedian  time.Duration `json:"wait_median_ns"` // that preempted executors cost the jobs that wanted their nodes
	WaitP95     time.Duration `json:"wait_p95_ns"`
}

// GapClass is the gaps of a length from From to the next class.
type GapClass struct {
	From    time.Duration `json:"from_ns"`
	Gaps    int           `json:"gaps"`
	Idle    time.Duration `json:"idle_ns"`
	Covered float64       `json:"covered"` // share of Idle
}

var gapClasses = []time.Duration{0, 5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute, 10 * time.Minute}

// replayNode is a node of a Replay.
type replayNode struct {
	name       string
	idle       bool
	known      bool
	begin, end time.Time // of the gap
	job        *replayJob
	covered    time.Duration // of the gap
}

// replayJob is an executor job.
type replayJob struct {
	Job
	node   *replayNode
	listed time.Time
}

type replayEvent struct {
	at time.Time
	do func()
}

type replayQueue []replayEvent

func (q replayQueue) Len() int           { return len(q) }
func (q replayQueue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }
func (q replayQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *replayQueue) Push(x any)        { *q = append(*q, x.(replayEvent)) }
func (q *replayQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

type replay struct {
	Replay
	r        *rand.Rand
	now      time.Time
	queue    replayQueue
	nodes    []*replayNode
	byName   map[string]*replayNode
	jobs     map[int64]*replayJob
	nextJob  int64
	changed  time.Time // when something last did
	waits    []time.Duration
	long     time.Duration
	covered  time.Duration
	coverLng time.Duration
	lent     []time.Duration // by class
	result   ReplayResult
	planner  *Planner
}

// Run replays. The same Replay comes to the same result.
func (c Replay) Run() (ReplayResult, error) {
	for _, s := range []struct {
		name string
		Spread
	}{{"gap", c.Gap}, {"busy", c.Busy}, {"start", c.Start}, {"drain", c.Drain}} {
		if err := s.check(s.name); err != nil {
			return ReplayResult{}, err
		}
	}
	if c.Nodes < 1 || c.Length <= 0 || c.Interval <= 0 || c.Backfill <= 0 || c.SchedDelay < 0 || c.Known < 0 || c.Known > 1 {
		return ReplayResult{}, fmt.Errorf("%d nodes for %v, interval %v, backfill %v, delay %v, known %v: out of range", c.Nodes, c.Length, c.Interval,
			c.Backfill, c.SchedDelay, c.Known)
	}
	if c.Yield < 0 || c.Lease < 0 {
		return ReplayResult{}, fmt.Errorf("yield %v, lease %v: out of range", c.Yield, c.Lease)
	}
	planner, err := NewPlanner(c.Policy)
	if err != nil {
		return ReplayResult{}, err
	}
	s := &replay{Replay: c, r: newReplayRand(c.Seed), now: time.Unix(1_700_000_000, 0), byName: map[string]*replayNode{},
		jobs: map[int64]*replayJob{}, planner: planner, lent: make([]time.Duration, len(gapClasses))}
	for _, from := range gapClasses {
		s.result.ByLength = append(s.result.ByLength, GapClass{From: from})
	}
	end := s.now.Add(c.Length)
	for i := range c.Nodes {
		n := &replayNode{name: fmt.Sprint("n", i+1)}
		s.nodes, s.byName[n.name] = append(s.nodes, n), n
		// Somewhere in a busy time, so that the nodes are not in step.
		s.after(time.Duration(s.r.Float64()*float64(c.Busy.draw(s.r))), func() { s.gap(n) })
	}
	if c.Yield == 0 {
		s.tick()
	}
	for len(s.queue) > 0 {
		e := heap.Pop(&s.queue).(replayEvent)
		if e.at.After(end) {
			break
		}
		s.now = e.at
		e.do()
	}
	res := &s.result
	res.IdleShare = float64(res.Idle) / (float64(c.Length) * float64(c.Nodes))
	res.Covered = float64(s.covered) / float64(max(res.Idle, 1))
	res.CoveredLong = float64(s.coverLng) / float64(max(s.long, 1))
	for i := range res.ByLength {
		res.ByLength[i].Covered = float64(s.lent[i]) / float64(max(res.ByLength[i].Idle, 1))
	}
	res.Preempted = len(s.waits)
	slices.Sort(s.waits)
	if len(s.waits) > 0 {
		res.WaitMedian, res.WaitP95 = s.waits[len(s.waits)/2], s.waits[len(s.waits)*95/100]
	}
	return *res, nil
}

func (s *replay) after(d time.Duration, do func()) {
	heap.Push(&s.queue, replayEvent{s.now.Add(max(d, 0)), do})
}

// gap begins one.
func (s *replay) gap(n *replayNode) {
	length := s.Gap.draw(s.r)
	n.idle, n.known, n.begin, n.end, n.covered = true, s.r.Float64() < s.Known, s.now, s.now.Add(length), 0
	s.changed = s.now
	s.after(length, func() { s.wanted(n) })
	s.launchAll(n)
}

// sorted are the jobs in the order of their submission, so that the same seed comes to the same result.
func (s *replay) sorted() []*replayJob {
	return slices.SortedFunc(maps.Values(s.jobs), func(a, b *replayJob) int { return cmp.Compare(a.ID, b.ID) })
}

// launchAll has Slurm look at the jobs that wait for a node.
func (s *replay) launchAll(n *replayNode) {
	for _, j := range s.sorted() {
		if j.node == n && j.State == Pending {
			s.launch(j, 0)
		}
	}
}

// launch has Slurm start a job that waits, if its node is idle, after a delay of the main scheduler or in the next backfill.
func (s *replay) launch(j *replayJob, delay time.Duration) {
	n := j.node
	if n.known {
		since := s.now.Sub(time.Unix(1_700_000_000, 0)) % s.Backfill
		delay = s.Backfill - since
	}
	gap := n.begin
	s.after(delay, func() {
		if s.jobs[j.ID] != j || j.State != Pending || !n.idle || n.begin != gap || n.job != nil {
			return
		}
		limit := j.Limit
		if n.known {
			// The scheduler shortens it to fit, if --time-min allows that.
			fits := n.end.Sub(s.now).Truncate(time.Minute)
			if limit > fits && (j.LimitMin == 0 || fits < j.LimitMin) {
				return
			}
			limit = min(limit, fits)
		}
		j.State, n.job, s.changed = Running, j, s.now
		j.listed = s.now.Add(s.Start.draw(s.r))
		s.after(limit, func() {
			if n.job == j {
				s.finish(n, s.now.Add(-s.Grace))
			}
		})
	})
}

// finish ends a node's job, which has lent the node until a given time.
func (s *replay) finish(n *replayNode, until time.Time) {
	j := n.job
	n.covered += max(0, until.Sub(j.listed))
	delete(s.jobs, j.ID)
	n.job, s.changed = nil, s.now
	s.launchAll(n)
}

// wanted ends a gap.
func (s *replay) wanted(n *replayNode) {
	length := n.end.Sub(n.begin)
	var wait time.Duration
	n.idle = false
	if n.job != nil {
		wait = s.Drain.draw(s.r)
		s.waits = append(s.waits, wait)
		s.finish(n, s.now)
	}
	if s.Yield > 0 { // the job does not wait: workers have idle priority
		n.covered = max(0, length-s.Yield/10*yieldSteps-s.Lease)
	}
	class := 0
	for class+1 < len(gapClasses) && length >= gapClasses[class+1] {
		class++
	}
	s.result.ByLength[class].Gaps++
	s.result.ByLength[class].Idle += length
	s.lent[class] += n.covered
	s.result.Gaps++
	s.result.Idle += length
	s.covered += n.covered
	if length > time.Minute {
		s.result.LongGaps++
		s.long += length
		s.coverLng += n.covered
	}
	s.changed = s.now
	s.after(wait+s.Busy.draw(s.r), func() { s.gap(n) })
}

// tick is one step of the controller.
func (s *replay) tick() {
	s.after(s.Interval, s.tick)
	// If nothing has changed for so long, the controller has nothing to do: all its delays are over.
	if s.now.Sub(s.changed) > s.Interval+2*s.Policy.Again {
		return
	}
	v := View{Plan: Plan{}, Waiting: s.Known > 0, Ended: map[int64]string{}}
	for _, n := range s.nodes {
		state := Busy
		if n.idle && n.job == nil {
			state = Idle
		}
		v.Nodes = append(v.Nodes, Node{Name: n.name, State: state})
		if n.idle && n.known {
			v.Plan[n.name] = n.end
		}
	}
	for _, j := range s.sorted() {
		v.Jobs = append(v.Jobs, j.Job)
	}
	for _, id := range s.planner.Gone(v.Jobs) {
		v.Ended[id] = "COMPLETED"
	}
	a := s.planner.Decide(s.now, v)
	for _, id := range a.Cancel {
		if j := s.jobs[id]; j != nil && j.State == Pending {
			delete(s.jobs, id)
		}
	}
	for _, sub := range a.Submit {
		s.nextJob++
		j := &replayJob{Job: Job{ID: s.nextJob, Node: sub.Node, State: Pending, Limit: sub.Limit, LimitMin: sub.LimitMin, Submitted: s.now}, node: s.byName[sub.Node]}
		s.jobs[j.ID] = j
		s.result.Jobs++
		if j.node.idle {
			s.launch(j, time.Duration(s.r.Float64()*float64(s.SchedDelay)))
		}
	}
	if len(a.Submit)+len(a.Cancel) > 0 {
		s.changed = s.now
	}
}
