package executor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Random, cut and half-sent bytes on the control port do not disturb the daemon.
func TestRandomBytesOnTheControlPort(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	ev := n.events(l.GetLeaseId())
	silent := n.rawConn() // says nothing, ever
	defer silent.Close()
	preface := "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	for i := range 60 {
		c := n.rawConn()
		b := make([]byte, 1+i*50)
		rand.Read(b)
		switch i % 4 {
		case 1:
			b = append([]byte(preface), b...)
		case 2:
			b = append([]byte(preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00"), b...) // and empty settings
		case 3:
			b = []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		}
		c.Write(b) // may fail: the daemon may have hung up already
		c.Close()
	}
	// A good frame with a message that is none.
	err := n.conn.Invoke(n.ctx(), "/rfaas.control.v1.Executor/Lease", rawMessage{0xff, 0xff, 0xff}, &control.LeaseReply{},
		grpc.ForceCodec(rawCodec{}))
	if code := status.Code(err); code != codes.Internal && code != codes.InvalidArgument {
		t.Errorf("malformed message: %v", err)
	}
	n.release(n.lease(3).GetLeaseId())
	n.release(l.GetLeaseId())
	ev.want(control.Event_KIND_LEASE_ENDED)
	if s := n.log.String(); strings.Contains(s, "ERROR") || strings.Contains(s, "WARN") {
		t.Errorf("the log:\n%s", s)
	}
}

type rawMessage []byte

// rawCodec sends bytes as they are under the name of protobuf.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error)   { return v.(rawMessage), nil }
func (rawCodec) Unmarshal(_ []byte, _ any) error { return nil }
func (rawCodec) Name() string                    { return "proto" }

func TestServe(t *testing.T) {
	s := testSettings(t)
	s.AddressFile = filepath.Join(t.TempDir(), "address")
	s.Cores, s.Memory = config.Cores{Count: 1}, 1<<30
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}, verbs: 1}
	go func() { done <- serveWith(ctx, context.Background(), s, z, Handover{}, slog.New(slog.DiscardHandler)) }()
	var address string
	eventually(t, "the address file", func() bool {
		b, err := os.ReadFile(s.AddressFile)
		address = strings.TrimSpace(string(b))
		return err == nil
	})
	conn, err := control.Dial(address, control.DialConfig{SecretFile: s.SecretFile})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	i, err := control.NewExecutorClient(conn).Info(t.Context(), &control.InfoRequest{ProtocolVersion: 1})
	if err != nil {
		t.Fatal(err)
	}
	if i.GetCores() != 1 || i.GetMemoryBytes() != 1<<30 || fmt.Sprint(i.GetProviders()) != "[shm verbs]" || i.GetNode() == "" {
		t.Errorf("info %v", i)
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("serve: %v", err)
	}
	if _, err := os.Stat(s.AddressFile); !os.IsNotExist(err) {
		t.Errorf("the address file outlives its daemon: %v", err)
	}
}

// An executor that cannot start workers is not ready and shows no free cores, until it can start workers again. It
// stays healthy, since its leases continue.
func TestNotReadyWithoutWorkers(t *testing.T) {
	s := testSettings(t)
	s.AddressFile = filepath.Join(t.TempDir(), "address")
	s.Cores, s.Memory = config.Cores{Count: 1}, 1<<30
	socket := filepath.Join(t.TempDir(), "http")
	s.HTTPListen = "unix:" + socket
	web := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
	go func() { done <- serveWith(ctx, context.Background(), s, z, Handover{}, slog.New(slog.DiscardHandler)) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	get := func(path string) (code int, body string) {
		r, err := web.Get("http://executor" + path)
		if err != nil {
			return 0, err.Error()
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(b)
	}
	eventually(t, "ready", func() bool { code, _ := get("/readyz"); return code == http.StatusOK })
	address, err := os.ReadFile(s.AddressFile)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := control.Dial(strings.TrimSpace(string(address)), control.DialConfig{SecretFile: s.SecretFile})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	freeCores := func() uint32 {
		i, err := control.NewExecutorClient(conn).Info(t.Context(), &control.InfoRequest{ProtocolVersion: 1})
		if err != nil {
			t.Fatal(err)
		}
		return i.GetFreeCores()
	}

	z.setUnable(errors.New("it is version v2, this executor v1"))
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "workers: it is version v2") {
		t.Errorf("readyz %d, %q", code, body)
	}
	if code, body := get("/healthz"); code != http.StatusOK || !strings.Contains(body, "workers: it is version v2") {
		t.Errorf("healthz %d, %q", code, body)
	}
	if n := freeCores(); n != 0 {
		t.Errorf("%d free cores, want 0", n)
	}
	z.setUnable(nil)
	if code, body := get("/readyz"); code != http.StatusOK {
		t.Errorf("readyz %d, %q", code, body)
	}
	if n := freeCores(); n != 1 {
		t.Errorf("%d free cores, want 1", n)
	}
}

// The resource manager is told at once when no worker can be started, and when workers can be started again.
func TestReportsThatNoWorkerCanBeStarted(t *testing.T) {
	n := newNode(t)
	reports := make(chan uint32, 10)
	n.e.report = func() { reports <- n.e.info().GetFreeCores() }
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.e.reportAbility(ctx) })
	defer wg.Wait()
	defer stop()
	want := func(cores uint32) {
		t.Helper()
		select {
		case got := <-reports:
			if got != cores {
				t.Errorf("reported %d free cores, want %d", got, cores)
			}
		case <-time.After(testBound):
			t.Fatal("no report")
		}
	}
	want(4)
	n.z.setUnable(errors.New("none"))
	want(0)
	n.z.setUnable(nil)
	want(4)
	if log := n.log.String(); strings.Count(log, "cannot start workers") != 1 || !strings.Contains(log, "workers can be started again") {
		t.Errorf("log:\n%s", log)
	}
}

func TestServeRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*config.Executor)
		text   string
	}{
		"no worker program":        {func(s *config.Executor) { s.Worker = "/nonexistent/worker" }, "/nonexistent/worker"},
		"a directory in its place": {func(s *config.Executor) { s.Worker = t.TempDir() }, "start "},
	} {
		t.Run(name, func(t *testing.T) {
			s := testSettings(t)
			c.change(&s)
			if err := Serve(t.Context(), t.Context(), s, Handover{}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want %q", err, c.text)
			}
		})
	}
	for name, c := range map[string]struct {
		change func(*config.Executor)
		text   string
	}{
		"verbs":                    {func(s *config.Executor) { *s = loaded(t, "--providers", "verbs") }, "no verbs device"},
		"cores":                    {func(s *config.Executor) { s.Cores = config.Cores{List: []int{1023}} }, "CPU 1023"},
		"address":                  {func(s *config.Executor) { s.Listen = "192.0.2.1:1"; s.AllowPlaintext = true }, "192.0.2.1"},
		"state, which is optional": {func(s *config.Executor) { s.StateDir = "/dev/null/state" }, "/dev/null"},
		"address file":             {func(s *config.Executor) { s.AddressFile = "/nonexistent/file" }, "/nonexistent"},
	} {
		t.Run(name, func(t *testing.T) {
			s := testSettings(t)
			c.change(&s)
			z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
			if err := serveWith(t.Context(), t.Context(), s, z, Handover{}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want %q", err, c.text)
			}
		})
	}
}

