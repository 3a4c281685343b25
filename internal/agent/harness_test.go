package agent

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
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

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/leakcheck"
)

var objects = leakcheck.Objects(dataplane.Live)

func TestMain(m *testing.M) {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(roles[role]())
	}
	os.Exit(leakcheck.Run(m, nil, objects))
}

// envRole makes this program another process of a test.
const envRole = "RFAAS_TEST_ROLE"

var roles = map[string]func() int{"leave-socket": leaveSocket, "stranger": stranger}

const root = "../.."

// built returns the absolute path of something that make build makes, or fails.
func built(t testing.TB, path string) string {
	t.Helper()
	p, err := filepath.Abs(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%s is missing: run make build first", path)
	}
	return p
}

// eventually fails the test if what does not become true within some seconds.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// daemon is an executor or a resource manager.
type daemon struct {
	address string
	process *os.Process
	done    chan struct{}
	log     *locked
}

type locked struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start starts a daemon on a free port.
func start(t testing.TB, program, secret string, args ...string) *daemon {
	t.Helper()
	cmd := exec.Command(built(t, program), append([]string{"--listen", "127.0.0.1:0", "--secret-file", secret}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d := &daemon{process: cmd.Process, done: make(chan struct{}), log: &locked{}}
	ready := make(chan string, 1)
	go func() {
		defer close(d.done)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			fmt.Fprintln(d.log, s.Text())
			if _, rest, ok := strings.Cut(s.Text(), "msg=ready address="); ok {
				address, _, _ := strings.Cut(rest, " ")
				ready <- address
			}
		}
		cmd.Wait()
	}()
	t.Cleanup(func() {
		d.process.Signal(syscall.SIGTERM)
		select {
		case <-d.done:
		case <-time.After(40 * time.Second):
			d.process.Kill()
			t.Errorf("%s did not end within 40 s of SIGTERM", program)
			<-d.done
		}
		if t.Failed() {
			t.Logf("%s said:\n%s", program, d.log)
		}
	})
	select {
	case d.address = <-ready:
	case <-d.done:
		t.Fatalf("%s ended at once:\n%s", program, d.log)
	case <-time.After(20 * time.Second):
		t.Fatalf("%s was not ready within 20 s", program)
	}
	return d
}

// executor starts an executor that lends two cores.
func executor(t testing.TB, secret string, args ...string) *daemon {
	t.Helper()
	return start(t, "bin/executor", secret, append([]string{"--cores", "2", "--providers", "shm", "--grace", "2s"}, args...)...)
}

// free returns how many cores an executor has to lend.
func (d *daemon) free(t testing.TB, secret string) int {
	t.Helper()
	conn, err := control.Dial(d.address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	i, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil {
		t.Fatal(err)
	}
	return int(i.FreeCores)
}

// world is an agent in this process, and what its clients need.
type world struct {
	t      testing.TB
	socket string
	secret string
	log    *locked
	stop   context.CancelFunc
	ended  chan struct{}
	agent  *Agent
}

func newWorld(t testing.TB, linger time.Duration) *world {
	t.Helper()
	if t, ok := t.(*testing.T); ok {
		leakcheck.Check(t, objects)
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, socket: filepath.Join(dir, "agent.sock"), secret: filepath.Join(dir, "secret"), log: &locked{}}
	w.serve(linger)
	t.Cleanup(func() {
		w.end()
		if t.Failed() {
			t.Logf("the agent said:\n%s", w.log)
		}
	})
	return w
}

// serve starts an agent.
func (w *world) serve(linger time.Duration) {
	w.t.Helper()
	s, err := Listen(w.socket)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w.stop, w.ended = stop, make(chan struct{})
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.agent = newAgent(ctx, Config{Socket: s, Linger: linger, Version: "test", Log: log})
	go func(ended chan struct{}, a *Agent) {
		defer close(ended)
		if err := a.serve(); err != nil {
			w.t.Error(err)
		}
	}(w.ended, w.agent)
}

func (w *world) end() {
	w.stop()
	<-w.ended
}

// process is one client process, as the agent sees it.
type process struct {
	t    testing.TB
	conn *net.UnixConn
	page *page

	mu      sync.Mutex
	next    uint32
	replies map[uint32]chan reply
	events  chan protocol.Event
	ended   chan struct{}
	err     error
}

type reply struct {
	protocol.Header
	body []byte
}

// memory makes a memory file.
func memory(t testing.TB, size int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "page")
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func dial(t testing.TB, socket string) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// connect connects a process that has said hello.
func (w *world) connect(env ...string) *process {
	w.t.Helper()
	return connect(w.t, w.socket, append(env, "RFAAS_SECRET_FILE="+w.secret, "USER=tester")...)
}

func connect(t testing.TB, socket string, env ...string) *process {
	t.Helper()
	p := &process{t: t, conn: dial(t, socket), replies: make(map[uint32]chan reply), events: make(chan protocol.Event, 1000),
		ended: make(chan struct{})}
	f := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	defer f.Close()
	var err error
	if p.page, err = mapPage(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	go p.read()
	t.Cleanup(func() {
		p.conn.Close()
		<-p.ended
		p.page.close()
	})
	h := protocol.Hello{Version: "test", Directory: "/", Environment: env}
	b := p.must(protocol.OpHello, h.Encode, f)
	welcome, err := protocol.DecodeWelcome(b)
	if err != nil || welcome.Protocol != protocol.Version || welcome.PID == 0 {
		t.Fatalf("welcome %+v: %v", welcome, err)
	}
	return p
}

// readMessage reads one message.
func readMessage(r io.Reader) (protocol.Header, []byte, error) {
	b := make([]byte, protocol.HeaderSize)
	if _, err := io.ReadFull(r, b); err != nil {
		return protocol.Header{}, nil, err
	}
	h, err := protocol.DecodeHeader(b)
	if err != nil {
		return h, nil, err
	}
	body := make([]byte, h.Size-protocol.HeaderSize)
	_, err = io.ReadFull(r, body)
	return h, body, err
}

func (p *process) read() {
	defer close(p.ended)
	for {
		h, body, err := readMessage(p.conn)
		if err != nil {
			p.err = err
			return
		}
		if h.ID == 0 {
			e, err := protocol.DecodeEvent(body)
			if err != nil {
				p.err = err
				return
			}
			p.events <- e
			continue
		}
		p.mu.Lock()
		c := p.replies[h.ID]
		delete(p.replies, h.ID)
		p.mu.Unlock()
		if c == nil {
			p.err = fmt.Errorf("a reply to request %d, which is unknown", h.ID)
			return
		}
		c <- reply{h, body}
	}
}

func message(op protocol.Op, id uint32, body func([]byte) []byte) []byte {
	b := protocol.Begin(nil, op, id, 0)
	if body != nil {
		b = body(b)
	}
	protocol.End(b, 0)
	return b
}

func sendMessage(conn *net.UnixConn, b []byte, f *os.File) error {
	var oob []byte
	if f != nil {
		oob = unix.UnixRights(int(f.Fd()))
	}
	n, _, err := conn.WriteMsgUnix(b, oob, nil)
	if err == nil && n < len(b) {
		_, err = conn.Write(b[n:])
	}
	return err
}

// begin sends a request and returns where its reply comes.
func (p *process) begin(op protocol.Op, body func([]byte) []byte, f *os.File) chan reply {
	p.t.Helper()
	p.mu.Lock()
	p.next++
	id, c := p.next, make(chan reply, 1)
	p.replies[id] = c
	p.mu.Unlock()
	if err := sendMessage(p.conn, message(op, id, body), f); err != nil {
		p.t.Fatalf("%v: %v", op, err)
	}
	return c
}

// failure is a failed reply.
type failure struct {
	status dataplane.Status
	text   string
}

func (f *failure) Error() string       { return fmt.Sprintf("%d: %s", f.status, f.text) }
func (f *failure) Is(class error) bool { return class == f.status.Class() }

func (p *process) end(op protocol.Op, c chan reply) ([]byte, error) {
	select {
	case r := <-c:
		if r.Op != op {
			return nil, fmt.Errorf("a reply to %v, want to %v", r.Op, op)
		}
		if r.Status == 0 {
			return r.body, nil
		}
		text, err := protocol.DecodeFailure(op, r.body)
		if err != nil {
			return nil, err
		}
		return nil, &failure{dataplane.Status(r.Status), text}
	case <-p.ended:
		return nil, fmt.Errorf("%v: the connection ended: %w", op, p.err)
	case <-time.After(40 * time.Second):
		return nil, fmt.Errorf("%v: no reply within 40 s", op)
	}
}

func (p *process) ask(op protocol.Op, body func([]byte) []byte, f *os.File) ([]byte, error) {
	p.t.Helper()
	return p.end(op, p.begin(op, body, f))
}

func (p *process) must(op protocol.Op, body func([]byte) []byte, f *os.File) []byte {
	p.t.Helper()
	b, err := p.ask(op, body, f)
	if err != nil {
		p.t.Fatalf("%v: %v", op, err)
	}
	return b
}

// open opens a session.
func (p *process) open(name uint64, s protocol.Session) error {
	p.t.Helper()
	s.Session = name
	_, err := p.ask(protocol.OpOpen, s.Encode, nil)
	return err
}

// event waits for an event.
func (p *process) event() protocol.Event {
	p.t.Helper()
	select {
	case e := <-p.events:
		return e
	case <-time.After(20 * time.Second):
		p.t.Fatal("no event within 20 s")
		return protocol.Event{}
	}
}

// channels are what a lease's workers are called by.
type channels struct {
	t   testing.TB
	dev *dataplane.Device
	ep  *dataplane.Endpoint
	all []*dataplane.Channel
}

const testDepth, testEager = 2, 4096

func newChannels(t testing.TB, provider string, n int) *channels {
	t.Helper()
	c := &channels{t: t}
	var err error
	if c.dev, err = dataplane.Open(provider, dataplane.Options{GIDIndex: -1}); err != nil {
		t.Fatal(err)
	}
	if c.ep, err = c.dev.NewEndpoint(n, testDepth, dataplane.Adaptive); err != nil {
		t.Fatal(err)
	}
	for range n {
		ch, err := c.ep.NewChannel(dataplane.ChannelConfig{Depth: testDepth, Eager: testEager})
		if err != nil {
			t.Fatal(err)
		}
		c.all = append(c.all, ch)
	}
	t.Cleanup(c.close)
	return c
}

func (c *channels) close() {
	if c.dev == nil {
		return
	}
	for _, ch := range c.all {
		ch.Close()
	}
	c.ep.Close()
	c.dev.Close()
	c.dev = nil
}

func (c *channels) offers() (all [][]byte) {
	c.t.Helper()
	for _, ch := range c.all {
		b, err := ch.Offer()
		if err != nil {
			c.t.Fatal(err)
		}
		all = append(all, b)
	}
	return all
}

// call calls echo on a worker.
func (l *leased) call(worker int) error {
	out := make([]byte, 64)
	n, _, st := l.all[worker].Call(uint32(slices.Index(l.Functions, "echo")), []byte("hello"), out, dataplane.Now()+int64(20*time.Second))
	if n = min(max(n, 0), len(out)); st != dataplane.OK || string(out[:n]) != "hello" {
		return fmt.Errorf("status %v, %q", st, out[:n])
	}
	return nil
}

func spec(workers uint32) protocol.Spec {
	return protocol.Spec{Workers: workers, CoresPerWorker: 1, Depth: testDepth, Eager: testEager, Library: "echo.so"}
}

func library(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Open(built(t, "build/functions/echo.so"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// leased is a granted lease.
type leased struct {
	*channels
	protocol.Candidate
	p    *process
	key  uint64
	spec protocol.Spec
}

// acquire acquires a lease as the library does: offers, and others as long as it gets candidates.
func (p *process) acquire(a protocol.Acquire) (*leased, error) {
	p.t.Helper()
	return p.acquireWith(a, nil)
}

// acquireWith offers the channels of a kept lease first, if that is not nil.
func (p *process) acquireWith(a protocol.Acquire, kept *leased) (*leased, error) {
	p.t.Helper()
	a.First = true
	if a.Session == 0 {
		a.Session = 1
	}
	n := int(a.Spec.Workers)
	if n == 0 {
		n = 1
	}
	var f *os.File
	if a.From == 0 {
		f = library(p.t)
	}
	a.Provider = "shm"
	p.page.line(a.Key).key.Store(a.Key)
	for {
		var ch *channels
		if kept != nil {
			ch, a.Kept = kept.channels, kept.key
			for _, c := range ch.all {
				if err := c.Renew(); err != nil {
					return nil, err
				}
			}
		} else {
			ch = newChannels(p.t, a.Provider, n)
		}
		a.Offers = ch.offers()
		b, err := p.ask(protocol.OpAcquire, a.Encode, f)
		if err != nil {
			ch.close()
			return nil, err
		}
		d, err := protocol.DecodeCandidate(b)
		if err != nil {
			return nil, err
		}
		if !d.Granted {
			ch.close()
			a.First, a.Provider, f, kept = false, d.Provider, nil, nil
			continue
		}
		for i, w := range d.Workers {
			connect := ch.all[i].Connect
			if kept != nil {
				connect = ch.all[i].Resume
			}
			if err := connect(w.Blob); err != nil {
				return nil, err
			}
		}
		return &leased{ch, d, p, a.Key, a.Spec}, nil
	}
}

func (p *process) mustAcquire(key uint64, workers uint32) *leased {
	p.t.Helper()
	l, err := p.acquire(protocol.Acquire{Key: key, Spec: spec(workers)})
	if err != nil {
		p.t.Fatalf("acquire: %v", err)
	}
	return l
}

func (l *leased) release(keep bool) (kept bool) {
	l.p.t.Helper()
	r := protocol.Release{Key: l.key, Keep: keep}
	kept, err := protocol.DecodeReleased(l.p.must(protocol.OpRelease, r.Encode, nil))
	if err != nil {
		l.p.t.Fatal(err)
	}
	return kept
}
