package executor

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// checkSpare checks a request for spare workers. They are cached, so it needs what caching needs.
func checkSpare(req *control.LeaseRequest) error {
	switch {
	case !req.GetSpare():
	case req.GetProvider() == dataplane.OFI:
		return invalidf("spare workers of provider %q: want shm, verbs or tcp", req.GetProvider())
	case len(req.GetClientId()) == 0:
		return invalidf("spare workers without a client_id, which a later request needs to get them")
	case req.GetReuse() != 0:
		return invalidf("spare workers with reuse of lease %d: spare workers are new ones", req.GetReuse())
	}
	return nil
}

// admit counts a request against its tenant's limits. A request for spare workers counts as the start of workers, not as a lease.
func (e *Executor) admit(ctx context.Context, req *control.LeaseRequest) error {
	if req.GetSpare() {
		return e.gate.Take(ctx, quota.Replaces, int(req.GetWorkers()))
	}
	return e.gate.Take(ctx, quota.Leases, 1)
}

// start is the start of spare workers. They count as cached already before it, so that their cores and memory stay free.
type start struct {
	stop context.CancelFunc
	over chan struct{} // closed when cached.workers is set, and the workers are suspended unless err is set
	err  error
}

// cancel ends workers that are being started, and waits for their end. It and wait may be called on nil.
func (s *start) cancel() {
	if s != nil {
		s.stop()
		s.wait()
	}
}

func (s *start) wait() error {
	if s == nil {
		return nil
	}
	<-s.over
	return s.err
}

// meeting is the receiver of a spare worker's data connection on tcp. The worker can be suspended when its client has connected.
type meeting struct {
	Worker
	met chan<- struct{} // has room for one value of each worker
}

func (m meeting) Connect(c *net.TCPConn, hello []byte) error {
	err := m.Worker.Connect(c, hello)
	if err == nil {
		m.met <- struct{}{} // a worker has one connection
	}
	return err
}

// meet waits until the clients of n spare workers have connected.
func (h *holding) meet(n int) error {
	late := time.NewTimer(dataplane.ConnectTime)
	defer late.Stop()
	for range n {
		select {
		case <-h.met:
		case <-late.C:
			return fmt.Errorf("the client has not connected within %v", dataplane.ConnectTime)
		case <-h.ctx.Done():
			return context.Cause(h.ctx)
		}
	}
	return nil
}

// stock starts spare workers, and suspends them. Until a lease takes them, they are frozen, nobody is charged for them, and any other lease may
// evict them. It takes over the references to code and tables.
func (e *Executor) stock(ctx context.Context, rid lease.RequestID, terms lease.Terms, code *code, tables []*table, req *control.LeaseRequest) (*control.LeaseReply, error) {
	e.work.Add(1)
	defer e.work.Done()
	h, k, err := e.reserveSpare(ctx, rid, terms, code, tables, req)
	if err != nil {
		e.codes.release(code)
		e.tables.release(tables)
		return nil, grpcError(err)
	}
	reply := &control.LeaseReply{LeaseId: uint64(h.id), Functions: code.names, Tables: uint32(len(tables)),
		DurationMs: milliseconds(terms.Duration), CacheMs: milliseconds(e.cfg.Settings.CacheTime)}
	workers, err := e.spawnAll(h, req.GetClientBlobs(), e.spawnLimit(ctx))
	for i, w := range workers {
		reply.Workers = append(reply.Workers, h.grant(i, w))
	}
	k.workers = workers
	if err == nil && len(e.table.Cached()) > e.cfg.Settings.CacheMost {
		err = tooManyCached(e.cfg.Settings.CacheMost)
	}
	claims := req.GetClaims() && e.claims.possible(k, &terms)
	if err == nil && h.met != nil { // the client needs the reply before it connects
		if claims {
			reply.Claim = e.armSpare(ctx, k, &terms, claim.Cooling) // until settle has frozen the workers
		}
		e.work.Go(func() {
			if err := e.settle(h, k, h.meet(len(workers))); err != nil {
				defer e.turns.enter()() // not earlier: a handover waits for settle
				e.dropSpare(h, k, err)
			}
		})
	} else if err = e.settle(h, k, err); err != nil {
		e.dropSpare(h, k, err)
		return nil, grpcError(err)
	}
	if claims && h.met == nil {
		reply.Claim = e.armSpare(ctx, k, &terms, claim.Frozen)
	}
	e.changed()
	return reply, nil
}

