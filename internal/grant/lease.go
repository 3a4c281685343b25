package grant

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/backtrace"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Limits of a lease on both sides (dp_wire.h). The executor may have lower ones.
const (
	MaxWorkers = 4096
	MaxLibrary = 1 << 30
)

// tableTries is how often an executor may evict a lease's tables before the lease has them.
const tableTries = 3

// maxDuration is longer than any lease.
const maxDuration = 100 * 365 * 24 * time.Hour

// Spec has the terms of a lease.
type Spec struct {
	Library        string // name of the shared library for messages
	Workers        int
	WorkersMin     int // fewest workers with which the lease is granted; 0: Workers
	CoresPerWorker int
	Memory         uint64 // bytes per worker, 0: the executor's default
	Mode           control.WaitMode
	Duration       time.Duration
	Renew          bool          // renew it in the background before it expires
	CallLimit      time.Duration // longest that one call may run, 0: the executor's own limit
	InitCall       bool          // the first call of each worker is the init call, which the call limit does not concern
	KeepsState     bool          // RFAAS_LEASE_REUSE: its workers may keep state of an earlier lease, and may serve a later one
	Executor       string        // address, empty: the session's choice
	At             string        // executor to ask first; a lease that moves is not bound to it
	Depth, Eager   int           // of the channels that will be offered
	Bulk           uint64
	Tables         []*Table      // that its workers map
	Bundle         *Table        // that they see (Control.Bundle), or nil
	Seed           *control.Seed // from which they start if possible; nil: none
	Runtime        string        // that they start with; "": none

	recheck bool // see Recheck
	spare   bool // see Pending.Spare
}

// Pending is a lease before it is granted: its library and its candidates in order. Use by one goroutine at a time.
type Pending struct {
	c          *Control
	spec       Spec
	lib        *Library // nil if the lease was adopted and its library's file has changed since
	name       string
	sha        [sha256.Size]byte
	candidates []Candidate
	current    int             // index of the candidate that Next returned last; -1: none yet
	refused    map[uint32]bool // slots of the board that were tried
	byBoard    bool            // more candidates may be on the board, and then in the manager's list
	unusable   []error         // why other executors of the manager's list cannot be asked
	unreached  []unreached     // executors that are not asked again
	last       error
	granted    bool
	turn       *seedTurn // of the request under way; nil: the lease has no seed
}

// Plan checks the spec of a lease. The caller then calls Look or UseCached.
func (c *Control) Plan(lib *Library, s Spec) (*Pending, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if err := c.isOpen("lease"); err != nil {
		return nil, err
	}
	return &Pending{c: c, spec: s, lib: lib, sha: lib.sha, name: filepath.Base(s.Library), current: -1}, nil
}

// check validates the spec and fills in the default number of cores.
func (s *Spec) check() error {
	const op = "lease"
	if s.CoresPerWorker == 0 {
		s.CoresPerWorker = 1
	}
	switch {
	case s.Workers < 1 || s.Workers > MaxWorkers:
		return fail(op, dataplane.StatusInvalid, "%d workers, want 1 to %d", s.Workers, MaxWorkers)
	case s.WorkersMin < 0 || s.WorkersMin > s.Workers:
		return fail(op, dataplane.StatusInvalid, "workers_min %d, want 1 to %d", s.WorkersMin, s.Workers)
	case s.CoresPerWorker < 1 || s.CoresPerWorker > 1<<16:
		return fail(op, dataplane.StatusInvalid, "%d cores per worker, want 1 to %d", s.CoresPerWorker, 1<<16)
	case s.Duration < 0:
		return fail(op, dataplane.StatusInvalid, "duration %v is negative", s.Duration)
	case s.CallLimit < 0:
		return fail(op, dataplane.StatusInvalid, "call limit %v is negative", s.CallLimit)
	case s.Mode < 0 || s.Mode > control.WaitMode_WAIT_MODE_WARM:
		return fail(op, dataplane.StatusInvalid, "wait mode %d is not one of adaptive (0), hot (1), warm (2)", s.Mode)
	}
	return nil
}

// least returns the fewest workers with which the lease is granted.
func (s *Spec) least() int { return cmp.Or(s.WorkersMin, s.Workers) }

// Look finds candidates, and forgets earlier ones.
func (p *Pending) Look(ctx context.Context) (err error) {
	ctx, cancel := p.c.bound(ctx)
	defer cancel()
	p.last = nil
	p.current, p.refused = -1, map[uint32]bool{}
	p.candidates, p.unusable, p.byBoard, err = p.c.first(ctx, &p.spec, p.refused)
	return err
}

