package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// providers runs f on each available provider. With RFAAS_REQUIRE_VERBS verbs must be available, and f runs on verbs
// alone: shm and tcp were tested outside the virtual machine.
func providers(t *testing.T, f func(t *testing.T, provider string)) {
	for _, p := range []string{dataplane.SHM, dataplane.TCP, dataplane.Verbs} {
		t.Run(p, func(t *testing.T) {
			if p != dataplane.Verbs && os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
				t.Skip("tested outside the virtual machine")
			}
			d, err := dataplane.Open(p, dataplane.Options{GIDIndex: -1})
			if errors.Is(err, dataplane.ErrUnsupported) && os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			d.Close()
			f(t, p)
		})
	}
}

// world is a manager with a gRPC server, and the devices of its executors and clients.
type world struct {
	*Manager
	t        testing.TB
	clock    *clock
	provider string
	dir      string
	client   control.ManagerClient
	server   *grpc.Server
	conn     *grpc.ClientConn
	config   Config // what the next start adds: Limits, Encrypt
}

func newWorld(t testing.TB, provider string, slots int) *world {
	w := &world{t: t, clock: &clock{time.Unix(1e9, 0)}, provider: provider, dir: filepath.Join(t.TempDir(), "state")}
	w.start(slots)
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *world) start(slots int) {
	w.t.Helper()
	var err error
	tariff, err := accounting.ParseTariff("EUR", "core-hour=1")
	if err != nil {
		w.t.Fatal(err)
	}
	w.Manager, err = New(Config{Heartbeat: time.Second, Slots: slots, Providers: []string{w.provider}, Asked: true, StateDir: w.dir,
		Tariff: tariff, Limits: w.config.Limits, Encrypt: w.config.Encrypt, Verbs: dataplane.Options{GIDIndex: -1}, DataListen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler), Now: w.clock.Now})
	if err != nil {
		w.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a real address: on tcp, the manager may name addresses of its own node only
	if err != nil {
		w.t.Fatal(err)
	}
	w.server = grpc.NewServer()
	w.AddTo(w.server)
	go w.server.Serve(l)
	w.conn, err = grpc.NewClient("passthrough:///"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		w.t.Fatal(err)
	}
	w.client = control.NewManagerClient(w.conn)
}

func (w *world) stop() {
	w.conn.Close()
	w.server.Stop()
	w.Manager.Close()
}

func (w *world) device() *dataplane.Device {
	w.t.Helper()
	d, err := dataplane.Open(w.provider, dataplane.Options{GIDIndex: -1, ActiveOnly: w.provider == dataplane.TCP, Encrypt: w.config.Encrypt})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(d.Close)
	return d
}

// party is an executor.
type party struct {
	*link.Executor
	id   uint64
	info *control.InfoReply
	beat uint64
	w    *world
}

func (w *world) executor(n byte) *party {
	w.t.Helper()
	p := &party{w: w, info: info(n, 4)}
	p.info.Providers = []string{"shm", "verbs"}
	p.info.Fabric = []*control.FabricAddress{{Gid: slices.Repeat([]byte{0xfe}, 16)}, {Infiniband: true, Gid: slices.Repeat([]byte{0xfd}, 16), Lid: 77}}
	p.info.MemoryBytes, p.info.FreeMemoryBytes = 1<<30, 1<<29
	p.join(w.device())
	return p
}

func (p *party) join(dev *dataplane.Device) {
	p.w.t.Helper()
	r, err := p.w.client.Register(context.Background(), &control.RegisterRequest{ProtocolVersion: 1,
		Address: fmt.Sprintf("192.0.2.%d:7465", p.info.Incarnation[15]), Info: p.info})
	if err != nil {
		p.w.t.Fatal(err)
	}
	p.id = r.GetExecutorId()
	if got := link.Providers(r.GetManager(), p.w.nodeID, p.w.provider); !slices.Equal(got, []string{p.w.provider}) {
		p.w.t.Fatalf("hello %v", r.GetManager())
	}
	if p.Executor, err = link.AttachExecutor(context.Background(), p.w.client, dev, p.id, incarnationOf(p.info)); err != nil {
		p.w.t.Fatal(err)
	}
	p.w.t.Cleanup(p.Executor.Close)
	p.beat = 100
}

func (p *party) write(free uint32) {
	p.w.t.Helper()
	p.beat++
	p.info.FreeCores = free
	if err := p.WriteLine(lineOf(p.info, 0, p.beat, p.w.clock.now)); err != nil {
		p.w.t.Fatal(err)
	}
}

func (w *world) reader() (*link.Client, *board.Reader) {
	w.t.Helper()
	c, err := link.AttachClient(context.Background(), w.client, w.device())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(c.Close)
	r, err := board.NewReader(c, "boot/1")
	if err != nil {
		w.t.Fatal(err)
	}
	return c, r
}

