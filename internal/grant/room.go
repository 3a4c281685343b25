package grant

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// roomMost is how many executors a waiting lease follows.
const roomMost = 16

// roomStreams is how many streams the waiting leases of all clients have to one executor. The executor limits the streams of a connection, and releases
// need some, too. Other leases wait for a stream, in the order in which they came. If they asked at intervals instead, they would be served before earlier
// ones, and every request would make the executor end cached workers that an earlier lease is about to claim. A lease that needs less than all leases
// with streams asks at intervals, because there may be room for it only.
const roomStreams = 128

// roomLook is the interval at which a waiting lease looks for room even if it follows every executor that it could use. Nothing announces that
// a tenant is below a limit again.
const roomLook = 2 * time.Second

// Rooms follows executors for a request that waits for room. One goroutine uses it.
type Rooms struct {
	c      *shared
	need   control.RoomRequest
	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup
	news   chan struct{} // capacity 1: room or lost has changed

	mu       sync.Mutex
	followed map[string]bool
	room     bool // an executor has reported room since the last Await
	lost     bool // a stream has ended since then
	queued   int  // of the followed executors, those to which it has no stream yet
}

// followers are the waiting leases that follow an executor.
type followers struct {
	streams []*Rooms
	queue   []follower // the first one gets the next stream
}

// follower is a lease that waits for a stream.
type follower struct {
	*Rooms
	turn chan<- struct{} // closed when it has the stream
}

func (c *shared) rooms(ctx context.Context, cores, memory uint64) *Rooms {
	r := &Rooms{c: c, need: control.RoomRequest{Cores: uint32(min(cores, 1<<32-1)), MemoryBytes: memory}, news: make(chan struct{}, 1),
		followed: map[string]bool{}}
	r.ctx, r.cancel = context.WithCancel(ctx)
	return r
}

// Rooms returns what a pending lease follows while it waits. The caller closes it.
func (p *Pending) Rooms(ctx context.Context) *Rooms {
	return p.c.rooms(ctx, uint64(p.spec.least())*uint64(p.spec.CoresPerWorker), uint64(p.spec.least())*p.spec.Memory)
}

// Impossible reports whether err, returned by Look, means that the only executor allowed for the lease can never grant it.
func (p *Pending) Impossible(err error) bool {
	return cmp.Or(p.spec.Executor, p.c.opts.Executor) != "" && errors.Is(err, dataplane.ErrInvalid)
}

// Follow makes r follow the executors that could grant the lease. It returns false if r cannot follow all of them.
func (p *Pending) Follow(_ context.Context, r *Rooms) bool {
	if at := cmp.Or(p.spec.only(), p.c.opts.Executor); at != "" {
		return r.follow(at)
	}
	return r.followAll(p.candidates)
}

// Spreading is a search for room for several leases (Spread).
type Spreading struct {
	c    *Control
	spec Spec // of one worker
}

// Spreading returns what a search with the terms s follows while it waits.
func (c *Control) Spreading(s Spec) *Spreading {
	s.Workers, s.CoresPerWorker = 1, max(s.CoresPerWorker, 1)
	return &Spreading{c, s}
}

// Rooms is like Pending.Rooms.
func (s *Spreading) Rooms(ctx context.Context) *Rooms {
	return s.c.rooms(ctx, uint64(s.spec.CoresPerWorker), s.spec.Memory)
}

// Follow is like Pending.Follow. It asks the manager for its list.
func (s *Spreading) Follow(ctx context.Context, r *Rooms) bool {
	ctx, cancel := s.c.bound(ctx)
	defer cancel()
	found, _, err := s.c.candidates(ctx, &s.spec)
	return err == nil && r.followAll(found)
}

// followAll follows the executors that lend enough cores.
func (r *Rooms) followAll(candidates []Candidate) bool {
	all := len(candidates) > 0
	for _, cand := range candidates {
		if cand.info.GetCores() >= r.need.Cores {
			all = r.follow(cand.Address) && all
		}
	}
	return all
}

