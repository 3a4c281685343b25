package faults

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	stopMost     = 2 * time.Second // the longest SIGSTOP of the storm
	callerBound  = 5 * time.Second // for a caller's control operations
	waitBound    = 15 * time.Second
	recoverBound = 20 * time.Second
	killsPerCalm = 10
)

// attached matches an executor's message that it has connected to the manager's memory.
var attached = regexp.MustCompile(`msg=registered .* by=memory|msg="the manager's memory can be reached now"`)

// storm has everything that faults can hit.
type storm struct {
	*world
	*rand.Rand
	name      string  // prefix of the figures
	nodes     *nodes  // whose link also fails; nil: none
	server    machine // of the resource manager and the executors
	executors []*daemon
	callers   []*caller
	next      uint64 // seed of the next caller
	stopped   []stopped
	wantFlaps int
	kills     int
	flaps     int           // of the link
	down      time.Duration // how long the link was down
	hits      map[string]int

	right                 int64 // right results of callers that are gone
	longCall, longControl time.Duration
	recoveries            []time.Duration // time of each calm
	tick                  func()          // called while time passes; nil: nothing
}

// stopped is a process that was stopped, and what happens next.
type stopped struct {
	handle
	what  string
	until time.Time
	then  unix.Signal
	done  func() // called after SIGKILL
	after func() // after then; nil: nothing
}

// TestRandomKills kills and stops workers, zygotes, executors, the resource manager and clients at random, while
// clients in C and Go make calls all the time. Every call ends with a right result or a named error, no wait is longer than a bound,
// every client is served again in each calm, and nothing is left at the end.
func TestRandomKills(t *testing.T) {
	if testing.Short() {
		t.Skip("kills for a while")
	}
	newStorm(t, newWorld(t), "kills").run()
}

func newStorm(t *testing.T, w *world, name string) *storm {
	return &storm{world: w, name: name, Rand: rand.New(rand.NewPCG(seed(t), 0)), hits: map[string]int{}}
}

// run is the whole storm.
func (s *storm) run() {
	w := s.world
	w.Helper()
	sharedBefore := shared()
	w.newManagerOn(s.server)
	for i := range 2 {
		s.executors = append(s.executors, w.newExecutorOn(s.server, fmt.Sprintf("executor-%d", i)))
	}
	before, managerBefore := s.begin()
	began := time.Now()
	for s.kills < *killsFlag || s.flaps < s.wantFlaps {
		s.hit()
		s.pass(50*time.Millisecond + time.Duration(s.Int64N(int64(450*time.Millisecond+s.linkLeft()))))
		if s.kills%killsPerCalm == 0 {
			s.calm()
		}
		if s.Failed() {
			s.FailNow()
		}
	}
	s.calm()
	took := time.Since(began)
	for _, c := range s.callers {
		s.account(c.finish(waitBound))
	}
	s.Logf("%d kills in %v (%v), %d right results; longest wait: call %v, control operation %v", s.kills, took.Round(time.Second),
		s.summary(), s.right, s.longCall.Round(time.Millisecond), s.longControl.Round(time.Millisecond))
	s.figures()
	if s.longCall > waitBound || s.longControl > waitBound {
		s.Errorf("a caller waited longer than %v", waitBound)
	}
	s.released(before, managerBefore)
	for _, d := range append(s.executors, w.manager) {
		d.stop()
	}
	w.nothingLeft(sharedBefore)
}

