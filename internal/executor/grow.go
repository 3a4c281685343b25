package executor

import (
	"context"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/lease"
)

// grow starts a worker in a vacant seat that the caller has claimed: it takes cores and memory within the limits that hold for a new lease.
// Clients that wait for leases for which there is room go first. Like replace, it is not bound to the caller's context.
func (e *Executor) grow(caller context.Context, h *holding, req *control.ReplaceRequest) (*control.ReplaceReply, error) {
	i := int(req.GetWorker())
	l, err := e.takeSeat(caller, h, i)
	if err != nil {
		return nil, grpcError(err)
	}
	e.evict(l.Evict)
	ctx, cancel := spawnContext(h, e.spawnLimit(caller))
	defer cancel()
	w, err := e.spawnMore(ctx, h, &l, i, req.GetClientBlob())
	if err != nil {
		h.setCPUs(i, nil)
		if serr := e.table.Shrink(h.id, i); serr != nil {
			e.log.Error("cannot return the cores of a worker that was not added", "lease", uint64(h.id), "worker", i, "error", serr)
		}
		e.changed()
		if h.ctx.Err() != nil {
			return nil, h.endingError()
		}
		return nil, grpcError(err)
	}
	e.watch(h, i, w)
	e.changed()
	grant := h.seats[i].grant // changes only while the seat is claimed
	e.audit(caller, identity.AuditGrant, h, l.Terms.Tenant, "a worker is added", func(line *identity.AuditEntry) {
		line.Worker, line.Start = &i, startOf([]*control.WorkerGrant{grant})
	})
	return &control.ReplaceReply{Worker: grant}, nil
}

// takeSeat takes the cores and the memory of worker i.
func (e *Executor) takeSeat(ctx context.Context, h *holding, i int) (lease.Lease, error) {
	l, err := e.table.Get(h.id)
	if err != nil {
		return l, err
	}
	one := l.Terms
	one.Workers, one.WorkersMin = 1, 1
	if !e.roomFor(&control.RoomRequest{Cores: uint32(one.CoresPerWorker), MemoryBytes: one.MemoryPerWorker, Growing: true}) {
		return l, control.Errorf(control.ClassBusy, "worker %d of lease %d: no room is free, or other clients wait for it", i, h.id)
	}
	err = e.requestPatiently(ctx, func() error {
		return e.requestWithRoom(&one, func() (err error) {
			l, err = e.table.Grow(h.id, i)
			return err
		})
	})
	return l, err
}

// spawnMore starts worker i, counts its cores within the tenant's limit, and charges the lease for it from now on.
func (e *Executor) spawnMore(ctx context.Context, h *holding, l *lease.Lease, i int, blob []byte) (Worker, error) {
	release, flag, err := e.limits.reserve(l.Terms.Tenant, l.Terms.CoresPerWorker)
	if err != nil {
		return nil, err
	}
	h.setCPUs(i, l.CPUs[i])
	w, err := e.spawn(ctx, h, i, blob)
	if err == nil {
		grant := h.seatWorker(i, w, blob)
		if grant != nil {
			e.metrics.started(grant)
			e.accounts.add(l, i, w)
			h.reserveMore(release, flag)
			return w, nil
		}
		stopAll(ctx, []Worker{w}, killed)
		err = h.endingError()
	}
	if release != nil {
		release()
	}
	return nil, err
}

func (h *holding) setCPUs(i int, cpus []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seats[i].cpus = cpus
}

// reserveMore adds to what the lease has reserved of its tenant's limit.
func (h *holding) reserveMore(release func(), flag string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if flag != "" {
		h.flag = flag
	}
	if before := h.reserved; release != nil {
		h.reserved = func() {
			if before != nil {
				before()
			}
			release()
		}
	}
}
