package executor

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// The zygote's starter thread never ends, because workers die with the thread that made them (internal/spawner/wire/starter.go).
const starterThread = "github.com/rfaas-go/rfaas/internal/spawner/wire.takeTasks"

var objects = leakcheck.Objects(dataplane.Live)

func TestMain(m *testing.M) {
	leakcheck.Main(m, []goleak.Option{goleak.IgnoreTopFunction(starterThread)}, objects)
}

// testBound is how long a test waits for what must happen.
const testBound = 20 * time.Second

// fakeSpawner starts workers that are not there. It checks what no zygote can: that no core ever has two workers.
type fakeSpawner struct {
	t testing.TB
	// before, if set, runs before a worker starts; its error is the spawn's.
	before func(ctx context.Context, s zygote.Spec) error
	// reap, if set, runs between a worker's end and Done.
	reap func(w *fakeWorker)
	// symbols, if set, returns names for offsets in a library.
	symbols func(offsets []uint64) []string
	// seeds, if set, makes seeds.
	seeds func(ctx context.Context) (*zygote.Seed, error)
	verbs int
	pages bool
	// claimable workers have what a claim needs. Nothing thaws them.
	claimable bool

	mu      sync.Mutex
	unable  error // why CannotStart says that no worker can be started
	changed chan struct{}
	blob    []byte // of all workers; nil: each has another one
	pid     int
	workers []*fakeWorker
	cores   map[int]*fakeWorker
}

type fakeWorker struct {
	z    *fakeSpawner
	spec zygote.Spec
	pid  int
	once sync.Once
	done chan struct{}
	exit zygote.Exit

	stubborn  bool         // does not stop when asked
	suspend   func() error // called first by Suspend; nil: nothing
	uncalled  bool         // has executed no function
	stopped   atomic.Bool
	finished  atomic.Bool
	killed    atomic.Bool
	alone     atomic.Bool // its client's process has ended
	suspended bool        // under z.mu
	resumed   atomic.Int32
	claimed   func() // called by Claimed; may be nil
}

func (z *fakeSpawner) Spawn(ctx context.Context, s zygote.Spec) (Worker, error) {
	if z.before != nil {
		if err := z.before(ctx, s); err != nil {
			return nil, err
		}
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	z.pid++
	w := &fakeWorker{z: z, spec: s, pid: z.pid, done: make(chan struct{})}
	if len(s.CPUs) == 0 {
		z.t.Error("worker without cores")
	}
	for _, c := range s.CPUs {
		if z.cores[c] != nil {
			z.t.Errorf("core %d has a living worker (pid %d) and gets another", c, z.cores[c].pid)
		}
		z.cores[c] = w
	}
	z.workers = append(z.workers, w)
	return w, nil
}

func (z *fakeSpawner) VerbsDevices() int { return z.verbs }
func (z *fakeSpawner) FillsPages() bool  { return z.pages }

// OpenFile opens files as any process does.
func (z *fakeSpawner) OpenFile(path string, _ bool) (*os.File, error) { return os.Open(path) }

// Renew has no program to run.
func (z *fakeSpawner) Renew() (*os.File, error) { return nil, fs.ErrNotExist }

// Connect connects as any process does.
func (z *fakeSpawner) Connect(path string) (net.Conn, error) { return net.Dial("unix", path) }

// CannotStart returns what setUnable has set.
func (z *fakeSpawner) CannotStart() (<-chan struct{}, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.changed == nil {
		z.changed = make(chan struct{})
	}
	return z.changed, z.unable
}

func (z *fakeSpawner) setUnable(reason error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.unable = reason
	if z.changed != nil {
		close(z.changed)
	}
	z.changed = nil
}

// Failed never receives.
func (z *fakeSpawner) Failed() <-chan error { return nil }

// Inspect finds the same functions in every library.
func (z *fakeSpawner) Inspect(context.Context, *os.File) ([]string, error) {
	return []string{"alpha", "beta"}, nil
}

// Symbols fails unless a test sets symbols.
func (z *fakeSpawner) Symbols(_ context.Context, _ *os.File, offsets []uint64) ([]string, error) {
	if z.symbols == nil {
		return nil, errors.New("no process for that")
	}
	return z.symbols(offsets), nil
}

func (z *fakeSpawner) KeepPool(int, ...zygote.Spec) error { return nil }
func (z *fakeSpawner) Waiting() int                       { return 0 }
func (z *fakeSpawner) Runtimes() []string                 { return []string{"py311"} }

func (z *fakeSpawner) Close() error { return nil }

// alive returns the workers that are not reaped.
func (z *fakeSpawner) alive() (list []*fakeWorker) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, w := range z.workers {
		select {
		case <-w.done:
		default:
			list = append(list, w)
		}
	}
	return list
}

