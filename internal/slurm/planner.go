package slurm

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Policy controls executor jobs. All durations are above zero.
type Policy struct {
	Longest   time.Duration // time limit of a job on a node that is not in the plan; whole minutes
	Shortest  time.Duration // shortest time limit, also for jobs that the scheduler shortens while others wait; whole minutes
	LeastGap  time.Duration // a shorter gap in the plan is not used
	Ahead     bool          // also submit jobs for busy nodes, which the scheduler starts as soon as the nodes are idle
	MaxAhead  int           // most such jobs
	Rate      float64       // submissions per second, on average
	Burst     int           // submissions at once
	Again     time.Duration // shortest time between two submissions for one node
	AgainMost time.Duration // longest such time; it doubles each time the node's jobs fail
}

// check returns an error for a wrong policy.
func (p *Policy) check() error {
	for _, d := range []struct {
		name string
		d    time.Duration
	}{{"longest", p.Longest}, {"shortest", p.Shortest}, {"least gap", p.LeastGap}, {"again", p.Again}, {"again at most", p.AgainMost}} {
		if d.d <= 0 {
			return fmt.Errorf("%s: %v is not above 0", d.name, d.d)
		}
	}
	switch {
	case p.Shortest < time.Minute || p.Longest < p.Shortest:
		return fmt.Errorf("time limits from %v to %v: want whole minutes, and the longest not below the shortest", p.Shortest, p.Longest)
	case p.Rate <= 0 || p.Burst < 1 || p.MaxAhead < 0:
		return fmt.Errorf("rate %v per second, burst %d, %d jobs ahead: out of range", p.Rate, p.Burst, p.MaxAhead)
	}
	return nil
}

// View is Slurm's state at one moment.
type View struct {
	Nodes   []Node
	Jobs    []Job
	Plan    Plan
	Waiting bool             // other users' jobs wait for nodes
	Ended   map[int64]string // final states of jobs that Planner.Gone has named
}

// Actions are the steps to take, in this order.
type Actions struct {
	Cancel []int64
	Submit []Submission
}

// Planner decides which jobs to submit and cancel. Its state only limits how often it acts for a node. Its decisions do
// not depend on that state otherwise: a new Planner arrives at the same jobs.
type Planner struct {
	p      Policy
	tokens float64
	last   time.Time
	nodes  map[string]*memory
	seen   map[int64]string // jobs of the last view, and their nodes
}

// memory is the Planner's state of a node.
type memory struct {
	notBefore time.Time
	failures  int
	// Since when the node's job waits although the node is idle, because other jobs wait too and the scheduler may not
	// shorten this one.
	stuck time.Time
}

// NewPlanner returns a Planner, or an error for a wrong policy.
func NewPlanner(p Policy) (*Planner, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	return &Planner{p: p, tokens: float64(p.Burst), nodes: map[string]*memory{}, seen: map[int64]string{}}, nil
}

// Gone returns the jobs of the last view that are missing in this one, ascending. The caller should ask how they ended.
func (l *Planner) Gone(jobs []Job) []int64 {
	now := map[int64]bool{}
	for _, j := range jobs {
		now[j.ID] = true
	}
	var gone []int64
	for id := range l.seen {
		if !now[id] {
			gone = append(gone, id)
		}
	}
	slices.Sort(gone)
	return gone
}

