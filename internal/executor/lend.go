package executor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// lender makes seeds readable for other executors. Safe for concurrent use.
type lender struct {
	devices dataplane.Exposer
	mu      sync.Mutex
	end     context.CancelCauseFunc // of all loans; nil: there was none yet
	ctx     context.Context
	closed  bool
	hashing chan struct{}  // capacity 1: full while a seed is hashed
	loans   sync.WaitGroup // and what hashAhead has begun
	// peers returns the data addresses of executors: on tcp this executor connects to no others. Nil: it does not know any.
	peers func(context.Context) (map[netip.AddrPort]bool, error)
}

// context returns a context that also ends when the lender is closed. close waits for the returned function.
func (l *lender) context(ctx context.Context) (context.Context, context.CancelFunc, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, nil, grpcError(lease.ErrDraining)
	}
	if l.end == nil {
		l.ctx, l.end = context.WithCancelCause(context.Background())
	}
	own, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() { cancel(context.Cause(l.ctx)) })
	l.loans.Add(1)
	return own, func() { stop(); cancel(nil); l.loans.Done() }, nil
}

// close ends all loans. There can be none from now on.
func (l *lender) close() {
	l.mu.Lock()
	l.closed = true
	if l.end != nil {
		l.end(errors.New("the node is draining"))
	}
	l.mu.Unlock()
	l.loans.Wait()
	l.devices.Close()
}

// peerList has the data addresses of executors, or says why they are not known.
type peerList struct {
	known map[netip.AddrPort]bool
	err   error
}

// askPeers asks the resource manager for the other executors, to whose data addresses this executor may connect on tcp. The answer comes while the seed is
// prepared.
func (l *lender) askPeers(ctx context.Context, provider string) <-chan peerList {
	answer := make(chan peerList, 1)
	switch {
	case provider != dataplane.TCP:
	case l.peers == nil:
		answer <- peerList{err: control.Errorf(control.ClassUnsupported, "a seed cannot be read over tcp: this executor has no resource manager that names the other executors")}
	default:
		go func() {
			known, err := l.peers(ctx)
			if err != nil {
				err = control.Errorf(control.ClassConnection, "a seed cannot be read over tcp: the resource manager did not name the other executors: %v", err)
			}
			answer <- peerList{known, err}
		}()
	}
	return answer
}

// check checks the addresses in a blob of provider tcp that a client has sent. It returns an error if this executor must not connect to them.
func (p *peerList) check(blob []byte) error {
	if p.err != nil {
		return p.err
	}
	all := dataplane.BlobAddresses(blob)
	for _, a := range all {
		if !p.known[a] {
			return invalidf("%v is not the data address of an executor that the resource manager knows", a)
		}
	}
	if len(all) == 0 {
		return invalidf("the blob of the other executor names no address")
	}
	return nil
}

// peersOf returns lender.peers for a manager.
func peersOf(m control.ManagerClient) func(context.Context) (map[netip.AddrPort]bool, error) {
	return func(ctx context.Context) (map[netip.AddrPort]bool, error) {
		ctx, cancel := context.WithTimeout(ctx, managerCall)
		defer cancel()
		r, err := m.List(ctx, &control.ListRequest{})
		if err != nil {
			return nil, err
		}
		known := map[netip.AddrPort]bool{}
		for _, x := range r.GetExecutors() {
			if a, err := netip.ParseAddrPort(x.GetInfo().GetDataAddress()); err == nil {
				known[netip.AddrPortFrom(a.Addr().Unmap(), a.Port())] = true
			}
		}
		return known, nil
	}
}

// contents returns the hashed segments of a seed's file. One seed is hashed at a time.
func (l *lender) contents(ctx context.Context, s *zygote.Seed) (*zygote.SeedCopy, error) {
	if !s.Hashed() {
		select {
		case l.hashing <- struct{}{}:
			defer func() { <-l.hashing }()
		case <-ctx.Done():
			return nil, interrupted(ctx, "lend a seed")
		}
	}
	return s.Contents(ctx)
}