func (w *fakeWorker) Blob() []byte {
	if w.z.blob != nil {
		return w.z.blob
	}
	return fmt.Appendf(nil, "worker %d", w.pid)
}
func (w *fakeWorker) Steps() zygote.Steps {
	return zygote.Steps{Fork: 1, Connect: 2, Code: 3, Cached: w.resumed.Load() > 0}
}
func (w *fakeWorker) PID() int { return w.pid }
func (w *fakeWorker) CallLimit() time.Duration {
	if w.uncalled {
		return w.spec.InitLimit
	}
	return w.spec.CallLimit
}
func (w *fakeWorker) EndCall(time.Duration) {
	w.die(zygote.Exit{Signal: 9, Reason: "exceeded its time limit"})
}
func (w *fakeWorker) ClientGone() bool               { return w.alone.Load() }
func (w *fakeWorker) CPUTime() (time.Duration, bool) { return 0, false }
func (w *fakeWorker) Done() <-chan struct{}          { return w.done }
func (w *fakeWorker) Exit() zygote.Exit              { return w.exit }
func (w *fakeWorker) OutputTail() []byte             { return []byte("so far") }
func (w *fakeWorker) Running() string {
	if w.uncalled {
		return ""
	}
	return "busy"
}
func (w *fakeWorker) Counters() zygote.Counters {
	if w.uncalled {
		return zygote.Counters{}
	}
	return zygote.Counters{Calls: 1, Refused: 2, Failed: 3, BytesIn: 4, BytesOut: 5}
}

// die ends the worker.
func (w *fakeWorker) die(x zygote.Exit) {
	w.once.Do(func() {
		go func() {
			if w.z.reap != nil {
				w.z.reap(w)
			}
			w.z.mu.Lock()
			defer w.z.mu.Unlock()
			for _, c := range w.spec.CPUs {
				if w.z.cores[c] == w {
					w.z.cores[c] = nil
				}
			}
			w.exit = x
			close(w.done)
		}()
	})
}

func (w *fakeWorker) Suspend(ctx context.Context) error {
	if w.suspend != nil {
		if err := w.suspend(); err != nil {
			return err
		}
	}
	if w.stubborn {
		<-ctx.Done()
		return ctx.Err()
	}
	w.z.mu.Lock()
	defer w.z.mu.Unlock()
	for _, c := range w.spec.CPUs {
		w.z.cores[c] = nil // a stopped process uses none
	}
	w.suspended = true
	return nil
}

func (w *fakeWorker) Claimable() (c claim.Worker, err error) {
	if !w.z.claimable {
		return c, errors.New("not a process")
	}
	if c.Freezer, err = unix.MemfdCreate("freezer", unix.MFD_CLOEXEC); err != nil {
		return c, err
	}
	if c.Page, err = unix.MemfdCreate("page", unix.MFD_CLOEXEC); err == nil {
		err = unix.Ftruncate(c.Page, int64(os.Getpagesize()))
	}
	return c, err
}

func (w *fakeWorker) ExpectLease() {}
func (w *fakeWorker) Claimed(zygote.Counters) {
	if w.claimed != nil {
		w.claimed()
	}
}

func (w *fakeWorker) Connect(*net.TCPConn, []byte) error { return nil }

func (w *fakeWorker) Resume(_ context.Context, blob []byte) error {
	w.z.mu.Lock()
	defer w.z.mu.Unlock()
	select {
	case <-w.done:
		return errors.New("it is dead")
	default:
	}
	if !w.suspended {
		w.z.t.Errorf("worker %d is resumed and was not suspended", w.pid)
	}
	for _, c := range w.spec.CPUs {
		if w.z.cores[c] != nil {
			w.z.t.Errorf("core %d has a living worker (pid %d) and another is resumed", c, w.z.cores[c].pid)
		}
		w.z.cores[c] = w
	}
	w.spec.ClientBlob, w.suspended = blob, false
	w.resumed.Add(1)
	return nil
}

