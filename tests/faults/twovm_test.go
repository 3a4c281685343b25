package faults

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// Two machines, each with its own kernel and RDMA device: `make test-twovm`. The last test of a run ends the other machine.

// lost bounds the time in which a caller notices that the other machine is silent, by the data plane's keepalive on a busy emulated
// machine.
const lost = 10 * time.Second

// Statuses by error class.
const (
	statusBusy       client.Status = -100
	statusConnection client.Status = -500
)

func twoMachines(t *testing.T) {
	if other == "" {
		t.Skip("there is one machine; make test-twovm has two")
	}
}

// The client is on this machine, the executor on the other one, the resource manager on either one.
func TestTwoMachines(t *testing.T) {
	twoMachines(t)
	for language, manager := range map[string]machine{"c": here, "go": there} {
		t.Run(language, func(t *testing.T) {
			p := newPairOn(t, language, there, manager, here)
			p.undisturbed(p.caller, time.Second)
			storm := p.newCaller(callerOptions{language: language, seed: 3, maxBytes: 200_000, timeout: callerBound})
			p.ready(storm)
			r := storm.finish(20 * time.Second)
			t.Logf("%d calls of all kinds, %d right", r.Calls, r.Right)
			p.caller.finish(20 * time.Second)
		})
	}
}

// Programs run on this machine and call functions on the other one: the tests of the C API and its C++ and Fortran layers, and an MPI
// example on two ranks, which checks all its results.
func TestProgramsAcrossMachines(t *testing.T) {
	twoMachines(t)
	newWorld(t).programs(there, "verbs")
}

// programs runs the programs on the clients' machine. on is the executor's machine; provider is the one that calls have to use.
func (w *world) programs(on machine, provider string) {
	t := w.TB
	t.Helper()
	w.newManagerOn(w.client)
	executor := w.newExecutorOn(on, "executor", "--cache-time", "1m")
	w.env = append(w.env, "TEST_REMOTE="+provider, "TEST_LIBRARY="+built(t, "build/twovm/functions.so"), "OMPI_ALLOW_RUN_AS_ROOT=1",
		"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1")
	w.known(executor)
	for _, name := range []string{"api_test", "event_test", "cpp_test", "fortran_test"} {
		var env []string
		if name == "cpp_test" || name == "fortran_test" { // they test calls without a manager
			env = []string{"RFAAS_MANAGER=", "RFAAS_EXECUTOR=" + executor.address}
		}
		w.succeeds(name, 60*time.Second, env, built(t, "build/twovm/"+name), built(t, "build/functions/echo.so"))
	}
	examples := []program{
		{"build/examples/blackscholes", []string{"--n", "20000", "--samples", "200", "--remote-share", "0.5"}, []string{"remotely (50 %)",
			"against the local ones: 0 wrong", "against published ones: 0 wrong", provider + ", executor " + executor.address}},
		{"build/examples/montecarlo", []string{"-points", "400000"}, []string{"0 counts wrong"}},
		{"build/examples/mandelbrot", []string{"120", "2"}, []string{"0 counts wrong"}},
		{"build/examples/crosssections", []string{"1", "2000"}, []string{"checked: 0 of"}},
		{"build/examples/matmul", []string{"96"}, []string{"0 numbers wrong"}},
		{"build/examples/heat", []string{"64", "50"}, []string{"0 temperatures wrong"}},
	}
	if provider == "verbs" {
		examples = examples[:1] // the others make the same calls, and run over tcp
	}
	for _, p := range examples {
		out := w.succeeds(p.path, 60*time.Second, nil, "mpirun.openmpi", append([]string{"--bind-to", "none", "-n", "2", built(t, p.path)}, p.args...)...)
		for _, want := range p.says {
			if !strings.Contains(out, want) {
				t.Errorf("%s did not say %q:\n%s", p.path, want, out)
			}
		}
	}
	executor.stop()
}

