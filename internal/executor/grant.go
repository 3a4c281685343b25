package executor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// Info returns what this executor offers.
func (e *Executor) Info(_ context.Context, req *control.InfoRequest) (*control.InfoReply, error) {
	if err := checkVersion(req.GetProtocolVersion()); err != nil {
		return nil, err
	}
	return e.info(), nil
}

// requests is one stream of lease requests.
type requests struct {
	e      *Executor
	stream grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]

	turn chan struct{} // capacity 1: full from a request to its reply, and for ever after the last reply
}

// lastReply is how long a caller that does not read may keep the port from closing.
const lastReply = 200 * time.Millisecond

// Leasing answers lease requests one after the other, until the caller ends the stream, one fails, or the port closes. A
// blocked read ends only when this function returns, so another goroutine reads the requests and answers them.
func (e *Executor) Leasing(stream grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	closing := control.Closing(stream.Context())
	r := &requests{e: e, stream: stream, turn: make(chan struct{}, 1)}
	done := make(chan error, 1)
	go func() { done <- r.serve() }()
	select {
	case err := <-done:
		return err
	case <-closing.Done():
	}
	select {
	case r.turn <- struct{}{}:
	case <-time.After(lastReply):
	}
	return nil
}

// serve returns nil when the caller has ended the stream.
func (r *requests) serve() error {
	deepen()
	for {
		req, err := r.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = r.answer(req)
		}
		if err != nil {
			return err
		}
	}
}

// mostWait is longer than any caller waits.
const mostWait = 24 * time.Hour

// answer grants or refuses one request.
func (r *requests) answer(req *control.LeaseRequest) error {
	ctx := r.stream.Context()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done(): // the stream has ended because the port closes
		return ctx.Err()
	}
	if wait := req.GetWaitMs(); wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(min(wait, uint64(mostWait/time.Millisecond)))*time.Millisecond)
		defer cancel()
		req.WaitMs = 0 // a repetition may wait for another time
	}
	reply, err := r.e.Lease(ctx, req)
	if err != nil {
		return err
	}
	return r.stream.Send(reply)
}

// Lease grants cores and connects workers to the caller's blobs. Everything is checked before any resource is taken.
func (e *Executor) Lease(ctx context.Context, req *control.LeaseRequest) (*control.LeaseReply, error) {
	deepen()
	reply, err := e.lease(ctx, req)
	if err == errHandsOver {
		e.turns.enter()() // so that the client repeats its request only when the executor can grant it
	}
	return reply, err
}