// Next returns the next executor to ask. If no candidate is left, the error says why the last executor refused.
func (p *Pending) Next(ctx context.Context) (Candidate, error) {
	for p.current+1 < len(p.candidates) || p.more(ctx) {
		p.current++
		cand := p.candidates[p.current]
		if p.gaveUp(cand.Address) {
			continue
		}
		err := cand.tooSmall(&p.spec)
		if err == nil {
			return cand, nil
		}
		p.last = err
	}
	return Candidate{}, p.nobody()
}

// boardMost is how many executors of the board are asked before the manager is asked for its list, which is long.
const boardMost = 16

// more adds another candidate from the board, or, if there is none, those of the manager's list that were not tried.
func (p *Pending) more(ctx context.Context) bool {
	if !p.byBoard {
		return false
	}
	ctx, cancel := p.c.bound(ctx)
	defer cancel()
	if len(p.candidates) < boardMost {
		if cand, err := p.c.pick(ctx, &p.spec, p.refused); err == nil {
			p.candidates = append(p.candidates, cand)
			return true
		}
	}
	p.byBoard = false
	all, unusable, err := p.c.candidates(ctx, &p.spec)
	p.unusable = unusable
	if err != nil {
		if p.last == nil {
			p.last, p.unusable = err, nil // the error has both reasons
		}
		return false
	}
	tried := map[string]bool{}
	for _, cand := range p.candidates {
		tried[cand.Address] = true
	}
	n := len(p.candidates)
	for _, cand := range all {
		if !tried[cand.Address] {
			p.candidates = append(p.candidates, cand)
		}
	}
	return len(p.candidates) > n
}

// Worker describes a worker, as its executor reported it.
type Worker struct {
	Blob []byte // address of its channel
	PID  int    // on its node; identifies it in events
	CPUs []uint32
	// Durations of the steps of its start, as the executor measured them.
	Fork, Connect, Code, Sandbox time.Duration
	Start                        control.StartPath
	Unseeded                     string // why it has not started from the seed of the lease; "": it has
}

func workerOf(w *control.WorkerGrant) Worker {
	return Worker{Blob: w.GetBlob(), PID: int(w.GetPid()), CPUs: w.GetCpus(), Fork: time.Duration(w.GetSteps().GetFork()),
		Connect: time.Duration(w.GetSteps().GetConnect()), Code: time.Duration(w.GetSteps().GetCode()),
		Sandbox: time.Duration(w.GetSteps().GetSandbox()),
		Start:   w.GetStart(), Unseeded: w.GetUnseeded()}
}

// Recheck makes Look ask an executor that is the only candidate whether it has room, even if the channels are small.
func (p *Pending) Recheck() { p.spec.recheck = true }

// Workers returns the number of workers.
func (p *Pending) Workers() int { return p.spec.Workers }

// Granted reports whether a Grant succeeded. The caller then owns the lease, even if Grant returned an error afterwards.
func (p *Pending) Granted() bool { return p.granted }

// WithLines returns the backtrace of a worker with lines of the source. See backtrace.WithLines.
func (p *Pending) WithLines(trace string) string {
	if p.lib == nil {
		return trace
	}
	return backtrace.WithLines(trace, p.lib.code)
}

// Library returns the hash of the lease's library.
func (h *Held) Library() [sha256.Size]byte { return h.sha }

// Held is a granted lease. Safe for concurrent use.
type Held struct {
	Candidate
	ID        uint64
	Workers   []Worker // workers that the grant had; workers added later are not in it
	Wanted    int      // number of workers when all have been added
	Functions []string // by index
	Duration  time.Duration

	asked time.Duration // that its request named; 0: none
	c     *Control
	by    *Pending // the plan that was granted; nil if the lease was adopted, or is the record of a spare lease
	cl    control.ExecutorClient
	renew bool
	key   cachedKey

	library string // its name
	home    control.Home
	sha     [sha256.Size]byte
	watch   *watch

	adopted bool // granted to another process, whose client id the executor knows

	unanswered chan Unanswered
	leaving    atomic.Bool // events are dropped, because the lease is being released

	mu      sync.Mutex
	newer   map[int]Worker // workers that have replaced others or were added, by index
	end     time.Time      // when the client stops using the lease
	over    string         // why the lease has ended
	lost    bool           // the lease has ended because its executor cannot be reached; the executor may still have to release it
	refusal string         // why it could not be renewed, if the executor refused the credential
}

// note records that the lease has ended.
func (h *Held) note(e Event) {
	if e.Kind == LeaseEnded {
		h.mu.Lock()
		h.over, h.lost = e.Reason, e.Status != dataplane.StatusLeaseEnded
		h.mu.Unlock()
	}
}

