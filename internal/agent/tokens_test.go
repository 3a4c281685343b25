package agent

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// realm is a cluster with an executor that accepts its tokens.
type realm struct {
	t       *testing.T
	w       *world
	dir     string
	cluster *identity.Cluster
	x       *daemon
	token   string // file of the user
}

func newRealm(t *testing.T, args ...string) *realm {
	t.Helper()
	r := &realm{t: t, w: newWorld(t, 0), dir: t.TempDir()}
	now := time.Now()
	if err := identity.InitCluster(r.in("cluster"), "test", time.Hour, now); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.cluster, err = identity.OpenCluster(r.in("cluster")); err != nil {
		t.Fatal(err)
	}
	if err := r.cluster.IssueNode(r.in("node"), []string{"localhost"}, time.Hour, now); err != nil {
		t.Fatal(err)
	}
	r.x = executor(t, r.w.secret, append([]string{"--identity-dir", r.in("node"), "--sandbox", "off"}, args...)...)
	r.token = r.in("token")
	return r
}

func (r *realm) in(name string) string { return filepath.Join(r.dir, name) }

// issue writes the user's token file and returns the token's id.
func (r *realm) issue(tenant string, life time.Duration) string {
	r.t.Helper()
	now := time.Now()
	cred, err := r.cluster.IssueToken(identity.Claims{Tenant: tenant, Role: "tenant", Begins: now.Add(-20 * life).Unix(), Ends: now.Add(life).Unix()}, nil, now)
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := cred.Encode()
	if err == nil {
		err = identity.WriteFile(r.token, b, 0o600, false)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return cred.Claims.ID
}

// revoke puts a token on the list of a node, by default the executor's.
func (r *realm) revoke(id string, node ...string) {
	r.t.Helper()
	node = append(node, "node")[:1]
	_, path, err := r.cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedToken, ID: id})
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err == nil {
		err = identity.WriteFile(r.in(node[0]+"/revoked"), b, 0o644, false)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// connect connects a process that uses the token.
func (r *realm) connect() *process {
	r.t.Helper()
	p := connect(r.t, r.w.socket, "RFAAS_TOKEN_FILE="+r.token, "RFAAS_EXECUTOR="+r.x.address, "USER=tester")
	if err := p.open(1, protocol.Session{}); err != nil {
		r.t.Fatal(err)
	}
	return p
}

// status returns the agent's status of its only token.
func (r *realm) status() (s TokenStatus) {
	r.t.Helper()
	all, err := Ask(r.t.Context(), r.w.socket)
	if err != nil {
		r.t.Fatal(err)
	}
	if len(all.Tokens) != 1 {
		r.t.Fatalf("the agent has %d tokens, want 1: %+v", len(all.Tokens), all.Tokens)
	}
	return all.Tokens[0]
}

// A lease whose token is no longer accepted goes on with the token that its user gets before the lease's end.
func TestTokenIsReplacedUnderALease(t *testing.T) {
	r := newRealm(t, "--lease-default", "8s")
	first := r.issue("ann", time.Hour)
	p := r.connect()
	l, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1)})
	if err != nil {
		t.Fatal(err)
	}
	if s := r.status(); s.Tenant != "ann" || s.ID != first || s.File != r.token || s.LeftMS < 3_500_000 || !strings.Contains(s.Warning, "expires in") {
		t.Errorf("with an hour of 21 left: %+v", s)
	}
	r.revoke(first)
	eventually(t, "a renewal is refused", func() bool { return strings.Contains(r.status().Warning, "revoked") })
	if _, err := p.acquire(protocol.Acquire{Key: 2, Spec: spec(1)}); !isStatus(err, dataplane.StatusCredential) {
		t.Errorf("a lease with a revoked token: %v", err)
	}
	r.issue("bob", time.Hour)
	eventually(t, "another tenant's token is seen", func() bool { return strings.Contains(r.status().Warning, `tenant "bob" now`) })
	second := r.issue("ann", time.Hour)
	eventually(t, "the lease is renewed", func() bool {
		s := r.status()
		return s.ID == second && !strings.Contains(s.Warning, "renewed:")
	})
	time.Sleep(time.Duration(l.UntilNs-dataplane.Now()) + 100*time.Millisecond) // until its first end
	if err := l.call(0); err != nil {
		t.Errorf("a call after the end that the lease had with the first token: %v", err)
	}
	l.release(false)
}

// A list that only the resource manager's node has revokes credentials on executors too, and still does so when an executor was restarted
// while the manager is away.
func TestRevokedByTheManagersList(t *testing.T) {
	r := newRealm(t)
	if err := r.cluster.IssueNode(r.in("service"), []string{"localhost"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	m := start(t, "bin/resource-manager", r.w.secret, "--identity-dir", r.in("service"), "--providers", "shm")
	begin := func() {
		r.x = executor(t, r.w.secret, "--identity-dir", r.in("node"), "--sandbox", "off", "--manager", m.address, "--state-dir", r.in("state"))
	}
	begin()
	id := r.issue("ann", time.Hour)
	ask := func() error {
		conn, err := control.Dial(r.x.address, control.DialConfig{TokenFile: r.token})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = control.NewExecutorClient(conn).Leases(t.Context(), &control.LeasesRequest{})
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	r.revoke(id, "service")
	eventually(t, "the executor refuses the token", func() bool { return control.ClassOf(ask()) == control.ClassCredential })
	for _, d := range []*daemon{r.x, m} {
		d.process.Signal(syscall.SIGTERM)
		<-d.done
	}
	begin()
	if err := ask(); control.ClassOf(err) != control.ClassCredential {
		t.Errorf("after a restart, a revoked token: %v", err)
	}
}

// The event of a lease that could not be renewed until its end says why.
func TestTokenThatIsNotReplaced(t *testing.T) {
	r := newRealm(t, "--lease-default", "4s")
	id := r.issue("ann", time.Hour)
	p := r.connect()
	if _, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1)}); err != nil {
		t.Fatal(err)
	}
	r.revoke(id)
	eventually(t, "a renewal is refused", func() bool { return strings.Contains(r.status().Warning, "revoked") })
	for {
		e := p.event()
		if e.Kind == api.EventExpiring {
			continue
		}
		if e.Kind != api.EventEnded || !strings.HasPrefix(e.Text, "expired") || !strings.Contains(e.Text, "could not be renewed") ||
			!strings.Contains(e.Text, "revoked") {
			t.Errorf("event %+v", e)
		}
		break
	}
}

// Each warning is logged once.
func TestTokenWarnings(t *testing.T) {
	r := newRealm(t)
	r.issue("ann", time.Hour)
	p := r.connect()
	l, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1)})
	if err != nil {
		t.Fatal(err)
	}
	lines := func() int { return strings.Count(r.w.log.String(), "msg=token ") }
	now, said := time.Now(), map[string]string{}
	for i, want := range []int{1, 1, 1, 2, 2} { // expires soon, three times; expired, twice
		said = r.w.agent.warn(said, now.Add(time.Duration(i)*25*time.Minute))
		if n := lines(); n != want {
			t.Errorf("%d warnings after the %d. look, want %d:\n%s", n, i+1, want, r.w.log)
		}
	}
	if !strings.Contains(r.w.log.String(), "rfaas token renew") {
		t.Errorf("no remedy in the log:\n%s", r.w.log)
	}
	l.release(false)
}
