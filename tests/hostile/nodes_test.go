package hostile

import (
	"crypto/rand"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
)

// listed waits until the manager lists node A's executor as available, and returns its id and its report.
func (c *cluster) listed() (id uint64, info *control.InfoReply) {
	c.Helper()
	m := c.tenantAtManager("ann")
	ok := until(func() bool {
		r, err := m.List(c.within(patience), &control.ListRequest{})
		for _, e := range r.GetExecutors() {
			if err == nil && e.GetAlive() && e.GetAddress() == c.executor.address && !e.GetInfo().GetDraining() && e.GetInfo().GetCores() == 2 {
				id, info = e.GetExecutorId(), e.GetInfo()
				return true
			}
		}
		return false
	})
	if !ok {
		c.Fatal("node A's executor is not listed")
	}
	return id, info
}

// registration returns the registration of an executor that does not exist.
func registration(address string) *control.RegisterRequest {
	in := make([]byte, 16)
	rand.Read(in)
	return &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: address,
		Info: &control.InfoReply{ProtocolVersion: control.ProtocolVersion, Node: "hostile", NodeId: "hostile/1", Incarnation: in, Cores: 64, FreeCores: 64,
			MemoryBytes: 1 << 40, FreeMemoryBytes: 1 << 40, Providers: []string{"shm"}}}
}

// hours is how many core-hours an attacker charges.
const hours = 1000

func charge(incarnation []byte, tenant string) *control.SettleRequest {
	now := time.Now()
	use := make([]uint64, 8)
	use[0] = hours * 3600 * 1e6
	return &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: incarnation, Lease: 1 << 40, Tenant: tenant, Node: "node-a",
		BeganNs: now.Add(-hours * time.Hour).UnixNano(), AsOfNs: now.UnixNano(), Final: true, Use: use}}}
}

func registersOther(c *cluster) string {
	id, _ := c.listed()
	b := c.node("node-b")
	got := ""
	if r, err := b.Register(c.within(patience), registration(c.executor.address)); err == nil {
		got = "registered; "
		b.Deregister(c.within(patience), &control.DeregisterRequest{ExecutorId: r.GetExecutorId()})
	}
	if now, _ := c.listed(); now != id {
		got += "node A's executor had to register again; "
	}
	return got
}

func reportsOther(c *cluster) string {
	id, info := c.listed()
	mine := proto.Clone(info).(*control.InfoReply)
	mine.Draining, mine.FreeCores = true, 0
	r, err := c.node("node-b").Heartbeat(c.within(patience), &control.HeartbeatRequest{ExecutorId: id, Info: mine})
	c.listed()
	if err == nil && !r.GetUnknown() {
		return "accepted: node A's executor was said to drain"
	}
	return ""
}

func attachesOther(c *cluster) string {
	id, info := c.listed()
	_, err := c.node("node-b").AttachExecutor(c.within(patience), &control.AttachExecutorRequest{ExecutorId: id, Incarnation: info.GetIncarnation(),
		Provider: "shm", Blob: endpoint{1}.queuePair(c)})
	switch status.Code(err) {
	case codes.PermissionDenied, codes.NotFound, codes.Unauthenticated:
		return ""
	}
	// Any other error comes from a manager that tried to connect.
	return fmt.Sprintf("the manager connects: %v", err)
}

func deregistersOther(c *cluster) string {
	id, _ := c.listed()
	c.node("node-b").Deregister(c.within(patience), &control.DeregisterRequest{ExecutorId: id})
	if now, _ := c.listed(); now != id {
		return "node A's executor had to register again"
	}
	r, err := c.tenantAtManager("ann").List(c.within(patience), &control.ListRequest{})
	for _, e := range r.GetExecutors() {
		if err == nil && e.GetExecutorId() == id {
			return ""
		}
	}
	return "node A's executor is gone from the list"
}

func chargesOther(c *cluster) string {
	_, info := c.listed()
	_, err := c.node("node-b").Settle(c.within(patience), charge(info.GetIncarnation(), "charged"))
	if billed := c.bill("charged", func(item string) bool { return item == "core-hour" }); billed > 0 {
		return fmt.Sprintf("%d core-hours are billed (%v)", billed/3600/1e6, err)
	}
	return ""
}

func reservesOther(c *cluster) string {
	_, info := c.listed()
	_, err := c.node("node-b").Reserve(c.within(patience), &control.ReserveRequest{Incarnation: info.GetIncarnation(), Tenant: "ann", Cores: 1 << 20, Force: true})
	if err == nil {
		return "accepted"
	}
	return ""
}

func nodeLeases(c *cluster) string {
	e := control.NewExecutorClient(c.dial(c.executor.far(), control.DialConfig{Node: c.identity("node-b")}))
	ctx := c.within(patience)
	_, lease := e.Lease(ctx, c.request(func(r *control.LeaseRequest) { r.Tenant = "ann" }))
	_, leases := e.Leases(ctx, &control.LeasesRequest{})
	_, drain := e.Drain(ctx, &control.DrainRequest{})
	_, bill := c.node("node-b").Bill(ctx, &control.BillRequest{})
	denied := codes.PermissionDenied
	return refusal("lease", lease, denied) + refusal("leases", leases, denied) + refusal("drain", drain, denied) + refusal("bill", bill, denied)
}