// program is an example and its output if all results are right.
type program struct {
	path string
	args []string
	says []string
}

// known waits until the resource manager lists an executor.
func (w *world) known(d *daemon) {
	w.Helper()
	w.eventually(20*time.Second, d.name+" is known", func() bool {
		list, err := w.executors()
		w.lastly = fmt.Sprintf("%+v, %v", list, err)
		return err == nil && slices.ContainsFunc(list, func(e executorState) bool { return e.Address == d.address && e.State != "silent" })
	})
}

// A program's lease moves from one executor of the other machine to the next when its executor is killed or drains. No idempotent
// call is lost or wrong.
func TestFailoverAcrossMachines(t *testing.T) {
	twoMachines(t)
	for name, c := range map[string]struct {
		manager machine
		lose    func(*daemon)
		moves   int // a lease that has moved once moves again in the first test
	}{"killed": {here, (*daemon).retire, 2}, "drained": {there, (*daemon).stop, 1}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.newManagerOn(c.manager)
			executors := map[string]*daemon{}
			more := func() {
				d := w.newExecutorOn(there, fmt.Sprintf("executor %d", len(w.daemons)), "--cores", "1")
				executors[d.address] = d
				w.known(d)
			}
			more()
			said := make(chan string, 100)
			p, err := w.run(here, nil, func(s string) { said <- s }, built(t, "build/twovm/failover_test"), built(t, "build/functions/echo.so"), fmt.Sprint(c.moves))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(p.kill)
			late := time.After(90 * time.Second)
			for moved := 0; ; {
				select {
				case s := <-said:
					t.Log(s)
					address, ok := strings.CutPrefix(s, "on ")
					if !ok {
						moved++
						continue
					}
					if moved < c.moves {
						more() // another executor runs before the current one is lost
					}
					if executors[address] == nil {
						t.Fatalf("the program is on %q", address)
					}
					c.lose(executors[address])
					continue
				case <-late:
					t.Fatalf("the program is not over; its threads:\n%s", stacks(p.pid()))
				case <-p.done:
				}
				if !p.state.Success() || moved != c.moves {
					t.Errorf("%d moves, %v", moved, p.state)
				}
				return
			}
		})
	}
}

// A stopped executor counts as dead after a silence; if it continues later, it gives up its lease. A stopped worker is killed by its
// executor.
func TestStoppedAcrossMachines(t *testing.T) {
	twoMachines(t)
	p := newPairOn(t, "go", there, there, here)
	const workers = "/proc/[0-9]*/comm | xargs -r grep -lx 'rfaas-w[0-9]*' | cut -d/ -f3"
	hit := time.Now()
	there.shell(t, "kill -STOP $(ls "+workers+")")
	e := p.fails(p.caller, hit, lost, client.StatusWorkerDied)
	if !e.started || !strings.Contains(e.text, "SIGSTOP") {
		t.Errorf("started %v: %s", e.started, e.text)
	}
	p.served(p.caller, 20*time.Second)
	hit = time.Now()
	there.shell(t, "kill -STOP $(pidof executor)")
	e = p.fails(p.caller, hit, 2*lost, client.StatusPeerGone, client.StatusLeaseEnded)
	there.shell(t, "kill -CONT $(pidof executor)")
	t.Logf("served again after %v", p.served(p.caller, 30*time.Second).Round(time.Millisecond))
	p.caller.finish(20 * time.Second)
}

// succeeds runs a program on this machine to its end, and returns its output.
func (w *world) succeeds(what string, bound time.Duration, env []string, program string, args ...string) string {
	w.Helper()
	var said lines
	p, err := w.run(w.client, env, said.add, program, args...)
	if err != nil {
		w.Fatal(err)
	}
	began := time.Now()
	select {
	case <-p.done:
	case <-time.After(bound):
		where := stacks(p.pid())
		p.kill()
		w.Fatalf("%s was not over after %v:\n%s\nits threads:\n%s", what, bound, said.tail(8000), where)
	}
	if !p.state.Success() {
		w.Errorf("%s: %v\n%s", what, p.state, said.tail(8000))
	}
	w.Logf("%s: %v after %v", what, p.state, time.Since(began).Round(time.Millisecond))
	return said.tail(8000)
}

