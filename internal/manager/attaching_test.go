package manager

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// blackHole is a socket of the namespace in which shm peers listen. It accepts every connection and never answers. blob
// connects to it, and met receives each connection.
func blackHole(t *testing.T, dev *dataplane.Device) (blob []byte, met chan int) {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	domain, err := dev.NewDomain()
	ok(err)
	t.Cleanup(domain.Close)
	conn, err := domain.NewConn()
	ok(err)
	t.Cleanup(conn.Close)
	blob, err = conn.Blob()
	ok(err)
	name := blob[32:48] // see dp_shm_link.c
	rand.Read(name)
	l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	ok(err)
	ok(unix.Bind(l, &unix.SockaddrUnix{Name: "@rfaas-shm-" + hex.EncodeToString(name)}))
	ok(unix.Listen(l, 4096))
	met = make(chan int, 4096)
	var over sync.WaitGroup
	over.Go(func() {
		for {
			fd, _, err := unix.Accept(l)
			if err != nil {
				return
			}
			met <- fd
		}
	})
	t.Cleanup(func() {
		unix.Shutdown(l, unix.SHUT_RDWR)
		over.Wait()
		unix.Close(l)
		for len(met) > 0 {
			unix.Close(<-met)
		}
	})
	return blob, met
}

func threads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(tasks)
}

func (d direct) AttachExecutor(ctx context.Context, r *control.AttachExecutorRequest, _ ...grpc.CallOption) (*control.AttachExecutorReply, error) {
	return d.m.AttachExecutor(ctx, r)
}

func as(ctx context.Context, tenant string) context.Context {
	return control.WithCaller(ctx, &identity.Identity{Name: "user of " + tenant, Tenant: tenant, Role: identity.RoleTenant})
}

func attachingManager(t *testing.T, cfg Config) (*Manager, *dataplane.Device) {
	t.Helper()
	cfg.Heartbeat, cfg.Slots, cfg.Providers, cfg.Asked = time.Minute, 8, []string{dataplane.SHM}, true
	cfg.Log = slog.New(slog.DiscardHandler)
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	return m, dev
}

// A tenant makes the manager connect to a socket that never answers, 500 times at once. This occupies only a few
// threads of the manager. Another tenant attaches meanwhile. All attempts end when their callers go away.
func TestAttachToABlackHole(t *testing.T) {
	const attempts = 500
	attack := map[string]func(*Manager, context.Context, []byte) error{
		"client": func(m *Manager, ctx context.Context, blob []byte) error {
			_, err := m.AttachClient(ctx, &control.AttachClientRequest{Provider: dataplane.SHM, Blob: blob})
			return err
		},
		"executor": func(m *Manager, ctx context.Context, blob []byte) error {
			_, err := m.AttachExecutor(ctx, &control.AttachExecutorRequest{ExecutorId: m.table.list()[0].GetExecutorId(),
				Incarnation: info(1, 4).GetIncarnation(), Provider: dataplane.SHM, Blob: blob})
			return err
		},
	}
	for name, f := range attack {
		t.Run(name, func(t *testing.T) {
			m, dev := attachingManager(t, Config{})
			for n, owner := range []string{"mallory", "node b"} {
				n := byte(n)
				if _, err := m.Register(as(t.Context(), owner), &control.RegisterRequest{ProtocolVersion: 1, Address: fmt.Sprintf("192.0.2.%d:1", n+1), Info: info(n+1, 4)}); err != nil {
					t.Fatal(err)
				}
			}
			other := m.table.list()[1].GetExecutorId()
			blob, met := blackHole(t, dev)
			before := threads(t)
			ctx, cancel := context.WithCancel(as(t.Context(), "mallory"))
			defer cancel()
			errs := make(chan error, attempts)
			for range attempts {
				go func() { errs <- f(m, ctx, blob) }()
			}
			unix.Close(<-met) // the attack is under way
			c, err := link.AttachClient(as(t.Context(), "ann"), direct{m: m}, dev)
			if err != nil {
				t.Fatalf("another tenant: %v", err)
			}
			defer c.Close()
			x, err := link.AttachExecutor(as(t.Context(), "node b"), direct{m: m}, dev, other, incarnationOf(info(2, 4)))
			if err != nil {
				t.Fatalf("another node: %v", err)
			}
			defer x.Close()
			cancel()
			for range attempts {
				if err := <-errs; err == nil {
					t.Error("attached to nobody")
				}
			}
			// The Go runtime keeps its threads, so this is the largest number so far.
			if n := threads(t) - before; n > 40 {
				t.Errorf("%d attempts cost %d threads", attempts, n)
			}
		})
	}
}

