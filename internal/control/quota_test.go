package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// as returns a connection with some credentials.
func (r *realm) as(cfg DialConfig) *grpc.ClientConn {
	r.t.Helper()
	return r.to(r.port.Address, cfg)
}

func (r *realm) to(address string, cfg DialConfig) *grpc.ClientConn {
	r.t.Helper()
	conn, err := Dial(address, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

func (r *realm) ask(c *grpc.ClientConn) error { return r.askWith(r.t.Context(), c) }

func (r *realm) askWith(ctx context.Context, c *grpc.ClientConn) error {
	_, err := NewExecutorClient(c).Info(ctx, &InfoRequest{})
	return err
}

// busy checks that an error reports a given limit.
func busy(t *testing.T, err error, limit string) {
	t.Helper()
	if ClassOf(err) != ClassBusy || !IsClassed(err) || !strings.Contains(Text(err), limit) {
		t.Errorf("%v, want that the limit %s is reached", err, limit)
	}
}

// eventually waits for the effect of an event at the other side.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Errorf("%s: %v", what, err)
}

// The number of a tenant's connections is limited, whatever it does on them. Other tenants and operators are not
// affected.
func TestTenantsConnectionsAreBounded(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false, quota.Limits{quota.Connections: 2})
	ann := DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)}
	ben := DialConfig{TokenFile: r.token("ben", identity.Claims{Tenant: "ben", Role: "tenant"}, 0)}
	first, second, third := r.as(ann), r.as(ann), r.as(ann)
	for _, c := range []*grpc.ClientConn{first, second, second} {
		if err := r.ask(c); err != nil {
			t.Fatal(err)
		}
	}
	busy(t, r.ask(third), "tenant-connections")
	if err := r.ask(second); err != nil {
		t.Errorf("a connection that was there: %v", err)
	}
	for range 3 {
		if err := r.ask(r.as(ben)); err != nil {
			break
		}
	}
	for range 5 {
		if err := r.ask(r.as(DialConfig{SecretFile: r.in("secret")})); err != nil {
			t.Errorf("an operator: %v", err)
		}
	}
	if n := r.port.Gate.RefusedByQuota(quota.Connections); n != 2 {
		t.Errorf("%d counted, want one of each tenant", n)
	}
	first.Close()
	eventually(t, "a connection after one has ended", func() error { return r.ask(third) })
}

// The number of a tenant's streams on all connections is limited. A stream that ends makes another possible.
func TestTenantsStreamsAreBounded(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false, quota.Limits{quota.Streams: 3})
	ann := DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)}
	one, other := r.as(ann), r.as(ann)
	open := func(c *grpc.ClientConn) grpc.BidiStreamingClient[LeaseRequest, LeaseReply] {
		t.Helper()
		s, err := NewExecutorClient(c).Leasing(t.Context())
		if err == nil {
			err = s.Send(&LeaseRequest{})
		}
		if err == nil {
			_, err = s.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	last := open(one)
	open(one)
	open(other)
	busy(t, r.ask(one), "tenant-streams")
	busy(t, r.ask(other), "tenant-streams")
	if err := r.ask(r.as(DialConfig{SecretFile: r.in("secret")})); err != nil {
		t.Errorf("an operator: %v", err)
	}
	if err := last.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := last.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	for range 100 { // each call's place is free again when it is over
		eventually(t, "a call after a stream has ended", func() error { return r.ask(other) })
	}
}

// A caller with a node's certificate has a tenant's limits on connections and streams, too.
func TestNodesConnectionsAreBounded(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false, quota.Limits{quota.Connections: 2})
	node := DialConfig{Node: r.node("node")}
	first, second, third := r.to(r.far(), node), r.to(r.far(), node), r.to(r.far(), node)
	for _, c := range []*grpc.ClientConn{first, second, first} {
		if err := r.ask(c); err != nil {
			t.Fatal(err)
		}
	}
	busy(t, r.ask(third), "tenant-connections")
	if err := r.ask(r.as(DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "node localhost", Role: "tenant"}, 0)})); err != nil {
		t.Errorf("a tenant of the node's name: %v", err)
	}
	first.Close()
	eventually(t, "a connection after one has ended", func() error { return r.ask(third) })
}

// talkative gives long replies.
type talkative struct {
	UnimplementedExecutorServer
	asked atomic.Int32
}

const longReply = 100 << 10

func (s *talkative) Info(context.Context, *InfoRequest) (*InfoReply, error) {
	s.asked.Add(1)
	return &InfoReply{Node: strings.Repeat("x", longReply)}, nil
}

// mute is a connection whose client stops reading.
type mute struct {
	net.Conn
	silent chan struct{} // closed: nothing more is read
	closed chan struct{}
	once   sync.Once
}

