package manager

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// asNode returns a context for calls with the certificate of a node with these names and addresses.
func asNode(t *testing.T, hosts ...string) context.Context {
	return control.WithCaller(t.Context(), &identity.Identity{By: "node", Name: "node " + hosts[0], Role: identity.RoleNode, Hosts: hosts})
}

func asOperator(t *testing.T) context.Context {
	return control.WithCaller(t.Context(), &identity.Identity{By: "secret", Name: "operator by secret", Role: identity.RoleOperator})
}

// two is a manager with node a, whose executor is registered, and node b, which is hostile.
type two struct {
	*Manager
	t    *testing.T
	a, b context.Context
	info *control.InfoReply // of a's executor
	id   uint64
}

func newTwo(t *testing.T) *two {
	m, _ := newManager(t)
	w := &two{Manager: m, t: t, a: asNode(t, "a", "192.0.2.1"), b: asNode(t, "b", "192.0.2.2"), info: info(1, 4)}
	w.id = w.register(w.a, "192.0.2.1:7465", w.info)
	return w
}

func (w *two) register(ctx context.Context, address string, info *control.InfoReply) uint64 {
	w.t.Helper()
	r, err := w.Register(ctx, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: address, Info: info})
	if err != nil {
		w.t.Fatal(err)
	}
	return r.GetExecutorId()
}

func (w *two) refused(what string, err error) {
	w.t.Helper()
	if err == nil {
		w.t.Errorf("%s: it is done", what)
	} else if control.ClassOf(err) != control.ClassInvalid {
		w.t.Errorf("%s: %v", what, err)
	}
}

// Another node cannot drain, replace, deregister or attach to an executor, or reserve cores for it.
func TestNodesAreApart(t *testing.T) {
	w := newTwo(t)
	draining := info(1, 4)
	draining.Draining = true
	_, err := w.Heartbeat(w.b, &control.HeartbeatRequest{ExecutorId: w.id, Info: draining})
	w.refused("drain by a heartbeat", err)
	_, err = w.Deregister(w.b, &control.DeregisterRequest{ExecutorId: w.id})
	w.refused("deregister", err)
	_, err = w.AttachExecutor(w.b, &control.AttachExecutorRequest{ExecutorId: w.id, Incarnation: w.info.Incarnation, Provider: "shm", Blob: make([]byte, 80)})
	if err == nil || !strings.Contains(err.Error(), "another owner") {
		t.Errorf("attach: %v", err)
	}
	_, err = w.Reserve(w.b, &control.ReserveRequest{Incarnation: w.info.Incarnation, Tenant: "ann", Cores: 4})
	w.refused("reserve", err)
	for _, address := range []string{"192.0.2.1:7465", "192.0.2.1:7466", "a:7465", "127.0.0.1:7465", "localhost:1", "unix:/tmp/x", "[::ffff:192.0.2.1]:7465", "b.c:1"} {
		_, err = w.Register(w.b, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: address, Info: info(2, 4)})
		w.refused("register "+address, err)
	}
	for _, i := range []*control.InfoReply{info(1, 4), w.info} {
		_, err = w.Register(w.b, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "192.0.2.2:7465", Info: i})
		w.refused("register under another's incarnation", err)
	}
	l, err := w.List(t.Context(), &control.ListRequest{})
	if err != nil || len(l.GetExecutors()) != 1 || l.GetExecutors()[0].GetInfo().GetDraining() || l.GetExecutors()[0].GetExecutorId() != w.id {
		t.Errorf("listed: %v, %v", l, err)
	}
	// It may do so for its own executor, with any name of its certificate.
	for i, address := range []string{"192.0.2.2:7465", "B.:7465", "[::ffff:192.0.2.2]:7466"} {
		w.register(w.b, address, info(byte(10+i), 4))
	}
	if _, err := w.Reserve(w.b, &control.ReserveRequest{Incarnation: info(10, 4).Incarnation, Tenant: "ann", Cores: 4}); err != nil {
		t.Error(err)
	}
}

func entryOf(incarnation []byte, tenant string, n uint64) *control.AccountEntry {
	use := make([]uint64, accounting.NumCounters)
	use[accounting.CoreMicros] = n
	return &control.AccountEntry{Incarnation: incarnation, Lease: 7, Tenant: tenant, Node: "a", BeganNs: 1, AsOfNs: 2, Final: true, Use: use}
}