// hashAhead hashes a seed that other executors may copy, so that the first of them does not wait for that. It keeps nothing from evicting the seed.
func (l *lender) hashAhead(s *zygote.Seed) {
	if l.peers == nil || s.Hashed() {
		return
	}
	ctx, end, err := l.context(context.Background())
	if err != nil {
		return
	}
	go func() {
		defer end()
		if _, err := l.contents(ctx, s); err == nil { // a request to lend it tries again, and returns the error
			_, _ = s.Proofs()
		}
	}()
}

// segmentsOf returns the segments of a message.
func segmentsOf(c *zygote.SeedCopy) (all []*control.SeedSegment) {
	for _, x := range c.Segments {
		all = append(all, &control.SeedSegment{Offset: x.Offset, Size: x.Size, Sha256: x.Sum[:]})
	}
	return all
}

// Lend makes a seed readable for another executor.
func (e *Executor) Lend(stream grpc.BidiStreamingServer[control.LendRequest, control.LendReply]) error {
	return e.turns.yieldTo(stream.Context(), func(ctx context.Context) error { return e.lend(ctx, stream) })
}

// errCallerGone ends a stream whose caller has broken it off.
var errCallerGone = errors.New("the caller has broken off its stream")

// inbox receives the requests of a stream, so that the receiver can wait for something else, too. The stream ends when its handler returns.
func inbox(caller context.Context, stream grpc.BidiStreamingServer[control.LendRequest, control.LendReply]) func(context.Context) (*control.LendRequest, error) {
	type item struct {
		r   *control.LendRequest
		err error
	}
	items := make(chan item)
	go func() {
		for {
			r, err := stream.Recv()
			select {
			case items <- item{r, err}:
			case <-caller.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return func(ctx context.Context) (*control.LendRequest, error) {
		select {
		case i := <-items:
			if i.err != nil && !errors.Is(i.err, io.EOF) {
				return nil, errCallerGone
			}
			return i.r, i.err
		case <-caller.Done():
			return nil, errCallerGone
		case <-ctx.Done():
			return nil, interrupted(ctx, "lend a seed")
		}
	}
}

func (e *Executor) lend(ctx context.Context, stream grpc.BidiStreamingServer[control.LendRequest, control.LendReply]) error {
	if err := e.gate.Take(ctx, quota.Leases, 1); err != nil {
		return err
	}
	ctx, end, err := e.lender.context(ctx)
	if err != nil {
		return err
	}
	defer end()
	next := inbox(stream.Context(), stream)
	first, stop := context.WithTimeoutCause(ctx, fetchConnect, errors.New("the caller has not named a seed"))
	req, err := next(first)
	stop()
	if err != nil {
		return err
	}
	provider := req.GetProvider()
	if err := e.checkProvider(provider); err != nil {
		return err
	}
	addresses := e.lender.askPeers(ctx, provider)
	t, err := e.lendable(ctx, req)
	if err != nil {
		return err
	}
	defer e.tables.release([]*table{t})
	if n := t.seed.Missing(); n > 0 { // this executor has copied only a part of the seed
		return control.Errorf(control.ClassConnection, "the executor has not read %d bytes of the seed, and reads only what workers touch (seed-fill)", n)
	}
	if err := t.seed.Whole(ctx); err != nil {
		return lendError(err)
	}
	c, err := e.lender.contents(ctx, t.seed)
	if err != nil {
		return lendError(err)
	}
	turn, most := ctx, fetchLimit(c.Bytes())
	if req.GetOnDemand() {
		// Workers of the other executor depend on the loan. So it does not end with the stream, and a handover and a drain wait for it.
		drain, over, err := e.lender.context(context.WithoutCancel(ctx))
		if err != nil {
			return err
		}
		defer over()
		handover, stop := e.turns.closing()
		defer stop()
		loan, end := context.WithCancelCause(context.WithoutCancel(ctx))
		defer end(nil)
		for _, x := range []context.Context{drain, handover} {
			defer endAfter(x, handoverRest, end)()
		}
		defer endAfter(stream.Context(), most, end)()
		// The other executor may read only what its workers touch (seed-fill), and its lease-max may be longer. After half of this executor's lease-max it must read the rest, as before a drain.
		half, cancel := context.WithTimeout(drain, e.cfg.Settings.LeaseMax/2)
		defer cancel()
		defer context.AfterFunc(handover, cancel)()
		ctx, turn, most = loan, half, most+e.cfg.Settings.LeaseMax
	}
	ctx, cancel := context.WithTimeoutCause(ctx, most, errSlow)
	defer cancel()
	return e.lendTo(ctx, turn, stream, next, t.seed, c, provider, addresses)
}

// lendable returns the seed of a request with a new reference.
func (e *Executor) lendable(ctx context.Context, req *control.LendRequest) (*table, error) {
	var t *table
	if req.GetName() != "" {
		tenant, err := e.payer(ctx, req.GetTenant())
		if err != nil {
			return nil, err
		}
		t, _ = e.published.acquire(tenant, req.GetName(), req.GetVersion())
	} else {
		key, err := checkSum("seed", req.GetSeed())
		if err != nil {
			return nil, err
		}
		t = e.tables.take(key, codeOwner(ctx))
	}
	switch {
	case t == nil:
		return nil, control.Errorf(control.ClassLease, "the executor does not have the seed any more")
	case t.seed == nil:
		e.tables.release([]*table{t})
		return nil, control.Errorf(control.ClassLease, "the executor has no seed: %s", t.refused)
	}
	return t, nil
}

// lendTo offers a seed, connects to the other executor and waits until the caller ends the stream. When turn ends, it tells the caller that the loan ends soon.
func (e *Executor) lendTo(ctx, turn context.Context, stream grpc.BidiStreamingServer[control.LendRequest, control.LendReply], next func(context.Context) (*control.LendRequest, error), s *zygote.Seed, c *zygote.SeedCopy, provider string,
	addresses <-chan peerList) error {
	o := dataplane.Options{GIDIndex: -1, ActiveOnly: provider == dataplane.TCP, Encrypt: encryption(&e.cfg.Settings)}
	if provider == dataplane.Verbs {
		o = rdmaOptions(&e.cfg.Settings)
	}
	dev, server, done, err := e.lender.devices.Get(provider, o)
	if err != nil {
		return lendError(err)
	}
	defer done()
	memory := uint64(0)
	if provider == dataplane.Verbs {
		memory = c.Bytes() + c.ProofsSize() // exposeSeed and exposeProofs make copies
	}
	if err := e.tables.makeRoom(memory); err != nil {
		return control.Errorf(control.ClassBusy, "lend a seed: %d bytes for the loan: no memory: %v", memory, err)
	}
	defer e.tables.giveBack(memory)
	domain, err := dev.NewDomain()
	if err != nil {
		return lendError(err)
	}
	defer domain.Close()
	m, at, err := exposeSeed(domain, s, c, provider)
	if err != nil {
		return lendError(err)
	}
	defer m.Free()
	proofs, err := exposeProofs(domain, s, c, provider)
	if err != nil {
		return lendError(err)
	}
	defer proofs.Free()
	conn, err := domain.NewBulkConn(m, proofs)
	if err != nil {
		return lendError(err)
	}
	defer conn.Close()
	blob, err := conn.Blob()
	if err != nil {
		return lendError(err)
	}
	offer := &control.LendReply{Blob: blob, Memory: memoryRef(m), Proofs: memoryRef(proofs), Seed: &control.SeedCopy{Units: c.Units, At: at, Segments: segmentsOf(c), Touched: numbersOf(s.Touched())}}
	if err := stream.Send(offer); err != nil {
		return err
	}
	answer, cancel := context.WithTimeoutCause(ctx, fetchLimit(c.Bytes()), errSlow) // an on-demand loan may last much longer
	req, err := next(answer)
	cancel()
	if err != nil {
		return unlessOver(err)
	}
	if provider == dataplane.TCP {
		known := <-addresses
		if err := known.check(req.GetBlob()); err != nil {
			return err
		}
	}
	connect, cancel := context.WithTimeoutCause(ctx, fetchConnect, fmt.Errorf("the other executor has not connected within %v", fetchConnect))
	err = conn.Connect(connect, req.GetBlob())
	cancel()
	connected := err == nil
	if err != nil && provider != dataplane.SHM { // on shm, the other side may have read everything and closed already
		return lendError(err)
	}
	if provider == dataplane.TCP {
		if err := conn.Serve(server); err != nil {
			return lendError(err)
		}
	}
	for until := turn; ; {
		req, err := next(until)
		switch {
		case err == nil:
			s.Record(runsOf(req.GetTouched()))
		case errors.Is(err, errCallerGone) && ctx != turn && connected:
			return linger(ctx, conn)
		case until == turn && turn.Err() != nil && ctx.Err() == nil:
			until = ctx
			if err := sendWithin(ctx, func() error { return stream.Send(&control.LendReply{Ending: true}) }); err != nil {
				return err
			}
		default:
			return unlessOver(err)
		}
	}
}

// lingerLook is how often linger checks whether the peer still exists.
const lingerLook = 100 * time.Millisecond

// linger keeps a loan whose caller has ended until the other executor has closed its connection, or ctx ends. The other executor reads the rest meanwhile (fetchSeed).
func linger(ctx context.Context, conn *dataplane.Conn) error {
	look := time.NewTicker(lingerLook)
	defer look.Stop()
	for conn.Err() == nil {
		select {
		case <-look.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return errCallerGone
}

func memoryRef(m *dataplane.Memory) *control.MemoryRef {
	ref := m.Ref()
	return &control.MemoryRef{Addr: ref.Addr, Key: ref.Key, Size: ref.Size}
}

// unlessOver returns nil if the caller has ended its stream.
func unlessOver(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func lendError(err error) error {
	if control.IsClassed(err) {
		return err
	}
	return control.Errorf(control.ClassConnection, "lend a seed: %v", err)
}

// exposeSeed makes a seed readable, and returns where its segments are. A device for verbs would make memory for the holes of the file, so it gets a copy
// of the segments.
func exposeSeed(d *dataplane.Domain, s *zygote.Seed, c *zygote.SeedCopy, provider string) (m *dataplane.Memory, at []uint64, err error) {
	if provider != dataplane.Verbs {
		for _, x := range c.Segments {
			at = append(at, x.Offset)
		}
		m, err = d.File(s.File, zygote.FileSize(c.Units))
		return m, at, err
	}
	if m, err = d.Alloc(c.Bytes(), dataplane.RemoteRead); err != nil {
		return nil, nil, err
	}
	b, next := m.Bytes(), uint64(0)
	for _, x := range c.Segments {
		if _, err = s.File.ReadAt(b[next:next+x.Size], int64(x.Offset)); err != nil {
			m.Free()
			return nil, nil, err
		}
		at = append(at, next)
		next += x.Size
	}
	return m, at, nil
}

// exposeProofs makes the proofs of a seed readable for the peer. On verbs it exposes a copy.
func exposeProofs(d *dataplane.Domain, s *zygote.Seed, c *zygote.SeedCopy, provider string) (*dataplane.Memory, error) {
	if provider != dataplane.Verbs {
		f, err := s.Proofs()
		if err != nil {
			return nil, err
		}
		return d.File(f, c.ProofsSize())
	}
	m, err := d.Alloc(c.ProofsSize(), dataplane.RemoteRead)
	if err == nil {
		c.Proofs(m.Bytes())
	}
	return m, err
}
