package executor

import (
	"sync"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

// room wakes the streams of clients that wait for room, and knows what they wait for.
type room struct {
	mu      sync.Mutex
	next    chan struct{}                     // closed at the next change; nil: no stream waits
	waiting map[*control.RoomRequest]struct{} // of clients that wait for new leases
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
func (r *room) wait(req *control.RoomRequest) (done func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting == nil {
		r.waiting = map[*control.RoomRequest]struct{}{}
	}
	r.waiting[req] = struct{}{}
	return func() {
		r.mu.Lock()
		delete(r.waiting, req)
		r.mu.Unlock()
		r.notify()
	}
}

// leaves reports whether every client that waits for a new lease would still find room for it beside the resources of req. Clients that
// want more than there is in all do not count.
func (r *room) leaves(i *control.InfoReply, req *control.RoomRequest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.waiting {
		possible := w.GetCores() <= i.GetCores() && w.GetMemoryBytes() <= i.GetMemoryBytes()
		fits := uint64(w.GetCores())+uint64(req.GetCores()) <= uint64(i.GetFreeCores()) &&
			w.GetMemoryBytes() <= i.GetFreeMemoryBytes() && req.GetMemoryBytes() <= i.GetFreeMemoryBytes()-w.GetMemoryBytes()
		if possible && !fits {
			return false
		}
	}
	return true
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
		defer e.room.wait(req)()
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