// ended returns an error if the lease is known to have ended.
func (h *Held) ended(op string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over == "" {
		return nil
	}
	return fail(op, dataplane.StatusLeaseEnded, "the lease on %s ended: %s", h.Address, h.over)
}

// Grant asks the present candidate for the lease. blobs are the offers of one channel for each worker. After ErrBusy, and if the
// candidate cannot be reached, the caller may continue with Next and new offers. Nothing is leased after an error.
func (p *Pending) Grant(ctx context.Context, blobs [][]byte) (*Held, error) {
	const op = "lease"
	cand := p.candidates[p.current]
	whole := ctx
	ctx, cancel := p.bound(whole)
	defer func() { cancel() }()
	err := p.c.isOpen(op)
	var conn *grpc.ClientConn
	if err == nil {
		conn, err = p.c.dial(op, cand.Address)
	}
	if err != nil {
		p.last = err
		return nil, err
	}
	cl := control.NewExecutorClient(conn)
	var r *control.LeaseReply
	p.turn = nil
	if p.spec.Seed != nil {
		p.turn = p.c.copies.begin(ctx, p, cand.Address)
		defer func() { p.turn.end(r, cand.info) }()
		cancel()
		ctx, cancel = p.bound(whole) // it may have waited for another executor
		p.lendEarly(whole, &cand)
		defer func() { p.turn.notNeeded() }()
	}
	asked := time.Now()
	var from *peer.Peer
	r, from, err = p.ask(ctx, cl, blobs)
	switch {
	case err != nil:
	case cand.Cached != nil && (r.CodeUnknown || r.NotCached || len(r.TablesUnknown) > 0): // the executor was perhaps restarted
		err = fail(op, dataplane.StatusBusy, "%s has ended the cached workers", cand.Address)
	case r.CodeUnknown:
		if err = p.upload(ctx, cl, cand.Address); err == nil {
			asked = time.Now()
			r, from, err = p.ask(ctx, cl, blobs)
		}
		if err == nil && r.CodeUnknown {
			err = fail(op, dataplane.StatusProtocol, "%s does not know the library right after its upload", cand.Address)
		}
	}
	wanted := p.spec.all()
	for tries := 0; err == nil && len(r.TablesUnknown) > 0; tries++ {
		if tries == tableTries {
			err = fail(op, dataplane.StatusBusy, "%s has evicted a table right after its transfer, %d times", cand.Address, tries)
			break
		}
		for _, i := range r.TablesUnknown {
			if err == nil && i >= uint32(len(wanted)) {
				err = fail(op, dataplane.StatusProtocol, "%s asks for table %d, but the lease has %d tables and bundles", cand.Address, i, len(wanted))
			}
			if err == nil {
				err = p.provide(whole, cl, &cand, wanted[i])
			}
		}
		if err == nil {
			cancel()
			ctx, cancel = p.bound(whole) // the transfer may have taken longer than the time-out
			asked = time.Now()
			r, from, err = p.ask(ctx, cl, blobs)
		}
		if err == nil && r.CodeUnknown {
			err = fail(op, dataplane.StatusBusy, "%s has evicted the library while a table was transferred", cand.Address)
		}
	}
	for tries := 0; err == nil && r.SeedUnknown; tries++ {
		switch {
		case p.turn == nil || tries > copyTries:
			err = fail(op, dataplane.StatusProtocol, "%s asks for a seed that it was not offered", cand.Address)
			continue
		case tries == copyTries:
			p.turn.giveUp(fmt.Errorf("%s evicted the copy right after its transfer, %d times", cand.Address, tries))
		default:
			p.copySeed(whole, cl, &cand)
		}
		cancel()
		ctx, cancel = p.bound(whole)
		asked = time.Now()
		if r, from, err = p.ask(ctx, cl, blobs); err == nil && (r.CodeUnknown || len(r.TablesUnknown) > 0) {
			err = fail(op, dataplane.StatusBusy, "%s has evicted the library or a table while a seed was copied", cand.Address)
		}
	}
	if err != nil {
		p.c.forget(cand.Address)
		p.last = fromControl(op, cand.Address, err)
		return nil, p.last
	}
	p.granted = true
	p.c.note(cand.Provider)
	h := &Held{Candidate: cand, ID: r.LeaseId, Functions: r.Functions, asked: p.spec.Duration, c: p.c, by: p, cl: cl, renew: p.spec.Renew, key: p.key(), sha: p.sha, library: p.name,
		Duration: milliseconds(r.DurationMs), Wanted: p.spec.Workers, end: asked.Add(milliseconds(r.ClientMs)), unanswered: make(chan Unanswered, reportsMax)}
	for _, w := range r.Workers {
		h.Workers = append(h.Workers, workerOf(w))
	}
	switch {
	case r.Tables != uint32(len(wanted)):
		p.last = fail(op, dataplane.StatusUnsupported, "%s gave the workers %d of %d tables and bundles: the executor has an earlier version, upgrade it", cand.Address, r.Tables, len(wanted))
	case r.Runtime != p.spec.Runtime:
		p.last = fail(op, dataplane.StatusUnsupported, "%s gave the workers no runtime: the executor has an earlier version, upgrade it", cand.Address)
	case len(h.Workers) < p.spec.least() || len(h.Workers) > len(blobs):
		p.last = fail(op, dataplane.StatusProtocol, "%s granted %d workers, want %d to %d", cand.Address, len(h.Workers), p.spec.least(), len(blobs))
	case r.DurationMs > uint64(maxDuration/time.Millisecond):
		p.last = fail(op, dataplane.StatusProtocol, "%s granted a lease of %d ms", cand.Address, r.DurationMs)
	default:
		if h.home, err = cand.checkWorkers(op, from, h.Workers...); err == nil {
			return h, nil
		}
		_ = h.Release(context.WithoutCancel(ctx))
		p.granted = false
		p.giveUp(cand.Address, err)
		return nil, err
	}
	_ = h.Release(context.WithoutCancel(ctx))
	return nil, p.last
}

