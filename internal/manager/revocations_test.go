package manager

import (
	"context"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// entering tells when a call waits for a list.
type entering struct {
	*Manager
	entered chan struct{}
}

func (m *entering) Revocations(ctx context.Context, r *control.RevocationsRequest) (*control.RevocationsReply, error) {
	close(m.entered)
	return m.Manager.Revocations(ctx, r)
}

// A call that waits for a newer list is answered when the resource manager ends, so that its end need not wait for the call.
func TestWaitForRevocationsEndsWithThePort(t *testing.T) {
	dir := t.TempDir()
	newCluster(t, dir, map[string][]string{"localhost": {"localhost"}})
	node, err := identity.OpenNode(filepath.Join(dir, "localhost"), nil, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(dir, "secret")
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	m := &entering{&Manager{node: node}, make(chan struct{})}
	control.RegisterManagerServer(port.Server, m)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	conn, err := control.Dial(port.Address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answered := make(chan error, 1)
	go func() {
		r, err := control.NewManagerClient(conn).Revocations(t.Context(), &control.RevocationsRequest{Serial: math.MaxUint64})
		if err == nil && len(r.GetList()) > 0 {
			t.Error("a list that is not newer")
		}
		answered <- err
	}()
	<-m.entered
	port.Close(t.Context())
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// A resource manager whose identity came from an issuer refuses what is revoked there, without a copy of the list.
func TestRevocationsOfTheIssuer(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	cluster := newCluster(t, dir, map[string][]string{"localhost": {"localhost"}})
	server, err := issuer.NewServer(issuer.Config{Cluster: cluster, Hosts: []string{"127.0.0.1"}, NodeLife: time.Hour})
	ok(err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(err)
	ok(os.WriteFile(in("localhost/issuer"), []byte(issuer.AddressOf(l.Addr().String(), cluster.CA()).String()), 0o644))
	s, err := config.LoadManager([]string{"--listen", "127.0.0.1:0", "--secret-file", in("secret"), "--identity-dir", in("localhost"), "--providers", "shm",
		"--address-file", in("address")}, nil, io.Discard, "test")
	ok(err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- server.Serve(ctx, l) }()
	go func() { done <- Serve(ctx, s, slog.New(slog.DiscardHandler)) }()
	defer func() {
		stop()
		for range cap(done) {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}()
	cred, err := cluster.IssueToken(identity.Claims{Tenant: "ann", Role: "tenant"}, nil, time.Now())
	ok(err)
	b, err := cred.Encode()
	ok(err)
	ok(os.WriteFile(in("token"), b, 0o600))
	_, _, err = cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedToken, ID: cred.Claims.ID})
	ok(err)
	testkit.Eventually(t, "the resource manager refuses the token", func() bool {
		address, err := os.ReadFile(in("address"))
		if err != nil {
			return false
		}
		conn, err := control.Dial(strings.TrimSpace(string(address)), control.DialConfig{TokenFile: in("token")})
		ok(err)
		defer conn.Close()
		_, err = control.NewManagerClient(conn).List(t.Context(), &control.ListRequest{})
		return err != nil && strings.Contains(err.Error(), "revoked")
	})
}