// failed are the final states of a job that failed by itself or because of its node.
var failed = []string{"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}

// Decide returns the actions for a view. now must never go back. The caller must carry the actions out before the next
// view.
func (l *Planner) Decide(now time.Time, v View) Actions {
	if !l.last.IsZero() {
		l.tokens = min(float64(l.p.Burst), l.tokens+l.p.Rate*now.Sub(l.last).Seconds())
	}
	l.last = now
	l.learn(now, v)

	var a Actions
	byNode := l.sort(v, &a)
	var ahead []Submission
	for _, n := range v.Nodes {
		m := l.of(n.Name)
		job := byNode[n.Name]
		fresh := Submission{n.Name, l.p.Longest, l.leastLimit(v, n.Name)}
		if job == nil || job.State != Pending || n.State != Idle || job.LimitMin > 0 || fresh.LimitMin == 0 {
			m.stuck = time.Time{}
		} else if m.stuck.IsZero() {
			m.stuck = now
		}
		switch {
		case n.State == Draining && job != nil:
			a.Cancel = append(a.Cancel, job.ID) // the executor drains at SIGTERM
		case !n.State.usable() || now.Before(m.notBefore):
		case job == nil && n.State == Idle:
			l.submitIdle(now, &a, v.Plan, fresh)
		case job == nil && l.p.Ahead:
			ahead = append(ahead, fresh)
		case job == nil || job.State != Pending || now.Sub(job.Submitted) <= time.Minute:
		case n.State == Idle:
			// The scheduler may not shorten it to fit before others' jobs, so it cannot start.
			if !m.stuck.IsZero() && now.Sub(m.stuck) > time.Minute && l.submitIdle(now, &a, v.Plan, fresh) {
				a.Cancel = append(a.Cancel, job.ID)
			}
		case job.Limit < l.p.Longest || job.LimitMin > 0 && fresh.LimitMin == 0:
			// It was submitted for an earlier gap, or while others waited. The next gap may be longer.
			if l.p.Ahead && l.submit(now, &a, fresh) {
				a.Cancel = append(a.Cancel, job.ID)
			}
		}
	}
	// Idle nodes go first.
	waiting := 0
	for _, j := range byNode {
		if j.State == Pending {
			waiting++
		}
	}
	for _, s := range ahead {
		if waiting >= l.p.MaxAhead || !l.submit(now, &a, s) {
			break
		}
		waiting++
	}
	return a
}

// learn records how jobs ended.
func (l *Planner) learn(now time.Time, v View) {
	for _, id := range l.Gone(v.Jobs) {
		m := l.of(l.seen[id])
		switch state := v.Ended[id]; {
		case slices.Contains(failed, state):
			l.Refused(l.seen[id], now)
		case state != "":
			m.failures = 0
		}
	}
	clear(l.seen)
	known := map[string]bool{}
	for _, n := range v.Nodes {
		known[n.Name] = true
	}
	for _, j := range v.Jobs {
		l.seen[j.ID] = j.Node
		known[j.Node] = true
	}
	for name := range l.nodes {
		if !known[name] {
			delete(l.nodes, name)
		}
	}
}

// Refused records that a node's job could not be submitted or has failed. It returns how long the node is left alone.
func (l *Planner) Refused(node string, now time.Time) time.Duration {
	m := l.of(node)
	m.failures++
	wait := min(l.p.Again<<min(m.failures, 16), l.p.AgainMost)
	m.notBefore = now.Add(wait)
	return wait
}

// sort returns each node's job, the running one or else the oldest, and cancels all others.
func (l *Planner) sort(v View, a *Actions) map[string]*Job {
	known := map[string]bool{}
	for _, n := range v.Nodes {
		known[n.Name] = true
	}
	jobs := slices.Clone(v.Jobs)
	slices.SortFunc(jobs, func(x, y Job) int {
		return cmp.Or(cmp.Compare(y.State, x.State), cmp.Compare(x.ID, y.ID)) // ending, running, pending
	})
	byNode := map[string]*Job{}
	for i := range jobs {
		j := &jobs[i]
		switch {
		case j.State == Ending: // treated as gone
		case !known[j.Node] || byNode[j.Node] != nil:
			a.Cancel = append(a.Cancel, j.ID)
		default:
			byNode[j.Node] = j
		}
	}
	return byNode
}

// limit returns the time limit of a job that starts now, or false if the gap is too short.
func (l *Planner) limit(now time.Time, plan Plan, node string) (time.Duration, bool) {
	from, wanted := plan[node]
	if !wanted {
		return l.p.Longest, true
	}
	gap := from.Sub(now)
	if gap < l.p.LeastGap {
		return 0, false
	}
	return min(max(gap.Truncate(time.Minute), l.p.Shortest), l.p.Longest), true
}

// leastLimit returns the shortest limit that the scheduler may set for a node's job. The backfill scheduler may shorten
// a job even when no other job wants the node, so this is allowed only while jobs wait.
func (l *Planner) leastLimit(v View, node string) time.Duration {
	if _, wanted := v.Plan[node]; wanted || v.Waiting {
		return l.p.Shortest
	}
	return 0
}

// submitIdle submits a job that starts now, if the gap is long enough.
func (l *Planner) submitIdle(now time.Time, a *Actions, plan Plan, s Submission) bool {
	limit, ok := l.limit(now, plan, s.Node)
	s.Limit = limit
	return ok && l.submit(now, a, s)
}

// submit adds a submission if the rate allows it.
func (l *Planner) submit(now time.Time, a *Actions, s Submission) bool {
	if l.tokens < 1 {
		return false
	}
	l.tokens--
	l.of(s.Node).notBefore = now.Add(l.p.Again)
	a.Submit = append(a.Submit, s)
	return true
}

func (l *Planner) of(node string) *memory {
	m := l.nodes[node]
	if m == nil {
		m = &memory{}
		l.nodes[node] = m
	}
	return m
}
