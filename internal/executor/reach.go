package executor

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/lease"
)

// reachWithin is how long a client may take to connect to its claim region.
const reachWithin = 5 * time.Second

// reachable holds the state that all connections to claim regions on a provider share.
type reachable struct {
	device *dataplane.Device
	server *dataplane.Server // executes the clients' operations, or sees that they ring
}

// reachable opens the device of a provider for its first connection. The caller holds mu.
func (c *claims) reachable(provider string) (*reachable, error) {
	if r := c.far[provider]; r != nil {
		return r, nil
	}
	dev, err := c.e.fetchDevice(provider)
	if err != nil {
		return nil, err
	}
	server, err := dev.NewServer()
	if err != nil {
		dev.Close()
		return nil, err
	}
	if c.far == nil {
		c.far = map[string]*reachable{}
	}
	c.far[provider] = &reachable{dev, server}
	return c.far[provider], nil
}

// close closes the device. All connections must be closed.
func (r *reachable) close() {
	r.server.Close()
	r.device.Close()
}

// reach is a connection for claims. On tcp it exposes the region of an agent, for atomics only, and on verbs the cell of one claimant. It is in a domain
// of its own, and exposes nothing else. On tcp it implements datalisten.Receiver.
type reach struct {
	to     *reachable
	of     *claim.Region // open until the reach is closed
	id     uint64        // of a client process as a claimant; 0: of the agent
	tenant string
	theirs []byte // blob of the client's queue pair
	timer  *time.Timer
	done   chan struct{} // closed when the client has connected, or is too late

	mu     sync.Mutex
	over   bool   // done is closed
	joins  uint64 // verbs: id of the claimant whose cell the region may know; 0: none
	domain *dataplane.Domain
	memory *dataplane.Memory
	conn   *dataplane.Conn // nil after close
}

// claimantsMost bounds the claimants of one tenant's client processes. Each has a queue pair. Further processes claim through their agent.
const claimantsMost = 128

// AttachClaims connects an agent to its claim region on provider tcp, or an agent or one of its client processes as a claimant on verbs.
func (e *Executor) AttachClaims(ctx context.Context, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	defer e.turns.enter()()
	p := req.GetProvider()
	if p != dataplane.Verbs && (p != dataplane.TCP || req.GetOwn()) {
		return nil, control.Errorf(control.ClassUnsupported, "claim region over provider %q, own %v: want tcp or verbs, and verbs with own", p, req.GetOwn())
	}
	if err := e.checkProvider(p); err != nil {
		return nil, err
	}
	if _, ok := dataplane.BlobToken(req.GetBlob()); !ok && p == dataplane.TCP {
		return nil, control.StatusError(statusBadBlob, "claim region: the blob is not of a queue pair of provider tcp")
	}
	return e.claims.attach(ctx, control.Connection(ctx), control.Caller(ctx).Tenant, req)
}

// DetachClaims ends the connection of a claimant.
func (e *Executor) DetachClaims(ctx context.Context, req *control.DetachClaimsRequest) (*control.DetachClaimsReply, error) {
	defer e.turns.enter()()
	e.claims.detach(control.Connection(ctx), req.GetClaimant())
	return &control.DetachClaimsReply{}, nil
}

// attach makes the connection that a request asks for. If the caller does not wait any more, nobody would end it, so attach does.
func (c *claims) attach(ctx, conn context.Context, tenant string, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	c.mu.Lock()
	_, err := c.roomIn(conn, tenant, req) // before the gate, because a refusal costs the tenant nothing
	c.mu.Unlock()
	if err == nil {
		err = c.e.gate.Take(ctx, quota.Leases, 1)
	}
	if err != nil {
		return nil, err
	}
	x := &reach{tenant: tenant, theirs: req.GetBlob(), done: make(chan struct{})}
	x.mu.Lock() // whoever finds x in a map waits until it is made
	if err = c.reserve(conn, x, req); err != nil {
		x.mu.Unlock()
		return nil, err
	}
	mine, err := x.expose(req.GetProvider(), c.e.cfg.Data) // without c.mu, because the kernel may take a second to resolve the client's address
	if err == nil {
		err = ctx.Err()
	}
	var reply *control.AttachClaimsReply
	if err == nil {
		at := x.memory.Ref()
		reply = &control.AttachClaimsReply{Blob: mine, Region: &control.MemoryRef{Addr: at.Addr, Key: at.Key, Size: at.Size}, Claimant: x.id}
	}
	x.mu.Unlock()
	if err != nil {
		c.forget(conn, x)
		return nil, err
	}
	return reply, nil
}

// forget takes a connection that could not be made out of its region.
func (c *claims) forget(conn context.Context, x *reach) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.regions[conn]; r != nil && (r.reach == x || r.claimants[x.id] == x) {
		c.part(r, x)
	}
}

// detach ends a claimant that is a client process of a connection's agent. When it returns, the claimant can claim nothing.
func (c *claims) detach(conn context.Context, id uint64) {
	c.mu.Lock()
	r := c.regions[conn]
	is := r != nil && r.claimants[id] != nil
	if is {
		c.part(r, r.claimants[id])
	}
	c.mu.Unlock()
	if is {
		r.Leave(id)
	}
}

// part ends a connection of a region in the background, because a driver may take long to destroy a queue pair. The connection has its place until then: a
// claimant counts, and the agent cannot attach again. Otherwise a tenant could have any number of them. The caller holds mu.
func (c *claims) part(r *region, x *reach) {
	if x.id != 0 {
		delete(r.claimants, x.id)
		r.parting++
	}
	r.using.Add(1)   // x rings the region's bell
	c.closing.Add(1) // and uses a device
	go func() {
		defer c.closing.Done()
		defer r.using.Done()
		x.close()
		c.mu.Lock()
		defer c.mu.Unlock()
		if x.id == 0 {
			r.reach = nil
			return
		}
		r.parting--
		if c.claimants[x.tenant]--; c.claimants[x.tenant] == 0 {
			delete(c.claimants, x.tenant)
		}
	}()
}