// An attempt that waits for its peer or for its turn ends when its caller goes away.
func TestAttachIsCancelled(t *testing.T) {
	m, dev := attachingManager(t, Config{Attempts: 1})
	blob, met := blackHole(t, dev)
	begin := func() (context.CancelFunc, chan error) {
		ctx, cancel := context.WithCancel(as(t.Context(), "ann"))
		err := make(chan error, 1)
		go func() {
			_, e := m.AttachClient(ctx, &control.AttachClientRequest{Provider: dataplane.SHM, Blob: blob})
			err <- e
		}()
		return cancel, err
	}
	stopFirst, first := begin()
	defer stopFirst()
	fd := <-met
	defer unix.Close(fd)
	stopSecond, second := begin()
	testkit.Eventually(t, "the second one waits for its turn", func() bool { return m.attach.clients.attempts() >= 2 })
	stopSecond()
	if err := <-second; !strings.Contains(err.Error(), "turn") || !strings.Contains(err.Error(), context.Canceled.Error()) {
		t.Errorf("waiting for a turn: %v", err)
	}
	stopFirst()
	if err := <-first; !strings.Contains(err.Error(), context.Canceled.Error()) {
		t.Errorf("waiting for the peer: %v", err)
	}
	if n := m.attach.clients.attempts(); n != 0 {
		t.Errorf("%d attempts are left", n)
	}
	if len(m.attach.attached) != 0 || m.attach.total != 0 {
		t.Errorf("connections that are not there count: %v", m.attach.attached)
	}
}

// The setting limits a tenant's connections to the board. Other tenants are not affected. Closing a connection makes
// another possible.
func TestAttachedByTenant(t *testing.T) {
	m, dev := attachingManager(t, Config{Attached: 2})
	attach := func(tenant string) (*link.Client, error) {
		return link.AttachClient(as(t.Context(), tenant), direct{m: m}, dev)
	}
	var mine []*link.Client
	for range 2 {
		c, err := attach("ann")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		mine = append(mine, c)
	}
	if _, err := attach("ann"); control.ClassOf(err) != control.ClassBusy || !strings.Contains(err.Error(), "tenant-attached") {
		t.Errorf("one too many: %v", err)
	}
	if m.attach.refused.Load() != 1 {
		t.Errorf("%d refusals were counted", m.attach.refused.Load())
	}
	for _, tenant := range []string{"bob", ""} {
		c, err := attach(tenant)
		if err != nil {
			t.Errorf("tenant %q: %v", tenant, err)
		}
		t.Cleanup(c.Close)
	}
	if _, err := m.AttachClient(as(t.Context(), "ann"), &control.AttachClientRequest{Provider: dataplane.SHM,
		Mailbox: &control.MemoryRef{Size: board.MailboxSize - 1}}); control.ClassOf(err) != control.ClassInvalid {
		t.Error(err)
	}
	mine[0].Close()
	// Its monitor notices the end of the peer's socket; then a sweep closes the connection.
	testkit.Eventually(t, "another client of the tenant can attach", func() bool {
		m.notifier.sweep()
		m.notifier.post()
		c, err := attach("ann")
		if err == nil {
			t.Cleanup(c.Close)
		}
		return err == nil
	})
}

// Parties take turns, independent of their order of arrival, and none exceeds its share.
func TestTurns(t *testing.T) {
	turns := &turns{most: 4}
	running := turns.take(t.Context(), "a")
	order := make(chan string, 8)
	var all sync.WaitGroup
	wait := func(party string, n int) {
		all.Go(func() {
			done := turns.take(t.Context(), party)
			order <- party
			done()
		})
		testkit.Eventually(t, party+" waits for its turn", func() bool { return turns.attempts() >= n })
	}
	for i := range 4 {
		wait("a", i+2)
	}
	if len(order) != 0 {
		t.Fatalf("a has more than its share of %d", turns.share())
	}
	others := []func(){turns.take(t.Context(), "b"), turns.take(t.Context(), "c"), turns.take(t.Context(), "d")}
	wait("e", 9)
	running() // a turn is free, and a is the first in the order
	if first := <-order; first != "a" {
		t.Errorf("first %s", first)
	}
	if second := <-order; second != "e" {
		t.Errorf("then %s: one party's queue goes before the other's", second)
	}
	all.Wait()
	for _, done := range others {
		done()
	}
	if len(turns.parties) != 0 || len(turns.order) != 0 || turns.running != 0 {
		t.Errorf("left: %v %v %d", turns.parties, turns.order, turns.running)
	}
}
