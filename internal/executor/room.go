package executor

import (
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// What clients of one tenant that wait for leases can hold up: the growth of leases of any tenant. A client asks for its lease within 0.5 s of a
// report of room.
const (
	waitingMost = 16              // clients that are counted, the first ones
	yieldFor    = 2 * time.Second // after this, unless the tenant gets a lease, growth goes first
	yieldAgain  = time.Minute     // until this has passed from when the tenant first held it up
)

// room wakes the streams of clients that wait for room, and knows what they wait for.
type room struct {
	mu      sync.Mutex
	next    chan struct{}                    // closed at the next change; nil: no stream waits
	waiting map[*control.RoomRequest]*waiter // of clients that wait for new leases
	tenants map[string]*waiter
}

// waiter is a tenant whose clients wait for new leases, or have done so.
type waiter struct {
	clients int       // that are counted
	since   time.Time // when growth began to yield to them; zero: it has not since the tenant got a lease
}

// changes returns a channel that is closed at the next change.
func (r *room) changes() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next == nil {
		r.next = make(chan struct{})
	}
	return r.next
}

func (r *room) notify() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next != nil {
		close(r.next)
		r.next = nil
	}
}

// wait records that a client waits for a new lease. The caller calls done when it does not wait any more.
func (r *room) wait(tenant string, req *control.RoomRequest) (done func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting == nil {
		r.waiting, r.tenants = map[*control.RoomRequest]*waiter{}, map[string]*waiter{}
	}
	w := r.tenants[tenant]
	if w == nil {
		w = &waiter{}
		r.tenants[tenant] = w // stays, so that a client that comes again holds nothing up for longer
	}
	if w.clients == waitingMost {
		return func() {}
	}
	w.clients++
	r.waiting[req] = w
	return func() {
		r.mu.Lock()
		w.clients--
		delete(r.waiting, req)
		r.mu.Unlock()
		r.notify()
	}
}

// othersWait reports whether a client of another tenant waits for a new lease.
func (r *room) othersWait(tenant string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, w := range r.tenants {
		if name != "" && name != tenant && w.clients > 0 {
			return true
		}
	}
	return false
}

// took notes that a tenant has got a lease.
func (r *room) took(tenant string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w := r.tenants[tenant]; w != nil {
		w.since = time.Time{}
	}
}

// leaves reports whether every client for whose new lease there is room would still find it beside the resources of req. Clients for which
// there is none do not count: they may wait for what the growing lease holds.
func (r *room) leaves(i *control.InfoReply, req *control.RoomRequest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for need, w := range r.waiting {
		fits := need.GetCores() <= i.GetFreeCores() && need.GetMemoryBytes() <= i.GetFreeMemoryBytes()
		beside := fits && req.GetCores() <= i.GetFreeCores()-need.GetCores() && req.GetMemoryBytes() <= i.GetFreeMemoryBytes()-need.GetMemoryBytes()
		if fits && !beside && r.yields(w) {
			return false
		}
	}
	return true
}

// yields reports whether growth yields to the clients of w at present. The caller holds mu.
func (r *room) yields(w *waiter) bool {
	now := time.Now()
	if now.Sub(w.since) >= yieldAgain {
		w.since = now
		time.AfterFunc(yieldFor, r.notify)
	}
	return now.Sub(w.since) < yieldFor
}

// changed tells the resource manager and the clients that wait for room that resources were taken or have become free. It does
// not block.
func (e *Executor) changed() {
	e.report()
	e.room.notify()
}

// roomFor reports whether this executor may have room for a request.
func (e *Executor) roomFor(req *control.RoomRequest) bool {
	i := e.info()
	return !i.GetDraining() && i.GetFreeCores() >= req.GetCores() && i.GetFreeMemoryBytes() >= req.GetMemoryBytes() &&
		(!req.GetGrowing() || e.room.leaves(i, req))
}

// Room tells a client when this executor may have room for its request.
func (e *Executor) Room(req *control.RoomRequest, stream grpc.ServerStreamingServer[control.RoomReply]) error {
	closing := control.Closing(stream.Context())
	if !req.GetGrowing() {
		waits := ""
		if who := control.Caller(stream.Context()); who.Role != identity.RoleOperator { // an operator may ask for any tenant
			waits = who.Tenant
		}
		defer e.room.wait(waits, req)()
		e.claims.revokeSoon(func(tenant string) bool { return waits != "" && tenant != waits })
	}
	for first := true; ; first = false {
		changes := e.room.changes() // before looking, so that no change is missed
		has := e.roomFor(req)
		if first || has {
			if err := stream.Send(&control.RoomReply{Room: has}); err != nil {
				return err
			}
		}
		select {
		case <-changes:
		case <-closing.Done():
			return nil
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}