// partAll ends all connections of a region that was taken out of c.regions. The caller holds mu.
func (c *claims) partAll(r *region) {
	for _, x := range r.claimants {
		c.part(r, x)
	}
	if r.reach != nil {
		c.part(r, r.reach)
	}
}

// roomIn returns the region of a connection, or why it does not take the connection that a request asks for. The caller holds mu.
func (c *claims) roomIn(conn context.Context, tenant string, req *control.AttachClaimsRequest) (*region, error) {
	r := c.regions[conn]
	switch {
	case c.ended:
		return nil, grpcError(lease.ErrDraining)
	case r == nil && req.GetOwn():
		return nil, invalidf("this connection has no claim region yet")
	case r == nil || !req.GetOwn() && subtle.ConstantTimeCompare(req.GetToken(), r.token[:]) != 1:
		return nil, invalidf("the token names no claim region of this connection")
	case !req.GetOwn() && r.reach != nil:
		return nil, invalidf("this connection's claim region was attached before")
	}
	if all, here := c.claimants[tenant], len(r.claimants)+r.parting; req.GetOwn() && (all >= claimantsMost || here >= claim.Claimants-1) { // the agent is one, too
		return nil, control.Errorf(control.ClassBusy, "claim region: %d claimants of the tenant, %d of this connection; the most are %d and %d", all, here,
			claimantsMost, claim.Claimants-1)
	}
	return r, nil
}

// reserve gives a new connection its place in a region. A claimant needs no token: only the agent at the other end of the connection names it in its
// releases. The caller holds x.mu.
func (c *claims) reserve(conn context.Context, x *reach, req *control.AttachClaimsRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, err := c.roomIn(conn, x.tenant, req)
	if err != nil {
		return err
	}
	if x.to, err = c.reachable(req.GetProvider()); err != nil {
		return control.Errorf(control.ClassBusy, "claim region: %v", err)
	}
	x.of = r.Region
	if !req.GetOwn() {
		r.reach = x
		return nil
	}
	for x.id == 0 || x.id == claim.Agent || r.claimants[x.id] != nil {
		x.id = uint64(randomID()) // an agent may still know ids of an earlier executor at this address
	}
	if r.claimants == nil {
		r.claimants = map[uint64]*reach{}
	}
	if c.claimants == nil {
		c.claimants = map[string]int{}
	}
	r.claimants[x.id] = x
	c.claimants[x.tenant]++
	return nil
}

// expose makes the region, or on verbs a cell, reachable by the client. On verbs this side connects at once, and on tcp it waits in the background until the
// client connects. It returns the blob of this side. The caller holds mu.
func (x *reach) expose(provider string, data *datalisten.Listener) (mine []byte, err error) {
	if x.domain, err = x.to.device.NewDomain(); err == nil {
		if provider == dataplane.TCP {
			x.memory, err = x.domain.Shared(x.of.File(), uint64(claim.Size), dataplane.RemoteAtomic)
		} else if x.memory, err = x.domain.Alloc(uint64(claim.CellSize), dataplane.RemoteRead|dataplane.RemoteWrite); err == nil {
			x.joins = cmp.Or(x.id, claim.Agent)
			err = x.of.Join(x.joins, x.memory.Bytes())
		}
	}
	if err == nil {
		x.conn, err = x.domain.NewConn(x.memory)
	}
	if err == nil {
		mine, err = x.conn.Blob()
	}
	if err == nil && provider == dataplane.TCP {
		token, _ := dataplane.BlobToken(mine)
		err = data.Expect(token, "claims", x)
	}
	if err != nil {
		return nil, control.Errorf(control.ClassBusy, "claim region: %v", err)
	}
	if provider == dataplane.Verbs {
		x.end()
		if err := x.connect(); err != nil {
			return nil, control.StatusError(statusBadBlob, "claim region: "+err.Error())
		}
		return mine, nil
	}
	x.timer = time.AfterFunc(reachWithin, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if !x.over {
			x.free()
		}
	})
	return mine, nil
}

// Done implements datalisten.Receiver.
func (x *reach) Done() <-chan struct{} { return x.done }

// Connect implements datalisten.Receiver. It does not block, because the client has connected.
func (x *reach) Connect(c *net.TCPConn, hello []byte) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.over {
		return errors.New("the client has connected too late")
	}
	x.end()
	if err := x.to.device.Hand(c, hello); err != nil {
		return err
	}
	return x.connect()
}

// connect connects to the client, and serves it. The caller holds mu.
func (x *reach) connect() error {
	err := x.conn.Connect(context.Background(), x.theirs)
	if err == nil {
		err = x.conn.ServeAndRing(x.to.server, x.of.Bell())
	}
	return err
}

// end records that nobody waits for the client any more. The caller holds mu.
func (x *reach) end() {
	x.over = true
	close(x.done)
	if x.timer != nil {
		x.timer.Stop()
	}
}

// close ends the connection. When it returns, the client cannot reach the region or its cell.
func (x *reach) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.free()
}

// free ends the connection. The caller holds mu.
func (x *reach) free() {
	if !x.over {
		x.end()
	}
	if x.joins != 0 {
		x.of.Leave(x.joins) // before its cell is freed
	}
	if x.conn != nil {
		x.conn.Close()
	}
	if x.memory != nil {
		x.memory.Free()
	}
	if x.domain != nil {
		x.domain.Close()
	}
	x.conn, x.memory, x.domain, x.joins = nil, nil, nil, 0
}
