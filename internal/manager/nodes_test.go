package manager

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// newCluster makes a cluster in dir/cluster, and for each node a directory in dir with a certificate for the node's hosts.
func newCluster(t *testing.T, dir string, nodes map[string][]string) *identity.Cluster {
	t.Helper()
	path := filepath.Join(dir, "cluster")
	if err := identity.InitCluster(path, "test", time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	cluster, err := identity.OpenCluster(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, hosts := range nodes {
		if err := cluster.IssueNode(filepath.Join(dir, name), hosts, time.Hour, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	return cluster
}

// The whole path over TLS, from the certificate to the audit log: a node registers what its certificate is for, another
// node cannot change that, and a renewed certificate of the same node is the same owner. The registrations of a revoked
// certificate are dropped.
func TestNodesOverTLS(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	cluster := newCluster(t, dir, map[string][]string{"localhost": {"localhost"}, "a": {"a"}, "b": {"b"}})
	s, err := config.LoadManager([]string{"--listen", "127.0.0.1:0", "--secret-file", in("secret"), "--identity-dir", in("localhost"), "--providers", "shm",
		"--audit-file", in("audit"), "--address-file", in("address"), "--state-dir", in("state"), "--heartbeat", "50ms"}, nil, io.Discard, "test")
	ok(err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, s, slog.New(slog.DiscardHandler)) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	var address []byte
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); len(address) == 0; <-tick.C {
		if address, err = os.ReadFile(in("address")); time.Now().After(end) {
			t.Fatal(err)
		}
	}
	_, port, err := net.SplitHostPort(strings.TrimSpace(string(address)))
	ok(err)
	as := func(name string) control.ManagerClient {
		t.Helper()
		node, err := identity.OpenNode(in(name), nil, nil, time.Now())
		ok(err)
		conn, err := control.Dial("LOCALHOST:"+port, control.DialConfig{Node: node}) // as if it were another node's name
		ok(err)
		t.Cleanup(func() { conn.Close() })
		return control.NewManagerClient(conn)
	}
	a, b := as("a"), as("b")
	register := func(m control.ManagerClient, address string, n byte) (uint64, error) {
		r, err := m.Register(t.Context(), &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: address, Info: info(n, 4)})
		return r.GetExecutorId(), err
	}
	id, err := register(a, "a:7465", 1)
	ok(err)
	forbidden := func(what string, err error) {
		t.Helper()
		if status.Code(err) != codes.PermissionDenied || control.ClassOf(err) != control.ClassInvalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = register(b, "a:7465", 2)
	forbidden("register another's address", err)
	_, err = b.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: id})
	forbidden("deregister another's executor", err)
	_, err = b.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{entryOf(info(1, 4).Incarnation, "ann", 1)}})
	forbidden("charge under another's incarnation", err)
	ok(cluster.IssueNode(in("a"), []string{"a", "192.0.2.1"}, time.Hour, time.Now()))
	if r, err := as("a").Heartbeat(t.Context(), &control.HeartbeatRequest{ExecutorId: id, Info: info(1, 3)}); err != nil || r.GetUnknown() {
		t.Errorf("with another certificate of the same node: %v, %v", r, err)
	}
	_, err = register(b, "b:7465", 2)
	ok(err)
	certificate, err := identity.ReadCertificate(in("a"))
	ok(err)
	_, path, err := cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedNode, ID: identity.NodeSerial(certificate)})
	ok(err)
	text, err := os.ReadFile(path)
	ok(err)
	ok(identity.WriteFile(in("localhost/revoked"), text, 0o644, false))
	for end := time.Now().Add(20 * time.Second); ; <-tick.C { // nobody calls with it, as with executors that report by memory
		l, err := b.List(t.Context(), &control.ListRequest{})
		ok(err)
		if n := len(l.GetExecutors()); n == 1 && l.GetExecutors()[0].GetAddress() == "b:7465" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("after node a was revoked: %v", l)
		}
	}
	audit, err := os.ReadFile(in("audit"))
	ok(err)
	if n := strings.Count(string(audit), `"reason":"forbidden"`); n != 3 || !strings.Contains(string(audit), `"who":"node b"`) {
		t.Errorf("%d refusals in the audit log:\n%s", n, audit)
	}
}