// mailbox waits until the mailbox shows that many changes.
func mailbox(t testing.TB, c *link.Client, n uint64) board.Mailbox {
	t.Helper()
	var m board.Mailbox
	testkit.Eventually(t, fmt.Sprintf("%d changes in the mailbox", n), func() bool {
		var err error
		m, err = c.Mailbox()
		return err == nil && m.Changes >= n && m.Epoch != 0
	})
	return m
}

var need = board.Need{Cores: 1, Local: board.SHM | board.Verbs, Remote: board.Verbs}

// A silent executor registers again, because it has lost its connection to the manager's memory. Subscribers that read its line when they are
// notified see that it is back.
func TestProviderRegisterAgain(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 8)
		a := w.executor(1)
		a.write(3)
		for range missed + 1 {
			w.table.sweep()
			w.clock.now = w.clock.now.Add(time.Second)
		}
		told, states := w.table.changed, 0
		w.table.changed = func(c board.Change) {
			if l, err := w.memory.table.ReadLine(c.Slot); err != nil || l.State != c.State {
				t.Errorf("told %v, and the line says %v, %v", c.State, l.State, err)
			}
			states++
			told(c)
		}
		want(t, w.Manager, "192.0.2.1:7465 3 false")
		id := a.id
		a.join(w.device())
		if states != 1 || a.id != id {
			t.Errorf("told %d times, id %d, want %d", states, a.id, id)
		}
		a.write(2)
		w.table.sweep()
		want(t, w.Manager, "192.0.2.1:7465 2 true")
		// What it has written just before it would be marked is a sign of life.
		a.write(1)
		if e := w.table.byID[a.id]; w.table.markSilent(e) {
			t.Error("marked as silent")
		}
		w.table.sweep()
		want(t, w.Manager, "192.0.2.1:7465 1 true")
		if states != 1 {
			t.Errorf("told %d times", states)
		}
	})
}

// A subscriber that only looks at its mailbox finds out that the manager has forgotten it, also after it has been idle.
func TestProviderForgottenSubscriber(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 8)
		c, _ := w.reader()
		if provider == dataplane.Verbs { // more than one keepalive
			for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				if err := c.Err(); err != nil {
					t.Fatal(err)
				}
			}
		}
		testkit.Eventually(t, "it is subscribed", func() bool { return w.notifier.count() == 1 }) // on tcp after the client has connected
		w.notifier.mu.Lock()
		subscribers := slices.Collect(maps.Keys(w.notifier.subs))
		w.notifier.mu.Unlock()
		w.notifier.drop(subscribers[0])
		w.notifier.post()
		testkit.Eventually(t, "the subscriber notices it", func() bool { return c.Err() != nil })
	})
}

// From registration to the end, as executors, clients and the manager see it.
func TestProviderBoard(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 64)
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); w.tell(ctx) }()
		defer func() { stop(); <-done }()

		c, early := w.reader()
		if _, err := early.Pick(need, nil, w.clock.now, 4); !errors.Is(err, board.ErrNone) {
			t.Errorf("%v", err)
		}
		mailbox(t, c, 0)
		a, b := w.executor(1), w.executor(2)
		a.write(3)
		b.write(2)
		box := mailbox(t, c, 2)
		if changes, all := box.Since(0); !all || len(changes) != 2 || changes[0].State != board.Open || changes[0].Slot == changes[1].Slot {
			t.Errorf("%+v", changes)
		}
		_, r := w.reader()
		choice, err := r.Pick(need, nil, w.clock.now, 4)
		if err != nil || !choice.Local {
			t.Fatal(choice, err)
		}
		who, err := r.Identity(&choice.Line)
		if err != nil || who.Node != "n" || len(who.Addresses) != 3 || who.Addresses[0].Kind != board.IPv4 || who.Addresses[0].Port != 7465 ||
			who.Addresses[1].Kind != board.RoCE || who.Addresses[2].Kind != board.InfiniBand || who.Addresses[2].LID != 77 || who.Addresses[2].IP.As16()[15] != 0xfd {
			t.Errorf("%+v %v", who, err)
		}
		want(t, w.Manager, "192.0.2.1:7465 3 true, 192.0.2.2:7465 2 true")

		// One falls silent, while the manager hears the other without a message.
		w.clock.now = w.clock.now.Add(2 * time.Second)
		b.write(1)
		w.table.sweep()
		w.clock.now = w.clock.now.Add(time.Second)
		if died := w.table.sweep(); len(died) != 1 || died[0] != "192.0.2.1:7465" {
			t.Errorf("died: %v", died)
		}
		want(t, w.Manager, "192.0.2.1:7465 3 false, 192.0.2.2:7465 1 true")
		if box := mailbox(t, c, 3); box.Latest[0].State != board.Silent {
			t.Errorf("%+v", box)
		}
		if choice, err := r.Pick(need, nil, w.clock.now, 4); err != nil || choice.Line.FreeCores != 1 {
			t.Errorf("%+v %v", choice, err)
		}
		// It writes again, and is back without a word.
		a.write(4)
		w.table.sweep()
		if box := mailbox(t, c, 4); box.Latest[0].State != board.Open {
			t.Errorf("%+v", box)
		}
		want(t, w.Manager, "192.0.2.1:7465 4 true, 192.0.2.2:7465 1 true")
		a.info.Draining = true
		a.write(4)
		w.table.sweep()
		if box := mailbox(t, c, 5); box.Latest[0].State != board.Draining {
			t.Errorf("%+v", box)
		}
		// The executor deregisters: its slot is empty, its later writes are refused, and the next executor gets the slot.
		if _, err := w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: a.id}); err != nil {
			t.Fatal(err)
		}
		if box := mailbox(t, c, 6); box.Latest[0].State != board.Left {
			t.Errorf("%+v", box)
		}
		var refused error
		for end := time.Now().Add(10 * time.Second); refused == nil && time.Now().Before(end); {
			refused = a.WriteLine(lineOf(a.info, 0, 999, w.clock.now))
		}
		if refused == nil {
			t.Error("an executor that has left writes its line")
		}
		w.table.sweep() // reads what the executor wrote before it knew that
		if l, err := r.Line(0); err != nil || l.State != board.Empty {
			t.Errorf("%+v %v", l, err)
		}
		again := w.executor(7)
		again.write(2)
		want(t, w.Manager, "192.0.2.2:7465 1 true, 192.0.2.7:7465 2 true")

		// A subscriber that is gone is forgotten, and the others hear on.
		n := w.notifier.count()
		c.Close()
		testkit.Eventually(t, "it is forgotten", func() bool {
			w.notifier.change(board.Change{})
			w.notifier.sweep()
			return w.notifier.count() != n
		})
		if w.notifier.count() != n-1 {
			t.Errorf("%d subscribers, want %d", w.notifier.count(), n-1)
		}
	})
}