// settle ends the start of spare workers. Unless err is set, it suspends them, and lets the client claim them from then on. After an error the caller
// calls dropSpare.
func (e *Executor) settle(h *holding, k *cached, err error) error {
	if err == nil {
		bounded, cancel := context.WithTimeout(h.ctx, suspendPatience)
		err = each(k.workers, func(_ int, w Worker) error { return w.Suspend(bounded) })
		cancel()
	}
	if err == nil {
		k.used = usedBy(k.workers) // what a lease that claims them does not pay for
	}
	k.start.err = err
	close(k.start.over)
	if err == nil {
		e.watchCached(k)
		if s := e.claims.slot(k.id); s != nil {
			s.Cooled()
		}
	}
	return err
}

// dropSpare ends spare workers whose start has failed.
func (e *Executor) dropSpare(h *holding, k *cached, err error) {
	e.dropCached(k.id) // no effect if another lease has evicted or taken them
	e.tell(h, slog.LevelInfo, "no spare workers started", "lease", uint64(h.id), "error", err)
}

// armSpare lets the caller claim spare workers. Since they are cached already, another lease may have evicted them meanwhile.
func (e *Executor) armSpare(ctx context.Context, k *cached, terms *lease.Terms, state claim.State) *control.Claim {
	c := e.claims.arm(ctx, k, terms, 0, state)
	if c == nil {
		return nil
	}
	e.mu.Lock()
	present := e.cached[k.id] == k
	e.mu.Unlock()
	if !present {
		e.claims.revoke(k.id)
		return nil
	}
	return c
}

func tooManyCached(most int) error {
	return control.Errorf(control.ClassBusy, "spare workers: %d leases are cached, the most (settings cache-most and cache-time)", most)
}

// late reports whether the workers connect only when a lease takes them, which needs a message.
func late(req *control.LeaseRequest) bool {
	b, err := invoke.UnmarshalChannelBlob(req.GetClientBlobs()[0]) // checked
	return err == nil && len(b.QueuePair) == 0
}

// reserveSpare lists spare workers as cached before they are started.
func (e *Executor) reserveSpare(ctx context.Context, rid lease.RequestID, terms lease.Terms, code *code, tables []*table, req *control.LeaseRequest) (*holding, *cached, error) {
	if s := &e.cfg.Settings; s.CacheTime == 0 || len(e.table.Cached()) >= s.CacheMost {
		return nil, nil, tooManyCached(s.CacheMost)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	l, first, err := e.table.Request(rid, terms, 0)
	switch {
	case err != nil:
		return nil, nil, err
	case !first: // cannot happen: for the table, the lease of the first request has ended
		return nil, nil, control.Errorf(control.ClassBusy, "spare workers: the request was repeated")
	}
	h := newHolding(l.ID, code, e.spec(req, terms, code), l.CPUs)
	h.tenant = terms.Tenant
	if h.spec.Provider == dataplane.TCP {
		h.met = make(chan struct{}, terms.Workers)
	}
	h.spec.Tables, h.spec.Bundle = specTables(req.GetTables(), tables)
	k := &cached{id: l.ID, spec: h.spec, code: code, tables: tables, taken: make(chan struct{}), late: late(req), start: &start{stop: h.cancel, over: make(chan struct{})}}
	e.watchConnection(k, control.Connection(ctx))
	e.cached[l.ID] = k
	return h, k, nil
}
