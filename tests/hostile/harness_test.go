package hostile

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// root is the repository, where make build left the programs.
const root = "../.."

var built = testkit.Built

// The hosts of the nodes' certificates. Node A runs the daemons, node B is hostile.
var (
	hostsA = []string{"127.0.0.1", "localhost"}
	hostsB = []string{"127.0.0.2", "node-b"}
)

// cluster is a resource manager, an executor, and two tenants: ann holds a lease, eve attacks.
type cluster struct {
	testing.TB
	T     *testing.T // of the attack that runs, or of the whole
	whole *testing.T
	dir   string
	env   []string

	manager, executor *daemon
	library           string // of the attacks

	eve    *client.Session // the tenant that attacks
	ann    *client.Session // the tenant that is attacked
	victim *client.Lease   // of ann
	answer *client.Function
}

// Errorf and the methods below report to the running attack's test.
func (c *cluster) Errorf(format string, args ...any) { c.T.Helper(); c.T.Errorf(format, args...) }
func (c *cluster) Fatal(args ...any)                 { c.T.Helper(); c.T.Fatal(args...) }
func (c *cluster) Fatalf(format string, args ...any) { c.T.Helper(); c.T.Fatalf(format, args...) }
func (c *cluster) Logf(format string, args ...any)   { c.T.Helper(); c.T.Logf(format, args...) }
func (c *cluster) Cleanup(f func())                  { c.T.Cleanup(f) }

func (c *cluster) in(name string) string { return filepath.Join(c.dir, name) }

// newCluster starts the daemons and takes ann's lease. It fails without root: only root's executor gives each worker a user id of its own.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("the hostile-tenant suite must run as root")
	}
	// Not in /tmp: each worker has a /tmp of its own, which would hide the directory.
	dir, err := os.MkdirTemp("/var/tmp", "rfaas-hostile")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // the secrets in it are mode 0600
		t.Fatal(err)
	}
	c := &cluster{TB: t, T: t, whole: t, dir: dir}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RFAAS_") && !strings.HasPrefix(kv, "HOME=") && !strings.HasPrefix(kv, "XDG_") || strings.HasPrefix(kv, "RFAAS_LEAKCHECK=") || strings.HasPrefix(kv, "RFAAS_AGENT") {
			c.env = append(c.env, kv)
		}
	}
	c.env = append(c.env, "HOME="+c.in("home"), variable+"=secret")
	for _, name := range []string{"RFAAS_TOKEN_FILE", "RFAAS_SECRET_FILE", "RFAAS_CA_FILE"} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", c.in("home"))
	raiseFiles(t)
	c.rfaas("cluster", "init", "--dir", c.in("cluster"))
	c.rfaas(append([]string{"cluster", "node", "--dir", c.in("cluster"), "--out", c.in("node-a")}, hostsA...)...)
	c.rfaas(append([]string{"cluster", "node", "--dir", c.in("cluster"), "--out", c.in("node-b")}, hostsB...)...)
	c.rfaas("cluster", "init", "--dir", c.in("other-cluster"))
	c.rfaas(append([]string{"cluster", "node", "--dir", c.in("other-cluster"), "--out", c.in("node-other")}, hostsA...)...)
	c.library = c.compile("attacks.so", attackSources(t)...)

	c.manager = c.newManager()
	c.executor = c.newExecutor("--manager", c.manager.far())
	c.eve = c.session(c.executor, c.token("eve"), -1)
	c.ann = c.session(c.executor, c.token("ann"), -1)
	if c.victim, err = c.ann.Lease(t.Context(), client.LeaseOptions{Library: c.library, Memory: 32 << 20}); err == nil {
		c.answer, err = c.victim.Function("answers")
	}
	if err != nil {
		t.Fatalf("the lease of the tenant that is attacked: %v", err)
	}
	t.Cleanup(func() {
		if err := c.victim.Release(context.Background()); err != nil {
			t.Errorf("the lease of the tenant that is attacked: %v", err)
		}
	})
	if harm := c.harm(); harm != "" {
		t.Fatal(harm)
	}
	return c
}

