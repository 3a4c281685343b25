package cluster

import (
	"bytes"
	"context"
	"encoding/json"
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

	"github.com/rfaas-go/rfaas/tests/testkit"
)

type cluster struct {
	*testing.T
	dir, root string   // root has the installed files
	env       []string // of all processes
}

func newCluster(t *testing.T) *cluster {
	dir := t.TempDir()
	root, err := os.MkdirTemp("", "rfaas-installed")
	if err == nil {
		t.Cleanup(func() { os.RemoveAll(root) })
		err = os.Chmod(root, 0o755) // for the user of the executors
	}
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{T: t, dir: dir, root: root}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RFAAS_") {
			c.env = append(c.env, kv)
		}
	}
	c.env = append(c.env, "RFAAS_SECRET_FILE="+filepath.Join(dir, "secret"), "RFAAS_PROVIDER=shm")
	return c
}

// install replaces the installed files with those of a tree. It renames each new file over the old one, as a package manager does.
func (c *cluster) install(tree string) {
	c.Helper()
	for _, name := range installed {
		to := filepath.Join(c.root, name)
		b, err := os.ReadFile(filepath.Join(tree, name))
		if err == nil {
			err = os.MkdirAll(filepath.Dir(to), 0o755)
		}
		if err == nil {
			err = os.WriteFile(to+".new", b, 0o755)
		}
		if err == nil {
			err = os.Rename(to+".new", to)
		}
		if err != nil {
			c.Fatalf("%v (make test-upgrade builds the earlier revision)", err)
		}
	}
}

// process is a daemon or a client. Its lines are those of standard error or, for a client, of standard output.
type process struct {
	cmd     *exec.Cmd
	address string
	done    chan struct{}

	mu    sync.Mutex
	lines []string
	read  int // lines that await has looked at
}

func (c *cluster) start(program string, args ...string) *process {
	c.Helper()
	return c.startAt("127.0.0.1:0", program, args...)
}

func (c *cluster) startAt(address, program string, args ...string) *process {
	c.Helper()
	cmd := exec.Command(filepath.Join(c.root, program), append([]string{"--listen", address}, args...)...)
	cmd.Env = c.env
	p := c.run(cmd, cmd.StderrPipe)
	p.ready(c.T)
	return p
}

// ready waits until a daemon is ready.
func (p *process) ready(t *testing.T) {
	t.Helper()
	_, rest, _ := strings.Cut(p.await(t, "msg=ready "), "address=")
	p.address, _, _ = strings.Cut(rest, " ")
}

func (c *cluster) run(cmd *exec.Cmd, pipe func() (io.ReadCloser, error)) *process {
	c.Helper()
	p := &process{cmd: cmd, done: make(chan struct{})}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := pipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		c.Fatal(err)
	}
	go func() {
		defer close(p.done)
		var rest []byte
		buffer := make([]byte, 1<<16)
		for {
			n, err := out.Read(buffer)
			rest = append(rest, buffer[:n]...)
			for i := bytes.IndexByte(rest, '\n'); i >= 0; i = bytes.IndexByte(rest, '\n') {
				p.mu.Lock()
				p.lines = append(p.lines, string(rest[:i]))
				p.mu.Unlock()
				rest = rest[i+1:]
			}
			if err != nil {
				break
			}
		}
		_ = cmd.Wait()
	}()
	c.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-p.done
		if c.Failed() {
			p.mu.Lock()
			c.Logf("%s:\n%s", filepath.Base(cmd.Path), strings.Join(p.lines[max(0, len(p.lines)-15):], "\n"))
			p.mu.Unlock()
		}
	})
	return p
}

// await returns the next line that contains text. The test fails if a line contains one of the further texts.
func (p *process) await(t *testing.T, text string, fatal ...string) (found string) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%s says %q", filepath.Base(p.cmd.Path), text), func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for ; p.read < len(p.lines); p.read++ {
			for _, f := range fatal {
				if strings.Contains(p.lines[p.read], f) {
					t.Fatal(p.lines[p.read])
				}
			}
			if strings.Contains(p.lines[p.read], text) {
				found = p.lines[p.read]
				p.read++
				return true
			}
		}
		select {
		case <-p.done:
			t.Fatalf("%s ended: %v", filepath.Base(p.cmd.Path), p.cmd.ProcessState)
		default:
		}
		return false
	})
	return found
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// end ends a daemon as an administrator does.
func (p *process) end(t *testing.T) {
	t.Helper()
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(testkit.Bound):
		t.Fatalf("%s has not ended", filepath.Base(p.cmd.Path))
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("%s ended with %v", filepath.Base(p.cmd.Path), p.cmd.ProcessState)
	}
}

// runs reports whether the process executes the program that is now at path.
func (p *process) runs(t *testing.T, path string) bool {
	t.Helper()
	return sameProgram(t, p.cmd.Process.Pid, path)
}

