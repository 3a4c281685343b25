package manager

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

func info(incarnation byte, free uint32) *control.InfoReply {
	return &control.InfoReply{Incarnation: append(make([]byte, 15), incarnation), Node: "n", NodeId: "boot/1", Cores: 4, FreeCores: free}
}

// clock is a settable clock.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

func newManager(t *testing.T) (*Manager, *clock) {
	t.Helper()
	c := &clock{time.Unix(1e9, 0)}
	m, err := New(Config{Heartbeat: time.Second, Slots: 64, Log: slog.New(slog.DiscardHandler), Now: c.Now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m, c
}

func register(t *testing.T, m *Manager, address string, i *control.InfoReply) uint64 {
	t.Helper()
	r, err := m.Register(t.Context(), &control.RegisterRequest{ProtocolVersion: 1, Address: address, Info: i})
	if err != nil {
		t.Fatal(err)
	}
	if r.GetHeartbeatMs() != 1000 || r.GetExecutorId() == 0 {
		t.Fatalf("reply %v", r)
	}
	return r.GetExecutorId()
}

// list is "address free alive" of every executor.
func list(t *testing.T, m *Manager) string {
	t.Helper()
	r, err := m.List(t.Context(), &control.ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range r.GetExecutors() {
		out = append(out, fmt.Sprintf("%s %d %t", e.GetAddress(), e.GetInfo().GetFreeCores(), e.GetAlive()))
	}
	return strings.Join(out, ", ")
}

func heartbeat(t *testing.T, m *Manager, id uint64, i *control.InfoReply) bool {
	t.Helper()
	r, err := m.Heartbeat(t.Context(), &control.HeartbeatRequest{ExecutorId: id, Info: i})
	if err != nil {
		t.Fatal(err)
	}
	return !r.GetUnknown()
}

func want(t *testing.T, m *Manager, text string) {
	t.Helper()
	if got := list(t, m); got != text {
		t.Fatalf("list %q, want %q", got, text)
	}
}

func TestLifeOfAnExecutor(t *testing.T) {
	m, c := newManager(t)
	a := register(t, m, "b:1", info(1, 4))
	b := register(t, m, "a:1", info(2, 2))
	want(t, m, "a:1 2 true, b:1 4 true")
	c.now = c.now.Add(3*time.Second - 1)
	if !heartbeat(t, m, a, info(1, 3)) {
		t.Fatal("unknown")
	}
	want(t, m, "a:1 2 true, b:1 3 true")
	c.now = c.now.Add(1)
	want(t, m, "a:1 2 false, b:1 3 true")
	if died := m.table.sweep(); fmt.Sprint(died) != "[a:1]" {
		t.Errorf("died: %v", died)
	}
	if died := m.table.sweep(); died != nil {
		t.Errorf("died twice: %v", died)
	}
	if !heartbeat(t, m, b, info(2, 1)) { // is back
		t.Fatal("a returning executor is unknown")
	}
	want(t, m, "a:1 1 true, b:1 3 true")
	if _, err := m.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: a}); err != nil {
		t.Fatal(err)
	}
	want(t, m, "a:1 1 true")
	if heartbeat(t, m, a, info(1, 3)) {
		t.Error("an executor that left is known")
	}
	if _, err := m.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: a}); err != nil {
		t.Errorf("leaving twice: %v", err)
	}
	for range missed {
		m.table.sweep()
		c.now = c.now.Add(time.Second)
	}
	m.table.sweep()
	c.now = c.now.Add(forgetAfter)
	m.table.sweep()
	want(t, m, "")
}

// A manager that was itself stopped calls no executor silent before it has listened for the usual number of heartbeats.
func TestLateSweepMarksNobody(t *testing.T) {
	m, c := newManager(t)
	register(t, m, "a:1", info(1, 4))
	m.table.sweep()
	c.now = c.now.Add(time.Minute)
	if died := m.table.sweep(); died != nil {
		t.Errorf("died: %v", died)
	}
	for range missed - 2 { // the whole minute counts as one
		c.now = c.now.Add(time.Second)
		if died := m.table.sweep(); died != nil {
			t.Errorf("died: %v", died)
		}
	}
	c.now = c.now.Add(time.Second)
	if died := m.table.sweep(); fmt.Sprint(died) != "[a:1]" {
		t.Errorf("died: %v", died)
	}
}

