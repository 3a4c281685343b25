package manager

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// owner is the party that made a registration: a node, identified by its certificate, or an operator. Only the owner
// may report, attach, reserve, charge and deregister for an executor that it has registered. An operator may do so for
// all executors.
type owner struct {
	name  string
	bound *identity.Identity // from a node's certificate, which limits the addresses; nil: an operator
}

// ownerOf returns the caller as an owner. In tests, calls outside of a gate have an owner without a name.
func ownerOf(ctx context.Context) owner {
	switch who := control.Caller(ctx); who.Role {
	case identity.RoleOperator:
		return owner{name: "operator"}
	case identity.RoleNode:
		return owner{who.Name, who}
	default:
		return owner{name: who.Name}
	}
}

// may reports whether the owner may act for a registration of the owner with that name.
func (o *owner) may(name string) bool { return o.name == name || o.operator() }

func (o *owner) operator() bool { return o.bound == nil && o.name == "operator" }

// claim returns the owner's claim to an incarnation.
func (o *owner) claim(incarnation [16]byte) accounting.Claim {
	return accounting.Claim{Incarnation: incarnation, Owner: o.name, Any: o.operator()}
}

// mayRegister returns an error if the owner may not register an address. A node may register the addresses that its
// certificate is for.
func (o *owner) mayRegister(address string) error {
	if o.bound == nil {
		return nil
	}
	a, err := control.ParseAddress(address)
	if err == nil && a.Network == "unix" {
		err = errors.New("a unix socket cannot be reached from other nodes")
	}
	if err == nil {
		err = o.bound.Covers(a.Target)
	}
	return err
}

// refusal is why a node's call was refused, for metrics.
type refusal int

const (
	refusedAddress refusal = iota // the certificate is not for the address
	refusedOwner                  // another owner has registered the executor
	refusedQuota                  // beyond the quota of a node
	numRefusals
)

var refusalNames = [numRefusals]string{"address", "owner", "quota"}

type refusals [numRefusals]atomic.Uint64

// refuse counts and audits the refusal of a call, and returns the error for the caller.
func (m *Manager) refuse(ctx context.Context, why refusal, method, format string, args ...any) error {
	m.refusals[why].Add(1)
	if m.gate != nil {
		return m.gate.Refuse(ctx, method, format, args...)
	}
	return control.Errorf(control.ClassInvalid, format, args...)
}

// errOwner means that a registration belongs to another owner.
var errOwner = errors.New("registered by another owner")

// answer returns the caller's error for an error of the table.
func (m *Manager) answer(ctx context.Context, method string, err error) error {
	switch {
	case errors.Is(err, errOwner), errors.Is(err, accounting.ErrOwner):
		return m.refuse(ctx, refusedOwner, method, "%v; the caller is %s", err, ownerOf(ctx).name)
	case errors.Is(err, errQuota):
		m.refusals[refusedQuota].Add(1)
		return control.Errorf(control.ClassBusy, "%v", err)
	case errors.Is(err, board.ErrFull):
		return control.Errorf(control.ClassBusy, "%v", err)
	}
	return controlError(err)
}

// errQuota means that a node has used up its quota.
var errQuota = errors.New("node quota exceeded")

// registerEvery is how often a node may register another incarnation after it has used up its burst. The burst is the
// number that it may have registered at a time.
const registerEvery = 10 * time.Second

// registrationBytes is about how much of the manager's memory a registration uses, without attached memory.
const registrationBytes = board.LineSize + 2*board.IdentitySize

// attachmentBytes returns how much memory an executor uses that is attached by a provider.
func attachmentBytes(provider string, cores uint32) uint64 {
	const entry = 2*accounting.CellSize + 8 // the cell, its merged copy, and the word of reserved cores
	bytes := uint64(cellsFor(cores))*entry + board.StatsSize
	if provider == dataplane.TCP {
		bytes += dataplane.ConnTCPBytes
	}
	return bytes
}

// quotas limits what each node uses of the manager: current registrations, the rate of new ones, and memory. Operators
// have no limits. It is safe for concurrent use.
type quotas struct {
	registrations int
	bytes         uint64
	now           func() time.Time

	mu sync.Mutex
	of map[string]*share
}

type share struct {
	registrations int
	bytes         uint64
	burst         int       // registrations that it may make now
	since         time.Time // when burst was last increased
}

func newQuotas(registrations int, bytes uint64, now func() time.Time) *quotas {
	return &quotas{registrations: registrations, bytes: bytes, now: now, of: map[string]*share{}}
}

// find returns an owner's share. The caller holds the lock.
func (q *quotas) find(name string) *share {
	o := q.of[name]
	if o == nil {
		o = &share{burst: q.registrations, since: q.now()}
		q.of[name] = o
	}
	if n := int(q.now().Sub(o.since) / registerEvery); n > 0 {
		o.since = o.since.Add(time.Duration(n) * registerEvery)
		o.burst = min(o.burst+n, q.registrations)
	}
	return o
}

// register counts a registration until give is called. The error is errQuota.
func (q *quotas) register(o *owner) error {
	if o.bound == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	has := q.find(o.name)
	switch {
	case has.registrations >= q.registrations:
		return fmt.Errorf("%w: %s has %d executors registered, the limit of node-executors", errQuota, o.name, has.registrations)
	case has.burst == 0:
		return fmt.Errorf("%w: %s registers new executors more often than once every %v", errQuota, o.name, registerEvery)
	}
	if err := has.take(q, o, registrationBytes); err != nil {
		return err
	}
	has.registrations++
	has.burst--
	return nil
}

func (has *share) take(q *quotas, o *owner, bytes uint64) error {
	if has.bytes+bytes > q.bytes {
		return fmt.Errorf("%w: %s uses %d bytes of the resource manager's memory and needs %d more, but node-memory is %d", errQuota, o.name,
			has.bytes, bytes, q.bytes)
	}
	has.bytes += bytes
	return nil
}

// attach counts memory until give is called. The error is errQuota.
func (q *quotas) attach(o *owner, bytes uint64) error {
	if o.bound == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.find(o.name).take(q, o, bytes)
}

// give returns registrations and memory. An owner with nothing left and a full burst is forgotten.
func (q *quotas) give(o *owner, registrations int, bytes uint64) {
	if o.bound == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	has := q.find(o.name)
	has.registrations -= registrations
	has.bytes -= bytes
	if has.registrations == 0 && has.bytes == 0 && has.burst == q.registrations {
		delete(q.of, o.name)
	}
}