func sameProgram(t *testing.T, pid int, path string) bool {
	t.Helper()
	a, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return os.SameFile(a, b)
}

// client is a process that holds leases.
type client struct {
	*process
	name, socket string
	stdin        io.Closer
}

// client starts a client of a tree with a number of leases. The client's name is that of the tenant that pays for them.
func (c *cluster) client(name, tree, agent string, leases int) *client {
	c.Helper()
	program := filepath.Join(current, "build/cluster/holder")
	if tree == earlier {
		program += "-earlier"
	}
	agent, err := filepath.Abs(agent)
	if err != nil {
		c.Fatal(err)
	}
	library, err := filepath.Abs(filepath.Join(current, "build/functions/echo.so"))
	if err != nil {
		c.Fatal(err)
	}
	k := &client{name: name, socket: filepath.Join(c.dir, name+".sock")}
	cmd := exec.Command(program, library, strconv.Itoa(leases), name)
	cmd.Env = append(append([]string{}, c.env...), "RFAAS_AGENT="+agent, "RFAAS_AGENT_SOCKET="+k.socket)
	cmd.Stderr = os.Stderr
	if k.stdin, err = cmd.StdinPipe(); err != nil {
		c.Fatal(err)
	}
	k.process = c.run(cmd, cmd.StdoutPipe)
	c.Cleanup(func() {
		if pid := k.agent(c); pid != 0 {
			_ = syscall.Kill(pid, syscall.SIGTERM)
		}
		if log, err := os.ReadFile(k.socket + ".log"); err == nil && c.Failed() {
			c.Logf("agent of client %s:\n%s", name, log[max(0, len(log)-2000):])
		}
	})
	return k
}

// rounds waits until n rounds over all leases, all begun from now on, have ended, and checks that nothing has failed.
func (k *client) rounds(t *testing.T, after string, n int) {
	t.Helper()
	k.mu.Lock()
	k.read = len(k.lines)
	k.mu.Unlock()
	for range n + 1 { // the first has begun before
		k.await(t, "round ")
	}
	k.unfailed(t, after)
}

func (k *client) unfailed(t *testing.T, after string) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, line := range k.lines {
		if strings.HasPrefix(line, "failed") {
			t.Fatalf("client %s, after %s: %s", k.name, after, line)
		}
	}
}

// agent returns the process id of the client's agent; 0: none answers. The credentials of the socket do not help, because the client made
// the socket.
func (k *client) agent(c *cluster) int {
	c.Helper()
	out, err := c.command([]string{"RFAAS_AGENT_SOCKET=" + k.socket}, "agent", "status", "--json")
	var status struct{ PID int }
	if err != nil || json.Unmarshal(out, &status) != nil {
		return 0
	}
	return status.PID
}

// finish makes the client release its leases, and returns the number of its calls.
func (k *client) finish(t *testing.T) uint64 {
	t.Helper()
	k.stdin.Close()
	n, err := strconv.ParseUint(strings.TrimPrefix(k.await(t, "end "), "end "), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	k.unfailed(t, "the release")
	return n
}

// get returns the answer of a daemon's HTTP port at a unix socket; empty: it does not answer.
func (c *cluster) get(socket, path string) (status int, body string) {
	web := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		}}}
	r, err := web.Get("http://daemon" + path)
	if err != nil {
		return 0, ""
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return 0, ""
	}
	return r.StatusCode, string(b)
}

// command runs the command rfaas of this revision.
func (c *cluster) command(env []string, args ...string) ([]byte, error) {
	cmd := exec.Command(filepath.Join(current, "bin/rfaas"), args...)
	cmd.Env = append(append([]string{}, c.env...), env...)
	return cmd.CombinedOutput()
}

// listed waits until the resource manager lists n open executors.
func (c *cluster) listed(n int) {
	c.Helper()
	testkit.Eventually(c, fmt.Sprintf("%d executors are listed", n), func() bool {
		out, err := c.command(nil, "executors", "--json")
		var list []struct{ State string }
		if err != nil || json.Unmarshal(out, &list) != nil || len(list) != n {
			return false
		}
		for _, x := range list {
			if x.State != "idle" && x.State != "busy" {
				return false
			}
		}
		return true
	})
}

// bill returns the billed calls of each tenant.
func (c *cluster) bill() map[string]uint64 {
	c.Helper()
	out, err := c.command(nil, "bill", "--json")
	if err != nil {
		c.Fatalf("rfaas bill: %v\n%s", err, out)
	}
	var bills []struct {
		Tenant string
		Lines  []struct{ Item, Units string }
	}
	if err := json.Unmarshal(out, &bills); err != nil {
		c.Fatalf("%v\n%s", err, out)
	}
	calls := map[string]uint64{}
	for _, b := range bills {
		for _, l := range b.Lines {
			if l.Item == "million-calls" {
				if calls[b.Tenant], err = strconv.ParseUint(l.Units, 10, 64); err != nil {
					c.Fatal(err)
				}
			}
		}
	}
	return calls
}
