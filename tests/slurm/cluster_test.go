package slurm

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
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var (
	clusterFlag = flag.Bool("cluster", false, "start clusters; without it these tests are skipped")
	roundsFlag  = flag.Int("rounds", 20, "jobs in a measurement")
)

func TestMain(m *testing.M) {
	if as := os.Getenv(asEnv); as != "" {
		os.Exit(runAs(as, os.Args[1:]))
	}
	os.Exit(m.Run())
}

// bound is how long a test waits for an expected event; longer on an emulated machine.
var bound = map[bool]time.Duration{false: 60 * time.Second, true: 180 * time.Second}[os.Getenv("RFAAS_REQUIRE_VERBS") != ""]

// root is the repository, where make has built the programs.
func root(t *testing.T) string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// cluster is a Slurm cluster of scripts/slurm/testcluster.
type cluster struct {
	t      *testing.T
	root   string
	dir    string // of the cluster
	began  time.Time
	files  string // directory of the test, writable on all nodes
	script string

	mu    sync.Mutex
	lists []listing
	seen  *sync.Cond
}

// up starts a cluster until the end of the test. Without root and Slurm it fails, because these tests only run on request.
func up(t *testing.T, nodes int, args ...string) *cluster {
	t.Helper()
	if !*clusterFlag {
		t.Skip("starts a Slurm cluster: go test -cluster, or make test-slurm")
	}
	files, err := os.MkdirTemp("", "rfaas-slurm-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(files) })
	if err := os.Chmod(files, 0o755); err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, root: root(t), dir: filepath.Join(files, "c"), files: files}
	c.seen = sync.NewCond(&c.mu)
	c.script = filepath.Join(c.root, "scripts/slurm/testcluster")
	t.Cleanup(func() {
		if t.Failed() || os.Getenv("SLURM_TEST_LOGS") != "" {
			c.logs()
		}
		if out, err := c.testcluster(bound, "down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		if left := processes(c.dir); len(left) > 0 {
			t.Errorf("processes of the cluster are left: %v", left)
		}
	})
	c.began = time.Now()
	if out, err := c.testcluster(2*bound, append([]string{"up", strconv.Itoa(nodes)}, args...)...); err != nil {
		t.Fatalf("up: %v\n%s", err, out)
	}
	t.Logf("%d nodes are up after %v", nodes, time.Since(c.began).Round(time.Millisecond))
	return c
}

