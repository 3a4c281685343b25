package hostile

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

const byClient = "client"

// dial opens a control connection for an attack.
func (c *cluster) dial(addr string, cfg control.DialConfig) *grpc.ClientConn {
	c.Helper()
	conn, err := control.Dial(addr, cfg)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { conn.Close() })
	return conn
}

// tenant is a connection to the executor as the client of a tenant's token.
func (c *cluster) tenant(name string) control.ExecutorClient {
	c.Helper()
	return control.NewExecutorClient(c.dial(c.executor.address, control.DialConfig{TokenFile: c.token(name)}))
}

func (c *cluster) tenantAtManager(name string) control.ManagerClient {
	c.Helper()
	return control.NewManagerClient(c.dial(c.manager.address, control.DialConfig{TokenFile: c.token(name)}))
}

// node is a connection to the manager with a node's certificate.
func (c *cluster) node(dir string) control.ManagerClient {
	c.Helper()
	return control.NewManagerClient(c.dial(c.manager.far(), control.DialConfig{Node: c.identity(dir)}))
}

// identity is the one in a directory of the cluster.
func (c *cluster) identity(dir string) *identity.Node {
	c.Helper()
	node, err := identity.OpenNode(c.in(dir), nil, nil, time.Now())
	if err != nil {
		c.Fatal(err)
	}
	return node
}

// refusal returns "" if a call failed with one of the wanted codes, else a description of what it got.
func refusal(what string, err error, want ...codes.Code) string {
	got := status.Code(err)
	for _, w := range want {
		if got == w {
			return ""
		}
	}
	if err == nil {
		return what + ": accepted; "
	}
	return fmt.Sprintf("%s: %v; ", what, err)
}

// bill returns the largest count of the bill lines that item selects, in the smallest unit of each.
func (c *cluster) bill(tenant string, item func(name string) bool) (sum uint64) {
	c.Helper()
	r, err := c.tenantAtManager(tenant).Bill(c.within(patience), &control.BillRequest{})
	if err != nil {
		c.Fatal(err)
	}
	for _, b := range r.GetBills() {
		for _, l := range b.GetLines() {
			if !item(l.GetItem()) {
				continue
			}
			n, err := strconv.ParseUint(l.GetUnits(), 10, 64)
			if err != nil {
				c.Fatal(err)
			}
			sum = max(sum, n)
		}
	}
	return sum
}

// billed returns the execution time that a tenant is billed for, in microseconds.
func (c *cluster) billed(tenant string) uint64 {
	c.Helper()
	return c.bill(tenant, func(item string) bool {
		return strings.HasSuffix(item, "-hour") && item != "core-hour" && item != "gib-hour"
	})
}

