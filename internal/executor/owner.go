package executor

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"os/user"
	"strconv"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/lease"
)

// refuse counts and logs that a caller may not do something. It returns the error for the caller.
func (e *Executor) refuse(ctx context.Context, method, format string, args ...any) (err error) {
	if e.gate != nil {
		return e.gate.Refuse(ctx, method, format, args...)
	}
	return control.Errorf(control.ClassInvalid, format, args...)
}

// findFor returns the holding of a lease that the caller may use. Another tenant's lease is reported as nonexistent.
func (e *Executor) findFor(ctx context.Context, method string, id lease.ID) (*holding, error) {
	if err := e.mayUse(ctx, method, id); err != nil {
		return nil, err
	}
	return e.find(id)
}

func (e *Executor) mayUse(ctx context.Context, method string, id lease.ID) error {
	who := control.Caller(ctx)
	l, err := e.table.Get(id)
	if err != nil || who.MayUse(l.Terms.Tenant) {
		return nil // the lookup that follows reports a missing lease
	}
	e.refuse(ctx, method, "lease %d belongs to tenant %q and not to %q", uint64(id), l.Terms.Tenant, who.Tenant)
	return grpcError(fmt.Errorf("lease %d: %w", uint64(id), lease.ErrUnknown)) // as the table says it
}

// payer returns the tenant that owns the requested lease and pays for it. asked is the tenant in the request, or empty.
func (e *Executor) payer(ctx context.Context, asked string) (string, error) {
	who := control.Caller(ctx)
	switch {
	case who.Role == identity.RoleOperator:
		return cmp.Or(asked, who.Tenant), nil
	case asked != "" && asked != who.Tenant:
		return "", e.refuse(ctx, "Lease", "%s may lease only for tenant %q, and requested a lease for tenant %q", who.Name, who.Tenant, asked)
	}
	return who.Tenant, nil
}

// nobodysGroup is the group of users that this node does not know.
const nobodysGroup = 65534

// firstGroup is the first id of ordinary groups. usersGroup is below it, but is the group of all users on many systems.
const firstGroup, usersGroup = 1000, 100

// groupOf returns the group of a user's worker: the user's own group on this node, or nobodysGroup if that is a system
// group.
func groupOf(uid uint32) uint32 {
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return nobodysGroup
	}
	if gid, err := strconv.ParseUint(u.Gid, 10, 32); err == nil && (gid >= firstGroup || gid == usersGroup) {
		return uint32(gid)
	}
	return nobodysGroup
}

// codeOwner returns the owner of the libraries that a caller may use; "" for the libraries of all owners.
func codeOwner(ctx context.Context) string {
	who := control.Caller(ctx)
	if who.Role == identity.RoleOperator {
		return ""
	}
	return "tenant " + who.Tenant
}

// scoped returns a different id for each tenant that uses the same request id, so that no tenant finds another's grant by its id. The ids of
// operators stay as they are.
func scoped(rid lease.RequestID, who *identity.Identity) lease.RequestID {
	if who.Role == identity.RoleOperator {
		return rid
	}
	sum := sha256.Sum256(append([]byte(who.Tenant+"\x00"), rid[:]...))
	return lease.RequestID(sum[:len(rid)])
}
