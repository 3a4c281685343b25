package executor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// Info says what this executor offers.
func (e *Executor) Info(_ context.Context, req *control.InfoRequest) (*control.InfoReply, error) {
	if err := checkVersion(req.GetProtocolVersion()); err != nil {
		return nil, err
	}
	return e.info(), nil
}

// Lease grants cores and connects workers to the caller's blobs. Everything is checked before anything is taken.
func (e *Executor) Lease(ctx context.Context, req *control.LeaseRequest) (*control.LeaseReply, error) {
	rid, terms, hash, err := e.terms(req)
	if err != nil {
		return nil, err
	}
	code := e.codes.acquire(hash)
	if code == nil {
		if e.isDraining() {
			return nil, grpcError(lease.ErrDraining) // before somebody uploads in vain
		}
		return &control.LeaseReply{CodeUnknown: true}, nil
	}
	l, h, err := e.request(rid, terms, code, req)
	if err != nil {
		e.codes.release(code)
		return nil, grpcError(err)
	}
	if h != nil {
		// Not bound to ctx: a caller that lost its connection repeats the request and gets this grant. One that
		// does not come back loses it by the first-use deadline.
		e.work.Go(func() { e.start(h, req.GetClientBlobs()) })
	} else {
		e.codes.release(code)
	}
	if l, err = e.table.Wait(ctx, l); err != nil {
		return nil, grpcError(err)
	}
	if h, err = e.find(l.ID); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reply, nil
}

// request sets the resources aside. The holding is nil when the request is a repetition. Lease and holding come
// into being together, so that nobody ever meets one without the other.
func (e *Executor) request(rid lease.RequestID, terms lease.Terms, c *code, req *control.LeaseRequest) (lease.Lease, *holding, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l, first, err := e.table.Request(rid, terms)
	if err != nil || !first {
		return l, nil, err
	}
	h := newHolding(l.ID, c, e.spec(req, terms, c), l.CPUs)
	e.holdings[l.ID] = h
	return l, h, nil
}

// spec is what all workers of a lease have in common.
func (e *Executor) spec(req *control.LeaseRequest, terms lease.Terms, c *code) zygote.Spec {
	s := &e.cfg.Settings
	return zygote.Spec{
		Provider: req.GetProvider(), Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex,
		PKeyIndex: s.VerbsPKeyIndex, TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU,
		WaitMode: uint8(req.GetWaitMode()), Code: c.file, Names: c.names,
		MaxDepth: invoke.MaxDepth, MaxEager: invoke.MaxEager, MaxBulk: uint64(s.MaxBulk), MemoryLimit: terms.MemoryPerWorker,
	}
}

// start brings a requested lease to granted, or undoes it.
func (e *Executor) start(h *holding, blobs [][]byte) {
	workers, err := e.spawnAll(h, blobs)
	if err != nil {
		close(h.started)
		if ferr := e.table.Fail(h.id, err); ferr != nil {
			e.log.Error("cores of a failed lease not returned", "lease", uint64(h.id), "error", ferr)
		}
		e.forget(h)
		return
	}
	l, err := e.table.Get(h.id)
	if err != nil { // cannot be: only this goroutine moves a requested lease
		e.log.Error("granted lease is not in the table", "lease", uint64(h.id), "error", err)
	}
	reply := &control.LeaseReply{LeaseId: uint64(h.id), Functions: h.code.names,
		DurationMs: uint64(l.Terms.Duration.Milliseconds())}
	for i, w := range workers {
		reply.Workers = append(reply.Workers, h.grant(i, w))
		h.seatWorker(i, w) // cannot be ending before it is granted
		e.watch(h, i, w)
	}
	h.mu.Lock()
	h.reply = reply
	h.mu.Unlock()
	if _, err := e.table.Grant(h.id); err != nil {
		e.log.Error("lease not granted", "lease", uint64(h.id), "error", err)
	}
	e.log.Debug("lease granted", "lease", uint64(h.id), "workers", len(workers), "cpus", fmt.Sprint(l.CPUs), "tenant", l.Terms.Tenant)
	close(h.started)
}

// watch reports a worker that dies by itself.
func (e *Executor) watch(h *holding, i int, w Worker) {
	e.work.Go(func() {
		h.watch(i, w, func(x zygote.Exit) {
			level := slog.LevelWarn
			if x.Signal == 0 && x.Code == exitClientGone {
				level = slog.LevelDebug // the event stream tells whether that was on purpose
			}
			e.log.Log(context.Background(), level, "worker ended", "lease", uint64(h.id), "worker", i, "pid", w.PID(), "reason", x.Reason)
		})
	})
}