func clientAttacks() []attack {
	return []attack{
		{byClient, "release another tenant's lease", "as if it did not exist", onVictim(func(ctx context.Context, e control.ExecutorClient, id uint64) error {
			_, err := e.Release(ctx, &control.ReleaseRequest{LeaseId: id})
			return err
		})},
		{byClient, "revoke another tenant's lease", "as if it did not exist", onVictim(func(ctx context.Context, e control.ExecutorClient, id uint64) error {
			_, err := e.Revoke(ctx, &control.RevokeRequest{LeaseId: id})
			return err
		})},
		{byClient, "renew another tenant's lease", "as if it did not exist", onVictim(func(ctx context.Context, e control.ExecutorClient, id uint64) error {
			_, err := e.Renew(ctx, &control.RenewRequest{LeaseId: id, DurationMs: proto.Uint64(1)})
			return err
		})},
		{byClient, "follow another tenant's events", "as if it did not exist", onVictim(func(ctx context.Context, e control.ExecutorClient, id uint64) error {
			s, err := e.Events(ctx, &control.EventsRequest{LeaseId: id})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		})},
		{byClient, "inspect another tenant's worker", "as if it did not exist", onVictim(func(ctx context.Context, e control.ExecutorClient, id uint64) error {
			_, err := e.Inspect(ctx, &control.InspectRequest{LeaseId: id})
			return err
		})},
		{byClient, "replace another tenant's worker", "as if it did not exist", func(c *cluster) string {
			blob := c.blackHole().channel(c, nil)
			return onVictim(func(ctx context.Context, e control.ExecutorClient, id uint64) error {
				_, err := e.Replace(ctx, &control.ReplaceRequest{LeaseId: id, ClientBlob: blob})
				return err
			})(c)
		}},
		{byClient, "list another tenant's leases", "only its own", listsOthers},
		{byClient, "go on with another tenant's workers", "not kept, or refused", reusesOthers},
		{byClient, "run another tenant's library by its hash", "unknown code", runsOthersCode},
		{byClient, "lease at another tenant's expense", "PermissionDenied", func(c *cluster) string {
			r, err := c.tenant("eve").Lease(c.within(patience), c.request(func(r *control.LeaseRequest) { r.Tenant = "ann" }))
			c.release("eve", r)
			return refusal("lease", err, codes.PermissionDenied, codes.InvalidArgument)
		}},
		{byClient, "see another tenant's bill, or all", "PermissionDenied", seesBills},
		{byClient, "forged channel blobs", "InvalidArgument", forgesBlobs},
		{byClient, "absurd sizes", "InvalidArgument or busy", asksAbsurdly},
		{byClient, "renew its own lease for ever", "refused, or no longer than lease-max", renewsForEver},
		{byClient, "lease with an endpoint that never answers", "ended, its core is free again", leasesBlackHole},
		{byClient, "fifty thousand leases at once", "refused by a rate", leasesAlways},
		{byClient, "two thousand streams on one connection", "streams bounded", opensStreams},
		{byClient, "a hundred messages that never end, with a token", "memory bounded", func(c *cluster) string {
			d := c.newExecutor()
			credential := hpack.HeaderField{Name: credentialHeader, Value: c.proof(c.credentials(c.token("flood")), d)}
			return floodsMessages(c, d, credential)
		}},
		{byClient, "attach two thousand times to a black hole", "threads of the manager bounded", attachesAlways},
		{byClient, "upload more than was declared", "refused", uploadsMore},
		{byClient, "declare an upload above code-limit", "refused", declaresHuge},
		{byClient, "uploads that never end", "memory of the executor bounded", uploadsForEver},
		{byClient, "a library under another one's hash", "refused", uploadsForged},
		{byClient, "operator methods of the executor", "PermissionDenied", operates},
		{byClient, "node methods of the manager", "PermissionDenied", actsAsNode},
		{byClient, "two thousand refused calls", "log lines bounded", floodsLog},
		{byClient, "leases and bills with a node's certificate", "PermissionDenied", nodeLeases},
		{byClient, "node B registers node A's address", "PermissionDenied", registersOther},
		{byClient, "node B reports for node A's executor", "refused", reportsOther},
		{byClient, "node B attaches as node A's executor", "refused", attachesOther},
		{byClient, "node B deregisters node A's executor", "refused", deregistersOther},
		{byClient, "node B charges a tenant under A's incarnation", "nothing is billed", chargesOther},
		{byClient, "node B reserves under A's incarnation", "refused", reservesOther},
	}
}

// onVictim returns an attack: eve makes a call on ann's lease. It must fail with the code of a lease that does not exist.
func onVictim(call func(ctx context.Context, e control.ExecutorClient, id uint64) error) func(*cluster) string {
	return func(c *cluster) string {
		e := c.tenant("eve")
		got := call(c.within(patience), e, c.victim.ID())
		if got == nil {
			return "accepted"
		}
		none := call(c.within(patience), e, 1<<62+c.victim.ID())
		if status.Code(got) != status.Code(none) {
			return fmt.Sprintf("it can be told from one that does not exist: %v and %v", got, none)
		}
		return ""
	}
}

// release releases a lease that should not have been granted.
func (c *cluster) release(tenant string, r *control.LeaseReply) {
	if r.GetLeaseId() != 0 {
		c.tenant(tenant).Release(c.within(patience), &control.ReleaseRequest{LeaseId: r.GetLeaseId()})
	}
}

func listsOthers(c *cluster) string {
	own := c.lease(client.LeaseOptions{})
	r, err := c.tenant("eve").Leases(c.within(patience), &control.LeasesRequest{})
	if err != nil {
		return err.Error()
	}
	seen := false
	for _, l := range r.GetLeases() {
		seen = seen || l.GetLeaseId() == own.ID()
		if l.GetTenant() != "eve" {
			return "a lease of " + l.GetTenant()
		}
	}
	if !seen {
		c.Errorf("its own lease is not listed: the attack shows nothing")
	}
	return ""
}

