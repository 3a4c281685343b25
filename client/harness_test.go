package client_test

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/agenttest"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

var objects = leakcheck.Objects(dataplane.Live)

// compiled creates the directory for programs and libraries that tests compile.
var compiled = sync.OnceValues(func() (string, error) { return os.MkdirTemp("", "rfaas-client-test") })

func TestMain(m *testing.M) {
	code := agenttest.Run(root, func() int { return leakcheck.Run(m, nil, objects) })
	if dir, err := compiled(); err == nil {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// root is the repository, where make build left the programs.
const root = ".."

var built = testkit.Built

const managerProgram = "bin/resource-manager"

// daemon is a running executor or resource manager.
type daemon struct {
	t          testing.TB
	cmd        *exec.Cmd
	far        int // its process on the other machine; 0: it runs on this one
	Address    string
	done       chan struct{} // closed when it has ended
	registered chan struct{} // closed when an executor has registered
	readied    chan string   // receives the line of each program that becomes ready in the process, including the first
	refused    chan string   // receives the line of each refused handover
}

// onThisNode among the arguments of a daemon runs it on the first of two nodes.
const onThisNode = "--on-this-node"

// daemonCommand returns a command that runs a daemon on a free port: on loopback; with two nodes (scripts/two-nodes) or RFAAS_TEST_REMOTE, on the
// second node or machine. A resource manager runs there only if RFAAS_TEST_MANAGER is "there".
func daemonCommand(t testing.TB, program, secret string, args []string) *exec.Cmd {
	line := []string{built(t, program), "--secret-file", secret}
	there := program != managerProgram || os.Getenv("RFAAS_TEST_MANAGER") == "there"
	if i := slices.Index(args, onThisNode); i >= 0 {
		there, args = false, slices.Delete(slices.Clone(args), i, i+1)
	}
	port := net.JoinHostPort(hostOf(t, there), "0")
	line = append(line, "--listen", port)
	if far != "" || secondNode != "" {
		line = append(line, "--allow-plaintext")
	}
	switch {
	case secondNode != "":
		line = append(line, "--data-listen", port)
		if program == managerProgram {
			line = append(line, "--providers", "shm,tcp")
		}
		if there {
			line = append([]string{"nsenter", "--net=" + secondNode, "--uts=" + os.Getenv("TWO_NODES_UTS"), "--"}, line...)
		}
	case far != "" && there:
		line = append([]string{built(t, remoteProgram), "run", far, "--", "sh", "-c", `echo "far process $$" >&2; exec "$0" "$@"`}, line...)
	}
	line = append(line, args...)
	return exec.Command(line[0], line[1:]...)
}

// start runs a daemon and waits until it is ready. The daemon ends with the test.
func start(t testing.TB, program, secret string, args ...string) *daemon {
	t.Helper()
	leakcheck.Once(t, objects)
	cmd := daemonCommand(t, program, secret, args)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, cmd: cmd, done: make(chan struct{}), registered: make(chan struct{}),
		readied: make(chan string, 64), refused: make(chan string, 64)}
	registered := sync.OnceFunc(func() { close(d.registered) })
	ready := make(chan string, 1)
	var log strings.Builder
	go func() {
		defer close(d.done)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			log.WriteString(s.Text() + "\n")
			_, _ = fmt.Sscanf(s.Text(), "far process %d", &d.far) // before it is ready
			if _, rest, ok := strings.Cut(s.Text(), "msg=ready address="); ok {
				addr, _, _ := strings.Cut(rest, " ")
				select {
				case ready <- addr:
				default: // another program has taken its place
				}
				d.readied <- s.Text()
			}
			if strings.Contains(s.Text(), "not handed over") {
				d.refused <- s.Text()
			}
			if strings.Contains(s.Text(), "msg=registered ") {
				registered()
			}
		}
		cmd.Wait()
	}()
	t.Cleanup(func() {
		d.signal(syscall.SIGTERM)
		select {
		case <-d.done:
		case <-time.After(20 * time.Second):
			d.signal(syscall.SIGKILL)
			t.Errorf("%s did not end within 20 s of SIGTERM", program)
			<-d.done
		}
		if t.Failed() {
			t.Logf("%s said:\n%s", program, log.String())
		}
	})
	select {
	case d.Address = <-ready:
	case <-d.done:
		t.Fatalf("%s ended at once:\n%s", program, log.String())
	case <-time.After(testkit.Bound):
		t.Fatalf("%s was not ready within %v", program, testkit.Bound)
	}
	return d
}

