package grant

import (
	"bytes"
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// farClaimTime bounds a claim on tcp. A claim that takes longer may have succeeded.
const farClaimTime = 2 * time.Second

// farRegion is the connection to the claim region that an executor on tcp has for this process. The process claims workers for its clients, because
// the connection cannot be passed on to them. shared.mu protects it.
type farRegion struct {
	token  []byte
	stop   context.CancelFunc // ends the attempt to connect
	over   bool
	domain *dataplane.Domain
	conn   *dataplane.Conn // nil until it is connected, and after the end
	region *control.MemoryRef
	done   func() // gives up the device
}

// farClaim says how the workers of a cached lease on tcp are claimed.
type farClaim struct {
	*farRegion
	line     uint32
	sequence uint64
	leaseID  uint64        // of the lease that a claim gets
	lasts    time.Duration // how long the lease may be used, from the claim on
}

// farRegion returns the connection to the claim region that an executor names, or nil. If there is none, it connects in the background. Until then, the
// workers are reused by message.
func (c *shared) farRegion(addr string, cl control.ExecutorClient, token []byte) *farRegion {
	o := c.opts.verbs()
	o.ActiveOnly = true
	o.Encrypt, _ = dataplane.Encryption(c.opts.DataEncryption, c.opts.AllowPlaintext)
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.farRegions[addr]
	switch {
	case c.closed:
		return nil
	case r != nil && bytes.Equal(r.token, token):
		return r
	case r != nil: // of an earlier connection to the executor
		r.close()
	}
	dev, _, done, err := c.sources.Get(dataplane.TCP, o)
	if err != nil {
		return nil
	}
	ctx, stop := context.WithTimeout(context.Background(), c.opts.Timeout)
	r = &farRegion{token: token, stop: stop, done: done}
	c.farRegions[addr] = r
	go c.connectFar(ctx, r, addr, cl, dev)
	return r
}

// connectFar connects r. If that fails, the workers of the executor are reused by message.
func (c *shared) connectFar(ctx context.Context, r *farRegion, addr string, cl control.ExecutorClient, dev *dataplane.Device) {
	domain, conn, region, err := attachClaims(ctx, addr, cl, dev, r.token)
	c.mu.Lock()
	defer c.mu.Unlock()
	r.domain, r.conn, r.region = domain, conn, region
	if r.stop(); err != nil || r.over {
		r.free()
	}
}

func attachClaims(ctx context.Context, addr string, cl control.ExecutorClient, dev *dataplane.Device, token []byte) (*dataplane.Domain, *dataplane.Conn, *control.MemoryRef, error) {
	const op = "attach a claim region"
	domain, err := dev.NewDomain()
	if err != nil {
		return nil, nil, nil, err
	}
	conn, err := domain.NewConn()
	if err != nil {
		return domain, nil, nil, err
	}
	blob, err := conn.Blob()
	if err != nil {
		return domain, conn, nil, err
	}
	var from peer.Peer
	r, err := cl.AttachClaims(ctx, &control.AttachClaimsRequest{Provider: dataplane.TCP, Blob: blob, Token: token}, grpc.Peer(&from))
	if err == nil {
		err = checkDataAddress(op, addr, &from, r.GetBlob())
	}
	if err == nil && r.GetRegion().GetSize() < uint64(claim.Size) {
		err = fail(op, dataplane.StatusProtocol, "%s has a region of %d bytes, want %d", addr, r.GetRegion().GetSize(), claim.Size)
	}
	if err == nil {
		err = conn.Connect(ctx, r.GetBlob())
	}
	return domain, conn, r.GetRegion(), err
}

// checkDataAddress returns an error if the blob of an executor's queue pair names an address of this node although the executor is on another node.
func checkDataAddress(op, executor string, from *peer.Peer, blob []byte) error {
	home := control.ListOwnAddresses().Home(from)
	for _, a := range dataplane.BlobAddresses(blob) {
		if why := home.Refuse("executor", a.Addr()); why != "" {
			return fail(op, dataplane.StatusConnection, "executor %s names %v as its data address, which %s: set data-advertise of the executor", executor, a, why)
		}
	}
	return nil
}

// close ends the connection, or the attempt to connect. The caller holds shared.mu.
func (r *farRegion) close() {
	r.over = true
	r.stop()
	if r.conn != nil {
		r.free()
	}
}

// free frees everything in the background, because a claim may be under way. The caller holds shared.mu.
func (r *farRegion) free() {
	domain, conn, done := r.domain, r.conn, r.done
	r.domain, r.conn, r.over = nil, nil, true
	go func() {
		defer done()
		if conn != nil {
			conn.Close()
		}
		if domain != nil {
			domain.Close()
		}
	}()
}

// ClaimFar claims the workers of a cached lease on tcp, which UseCached has made the only candidate. It returns nil if they must be asked for by
// message. The cached lease still belongs to the caller then.
func (p *Pending) ClaimFar(ctx context.Context, k *Cached) *Held {
	f := k.far
	if f == nil || !p.Lasts(k) {
		return nil
	}
	p.c.mu.Lock()
	conn, region := f.conn, f.region
	p.c.mu.Unlock()
	if conn == nil {
		return nil
	}
	began := time.Now()
	at, armed, claimed := claim.Word(f.line, f.sequence)
	won, err := conn.CompareSwap(region.GetAddr()+at, region.GetKey(), armed, claimed, farClaimTime)
	if err != nil { // the claim may have succeeded
		p.c.mu.Lock()
		if f.conn == conn {
			f.close()
		}
		p.c.mu.Unlock()
		ctx, cancel := p.c.bound(ctx)
		defer cancel()
		_, _ = k.cl.Release(ctx, &control.ReleaseRequest{LeaseId: f.leaseID}) // an error usually means that there is no such lease
	}
	if !won {
		return nil
	}
	h := p.Claimed(k, f.leaseID, began.Add(f.lasts))
	h.Cached = k
	start := control.StartPath_START_PATH_CACHED
	if k.fresh {
		start = control.StartPath_START_PATH_POOLED
	}
	for i := range h.Workers {
		w := &h.Workers[i]
		w.Start, w.Fork, w.Connect, w.Code, w.Sandbox = start, 0, 0, 0, 0
	}
	return h
}