func (w *fakeWorker) Kill() {
	w.killed.Store(true)
	w.die(zygote.Exit{Signal: 9, Requested: true, Reason: "killed by the executor"})
}

func (w *fakeWorker) Finish(ctx context.Context) error {
	w.finished.Store(true)
	return w.Stop(ctx)
}

func (w *fakeWorker) Stop(ctx context.Context) error {
	w.stopped.Store(true)
	if !w.stubborn {
		w.die(zygote.Exit{Requested: true, Reason: "stopped"})
		<-w.done
		return nil
	}
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		w.Kill()
		<-w.done
		return ctx.Err()
	}
}

// node is an executor with fake workers behind a real control port.
type node struct {
	t    *testing.T
	e    *Executor
	z    *fakeSpawner
	port *control.Port
	conn *grpc.ClientConn
	control.ExecutorClient
	log *testkit.Buffer
	lib []byte // a "library" that is stored already
	sum sum
}

func testSettings(t *testing.T, args ...string) config.Executor {
	t.Helper()
	s, err := config.LoadExecutor(append([]string{"--listen", "127.0.0.1:0", "--secret-file", filepath.Join(t.TempDir(), "secret"),
		"--code-limit", "1MiB", "--code-cache", "3MiB"}, args...),
		nil, io.Discard, "unknown")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// testCores are n cores of one CPU.
func testCores(n int) (list []lease.Core) {
	for i := range n {
		list = append(list, lease.Core{CPUs: []int{i}})
	}
	return list
}

// newNode starts an executor with four cores; change may alter its configuration.
func newNode(t *testing.T, change ...func(*Config)) *node {
	t.Helper()
	leakcheck.Check(t, objects)
	n := &node{t: t, log: &testkit.Buffer{}, lib: []byte("\x7fELF library of the tests")}
	n.z = &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
	n.sum = sha256.Sum256(n.lib)
	cfg := Config{Settings: testSettings(t), Cores: testCores(4), Memory: 4 << 30, Providers: []string{"shm"}, Node: "node",
		NodeID: "id", Spawner: n.z, Log: slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	for _, c := range change {
		c(&cfg)
	}
	var err error
	if n.e, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	if _, _, err := n.e.codes.add(t.Context(), n.sum, "", uint64(len(n.lib)), once(n.lib)); err != nil {
		t.Fatal(err)
	}
	n.port, err = control.OpenPort(control.PortConfig{Listen: cfg.Settings.Listen, SecretFile: cfg.Settings.SecretFile,
		IdentityDir: cfg.Settings.IdentityDir, AuditFile: cfg.Settings.AuditFile, Bounds: cfg.Settings.Bounds(len(cfg.Cores))})
	if err != nil {
		t.Fatal(err)
	}
	n.e.gate = n.port.Gate
	n.e.Register(n.port.Server)
	if err := n.port.Serve(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.e.Run(ctx) })
	n.conn = n.dial()
	n.ExecutorClient = control.NewExecutorClient(n.conn)
	t.Cleanup(func() {
		n.conn.Close()
		drain, stop := context.WithTimeout(context.Background(), testBound)
		defer stop()
		n.e.DrainUntil(drain, drainReason)
		n.port.Close(drain)
		cancel()
		wg.Wait()
		if left := n.z.alive(); len(left) > 0 {
			t.Errorf("%d workers are left after the drain", len(left))
		}
		if c := n.e.table.Capacity(); c.FreeCores != c.Cores || c.FreeMemory != c.Memory || c.Leases != 0 {
			t.Errorf("capacity after the drain: %+v", c)
		}
		n.e.mu.Lock()
		defer n.e.mu.Unlock()
		if len(n.e.holdings) > 0 {
			t.Errorf("%d holdings are left", len(n.e.holdings))
		}
	})
	return n
}

// dial makes another connection, as another client.
func (n *node) dial() *grpc.ClientConn {
	n.t.Helper()
	conn, err := control.Dial(n.port.Address, control.DialConfig{SecretFile: n.e.cfg.Settings.SecretFile})
	if err != nil {
		n.t.Fatal(err)
	}
	return conn
}

// once is a reader of pieces that has one.
func once(b []byte) func() ([]byte, error) {
	return func() ([]byte, error) { return b, nil }
}

// clientBlob makes a channel blob that passes the executor's look at it.
func clientBlob(provider invoke.Provider, change ...func(*invoke.ChannelBlob)) []byte {
	b := invoke.ChannelBlob{Role: invoke.RoleClient, Provider: provider, Generation: 77, Depth: 16, Eager: 4096,
		QueuePair: make([]byte, 40)}
	rand.Read(b.QueuePair)
	for _, c := range change {
		c(&b)
	}
	return b.Marshal()
}

// request is a good request for workers.
func (n *node) request(workers int) *control.LeaseRequest {
	r := &control.LeaseRequest{ProtocolVersion: control.ProtocolVersion, RequestId: make([]byte, 16), CodeSha256: n.sum[:],
		Workers: uint32(workers), Provider: "shm", Tenant: "alice"}
	rand.Read(r.RequestId)
	for range workers {
		r.ClientBlobs = append(r.ClientBlobs, clientBlob(invoke.ProviderSHM))
	}
	return r
}

func (n *node) lease(workers int) *control.LeaseReply {
	n.t.Helper()
	l, err := n.Lease(n.ctx(), n.request(workers))
	if err != nil {
		n.t.Fatal(err)
	}
	if len(l.GetWorkers()) != workers || l.GetCodeUnknown() {
		n.t.Fatalf("grant %v, want %d workers", l, workers)
	}
	return l
}

func (n *node) release(id uint64) {
	n.t.Helper()
	if _, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: id}); err != nil {
		n.t.Fatal(err)
	}
}

