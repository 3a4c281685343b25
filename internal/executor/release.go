package executor

import (
	"context"
	"time"
	"unicode/utf8"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/lease"
)

// Release ends a lease. It blocks until its workers are reaped or cached and its cores are free.
func (e *Executor) Release(ctx context.Context, req *control.ReleaseRequest) (*control.ReleaseReply, error) {
	defer e.turns.enter()()
	id := lease.ID(req.GetLeaseId())
	if over, err := e.mayEnd(ctx, "Release", id, "by its client"); over || err != nil {
		return &control.ReleaseReply{}, err
	}
	how, reason := lease.Released, ""
	if req.GetFinish() && e.isDraining() {
		how, reason = lease.Drained, drainReason
	}
	if e.dropCached(id) { // the lease was released before: end its cached workers
		return &control.ReleaseReply{}, nil
	}
	h, err := e.beginEnd(ctx, id, how, reason)
	if err != nil {
		return nil, grpcError(err)
	}
	if req.GetKeep() && !req.GetFinish() {
		if reply := e.keep(ctx, h, req.GetClaims(), req.GetClaimant()); reply != nil {
			return reply, nil
		}
	}
	// Independent of the caller's context.
	ctx, cancel := context.WithTimeout(context.Background(), releaseGrace)
	ending := stopped
	if req.GetFinish() {
		cancel()
		ctx, cancel = e.finishContext()
		ending = finished
	}
	defer cancel()
	e.finishEnd(ctx, h, ending)
	return &control.ReleaseReply{}, nil
}

// mayEnd returns an error if the caller may not end a lease. If the lease is not granted yet, mayEnd ends it and returns true.
func (e *Executor) mayEnd(ctx context.Context, method string, id lease.ID, reason string) (over bool, err error) {
	if err := e.mayUse(ctx, method, id); err != nil {
		return false, err
	}
	if e.stopStart(ctx, id, reason) { // before bookClaim, which waits for the start
		return true, nil
	}
	e.bookClaim(id)
	return false, e.mayUse(ctx, method, id) // the lease may be known only now
}

// stopStart ends a lease that is not granted yet, because its seed is being made or its workers are being started. It returns false if the lease is
// not in this state, or was granted in the meantime. When it returns true, the lease's cores are free.
func (e *Executor) stopStart(ctx context.Context, id lease.ID, reason string) bool {
	l, err := e.table.Get(id)
	h := e.holding(id)
	if err != nil || l.State != lease.Requested || h == nil {
		return false
	}
	h.cancel()
	if _, err := e.table.Wait(context.Background(), l); err == nil {
		return false
	}
	<-h.gone
	e.audit(ctx, identity.AuditKill, h, l.Terms.Tenant, reason, func(line *identity.AuditEntry) { line.State = l.State.String() })
	return true
}

// duration checks a duration of a request; nil means the default. 0 is an error and not the default.
func (e *Executor) duration(ms *uint64, def time.Duration) (time.Duration, error) {
	longest := e.cfg.Settings.LeaseMax
	switch {
	case ms == nil:
		return e.back.before(def, e.now()), nil
	case *ms == 0 || *ms > uint64(longest/time.Millisecond):
		return 0, invalidf("duration_ms %d (option duration_ns; in Go, Duration): this executor permits 1 to %d ms (%v). Without the option it grants %v", *ms,
			longest.Milliseconds(), longest, def)
	}
	return e.back.before(time.Duration(*ms)*time.Millisecond, e.now()), nil
}

// Renew renews a lease.
func (e *Executor) Renew(ctx context.Context, req *control.RenewRequest) (*control.RenewReply, error) {
	defer e.turns.enter()()
	e.bookClaim(lease.ID(req.GetLeaseId()))
	h, err := e.findFor(ctx, "Renew", lease.ID(req.GetLeaseId()))
	if err != nil {
		return nil, err
	}
	l, err := e.table.Get(h.id)
	if err != nil {
		return nil, grpcError(err)
	}
	d, err := e.duration(req.DurationMs, l.Terms.Duration)
	if err != nil {
		return nil, err
	}
	if l, err = e.table.Renew(h.id, d); err != nil {
		return nil, grpcError(err)
	}
	h.renewed()
	e.log.Debug("lease renewed", "lease", uint64(h.id), "until", l.Expires, "tenant", l.Terms.Tenant)
	now := e.now()
	return &control.RenewReply{DurationMs: milliseconds(l.Expires.Sub(now)), ClientMs: milliseconds(l.ClientEnd.Sub(now))}, nil
}

