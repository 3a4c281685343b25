package executor

import (
	"context"
	"crypto/subtle"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
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

// reach is a client's connection to its claim region on provider tcp or verbs. It is in a domain of its own, and exposes nothing but the region. On
// tcp it implements datalisten.Receiver.
type reach struct {
	to     *reachable
	theirs []byte // blob of the client's queue pair
	timer  *time.Timer
	done   chan struct{} // closed when the client has connected, or is too late

	mu     sync.Mutex
	over   bool // done is closed
	domain *dataplane.Domain
	memory *dataplane.Memory
	conn   *dataplane.Conn // nil after close
}

// AttachClaims connects a client to its claim region on provider tcp or verbs.
func (e *Executor) AttachClaims(ctx context.Context, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	defer e.turns.enter()()
	p := req.GetProvider()
	if p != dataplane.TCP && p != dataplane.Verbs {
		return nil, control.Errorf(control.ClassUnsupported, "claim region over provider %q: want tcp or verbs", p)
	}
	if err := e.checkProvider(p); err != nil {
		return nil, err
	}
	if _, ok := dataplane.BlobToken(req.GetBlob()); !ok && p == dataplane.TCP {
		return nil, control.StatusError(statusBadBlob, "claim region: the blob is not of a queue pair of provider tcp")
	}
	if err := e.gate.Take(ctx, quota.Leases, 1); err != nil {
		return nil, err
	}
	return e.claims.attach(control.Connection(ctx), req)
}

func (c *claims) attach(conn context.Context, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	x, reply, err := c.expose(conn, req)
	if err != nil || req.GetProvider() != dataplane.Verbs {
		return reply, err
	}
	x.mu.Lock() // without c.mu, because the kernel may take a second to resolve the client's address
	defer x.mu.Unlock()
	if x.conn == nil {
		return nil, grpcError(lease.ErrDraining)
	}
	if err := x.connect(); err != nil {
		x.free()
		return nil, control.StatusError(statusBadBlob, "claim region: "+err.Error())
	}
	return reply, nil
}

// expose makes the region of a connection reachable.
func (c *claims) expose(conn context.Context, req *control.AttachClaimsRequest) (*reach, *control.AttachClaimsReply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.regions[conn]
	switch {
	case c.ended:
		return nil, nil, grpcError(lease.ErrDraining)
	case r == nil || subtle.ConstantTimeCompare(req.GetToken(), r.token[:]) != 1:
		return nil, nil, invalidf("the token names no claim region of this connection")
	case r.reach != nil:
		return nil, nil, invalidf("this connection's claim region was attached before")
	}
	x, mine, err := c.newReach(r.Region, req.GetProvider(), req.GetBlob())
	if err != nil {
		return nil, nil, control.Errorf(control.ClassBusy, "claim region: %v", err)
	}
	r.reach = x
	at := x.memory.Ref()
	return x, &control.AttachClaimsReply{Blob: mine, Region: &control.MemoryRef{Addr: at.Addr, Key: at.Key, Size: at.Size}}, nil
}

// accessOf returns the access that a client needs to its region: atomics on tcp; on verbs it writes wishes and reads words (dp_claim.h).
var accessOf = map[string]dataplane.Access{dataplane.TCP: dataplane.RemoteAtomic, dataplane.Verbs: dataplane.RemoteRead | dataplane.RemoteWrite}

// newReach makes a region reachable by a client. On tcp it waits in the background until the client connects. It returns the blob of this side. The
// caller holds mu.
func (c *claims) newReach(r *claim.Region, provider string, theirs []byte) (x *reach, mine []byte, err error) {
	to, err := c.reachable(provider)
	if err != nil {
		return nil, nil, err
	}
	x = &reach{to: to, theirs: theirs, done: make(chan struct{})}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.domain, err = to.device.NewDomain(); err == nil {
		x.memory, err = x.domain.Shared(r.File(), uint64(claim.Size), accessOf[provider])
	}
	if err == nil {
		x.conn, err = x.domain.NewConn(x.memory)
	}
	if err == nil {
		mine, err = x.conn.Blob()
	}
	if err == nil && provider == dataplane.Verbs {
		x.end() // this side connects without waiting
		return x, mine, nil
	}
	if err == nil {
		token, _ := dataplane.BlobToken(mine)
		err = c.e.cfg.Data.Expect(token, "claims", x)
	}
	if err != nil {
		x.free()
		return nil, nil, err
	}
	x.timer = time.AfterFunc(reachWithin, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if !x.over {
			x.free()
		}
	})
	return x, mine, nil
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
		err = x.conn.ServeAndRing(x.to.server, claim.Bell(x.memory.Bytes()))
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

// close ends the connection. When it returns, the client cannot reach the region. x may be nil.
func (x *reach) close() {
	if x == nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.free()
}

// free ends the connection. The caller holds mu.
func (x *reach) free() {
	if !x.over {
		x.end()
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
	x.conn, x.memory, x.domain = nil, nil, nil
}
