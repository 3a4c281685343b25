package executor

import (
	"sync"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

// room wakes the streams of clients that wait for room.
type room struct {
	mu   sync.Mutex
	next chan struct{} // closed at the next change; nil: no stream waits
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

// changed tells the resource manager and the clients that wait for room that resources were taken or have become free. It does
// not block.
func (e *Executor) changed() {
	e.report()
	e.room.notify()
}

// Room tells a client when this executor may have room for its request.
func (e *Executor) Room(req *control.RoomRequest, stream grpc.ServerStreamingServer[control.RoomReply]) error {
	closing := control.Closing(stream.Context())
	for first := true; ; first = false {
		changes := e.room.changes() // before looking, so that no change is missed
		i := e.info()
		has := !i.GetDraining() && i.GetFreeCores() >= req.GetCores() && i.GetFreeMemoryBytes() >= req.GetMemoryBytes()
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