func TestAttachBadInput(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	p := w.executor(1)
	inc := incarnationOf(p.info)
	for _, c := range []struct {
		text string
		call func() error
	}{
		{"not registered", func() error {
			_, err := w.client.AttachExecutor(t.Context(), &control.AttachExecutorRequest{ExecutorId: 1, Incarnation: inc[:], Provider: "shm"})
			return err
		}},
		{"not registered", func() error {
			_, err := w.client.AttachExecutor(t.Context(), &control.AttachExecutorRequest{ExecutorId: p.id, Incarnation: inc[:8], Provider: "shm"})
			return err
		}},
		{"pigeon", func() error {
			_, err := w.client.AttachExecutor(t.Context(), &control.AttachExecutorRequest{ExecutorId: p.id, Incarnation: inc[:], Provider: "pigeon"})
			return err
		}},
		{"blob", func() error {
			_, err := w.client.AttachExecutor(t.Context(), &control.AttachExecutorRequest{ExecutorId: p.id, Incarnation: inc[:], Provider: "shm", Blob: []byte("x")})
			return err
		}},
		{"verbs", func() error {
			_, err := w.client.AttachClient(t.Context(), &control.AttachClientRequest{Provider: "verbs"})
			return err
		}},
		{"63", func() error {
			_, err := w.client.AttachClient(t.Context(), &control.AttachClientRequest{Provider: "shm", Mailbox: &control.MemoryRef{Size: 63}})
			return err
		}},
		{"blob", func() error {
			_, err := w.client.AttachClient(t.Context(), &control.AttachClientRequest{Provider: "shm", Blob: make([]byte, 1000)})
			return err
		}},
		{"protocol_version 9", func() error {
			_, err := w.client.Hello(t.Context(), &control.ManagerHelloRequest{ProtocolVersion: 9})
			return err
		}},
		{"3 counters", func() error {
			_, err := w.client.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: inc[:], Use: make([]uint64, 3)}}})
			return err
		}},
		{"lease 0", func() error {
			_, err := w.client.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: inc[:], Use: make([]uint64, 8)}}})
			return err
		}},
	} {
		if err := c.call(); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
	if n := w.counted("rfaas_manager_refused_settlements_total"); n != 2 {
		t.Errorf("%v refused settlements are counted, want 2", n)
	}
	p.write(1) // its connection has not suffered
	if _, err := New(Config{Heartbeat: time.Second, Slots: 8, Providers: []string{"pigeon"}, Asked: true, Log: slog.New(slog.DiscardHandler)}); err == nil ||
		!strings.Contains(err.Error(), "pigeon") {
		t.Errorf("%v", err)
	}
}