func reusesOthers(c *cluster) string {
	c.lease(client.LeaseOptions{}).Release(c.within(patience)) // makes the executor know the code as eve's
	r, err := c.tenant("eve").Lease(c.within(patience), c.request(func(r *control.LeaseRequest) {
		r.Tenant, r.Reuse, r.ClientId = "eve", c.victim.ID(), bytes.Repeat([]byte{7}, 16)
	}))
	defer c.release("eve", r)
	if err == nil && !r.GetNotCached() {
		return "granted"
	}
	return ""
}

func runsOthersCode(c *cluster) string {
	r, err := c.tenant("mallory").Lease(c.within(patience), c.request(func(r *control.LeaseRequest) { r.Tenant = "mallory" }))
	defer c.release("mallory", r)
	if err != nil || !r.GetCodeUnknown() {
		return fmt.Sprintf("the code is known: lease %d, %v", r.GetLeaseId(), err)
	}
	return ""
}

func seesBills(c *cluster) string {
	m := c.tenantAtManager("eve")
	_, err := m.Bill(c.within(patience), &control.BillRequest{Tenant: "ann"})
	got := refusal("ann's bill", err, codes.PermissionDenied)
	all, err := m.Bill(c.within(patience), &control.BillRequest{})
	if err != nil {
		return got + err.Error()
	}
	for _, b := range all.GetBills() {
		if b.GetTenant() != "eve" {
			got += "the bill of " + b.GetTenant()
		}
	}
	return got
}

func forgesBlobs(c *cluster) string {
	c.lease(client.LeaseOptions{}).Release(c.within(patience)) // makes the executor know the code as eve's
	e, le, hole := c.tenant("eve"), binary.LittleEndian, endpoint{1}
	random := make([]byte, 136)
	rand.Read(random)
	blobs := map[string][]byte{
		"no bytes": {}, "random": random, "long": make([]byte, 4096),
		"depth":        hole.channel(c, func(b []byte) { le.PutUint16(b[12:], 0xffff) }),
		"eager":        hole.channel(c, func(b []byte) { le.PutUint32(b[16:], 1<<31) }),
		"bulk":         hole.channel(c, func(b []byte) { le.PutUint64(b[32:], 1<<63) }),
		"wrapping":     hole.channel(c, func(b []byte) { le.PutUint64(b[24:], ^uint64(63)) }),
		"role":         hole.channel(c, func(b []byte) { b[6] = 2 }),
		"generation 0": hole.channel(c, func(b []byte) { le.PutUint32(b[8:], 0) }),
		"length":       hole.channel(c, func(b []byte) { le.PutUint16(b[14:], 128) }),
		"inner magic":  hole.channel(c, func(b []byte) { b[56] ^= 1 }),
		"name space":   hole.channel(c, func(b []byte) { b[56+8] ^= 0xff }),
	}
	sum := hole.channel(c, nil)
	sum[55] ^= 1
	blobs["checksum"] = sum
	got := ""
	for name, blob := range blobs {
		r, err := e.Lease(c.within(patience), c.request(func(r *control.LeaseRequest) { r.Tenant, r.ClientBlobs = "eve", [][]byte{blob} }))
		c.release("eve", r)
		if err == nil {
			got += name + ": accepted; "
		}
	}
	return got
}

