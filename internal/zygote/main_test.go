package zygote

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Names of testdata/functions.c, in index order.
var testNames = []string{"echo", "crash", "aborts", "exits", "hangs", "chatty", "forks", "allocates", "extras",
	"thread_id", "threads", "fails", "surroundings", "runs_on", "takes_cpus", "mappings", "new_session"}

const (
	fnEcho = iota
	fnCrash
	fnAborts
	fnExits
	fnHangs
	fnChatty
	fnForks
	fnAllocates
	fnExtras
	fnThreadID
	fnThreads
	fnFails
	fnSurroundings
	fnRunsOn
	fnTakesCPUs
	fnMappings
	fnNewSession
)

const dataplane = "../dataplane"

// buildDir holds what the tests compile once.
var buildDir string

func TestMain(m *testing.M) {
	if os.Getenv("ZYGOTE_TEST_EXECUTOR") != "" {
		beExecutor()
		return
	}
	dir, err := os.MkdirTemp("", "zygote-test")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	buildDir = dir
	code := leakcheck.Run(m, []goleak.Option{goleak.IgnoreTopFunction("github.com/rfaas-go/rfaas/internal/spawner/wire.takeTasks")})
	os.RemoveAll(dir)
	os.Exit(code)
}

func workerPath(t testing.TB) string {
	t.Helper()
	path := os.Getenv("RFAAS_WORKER")
	if path == "" {
		path = "../../libexec/rfaas-worker"
	}
	path, err := filepath.Abs(path)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("no rfaas-worker (run make build, or set RFAAS_WORKER): %v", err)
	}
	return path
}

// spawnerPath is the path of the spawner, for worker programs in another directory.
func spawnerPath(t testing.TB) string {
	t.Helper()
	return filepath.Join(filepath.Dir(workerPath(t)), "rfaas-spawner")
}

// testLog shows the supervisor's log with the test's output.
func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, nil))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// testSandbox is that of startZygote.
var testSandbox Sandbox

func startZygote(t testing.TB) *Zygote {
	t.Helper()
	z, err := Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t), Sandbox: testSandbox})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { z.Close() })
	return z
}

// current returns the process id of the living zygote.
func current(t testing.TB, z *Zygote) int {
	t.Helper()
	if err := z.ready(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.zygotes[0].pid
}

// compile runs gcc once per source and set of flags and returns the product's path.
var compiled sync.Map

func compile(t testing.TB, name string, args ...string) string {
	t.Helper()
	out := filepath.Join(buildDir, name)
	once, _ := compiled.LoadOrStore(name, sync.OnceValue(func() error {
		cmd := exec.Command("gcc", append([]string{"-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror",
			"-pthread", "-I" + dataplane, "-I../../worker", "-I../..", "-o", out}, args...)...)
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", cmd.Args, err, text)
		}
		return nil
	}))
	if err := once.(func() error)(); err != nil {
		t.Fatal(err)
	}
	return out
}

