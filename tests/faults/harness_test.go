package faults

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/agenttest"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of what is random; 0: a new one, which is printed")
	killsFlag = flag.Int("kills", 30, "kills of TestRandomKills and TestBetweenNodesRandomKills")
	flapsFlag = flag.Int("flaps", 10, "how often TestBetweenNodesRandomKills takes the link away")
	callsFlag = flag.Int("calls", 50_000, "calls of TestCancelsRaceReplies")

	longestFlapFlag = flag.Duration("longest-flap", 8*time.Second, "longest time without the link in TestBetweenNodesRandomKills")
)

// root is the repository, where make has built the programs.
const root = "../.."

func TestMain(m *testing.M) {
	if os.Getenv(envCaller) != "" {
		os.Exit(callerMain(os.Args[1:]))
	}
	flag.Parse()
	// The kernel makes orphans children of this process. So the test finds orphans that should have ended.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "prctl:", err)
		os.Exit(1)
	}
	started.pids = map[int]bool{}
	stop, err := agenttest.Serve(root)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, pid := range children(os.Getpid()) { // the agent
		started.pids[pid] = true
	}
	status := m.Run()
	stop()
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

var built = testkit.Built

// provider is the provider of the tests: verbs in the virtual machine, where a missing device is a failure.
func provider() string {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		return "verbs"
	}
	return "shm"
}

// world has all processes of a test, which share a secret and a directory for temporary files.
type world struct {
	testing.TB
	dir     string
	env     []string
	secret  string
	manager *daemon
	client  machine // where clients, their agent and the command rfaas run
	apart   bool    // the processes are on several machines, so control messages need RFAAS_ALLOW_PLAINTEXT
	files   int     // how many descriptors a daemon may have; 0: as many as this process

	mu      sync.Mutex
	daemons []*daemon
	callers []*caller
	lastly  string // last state that eventually saw
}

// started are the processes that tests have started and not waited for yet.
var started struct {
	sync.Mutex
	pids map[int]bool
}

// newWorld makes an empty world. At the end of the test all its processes are killed.
func newWorld(t testing.TB) *world {
	w := &world{TB: t, dir: t.TempDir(), apart: other != ""}
	if err := os.Mkdir(filepath.Join(w.dir, "tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RFAAS_") || strings.HasPrefix(kv, "RFAAS_AGENT") {
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
	// Linux schedules the processes of a session as one group (autogroup). Under Linux 6.18, one group with callers on several CPUs has
	// kept these for itself for over 5 s, while workers and kernel threads on them were ready to run. Groups of one process do not starve others.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	r, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = out, out
	started.Lock() // before the test looks for processes that it did not start
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

// newAgent starts a new agent, and returns the environment variable by which clients use it.
func (w *world) newAgent() string {
	w.Helper()
	socket := filepath.Join(w.TempDir(), "agent.sock")
	var log lines
	agent, err := w.run(w.client, nil, log.add, built(w, "libexec/rfaas-agent"), "--socket", socket)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(agent.kill)
	w.eventually(10*time.Second, "the new agent listens", func() bool {
		w.lastly = log.tail(2000)
		select {
		case <-agent.done:
			w.Fatalf("the agent ended before it listened (%v):\n%s", agent.state, w.lastly)
		default:
		}
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return "RFAAS_AGENT_SOCKET=" + socket
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// kill ends the process, stopped or not.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// end sends SIGTERM and fails the test if the process does not end within d.
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

// stacks returns the state of the threads of a process.
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

// lines keeps the end of a program's output.
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

// eventually fails the test unless cond holds within d, and returns how long it took. cond may store what it saw in
// w.lastly.
func (w *world) eventually(d time.Duration, what string, cond func() bool) time.Duration {
	w.Helper()
	w.lastly = ""
	start := time.Now()
	for {
		late := time.Since(start) > d // before cond: a pause of this process alone then still allows one more check
		if cond() {
			break
		}
		if late {
			w.Fatalf("not within %v: %s; %s", d, what, w.lastly)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(start)
}
