package grant

import (
	"bytes"
	"context"
	"encoding/binary"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// farClaimTime bounds a claim on tcp or verbs. A claim that takes longer may have succeeded.
const farClaimTime = 2 * time.Second

// attachTime bounds AttachClaimant. It is shorter than the library waits (ATTACH_NS in client/c/claimant.c, and one second). Otherwise the executor could make a claimant that the
// process has given up.
const attachTime = 1500 * time.Millisecond

// farClaimSpin is how long a claim on verbs reads the word without a pause. Then it pauses for as long between two reads.
const farClaimSpin = 100 * time.Microsecond

// farRegion is the connection to the claim region that an executor on tcp has for this process, or on verbs to this process's cell. The process claims
// workers for clients that are no claimants (Held.AttachClaimant). shared.mu protects it.
type farRegion struct {
	provider string
	token    []byte
	stop     context.CancelFunc // ends the attempt to connect
	over     bool
	domain   *dataplane.Domain
	conn     *dataplane.Conn // nil until it is connected, and after the end
	region   *control.MemoryRef
	wishes   sync.Mutex // verbs: held during a claim, because the cell has room for one wish
	done     func()     // gives up the device; nil until it is open
}

// farClaim says how the workers of a cached lease on tcp or verbs are claimed.
type farClaim struct {
	*farRegion
	line     uint32
	sequence uint64
	leaseID  uint64        // of the lease that a claim gets
	lasts    time.Duration // how long the lease may be used, from the claim on
}

// farRegion returns the connection to the claim region that an executor names, or nil. If there is none, it connects in the background. Until then, the
// workers are reused by message.
func (c *shared) farRegion(addr, provider string, cl control.ExecutorClient, token []byte) *farRegion {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.farRegions[addr]
	switch {
	case c.closed:
		return nil
	case r != nil && r.provider == provider && bytes.Equal(r.token, token):
		return r
	case r != nil: // of an earlier connection to the executor, or of another provider
		r.close()
	}
	ctx, stop := context.WithTimeout(context.Background(), c.opts.Timeout)
	r = &farRegion{provider: provider, token: token, stop: stop}
	c.farRegions[addr] = r
	go c.connectFar(ctx, r, addr, cl)
	return r
}

// connectFar connects r. If that fails, the workers of the executor are reused by message.
func (c *shared) connectFar(ctx context.Context, r *farRegion, addr string, cl control.ExecutorClient) {
	o := c.opts.verbs()
	if r.provider == dataplane.TCP {
		o.ActiveOnly = true
		o.Encrypt, _ = dataplane.Encryption(c.opts.DataEncryption, c.opts.AllowPlaintext)
	}
	dev, _, done, err := c.sources.Get(r.provider, o)
	var domain *dataplane.Domain
	var conn *dataplane.Conn
	var region *control.MemoryRef
	if err == nil {
		domain, conn, region, err = attachClaims(ctx, addr, cl, dev, r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r.domain, r.conn, r.region, r.done = domain, conn, region, done
	if r.stop(); err != nil || r.over {
		r.free()
	}
}

func attachClaims(ctx context.Context, addr string, cl control.ExecutorClient, dev *dataplane.Device, of *farRegion) (*dataplane.Domain, *dataplane.Conn, *control.MemoryRef, error) {
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
	r, err := askClaims(ctx, op, addr, cl, &control.AttachClaimsRequest{Provider: of.provider, Blob: blob, Token: of.token})
	if err == nil {
		err = conn.Connect(ctx, r.GetBlob())
	}
	return domain, conn, r.GetRegion(), err
}

// askClaims asks an executor for a connection for claims, and checks the reply.
func askClaims(ctx context.Context, op, addr string, cl control.ExecutorClient, req *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	var from peer.Peer
	r, err := cl.AttachClaims(ctx, req, grpc.Peer(&from))
	if err == nil {
		err = checkDataAddress(op, addr, &from, r.GetBlob())
	}
	want := uint64(claim.Size)
	if req.GetProvider() == dataplane.Verbs {
		want = uint64(claim.CellSize)
	}
	if err == nil && r.GetRegion().GetSize() != want { // on verbs, executors of earlier versions expose the region
		err = fail(op, dataplane.StatusProtocol, "%s has a claim region of %d bytes, want %d", addr, r.GetRegion().GetSize(), want)
	}
	return r, err
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
		if done != nil {
			defer done()
		}
		if conn != nil {
			conn.Close()
		}
		if domain != nil {
			domain.Close()
		}
	}()
}

// claim claims the workers. After an error, the claim may have succeeded.
func (f *farClaim) claim(conn *dataplane.Conn, region *control.MemoryRef) (won bool, err error) {
	if f.provider == dataplane.TCP {
		at, armed, claimed := claim.Word(f.line, f.sequence)
		return conn.CompareSwap(region.GetAddr()+at, region.GetKey(), armed, claimed, farClaimTime)
	}
	f.wishes.Lock()
	defer f.wishes.Unlock()
	began := time.Now()
	wish, yes, no := claim.Wish(f.line, f.sequence)
	word := binary.NativeEndian.AppendUint64(nil, wish)
	err = conn.WriteRing(word, region.GetAddr(), region.GetKey(), farClaimTime)
	for err == nil {
		if err = conn.Read(word, region.GetAddr()+claim.AnswerAt, region.GetKey(), farClaimTime); err != nil {
			break
		}
		if answer := binary.NativeEndian.Uint64(word); answer == yes || answer == no {
			return answer == yes, nil
		}
		switch waited := time.Since(began); {
		case waited > farClaimTime:
			err = fail("claim workers", dataplane.StatusDeadline, "the executor has not answered for %v", farClaimTime)
		case waited > farClaimSpin:
			time.Sleep(farClaimSpin)
		}
	}
	return false, err
}

// GrantCached asks for the workers of a cached lease, which UseCached has made the only candidate. On tcp and verbs it claims them, if it can. Otherwise, or
// if it does not get them, it asks by message. After an error, nothing is leased, and the cached lease still belongs to the caller.
func (p *Pending) GrantCached(ctx context.Context, k *Cached, blobs [][]byte) (*Held, error) {
	h, sure := p.claimFar(k)
	if h != nil {
		return h, nil
	}
	h, err := p.Grant(ctx, blobs)
	if err != nil && !sure {
		ctx, cancel := p.c.bound(context.WithoutCancel(ctx))
		defer cancel()
		k.settle(ctx)
	}
	return h, err
}

// claimFar claims the workers of a cached lease on tcp or verbs. It returns nil if they must be asked for by message. If it returns false, the outcome
// of the claim is unknown, or that of a claim by the client process, which asks for this reason.
func (p *Pending) claimFar(k *Cached) (h *Held, sure bool) {
	f := k.far
	if f == nil || !p.Lasts(k) {
		return nil, k.own == nil
	}
	p.c.mu.Lock()
	conn, region := f.conn, f.region
	p.c.mu.Unlock()
	if conn == nil {
		return nil, true
	}
	began := time.Now()
	won, err := f.claim(conn, region)
	if err != nil {
		p.c.mu.Lock()
		if f.conn == conn {
			f.close()
		}
		p.c.mu.Unlock()
	}
	if !won {
		return nil, err == nil
	}
	h = p.Claimed(k, f.leaseID, began.Add(f.lasts))
	h.Cached = k
	start := control.StartPath_START_PATH_CACHED
	if k.fresh {
		start = control.StartPath_START_PATH_POOLED
	}
	for i := range h.Workers {
		w := &h.Workers[i]
		w.Start, w.Fork, w.Connect, w.Code, w.Sandbox = start, 0, 0, 0, 0
	}
	return h, true
}

// claimants has the client process of a session as a claimant of executors on verbs: it claims workers over a queue pair of its own.
type claimants struct {
	mu     sync.Mutex
	closed bool
	at     map[string]claimant // by executor
}

type claimant struct {
	id uint64
	cl control.ExecutorClient
}

// OwnClaim says how the client process of a session claims the workers of a cached lease over its own queue pair. The executor permits no other claimant, and
// this process cannot see whether the workers are claimed.
type OwnClaim struct {
	Line     uint32
	Sequence uint64
	LeaseID  uint64        // of the lease that a claim gets
	Lasts    time.Duration // how long the lease may be used, from the claim on
}

// OwnClaim returns how the client process that owns the cached lease claims its workers; nil: it cannot.
func (k *Cached) OwnClaim() *OwnClaim { return k.own }

// MayAttach reports whether the client process could claim such workers itself, if it called AttachClaimant.
func (k *Cached) MayAttach() bool {
	return k.far != nil && k.far.provider == dataplane.Verbs && k.handed == nil
}

// AttachClaimant makes the client process of the session a claimant of the lease's executor, with a queue pair that has the given blob. It replaces an
// earlier one. It returns the blob of the executor's queue pair, and the cell.
func (h *Held) AttachClaimant(ctx context.Context, blob []byte) (theirs []byte, cell *control.MemoryRef, err error) {
	const op = "attach a claimant"
	if h.Provider != dataplane.Verbs {
		return nil, nil, fail(op, dataplane.StatusUnsupported, "the workers are on provider %s, want verbs", h.Provider)
	}
	ctx, cancel := h.c.bound(ctx)
	defer cancel()
	soon, stop := context.WithTimeout(ctx, attachTime)
	defer stop()
	h.c.detachClaimant(soon, h.Address)
	r, err := askClaims(soon, op, h.Address, h.cl, &control.AttachClaimsRequest{Provider: h.Provider, Blob: blob, Own: true})
	own := claimant{r.GetClaimant(), h.cl}
	if err != nil {
		if own.id != 0 { // the reply was rejected
			own.detach(ctx)
		}
		return nil, nil, fromControl(op, h.Address, err)
	}
	s := &h.c.claimants
	s.mu.Lock()
	before, closed := s.at[h.Address], s.closed
	if !closed {
		if s.at == nil {
			s.at = map[string]claimant{}
		}
		s.at[h.Address] = own
	}
	s.mu.Unlock()
	if before.id != 0 { // of another request at the same time
		before.detach(ctx)
	}
	if closed {
		own.detach(ctx)
		return nil, nil, fail(op, dataplane.StatusInvalid, "the session is closed")
	}
	return r.GetBlob(), r.GetRegion(), nil
}

func (x claimant) detach(ctx context.Context) {
	_, _ = x.cl.DetachClaims(ctx, &control.DetachClaimsRequest{Claimant: x.id}) // after an error, it ends with the connection
}

// detachClaimant ends the session's claimant of an executor, if there is one.
func (c *Control) detachClaimant(ctx context.Context, addr string) {
	c.claimants.mu.Lock()
	x, is := c.claimants.at[addr]
	delete(c.claimants.at, addr)
	c.claimants.mu.Unlock()
	if is {
		x.detach(ctx)
	}
}

// claimant returns the session's claimant of an executor; 0: none.
func (c *Control) claimant(addr string) uint64 {
	c.claimants.mu.Lock()
	defer c.claimants.mu.Unlock()
	return c.claimants.at[addr].id
}

// leaveClaimants ends all claimants of a closing session. It does not wait for the executors.
func (c *Control) leaveClaimants() {
	s := &c.claimants
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, x := range s.at {
		done := c.retain()
		go func() {
			defer done()
			ctx, cancel := c.bound(context.Background())
			defer cancel()
			x.detach(ctx)
		}()
	}
	s.at = nil
}

// settle ends a cached lease of which the workers may have been claimed, and the lease that the claim may have got. The executor may have refused the workers for
// another reason than the claim, which could then still win. So the cached lease is released first: then nobody can claim its workers. Errors usually mean
// that there is no such lease.
func (k *Cached) settle(ctx context.Context) {
	k.release(ctx)
	switch {
	case k.own != nil:
		_, _ = k.cl.Release(ctx, &control.ReleaseRequest{LeaseId: k.own.LeaseID})
	case k.far != nil:
		_, _ = k.cl.Release(ctx, &control.ReleaseRequest{LeaseId: k.far.leaseID})
	}
}