// follow returns false if r follows as many executors as it may.
func (r *Rooms) follow(address string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.followed[address] {
		return true
	}
	if len(r.followed) == roomMost {
		return false
	}
	turn, queued := r.c.follow(address, r)
	if turn == nil {
		return false
	}
	r.followed[address] = true
	if queued {
		r.queued++
	}
	r.done.Go(func() {
		select {
		case <-turn:
		case <-r.ctx.Done():
		}
		if queued {
			r.mu.Lock()
			r.queued--
			r.mu.Unlock()
		}
		r.listen(address)
		r.c.unfollow(address, r)
		r.mu.Lock()
		delete(r.followed, address)
		r.lost = true
		r.mu.Unlock()
		r.wake()
	})
	return true
}

// follow gives r a stream to an executor, or a place in the queue for one. turn is closed when r has the stream. It is nil if there are too many
// streams, all of leases that need more.
func (c *shared) follow(address string, r *Rooms) (turn <-chan struct{}, queued bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.followed[address]
	if f == nil {
		f = &followers{}
		c.followed[address] = f
	}
	t := make(chan struct{})
	switch {
	case len(f.streams) < roomStreams:
		f.streams = append(f.streams, r)
		close(t)
		return t, false
	case slices.ContainsFunc(f.streams, func(s *Rooms) bool {
		return s.need.GetCores() <= r.need.GetCores() && s.need.GetMemoryBytes() <= r.need.GetMemoryBytes()
	}):
		f.queue = append(f.queue, follower{r, t})
		return t, true
	}
	return nil, false
}

// unfollow gives the stream of r, or its place in the queue, to the next lease.
func (c *shared) unfollow(address string, r *Rooms) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.followed[address]
	f.queue = slices.DeleteFunc(f.queue, func(q follower) bool { return q.Rooms == r })
	f.streams = slices.DeleteFunc(f.streams, func(s *Rooms) bool { return s == r })
	for len(f.queue) > 0 && len(f.streams) < roomStreams {
		next := f.queue[0]
		f.queue, f.streams = f.queue[1:], append(f.streams, next.Rooms)
		close(next.turn)
	}
	if len(f.streams) == 0 {
		delete(c.followed, address)
	}
}

// listen passes on what an executor reports until its stream ends.
func (r *Rooms) listen(address string) {
	conn, err := r.c.dial("wait for room", address)
	if err != nil {
		return
	}
	stream, err := control.NewExecutorClient(conn).Room(r.ctx, &r.need)
	for err == nil {
		var reply *control.RoomReply
		if reply, err = stream.Recv(); err == nil && reply.GetRoom() {
			r.mu.Lock()
			r.room = true
			r.mu.Unlock()
			r.wake()
		}
	}
}

func (r *Rooms) wake() {
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// Await returns when a followed executor has room, a stream has ended, a new executor has registered since Arrivals returned seen, or ctx
// ends. Without any of these it returns after roomLook, unless it still waits for all streams, or after `pause` if not all executors are followed.
// Only a new executor or ctx makes it return before `pause`. room reports whether a followed executor has room.
func (r *Rooms) Await(ctx context.Context, seen uint64, pause time.Duration, all bool) (room bool) {
	arrival, stop := context.WithCancel(ctx)
	defer stop()
	arrived := make(chan struct{})
	go func() {
		r.c.AwaitArrival(arrival, seen)
		close(arrived)
	}()
	soonest, latest := time.NewTimer(pause), time.NewTimer(max(pause, roomLook))
	defer soonest.Stop()
	defer latest.Stop()
	for early := true; ; {
		r.mu.Lock()
		room = r.room
		again := room || r.lost || !all
		if again && !early {
			r.room, r.lost = false, false
			r.mu.Unlock()
			return room
		}
		r.mu.Unlock()
		select {
		case <-r.news:
		case <-soonest.C:
			early = false
		case <-latest.C:
			if !r.waits() {
				return false
			}
			latest.Reset(roomLook)
		case <-arrived:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// waits reports whether r has no stream yet, but a place in the queue of every executor that it follows.
func (r *Rooms) waits() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.queued > 0 && r.queued == len(r.followed)
}

// Close ends the streams.
func (r *Rooms) Close() {
	r.cancel()
	r.done.Wait()
}