// milliseconds returns a remaining time, rounded down.
func milliseconds(d time.Duration) uint64 { return uint64(max(d, 0) / time.Millisecond) }

// Leases returns the leases that have resources and that the caller may see.
func (e *Executor) Leases(ctx context.Context, _ *control.LeasesRequest) (*control.LeasesReply, error) {
	now := e.now()
	reply := &control.LeasesReply{}
	who := control.Caller(ctx)
	for _, l := range e.table.List() {
		if !who.MayUse(l.Terms.Tenant) {
			continue
		}
		entry := &control.LeaseEntry{LeaseId: uint64(l.ID), Tenant: l.Terms.Tenant, State: l.State.String(),
			Workers: uint32(l.Present()), WorkersWanted: uint32(l.Terms.Workers), MemoryBytes: l.Terms.MemoryPerWorker * uint64(l.Present())}
		for _, w := range l.CPUs {
			for _, cpu := range w {
				entry.Cpus = append(entry.Cpus, uint32(cpu))
			}
		}
		if h := e.holding(l.ID); h != nil {
			h.mu.Lock()
			entry.Flag = h.flag
			h.mu.Unlock()
		}
		if !l.Granted.IsZero() {
			entry.AgeMs, entry.LeftMs = milliseconds(now.Sub(l.Granted)), milliseconds(l.Expires.Sub(now))
		}
		reply.Leases = append(reply.Leases, entry)
	}
	return reply, nil
}

// maxReason bounds the reason that a caller gives, in bytes.
const maxReason = 200

func checkReason(reason, def string) (string, error) {
	switch {
	case reason == "":
		return def, nil
	case len(reason) > maxReason || !utf8.ValidString(reason):
		return "", invalidf("reason has %d bytes, want at most %d of UTF-8", len(reason), maxReason)
	}
	return reason, nil
}

// Revoke ends a lease at once. A tenant may revoke its own leases, an operator all. An operator's request also ends all cached workers and spare
// workers of the lease's tenant, which the tenant could otherwise claim next. It blocks until the workers are reaped and the cores are free.
func (e *Executor) Revoke(ctx context.Context, req *control.RevokeRequest) (*control.RevokeReply, error) {
	defer e.turns.enter()()
	by, operator := "by its tenant", control.Caller(ctx).Role == identity.RoleOperator
	if operator {
		by = "by an operator"
	}
	reason, err := checkReason(req.GetReason(), by)
	if err != nil {
		return nil, err
	}
	id := lease.ID(req.GetLeaseId())
	if operator {
		e.claims.collect() // the lease may be claimed and not booked yet
		if l, err := e.table.Get(id); err == nil {
			// First, because the tenant can claim cached workers while this call waits; and last, because its requests may have cached more.
			e.dropCachedOf(l.Terms.Tenant)
			defer e.dropCachedOf(l.Terms.Tenant)
		}
	}
	if over, err := e.mayEnd(ctx, "Revoke", id, reason); over || err != nil {
		return &control.RevokeReply{}, err
	}
	h, err := e.beginEnd(ctx, id, lease.Revoked, reason)
	if err != nil {
		return nil, grpcError(err)
	}
	e.finishEnd(context.Background(), h, killed)
	return &control.RevokeReply{}, nil
}

// maxGrace bounds an operator's grace.
const maxGrace = 24 * time.Hour

// Drain makes the executor drain and end, as SIGTERM does. It returns at once.
func (e *Executor) Drain(_ context.Context, req *control.DrainRequest) (*control.DrainReply, error) {
	reason, err := checkReason(req.GetReason(), drainReason)
	if err != nil {
		return nil, err
	}
	grace := e.cfg.Settings.Grace
	if ms := req.GetGraceMs(); ms != 0 {
		if ms > uint64(maxGrace/time.Millisecond) {
			return nil, invalidf("grace_ms %d: want at most %d (%v)", ms, maxGrace.Milliseconds(), maxGrace)
		}
		grace = time.Duration(ms) * time.Millisecond
	}
	defer e.turns.enter()() // a handover that has begun would forget the request
	select {
	case e.asked <- drainRequest{grace, reason}:
	default: // a drain was already requested
	}
	return &control.DrainReply{}, nil
}
