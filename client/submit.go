package client

import (
	"context"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Call is a call in flight. It may be copied; Result or Cancel is called on one copy, once.
type Call struct {
	slot *slot
	seq  uint64
}

// slot is a place for a call in flight, with memory that C may write the result to.
type slot struct {
	mu      sync.Mutex
	seq     uint64 // of the present call; a Call with another number was ended by Result or Cancel
	f       *Function
	request c.Request // 0: the call has ended
	n       int       // size of the result
	err     error     // of a call that failed
	room    int
	memory  []byte // from C
	gone    bool   // the lease was released
	in      runtime.Pinner
}

// take returns a free slot with room for capacity bytes.
func (l *Lease) take(capacity int) *slot {
	l.mu.Lock()
	var s *slot
	if n := len(l.free); n > 0 {
		s, l.free = l.free[n-1], l.free[:n-1]
	} else {
		s = &slot{}
		l.slots = append(l.slots, s)
	}
	l.mu.Unlock()
	s.mu.Lock()
	if cap(s.memory) < capacity || cap(s.memory) > 2*capacity+(64<<10) {
		c.FreeMemory(s.memory)
		s.memory = nil
		if capacity > 0 {
			s.memory = c.Memory(capacity)
		}
	}
	s.room = capacity
	s.seq++
	return s
}

// put frees a slot. The caller holds its lock.
func (s *slot) put(l *Lease) {
	s.seq++
	s.in.Unpin()
	s.f, s.request, s.err = nil, 0, nil
	s.mu.Unlock()
	l.mu.Lock()
	l.free = append(l.free, s)
	l.mu.Unlock()
}

// drop ends the calls in flight of a lease that was released.
func (l *Lease) drop() {
	l.mu.Lock()
	slots := l.slots
	l.slots, l.free = nil, nil
	l.mu.Unlock()
	for _, s := range slots {
		s.mu.Lock()
		s.in.Unpin()
		c.FreeMemory(s.memory)
		s.memory, s.request, s.gone = nil, 0, true
		s.mu.Unlock()
	}
}

// Submit starts a call on this worker and returns at once; capacity is the most bytes that the result may have. in may
// be reused when Submit returns, unless it lies in a Buffer. ErrBusy: the lease's depth is exhausted. The slot is occupied until
// Result or Cancel, so every Call needs one of them. The deadline of the context is the deadline of the call. With a context of
// [Idempotent], in must stay unchanged until Result, and Wait, Test or Result may repeat the call and block meanwhile.
func (w *Worker) Submit(ctx context.Context, f *Function, in []byte, capacity int) (Call, error) {
	if err := w.check(f); err != nil {
		return Call{}, err
	}
	if w.lease.released.Load() {
		return Call{}, fail(f.op(), StatusLeaseEnded, "the lease was released")
	}
	o := settingsOf(ctx).options(w.index)
	if o.Timeout = timeout(ctx); o.Timeout < 0 {
		return Call{}, f.ended(ctx, "before it began", false)
	}
	s := w.lease.take(max(capacity, 0))
	if o.Repeats > 0 {
		pinBytes(&s.in, in)
	}
	s.f = f
	var err error
	if s.request, _, _, err = f.start(ctx, in, s.memory[:s.room:s.room], nil, o, 0); err != nil {
		s.put(w.lease)
		return Call{}, w.lease.explain(err)
	}
	call := Call{s, s.seq}
	s.mu.Unlock()
	return call, nil
}

// enter locks the call's slot.
func (x Call) enter(op string) (*slot, error) {
	if x.slot == nil {
		return nil, fail(op, dataplane.StatusInvalid, "the zero Call")
	}
	x.slot.mu.Lock()
	if x.slot.seq != x.seq {
		x.slot.mu.Unlock()
		return nil, fail(op, dataplane.StatusInvalid, "the result was already taken, or the call was cancelled")
	}
	if x.slot.gone {
		x.slot.mu.Unlock()
		return nil, fail(op, StatusLeaseEnded, "the lease was released")
	}
	return x.slot, nil
}

// look waits for up to patience for the call to end. The caller holds the slot's lock.
func (s *slot) look(patience time.Duration) {
	if s.request == 0 {
		return
	}
	if i, n, err := c.WaitAny(unsafe.Slice(&s.request, 1), patience); i >= 0 || err != nil {
		s.take(n, err)
	}
}

// take stores the outcome of a call.
func (s *slot) take(n int, err error) {
	s.request, s.n = 0, n
	if err != nil {
		s.err = s.f.lease.explain(err)
	}
}

// slice returns how long to stay in C: at most until the context's deadline.
func slice(ctx context.Context, most time.Duration) time.Duration {
	if d, ok := ctx.Deadline(); ok {
		return max(min(most, time.Until(d)), 0)
	}
	return most
}

// Wait returns nil when the call has ended; Result says how. When the context ends first, the call goes on, and Wait may be
// called again.
func (x Call) Wait(ctx context.Context) error {
	const op = "wait"
	for most := firstSlice; ; most = min(2*most, lastSlice) {
		s, err := x.enter(op)
		if err != nil {
			return err
		}
		s.look(slice(ctx, most))
		ended := s.request == 0
		s.mu.Unlock()
		if ended {
			return nil
		}
		if ctx.Err() != nil {
			return contextError(ctx, op, "the call goes on", true)
		}
	}
}

// WaitAny waits until one of the calls has ended, and returns its index; Result says how it ended. It ignores zero Calls, and returns -1
// and no error if there are no others. When the context ends first, the calls go on. No other goroutine may wait for these calls
// meanwhile.
func WaitAny(ctx context.Context, calls []Call) (int, error) {
	const op = "wait for any"
	requests := make([]c.Request, len(calls))
	some := false
	for i, x := range calls {
		if x.slot == nil {
			continue
		}
		s, err := x.enter(op)
		if err != nil {
			return i, err
		}
		requests[i] = s.request
		s.mu.Unlock()
		if requests[i] == 0 {
			return i, nil
		}
		some = true
	}
	if !some {
		return -1, nil
	}
	for most := firstSlice; ; most = min(2*most, lastSlice) {
		i, n, err := c.WaitAny(requests, slice(ctx, most))
		if i >= 0 {
			s, lost := calls[i].enter(op)
			if lost != nil {
				return i, lost
			}
			s.take(n, err)
			s.mu.Unlock()
			return i, nil
		}
		if err != nil {
			return -1, err
		}
		if ctx.Err() != nil {
			return -1, contextError(ctx, op, "the calls go on", true)
		}
	}
}

// Test reports whether the call has ended. It does not wait for the call, but may wait for another goroutine that waits for it.
func (x Call) Test() (bool, error) {
	s, err := x.enter("test")
	if err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	s.look(0)
	return s.request == 0, nil
}

// Result stores the result of an ended call to out and frees its slot. It is called once for each call. n is the size of
// the result. ErrBusy: the call has not ended. Other errors are those of Invoke.
func (x Call) Result(out []byte) (n int, err error) {
	s, err := x.enter("result")
	if err != nil {
		return 0, err
	}
	l := s.f.lease
	s.look(0)
	if s.request != 0 {
		defer s.mu.Unlock()
		return 0, fail("result", dataplane.StatusBusy, "%s has not ended", s.f.name)
	}
	defer s.put(l)
	switch n = s.n; {
	case s.err != nil:
		return n, s.err
	case n > len(out):
		return n, &Error{Status: StatusResultTooLarge, Started: true, Text: s.f.op() + ": the result is larger than the room for it"}
	}
	return copy(out, s.memory[:n]), nil
}

// Cancel gives up the call. The function may run nevertheless; its result is dropped, and the slot becomes free when the
// worker has answered. Cancel does nothing after Result or Cancel.
func (x Call) Cancel() {
	s, err := x.enter("cancel")
	if err != nil {
		return
	}
	if s.request != 0 {
		_ = s.request.Cancel() // an error: it has ended
	}
	s.put(s.f.lease)
}
