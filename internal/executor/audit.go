package executor

import (
	"cmp"
	"context"
	"encoding/hex"
	"slices"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/lease"
)

// audit records an event of a lease, and the caller if ctx is that of a call.
func (e *Executor) audit(ctx context.Context, event string, h *holding, tenant, reason string, more func(*identity.AuditEntry)) {
	line := identity.AuditEntry{Event: event, Lease: uint64(h.id), Tenant: tenant, Who: control.Caller(ctx).Name, Remote: control.Remote(ctx),
		Code: hex.EncodeToString(h.code.sum[:]), Reason: reason}
	if h.spec.UID != 0 {
		line.UID = &h.spec.UID
	}
	h.mu.Lock()
	for i := range h.seats {
		line.Cores = append(line.Cores, h.seats[i].cpus...)
	}
	h.mu.Unlock()
	line.Workers = h.present()
	line.MemoryBytes = h.spec.MemoryLimit * uint64(line.Workers)
	if more != nil {
		more(&line)
	}
	e.gate.Audit().Write(line)
}

// startOf returns how the workers of a lease started. If they differ, the first of board.StartNames that occurred counts.
func startOf(granted []*control.WorkerGrant) string {
	for _, path := range board.StartNames[:] {
		if slices.ContainsFunc(granted, func(g *control.WorkerGrant) bool { return pathOf(g.GetStart()) == path }) {
			return path
		}
	}
	return pathOf(control.StartPath_START_PATH_CACHED)
}

// auditEnd records the end of a lease.
func (e *Executor) auditEnd(ctx context.Context, h *holding, l *lease.Lease, reason string) {
	event := identity.AuditKill
	switch l.State {
	case lease.Released:
		event, reason = identity.AuditRelease, cmp.Or(reason, "by its client")
	case lease.Drained:
		event = identity.AuditDrain
	}
	e.audit(ctx, event, h, l.Terms.Tenant, reason, func(line *identity.AuditEntry) { line.State = l.State.String() })
}
