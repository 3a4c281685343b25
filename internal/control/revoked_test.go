package control

import (
	"bytes"
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// A revoked or expired node certificate is refused on open connections. So are all credentials while the revocation
// list is invalid.
func TestNodesOnLiveConnections(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	if err := r.cluster.IssueNode(r.in("other"), []string{"other"}, 30*time.Minute, time.Now()); err != nil {
		t.Fatal(err)
	}
	other := r.node("other")
	node, token := r.caller(DialConfig{Node: other}), r.caller(DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, time.Hour)})
	good := func(when string, call func() error) {
		t.Helper()
		if err := call(); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	refused := func(when string, call func() error, reason identity.Reason, text string) {
		t.Helper()
		before := r.port.Gate.RefusedFor(reason)
		if err := call(); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), text) || r.port.Gate.RefusedFor(reason) != before+1 {
			t.Errorf("%s: %v, %d refused as %s", when, err, r.port.Gate.RefusedFor(reason)-before, reason)
		}
	}
	good("node", node)
	good("token", token)
	list, err := os.ReadFile(r.in("node/revoked"))
	if err != nil {
		t.Fatal(err)
	}
	revoked := r.in("node/revoked")
	replace := func(b []byte) {
		t.Helper()
		if err := identity.WriteFile(revoked, b, 0o644, false); err != nil {
			t.Fatal(err)
		}
		r.later(2 * time.Second)
	}
	foreign := newRealm(t, "127.0.0.1:0", false)
	foreignList, err := os.ReadFile(foreign.in("node/revoked"))
	if err != nil {
		t.Fatal(err)
	}
	for when, b := range map[string][]byte{
		"empty":                nil,
		"cut off":              list[:len(list)-10],
		"as it was before":     []byte("# ids of revoked tokens, one on a line\n"),
		"changed":              bytes.Replace(list, []byte("serial 1"), []byte("serial 9"), 1),
		"more behind it":       append(bytes.Clone(list), '\n'),
		"of another cluster's": foreignList,
	} {
		replace(b)
		refused("node, list "+when, node, identity.Revoked, "cannot check whether it is revoked")
		refused("token, list "+when, token, identity.Revoked, "cannot check whether it is revoked")
	}
	if err := os.Remove(revoked); err != nil {
		t.Fatal(err)
	}
	r.later(2 * time.Second)
	refused("node, no list", node, identity.Revoked, "rfaas cluster revoked --new")
	refused("token, no list", token, identity.Revoked, "rfaas cluster revoked --new")
	replace(list)
	good("node, list again", node)
	good("token, list again", token)

	serial := identity.NodeSerial(other.Files(time.Now()).Certificate.Leaf)
	r.revoke(identity.Revocation{Kind: identity.RevokedNode, ID: serial, Note: "stolen"})
	refused("node, revoked", node, identity.Revoked, "revoked")
	good("token, while a node is revoked", token)
	if n := r.port.Node.Revoked.Serial(r.port.Gate.now()); n != 2 {
		t.Errorf("serial %d, want 2", n)
	}
	replace(list) // of before
	refused("node, the list goes back", node, identity.Revoked, "revoked")
	good("token, the list goes back", token)
	if n := r.port.Node.Revoked.Serial(r.port.Gate.now()); n != 2 {
		t.Errorf("serial %d after the list went back, want 2", n)
	}
	r.later(31 * time.Minute)
	refused("node, expired", node, identity.Expired, "expired")
}

// A daemon whose directory has an invalid list does not start.
func TestPortNeedsItsList(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	open := func() error {
		p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: r.in("secret"), IdentityDir: r.in("node")})
		if err == nil {
			p.Close(t.Context())
		}
		return err
	}
	if err := os.WriteFile(r.in("node/revoked"), []byte("# none\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := open(); err == nil || !strings.Contains(err.Error(), "rfaas cluster revoked --new") {
		t.Errorf("a list that is not signed: %v", err)
	}
	if err := os.Remove(r.in("node/revoked")); err != nil {
		t.Fatal(err)
	}
	if err := open(); err == nil || !strings.Contains(err.Error(), "rfaas cluster revoked --new") {
		t.Errorf("no list: %v", err)
	}
}

// A daemon uses a new certificate as soon as its files are there, without a restart. A node's connections are made
// again with its new certificate.
func TestCertificatesAreReloaded(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	if err := r.cluster.IssueNode(r.in("other"), []string{"other"}, 20*time.Minute, time.Now()); err != nil {
		t.Fatal(err)
	}
	other := r.node("other")
	call := r.caller(DialConfig{Node: other})
	if err := call(); err != nil {
		t.Fatal(err)
	}
	first := r.whoami.last.Expires
	shown := func() string {
		t.Helper()
		c, err := tls.Dial("tcp", r.port.Address, &tls.Config{RootCAs: other.Files(time.Now()).CA, ServerName: "localhost", NextProtos: []string{"h2"}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return identity.NodeSerial(c.ConnectionState().PeerCertificates[0])
	}
	before := shown()
	for name, host := range map[string]string{"node": "localhost", "other": "other"} {
		if err := r.cluster.IssueNode(r.in(name), []string{host}, 40*time.Minute, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	eventually := func(what string, done func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !done(); <-tick.C {
			if time.Now().After(end) {
				t.Fatalf("not within 20 s: %s", what)
			}
		}
	}
	eventually("the daemon shows its new certificate", func() bool { return shown() != before })
	eventually("the node shows its new certificate", func() bool {
		other.Watch(time.Now())
		return call() == nil && !r.whoami.last.Expires.Equal(first)
	})
	// With only one file of a pair, the old pair stays in use.
	before = shown()
	if err := os.WriteFile(r.in("node/node.key"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.port.Node.Files(time.Now().Add(2 * time.Second))
	if shown() != before {
		t.Error("another certificate")
	}
	// With another CA, connections of nodes of the old one are refused.
	foreign := newRealm(t, "127.0.0.1:0", false)
	for _, name := range []string{"ca.crt", "node.crt", "node.key", "token.pub", "revoked"} {
		b, err := os.ReadFile(foreign.in(filepath.Join("node", name)))
		if err == nil {
			err = identity.WriteFile(r.in(filepath.Join("node", name)), b, 0o600, false)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.later(2 * time.Second)
	eventually("the other cluster's CA counts", func() bool { return status.Code(call()) == codes.Unauthenticated })
}