// Another node cannot charge under an executor's incarnation: not while it is registered, not after it has left, and
// not after the manager has restarted.
func TestChargesAreTheirNodes(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	a, b := asNode(t, "a"), asNode(t, "b")
	x := info(1, 4)
	settle := func(ctx context.Context, e *control.AccountEntry) error {
		_, err := w.Settle(ctx, &control.SettleRequest{Entries: []*control.AccountEntry{e}})
		return err
	}
	r, err := w.Register(a, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "a:1", Info: x})
	if err != nil {
		t.Fatal(err)
	}
	theft := entryOf(x.Incarnation, "ann", 1000*3600e6)
	attack := func(when string) {
		t.Helper()
		if err := settle(b, theft); status.Code(err) != codes.PermissionDenied && control.ClassOf(err) != control.ClassInvalid {
			t.Errorf("%s: %v", when, err)
		}
	}
	attack("while it is registered")
	w.harvest()
	if _, err := w.Deregister(a, &control.DeregisterRequest{ExecutorId: r.GetExecutorId()}); err != nil {
		t.Fatal(err)
	}
	attack("after it has left")
	w.stop()
	w.start(8)
	attack("after the manager was started anew")
	_, err = w.Register(b, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "b:1", Info: x})
	if err == nil {
		t.Error("the incarnation is registered by another node, after the manager was started anew")
	}
	if got := w.charged("ann"); got != "" {
		t.Errorf("ann is charged %q", got)
	}
	// Its own node can still settle its journal without a registration.
	if err := settle(a, entryOf(x.Incarnation, "ann", 5)); err != nil {
		t.Error(err)
	}
	// So can a node whose manager has lost its memory. From then on no other node can.
	lost := info(9, 4).Incarnation
	if err := errors.Join(settle(a, entryOf(lost, "ann", 6)), settle(a, entryOf(lost, "ann", 7))); err != nil {
		t.Error(err)
	}
	if err := settle(b, entryOf(lost, "ann", 8)); control.ClassOf(err) != control.ClassInvalid {
		t.Errorf("another's lost incarnation: %v", err)
	}
	if err := settle(asOperator(t), entryOf(lost, "ann", 9)); err != nil {
		t.Errorf("an operator: %v", err)
	}
}

// Cells with the incarnation of another node's executor are refused, and no others.
func TestCellsAreTheirNodes(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	var log bytes.Buffer
	w.accounts.log = slog.New(slog.NewTextHandler(&log, nil))
	victim := info(1, 4)
	if _, err := w.Register(asNode(t, "a"), &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "a:1", Info: victim}); err != nil {
		t.Fatal(err)
	}
	w.harvest()
	thief := w.executor(2)
	thief.charge(0, "bob", 10)
	head := accounting.CellHead{Key: accounting.Key{Incarnation: incarnationOf(victim), Lease: 5}, Tenant: "ann", Began: w.clock.now}
	if err := errors.Join(thief.WriteHead(1, head), thief.Charge(1, accounting.Use{}, accounting.Use{1000})); err != nil {
		t.Fatal(err)
	}
	w.harvest()
	if ann, bob := w.charged("ann"), w.charged("bob"); ann != "" || bob != "10" {
		t.Errorf("ann is charged %q, bob %q; the log:\n%s", ann, bob, log.String())
	}
	if !strings.Contains(log.String(), "refused some charges") {
		t.Errorf("the log: %s", log.String())
	}
}

// An operator may do what nodes may, for all executors. A node may not change what an operator has registered.
func TestOperatorsRegistrations(t *testing.T) {
	m, _ := newManager(t)
	w := &two{Manager: m, t: t, a: asOperator(t), b: asNode(t, "b")}
	id := w.register(w.a, "unix:/run/x", info(1, 4))
	_, err := w.Heartbeat(w.b, &control.HeartbeatRequest{ExecutorId: id, Info: info(1, 4)})
	w.refused("heartbeat", err)
	mine := w.register(w.b, "b:1", info(2, 4))
	if r, err := w.Heartbeat(w.a, &control.HeartbeatRequest{ExecutorId: mine, Info: info(2, 3)}); err != nil || r.GetUnknown() {
		t.Errorf("an operator: %v, %v", r, err)
	}
	if _, err := w.Deregister(w.a, &control.DeregisterRequest{ExecutorId: mine}); err != nil {
		t.Error(err)
	}
	want(t, m, "unix:/run/x 4 true")
}

// Two certificates may be for the same name. A node cannot take the address of a living executor that another owner has
// registered. It can once that executor has fallen silent.
func TestAddressOfAnotherOwner(t *testing.T) {
	m, clock := newManager(t)
	w := &two{Manager: m, t: t, a: asOperator(t), b: asNode(t, "b", "shared")}
	c := asNode(t, "c", "shared", "localhost")
	w.register(w.a, "b:1", info(1, 4))
	w.register(c, "shared:1", info(2, 4))
	w.register(c, "localhost:1", info(3, 4))
	for i, address := range []string{"b:1", "shared:1"} {
		_, err := w.Register(w.b, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: address, Info: info(byte(10+i), 4)})
		w.refused("register "+address, err)
	}
	want(t, m, "b:1 4 true, localhost:1 4 true, shared:1 4 true")
	// A restarted executor can take its own address again, and an operator can take any address.
	w.register(c, "shared:1", info(4, 4))
	w.register(w.a, "localhost:1", info(5, 4))
	clock.now = clock.now.Add(missed * time.Second)
	w.register(w.b, "b:1", info(10, 4))
	w.register(w.b, "shared:1", info(11, 4))
}
