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
	"github.com/rfaas-go/rfaas/internal/identity"
)

// owner is who made a registration: the holder of a node certificate, or an operator. Only the owner may report, attach, reserve for,
// charge under and deregister what it has registered; an operator may for everybody.
type owner struct {
	name  string
	bound *identity.Identity // by a node's certificate, which limits the addresses; nil: an operator
}

// ownerOf is the caller as an owner. Calls outside of a gate, in tests, have an owner without a name.
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

// may says whether the owner may act for what another owner has registered.
func (o *owner) may(name string) bool { return o.name == name || o.operator() }

func (o *owner) operator() bool { return o.bound == nil && o.name == "operator" }

// claim is the owner's to an incarnation.
func (o *owner) claim(incarnation [16]byte) accounting.Claim {
	return accounting.Claim{Incarnation: incarnation, Owner: o.name, Any: o.operator()}
}

// mayRegister says why the owner may not register an address: a node may register those that its certificate is for.
func (o *owner) mayRegister(address string) error {
	if o.bound == nil {
		return nil
	}
	a, err := control.ParseAddress(address)
	if err == nil && a.Network == "unix" {
		err = errors.New("a unix socket is on no other node")
	}
	if err == nil {
		err = o.bound.Covers(a.Target)
	}
	return err
}

// refusal is why a node's call was refused, for metrics.
type refusal int

const (
	refusedAddress refusal = iota // the certificate is not for it
	refusedOwner                  // what another one has registered
	refusedQuota                  // more than a node may have
	numRefusals
)

var refusalNames = [numRefusals]string{"address", "owner", "quota"}

type refusals [numRefusals]atomic.Uint64

// refuse counts and writes down why a caller may not do something; err is what it is told.
func (m *Manager) refuse(ctx context.Context, why refusal, method, format string, args ...any) error {
	m.refusals[why].Add(1)
	if m.gate != nil {
		return m.gate.Refuse(ctx, method, format, args...)
	}
	return control.Errorf(control.ClassInvalid, format, args...)
}

// errOwner is that a registration is another owner's.
var errOwner = errors.New("registered by another owner")

// answer classes an error of the table for the caller of a method.
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

// errQuota is that a node has as much as one node may have.
var errQuota = errors.New("quota of a node")

// registerEvery is how often a node that has used up its burst, which is as many as it may have at a time, may register another incarnation.
const registerEvery = 10 * time.Second

// registrationBytes is what a registration takes of the manager's memory, about, without what is attached.
const registrationBytes = board.LineSize + 2*board.IdentitySize

// attachmentBytes is what an executor takes that reaches its line and cells.
func attachmentBytes(cores uint32) uint64 {
	const entry = 2*accounting.CellSize + 8 // the cell, what is merged of it, and the word of what is held
	return uint64(cellsFor(cores)) * entry
}

// quotas bound what each node has of the manager: registrations at a time, how often it makes new ones, and memory. Operators have no
// bound. Safe for concurrent use.
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
	burst         int       // registrations that it may make at once
	since         time.Time // of burst
}

func newQuotas(registrations int, bytes uint64, now func() time.Time) *quotas {
	return &quotas{registrations: registrations, bytes: bytes, now: now, of: map[string]*share{}}
}

// find is an owner's share. Under the lock.
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

// register takes a registration; give gives it back.
func (q *quotas) register(o *owner) error {
	if o.bound == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	has := q.find(o.name)
	switch {
	case has.registrations >= q.registrations:
		return fmt.Errorf("%w: %s has %d executors registered, which is all that node-executors permits", errQuota, o.name, has.registrations)
	case has.burst == 0:
		return fmt.Errorf("%w: %s registers executors more often than every %v", errQuota, o.name, registerEvery)
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
		return fmt.Errorf("%w: %s has %d bytes of the resource manager's memory and wants %d more, node-memory permits %d", errQuota, o.name,
			has.bytes, bytes, q.bytes)
	}
	has.bytes += bytes
	return nil
}

// attach takes memory; give gives it back.
func (q *quotas) attach(o *owner, bytes uint64) error {
	if o.bound == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.find(o.name).take(q, o, bytes)
}

// give gives back what an owner had. An owner that has nothing left and whose burst is whole is forgotten.
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
