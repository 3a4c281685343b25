package slurm

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Policy says how executor jobs follow idle nodes. All durations are above zero.
type Policy struct {
	Longest   time.Duration // time limit of a job on a node that nobody is known to want; whole minutes
	Shortest  time.Duration // least time limit, and what the scheduler may cut a job to while others wait; whole minutes
	LeastGap  time.Duration // a gap that the plan shows to be shorter is left alone
	Ahead     bool          // busy nodes too have a job, which waits: the scheduler starts it in the moment that they are idle
	MaxAhead  int           // most such jobs
	Rate      float64       // submissions per second, on average
	Burst     int           // and at once
	Again     time.Duration // between two submissions for one node, at least
	AgainMost time.Duration // the same when its jobs fail: doubled each time, up to this
}

// check says what of a policy is wrong.
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
		return fmt.Errorf("time limits from %v to %v: Slurm counts minutes, and the longest is not below the shortest", p.Shortest, p.Longest)
	case p.Rate <= 0 || p.Burst < 1 || p.MaxAhead < 0:
		return fmt.Errorf("rate %v per second, burst %d, %d jobs ahead: out of range", p.Rate, p.Burst, p.MaxAhead)
	}
	return nil
}

// View is what Slurm says at one moment.
type View struct {
	Nodes   []Node
	Jobs    []Job
	Plan    Plan
	Waiting bool             // jobs of others wait for nodes
	Ended   map[int64]string // final states of jobs that Planner.Gone has named
}

// Actions are what is to be done, in this order.
type Actions struct {
	Cancel []int64
	Submit []Submission
}

// Planner decides. It keeps what helps to be gentle (how often and how recently it did something for a node) and nothing
// that it needs to be right: one that was just made comes to the same jobs.
type Planner struct {
	p      Policy
	tokens float64
	last   time.Time
	nodes  map[string]*memory
	seen   map[int64]string // jobs of the last view, and their nodes
}

// memory is what a Planner remembers of a node.
type memory struct {
	notBefore time.Time
	failures  int
	// Since when its job waits although the node is idle, because others wait too and the scheduler may not cut the job.
	stuck time.Time
}

// NewPlanner makes a Planner.
func NewPlanner(p Policy) (*Planner, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	return &Planner{p: p, tokens: float64(p.Burst), nodes: map[string]*memory{}, seen: map[int64]string{}}, nil
}

// Gone returns the jobs that the last view had and this one has not, ascending: how they ended is worth a question.
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

// failed are the final states that speak of a job that does not work, or of a node that does not.
var failed = []string{"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}

// Decide says what to do at a time that never goes back. The caller does it before it looks again.
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
			// The scheduler may not cut it down to what is left before others' jobs, so it cannot start.
			if !m.stuck.IsZero() && now.Sub(m.stuck) > time.Minute && l.submitIdle(now, &a, v.Plan, fresh) {
				a.Cancel = append(a.Cancel, job.ID)
			}
		case job.Limit < l.p.Longest || job.LimitMin > 0 && fresh.LimitMin == 0:
			// It was made for a gap that is over, or while others waited. The next gap may be longer.
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

// learn notes how jobs ended.
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

// Refused notes that a node's job could not be submitted or has failed, and returns how long the node is left alone.
func (l *Planner) Refused(node string, now time.Time) time.Duration {
	m := l.of(node)
	m.failures++
	wait := min(l.p.Again<<min(m.failures, 16), l.p.AgainMost)
	m.notBefore = now.Add(wait)
	return wait
}

// sort finds each node's job, the one that runs or else the oldest, and cancels all others.
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
		case j.State == Ending: // as good as gone
		case !known[j.Node] || byNode[j.Node] != nil:
			a.Cancel = append(a.Cancel, j.ID)
		default:
			byNode[j.Node] = j
		}
	}
	return byNode
}

// limit is the time limit of a job that starts now, false if the gap is not worth it.
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

// leastLimit is what the scheduler may cut a node's job to. The backfill scheduler may cut a job also when nobody wants the node, so
// it is allowed only while somebody waits.
func (l *Planner) leastLimit(v View, node string) time.Duration {
	if _, wanted := v.Plan[node]; wanted || v.Waiting {
		return l.p.Shortest
	}
	return 0
}

// submitIdle submits a job that starts now, if the gap is worth it.
func (l *Planner) submitIdle(now time.Time, a *Actions, plan Plan, s Submission) bool {
	limit, ok := l.limit(now, plan, s.Node)
	s.Limit = limit
	return ok && l.submit(now, a, s)
}

// submit notes a submission if the rate allows it.
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