// bound is Control.bound for a lease request, which includes the init call of a seed.
func (p *Pending) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, p.c.opts.Timeout+p.spec.Seed.Limit())
}

// ask sends one lease request.
func (p *Pending) ask(ctx context.Context, cl control.ExecutorClient, blobs [][]byte) (*control.LeaseReply, *peer.Peer, error) {
	id := make([]byte, control.RequestIDSize)
	rand.Read(id)
	req := &control.LeaseRequest{
		ProtocolVersion: control.ProtocolVersion,
		RequestId:       id,
		CodeSha256:      p.sha[:],
		Workers:         uint32(p.spec.Workers),
		CoresPerWorker:  uint32(p.spec.CoresPerWorker),
		MemoryPerWorker: p.spec.Memory,
		Provider:        p.candidates[p.current].Provider,
		WorkersMin:      uint32(p.spec.least()),
		WaitMode:        p.spec.Mode,
		ClientBlobs:     blobs,
		Tenant:          p.c.opts.Tenant,
		ClientId:        p.c.client[:],
		KeepsState:      p.spec.KeepsState,
		InitCall:        p.spec.InitCall,
		Spare:           p.spec.spare,
		Claims:          p.spec.spare,
	}
	req.Tables, req.Bundle = p.tables()
	req.Seed, req.Runtime = p.turn.request(p.spec.Seed), p.spec.Runtime
	if k := p.candidates[p.current].Cached; k != nil {
		req.Reuse = k.id
	}
	if p.spec.Duration > 0 {
		req.DurationMs = proto.Uint64(uint64(max(p.spec.Duration/time.Millisecond, 1)))
	}
	if p.spec.CallLimit > 0 {
		req.CallLimitMs = uint64(max(p.spec.CallLimit/time.Millisecond, 1))
	}
	return p.c.lease(ctx, p.candidates[p.current].Address, cl, req)
}

// dialFailed reports whether no connection was made at all, so that repeating the request at once is useless.
func dialFailed(err error) bool {
	s, _ := status.FromError(err)
	return len(s.Details()) > 0 || containsAny(s.Message(), "Error while dialing")
}

func (p *Pending) upload(ctx context.Context, cl control.ExecutorClient, addr string) error {
	if p.lib == nil {
		return fail("upload the library", dataplane.StatusBadLibrary, "%s has changed since the lease was granted: open a new lease", p.name)
	}
	err := repeat(ctx, func() error {
		_, err := control.Upload(ctx, cl, p.name, p.sha, int64(len(p.lib.code)), bytes.NewReader(p.lib.code))
		return err
	})
	if err == nil {
		return nil
	}
	e := fromControl("upload the library", addr, err)
	var typed *dataplane.Error
	if errors.As(e, &typed) && errors.Is(typed, dataplane.ErrInvalid) {
		if typed.Status == dataplane.StatusInvalid {
			typed.Status = dataplane.StatusBadLibrary
		}
		typed.Detail = p.name + ": " + typed.Detail
	}
	return e
}

// ---- the stream of requests to an executor ----