// An executor says which version it is, and its worker program which it is.
func TestServeWithWorkerOfAnotherVersion(t *testing.T) {
	worker := filepath.Join(t.TempDir(), "worker")
	greeting := append([]byte("RFWK\x01\x00\x08\x00\x00\x00\x00\x00\x0f\x00\x00\x00\x01"), append(make([]byte, 12), "v2"...)...)
	script := fmt.Sprintf("#!/bin/sh\ncat '%s.greeting' >&3\nexec cat <&3 >/dev/null\n", worker)
	for name, content := range map[string][]byte{worker: []byte(script), worker + ".greeting": greeting} {
		if err := os.WriteFile(name, content, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s, err := config.LoadExecutor([]string{"--listen", "127.0.0.1:0", "--worker", worker, "--secret-file", worker + ".secret"}, nil, io.Discard, "v1")
	if err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", filepath.Join(filepath.Dir(worker), "rfaas-spawner"), "../../cmd/rfaas-spawner") // of no version
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	err = Serve(t.Context(), t.Context(), s, Handover{}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), worker+": it is version v2, this executor v1: install both of one version") {
		t.Errorf("error %v", err)
	}
}

func loaded(t *testing.T, args ...string) config.Executor {
	t.Helper()
	s, err := config.LoadExecutor(append(args, "--listen", "127.0.0.1:0", "--secret-file", filepath.Join(t.TempDir(), "s")), nil, io.Discard, "")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestLentMemory(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		available, assigned uint64
		waiting             int
		want                uint64
	}{{4 * gib, 0, 0, 4 * gib}, {4 * gib, gib, 0, gib}, {gib, 4 * gib, 2, gib - 2*waitingMemory}, {waitingMemory, 0, 100, waitingMemory / 2}} {
		if got := lentMemory(c.available, c.assigned, c.waiting); got != c.want {
			t.Errorf("%d available, %d assigned, %d workers wait: %d, want %d", c.available, c.assigned, c.waiting, got, c.want)
		}
	}
}

// managerStub is a manager whose answers a test chooses.
type managerStub struct {
	control.UnimplementedManagerServer
	calls   chan string
	unknown chan bool
}

func (m *managerStub) Register(_ context.Context, r *control.RegisterRequest) (*control.RegisterReply, error) {
	m.calls <- "register " + r.GetAddress()
	return &control.RegisterReply{ExecutorId: 5, HeartbeatMs: 10}, nil
}

func (m *managerStub) Heartbeat(_ context.Context, r *control.HeartbeatRequest) (*control.HeartbeatReply, error) {
	m.calls <- fmt.Sprint("heartbeat ", r.GetExecutorId())
	return &control.HeartbeatReply{Unknown: <-m.unknown}, nil
}

func (m *managerStub) Deregister(_ context.Context, r *control.DeregisterRequest) (*control.DeregisterReply, error) {
	m.calls <- fmt.Sprint("deregister ", r.GetExecutorId())
	return &control.DeregisterReply{}, nil
}

// Fault 8: an executor that registered at the wrong moment was lost for ever.
func TestRegistration(t *testing.T) {
	n := newNode(t)
	socket := "unix:" + filepath.Join(t.TempDir(), "manager")
	secret := n.e.cfg.Settings.SecretFile
	conn, err := control.Dial(socket, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	log := &testkit.Buffer{}
	r := newRegistrar(conn, socket, "here:1", n.e.info, slog.New(slog.NewTextHandler(log, nil)))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.run(ctx) }()
	eventually(t, "the log says that the manager is away", func() bool { return strings.Contains(log.String(), "does not answer") })

	start := func() (*managerStub, *control.Port) {
		port, err := control.OpenPort(control.PortConfig{Listen: socket, SecretFile: secret})
		if err != nil {
			t.Fatal(err)
		}
		m := &managerStub{calls: make(chan string), unknown: make(chan bool, 1)}
		control.RegisterManagerServer(port.Server, m)
		if err := port.Serve(); err != nil {
			t.Fatal(err)
		}
		return m, port
	}
	expect := func(m *managerStub, want string) {
		t.Helper()
		select {
		case got := <-m.calls:
			if got != want {
				t.Fatalf("call %q, want %q", got, want)
			}
		case <-time.After(testBound):
			t.Fatalf("no call, want %q", want)
		}
	}
	m, port := start() // after the executor
	expect(m, "register here:1")
	expect(m, "heartbeat 5")
	m.unknown <- false
	expect(m, "heartbeat 5")
	m.unknown <- true
	expect(m, "register here:1")
	expect(m, "heartbeat 5")
	port.Server.Stop() // killed in the middle of a call
	m.unknown <- false

	m, port = start()
	expect(m, "heartbeat 5")
	m.unknown <- true // a new one does not know us
	expect(m, "register here:1")
	expect(m, "heartbeat 5")
	m.unknown <- false
	stop()
	for call := range m.calls {
		if call == "deregister 5" {
			break
		}
		m.unknown <- false
	}
	<-done
	port.Close(n.ctx())
}

// attachingManager has memory that refuses the executor's line, or none now.
type attachingManager struct {
	managerStub
	memory *cellManager
}

func (m *attachingManager) Register(context.Context, *control.RegisterRequest) (*control.RegisterReply, error) {
	return &control.RegisterReply{ExecutorId: 5, HeartbeatMs: 10, Manager: &control.ManagerHelloReply{NodeId: "here", Providers: []string{"shm"}}}, nil
}

func (m *attachingManager) say(ctx context.Context, call string) {
	select {
	case m.calls <- call:
	case <-ctx.Done():
	}
}

func (m *attachingManager) Heartbeat(ctx context.Context, _ *control.HeartbeatRequest) (*control.HeartbeatReply, error) {
	m.say(ctx, "heartbeat")
	return &control.HeartbeatReply{}, nil
}

func (m *attachingManager) Deregister(context.Context, *control.DeregisterRequest) (*control.DeregisterReply, error) {
	return &control.DeregisterReply{}, nil
}

func (m *attachingManager) AttachExecutor(ctx context.Context, req *control.AttachExecutorRequest) (*control.AttachExecutorReply, error) {
	m.say(ctx, "attach")
	if m.memory == nil {
		return nil, control.Errorf(control.ClassBusy, "not now")
	}
	reply, err := m.memory.AttachExecutor(ctx, req)
	reply.Line.Key++
	return reply, err
}

// An executor that cannot attach to the manager's memory, or cannot write there, reports by messages, and tries the memory again later.
func TestAttachIsTriedAgain(t *testing.T) {
	n := newNode(t)
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	for name, memory := range map[string]*cellManager{"refused": nil, "cannot be written": {t: t, dev: dev}} {
		t.Run(name, func(t *testing.T) {
			socket := "unix:" + filepath.Join(t.TempDir(), "manager")
			secret := n.e.cfg.Settings.SecretFile
			port, err := control.OpenPort(control.PortConfig{Listen: socket, SecretFile: secret})
			if err != nil {
				t.Fatal(err)
			}
			m := &attachingManager{managerStub{calls: make(chan string)}, memory}
			control.RegisterManagerServer(port.Server, m)
			if err := port.Serve(); err != nil {
				t.Fatal(err)
			}
			defer port.Close(n.ctx())
			conn, err := control.Dial(socket, control.DialConfig{SecretFile: secret})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r := newRegistrar(conn, socket, "here:1", n.e.info, slog.New(slog.DiscardHandler))
			r.nodeID, r.again = "here", 20*time.Millisecond
			r.devices = &link.Devices{}
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); r.run(ctx) }()
			last := ""
			for attempts := 0; attempts < 3; {
				select {
				case call := <-m.calls:
					if call == "attach" {
						attempts++
					}
					if call == last && call == "attach" {
						t.Errorf("no report by message after attempt %d", attempts-1)
					}
					last = call
				case <-time.After(testBound):
					t.Fatalf("no attempt after %d", attempts)
				}
			}
			stop()
			<-done
		})
	}
}