// charged is what a bill says of a tenant's cores, in core-microseconds.
func (w *world) charged(tenant string) string {
	w.t.Helper()
	r, err := w.client.Bill(context.Background(), &control.BillRequest{Tenant: tenant})
	if err != nil {
		w.t.Fatal(err)
	}
	if r.GetTrouble() != "" || r.GetCurrency() != "EUR" {
		w.t.Errorf("trouble %q, currency %q", r.GetTrouble(), r.GetCurrency())
	}
	if len(r.GetBills()) == 0 {
		return ""
	}
	return r.GetBills()[0].GetLines()[0].GetUnits()
}

// Charges from the cell to the bill, over the ends of manager and executor.
func TestProviderAccounts(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 8)
		p := w.executor(1)
		k := accounting.Key{Incarnation: incarnationOf(p.info), Lease: 5}
		head := accounting.CellHead{Key: k, Tenant: "ann", Began: w.clock.now}
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		if p.Cells() != 24 {
			t.Errorf("%d cells", p.Cells())
		}
		a, b := accounting.Use{10, 20, 0, 0, 5}, accounting.Use{30, 20, 1, 0, 6}
		ok(p.WriteHead(3, head))
		if w.charged("ann") != "0" {
			t.Errorf("charged %s at the beginning", w.charged("ann"))
		}
		ok(p.Charge(3, accounting.Use{}, a))
		if got := w.charged("ann"); got != "10" {
			t.Errorf("charged %s", got)
		}
		if r, given, err := p.Receipt(3); err != nil || !given || r.Use != a || r.Final {
			t.Errorf("%+v %v %v", r, given, err)
		}
		ok(p.Charge(3, a, b))
		head.Final, head.Ended = true, w.clock.now
		ok(p.WriteHead(3, head))
		w.harvest()
		if r, given, err := p.Receipt(3); err != nil || !given || !r.Final || r.Use != b || r.Key != k {
			t.Errorf("%+v %v %v", r, given, err)
		}
		ok(p.Clear(3))
		w.harvest()
		k.Lease = 6
		ok(p.WriteHead(3, accounting.CellHead{Key: k, Tenant: "ann", Began: w.clock.now}))
		ok(p.Charge(3, accounting.Use{}, a))
		if got := w.charged("ann"); got != "40" {
			t.Errorf("charged %s", got)
		}
		if err := p.Charge(3, accounting.Use{}, a); err == nil || !strings.Contains(err.Error(), "core_us was 10, want 0") {
			t.Errorf("charging what is charged: %v", err)
		}
		// The executor leaves at once after its last charge: it is not lost. 20 are in the cell now.
		ok(p.Charge(3, accounting.Use{20, 40, 0, 0, 10}, accounting.Use{21, 40, 0, 0, 10}))
		_, err := w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: p.id})
		ok(err)
		if got := w.charged("ann"); got != "51" {
			t.Errorf("charged %s after it left", got)
		}
		// The manager is started anew: fresh cells, the same sums, nothing twice.
		w.stop()
		w.start(8)
		p.join(w.device())
		ok(p.WriteHead(0, accounting.CellHead{Key: k, Tenant: "ann", Began: w.clock.now}))
		ok(p.Charge(0, accounting.Use{}, accounting.Use{22}))
		if got := w.charged("ann"); got != "52" {
			t.Errorf("charged %s after a restart", got)
		}
		// It attaches again: its cells are fresh, the old ones are read once more.
		ok(p.Charge(0, accounting.Use{22}, accounting.Use{25}))
		p.join(w.device())
		if got := w.charged("ann"); got != "55" {
			t.Errorf("charged %s after attaching again", got)
		}
		// By message, with the same result.
		use := make([]uint64, 8)
		use[0] = 26
		for range 2 {
			_, err = w.client.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: k.Incarnation[:], Lease: 6, Tenant: "ann", Use: use}}})
			ok(err)
		}
		if got := w.charged("ann"); got != "56" {
			t.Errorf("charged %s by message", got)
		}
		// Another tenant's lease is not taken over, and does not stop the others.
		ok(p.WriteHead(1, accounting.CellHead{Key: k, Tenant: "bob", Began: w.clock.now}))
		ok(p.Charge(1, accounting.Use{}, accounting.Use{999}))
		k.Lease = 7
		ok(p.WriteHead(2, accounting.CellHead{Key: k, Tenant: "ann", Began: w.clock.now}))
		ok(p.Charge(2, accounting.Use{}, accounting.Use{100}))
		w.harvest()
		if r, given, _ := p.Receipt(1); given {
			t.Errorf("a receipt for a theft: %+v", r)
		}
		if r, given, err := p.Receipt(2); err != nil || !given || r.Use[0] != 100 {
			t.Errorf("%+v %v %v", r, given, err)
		}
		if got := w.accounts.state(); got != "" {
			t.Errorf("one executor's fault is everybody's: %s", got)
		}
	})
}