// newManager starts a resource manager.
func (c *cluster) newManager() *daemon {
	c.Helper()
	return c.start("bin/resource-manager", "--heartbeat", "200ms")
}

// newExecutor starts an executor that lends two cores. Its time-outs are short. Everything that concerns security has its default.
func (c *cluster) newExecutor(args ...string) *daemon {
	c.Helper()
	return c.start("bin/executor", append(args, "--cores", "2", "--memory", "1GiB", "--spawn-timeout", "2s", "--grace", "2s",
		"--charge-interval", "100ms")...)
}

// variable is in the executor's environment. Functions must not see it.
const variable = "CLOUD_ACCESS_KEY"

// raiseFiles raises the limit of descriptors of this process and of the daemons that it starts.
func raiseFiles(t *testing.T) {
	t.Helper()
	limit := unix.Rlimit{Cur: 1 << 19, Max: 1 << 19}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		return
	}
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if err == nil {
		limit.Cur = limit.Max
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	}
	if err != nil {
		t.Fatalf("descriptors: %v", err)
	}
}

// mayOpen returns the executor's hard limit of descriptors.
func mayOpen(c *cluster) int {
	c.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", c.executor.cmd.Process.Pid)) // not prlimit: the executor is another user
	if err != nil {
		c.Fatal(err)
	}
	var soft, hard int
	for line := range strings.Lines(string(b)) {
		fmt.Sscanf(line, "Max open files %d %d", &soft, &hard)
	}
	return hard
}

// rfaas runs the program rfaas and returns its output.
func (c *cluster) rfaas(args ...string) string {
	c.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, built(c, "bin/rfaas"), args...)
	cmd.Env = c.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.Fatalf("rfaas %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// token returns a tenant's token file, which it issues at the first call.
func (c *cluster) token(tenant string, args ...string) string {
	c.Helper()
	path := c.in(tenant + ".token")
	if _, err := os.Stat(path); err != nil {
		c.rfaas(append([]string{"token", "issue", "--dir", c.in("cluster"), "--tenant", tenant, "--out", path}, args...)...)
	}
	return path
}

// session connects to an executor with a token. keep is the number of released leases that it caches, -1 for none.
func (c *cluster) session(d *daemon, token string, keep int) *client.Session {
	c.Helper()
	s, err := client.Connect(context.Background(), client.Options{Executor: d.address, Provider: "shm", TokenFile: token, Timeout: patience,
		CachedLeases: keep})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { s.Close() })
	return s
}

// attackSources returns the C files of the attacks, and those of the client's own sandbox test, whose functions attack as well.
func attackSources(t testing.TB) (paths []string) {
	t.Helper()
	for _, pattern := range []string{"testdata/*.c", "../../client/testdata/hostile*.c"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("no C files match %s: %v", pattern, err)
		}
		paths = append(paths, found...)
	}
	return paths
}

// compile builds a shared library from C sources and returns its path. args are sources and flags.
func (c *cluster) compile(name string, args ...string) string {
	c.Helper()
	out := c.in(name)
	args = append([]string{"-std=gnu11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-pthread", "-o", out}, args...)
	if b, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		c.Fatalf("gcc: %v\n%s", err, b)
	}
	return out
}

// daemon is a running executor or resource manager.
type daemon struct {
	name    string
	cmd     *exec.Cmd
	address string        // of the control port
	http    string        // address of health and metrics
	done    chan struct{} // closed when it has ended

	mu    sync.Mutex
	lines int
	log   strings.Builder
}