func (m *mute) Read(b []byte) (int, error) {
	select {
	case <-m.silent:
		<-m.closed
		return 0, net.ErrClosed
	default:
		return m.Conn.Read(b[:min(len(b), 64)]) // short, so that the next Read comes soon
	}
}

func (m *mute) Close() error {
	m.once.Do(func() { close(m.closed) })
	return m.Conn.Close()
}

// The replies that a tenant does not read are bounded in bytes. gRPC keeps them, although their calls count as over.
func TestUnreadRepliesAreBounded(t *testing.T) {
	const most = 20 * longReply
	r := newRealm(t, "127.0.0.1:0", false)
	p, err := OpenPort(PortConfig{Listen: "unix:" + r.in("socket"), SecretFile: r.in("secret"), IdentityDir: r.in("node"),
		Bounds: Bounds{Tenant: quota.Limits{quota.Replies: most}}})
	if err != nil {
		t.Fatal(err)
	}
	server := &talkative{}
	RegisterExecutorServer(p.Server, server)
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(t.Context()) })
	as := func(cfg DialConfig) *grpc.ClientConn { return r.to(p.Address, cfg) }
	silent := make(chan struct{})
	cfg := DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0), Connect: func(path string) (net.Conn, error) {
		c, err := net.Dial("unix", path)
		return &mute{Conn: c, silent: silent, closed: make(chan struct{})}, err
	}}
	quiet := as(cfg)
	for range 40 { // a client that reads its replies has no limit
		if err := r.ask(quiet); err != nil {
			t.Fatal(err)
		}
	}
	close(silent)
	ctx, cancel := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	asked := server.asked.Load()
	const many = 200
	for range many {
		calls.Go(func() { _, _ = NewExecutorClient(quiet).Info(ctx, &InfoRequest{}) })
	}
	eventually(t, "all calls are made", func() error {
		if n := server.asked.Load() - asked; n < many {
			return fmt.Errorf("%d calls", n)
		}
		return nil
	})
	// Bytes that the kernel has accepted no longer count.
	eventually(t, "most replies are refused", func() error {
		if n := p.Gate.RefusedByQuota(quota.Replies); n < many/2 {
			return fmt.Errorf("%d replies were refused", n)
		}
		return nil
	})
	ben := as(DialConfig{TokenFile: r.token("ben", identity.Claims{Tenant: "ben", Role: "tenant"}, 0)})
	if err := r.ask(ben); err != nil {
		t.Errorf("another tenant: %v", err)
	}
	cancel()
	quiet.Close()
	calls.Wait()
	cfg.Connect = nil
	again := as(cfg)
	for range 10 * most / longReply { // the end of the connection releases all
		eventually(t, "a call after the connection has ended", func() error { return r.ask(again) })
	}
}

// stubborn does not notice that its caller is gone.
type stubborn struct {
	UnimplementedExecutorServer
	begun, running, most atomic.Int32
	end                  chan struct{}
}

func (s *stubborn) Info(context.Context, *InfoRequest) (*InfoReply, error) {
	s.begun.Add(1)
	s.most.Store(max(s.most.Load(), s.running.Add(1)))
	defer s.running.Add(-1)
	<-s.end
	return &InfoReply{}, nil
}

// A cancelled call counts until its handler returns.
func TestCancelledCallsCount(t *testing.T) {
	const most = 3
	r := newRealm(t, "127.0.0.1:0", false)
	p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: r.in("secret"), IdentityDir: r.in("node"),
		Bounds: Bounds{Tenant: quota.Limits{quota.Streams: most}}})
	if err != nil {
		t.Fatal(err)
	}
	server := &stubborn{end: make(chan struct{})}
	RegisterExecutorServer(p.Server, server)
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(t.Context()) })
	conn := r.to(p.Address, DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)})
	for i := range 10 * most {
		ctx, cancel := context.WithCancel(t.Context())
		failed := make(chan error, 1)
		go func() { failed <- r.askWith(ctx, conn) }()
		eventually(t, "a call that begins or is refused", func() error {
			if server.begun.Load() > int32(i) || p.Gate.RefusedByQuota(quota.Streams) > 0 {
				return nil
			}
			return errors.New("neither")
		})
		cancel()
		<-failed
	}
	if n := server.most.Load(); n != most {
		t.Errorf("%d calls of one tenant have run at a time, want %d", n, most)
	}
	if p.Gate.RefusedByQuota(quota.Streams) == 0 {
		t.Error("no call was refused")
	}
	close(server.end)
	eventually(t, "a call when the others have ended", func() error { return r.ask(conn) })
}