// testcluster runs scripts/slurm/testcluster.
func (c *cluster) testcluster(limit time.Duration, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.script, append([]string{"--dir", c.dir}, args...)...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// logTail is how many bytes of a log a failed test prints.
const logTail = 400000

// logs prints the ends of all logs.
func (c *cluster) logs() {
	for _, pattern := range []string{c.files + "/*.log", c.dir + "/*.log", c.dir + "/n*/slurmd.log"} {
		names, _ := filepath.Glob(pattern)
		for _, name := range names {
			b, _ := os.ReadFile(name)
			c.t.Logf("--- %s\n%s", strings.TrimPrefix(name, c.files+"/"), b[max(0, len(b)-logTail):])
		}
	}
}

// environment is the environment of programs in the cluster.
func (c *cluster) environment() []string {
	return append(os.Environ(), "RFAAS_SECRET_FILE="+c.files+"/secret", "RFAAS_EXECUTOR_MANAGER=head:7464", "RFAAS_MANAGER=head:7464",
		"RFAAS_ALLOW_PLAINTEXT=1", "RFAAS_EXECUTOR_ALLOW_PLAINTEXT=true", "RFAAS="+c.root+"/bin/rfaas", "RFAAS_SLURM_SOCKET="+c.socket(),
		"RFAAS_AGENT="+c.root+"/libexec/rfaas-agent", "RFAAS_AGENT_LINGER=1s", "XDG_RUNTIME_DIR=", // an agent for each node
		"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_mpi_yield_when_idle=1")
}

// socket is a path at which each node has its own file.
func (c *cluster) socket() string { return c.dir + "/local/rfaas/slurm.sock" }

// command returns a command on a node, or on head.
func (c *cluster) command(ctx context.Context, node string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.script, append([]string{"--dir", c.dir, "exec", "-n", node}, args...)...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = c.files, c.environment(), time.Second
	return cmd
}

// run runs a command and returns its standard output.
func (c *cluster) run(node string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	cmd := c.command(ctx, node, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%s on %s: %w: %s", strings.Join(args, " "), node, err, errs.String())
	}
	return out.String(), err
}

func (c *cluster) must(node string, args ...string) string {
	c.t.Helper()
	out, err := c.run(node, args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// daemon starts a command that runs until the end of the test, or until stop. Its output goes to a log.
func (c *cluster) daemon(name, node string, args ...string) (stop func()) {
	c.t.Helper()
	log, err := os.OpenFile(filepath.Join(c.files, name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := c.command(context.Background(), node, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	log.Close()
	ended := make(chan struct{})
	go func() {
		cmd.Wait()
		close(ended)
	}()
	stop = sync.OnceFunc(func() {
		// The script is a shell. The program that it runs is found by its arguments.
		for _, pid := range processes(strings.Join(args, "\x00")) {
			syscall.Kill(pid, syscall.SIGTERM)
		}
		select {
		case <-ended:
		case <-time.After(bound):
			c.t.Errorf("%s does not end", name)
			cmd.Process.Kill()
			<-ended
		}
	})
	c.t.Cleanup(stop)
	return stop
}

// processes returns processes whose arguments contain a text, in which zeros separate arguments.
func processes(text string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err == nil && pid != os.Getpid() && bytes.Contains(b, []byte(text)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// self starts this test binary on a node as one of the processes of runAs. Closing stdin ends it.
func (c *cluster) self(as, node, mark string, args ...string) (stdin io.Closer, stdout *bufio.Reader, wait func() error) {
	c.t.Helper()
	exe, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := c.command(context.Background(), node, append([]string{exe}, args...)...)
	cmd.Env = append(cmd.Env, asEnv+"="+as, markEnv+"="+mark)
	in, err := cmd.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	return in, bufio.NewReader(out), cmd.Wait
}

// ------------------------------------------------------------------------------------- the manager's list

// headAddress is the address of the head node, as scripts/slurm/testcluster has it.
const headAddress = "10.99.0.1"

// manage starts a resource manager with arguments and follows its list.
func (c *cluster) manage(args ...string) {
	c.t.Helper()
	c.daemon("manager", "head", append([]string{c.root + "/bin/resource-manager", "--listen", "0.0.0.0:7464", "--allow-plaintext", "--heartbeat", "500ms"}, args...)...)
	wait(c.t, "the secret", func() bool { _, err := os.Stat(c.files + "/secret"); return err == nil })
	in, out, ended := c.self("watcher", "head", "", "head:7464")
	done := make(chan struct{})
	go func() {
		defer close(done)
		for d := json.NewDecoder(out); ; {
			var l listing
			if d.Decode(&l) != nil {
				return
			}
			c.mu.Lock()
			c.lists = append(c.lists, l)
			c.seen.Broadcast()
			c.mu.Unlock()
		}
	}()
	c.t.Cleanup(func() {
		in.Close()
		<-done
		ended()
	})
}

// wait waits for a state that has no event.
func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(bound); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", bound, what)
		}
	}
}

// await returns the first list at or after a time for which ok holds. The list that was current at that time counts too.
func (c *cluster) await(what string, from time.Time, ok func(up map[string]listed) bool) listing {
	c.t.Helper()
	expired := false
	timer := time.AfterFunc(bound, func() {
		c.mu.Lock()
		expired = true
		c.seen.Broadcast()
		c.mu.Unlock()
	})
	defer timer.Stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for next := 0; ; {
		for ; next < len(c.lists); next++ {
			l := c.lists[next]
			over := l.At.Before(from) && (next+1 < len(c.lists) && c.lists[next+1].At.Before(from))
			if !over && ok(upByNode(l)) {
				return l
			}
		}
		if expired {
			last := listing{}
			if len(c.lists) > 0 {
				last = c.lists[len(c.lists)-1]
			}
			c.t.Fatalf("not within %v: %s; the list is %+v", bound, what, last.Executors)
		}
		c.seen.Wait()
	}
}

// upByNode returns the executors that accept leases.
func upByNode(l listing) map[string]listed {
	up := map[string]listed{}
	for _, e := range l.Executors {
		if e.State == "up" {
			up[e.Node] = e
		}
	}
	return up
}

// awaitAll waits until each of n nodes has an executor, and returns them.
func (c *cluster) awaitAll(n int) map[string]listed {
	c.t.Helper()
	return upByNode(c.await(fmt.Sprintf("%d executors", n), time.Now(), func(up map[string]listed) bool { return len(up) == n }))
}

// --------------------------------------------------------------------------------------------------- jobs

// taken is a job of the batch partition that has run.
type taken struct {
	submitted time.Time
	started   time.Time // of its last task
	ended     time.Time // of its last task
	nodes     []string
}

// job runs a job of high priority on whole nodes.
func (c *cluster) job(nodes int, lasts time.Duration, args ...string) taken {
	c.t.Helper()
	// All nodes and this process have the same clock.
	script := fmt.Sprintf(`echo "$(date +%%s.%%N)"; exec srun --quiet -p batch -N%d --ntasks-per-node=1 --exclusive %s sh -c 'echo "$(hostname) $(date +%%s.%%N)"; sleep %g; echo "$(hostname) $(date +%%s.%%N)"'`,
		nodes, strings.Join(args, " "), lasts.Seconds())
	out := c.must("head", "sh", "-c", script)
	var j taken
	first := map[string]bool{}
	for i, line := range strings.Split(out, "\n") {
		f := strings.Fields(line)
		at, err := strconv.ParseFloat(f[len(f)-1], 64)
		if err != nil {
			c.t.Fatalf("the job said %q", out)
		}
		when := time.UnixMicro(int64(at * 1e6))
		switch {
		case i == 0:
			j.submitted = when
		case !first[f[0]]:
			first[f[0]] = true
			j.nodes = append(j.nodes, f[0])
			if when.After(j.started) {
				j.started = when
			}
		case when.After(j.ended):
			j.ended = when
		}
	}
	if len(j.nodes) != nodes || j.ended.IsZero() {
		c.t.Fatalf("a job of %d nodes said %q", nodes, out)
	}
	slices.Sort(j.nodes)
	return j
}

// finished is a job in Slurm's records.
type finished struct{ name, state, nodes, exit string }

// records reads Slurm's file of finished jobs.
func (c *cluster) records() []finished {
	b, err := os.ReadFile(c.dir + "/jobs")
	if err != nil {
		c.t.Fatal(err)
	}
	var all []finished
	for line := range strings.Lines(string(b)) {
		f := map[string]string{}
		for _, kv := range strings.Fields(line) {
			k, v, _ := strings.Cut(kv, "=")
			f[k] = v
		}
		all = append(all, finished{f["Name"], f["JobState"], f["NodeList"], f["ExitCode"]})
	}
	return all
}

// callers starts a caller on each node. The returned functions wait until each has a lease, and return the report of each.
type callers struct {
	c     *cluster
	mark  string
	stops map[string]func() called
}

func (c *cluster) callers(nodes ...string) *callers {
	c.t.Helper()
	library := filepath.Join(c.files, "functions.so")
	if out, err := exec.Command("gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, "testdata/functions.c").CombinedOutput(); err != nil {
		c.t.Fatalf("gcc: %v\n%s", err, out)
	}
	all := &callers{c: c, mark: fmt.Sprintf("rfaas-deserter-%d-%d-", os.Getpid(), time.Now().UnixNano()), stops: map[string]func() called{}}
	for _, node := range nodes {
		in, out, ended := c.self("caller", node, all.mark+node+"-", "head:7464", library)
		leased := make(chan struct{}, 1000)
		last := make(chan called, 1)
		go func() {
			for {
				line, err := out.ReadString('\n')
				if strings.HasPrefix(line, "leased") {
					select {
					case leased <- struct{}{}:
					default:
					}
				} else if line != "" {
					var r called
					json.Unmarshal([]byte(line), &r)
					last <- r
				}
				if err != nil {
					close(last)
					return
				}
			}
		}()
		stop := sync.OnceValue(func() called {
			in.Close()
			r := <-last
			ended()
			return r
		})
		c.t.Cleanup(func() { stop() })
		select {
		case <-leased:
		case <-time.After(bound):
			c.t.Fatalf("the caller on %s got no lease", node)
		}
		all.stops[node] = stop
	}
	return all
}

// deserters returns the processes on a node that functions have left behind.
func (a *callers) deserters(node string) []int { return processes(a.mark + node + "-") }

// signal sends a signal, given by name.
func signal(pid int, name string) error {
	return syscall.Kill(pid, map[string]syscall.Signal{"STOP": syscall.SIGSTOP, "KILL": syscall.SIGKILL, "TERM": syscall.SIGTERM}[name])
}