// ctx bounds a call of the test.
func (n *node) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testBound)
	n.t.Cleanup(cancel)
	return ctx
}

// events opens a lease's stream and reads the first event.
func (n *node) events(id uint64) *events {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testBound)
	n.t.Cleanup(cancel)
	s, err := n.Events(ctx, &control.EventsRequest{LeaseId: id})
	if err != nil {
		n.t.Fatal(err)
	}
	ev := &events{t: n.t, s: s, cancel: cancel}
	ev.want(control.Event_KIND_OPEN)
	return ev
}

type events struct {
	t      *testing.T
	s      grpc.ServerStreamingClient[control.Event]
	cancel context.CancelFunc
}

// news is the next event that says more than that the executor lives.
func news(s grpc.ServerStreamingClient[control.Event]) (*control.Event, error) {
	for {
		ev, err := s.Recv()
		if err != nil || ev.GetKind() != control.Event_KIND_ALIVE {
			return ev, err
		}
	}
}

func (e *events) want(kind control.Event_Kind) *control.Event {
	e.t.Helper()
	ev, err := news(e.s)
	if err != nil {
		e.t.Fatalf("no %v event: %v", kind, err)
	}
	if ev.GetKind() != kind {
		e.t.Fatalf("event %v, want %v", ev, kind)
	}
	return ev
}

func (e *events) wantEnd() {
	e.t.Helper()
	if ev, err := news(e.s); err != io.EOF {
		e.t.Fatalf("event %v, error %v; want the end of the stream", ev, err)
	}
}

// eventually waits for a state that has no event.
var eventually = testkit.Eventually

// waitAddress waits until a daemon is ready and returns its address.
func waitAddress(t *testing.T, file string) (address string) {
	t.Helper()
	eventually(t, "the daemon is ready", func() bool {
		b, err := os.ReadFile(file)
		address = strings.TrimSpace(string(b))
		return err == nil
	})
	return address
}

// upload stores a library.
func upload(t *testing.T, c control.ExecutorClient, lib []byte) sum {
	t.Helper()
	h := sum(sha256.Sum256(lib))
	if _, err := control.Upload(t.Context(), c, "lib.so", h, int64(len(lib)), bytes.NewReader(lib)); err != nil {
		t.Fatal(err)
	}
	return h
}

func leaseID(l *control.LeaseReply) lease.ID { return lease.ID(l.GetLeaseId()) }

func (n *node) free() int { return n.e.table.Capacity().FreeCores }

// rawConn connects to the control port without gRPC.
func (n *node) rawConn() net.Conn {
	n.t.Helper()
	c, err := net.DialTimeout("tcp", n.port.Address, testBound)
	if err != nil {
		n.t.Fatal(err)
	}
	return c
}
