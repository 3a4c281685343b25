package executor

import (
	"context"
	"crypto/sha256"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// tenants is a node that takes tokens, and clients of some tenants.
type tenants struct {
	*node
	cluster *identity.Cluster
	dir     string
}

func newTenants(t *testing.T, change ...func(*Config)) *tenants {
	t.Helper()
	n := &tenants{dir: t.TempDir()}
	if err := identity.InitCluster(n.in("cluster"), "test", time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	var err error
	if n.cluster, err = identity.OpenCluster(n.in("cluster")); err != nil {
		t.Fatal(err)
	}
	if err := n.cluster.IssueNode(n.in("node"), []string{"localhost"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	n.node = newNode(t, append(change, func(c *Config) { c.Settings.IdentityDir = n.in("node"); c.Settings.AuditFile = n.in("audit") })...)
	return n
}

func (n *tenants) in(name string) string { return filepath.Join(n.dir, name) }

// as is a client with a token.
func (n *tenants) as(tenant, role string, uid uint32) control.ExecutorClient {
	n.t.Helper()
	claims := identity.Claims{Tenant: tenant, Role: role}
	if uid != 0 {
		claims.UID = &uid
	}
	cred, err := n.cluster.IssueToken(claims, nil, time.Now())
	if err != nil {
		n.t.Fatal(err)
	}
	b, err := cred.Encode()
	if err == nil {
		err = os.WriteFile(n.in(tenant), b, 0o600)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	conn, err := control.Dial(n.port.Address, control.DialConfig{TokenFile: n.in(tenant)})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return control.NewExecutorClient(conn)
}

func (n *tenants) upload(c control.ExecutorClient, b []byte) (*control.UploadReply, error) {
	n.t.Helper()
	s, err := c.Upload(n.ctx())
	if err != nil {
		return nil, err
	}
	h := sha256.Sum256(n.lib)
	if err := s.Send(&control.UploadChunk{Sha256: h[:], Size: uint64(len(b)), Data: b}); err != nil {
		n.t.Fatal(err)
	}
	return s.CloseAndRecv()
}

func (n *tenants) leaseOf(c control.ExecutorClient, tenant string) *control.LeaseReply {
	n.t.Helper()
	req := n.request(1)
	req.Tenant = tenant
	l, err := c.Lease(n.ctx(), req)
	if err != nil || l.GetCodeUnknown() {
		n.t.Fatalf("%v, %v", l, err)
	}
	return l
}

// To a tenant, another's lease is not there: it is not seen, and cannot be used, renewed or released.
func TestTenantsAreApart(t *testing.T) {
	n := newTenants(t)
	ann, eve, op := n.as("ann", "tenant", 1001), n.as("eve", "tenant", 0), n.as("boss", "operator", 0)
	if _, err := n.upload(ann, n.lib); err != nil {
		t.Fatal(err)
	}
	l := n.leaseOf(ann, "")
	id := l.GetLeaseId()
	ctx := n.ctx()
	if got, err := n.e.table.Get(lease.ID(id)); err != nil || got.Terms.Tenant != "ann" || got.Terms.UID != 1001 || got.Terms.GID == 0 {
		t.Errorf("%+v, %v", got.Terms, err)
	}
	// The last digit differs; everything else of an error must not.
	_, none := eve.Renew(ctx, &control.RenewRequest{LeaseId: id ^ 1})
	for name, call := range map[string]func(c control.ExecutorClient) error{
		"renew": func(c control.ExecutorClient) error {
			_, err := c.Renew(ctx, &control.RenewRequest{LeaseId: id})
			return err
		},
		"inspect": func(c control.ExecutorClient) error {
			_, err := c.Inspect(ctx, &control.InspectRequest{LeaseId: id})
			return err
		},
		"replace": func(c control.ExecutorClient) error {
			_, err := c.Replace(ctx, &control.ReplaceRequest{LeaseId: id, ClientBlob: n.request(1).ClientBlobs[0]})
			return err
		},
		"events": func(c control.ExecutorClient) error {
			s, err := c.Events(ctx, &control.EventsRequest{LeaseId: id})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"release": func(c control.ExecutorClient) error {
			_, err := c.Release(ctx, &control.ReleaseRequest{LeaseId: id})
			return err
		},
		"revoke": func(c control.ExecutorClient) error {
			_, err := c.Revoke(ctx, &control.RevokeRequest{LeaseId: id})
			return err
		},
	} {
		before := n.port.Gate.RefusedFor(identity.Forbidden)
		err := call(eve)
		if status.Code(err) != status.Code(none) || control.ClassOf(err) != control.ClassLease ||
			len(status.Convert(err).Message()) > len(status.Convert(none).Message())+1 || strings.Contains(err.Error(), "ann") {
			t.Errorf("%s another's lease: %v, want as %v", name, err, none)
		}
		if n.port.Gate.RefusedFor(identity.Forbidden) != before+1 {
			t.Errorf("%s another's lease is not counted", name)
		}
	}
	for name, c := range map[string]struct {
		control.ExecutorClient
		sees int
	}{"ann": {ann, 1}, "eve": {eve, 0}, "boss": {op, 1}} {
		if r, err := c.Leases(ctx, &control.LeasesRequest{}); err != nil || len(r.GetLeases()) != c.sees {
			t.Errorf("%s sees %v, %v", name, r, err)
		}
	}
	for _, c := range []control.ExecutorClient{ann, eve} {
		if _, err := c.Drain(ctx, &control.DrainRequest{}); status.Code(err) != codes.PermissionDenied {
			t.Errorf("a tenant drains: %v", err)
		}
	}
	req := n.request(1)
	req.Tenant = "ann"
	if _, err := eve.Lease(ctx, req); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), `"ann"`) {
		t.Errorf("another tenant's account: %v", err)
	}
	n.e.gate.Audit().Flush()
	if b, err := os.ReadFile(n.in("audit")); err != nil || !strings.Contains(string(b), `"who":"eve by token`) {
		t.Errorf("audit log: %v\n%s", err, b)
	}
	if _, err := ann.Renew(ctx, &control.RenewRequest{LeaseId: id}); err != nil {
		t.Errorf("her own: %v", err)
	}
	if _, err := op.Revoke(ctx, &control.RevokeRequest{LeaseId: id}); err != nil {
		t.Errorf("an operator: %v", err)
	}
}

// Knowing the hash of a library is not having it, and a request id is its tenant's own.
func TestCodeIsItsTenants(t *testing.T) {
	n := newTenants(t)
	ann, eve := n.as("ann", "tenant", 0), n.as("eve", "tenant", 0)
	req := n.request(1)
	req.Tenant = ""
	try := func(c control.ExecutorClient) *control.LeaseReply {
		t.Helper()
		l, err := c.Lease(n.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if !try(ann).GetCodeUnknown() {
		t.Error("the library of an operator is everybody's")
	}
	if r, err := n.upload(ann, n.lib); err != nil || r.GetWasKnown() {
		t.Errorf("%v, %v", r, err)
	}
	if r, err := n.upload(ann, n.lib); err != nil || !r.GetWasKnown() {
		t.Errorf("again: %v, %v", r, err)
	}
	if try(ann).GetCodeUnknown() || !try(eve).GetCodeUnknown() {
		t.Error("a hash is enough")
	}
	forged := append([]byte(nil), n.lib...)
	forged[3] ^= 1
	for _, bad := range [][]byte{forged, n.lib[:5]} {
		if _, err := n.upload(eve, bad); control.ClassOf(err) != control.ClassInvalid {
			t.Errorf("other bytes: %v", err)
		}
	}
	if !try(eve).GetCodeUnknown() {
		t.Error("other bytes are enough")
	}
	if _, err := n.upload(eve, n.lib); err != nil {
		t.Fatal(err)
	}
	if a, e := try(ann), try(eve); a.GetLeaseId() == e.GetLeaseId() || e.GetLeaseId() == 0 {
		t.Errorf("one request id, leases %d and %d", a.GetLeaseId(), e.GetLeaseId())
	}
}

// An operator's request to end a lease also ends the cached workers of its tenant, and those of no other tenant.
func TestOperatorRevokesCachedWorkers(t *testing.T) {
	n := newTenants(t)
	ann, eve, op := n.as("ann", "tenant", 0), n.as("eve", "tenant", 0), n.as("boss", "operator", 0)
	lease := func(c control.ExecutorClient) uint64 {
		t.Helper()
		req := n.keepable(1)
		req.Tenant = ""
		l, err := c.Lease(n.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		return l.GetLeaseId()
	}
	for _, c := range []control.ExecutorClient{ann, eve} {
		if _, err := n.upload(c, n.lib); err != nil {
			t.Fatal(err)
		}
		if r, err := c.Release(n.ctx(), &control.ReleaseRequest{LeaseId: lease(c), Keep: true}); err != nil || !r.GetCached() {
			t.Fatalf("%v, %v", r, err)
		}
	}
	for _, c := range []struct {
		who string
		control.ExecutorClient
		cached int
	}{{"ann", ann, 2}, {"boss", op, 1}} {
		id := lease(ann)
		n.z.reap = func(*fakeWorker) {
			if cached := len(n.e.table.Cached()); cached != c.cached {
				t.Errorf("%d leases are cached when a worker is reaped for %s, want %d", cached, c.who, c.cached)
			}
		}
		if _, err := c.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: id}); err != nil {
			t.Fatal(err)
		}
		n.z.reap = nil
		if cached := len(n.e.table.Cached()); cached != c.cached {
			t.Errorf("%d leases are cached after %s has revoked one of ann's, want %d", cached, c.who, c.cached)
		}
	}
	// The same for a lease that is not granted yet.
	if r, err := ann.Release(n.ctx(), &control.ReleaseRequest{LeaseId: lease(ann), Keep: true}); err != nil || !r.GetCached() {
		t.Fatalf("%v, %v", r, err)
	}
	starting, ended := make(chan struct{}), make(chan error, 1)
	n.z.before = func(ctx context.Context, _ zygote.Spec) error {
		close(starting)
		<-ctx.Done()
		return ctx.Err()
	}
	go func() {
		req := n.keepable(1)
		req.Tenant = ""
		_, err := ann.Lease(n.ctx(), req)
		ended <- err
	}()
	<-starting
	id := n.e.table.List()[0].ID
	if _, err := op.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: uint64(id)}); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("a lease was granted that an operator has revoked")
	}
	if cached := len(n.e.table.Cached()); cached != 1 {
		t.Errorf("%d leases are cached after a starting lease was revoked, want 1", cached)
	}
}