func writeSource(t testing.TB, name, source string) string {
	t.Helper()
	c := filepath.Join(buildDir, name+".c")
	if err := os.WriteFile(c, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	return c
}

func library(t testing.TB, name, source string) string {
	t.Helper()
	return compile(t, name, "-shared", "-fPIC", writeSource(t, name, source))
}

func testLibrary(t testing.TB) string {
	return compile(t, "functions.so", "-shared", "-fPIC", "testdata/functions.c")
}

func sealed(t testing.TB, b []byte) *os.File {
	t.Helper()
	f, err := SealedMemfd("code", bytes.NewReader(b), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func sealedFile(t testing.TB, path string) *os.File {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return sealed(t, b)
}

// client is a process of testdata/client.c.
type client struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func clientPath(t testing.TB) string {
	t.Helper()
	objects, _ := filepath.Glob("../../build/worker/internal/dataplane/dp_*.o") // of the worker program
	return compile(t, "client", slices.Concat([]string{"testdata/client.c"}, objects, []string{"-ldl"})...)
}

func newClient(path string) (*client, error) {
	c := &client{cmd: exec.Command(path)}
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.in, c.out = in, bufio.NewReader(out)
	return c, c.cmd.Start()
}

func startClient(t testing.TB) *client {
	t.Helper()
	c, err := newClient(clientPath(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	return c
}

func (c *client) end() {
	c.in.Close()
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

func (c *client) ask(format string, args ...any) (string, error) {
	if _, err := fmt.Fprintf(c.in, format+"\n", args...); err != nil {
		return "", err
	}
	line, err := c.out.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimSpace(line)
	if text, bad := strings.CutPrefix(line, "error "); bad {
		return "", errors.New(text)
	}
	return line, nil
}

func (c *client) offer() (channel int, blob []byte, err error) {
	line, err := c.ask("offer")
	if err != nil {
		return 0, nil, err
	}
	number, text, _ := strings.Cut(line, " ")
	channel, err = strconv.Atoi(number)
	if err != nil {
		return 0, nil, err
	}
	blob, err = hex.DecodeString(text)
	return channel, blob, err
}

// leased is a worker with its channel.
type leased struct {
	*Worker
	c       *client
	channel int
}

type reply struct {
	status int
	data   []byte
}

func (l *leased) call(function int, payload []byte) (reply, error) {
	p := "-"
	if len(payload) > 0 {
		p = hex.EncodeToString(payload)
	}
	line, err := l.c.ask("call %d %d %d %s", l.channel, function, 1024, p)
	if err != nil {
		return reply{}, err
	}
	var r reply
	var size int
	var text string
	if _, err := fmt.Sscan(line, &r.status, &size, &text); err != nil {
		return reply{}, err
	}
	if text != "-" {
		r.data, err = hex.DecodeString(text)
	}
	return r, err
}

func (l *leased) mustCall(t testing.TB, function int, payload []byte) []byte {
	t.Helper()
	r, err := l.call(function, payload)
	if err != nil || r.status != 0 {
		t.Fatalf("call %s: status %d, %v", testNames[function], r.status, err)
	}
	return r.data
}

// spec offers a channel and describes a worker for it.
func (c *client) spec(t testing.TB, code *os.File) (Spec, int) {
	t.Helper()
	channel, blob, err := c.offer()
	if err != nil {
		t.Fatal(err)
	}
	return Spec{Provider: "shm", GIDIndex: -1, WaitMode: 2, Code: code, Names: testNames, ClientBlob: blob}, channel
}

func (c *client) connect(w *Worker, channel int) error {
	_, err := c.ask("connect %d %x", channel, w.Blob())
	return err
}

// lease spawns a worker and connects to it; change may alter the Spec.
func lease(t testing.TB, z *Zygote, c *client, change func(*Spec)) *leased {
	t.Helper()
	spec, channel := c.spec(t, sealedFile(t, testLibrary(t)))
	if change != nil {
		change(&spec)
	}
	w, err := z.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Kill(); <-w.Done() })
	if err := c.connect(w, channel); err != nil {
		t.Fatal(err)
	}
	return &leased{w, c, channel}
}

// testBound is how long a test waits for what must happen.
const testBound = 10 * time.Second

func within(t testing.TB, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(testBound):
		t.Fatalf("%s: not within %v", what, testBound)
	}
}

// eventually waits for a state that has no event.
var eventually = testkit.Eventually

// expiring is a context whose time is over when the test says so.
type expiring struct {
	context.Context
	over chan struct{}
}

func (e expiring) Deadline() (time.Time, bool) { return time.Now().Add(time.Hour), true }
func (e expiring) Done() <-chan struct{}       { return e.over }
func (e expiring) Err() error {
	select {
	case <-e.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// observed is an expiring context that tells when context.AfterFunc is first called for it.
type observed struct {
	expiring
	watched chan struct{}
	once    *sync.Once
}

// AfterFunc is called by context.AfterFunc.
func (o observed) AfterFunc(f func()) (stop func() bool) {
	o.once.Do(func() { close(o.watched) })
	return context.AfterFunc(o.expiring, f)
}

// newExpiring returns a context that ends when expire is called. watched is closed when a spawn has the zygote's answer and
// waits for the worker itself.
func newExpiring(t testing.TB, cause error) (ctx context.Context, watched <-chan struct{}, expire func()) {
	inner, cancel := context.WithCancelCause(t.Context())
	o := observed{expiring{inner, make(chan struct{})}, make(chan struct{}), &sync.Once{}}
	return o, o.watched, func() {
		cancel(cause)
		close(o.over)
	}
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	state := b[bytes.LastIndexByte(b, ')')+2]
	return state != 'Z' && state != 'X'
}

// processState returns a process's state from /proc.
func processState(t testing.TB, pid int) byte {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return b[bytes.LastIndexByte(b, ')')+2]
}

func openFDs(t testing.TB, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// children counts the processes that a process has started, zombies included.
func children(t testing.TB, pid int) int {
	t.Helper()
	n := 0
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if len(tasks) == 0 {
		t.Fatal("this kernel has no /proc/*/task/*/children (CONFIG_PROC_CHILDREN)")
	}
	for _, f := range tasks {
		b, _ := os.ReadFile(f)
		n += len(strings.Fields(string(b)))
	}
	return n
}

// started counts the processes of the zygote's spawner: the zygote and the workers.
func (z *Zygote) started(t testing.TB) int { return children(t, z.spawner.process.Pid) }

// leakCheck notes what there is now and returns a check that nothing was added.
func leakCheck(t testing.TB) func() {
	t.Helper()
	u := leakcheck.Take()
	return func() {
		t.Helper()
		u.Verify(t)
	}
}

func wantError(t testing.TB, err error, status int32, texts ...string) {
	t.Helper()
	var we *WorkerError
	if !errors.As(err, &we) {
		t.Fatalf("error %v (%T), want a WorkerError", err, err)
	}
	if we.Status != status {
		t.Errorf("status %d (%s), want %d", we.Status, we.Text, status)
	}
	for _, text := range texts {
		if !strings.Contains(we.Text, text) {
			t.Errorf("error %q does not say %q", we.Text, text)
		}
	}
}

// beExecutor is the subprocess of TestExecutorKilled: it starts a zygote and a worker, says their pids and waits.
func beExecutor() {
	fail := func(err error) {
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
	}
	z, err := Start(context.Background(), Config{Path: os.Getenv("ZYGOTE_TEST_EXECUTOR"), Log: slog.Default()})
	fail(err)
	code, err := os.Open(os.Getenv("ZYGOTE_TEST_CODE"))
	fail(err)
	memfd, err := SealedMemfd("code", code, 1<<30)
	fail(err)
	blob, err := hex.DecodeString(os.Getenv("ZYGOTE_TEST_BLOB"))
	fail(err)
	spec := Spec{Provider: "shm", WaitMode: 2, Code: memfd, Names: testNames, ClientBlob: blob}
	w, err := z.Spawn(context.Background(), spec)
	fail(err)
	fmt.Println("pids", z.zygotes[0].pid, w.PID())
	unix.Pause()
}