// begin starts clients until each has called, records the resources of the idle daemons, and starts the clients of the storm.
func (s *storm) begin() (before []idle, managerBefore idle) {
	s.Helper()
	for i := range 4 {
		s.callers = append(s.callers, s.caller(i))
	}
	s.calm() // every client has called, so everything that is made only once exists
	for _, c := range s.callers {
		s.account(c.finish(waitBound))
	}
	// An executor whose first connection to the manager's memory failed reports by messages for 30 s, and holds less than later.
	s.eventually(40*time.Second, "the executors reach the manager's memory", func() bool {
		return !slices.ContainsFunc(s.executors, func(d *daemon) bool { return !attached.MatchString(d.log.tail(1 << 20)) })
	})
	s.eventually(10*time.Second, "the executors are idle", func() bool {
		before = before[:0]
		for _, d := range s.executors {
			if _, workers := living(d.pid()); len(workers) > 0 {
				return false
			}
			before = append(before, d.idle())
		}
		return true
	})
	managerBefore = s.manager.idle()
	for i := range s.callers {
		s.callers[i] = s.caller(i)
	}
	s.calm()
	s.recoveries = nil
	return before, managerBefore
}

// released checks that the daemons hold no more resources than before.
func (s *storm) released(before []idle, managerBefore idle) {
	s.Helper()
	s.settled(s.executors, before, 10*time.Second)
	s.eventually(10*time.Second, "the manager holds nothing for those that have gone", func() bool {
		now := s.manager.idle()
		s.lastly = fmt.Sprintf("%+v, at the start %+v; %s", now, managerBefore, held(s.manager.pid()))
		return now.files <= managerBefore.files+2 && now.mappings <= managerBefore.mappings
	})
}

// caller starts the client process in place i: C and Go, with different waiting modes.
func (s *storm) caller(i int) *caller {
	s.next++
	return s.newCaller(callerOptions{language: []string{"c", "go"}[i%2], seed: s.next, maxBytes: 200_000, mode: []int{0, 2, 2, 0}[i],
		timeout: callerBound, on: s.client})
}

// account adds the counts of a caller.
func (s *storm) account(r *report) {
	s.right += int64(r.Right)
	s.noteWaits(r.CallNS, r.ControlNS)
}

func (s *storm) noteWaits(call, control int64) {
	s.longCall = max(s.longCall, time.Duration(call))
	s.longControl = max(s.longControl, time.Duration(control))
}

// pass lets time pass, and continues or kills processes that have been stopped for long enough.
func (s *storm) pass(d time.Duration) {
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		now := time.Now()
		s.mendLink()
		if s.tick != nil {
			s.tick()
		}
		for i := 0; i < len(s.stopped); i++ {
			if v := s.stopped[i]; now.After(v.until) {
				v.signal(v.then)
				v.signal(unix.SIGCONT)
				v.close()
				if v.then == unix.SIGKILL {
					s.kills++
					if v.done != nil {
						v.done()
					}
				}
				if v.after != nil {
					v.after()
				}
				s.stopped = append(s.stopped[:i], s.stopped[i+1:]...)
				i--
			}
		}
		if now.After(end) {
			return
		}
	}
}

// hit kills or stops a process, or takes the link down, so that kills and flaps progress evenly.
func (s *storm) hit() {
	if s.flaps < s.wantFlaps && s.flaps**killsFlag <= s.kills*s.wantFlaps {
		if s.linkLeft() == 0 {
			s.flap()
		}
		return
	}
	d := s.executors[s.IntN(len(s.executors))]
	switch n := s.IntN(100); {
	case n < 42:
		if _, workers := living(d.pid()); len(workers) > 0 {
			s.strike("worker", workers[s.IntN(len(workers))], d.pid(), nil)
		}
	case n < 58:
		if zygote := d.zygote(); zygote != 0 {
			s.strike("zygote", zygote, d.pid(), nil)
		}
	case n < 74:
		s.strike("executor", d.pid(), unix.Getpid(), nil)
	case n < 84:
		s.strike("manager", s.manager.pid(), unix.Getpid(), nil)
	default:
		i := s.IntN(len(s.callers))
		c := s.callers[i]
		s.strike("client", c.pid(), unix.Getpid(), func() {
			<-c.done
			c.check()
			s.right += c.right.Load()
			s.noteWaits(c.callNS.Load(), c.controlNS.Load())
			s.callers[i] = s.caller(i)
		})
	}
}