// An outage of a second only delays calls, whether the machine's device notices it or not.
func TestLinkDownForASecond(t *testing.T) {
	twoMachines(t)
	for _, how := range []trouble{loss, unplugged} {
		t.Run(how.name, func(t *testing.T) { downForASecond(t, how) })
	}
}

func downForASecond(t *testing.T, how trouble) {
	p := newPairOn(t, "c", there, here, here)
	for try := range 5 {
		p.caller.mu.Lock()
		before := len(p.caller.errors)
		p.caller.mu.Unlock()
		down := how.blink(t)
		t.Logf("the link was down for %v; served again after %v", down.Round(time.Millisecond), p.served(p.caller, 20*time.Second))
		p.caller.mu.Lock()
		seen := p.caller.errors[before:]
		p.caller.mu.Unlock()
		switch {
		case len(seen) == 0:
			p.undisturbed(p.caller, time.Second)
			return
		case down < 1500*time.Millisecond:
			t.Fatalf("the caller saw %+v", seen)
		}
		// On a busy machine the outage may have lasted longer than a second.
		t.Logf("try %d: %s", try, seen[0].text)
		p.served(p.caller, 30*time.Second)
	}
	t.Fatal("no try took the link down for about a second")
}

// A long outage ends calls with a named error. Afterwards a new lease works, and the old one is gone. The cable stays in.
// After half a minute without a carrier, soft-RoCE of Linux 6.1 failed each new queue pair for 30 s or more, while TCP worked.
func TestCutOffForHalfAMinute(t *testing.T) {
	twoMachines(t)
	explain(t)
	p := newPairOn(t, "c", there, here, here)
	second := p.newCaller(callerOptions{language: "go", steady: true, seed: 2, maxBytes: 4096, pause: 20 * time.Millisecond, timeout: callerBound})
	p.ready(second)
	cutOff.begin(t, 30*time.Second)
	hit := time.Now()
	for _, c := range []*caller{p.caller, second} {
		e := p.fails(c, hit, lost, client.StatusPeerGone, statusConnection, client.StatusWorkerDied)
		if !e.started {
			t.Errorf("a call that was running is not said to have started: %s", e.text)
		}
	}
	for time.Since(hit) < 31*time.Second {
		time.Sleep(100 * time.Millisecond) // the machine is cut off
		p.caller.check()
		second.check()
	}
	for _, c := range []*caller{p.caller, second} {
		p.Logf("served again %v after the link was back", p.served(c, 30*time.Second).Round(time.Millisecond))
		r := c.finish(20 * time.Second)
		t.Logf("longest wait: %s %v, %s %v", r.CallOp, time.Duration(r.CallNS).Round(time.Millisecond), r.ControlOp,
			time.Duration(r.ControlNS).Round(time.Millisecond))
		if d := time.Duration(max(r.CallNS, r.ControlNS)); d > waitBound {
			t.Errorf("caller %s waited %v", c.name, d)
		}
	}
	p.free(30 * time.Second)
}