func (e *Executor) lease(ctx context.Context, req *control.LeaseRequest) (*control.LeaseReply, error) {
	defer e.turns.enter()()
	rid, terms, hash, err := e.terms(ctx, req)
	var wanted []tableRef
	if err == nil {
		wanted, err = e.tablesOf(req)
	}
	if err == nil {
		var bundle []tableRef
		bundle, err = e.bundleOf(req.GetBundle())
		wanted = append(wanted, bundle...)
	}
	if err == nil {
		err = e.notCordoned()
	}
	if err == nil {
		err = e.lendsMemory()
	}
	if err == nil {
		err = e.admit(ctx, req)
	}
	if err != nil {
		return nil, err
	}
	code := e.codes.acquire(hash, codeOwner(ctx))
	if code == nil {
		if e.isDraining() {
			return nil, grpcError(lease.ErrDraining) // so that the client does not upload for nothing
		}
		return &control.LeaseReply{CodeUnknown: true}, nil
	}
	tables, unknown := e.tables.acquire(wanted, codeOwner(ctx))
	if len(unknown) > 0 {
		e.codes.release(code)
		if e.isDraining() {
			return nil, grpcError(lease.ErrDraining)
		}
		return &control.LeaseReply{TablesUnknown: unknown}, nil
	}
	giveBack := func() {
		e.codes.release(code)
		e.tables.release(tables)
	}
	if req.GetSeed().GetElsewhere() && !e.tables.knowsSeed(newWish(req, &terms, codeOwner(ctx))) {
		giveBack()
		return &control.LeaseReply{SeedUnknown: true}, nil
	}
	if req.GetSpare() {
		return e.stock(ctx, rid, terms, code, tables, req)
	}
	var l lease.Lease
	var h *holding
	var k *cached
	err = e.requestPatiently(ctx, func() error {
		return e.requestWithRoom(&terms, func() (err error) {
			l, h, k, err = e.request(rid, terms, code, tables, req, codeOwner(ctx))
			return err
		})
	})
	if err != nil {
		giveBack()
		return leaseFailed(err)
	}
	id := l.ID // Wait's l is empty if the caller has gone
	asked := h
	if asked == nil {
		giveBack()
		asked, _ = e.find(id)
	}
	if asked != nil {
		asked.askedOn(control.Connection(ctx), func() { e.table.Gone(id) })
	}
	if h != nil {
		// Not bound to ctx: a caller that lost its connection repeats the request and gets this grant, if it comes back
		// soon.
		e.work.Add(1)
		e.evict(l.Evict)
		e.start(ctx, h, k, req.GetClientBlobs())
		e.work.Done()
	}
	if l, err = e.table.Wait(ctx, l); err != nil {
		return leaseFailed(err)
	}
	if h, err = e.find(id); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var seed []byte
	if h.seed != nil {
		seed = h.seed.sum[:]
	}
	return &control.LeaseReply{LeaseId: uint64(l.ID), Seed: seed, Workers: h.granted, Functions: h.code.names, Tables: uint32(len(h.tables)), Runtime: h.spec.Runtime,
		DurationMs: milliseconds(l.Expires.Sub(l.Granted)), ClientMs: milliseconds(l.ClientEnd.Sub(e.now()))}, nil
}

// leaseFailed returns the reply to a request that got no lease.
func leaseFailed(err error) (*control.LeaseReply, error) {
	if errors.Is(err, lease.ErrNotCached) {
		return &control.LeaseReply{NotCached: true}, nil
	}
	if err == errHandsOver {
		return nil, err
	}
	return nil, grpcError(err)
}

// request reserves the resources. The holding is nil if the request is a repetition. The cached workers are nil unless
// the request names some. Lease and holding are created together, so that neither is seen without the other.
func (e *Executor) request(rid lease.RequestID, terms lease.Terms, c *code, tables []*table, req *control.LeaseRequest, owner string) (lease.Lease, *holding, *cached, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l, first, err := e.table.Request(rid, terms, lease.ID(req.GetReuse()))
	if err != nil || !first {
		return l, nil, nil, err
	}
	k := e.cached[l.Reuses] // exists, because the table has assigned it
	delete(e.cached, l.Reuses)
	reused, _ := e.table.Get(l.Reuses)
	h := newHolding(l.ID, c, e.spec(req, terms, c), l.CPUs)
	h.tenant, h.tables, h.spare = terms.Tenant, tables, reused.Terms.Spare
	h.spec.Tables, h.spec.Bundle = specTables(req.GetTables(), tables)
	h.wish = newWish(req, &terms, owner)
	e.holdings[l.ID] = h
	return l, h, k, nil
}

// spec returns the common part of the specs of a lease's workers.
func (e *Executor) spec(req *control.LeaseRequest, terms lease.Terms, c *code) zygote.Spec {
	spec := e.specFor(req.GetProvider(), channelsMemory(req.GetClientBlobs()), terms, c)
	spec.Runtime = req.GetRuntime()
	return spec
}

func (e *Executor) specFor(provider string, channels uint64, terms lease.Terms, c *code) zygote.Spec {
	spec := e.deviceSpec(provider)
	spec.WaitMode, spec.Code, spec.Names, spec.NamesFile = uint8(terms.Wait), c.file, c.names, c.namesFile
	spec.MaxDepth, spec.MaxEager, spec.MaxBulk = invoke.MaxDepth, invoke.MaxEager, uint64(e.cfg.Settings.MaxBulk)
	spec.ChannelMemory = channels
	spec.MemoryLimit, spec.CallLimit = terms.MemoryPerWorker-spec.ChannelMemory, terms.CallLimit
	if spec.InitLimit = terms.CallLimit; terms.InitCall {
		spec.InitLimit = e.initLimit()
	}
	spec.UID, spec.GID = terms.UID, terms.GID
	return spec
}