// strike kills a process, or stops it for a while. done runs after a kill.
func (s *storm) strike(what string, pid, parent int, done func()) {
	for _, v := range s.stopped {
		if v.pid == pid {
			return // it is already stopped
		}
	}
	h, ok := hold(pid, parent)
	if !ok {
		return
	}
	if s.IntN(3) > 0 {
		s.hits[what+" killed"]++
		h.signal(unix.SIGKILL)
		h.close()
		s.kills++
		if done != nil {
			done()
		}
		return
	}
	v := stopped{handle: h, what: what, until: time.Now().Add(50*time.Millisecond + time.Duration(s.Int64N(int64(stopMost)))), done: done}
	v.then = unix.SIGCONT
	if s.IntN(3) == 0 {
		v.then = unix.SIGKILL
	}
	s.hits[what+" stopped"]++
	h.signal(unix.SIGSTOP)
	s.stopped = append(s.stopped, v)
}

// calm waits until no process is stopped, the link is up and every caller has had a right result since.
func (s *storm) calm() {
	s.Helper()
	for len(s.stopped) > 0 || s.linkLeft() > 0 {
		s.pass(0)
		time.Sleep(5 * time.Millisecond)
	}
	before := make([]int64, len(s.callers))
	for i, c := range s.callers {
		before[i] = c.right.Load()
	}
	began := time.Now()
	took := s.eventually(recoverBound, "every client is served again", func() bool {
		for i, c := range s.callers {
			c.check()
			select {
			case <-c.done:
				s.Fatalf("caller %s ended by itself (%v):\n%s", c.name, c.state, c.log.tail(4000))
			default:
			}
			if c.right.Load() == before[i] {
				if time.Since(began) > recoverBound/2 { // because collecting this takes processor time
					s.lastly = fmt.Sprintf("caller %s has no right result; it said:\n%s\nits threads:\n%s\nworkers:\n%s\nready to run:\n%s", c.name,
						c.log.tail(2000), stacks(c.pid()), scheduling(s.executors), runnable())
				}
				return false
			}
		}
		return true
	})
	s.recoveries = append(s.recoveries, took)
}

// figures prints the figures of the report.
func (s *storm) figures() {
	s.Logf("figure: %s = %d", s.name, s.kills)
	if s.wantFlaps > 0 {
		s.Logf("figure: %s.flaps = %d", s.name, s.flaps)
		s.Logf("figure: %s.link_down_s = %.1f s", s.name, s.down.Seconds())
	}
	s.Logf("figure: %s.right_results = %d", s.name, s.right)
	s.Logf("figure: %s.longest_wait_s = %.3f s", s.name, max(s.longCall, s.longControl).Seconds())
	var failed []time.Duration
	for _, c := range s.world.callers {
		for _, e := range c.failures() {
			failed = append(failed, e.wait)
		}
	}
	s.percentiles(s.name+".failed_wait", failed)
	s.percentiles(s.name+".all_served_again", s.recoveries)
}

// percentiles prints the number of values and their distribution.
func (s *storm) percentiles(name string, of []time.Duration) {
	s.Logf("figure: %s.count = %d", name, len(of))
	if len(of) == 0 {
		return
	}
	slices.Sort(of)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	for _, p := range []int{50, 90, 99} {
		s.Logf("figure: %s.p%d_ms = %.3f ms", name, p, ms(of[(len(of)*p+99)/100-1]))
	}
	s.Logf("figure: %s.max_ms = %.3f ms", name, ms(of[len(of)-1]))
}

func (s *storm) summary() string {
	var parts []string
	for _, what := range []string{"worker", "zygote", "executor", "manager", "client"} {
		parts = append(parts, fmt.Sprintf("%s %d+%d", what, s.hits[what+" killed"], s.hits[what+" stopped"]))
	}
	if s.wantFlaps > 0 {
		parts = append(parts, fmt.Sprintf("link %d times down, %v in all", s.flaps, s.down.Round(100*time.Millisecond)))
	}
	return strings.Join(parts, ", ")
}