// A subscriber reads an executor's line as soon as it is notified of a change. The line shows the change, even if the executor is leaving.
func TestLinesShowWhatIsTold(t *testing.T) {
	m, c := newManager(t)
	told := m.table.changed
	var states []board.State
	m.table.changed = func(x board.Change) {
		states = append(states, x.State)
		want := x.State
		if want == board.Left {
			want = board.Empty
		}
		if l, err := m.memory.table.ReadLine(x.Slot); err != nil || l.State != want {
			t.Errorf("told %v, and the line says %v, %v", x.State, l.State, err)
		}
		told(x)
	}
	id := register(t, m, "a:1", info(1, 4))
	draining := info(1, 4)
	draining.Draining = true
	heartbeat(t, m, id, draining)
	for range missed {
		m.table.sweep()
		c.now = c.now.Add(time.Second)
	}
	m.table.sweep()
	heartbeat(t, m, id, info(1, 4))
	id = register(t, m, "a:1", info(2, 4)) // in the place of the first
	// One that had the slot before writes once more, over the line of the next.
	e := m.table.byID[id]
	ghost := lineOf(info(9, 4), e.slot, 7, c.now)
	ghost.Incarnation++
	m.memory.table.WriteLine(&ghost)
	m.table.sweep()
	m.table.sweep()
	if l, err := m.memory.table.ReadLine(e.slot); err != nil || l.Incarnation == ghost.Incarnation || l.Beat != e.beat {
		t.Errorf("%+v %v", l, err)
	}
	if want := []board.State{board.Open, board.Draining, board.Silent, board.Open, board.Left, board.Open, board.Open}; !slices.Equal(states, want) {
		t.Errorf("told %v, want %v", states, want)
	}
}

func TestRegisterAgain(t *testing.T) {
	m, _ := newManager(t)
	a := register(t, m, "a:1", info(1, 4))
	if again := register(t, m, "a:1", info(1, 3)); again != a {
		t.Errorf("the same incarnation got another id")
	}
	b := register(t, m, "a:1", info(2, 2)) // started anew
	if b == a {
		t.Error("another incarnation got the same id")
	}
	want(t, m, "a:1 2 true")
	if heartbeat(t, m, a, info(1, 4)) {
		t.Error("the earlier incarnation is known")
	}
	if heartbeat(t, m, b, info(3, 4)) {
		t.Error("an id with another incarnation is known")
	}
	// A local address means another place on another node.
	register(t, m, "127.0.0.1:1", info(4, 1))
	elsewhere := info(5, 1)
	elsewhere.NodeId = "boot/2"
	register(t, m, "127.0.0.1:1", elsewhere)
	want(t, m, "127.0.0.1:1 1 true, 127.0.0.1:1 1 true, a:1 2 true")
}

