package control

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// as is a connection with some credentials.
func (r *realm) as(cfg DialConfig) *grpc.ClientConn {
	r.t.Helper()
	conn, err := Dial(r.port.Address, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

func (r *realm) ask(c *grpc.ClientConn) error {
	_, err := NewExecutorClient(c).Info(r.t.Context(), &InfoRequest{})
	return err
}

// busy checks that a limit was reached, and which.
func busy(t *testing.T, err error, limit string) {
	t.Helper()
	if ClassOf(err) != ClassBusy || !IsClassed(err) || !strings.Contains(Text(err), limit) {
		t.Errorf("%v, want that the limit %s is reached", err, limit)
	}
}

// eventually waits for what follows from an event at the other side.
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

// A tenant has so many connections, whatever it does on them. Others, and operators, are not concerned.
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

// A tenant has so many streams on all its connections, and each that ends makes room.
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
