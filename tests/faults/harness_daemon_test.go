package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// daemon is an executor or resource manager with a supervisor that restarts it whenever it has ended.
type daemon struct {
	world   *world
	on      machine
	name    string
	program string
	before  []string // arguments before the program, of a command that runs it
	args    []string
	address string
	log     lines

	mu      sync.Mutex
	process *process
	retired bool
	ready   chan struct{} // closed when the current process answers
	ended   chan struct{} // closed when the supervisor has ended
}

// daemon starts a daemon on a free port, which it keeps after a restart.
func (w *world) daemon(on machine, name, program string, args ...string) *daemon {
	w.Helper()
	d := &daemon{world: w, on: on, name: name, program: built(w, program), args: args, ended: make(chan struct{})}
	if w.files > 0 {
		d.before = []string{"-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, w.files), d.program}
		d.program = "/bin/sh"
	}
	if w.apart {
		d.args = append(d.args, "--allow-plaintext")
	}
	if err := d.start(on.address() + ":0"); err != nil {
		w.Fatal(err)
	}
	d.waitReady()
	w.mu.Lock()
	w.daemons = append(w.daemons, d)
	w.mu.Unlock()
	go d.supervise()
	return d
}

// newManagerOn starts a resource manager. Callers that are started later use it.
func (w *world) newManagerOn(on machine, args ...string) *daemon {
	w.Helper()
	if on.namespace != "" {
		args = append([]string{"--providers", "shm,tcp", "--data-listen", "0.0.0.0:7300-7399", "--data-advertise", on.address()}, args...)
	}
	w.manager = w.daemon(on, "manager", "bin/resource-manager", args...)
	w.env = append(w.env, "RFAAS_MANAGER="+w.manager.address)
	return w.manager
}

// newExecutor starts an executor with two cores, and with the manager if there is one.
func (w *world) newExecutor(name string, args ...string) *daemon {
	return w.newExecutorOn(here, name, args...)
}

func (w *world) newExecutorOn(on machine, name string, args ...string) *daemon {
	w.Helper()
	if on.namespace != "" {
		args = append([]string{"--providers", "shm,tcp", "--data-listen", "0.0.0.0:7200-7299", "--data-advertise", on.address()}, args...)
	}
	args = append([]string{"--cores", "2", "--memory", "1800MiB", "--providers", provider(), "--grace", "2s", "--client-return", "500ms", "--pool", "0", "--cache-time", "0s"}, args...)
	if w.manager != nil {
		args = append(args, "--manager", w.manager.address)
	}
	return w.daemon(on, name, "bin/executor", args...)
}

func (d *daemon) start(address string) error {
	ready := make(chan struct{})
	var once sync.Once
	p, err := d.world.run(d.on, nil, func(s string) {
		d.log.add(s)
		if _, rest, ok := strings.Cut(s, "msg=ready address="); ok {
			once.Do(func() {
				a, _, _ := strings.Cut(rest, " ")
				if d.address == "" {
					d.address = a
				}
				close(ready)
			})
		}
	}, d.program, slices.Concat(d.before, []string{"--listen", address}, d.args)...)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.process, d.ready = p, ready
	return nil
}

// supervise restarts the daemon until it is retired.
func (d *daemon) supervise() {
	defer close(d.ended)
	for {
		<-d.current().done
		d.mu.Lock()
		retired := d.retired
		d.mu.Unlock()
		if retired {
			return
		}
		d.log.add("--- ended (" + d.current().state.String() + "), started again")
		if err := d.start(d.address); err != nil {
			d.world.Errorf("%s is not started again: %v", d.name, err)
			return
		}
		select { // a daemon that ends at once must not be started a thousand times a second
		case <-d.current().done:
			time.Sleep(50 * time.Millisecond)
		case <-d.ready:
		}
	}
}

func (d *daemon) current() *process {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.process
}

func (d *daemon) pid() int { return d.current().pid() }

// kill kills the daemon, and the supervisor restarts it.
func (d *daemon) signal(s syscall.Signal) { d.current().signal(s) }

// waitReady waits until the current process answers. It fails the test at once if that process ends instead.
func (d *daemon) waitReady() {
	d.world.Helper()
	d.mu.Lock()
	process, ready := d.process, d.ready
	d.mu.Unlock()
	select {
	case <-ready:
	case <-process.done:
		d.world.Fatalf("%s ended before it was ready (%v):\n%s", d.name, process.state, d.log.tail(4000))
	case <-time.After(30 * time.Second):
		d.world.Fatalf("%s was not ready within 30 s:\n%s", d.name, d.log.tail(4000))
	}
}

// retire kills the daemon and does not restart it.
func (d *daemon) retire() {
	d.mu.Lock()
	d.retired = true
	d.mu.Unlock()
	d.signal(syscall.SIGKILL)
	<-d.ended
}

// stop ends the daemon as an administrator would, and checks its exit status.
func (d *daemon) stop() {
	d.world.Helper()
	d.mu.Lock()
	d.retired = true
	d.mu.Unlock()
	p := d.current()
	p.end(20*time.Second, d.name)
	<-d.ended
	if code := p.state.ExitCode(); code != 0 {
		d.world.Errorf("%s ended with %v:\n%s", d.name, p.state, d.log.tail(2000))
	}
}

// zygote returns the executor's zygote; 0 while there is none.
func (d *daemon) zygote() int {
	zygotes, _ := living(d.pid())
	if len(zygotes) != 1 {
		return 0
	}
	return zygotes[0]
}

// executorState is a line of `rfaas executors --json`.
type executorState struct {
	Address         string `json:"address"`
	State           string `json:"state"`
	Cores           int    `json:"cores"`
	FreeCores       int    `json:"free_cores"`
	MemoryBytes     uint64 `json:"memory_bytes"`
	FreeMemoryBytes uint64 `json:"free_memory_bytes"`
}

// executors returns the manager's executors as the command rfaas prints them.
func (w *world) executors() ([]executorState, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	program, args := w.client.command(w, nil, built(w, "bin/rfaas"), []string{"executors", "--json", fmt.Sprintf("--allow-plaintext=%v", w.apart)})
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = w.env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("rfaas executors: %w: %s", err, stderr.Bytes())
	}
	var list []executorState
	return list, json.Unmarshal(out, &list)
}
