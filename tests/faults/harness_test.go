package faults

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of what is random; 0: a new one, which is printed")
	killsFlag = flag.Int("kills", 30, "kills and stops of TestRandomKills")
	callsFlag = flag.Int("calls", 50_000, "calls of TestCancelsRaceReplies")
)

// root is the repository, where make left the programs.
const root = "../.."

func TestMain(m *testing.M) {
	if os.Getenv(envCaller) != "" {
		os.Exit(callerMain(os.Args[1:]))
	}
	flag.Parse()
	// Processes whose parent was killed become our children: those that should have died are seen.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "prctl:", err)
		os.Exit(1)
	}
	started.pids = map[int]bool{}
	status := m.Run()
	for end := time.Now().Add(5 * time.Second); status == 0; time.Sleep(5 * time.Millisecond) {
		left := strays()
		if len(left) == 0 {
			break
		}
		if time.Now().After(end) {
			fmt.Fprintln(os.Stderr, "processes are left after all tests:", left)
			status = 1
		}
	}
	os.Exit(status)
}

// seed is the test's seed, printed so that a failure can be run again.
func seed(t *testing.T) uint64 {
	s := *seedFlag
	if s == 0 {
		s = uint64(time.Now().UnixNano()) % 1_000_000
	}
	t.Logf("seed %d (run again with -seed %d)", s, s)
	return s
}

// built returns the path of something that make makes, or fails.
func built(t testing.TB, path string) string {
	t.Helper()
	p, err := filepath.Abs(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%s is missing: run make build test-programs first", path)
	}
	return p
}

// provider is what the tests run on: verbs in the virtual machine, where a missing device is a failure.
func provider() string {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		return "verbs"
	}
	return "shm"
}

// world is what a test starts: everything in it is of one secret and one directory for temporary files.
type world struct {
	testing.TB
	dir     string
	env     []string
	secret  string
	manager *daemon

	mu      sync.Mutex
	daemons []*daemon
	callers []*caller
	lastly  string // what eventually saw last
}

// started are the processes that any test started and did not wait for yet.
var started struct {
	sync.Mutex
	pids map[int]bool
}

// newWorld makes an empty world. At the test's end everything in it is killed.
func newWorld(t testing.TB) *world {
	w := &world{TB: t, dir: t.TempDir()}
	if err := os.Mkdir(filepath.Join(w.dir, "tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RFAAS_") {
			w.env = append(w.env, kv)
		}
	}
	w.secret = filepath.Join(w.dir, "secret")
	if other != "" { // both machines have it
		w.secret = built(t, "build/twovm/secret")
		w.env = append(w.env, "RFAAS_ALLOW_PLAINTEXT=1")
	}
	w.env = append(w.env, "TMPDIR="+filepath.Join(w.dir, "tmp"), "RFAAS_SECRET_FILE="+w.secret, "RFAAS_PROVIDER="+provider())
	t.Cleanup(func() {
		for _, d := range w.daemons {
			d.retire()
		}
		for _, c := range w.callers {
			c.process.kill()
		}
		if t.Failed() {
			for _, d := range w.daemons {
				t.Logf("%s said:\n%s", d.name, d.log.tail(8000))
			}
		}
	})
	return w
}

// ---- processes ----

// process is a running program, its standard output read line by line.
type process struct {
	world *world
	cmd   *exec.Cmd
	done  chan struct{} // closed when it is reaped and its output is read
	state *os.ProcessState
}

// run starts a program; line gets each line of its output, standard error included.
func (w *world) run(on machine, env []string, line func(string), program string, args ...string) (*process, error) {
	program, args = on.command(w, env, program, args)
	cmd := exec.Command(program, args...)
	cmd.Env = append(append([]string(nil), w.env...), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = out, out
	started.Lock() // before anybody looks for processes that nobody has started
	err = cmd.Start()
	if err == nil {
		started.pids[cmd.Process.Pid] = true
	}
	started.Unlock()
	out.Close()
	if err != nil {
		r.Close()
		return nil, err
	}
	p := &process{world: w, cmd: cmd, done: make(chan struct{})}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer r.Close()
		b := bufio.NewReader(r)
		for {
			s, err := b.ReadString('\n')
			if s != "" {
				line(strings.TrimSuffix(s, "\n"))
			}
			if err != nil {
				return
			}
		}
	}()
	go func() {
		_ = cmd.Wait()
		<-read // ends when the last process that has the pipe is gone
		started.Lock()
		delete(started.pids, cmd.Process.Pid)
		started.Unlock()
		p.state = cmd.ProcessState
		close(p.done)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// kill ends the process, stopped or not.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// end asks the process to end and fails the test when it does not within d.
func (p *process) end(d time.Duration, what string) {
	p.world.Helper()
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(d):
		where := stacks(p.pid())
		p.kill()
		p.world.Fatalf("%s did not end within %v of SIGTERM; its threads:\n%s", what, d, where)
	}
}

// stacks is where the threads of a process are.
func stacks(pid int) string {
	var b strings.Builder
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		comm, _ := os.ReadFile(task + "/comm")
		at, _ := os.ReadFile(task + "/syscall")
		stack, _ := os.ReadFile(task + "/stack")
		fmt.Fprintf(&b, "%s %s system call %s\n%s", filepath.Base(task), bytes.TrimSpace(comm), bytes.TrimSpace(at), stack)
	}
	return b.String()
}

