package slurm

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func policy() Policy {
	return Policy{Longest: time.Hour, Shortest: time.Minute, LeastGap: 10 * time.Second, Ahead: true, MaxAhead: 100, Rate: 10, Burst: 100,
		Again: time.Second, AgainMost: time.Minute}
}

func nodes(states ...NodeState) []Node {
	var out []Node
	for i, s := range states {
		out = append(out, Node{Name: fmt.Sprint("n", i+1), State: s})
	}
	return out
}

// short writes actions as text.
func short(a Actions) string {
	out := ""
	for _, id := range a.Cancel {
		out += fmt.Sprintf("-%d ", id)
	}
	for _, s := range a.Submit {
		out += fmt.Sprintf("%s:%v", s.Node, s.Limit)
		if s.LimitMin > 0 {
			out += fmt.Sprintf("/%v", s.LimitMin)
		}
		out += " "
	}
	return out
}

func TestDecide(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	for name, c := range map[string]struct {
		policy func(*Policy)
		view   View
		want   string
	}{
		"idle nodes first, busy ones ahead": {view: View{Nodes: nodes(Busy, Idle, Mixed, Unusable)}, want: "n2:1h0m0s n1:1h0m0s n3:1h0m0s "},
		"not ahead":                         {policy: func(p *Policy) { p.Ahead = false }, view: View{Nodes: nodes(Busy, Idle, Mixed)}, want: "n2:1h0m0s "},
		"few ahead":                         {policy: func(p *Policy) { p.MaxAhead = 1 }, view: View{Nodes: nodes(Busy, Busy)}, want: "n1:1h0m0s "},
		"those that wait count": {policy: func(p *Policy) { p.MaxAhead = 1 }, view: View{Nodes: nodes(Busy, Busy),
			Jobs: []Job{{ID: 1, Node: "n2", State: Pending, Limit: time.Hour}}}},
		"each has one": {view: View{Nodes: nodes(Busy, Idle, Busy),
			Jobs: []Job{{ID: 1, Node: "n1", State: Running}, {ID: 2, Node: "n2", State: Pending}, {ID: 3, Node: "n3", State: Pending, Limit: time.Hour}}}},
		"one that ends is as good as none": {view: View{Nodes: nodes(Busy), Jobs: []Job{{ID: 1, Node: "n1", State: Ending}}}, want: "n1:1h0m0s "},
		"doubles go, the younger first": {view: View{Nodes: nodes(Busy, Busy), Jobs: []Job{{ID: 9, Node: "n1", State: Pending, Limit: time.Hour},
			{ID: 8, Node: "n1", State: Running}, {ID: 7, Node: "n2", State: Pending, Limit: time.Hour}, {ID: 6, Node: "n2", State: Pending, Limit: time.Hour}}}, want: "-7 -9 "},
		"a node that is no more":     {view: View{Nodes: nodes(Busy), Jobs: []Job{{ID: 1, Node: "n1", State: Running}, {ID: 2, Node: "x", State: Pending}}}, want: "-2 "},
		"a gap of minutes and a bit": {view: View{Nodes: nodes(Idle), Plan: Plan{"n1": now.Add(7*time.Minute + 50*time.Second)}}, want: "n1:7m0s/1m0s "},
		"a gap below a minute":       {view: View{Nodes: nodes(Idle), Plan: Plan{"n1": now.Add(30 * time.Second)}}, want: "n1:1m0s/1m0s "},
		"a gap of nothing":           {view: View{Nodes: nodes(Idle), Plan: Plan{"n1": now.Add(9 * time.Second)}}},
		"a plan of yesterday":        {view: View{Nodes: nodes(Idle), Plan: Plan{"n1": now.Add(-time.Hour)}}},
		"wanted in days":             {view: View{Nodes: nodes(Idle), Plan: Plan{"n1": now.Add(90 * time.Hour)}}, want: "n1:1h0m0s/1m0s "},
		"made for a gap that is over": {view: View{Nodes: nodes(Busy), Jobs: []Job{{ID: 1, Node: "n1", State: Pending, Limit: 5 * time.Minute,
			Submitted: now.Add(-2 * time.Minute)}}}, want: "-1 n1:1h0m0s "},
		"others wait": {view: View{Nodes: nodes(Idle, Busy), Waiting: true}, want: "n1:1h0m0s/1m0s n2:1h0m0s/1m0s "},
		"made while others waited": {view: View{Nodes: nodes(Busy, Busy), Jobs: []Job{
			{ID: 1, Node: "n1", State: Pending, Limit: time.Hour, LimitMin: time.Minute, Submitted: now.Add(-2 * time.Minute)},
			{ID: 2, Node: "n2", State: Pending, Limit: time.Hour, LimitMin: time.Minute, Submitted: now.Add(-2 * time.Second)}}}, want: "-1 n1:1h0m0s "},
		"made while others waited, who still do": {view: View{Nodes: nodes(Busy), Waiting: true, Jobs: []Job{
			{ID: 1, Node: "n1", State: Pending, Limit: time.Hour, LimitMin: time.Minute, Submitted: now.Add(-2 * time.Minute)}}}},
		"draining nodes": {view: View{Nodes: nodes(Draining, Draining, Draining, Draining, Unusable), Jobs: []Job{{ID: 1, Node: "n1", State: Running},
			{ID: 2, Node: "n2", State: Pending}, {ID: 3, Node: "n3", State: Ending}, {ID: 5, Node: "n5", State: Running}}}, want: "-1 -2 "},
		"a burst": {policy: func(p *Policy) { p.Burst = 2 }, view: View{Nodes: nodes(Busy, Idle, Idle, Idle)}, want: "n2:1h0m0s n3:1h0m0s "},
	} {
		t.Run(name, func(t *testing.T) {
			p := policy()
			if c.policy != nil {
				c.policy(&p)
			}
			l, err := NewPlanner(p)
			if err != nil {
				t.Fatal(err)
			}
			a := l.Decide(now, c.view)
			slices.Sort(a.Cancel)
			if got := short(a); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// A job that waits for an idle node, because the scheduler may not shorten it, is replaced by one that it may shorten,
// but only while other jobs wait.
func TestStuckJobMayBeCut(t *testing.T) {
	l, _ := NewPlanner(policy())
	now := time.Unix(1_700_000_000, 0)
	v := View{Nodes: nodes(Idle), Waiting: true, Jobs: []Job{{ID: 1, Node: "n1", State: Pending, Limit: time.Hour, Submitted: now.Add(-time.Hour)}}}
	look := func(after time.Duration, want string) {
		t.Helper()
		now = now.Add(after)
		if got := short(l.Decide(now, v)); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	look(0, "")
	look(time.Minute, "") // it is about to start, perhaps
	v.Waiting = false
	look(time.Second, "") // no job is in its way
	v.Waiting = true
	look(time.Second, "")
	look(time.Minute, "")
	look(time.Second, "-1 n1:1h0m0s/1m0s ")
	v.Jobs = []Job{{ID: 2, Node: "n1", State: Pending, Limit: time.Hour, LimitMin: time.Minute, Submitted: now}}
	look(time.Hour, "")
}

func TestRateIsBounded(t *testing.T) {
	p := policy()
	p.Burst, p.Rate = 5, 2
	l, _ := NewPlanner(p)
	now := time.Unix(1_700_000_000, 0)
	all := nodes(slices.Repeat([]NodeState{Idle}, 200)...)
	total := 0
	for i := range 100 { // 10 s in which every job is gone at once
		total += len(l.Decide(now.Add(time.Duration(i)*100*time.Millisecond), View{Nodes: all}).Submit)
	}
	if total < 24 || total > 25 {
		t.Errorf("%d submissions in 9.9 s, want 5 at once and 2 each second", total)
	}
}

// A node whose jobs fail is tried ever more rarely, and at once again when one has worked.
func TestFailingNode(t *testing.T) {
	l, _ := NewPlanner(policy())
	now := time.Unix(1_700_000_000, 0)
	idle := nodes(Idle)
	id, last := int64(0), now
	var waits []time.Duration
	for end := now.Add(10 * time.Minute); now.Before(end); now = now.Add(time.Second) {
		ended := map[int64]string{}
		for _, gone := range l.Gone(nil) {
			ended[gone] = "FAILED"
		}
		if a := l.Decide(now, View{Nodes: idle, Ended: ended}); len(a.Submit) > 0 {
			id++
			waits = append(waits, now.Sub(last))
			last = now
			now = now.Add(time.Second)
			l.Decide(now, View{Nodes: idle, Jobs: []Job{{ID: id, Node: "n1", State: Running}}})
		}
	}
	if len(waits) < 10 || len(waits) > 18 || waits[len(waits)-1] < time.Minute || waits[3] > 20*time.Second {
		t.Errorf("in ten minutes %d jobs that fail, after %v", len(waits), waits)
	}
	l.Decide(now, View{Nodes: idle, Jobs: []Job{{ID: 1000, Node: "n1", State: Running}}})
	now = now.Add(time.Minute)
	if a := l.Decide(now, View{Nodes: idle, Ended: map[int64]string{1000: "PREEMPTED"}}); len(a.Submit) != 1 {
		t.Errorf("after one that was preempted: %q", short(a))
	}
}

func TestPolicyIsChecked(t *testing.T) {
	for name, change := range map[string]func(*Policy){
		"longest": func(p *Policy) { p.Longest = 0 }, "shortest": func(p *Policy) { p.Shortest = time.Second },
		"order": func(p *Policy) { p.Shortest = 2 * time.Hour }, "rate": func(p *Policy) { p.Rate = 0 }, "burst": func(p *Policy) { p.Burst = 0 },
		"ahead": func(p *Policy) { p.MaxAhead = -1 }, "again": func(p *Policy) { p.Again = -1 },
	} {
		p := policy()
		change(&p)
		if _, err := NewPlanner(p); err == nil {
			t.Errorf("%s: %+v is accepted", name, p)
		}
	}
}

// world simulates a Slurm that starts and ends jobs at random, within the rules of Slurm.
type world struct {
	r     *rand.Rand
	nodes []Node
	jobs  map[int64]*Job
	next  int64
	now   time.Time
}

func (w *world) apply(a Actions) {
	for _, id := range a.Cancel {
		delete(w.jobs, id)
	}
	for _, s := range a.Submit {
		w.next++
		w.jobs[w.next] = &Job{ID: w.next, Node: s.Node, State: Pending, Limit: s.Limit, Submitted: w.now}
	}
}

func (w *world) running(node string) (n int) {
	for _, j := range w.jobs {
		if j.Node == node && j.State == Running {
			n++
		}
	}
	return n
}

func (w *world) step() {
	w.now = w.now.Add(time.Duration(100+w.r.IntN(3000)) * time.Millisecond)
	for _, id := range sortedKeys(w.jobs) {
		j := w.jobs[id]
		i := slices.IndexFunc(w.nodes, func(n Node) bool { return n.Name == j.Node })
		switch {
		case j.State == Pending && i >= 0 && w.nodes[i].State == Idle && w.r.IntN(2) == 0 && w.running(j.Node) == 0:
			j.State, w.nodes[i].State = Running, Busy
		case j.State == Running && w.r.IntN(10) == 0:
			delete(w.jobs, id)
			if i >= 0 {
				w.nodes[i].State = []NodeState{Idle, Busy, Unusable, Draining}[w.r.IntN(4)]
			}
		}
	}
	for i := range w.nodes {
		if w.running(w.nodes[i].Name) == 0 && w.r.IntN(8) == 0 {
			w.nodes[i].State = []NodeState{Idle, Busy, Mixed, Unusable, Draining}[w.r.IntN(5)]
		}
	}
}

func (w *world) view() View {
	v := View{Nodes: slices.Clone(w.nodes)}
	for _, id := range sortedKeys(w.jobs) {
		v.Jobs = append(v.Jobs, *w.jobs[id])
	}
	return v
}

func sortedKeys(m map[int64]*Job) []int64 {
	var keys []int64
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Whatever Slurm does and however often the controller is replaced, also by two at once: soon there is one job for each
// node that can be used, and never does one that lives and looks again leave two.
func TestOneJobForEachNode(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := &world{r: r, nodes: nodes(Idle, Idle, Busy, Mixed, Unusable, Draining), jobs: map[int64]*Job{}, now: time.Unix(1_700_000_000, 0)}
		l, _ := NewPlanner(policy())
		for range 400 {
			w.step()
			if r.IntN(20) == 0 {
				l, _ = NewPlanner(policy()) // killed and started anew
			}
			v := w.view()
			if r.IntN(20) == 0 { // a second one, that saw the same
				other, _ := NewPlanner(policy())
				w.apply(other.Decide(w.now, v))
			}
			w.apply(l.Decide(w.now, v))
		}
		for range 3 { // quiet, and time enough
			w.now = w.now.Add(5 * time.Minute)
			w.apply(l.Decide(w.now, w.view()))
		}
		count := map[string]int{}
		for _, j := range w.jobs {
			count[j.Node]++
		}
		for _, n := range w.nodes {
			if n.State.usable() && count[n.Name] != 1 || n.State == Draining && count[n.Name] != 0 || count[n.Name] > 1 {
				t.Errorf("seed %d: node %s is %v and has %d jobs", seed, n.Name, n.State, count[n.Name])
			}
		}
	}
}
