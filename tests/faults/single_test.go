package faults

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Single kills and stops: what a caller notices of each, and how soon. The bounds hold on a busy machine.

// bound is d, or more if the machine is emulated.
func bound(d time.Duration) time.Duration {
	if provider() == "verbs" {
		return 3 * d
	}
	return d
}

// pair is an executor, a resource manager and a client that makes calls of 20 ms all the time.
type pair struct {
	*world
	executor *daemon
	caller   *caller
	language string
	on       machine // of the callers
}

func newPair(t *testing.T, language string) *pair {
	return newPairOn(t, language, here, here, here)
}

// newPairOn is newPair with each part on a machine of its choice.
func newPairOn(t *testing.T, language string, executor, manager, caller machine) *pair {
	return newPairIn(newWorld(t), language, executor, manager, caller)
}

func newPairIn(w *world, language string, executor, manager, caller machine) *pair {
	w.Helper()
	w.newManagerOn(manager)
	p := &pair{world: w, executor: w.newExecutorOn(executor, "executor"), language: language, on: caller}
	w.eventually(waitBound, "the executor has registered", func() bool { return strings.Contains(p.executor.log.tail(1<<20), "msg=registered") })
	p.caller = p.newSteady(1)
	p.ready(p.caller)
	return p
}

// ready waits until a caller has the lease that it keeps.
func (p *pair) ready(c *caller) {
	p.Helper()
	select {
	case <-c.ready:
	case <-c.done:
		p.Fatalf("caller %s ended (%v):\n%s", c.name, c.state, c.log.tail(2000))
	case <-time.After(30 * time.Second):
		p.Fatalf("caller %s is not ready after 30 s:\n%s\nits threads:\n%s", c.name, c.log.tail(2000), stacks(c.pid()))
	}
	p.served(c, bound(20*time.Second))
}

func (p *pair) newSteady(seed uint64, env ...string) *caller {
	return p.newCaller(callerOptions{language: p.language, steady: true, seed: seed, maxBytes: 4096, pause: 20 * time.Millisecond,
		timeout: callerBound, on: p.on, env: env})
}

// single runs a test for clients in C and in Go at the same time; on verbs, where the machine is emulated, for one of them.
func single(t *testing.T, onVerbs string, test func(*pair)) {
	t.Parallel()
	if testing.Short() {
		t.Skip("waits for what falls silent")
	}
	languages := []string{"c", "go"}
	if provider() == "verbs" {
		languages = []string{onVerbs}
	}
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			test(newPair(t, language))
		})
	}
}

// worker is the only worker; nil while there is none.
func (p *pair) worker() handle {
	var h handle
	p.eventually(10*time.Second, "the executor has one worker", func() bool {
		_, workers := living(p.executor.pid())
		ok := len(workers) == 1
		if ok {
			h, ok = hold(workers[0], p.executor.pid())
		}
		return ok
	})
	p.Cleanup(h.close)
	return h
}

func (p *pair) zygote() handle {
	h, ok := hold(p.executor.zygote(), p.executor.pid())
	if !ok {
		p.Fatal("the executor has no zygote")
	}
	p.Cleanup(h.close)
	return h
}

// served waits until a caller gets three more right results, and returns how long it took.
func (p *pair) served(c *caller, within time.Duration) time.Duration {
	p.Helper()
	before := c.right.Load()
	return p.eventually(within, "the caller is served", func() bool {
		c.check()
		p.lastly = c.log.tail(2000)
		return c.right.Load() >= before+3
	})
}

// fails waits for the next error that a caller sees, checks it, and returns how long after the hit it came.
func (p *pair) fails(c *caller, hit time.Time, within time.Duration, statuses ...client.Status) callError {
	p.Helper()
	var e callError
	p.eventually(within, "the caller sees an error", func() bool {
		c.check()
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, e = range c.errors {
			if e.at.After(hit) {
				return true
			}
		}
		p.lastly = fmt.Sprintf("%d right results, errors %v", c.right.Load(), c.errors)
		return false
	})
	took := e.at.Sub(hit)
	p.Logf("seen after %v: %s", took.Round(time.Millisecond), e.text)
	if took > within || !slices.Contains(statuses, client.Status(e.status)) {
		p.Errorf("after %v: status %d, %s; want one of %v within %v", took, e.status, e.text, statuses, within)
	}
	return e
}