// The executor's machine is killed. Calls without another executor fail. A solver whose workers keep matrix
// rows moves to an executor of this machine, where new workers get the rows again: its residuals are the same to the last bit.
func TestExecutorMachineKilled(t *testing.T) {
	twoMachines(t)
	p := newPairOn(t, "c", there, here, here)
	second := p.newCaller(callerOptions{language: "go", steady: true, seed: 2, maxBytes: 4096, pause: 20 * time.Millisecond, timeout: callerBound})
	p.ready(second)
	solved := solverThatMoves(newWorld(t))
	hit := crash(t)
	callers := []*caller{p.caller, second}
	for _, c := range callers {
		p.fails(c, hit, lost, client.StatusPeerGone, statusConnection)
	}
	// Every further attempt gets an answer.
	for _, c := range callers {
		again := time.Now()
		p.fails(c, again, waitBound, client.StatusPeerGone, statusConnection, client.StatusDeadline, client.StatusLeaseEnded,
			statusBusy)
		r := c.finish(30 * time.Second)
		t.Logf("longest wait: %s %v, %s %v", r.CallOp, time.Duration(r.CallNS).Round(time.Millisecond), r.ControlOp,
			time.Duration(r.ControlNS).Round(time.Millisecond))
		if d := time.Duration(max(r.CallNS, r.ControlNS)); d > waitBound {
			t.Errorf("caller %s waited %v", c.name, d)
		}
	}
	solved()
}

// solverThatMoves starts a solver whose workers are on the other machine. It returns when the solver is at the iteration in which it
// waits for the end of its executor and this machine has another executor. The function that it returns waits for the solution.
func solverThatMoves(w *world) func() {
	w.Helper()
	w.newManagerOn(here)
	lost := w.newExecutorOn(there, "lost", "--cores", "2")
	w.known(lost)
	var said lines
	waits := make(chan string, 2)
	const calls, says = "conjugate: rank 0 calls on ", "0 residuals wrong, 0 numbers of the solution wrong"
	p, err := w.run(here, nil, func(s string) {
		said.add(s)
		if address, ok := strings.CutPrefix(s, calls); ok {
			waits <- address
		}
	}, "mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2",
		built(w, "build/examples/conjugate"), "8", "20", "lose")
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(p.kill)
	wait := func(what string) (address string) {
		select {
		case address = <-waits:
		case <-p.done:
			select {
			case address = <-waits: // said before its end
			default:
			}
		case <-time.After(90 * time.Second):
			w.Fatalf("the solver has not %s:\n%s\nits threads:\n%s", what, said.tail(4000), stacks(p.pid()))
		}
		return address
	}
	if address := wait("begun to wait"); address != lost.address {
		w.Fatalf("the solver calls on %q:\n%s", address, said.tail(4000))
	}
	other := w.newExecutorOn(here, "other", "--cores", "2")
	w.known(other)
	return func() {
		w.Helper()
		if address := wait("moved"); address != other.address+" now" {
			w.Errorf("the solver calls on %q, want %s", address, other.address)
		}
		wait("ended")
		if !p.state.Success() || !strings.Contains(said.tail(4000), says) {
			w.Errorf("the solver: %v, did not say %q:\n%s", p.state, says, said.tail(4000))
		}
	}
}

// The machine of the resource manager and of another client is killed. Calls go on, and the cores of the dead client are
// soon free.
func TestManagerAndClientMachineKilled(t *testing.T) {
	twoMachines(t)
	p := newPairOn(t, "c", here, there, here)
	dead := p.newCaller(callerOptions{language: "go", steady: true, seed: 2, maxBytes: 4096, pause: 20 * time.Millisecond,
		timeout: callerBound, on: there})
	p.ready(dead)
	if _, workers := living(p.executor.pid()); len(workers) != 2 {
		t.Fatalf("workers %v, want two", workers)
	}
	crash(t)
	p.undisturbed(p.caller, 3*time.Second)
	took := p.eventually(40*time.Second, "the dead client's worker is gone", func() bool {
		_, workers := living(p.executor.pid())
		return len(workers) == 1
	})
	t.Logf("its worker was gone %v later", took.Round(time.Millisecond))
	hit := time.Now()
	late := p.newSteady(3)
	e := p.fails(late, hit, waitBound, client.StatusPeerGone, client.StatusDeadline)
	t.Logf("who asks the manager: %s", e.text)
	p.undisturbed(p.caller, time.Second)
	p.caller.finish(20 * time.Second)
}