// deviceSpec returns the device part of a spec for a provider.
func (e *Executor) deviceSpec(provider string) zygote.Spec {
	if provider == dataplane.TCP {
		return zygote.Spec{Provider: provider, Device: e.cfg.Data.Address, Encrypt: encryption(&e.cfg.Settings)}
	}
	s := &e.cfg.Settings
	if provider == dataplane.OFI {
		ofi, device := s.OFI()
		return zygote.Spec{Provider: provider, Device: ofi + "," + device, Encrypt: encryption(s)}
	}
	return zygote.Spec{Provider: provider, Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex,
		PKeyIndex: s.VerbsPKeyIndex, TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU}
}

// start turns a requested lease into a granted one, or undoes it. k has the cached workers of an earlier lease, or is
// nil. start is not bound to the caller's context, which only identifies the caller and bounds the time for starting.
func (e *Executor) start(caller context.Context, h *holding, k *cached, blobs [][]byte) {
	flag, err := e.reserve(h)
	reserved := err == nil
	var workers []Worker
	switch {
	case err != nil && k != nil:
		e.end(k)
	case err != nil:
	case k != nil:
		workers, err = e.resumeAll(h, k, blobs, e.spawnLimit(caller))
	default:
		if err = e.takeSeed(caller, h); err == nil {
			workers, err = e.spawnAll(h, blobs[:h.present()], e.spawnLimit(caller))
		}
	}
	if err != nil {
		close(h.started)
		if ferr := e.table.Fail(h.id, err); ferr != nil {
			e.log.Error("cannot return the cores of a failed lease", "lease", uint64(h.id), "error", ferr)
		}
		e.forget(h)
		e.report()
		if reserved { // else nothing was free in between that another lease could wait for
			e.room.notify()
		}
		return
	}
	l, err := e.table.Get(h.id)
	if err != nil { // impossible: only this goroutine changes a requested lease
		e.log.Error("granted lease is not in the table", "lease", uint64(h.id), "error", err)
	}
	var granted []*control.WorkerGrant
	for i, w := range workers {
		granted = append(granted, h.seatWorker(i, w, blobs[i])) // not nil: a lease cannot end before it is granted
		e.metrics.started(granted[i])
		e.watch(h, i, w)
	}
	h.mu.Lock()
	h.granted, h.flag = granted, flag
	h.mu.Unlock()
	e.accounts.begin(l, workers, control.WaitMode(h.spec.WaitMode) != control.WaitMode_WAIT_MODE_WARM, e.now(), h.shared()...)
	if h.wish != nil {
		e.accounts.spent(h.id, h.wish.cpu)
	}
	if _, err := e.table.Grant(h.id); err != nil {
		e.log.Error("cannot grant a lease", "lease", uint64(h.id), "error", err)
	}
	e.audit(caller, identity.AuditGrant, h, l.Terms.Tenant, "", func(line *identity.AuditEntry) { line.Start = startOf(granted) })
	close(h.started)
	e.room.took(l.Terms.Tenant)
	e.changed()
}

// tell logs an event that a lease's tenant has caused. Lines beyond the tenant's limit are counted and dropped.
func (e *Executor) tell(h *holding, level slog.Level, text string, args ...any) {
	if ctx := context.Background(); e.log.Enabled(ctx, level) && e.gate.MayLog(h.tenant) {
		e.log.Log(ctx, level, text, args...)
	}
}