// promptly does harm until the caller sees an error with one of the statuses within a time, at most three times. A machine that stands still makes it
// later. A client that learns late why its worker has died, only says that the worker is gone.
func (p *pair) promptly(within time.Duration, harm func(), statuses ...client.Status) callError {
	p.Helper()
	for try := 1; ; try++ {
		hit := time.Now()
		harm()
		e := p.fails(p.caller, hit, testkit.Bound, append(statuses, client.StatusPeerGone)...)
		took := e.at.Sub(hit)
		known := slices.Contains(statuses, client.Status(e.status))
		if known && took <= within {
			return e
		}
		if try == 3 || !known && took < 900*time.Millisecond {
			p.Fatalf("after %v: status %d, %s; want one of %v within %v", took, e.status, e.text, statuses, within)
		}
		p.served(p.caller, testkit.Bound)
	}
}

// undisturbed checks that a caller gets only right results for some time, none of them late.
func (p *pair) undisturbed(c *caller, d time.Duration) {
	p.Helper()
	c.mu.Lock()
	before := len(c.errors)
	c.mu.Unlock()
	for end := time.Now().Add(d); time.Now().Before(end); {
		p.served(c, bound(5*time.Second))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.errors) != before {
		p.Errorf("the caller saw %+v", c.errors[before:])
	}
}

// free waits until the executor holds nothing for any client.
func (p *pair) free(within time.Duration) time.Duration {
	p.Helper()
	return p.eventually(within, "every core is free", func() bool {
		list, err := p.executors()
		_, workers := living(p.executor.pid())
		p.lastly = fmt.Sprintf("%+v, %v, workers %v", list, err, workers)
		return err == nil && len(list) == 1 && list[0].FreeCores == list[0].Cores && len(workers) == 0
	})
}

func TestWorkerKilled(t *testing.T) {
	single(t, "c", func(p *pair) {
		e := p.promptly(bound(time.Second), func() { p.worker().signal(unix.SIGKILL) }, client.StatusWorkerDied)
		if !e.started || !strings.Contains(e.text, "SIGKILL") {
			p.Errorf("started %v: %s", e.started, e.text)
		}
		p.Logf("served again after %v", p.served(p.caller, bound(5*time.Second)))
		p.caller.finish(10 * time.Second)
	})
}

// A worker that is stopped for a moment costs its caller that moment.
func TestWorkerStoppedForAMoment(t *testing.T) {
	single(t, "go", func(p *pair) {
		worker := p.worker()
		worker.signal(unix.SIGSTOP)
		time.Sleep(300 * time.Millisecond) // as long as it is stopped
		worker.signal(unix.SIGCONT)
		p.undisturbed(p.caller, 200*time.Millisecond)
		p.caller.finish(bound(10 * time.Second))
	})
}

// A worker that stays stopped is killed and replaced.
func TestWorkerStopped(t *testing.T) {
	single(t, "c", func(p *pair) {
		e := p.promptly(bound(3*time.Second), func() { p.worker().signal(unix.SIGSTOP) }, client.StatusWorkerDied)
		if !e.started || !strings.Contains(e.text, "SIGSTOP") {
			p.Errorf("started %v: %s", e.started, e.text)
		}
		p.Logf("served again after %v", p.served(p.caller, bound(5*time.Second)))
		p.caller.finish(bound(10 * time.Second))
	})
}

func TestZygoteKilled(t *testing.T) {
	single(t, "go", func(p *pair) {
		p.zygote().signal(unix.SIGKILL)
		p.undisturbed(p.caller, time.Second)
		p.promptly(bound(time.Second), func() { p.worker().signal(unix.SIGKILL) }, client.StatusWorkerDied)
		p.Logf("served again after %v", p.served(p.caller, bound(5*time.Second)))
		p.caller.finish(10 * time.Second)
	})
}

// A stopped zygote disturbs no client and is replaced.
func TestZygoteStopped(t *testing.T) {
	single(t, "c", func(p *pair) {
		p.zygote().signal(unix.SIGSTOP)
		p.undisturbed(p.caller, time.Second)
		p.promptly(bound(time.Second), func() { p.worker().signal(unix.SIGKILL) }, client.StatusWorkerDied)
		p.Logf("served again after %v", p.served(p.caller, bound(15*time.Second)))
		p.caller.finish(10 * time.Second)
	})
}