func asksAbsurdly(c *cluster) string {
	e, got := c.tenant("eve"), ""
	blob := endpoint{1}.channel(c, nil)
	for name, change := range map[string]func(*control.LeaseRequest){
		"workers":         func(r *control.LeaseRequest) { r.Workers = 1 << 31 },
		"no workers":      func(r *control.LeaseRequest) { r.Workers = 0 },
		"cores":           func(r *control.LeaseRequest) { r.CoresPerWorker = 1 << 31 },
		"wrapping cores":  func(r *control.LeaseRequest) { r.Workers, r.CoresPerWorker = 1<<16, 1<<16 },
		"memory":          func(r *control.LeaseRequest) { r.MemoryPerWorker = 1 << 63 },
		"duration":        func(r *control.LeaseRequest) { r.DurationMs = proto.Uint64(1 << 63) },
		"call limit":      func(r *control.LeaseRequest) { r.CallLimitMs = 1 << 63 },
		"tenant":          func(r *control.LeaseRequest) { r.Tenant = strings.Repeat("x", 1<<20) },
		"request id":      func(r *control.LeaseRequest) { r.RequestId = make([]byte, 1<<20) },
		"hash":            func(r *control.LeaseRequest) { r.CodeSha256 = nil },
		"provider":        func(r *control.LeaseRequest) { r.Provider = strings.Repeat("/", 1<<16) },
		"wait mode":       func(r *control.LeaseRequest) { r.WaitMode = -1 },
		"ten thousand":    func(r *control.LeaseRequest) { r.Workers, r.ClientBlobs = 10000, repeated(blob, 10000) },
		"version":         func(r *control.LeaseRequest) { r.ProtocolVersion = 1 << 31 },
		"client id":       func(r *control.LeaseRequest) { r.ClientId = make([]byte, 1<<16) },
		"blobs of nobody": func(r *control.LeaseRequest) { r.ClientBlobs = nil },
	} {
		r, err := e.Lease(c.within(patience), c.request(func(r *control.LeaseRequest) { r.Tenant = "eve"; change(r) }))
		c.release("eve", r)
		if err == nil {
			got += name + ": accepted; "
		}
	}
	return got
}

func renewsForEver(c *cluster) string {
	const most = 24 * time.Hour // lease-max
	l, got := c.lease(client.LeaseOptions{}), ""
	for _, ms := range []uint64{1 << 63, 1 << 62, 1<<63 - 1, uint64(most/time.Millisecond) + 1} {
		r, err := c.tenant("eve").Renew(c.within(patience), &control.RenewRequest{LeaseId: l.ID(), DurationMs: &ms})
		if err == nil && r.GetDurationMs() > uint64(most/time.Millisecond) {
			got += fmt.Sprintf("%d ms; ", r.GetDurationMs())
		}
	}
	return got
}

func repeated(b []byte, n int) [][]byte {
	list := make([][]byte, n)
	for i := range list {
		list[i] = b
	}
	return list
}

func leasesBlackHole(c *cluster) string {
	c.lease(client.LeaseOptions{}).Release(c.within(patience)) // makes the executor know the code as eve's
	free, blob := c.freeCores(), c.blackHole().channel(c, nil)
	ctx := c.within(patience)
	r, err := c.tenant("eve").Lease(ctx, c.request(func(r *control.LeaseRequest) { r.Tenant, r.ClientBlobs = "eve", [][]byte{blob} }))
	defer c.release("eve", r)
	switch {
	case ctx.Err() != nil:
		return "the request does not end"
	case err == nil:
		return "granted to a client that never connects"
	case !until(func() bool { return c.freeCores() >= free }):
		return fmt.Sprintf("its core stays taken: %v", err)
	}
	return ""
}

func operates(c *cluster) string {
	e, ctx := c.tenant("eve"), c.within(patience)
	_, drain := e.Drain(ctx, &control.DrainRequest{GraceMs: 1})
	_, until := e.Until(ctx, &control.UntilRequest{Until: 1})
	return refusal("drain", drain, codes.PermissionDenied) + refusal("until", until, codes.PermissionDenied)
}

func actsAsNode(c *cluster) string {
	m, ctx, got := c.tenantAtManager("eve"), c.within(patience), ""
	id, in := c.listed()
	for name, call := range map[string]func() error{
		"register": func() error { _, err := m.Register(ctx, registration("127.0.0.9:1")); return err },
		"report": func() error {
			_, err := m.Heartbeat(ctx, &control.HeartbeatRequest{ExecutorId: id, Info: in})
			return err
		},
		"deregister": func() error { _, err := m.Deregister(ctx, &control.DeregisterRequest{ExecutorId: id}); return err },
		"attach": func() error {
			_, err := m.AttachExecutor(ctx, &control.AttachExecutorRequest{ExecutorId: id, Incarnation: in.GetIncarnation()})
			return err
		},
		"settle": func() error { _, err := m.Settle(ctx, charge(in.GetIncarnation(), "ann")); return err },
		"limit":  func() error { _, err := m.Limit(ctx, &control.LimitRequest{Tenant: "ann"}); return err },
		"reserve": func() error {
			_, err := m.Reserve(ctx, &control.ReserveRequest{Incarnation: in.GetIncarnation(), Tenant: "ann", Cores: 1})
			return err
		},
	} {
		got += refusal(name, call(), codes.PermissionDenied)
	}
	return got
}