// start runs a daemon and returns when it answers. The daemon ends with the running test.
func (c *cluster) start(program string, args ...string) *daemon {
	c.Helper()
	name := filepath.Base(program)
	if _, err := os.Stat(c.in(name + "-address")); err == nil {
		name = fmt.Sprintf("%s-of-%s", name, filepath.Base(c.T.Name()))
	}
	d := &daemon{name: name, http: freeAddress(c), done: make(chan struct{})}
	file := c.in(name + "-address")
	d.cmd = exec.Command(built(c, program), append([]string{"--listen", "127.0.0.1:0", "--address-file", file, "--http-listen", d.http,
		"--identity-dir", c.in("node-a"), "--secret-file", c.in(name + "-secret"), "--state-dir", c.in(name + "-state"), "--providers", "shm"}, args...)...)
	d.cmd.Env = c.env
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := d.cmd.StderrPipe()
	if err == nil {
		err = d.cmd.Start()
	}
	if err != nil {
		c.Fatal(err)
	}
	go d.read(bufio.NewScanner(stderr))
	c.Cleanup(func() { d.stop(c) })
	ready := until(func() bool {
		b, err := os.ReadFile(file)
		d.address = strings.TrimSpace(string(b))
		return err == nil && d.healthy() || d.ended()
	})
	if !ready || d.ended() {
		c.Fatalf("%s is not ready:\n%s", d.name, d.said())
	}
	return d
}

// freeAddress returns a free port of a loopback address that only this suite uses.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.77.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// read keeps the daemon's log until the daemon has ended.
func (d *daemon) read(s *bufio.Scanner) {
	defer close(d.done)
	for s.Scan() {
		d.mu.Lock()
		d.lines++
		if d.log.Len() < 1<<20 {
			d.log.WriteString(s.Text() + "\n")
		}
		d.mu.Unlock()
	}
	d.cmd.Wait()
}

func (d *daemon) isManager() bool { return filepath.Base(d.cmd.Path) == "resource-manager" }

// logged returns how many lines the daemon has logged.
func (d *daemon) logged() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lines
}

// ask gets a page of the daemon's HTTP port.
func (d *daemon) ask(page string, timeout time.Duration) (string, error) {
	transport := &http.Transport{DisableKeepAlives: true}
	r, err := (&http.Client{Transport: transport, Timeout: timeout}).Get("http://" + d.http + "/" + page)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", page, r.Status)
	}
	return string(b), err
}

func (d *daemon) healthy() bool {
	_, err := d.ask("healthz", patience)
	return err == nil
}

// metric returns the value of a metric without labels, -1 if there is none.
func (d *daemon) metric(name string) float64 {
	text, _ := d.ask("metrics", patience)
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == name {
			v, _ := strconv.ParseFloat(f[1], 64)
			return v
		}
	}
	return -1
}

func (d *daemon) said() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.log.String()
	return s[max(0, len(s)-8000):]
}

// since returns the daemon's log after its first n lines.
func (d *daemon) since(n int) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := strings.SplitAfter(d.log.String(), "\n")
	return strings.Join(all[min(n, len(all)):], "")
}

func (d *daemon) stop(c *cluster) {
	d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-d.done:
	case <-time.After(patience):
		d.cmd.Process.Kill()
		c.Errorf("%s does not end after SIGTERM", d.name)
		<-d.done
	}
	if c.whole.Failed() {
		c.Logf("%s said:\n%s", d.name, d.said())
	}
}

// far returns the daemon's address with a host name that clients do not take for local: they connect with TLS.
func (d *daemon) far() string { return strings.Replace(d.address, "127.0.0.1:", "LOCALHOST:", 1) }

func (d *daemon) ended() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// harm checks that the daemons run and that ann's lease answers. It returns "" if they do.
func (c *cluster) harm() string {
	for _, d := range []*daemon{c.manager, c.executor} {
		if d.ended() {
			c.Fatalf("%s has ended:\n%s", d.name, d.said())
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out := make([]byte, 64)
	n, err := c.answer.Invoke(ctx, []byte("well"), out)
	if err != nil || string(out[:n]) != "well" {
		return fmt.Sprintf("another tenant's call: %q, %v", out[:n], err)
	}
	return ""
}
