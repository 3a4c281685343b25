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

// reachable has what all connections to claim regions on tcp share. It is opened for the first one. claims.mu protects it.
type reachable struct {
	device *dataplane.Device
	server *dataplane.Server // executes the clients' operations
}

func (r *reachable) open(e *Executor) (err error) {
	if r.device != nil {
		return nil
	}
	if r.server, err = dataplane.NewServer(); err != nil {
		return err
	}
	if r.device, err = e.fetchDevice(dataplane.TCP); err != nil {
		r.server.Close()
	}
	return err
}

// close closes the device. All connections must be closed.
func (r *reachable) close() {
	if r.device != nil {
		r.server.Close()
		r.device.Close()
		r.device = nil
	}
}

// reach is a client's connection to its claim region on provider tcp. It is in a domain of its own, and exposes nothing but the region. It implements
// datalisten.Receiver.
type reach struct {
	to     reachable
	theirs []byte // blob of the client's queue pair
	timer  *time.Timer
	done   chan struct{} // closed when the client has connected, or is too late

	mu     sync.Mutex
	over   bool // done is closed
	domain *dataplane.Domain
	memory *dataplane.Memory
	conn   *dataplane.Conn // nil after close
}

// AttachClaims connects a client to its claim region on provider tcp.
func (e *Executor) AttachClaims(ctx context.Context, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	defer e.turns.enter()()
	if p := req.GetProvider(); p != dataplane.TCP {
		return nil, control.Errorf(control.ClassUnsupported, "claim region over provider %q: want tcp", p)
	}
	if err := e.checkProvider(dataplane.TCP); err != nil {
		return nil, err
	}
	if _, ok := dataplane.BlobToken(req.GetBlob()); !ok {
		return nil, control.StatusError(statusBadBlob, "claim region: the blob is not of a queue pair of provider tcp")
	}
	if err := e.gate.Take(ctx, quota.Leases, 1); err != nil {
		return nil, err
	}
	return e.claims.attach(control.Connection(ctx), req)
}

func (c *claims) attach(conn context.Context, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.regions[conn]
	switch {
	case c.ended:
		return nil, grpcError(lease.ErrDraining)
	case r == nil || subtle.ConstantTimeCompare(req.GetToken(), r.token[:]) != 1:
		return nil, invalidf("the token names no claim region of this connection")
	case r.reach != nil:
		return nil, invalidf("this connection's claim region was attached before")
	}
	x, mine, err := c.newReach(r.Region, req.GetBlob())
	if err != nil {
		return nil, control.Errorf(control.ClassBusy, "claim region: %v", err)
	}
	r.reach = x
	at := x.memory.Ref()
	return &control.AttachClaimsReply{Blob: mine, Region: &control.MemoryRef{Addr: at.Addr, Key: at.Key, Size: at.Size}}, nil
}

// newReach makes a region reachable by a client, and waits in the background until it connects. It returns the blob of this side. The caller holds mu.
func (c *claims) newReach(r *claim.Region, theirs []byte) (x *reach, mine []byte, err error) {
	if err := c.far.open(c.e); err != nil {
		return nil, nil, err
	}
	x = &reach{to: c.far, theirs: theirs, done: make(chan struct{})}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.domain, err = c.far.device.NewDomain(); err == nil {
		x.memory, err = x.domain.Shared(r.File(), uint64(claim.Size), dataplane.RemoteAtomic)
	}
	if err == nil {
		x.conn, err = x.domain.NewConn(x.memory)
	}
	if err == nil {
		mine, err = x.conn.Blob()
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
	err := x.to.device.Hand(c, hello)
	if err == nil {
		err = x.conn.Connect(context.Background(), x.theirs)
	}
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