func TestExecutorKilled(t *testing.T) {
	single(t, "go", func(p *pair) {
		var workers handle
		kill := func() {
			workers = p.worker()
			p.executor.signal(syscall.SIGKILL)
		}
		// The next executor may run before the caller has asked for the state of the lease.
		if e := p.promptly(bound(time.Second), kill, client.StatusPeerGone, client.StatusLeaseEnded); !e.started {
			p.Errorf("a call that was running is not said to have started: %s", e.text)
		}
		p.Logf("served again after %v", p.served(p.caller, bound(10*time.Second)))
		if name, state, _, ok := stat(workers.pid); ok && state != 'Z' && name != "rfaas-zygote" {
			p.Errorf("worker %d of the killed executor is in state %c", workers.pid, state)
		}
		p.caller.finish(10 * time.Second)
	})
}

// Calls need no executor: they go on while it is stopped, until it has been silent for so long that it counts as dead.
func TestExecutorStopped(t *testing.T) {
	single(t, "c", func(p *pair) {
		hit := time.Now()
		p.executor.signal(syscall.SIGSTOP)
		p.undisturbed(p.caller, 3*time.Second)
		e := p.fails(p.caller, hit, bound(10*time.Second), client.StatusPeerGone, client.StatusLeaseEnded)
		if d := e.at.Sub(hit); d < 3500*time.Millisecond { // 5 s after the executor's last message, which it sends every second
			p.Errorf("given up after %v already", d)
		}
		p.executor.signal(syscall.SIGCONT)
		p.Logf("served again after %v", p.served(p.caller, bound(20*time.Second)))
		p.caller.finish(10 * time.Second)
		p.free(20 * time.Second)
	})
}

// Calls need no resource manager. New clients get an error while it is away, and are served when it is back.
func TestManagerKilled(t *testing.T) {
	single(t, "go", func(p *pair) {
		p.manager.signal(syscall.SIGKILL)
		p.undisturbed(p.caller, time.Second)
		p.served(p.newSteady(2), bound(10*time.Second))
		p.caller.finish(10 * time.Second)
	})
}

// A client whose agent has connected to the board gets a lease while the manager is stopped, because reading the board needs no answer.
// A client with a new agent gets an error that names the manager, and is served when the manager continues.
func TestManagerStopped(t *testing.T) {
	single(t, "c", func(p *pair) {
		agent := p.newAgent()
		p.manager.signal(syscall.SIGSTOP)
		hit := time.Now()
		second := p.newSteady(2)
		p.served(second, bound(callerBound))
		second.finish(10 * time.Second)
		another := p.newSteady(3, agent)
		p.undisturbed(p.caller, 2*time.Second)
		e := p.fails(another, hit, bound(callerBound+3*time.Second), client.StatusPeerGone, client.StatusDeadline)
		if !strings.Contains(e.text, p.manager.address) {
			p.Errorf("the error does not say who does not answer: %s", e.text)
		}
		p.manager.signal(syscall.SIGCONT)
		p.served(another, bound(10*time.Second))
		p.caller.finish(10 * time.Second)
	})
}

func TestClientKilled(t *testing.T) {
	single(t, "go", func(p *pair) {
		p.caller.kill()
		p.Logf("everything was free after %v", p.free(bound(10*time.Second)))
	})
}

// A client that is stopped for a moment goes on. A client that stays stopped loses its lease, and gets an error when it continues.
func TestClientStopped(t *testing.T) {
	single(t, "c", func(p *pair) {
		p.caller.signal(syscall.SIGSTOP)
		time.Sleep(time.Second) // as long as it is stopped
		p.caller.signal(syscall.SIGCONT)
		p.undisturbed(p.caller, 200*time.Millisecond)
		p.caller.signal(syscall.SIGSTOP)
		p.Logf("everything was free after %v", p.free(25*time.Second))
		hit := time.Now()
		p.caller.signal(syscall.SIGCONT)
		p.fails(p.caller, hit, bound(2*time.Second), client.StatusLeaseEnded, client.StatusPeerGone, client.StatusWorkerDied)
		p.served(p.caller, bound(10*time.Second))
		p.caller.finish(10 * time.Second)
	})
}