// lines keeps the end of what a program said.
type lines struct {
	mu   sync.Mutex
	text []byte
}

func (l *lines) add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.text) > 1<<20 {
		l.text = append([]byte(nil), l.text[len(l.text)/2:]...)
	}
	l.text = append(append(l.text, s...), '\n')
}

func (l *lines) tail(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text[max(0, len(l.text)-n):])
}

// ---- daemons ----

// daemon is an executor or resource manager under a supervisor, which starts it again whenever it has ended.
type daemon struct {
	world   *world
	on      machine
	name    string
	program string
	args    []string
	address string
	log     lines

	mu      sync.Mutex
	process *process
	retired bool
	ready   chan struct{} // closed when the present process answers
	ended   chan struct{} // closed when the supervisor has ended
}

// daemon starts a daemon on a free port, which it keeps when it is started again.
func (w *world) daemon(on machine, name, program string, args ...string) *daemon {
	w.Helper()
	d := &daemon{world: w, on: on, name: name, program: built(w, program), args: args, ended: make(chan struct{})}
	if other != "" {
		d.args = append(d.args, "--allow-plaintext")
	}
	if err := d.start(on.address() + ":0"); err != nil {
		w.Fatal(err)
	}
	select {
	case <-d.ready:
	case <-d.process.done:
		w.Fatalf("%s ended at once:\n%s", name, d.log.tail(4000))
	case <-time.After(30 * time.Second):
		w.Fatalf("%s was not ready within 30 s", name)
	}
	w.mu.Lock()
	w.daemons = append(w.daemons, d)
	w.mu.Unlock()
	go d.supervise()
	return d
}

// newManager starts a resource manager; callers that are started later ask it.
func (w *world) newManager() *daemon { return w.newManagerOn(here) }

func (w *world) newManagerOn(on machine) *daemon {
	w.Helper()
	w.manager = w.daemon(on, "manager", "bin/resource-manager")
	w.env = append(w.env, "RFAAS_MANAGER="+w.manager.address)
	return w.manager
}

// newExecutor starts an executor that lends two cores, with the manager if there is one.
func (w *world) newExecutor(name string, args ...string) *daemon {
	return w.newExecutorOn(here, name, args...)
}

func (w *world) newExecutorOn(on machine, name string, args ...string) *daemon {
	w.Helper()
	args = append([]string{"--cores", "2", "--memory", "2GiB", "--providers", provider(), "--grace", "2s", "--holder-return", "500ms", "--warm-pool", "0", "--keep-time", "0s"}, args...)
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
	}, d.program, append([]string{"--listen", address}, d.args...)...)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.process, d.ready = p, ready
	return nil
}