func TestBadRequests(t *testing.T) {
	m, _ := newManager(t)
	for name, c := range map[string]struct {
		req  *control.RegisterRequest
		code codes.Code
		text string
	}{
		"version":          {&control.RegisterRequest{ProtocolVersion: 2, Address: "a:1", Info: info(1, 1)}, codes.FailedPrecondition, "2"},
		"address":          {&control.RegisterRequest{ProtocolVersion: 1, Address: "nowhere", Info: info(1, 1)}, codes.InvalidArgument, "nowhere"},
		"no info":          {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1"}, codes.InvalidArgument, "incarnation"},
		"short GID":        {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: &control.InfoReply{Incarnation: make([]byte, 16), Fabric: []*control.FabricAddress{{Gid: make([]byte, 15)}}}}, codes.InvalidArgument, "15 bytes"},
		"data name":        {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: &control.InfoReply{Incarnation: make([]byte, 16), DataAddress: "node7:7200"}}, codes.InvalidArgument, "node7:7200"},
		"data with a zone": {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: &control.InfoReply{Incarnation: make([]byte, 16), DataAddress: "[fe80::1%\x1b]:1"}}, codes.InvalidArgument, "data_address"},
		"long data":        {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: &control.InfoReply{Incarnation: make([]byte, 16), DataAddress: "[fe80::1%" + strings.Repeat("z", 64) + "]:1"}}, codes.InvalidArgument, "data_address"},
		"free > all":       {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: info(1, 9)}, codes.InvalidArgument, "9"},
		"long a name":      {&control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: &control.InfoReply{Incarnation: make([]byte, 16), Node: strings.Repeat("x", 256)}}, codes.InvalidArgument, "256"},
	} {
		if _, err := m.Register(t.Context(), c.req); status.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := m.Heartbeat(t.Context(), &control.HeartbeatRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("heartbeat without info: %v", err)
	}
	want(t, m, "")
}

func TestServe(t *testing.T) {
	dir := t.TempDir()
	s, err := config.LoadManager([]string{"--listen", "127.0.0.1:0", "--secret-file", filepath.Join(dir, "secret"),
		"--address-file", filepath.Join(dir, "address"), "--heartbeat", "10ms", "--executors", "64", "--state-dir", filepath.Join(dir, "state"),
		"--http-listen", "unix:" + filepath.Join(dir, "http")}, nil, io.Discard, "test")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, s, slog.New(slog.DiscardHandler)) }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	var address []byte
	for range 20_000 {
		if address, err = os.ReadFile(s.AddressFile); err == nil {
			break
		}
		<-tick.C
	}
	conn, err := control.Dial(strings.TrimSpace(string(address)), control.DialConfig{SecretFile: s.SecretFile})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := control.NewManagerClient(conn)
	if _, err := client.Register(t.Context(), &control.RegisterRequest{ProtocolVersion: 1, Address: "a:1", Info: info(1, 1)}); err != nil {
		t.Fatal(err)
	}
	for alive := true; alive; <-tick.C { // the test's own time limit bounds it
		r, err := client.List(t.Context(), &control.ListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		alive = r.GetExecutors()[0].GetAlive()
	}
	unauthenticated, err := control.Dial(strings.TrimSpace(string(address)), control.DialConfig{Secret: &control.Secret{}})
	if err != nil {
		t.Fatal(err)
	}
	defer unauthenticated.Close()
	if _, err := control.NewManagerClient(unauthenticated).List(t.Context(), &control.ListRequest{}); err == nil {
		t.Error("a wrong secret is taken")
	}
	web := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, "http"))
	}}}
	r, err := web.Get("http://manager/metrics")
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := io.ReadAll(r.Body)
	r.Body.Close()
	if refused := `rfaas_credentials_refused_total{reason="wrong"} 1`; err != nil || !strings.Contains(string(metrics), refused) {
		t.Errorf("no %s in the metrics, %v", refused, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The audit log has executors that register and deregister, with their node and address.
func TestAuditOfExecutors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	a, err := identity.OpenAudit(identity.AuditConfig{Path: path, Daemon: "resource-manager"})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	m, _ := attachingManager(t, Config{Audit: a})
	in := info(1, 4)
	in.Node = "n17"
	ctx := as(t.Context(), "n17")
	r, err := m.Register(ctx, &control.RegisterRequest{ProtocolVersion: 1, Address: "192.0.2.1:7465", Info: in})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time it is not registered
		if _, err := m.Deregister(ctx, &control.DeregisterRequest{ExecutorId: r.GetExecutorId()}); err != nil {
			t.Fatal(err)
		}
	}
	a.Flush()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range []string{identity.AuditJoin, identity.AuditLeave} {
		want := `"event":"` + event + `","daemon":"resource-manager","node":"n17","who":"user of n17","detail":"address 192.0.2.1:7465"`
		if strings.Count(string(b), want) != 1 {
			t.Errorf("no %s in\n%s", want, b)
		}
	}
}