// joined waits until an executor has registered.
func (d *daemon) joined(t testing.TB) *daemon {
	t.Helper()
	select {
	case <-d.registered:
	case <-time.After(testkit.Bound):
		t.Fatalf("executor %s has not registered within %v", d.Address, testkit.Bound)
	}
	return d
}

// provider returns the provider of these tests: RFAAS_TEST_PROVIDER, else shm.
func provider() string {
	if p := os.Getenv("RFAAS_TEST_PROVIDER"); p != "" {
		return p
	}
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		return "verbs"
	}
	return "shm"
}

// world is an executor with a session to it.
type world struct {
	*daemon
	secret  string
	manager string // its address; "": the session has no manager
	session *client.Session
}

// secretFile returns the path of a new secret, or of the secret that both machines share.
func secretFile(t testing.TB) string {
	return cmp.Or(os.Getenv("RFAAS_TEST_SECRET"), filepath.Join(t.TempDir(), "secret"))
}

// newWorld starts an executor that lends two cores. If RFAAS_TEST_MANAGER is "here" or "there", the session finds it
// through a resource manager.
func newWorld(t testing.TB, args ...string) *world {
	t.Helper()
	leakcheck.Once(t, objects)
	w := &world{secret: secretFile(t)}
	args = append([]string{"--cores", "2", "--providers", provider(), "--grace", "2s"}, args...)
	if os.Getenv("RFAAS_TEST_MANAGER") == "" {
		w.daemon = start(t, "bin/executor", w.secret, args...)
		w.session = w.connect(t, w.options())
		return w
	}
	w.manager = start(t, managerProgram, w.secret).Address
	w.daemon = start(t, "bin/executor", w.secret, append(args, "--manager", w.manager)...)
	w.joined(t)
	w.session = w.connect(t, w.options())
	return w
}

// options returns the address for more sessions of the world.
func (w *world) options() client.Options {
	if w.manager != "" {
		return client.Options{Manager: w.manager}
	}
	return client.Options{Executor: w.Address}
}

func (w *world) connect(t testing.TB, o client.Options) *client.Session {
	t.Helper()
	o.SecretFile = w.secret
	if o.Provider == "" {
		o.Provider = provider()
	}
	s, err := client.Connect(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !t.Failed() {
			t.Logf("close: %v", err)
		}
	})
	return s
}

// lease takes a lease of the test functions, in mode Adaptive unless the options set another.
func (w *world) lease(t testing.TB, o client.LeaseOptions) *client.Lease {
	t.Helper()
	if o.Library == "" {
		o.Library = built(t, "build/functions/echo.so")
	}
	l, err := w.session.Lease(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// ends returns the next value from c and fails if none comes within 20 s.
func ends[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		t.Fatalf("%s has not ended within 20 s", what)
		panic("not reached")
	}
}

// untilRuns waits until a worker runs a function.
func untilRuns(t *testing.T, w *client.Worker, name string) {
	t.Helper()
	within(t, testkit.Bound, "worker runs "+name, func() bool {
		i, err := w.Inspect(context.Background())
		return err == nil && i.Running == name
	})
}

func function(t testing.TB, l *client.Lease, name string) *client.Function {
	t.Helper()
	f, err := l.Function(name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}