// leasing is a stream of lease requests. It stays open between requests, which saves both sides the cost of beginning and ending a gRPC
// call. One goroutine at a time may use it.
type leasing struct {
	stream grpc.BidiStreamingClient[control.LeaseRequest, control.LeaseReply]
	cancel context.CancelFunc
	began  time.Time
	used   bool // a reply has been received
	peer   peer.Peer
}

// streamAge is how long a stream is used. Its credential is the one with which it began.
const streamAge = time.Minute

// idleStreams is how many unused streams to an executor stay open.
const idleStreams = 4

// rested returns an idle stream to addr, nil if there is none.
func (c *shared) rested(addr string) *leasing {
	c.mu.Lock()
	defer c.mu.Unlock()
	for idle := c.streams[addr]; len(idle) > 0; idle = c.streams[addr] {
		last := len(idle) - 1
		s := idle[last]
		if idle[last] = nil; last == 0 {
			delete(c.streams, addr)
		} else {
			c.streams[addr] = idle[:last]
		}
		if time.Since(s.began) <= streamAge {
			return s
		}
		s.cancel()
	}
	return nil
}

// begin opens a stream. ctx bounds the opening and not the stream.
func begin(ctx context.Context, cl control.ExecutorClient) (*leasing, error) {
	own, cancel := context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, cancel)
	stream, err := cl.Leasing(own)
	if !stop() && err == nil {
		err = own.Err()
	}
	if err != nil {
		cancel()
		return nil, patience(ctx, err)
	}
	return &leasing{stream: stream, cancel: cancel, began: time.Now()}, nil
}

// patience returns the error of a stream: that of ctx if ctx has ended the stream, else err.
func patience(ctx context.Context, err error) error {
	if ctx.Err() != nil && (status.Code(err) == codes.Canceled || errors.Is(err, context.Canceled)) {
		return status.FromContextError(ctx.Err()).Err()
	}
	return err
}

// rest keeps a stream for the next lease.
func (c *shared) rest(addr string, s *leasing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.streams[addr]) == idleStreams {
		s.cancel()
		return
	}
	c.streams[addr] = append(c.streams[addr], s)
}

// ask sends one request and waits for its reply until ctx ends. open reports whether the stream can be used again.
func (s *leasing) ask(ctx context.Context, req *control.LeaseRequest) (r *control.LeaseReply, open bool, err error) {
	stop := context.AfterFunc(ctx, s.cancel)
	r, err = s.exchange(req)
	if open = stop() && err == nil; !open {
		s.cancel()
	}
	if p, ok := peer.FromContext(s.stream.Context()); ok && err == nil {
		s.used, s.peer = true, *p
	}
	return r, open, patience(ctx, err)
}

func (s *leasing) exchange(req *control.LeaseRequest) (*control.LeaseReply, error) {
	if err := s.stream.Send(req); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	r, err := s.stream.Recv() // after io.EOF of Send, Recv returns the reason
	if errors.Is(err, io.EOF) {
		err = status.Error(codes.Unavailable, "the executor stops")
	}
	return r, err
}

// lease sends a request and returns its reply, and the peer of the connection from which the reply came. If the stream or the connection
// breaks, or the executor no longer accepts the stream's credential, it repeats the request once on a new stream. The request id is the
// same, so the executor answers with the first grant if there was one. A reply of the executor is final, even if its error is of the class
// connection.
func (c *shared) lease(ctx context.Context, addr string, cl control.ExecutorClient, req *control.LeaseRequest) (*control.LeaseReply, *peer.Peer, error) {
	s := c.rested(addr)
	for again := false; ; again = true {
		if s == nil {
			var err error
			if s, err = begin(ctx, cl); err != nil {
				return nil, nil, err
			}
		}
		if end, ok := ctx.Deadline(); ok {
			req.WaitMs = uint64(max(time.Until(end)/time.Millisecond, 1))
		}
		r, open, err := s.ask(ctx, req)
		if open {
			c.rest(addr, s)
		}
		code, old, from := status.Code(err), s.used, &s.peer
		switch s = nil; {
		case err == nil:
			return r, from, nil
		case code == codes.Unimplemented && !control.IsClassed(err), code == codes.ResourceExhausted && !control.IsClassed(err):
			// An executor of an earlier version, or one that accepts no more streams from this client.
			req.WaitMs = 0
			r, err := cl.Lease(ctx, req, grpc.Peer(from))
			return r, from, err
		case again || ctx.Err() != nil:
			return nil, nil, err
		case code == codes.Unavailable && !dialFailed(err), code == codes.Unauthenticated && old:
		default:
			return nil, nil, err
		}
	}
}
