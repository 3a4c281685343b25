package executor

import (
	"context"
	"slices"
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
	firstFor    = time.Second / 2 // room.firstFor
	yieldFor    = 2 * time.Second // after this, unless the tenant gets a lease, growth goes first
	yieldAgain  = time.Minute     // until this has passed from when the tenant first held it up
)

// room wakes the streams of clients that wait for room, and knows what they wait for. Clients of one tenant that wait for new leases are told of room
// in the order in which they came. A client for which there is too little room does not hold up later ones.
type room struct {
	info func() *control.InfoReply

	mu       sync.Mutex
	firstFor time.Duration // how long a client that was told of room, and does not take it, keeps later ones of its tenant from it
	next     chan struct{} // of growing leases: closed at the next change; nil: no stream waits
	queue    []*waiting    // clients that wait for new leases, the first one first
	tenants  map[string]*waiter
}

// waiting is a client that waits for a new lease.
type waiting struct {
	need    *control.RoomRequest
	of      *waiter
	counted bool
	told    chan struct{} // capacity 1: it is the client's turn
	since   time.Time     // when it was told first
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

// notify tells all growing leases, and the clients whose turn it is. The caller does not hold the executor's mutex.
func (r *room) notify() {
	r.mu.Lock()
	if r.next != nil {
		close(r.next)
		r.next = nil
	}
	empty := len(r.queue) == 0
	r.mu.Unlock()
	if !empty {
		r.tellNext()
	}
}

// tellNext tells the clients whose turn it is.
func (r *room) tellNext() {
	i := r.info()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turns(i, r.tell)
}

// tell tells a client that it is its turn. The caller holds mu.
func (r *room) tell(c *waiting) {
	select {
	case c.told <- struct{}{}:
	default: // it has not been woken yet
	}
	if c.since.IsZero() {
		c.since = time.Now()
		time.AfterFunc(r.firstFor, r.tellNext)
	}
}

// turns calls do for each client that finds room beside the earlier clients of its tenant for which there is room. The caller holds mu.
func (r *room) turns(i *control.InfoReply, do func(*waiting)) {
	if i.GetDraining() {
		return
	}
	type free struct {
		cores  uint32
		memory uint64
	}
	left := map[*waiter]free{}
	for _, c := range r.queue {
		f, known := left[c.of]
		if !known {
			f = free{i.GetFreeCores(), i.GetFreeMemoryBytes()}
		}
		if c.need.GetCores() > f.cores || c.need.GetMemoryBytes() > f.memory {
			continue
		}
		do(c)
		if c.since.IsZero() || time.Since(c.since) < r.firstFor {
			left[c.of] = free{f.cores - c.need.GetCores(), f.memory - c.need.GetMemoryBytes()}
		}
	}
}

// wait records that a client waits for a new lease, and reports whether it is its turn at once. The caller calls done when it does not wait any more.
func (r *room) wait(tenant string, req *control.RoomRequest) (c *waiting, now bool, done func()) {
	i := r.info()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tenants == nil {
		r.tenants = map[string]*waiter{}
	}
	w := r.tenants[tenant]
	if w == nil {
		w = &waiter{}
		r.tenants[tenant] = w // stays, so that a client that comes again holds nothing up for longer
	}
	c = &waiting{need: req, of: w, counted: w.clients < waitingMost, told: make(chan struct{}, 1)}
	if c.counted {
		w.clients++
	}
	r.queue = append(r.queue, c)
	r.turns(i, func(one *waiting) {
		if one == c {
			r.tell(c)
		}
	})
	select {
	case <-c.told:
		now = true
	default:
	}
	return c, now, func() {
		r.mu.Lock()
		if c.counted {
			w.clients--
		}
		r.queue = slices.DeleteFunc(r.queue, func(one *waiting) bool { return one == c })
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
	for _, c := range r.queue {
		need := c.need
		fits := c.counted && need.GetCores() <= i.GetFreeCores() && need.GetMemoryBytes() <= i.GetFreeMemoryBytes()
		beside := fits && req.GetCores() <= i.GetFreeCores()-need.GetCores() && req.GetMemoryBytes() <= i.GetFreeMemoryBytes()-need.GetMemoryBytes()
		if fits && !beside && r.yields(c.of) {
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

// Room tells a client when this executor may have room for its request. Clients that wait for new leases are told in their turn.
func (e *Executor) Room(req *control.RoomRequest, stream grpc.ServerStreamingServer[control.RoomReply]) error {
	closing := control.Closing(stream.Context())
	if req.GetGrowing() {
		for first := true; ; first = false {
			changes := e.room.changes() // before looking, so that no change is missed
			if err := reportRoom(stream, e.roomFor(req), first); err != nil || !awaitChange(stream.Context(), closing, changes) {
				return err
			}
		}
	}
	tenant := ""
	if who := control.Caller(stream.Context()); who.Role != identity.RoleOperator { // an operator may ask for any tenant
		tenant = who.Tenant
	}
	c, now, done := e.room.wait(tenant, req)
	defer done()
	e.claims.revokeSoon(func(other string) bool { return tenant != "" && other != tenant })
	err := reportRoom(stream, now, true)
	for err == nil && awaitChange(stream.Context(), closing, c.told) {
		err = reportRoom(stream, e.roomFor(req), false)
	}
	return err
}

// reportRoom sends a report of room. There is one of no room only at first.
func reportRoom(stream grpc.ServerStreamingServer[control.RoomReply], has, first bool) error {
	if !has && !first {
		return nil
	}
	return stream.Send(&control.RoomReply{Room: has})
}

// awaitChange returns false when the stream or the connection ends.
func awaitChange(ctx, closing context.Context, changes <-chan struct{}) bool {
	select {
	case <-changes:
		return true
	case <-closing.Done():
	case <-ctx.Done():
	}
	return false
}