// slowManager answers a registration only when it may.
type slowManager struct {
	managerStub
	began, may chan struct{}
}

func (m *slowManager) Register(context.Context, *control.RegisterRequest) (*control.RegisterReply, error) {
	close(m.began)
	<-m.may
	return &control.RegisterReply{ExecutorId: 5, HeartbeatMs: 10}, nil
}

// An executor that ends while it registers signs off all the same.
func TestEndWhileRegistering(t *testing.T) {
	n := newNode(t)
	socket := "unix:" + filepath.Join(t.TempDir(), "manager")
	secret := n.e.cfg.Settings.SecretFile
	port, err := control.OpenPort(control.PortConfig{Listen: socket, SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	m := &slowManager{managerStub{calls: make(chan string, 1)}, make(chan struct{}), make(chan struct{})}
	control.RegisterManagerServer(port.Server, m)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	defer port.Close(n.ctx())
	conn, err := control.Dial(socket, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		newRegistrar(conn, socket, "here:1", n.e.info, slog.New(slog.DiscardHandler)).run(ctx)
	}()
	<-m.began
	stop()
	close(m.may)
	select {
	case <-done:
	case <-time.After(testBound):
		t.Fatal("it does not end")
	}
	select {
	case call := <-m.calls:
		if call != "deregister 5" {
			t.Errorf("call %q", call)
		}
	default:
		t.Error("it did not sign off")
	}
}

// An executor does not start with the identity directory of another node: clients and the resource manager would refuse
// it.
func TestIdentityOfAnotherNode(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := identity.InitCluster(in("cluster"), "test", time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	cluster, err := identity.OpenCluster(in("cluster"))
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.IssueNode(in("node"), []string{"node7", "192.0.2.7"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ advertise, manager, text string }{
		{"node8:7465", "", "node7, 192.0.2.7, not for \"node8\""},
		{"192.0.2.8:7465", "192.0.2.1:7464", "192.0.2.8"},
		{"", "192.0.2.1:7464", "127.0.0.1"}, // the bound address
		{"unix:/tmp/x", "192.0.2.1:7464", "unix:/tmp/x"},
	} {
		s := testSettings(t)
		s.Cores, s.Memory, s.IdentityDir, s.Advertise, s.Manager = config.Cores{Count: 1}, 1<<30, in("node"), c.advertise, c.manager
		ctx, cancel := context.WithCancel(t.Context())
		s.AddressFile = filepath.Join(t.TempDir(), "address")
		z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
		done := make(chan error, 1)
		go func() { done <- serveWith(ctx, context.Background(), s, z, Handover{}, slog.New(slog.DiscardHandler)) }()
		tick := time.NewTicker(10 * time.Millisecond)
		for started := false; ; {
			select {
			case err := <-done:
				if started || err == nil || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "advertise") {
					t.Errorf("%+v: started %t, %v", c, started, err)
				}
			case <-tick.C:
				if _, err := os.Stat(s.AddressFile); err == nil {
					started = true
					cancel()
				}
				continue
			}
			break
		}
		tick.Stop()
		cancel()
	}
	node, err := identity.OpenNode(in("node"), nil, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ advertise, manager string }{{"node7:7465", "192.0.2.1:7464"}, {"NODE7.:1", ""}, {"192.0.2.7:1", "192.0.2.1:7464"},
		{"127.0.0.1:7465", ""}, {"127.0.0.1:7465", "127.0.0.1:7464"}, {"unix:/tmp/x", "unix:/tmp/m"}} {
		s := testSettings(t)
		s.Manager = c.manager
		if err := checkIdentity(&s, node, c.advertise); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