// spawnAll starts all workers of a lease side by side. When one fails the others are stopped, and none is left when
// it returns.
func (e *Executor) spawnAll(h *holding, blobs [][]byte) ([]Worker, error) {
	ctx, cancel := context.WithTimeoutCause(h.ctx, e.cfg.Settings.SpawnTimeout,
		control.Errorf(control.ClassConnection, "the workers did not start within %v", e.cfg.Settings.SpawnTimeout))
	defer cancel()
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	workers := make([]Worker, len(blobs))
	for i, blob := range blobs {
		wg.Go(func() {
			w, err := e.spawn(ctx, h, i, blob)
			workers[i] = w
			if err != nil {
				once.Do(func() { first = err }) // the others only hear that they are cancelled
				cancel()
			}
		})
	}
	wg.Wait()
	if first == nil {
		return workers, nil
	}
	var left []Worker
	for _, w := range workers {
		if w != nil {
			left = append(left, w)
		}
	}
	stopAll(ctx, left, false)
	return nil, first
}

// spawn starts one worker; the error says which, and why in the terms of the control plane.
func (e *Executor) spawn(ctx context.Context, h *holding, i int, blob []byte) (Worker, error) {
	w, err := e.cfg.Spawner.Spawn(ctx, h.workerSpec(i, blob))
	if err == nil {
		return w, nil
	}
	if cause := context.Cause(ctx); cause != nil {
		if errors.Is(cause, context.Canceled) && h.ctx.Err() != nil {
			return nil, control.CodeErrorf(control.ClassBusy, codes.Unavailable, "worker %d: not started, the lease ends or the node drains", i)
		}
		if control.IsClassed(cause) {
			return nil, cause
		}
	}
	e.log.Info("worker did not start", "lease", uint64(h.id), "worker", i, "error", err)
	return nil, fmt.Errorf("worker %d: %w", i, err)
}

// Replace starts a new worker on the cores of one that died.
func (e *Executor) Replace(_ context.Context, req *control.ReplaceRequest) (*control.ReplaceReply, error) {
	h, err := e.find(lease.ID(req.GetLeaseId()))
	if err != nil {
		return nil, err
	}
	if err := e.checkBlob(req.GetClientBlob(), h.spec.Provider); err != nil {
		return nil, control.StatusError(statusBadBlob, fmt.Sprintf("client_blob: %v", err))
	}
	i := int(req.GetWorker())
	if err := h.claimSeat(req.GetWorker()); err != nil {
		return nil, err
	}
	defer h.spawns.Done()
	ctx, cancel := context.WithTimeoutCause(h.ctx, e.cfg.Settings.SpawnTimeout,
		control.Errorf(control.ClassConnection, "worker %d did not start within %v", i, e.cfg.Settings.SpawnTimeout))
	defer cancel()
	w, err := e.spawn(ctx, h, i, req.GetClientBlob())
	if err != nil {
		h.freeSeat(i)
		return nil, grpcError(err)
	}
	if !h.seatWorker(i, w) {
		stopAll(ctx, []Worker{w}, false)
		return nil, e.ended(h.id)
	}
	e.watch(h, i, w)
	return &control.ReplaceReply{Worker: h.grant(i, w)}, nil
}

// claimSeat reserves a dead worker's seat for a replacement; spawns.Done must follow.
func (h *holding) claimSeat(i uint32) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case i >= uint32(len(h.seats)):
		return invalidf("worker %d: lease %d has workers 0 to %d", i, h.id, len(h.seats)-1)
	case h.ending || h.draining:
		return control.CodeErrorf(control.ClassLease, codes.FailedPrecondition, "lease %d is ending", h.id)
	case h.seats[i].replacing:
		return control.Errorf(control.ClassBusy, "worker %d of lease %d is being replaced", i, h.id)
	case !h.seats[i].dead:
		return control.CodeErrorf(control.ClassInvalid, codes.FailedPrecondition, "worker %d of lease %d is alive", i, h.id)
	}
	h.seats[i].replacing = true
	h.spawns.Add(1)
	return nil
}

func (h *holding) freeSeat(i int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seats[i].replacing = false
}

// Release ends a lease and returns when its workers are reaped and its cores are free.
func (e *Executor) Release(_ context.Context, req *control.ReleaseRequest) (*control.ReleaseReply, error) {
	h, err := e.beginEnd(lease.ID(req.GetLeaseId()), lease.Released, "")
	if err != nil {
		return nil, grpcError(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseGrace) // whether the caller waits or not
	defer cancel()
	e.finishEnd(ctx, h, true)
	return &control.ReleaseReply{}, nil
}