// watch reports to the client, the log and the metrics when worker w of seat i dies while its lease continues.
func (e *Executor) watch(h *holding, i int, w Worker) {
	e.work.Go(func() {
		select {
		case <-w.Done():
		case <-h.cached:
			return
		}
		defer e.turns.enter()()
		if h.died(i, w) {
			return
		}
		x := w.Exit()
		x.Backtrace = e.nameFrames(h.code, x.Backtrace)
		h.announce(i, w.PID(), &x)
		e.metrics.workerDied()
		level := slog.LevelWarn
		if x.Signal == 0 && x.Code == exitClientGone && x.Function == "" {
			level = slog.LevelDebug // the event stream says whether that was on purpose
		}
		e.tell(h, level, "worker ended", "lease", uint64(h.id), "worker", i, "pid", w.PID(), "function", x.Function, "reason", x.Reason)
	})
}

// spawnLimit returns how long starting workers may take for a caller. If they hang, the error that says where must
// reach the caller before it gives up.
func (e *Executor) spawnLimit(caller context.Context) time.Duration {
	limit := e.cfg.Settings.SpawnTimeout
	if end, ok := caller.Deadline(); ok {
		limit = min(limit, max(time.Until(end), 0)*9/10)
	}
	return limit
}

// spawnContext returns the context in which workers of a lease start.
func spawnContext(h *holding, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(h.ctx, limit, fmt.Errorf("timed out after %v", limit.Round(time.Millisecond)))
}

// spawnAll starts all workers of a lease in parallel. If one fails, it stops the others, and none is left when it
// returns.
func (e *Executor) spawnAll(h *holding, blobs [][]byte, limit time.Duration) ([]Worker, error) {
	ctx, cancel := spawnContext(h, limit)
	defer cancel()
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	workers := make([]Worker, len(blobs))
	spawn := func(i int) {
		w, err := e.spawn(ctx, h, i, blobs[i])
		workers[i] = w
		if err != nil {
			once.Do(func() { first = err }) // the others only return that they were cancelled
			cancel()
		}
	}
	for i := range blobs[1:] {
		wg.Go(func() {
			deepen()
			spawn(i + 1)
		})
	}
	spawn(0)
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
	stopAll(ctx, left, killed)
	return nil, first
}

// expectClient lets the data connection of a client reach a worker of provider tcp. Call it before the client gets the worker's blob.
func (e *Executor) expectClient(h *holding, w Worker) error {
	token, ok := dataplane.ChannelToken(w.Blob())
	if !ok {
		return errors.New("the worker's blob is not of provider tcp")
	}
	if h.met != nil {
		w = meeting{w, h.met}
	}
	return e.cfg.Data.Expect(token, fmt.Sprintf("worker with pid %d", w.PID()), w)
}

// spawn starts one worker. The error names the worker and has a class.
func (e *Executor) spawn(ctx context.Context, h *holding, i int, blob []byte) (Worker, error) {
	w, err := e.cfg.Spawner.Spawn(ctx, h.workerSpec(i, blob))
	if err == nil && w.Steps().Unseeded != "" {
		e.unseeded(h, w.Steps().Unseeded)
	}
	if err == nil && h.spec.Provider == dataplane.TCP {
		if err = e.expectClient(h, w); err != nil {
			stopAll(ctx, []Worker{w}, killed)
		}
	}
	if err == nil {
		return w, nil
	}
	e.metrics.startFailed()
	e.tell(h, slog.LevelInfo, "worker did not start", "lease", uint64(h.id), "worker", i, "error", err)
	var known *zygote.WorkerError
	switch {
	case isScarce(err):
		return nil, control.Errorf(control.ClassBusy, "worker %d: %v", i, err)
	case ctx.Err() == nil || errors.As(err, &known):
	case h.ctx.Err() != nil:
		return nil, control.CodeErrorf(control.ClassBusy, codes.Unavailable, "worker %d: not started, because the lease ends or the node drains", i)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, control.Errorf(control.ClassConnection, "worker %d: %v", i, err) // the error says what hung
	}
	return nil, fmt.Errorf("worker %d: %w", i, err)
}

// Spawn starts a worker: see zygote.Zygote.Spawn.
func (z zygoteSpawner) Spawn(ctx context.Context, s zygote.Spec) (Worker, error) {
	w, err := z.Zygote.Spawn(ctx, s)
	if err != nil {
		return nil, err // and not a nil *zygote.Worker in an interface
	}
	return w, nil
}