// supervise starts the daemon again until it is retired.
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
		select { // one that ends at once must not be started a thousand times a second
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

// kill kills the daemon; the supervisor starts another.
func (d *daemon) signal(s syscall.Signal) { d.current().signal(s) }

// waitReady waits until the present process answers.
func (d *daemon) waitReady() {
	d.mu.Lock()
	ready := d.ready
	d.mu.Unlock()
	select {
	case <-ready:
	case <-time.After(30 * time.Second):
		d.world.Errorf("%s was not ready within 30 s:\n%s", d.name, d.log.tail(2000))
	}
}

// retire kills the daemon for good.
func (d *daemon) retire() {
	d.mu.Lock()
	d.retired = true
	d.mu.Unlock()
	d.signal(syscall.SIGKILL)
	<-d.ended
}

// stop ends the daemon as an administrator would, and checks that it ends well.
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

// executors asks the manager as a person would.
func (w *world) executors() ([]executorState, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, built(w, "bin/rfaas"), "executors", "--json", fmt.Sprintf("--allow-plaintext=%v", other != ""))
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

// ---- callers ----

// caller is a client process; its lines are counted as they come.
type caller struct {
	*process
	world *world
	name  string
	log   lines
	ready chan struct{} // closed after its first lease

	right, callNS, controlNS atomic.Int64

	mu     sync.Mutex
	wrongs []string
	errors []callError
	report *report
}

// callError is a call or control operation of a caller that ended with an error of the connection or lease class.
type callError struct {
	at      time.Time
	status  int
	started bool
	wait    time.Duration
	text    string
}

// callerOptions say what a caller does; see testdata/caller.c.
type callerOptions struct {
	language string // "c" or "go"
	steady   bool
	seed     uint64
	maxBytes int
	pause    time.Duration
	mode     int // wait mode
	timeout  time.Duration
	on       machine
	env      []string
}

// newCaller starts a client process.
func (w *world) newCaller(o callerOptions) *caller {
	w.Helper()
	c := &caller{world: w, name: fmt.Sprintf("%s-%d", o.language, o.seed), ready: make(chan struct{})}
	program, env := built(w, "build/faults/caller"), o.env
	if o.language == "go" {
		program, env = os.Args[0], append(env, envCaller+"=1")
	}
	kind := "storm"
	if o.steady {
		kind = "steady"
	}
	var err error
	c.process, err = w.run(o.on, env, c.line, program, kind, built(w, "build/faults/work.so"), fmt.Sprint(o.seed), fmt.Sprint(o.maxBytes),
		fmt.Sprint(o.pause.Microseconds()), fmt.Sprint(o.mode), fmt.Sprint(o.timeout.Milliseconds()))
	if err != nil {
		w.Fatal(err)
	}
	w.mu.Lock()
	w.callers = append(w.callers, c)
	w.mu.Unlock()
	return c
}

func (c *caller) line(s string) {
	word, rest, _ := strings.Cut(s, " ")
	if word != "ok" {
		c.log.add(s)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch word {
	case "ready":
		close(c.ready)
	case "ok":
		var right, call, control int64
		if n, _ := fmt.Sscan(rest, &right, &call, &control); n == 3 {
			c.right.Store(right)
			c.callNS.Store(call)
			c.controlNS.Store(control)
		}
	case "err":
		var e callError
		var started int
		r := strings.NewReader(rest)
		if n, _ := fmt.Fscan(r, &e.status, &started, &e.wait); n == 3 {
			text, _ := io.ReadAll(r)
			e.at, e.started, e.text = time.Now(), started != 0, strings.TrimSpace(string(text))
			c.errors = append(c.errors, e)
		}
	case "end":
		c.report = &report{}
		if err := json.Unmarshal([]byte(rest), c.report); err != nil {
			c.wrongs = append(c.wrongs, "report: "+err.Error())
		}
	case "wrong":
		c.wrongs = append(c.wrongs, rest)
	default: // a panic, a sanitizer, an assertion
		c.wrongs = append(c.wrongs, s)
	}
}

// check fails the test when the caller has seen what must never be.
func (c *caller) check() {
	c.world.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, s := range c.wrongs {
		if i == 20 {
			c.world.Errorf("caller %s: and %d more", c.name, len(c.wrongs)-i)
			break
		}
		c.world.Errorf("caller %s: %s", c.name, s)
	}
	c.wrongs = nil
}

// finish ends the caller in good order within d and checks what it reports.
func (c *caller) finish(d time.Duration) *report {
	c.world.Helper()
	c.process.end(d, "caller "+c.name)
	c.check()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.report == nil {
		c.world.Fatalf("caller %s ended (%v) without a report:\n%s", c.name, c.state, c.log.tail(2000))
	}
	if r := c.report; r.Files[1] > r.Files[0] || r.Mappings[1] > r.Mappings[0] {
		c.world.Errorf("caller %s leaks: %d open files at the start and %d at the end, %d and %d mappings", c.name, r.Files[0],
			r.Files[1], r.Mappings[0], r.Mappings[1])
	}
	return c.report
}

// eventually fails the test unless cond holds within d, and returns how long it took. cond may say in w.lastly what it
// saw.
func (w *world) eventually(d time.Duration, what string, cond func() bool) time.Duration {
	w.Helper()
	w.lastly = ""
	start := time.Now()
	for !cond() {
		if time.Since(start) > d {
			w.Fatalf("not within %v: %s; %s", d, what, w.lastly)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(start)
}