// isScarce reports whether the node has run out of a resource that every start needs, and may have it again later.
func isScarce(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// replaceGrace is how long a worker that is to be replaced may take to end by itself. Its client may have noticed its
// death before the executor, and then the reason is worth reporting.
const replaceGrace = 100 * time.Millisecond

// Replace starts a new worker for one that died, or that its client cannot reach any more, or adds a worker to a lease that was granted with
// fewer than it asked for. Repeating a request with the same blob returns the same worker.
func (e *Executor) Replace(ctx context.Context, req *control.ReplaceRequest) (*control.ReplaceReply, error) {
	defer e.turns.enter()()
	e.bookClaim(lease.ID(req.GetLeaseId()))
	h, err := e.findFor(ctx, "Replace", lease.ID(req.GetLeaseId()))
	if err != nil {
		return nil, err
	}
	if err := e.checkBlob(req.GetClientBlob(), h.spec.Provider, false); err != nil {
		return nil, control.StatusError(statusBadBlob, fmt.Sprintf("client_blob: %v", err))
	}
	if has := channelsMemory([][]byte{req.GetClientBlob()}); has > h.spec.ChannelMemory {
		return nil, control.StatusError(statusBadBlob, fmt.Sprintf("client_blob: the channel takes %d bytes, the lease has reserved %d", has, h.spec.ChannelMemory))
	}
	if err := e.gate.Take(ctx, quota.Replaces, 1); err != nil {
		return nil, err
	}
	for {
		if ctx.Err() != nil { // do not replace a worker for a caller that has given up
			return nil, control.Errorf(control.ClassConnection, "worker %d of lease %d was being replaced: %v", req.GetWorker(), h.id, context.Cause(ctx))
		}
		c, err := h.claimSeat(req.GetWorker(), req.GetClientBlob())
		switch {
		case err != nil:
			return nil, err
		case c.grant != nil:
			return &control.ReplaceReply{Worker: c.grant}, nil
		case c.old != nil:
			defer h.settle(req.GetWorker())
			return e.replace(ctx, h, req, c.old)
		case c.grow:
			defer h.settle(req.GetWorker())
			return e.grow(ctx, h, req)
		}
		select {
		case <-c.wait:
		case <-ctx.Done():
		}
	}
}

// replace starts a worker in a claimed seat. It is not bound to the caller's context: the replacement is completed, and
// the caller may ask again.
func (e *Executor) replace(caller context.Context, h *holding, req *control.ReplaceRequest, old Worker) (*control.ReplaceReply, error) {
	i, blob := int(req.GetWorker()), req.GetClientBlob()
	ctx, cancel := spawnContext(h, e.spawnLimit(caller))
	defer cancel()
	patience := replaceGrace
	if req.GetKill() {
		patience = 0
	}
	grace := time.NewTimer(patience)
	defer grace.Stop()
	select {
	case <-old.Done():
	case <-grace.C:
		e.tell(h, slog.LevelInfo, "replacing a living worker, because its client asked for it", "lease", uint64(h.id), "worker", i, "pid", old.PID(), "running", old.Running())
		l, _ := e.table.Get(h.id) // an error means that it has ended in the meantime
		e.audit(caller, identity.AuditKill, h, l.Terms.Tenant, "its client asked for another worker", func(line *identity.AuditEntry) { line.Worker = &i })
		old.Kill()
		<-old.Done()
	}
	h.died(i, old)
	w, err := e.spawn(ctx, h, i, blob)
	if err != nil {
		if h.ctx.Err() != nil {
			return nil, h.endingError()
		}
		return nil, grpcError(err)
	}
	grant := h.seatWorker(i, w, blob)
	if grant == nil {
		stopAll(ctx, []Worker{w}, killed)
		return nil, e.ended(h.id)
	}
	e.metrics.started(grant)
	e.accounts.seat(h.id, i, w)
	e.watch(h, i, w)
	return &control.ReplaceReply{Worker: grant}, nil
}
