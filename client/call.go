package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Bounds of one stay inside the data plane when a context has to be looked at now and then.
const (
	firstSlice = 200_000   // ns
	lastSlice  = 5_000_000 // ns
)

// Function is a function of a lease's library. Safe for concurrent use.
type Function struct {
	lease *Lease
	index uint32
	name  string
	there atomic.Pointer[Function] // of a lease that goes on elsewhere: at its last home
}

// on is the function at a home of the lease, or on the lease itself.
func (f *Function) on(home *Lease) *Function {
	if home == f.lease {
		return f
	}
	if g := f.there.Load(); g != nil && g.lease == home {
		return g
	}
	g := home.byName[f.name] // the same library has the same functions
	f.there.Store(g)
	return g
}

// Name is the function's name.
func (f *Function) Name() string { return f.name }

func (f *Function) op() string { return "invoke " + f.name }

// Invoke calls the function with payload in on a free worker, waiting for one if need be, and waits for the result,
// which is stored to out; len(out) is the most that it may have, and a len(out) above the lease's eager size reserves
// that much of its bulk area. n is the result's size. Makes no allocation.
//
// The context bounds the call; when it ends first the call is given up and may still run (Error.Started). Without Done
// channel (context.Background()) a call is one crossing into C. A dead worker is replaced while others take its calls; a
// call that has to wait for the new one waits until its context ends, and the replacement goes on. See [Idempotent]
// for calls that are to be made again.
//
// Errors: ErrFunction (the function failed, or StatusResultTooLarge and n is the size that it has), ErrConnection (the
// worker died), ErrInvalid (too large), ErrBusy (all slots are taken by submitted calls), ErrLease.
func (f *Function) Invoke(ctx context.Context, in, out []byte) (n int, err error) {
	if r := repeatsOf(ctx); r.times > 0 || f.lease.mover != nil {
		return f.invokeAgain(ctx, r, anyWorker, in, out)
	}
	n, _, err = f.attempt(ctx, anyWorker, in, out, nil)
	return n, err
}

// Invoke is Function.Invoke on this worker.
func (w *Worker) Invoke(ctx context.Context, f *Function, in, out []byte) (n int, err error) {
	if err := w.check(f); err != nil {
		return 0, err
	}
	if r := repeatsOf(ctx); r.times > 0 || f.lease.mover != nil {
		return f.invokeAgain(ctx, r, w.index, in, out)
	}
	n, _, err = f.attempt(ctx, w.index, in, out, nil)
	return n, err
}

func (w *Worker) check(f *Function) error {
	if f == nil || f.lease != w.lease && f.lease != w.lease.front {
		return fail("invoke", dataplane.StatusInvalid, "the function is nil or of another lease")
	}
	return nil
}

// anyWorker is the place of a call that may go to any worker.
const anyWorker = -1

// attempt makes a call once, on the worker at place or on any one, then rather not on that in `not`. It returns the worker.
func (f *Function) attempt(ctx context.Context, place int, in, out []byte, not *Worker) (n int, w *Worker, err error) {
	l := f.lease
	if l.local != nil {
		n, err = l.local.invoke(ctx, f, in, out)
		return n, nil, err
	}
	if place != anyWorker {
		w = l.workers[place]
		err = w.claim(ctx, "invoke")
	} else if w = l.tryOther(not); w == nil {
		w, err = l.claimAny(ctx, "invoke")
	}
	if err != nil {
		return 0, nil, err
	}
	n, started, st := w.run(ctx, f.index, in, out)
	if st != dataplane.OK {
		return w.recover(ctx, f, in, out, place == anyWorker, outcome{n: n, started: started, status: st})
	}
	l.give(w)
	return n, w, nil
}

// run makes one attempt. The claim's holder.
func (w *Worker) run(ctx context.Context, fn uint32, in, out []byte) (n int, started bool, st Status) {
	if w.lease.leaving.Load() {
		return 0, false, StatusLeaseEnded
	}
	if ctx.Done() == nil && len(w.buffers) == 0 {
		return w.ch.Call(fn, in, out, 0)
	}
	if ctx.Err() != nil {
		return 0, false, StatusCancelled
	}
	slot, st := w.submit(fn, in, len(out))
	if st != dataplane.OK {
		return 0, false, st
	}
	if st := w.await(ctx, slot); st != dataplane.OK {
		w.ch.Abandon(slot)
		return 0, true, st
	}
	return w.ch.Finish(slot, out)
}

func (w *Worker) submit(fn uint32, in []byte, capacity int) (uint32, Status) {
	if w.lease.leaving.Load() {
		return 0, StatusLeaseEnded
	}
	if r := w.region(in); r != nil {
		return w.ch.SubmitRegion(fn, r, in, capacity)
	}
	return w.ch.Submit(fn, in, capacity)
}

// await waits for a call to end or the context: OK, StatusDeadline or StatusCancelled.
func (w *Worker) await(ctx context.Context, slot uint32) Status {
	for slice := int64(firstSlice); ; slice = min(2*slice, lastSlice) {
		if w.ch.Wait(slot, w.until(ctx, slice)) == dataplane.OK {
			return dataplane.OK
		}
		if st := contextStatus(ctx); st != dataplane.OK {
			return st
		}
	}
}

// until is the end of a slice in the data plane's clock, not later than the context's deadline.
func (w *Worker) until(ctx context.Context, slice int64) int64 {
	end := w.lease.now() + slice
	if d, ok := ctx.Deadline(); ok {
		end = min(end, w.lease.startN+int64(d.Sub(w.lease.start)))
	}
	return max(end, 1) // 0 would mean no deadline
}

func contextStatus(ctx context.Context) Status {
	switch err := ctx.Err(); {
	case err == nil:
		return dataplane.OK
	case errors.Is(err, context.DeadlineExceeded):
		return StatusDeadline
	default:
		return StatusCancelled
	}
}

// recover goes on after a failed attempt that has not started anything: on a new worker in the place of a dead one, or, with
// any, on another one while this one is replaced or when its slots are full. It takes the claim over, and returns the
// call's result or its error, and the worker that it is of.
func (w *Worker) recover(ctx context.Context, f *Function, in, out []byte, any bool, o outcome) (int, *Worker, error) {
	l := w.lease
	for tries := 0; !o.started && o.status.Class() == ErrConnection && tries <= len(l.workers); tries++ {
		var other *Worker
		if any {
			other = l.tryAny()
		}
		if other != nil {
			w.repairSoon()
			w = other
		} else {
			mine, err := w.repairWithin(ctx, f.op())
			if err != nil {
				if mine {
					l.give(w)
				}
				return 0, w, err
			}
			tries = len(l.workers)
		}
		o.n, o.started, o.status = w.run(ctx, f.index, in, out)
	}
	for i := 0; any && !o.started && o.status == dataplane.StatusBusy && i < len(l.workers); i++ {
		if other := l.workers[i]; other != w && other.try() {
			l.give(w)
			w = other
			o.n, o.started, o.status = w.run(ctx, f.index, in, out)
			if !o.started && o.status.Class() == ErrConnection {
				return w.recover(ctx, f, in, out, false, o)
			}
		}
	}
	defer l.give(w)
	switch {
	case o.status == dataplane.OK:
		return o.n, w, nil
	case o.status == StatusTooLarge && !o.started:
		e := w.explain(f.op(), o.n, false, o.status).(*Error)
		e.Detail = fmt.Sprintf("payload of %d and room for %d bytes; the lease has eager %d, bulk %d bytes", len(in), len(out),
			l.config.Eager, l.config.Bulk)
		return 0, w, e
	case o.status == StatusDeadline || o.status == StatusCancelled:
		return 0, w, contextError(ctx, f.op(), fmt.Sprintf("on worker %d", w.index), o.started)
	case o.status == StatusResultTooLarge:
		return o.n, w, w.explain(f.op(), o.n, true, o.status)
	}
	return 0, w, w.explain(f.op(), o.n, o.started, o.status)
}

// Call is a call in flight: a value that may be copied, of which one copy is asked for the result or cancelled.
type Call struct {
	worker *Worker
	f      *Function
	slot   uint32
	seq    uint32
	again  *resubmission // of an idempotent call
}

// resubmission is what it takes to make a submitted call again.
type resubmission struct {
	ctx     context.Context
	f       *Function // of the lease that the program holds
	in      []byte
	attempt time.Duration // that the first attempt may take; 0: no bound
	until   int64         // when that is over, in the clock of the call's worker
}

// Submit starts a call on this worker and returns at once; capacity is the most bytes that the result may have. in may
// be reused when Submit returns, unless it lies in a Buffer. ErrBusy when the lease's depth is exhausted. Every Call
// needs a Result or a Cancel, or its slot stays taken. Of a lease that goes on elsewhere it stays where it was started, and its
// result may be asked for after the move. With the context of [Idempotent], in must stay unchanged until Result, which
// makes the call again if need be, on the worker that has this place, for as long as the context permits. An attempt that takes
// longer than [IdempotentWithin] permits counts as ended for Wait and Test, and Result gives it up.
func (w *Worker) Submit(ctx context.Context, f *Function, in []byte, capacity int) (Call, error) {
	if err := w.check(f); err != nil {
		return Call{}, err
	}
	c, err := w.startSomewhere(ctx, f, in, capacity)
	if r := repeatsOf(ctx); err == nil && r.times > 0 {
		c.again = &resubmission{ctx: ctx, f: f, in: in, attempt: r.attempt, until: c.worker.lease.now() + int64(r.attempt)}
	}
	return c, err
}

// startSomewhere starts a call on the worker, or on the one that has its place.
func (w *Worker) startSomewhere(ctx context.Context, f *Function, in []byte, capacity int) (Call, error) {
	m := f.lease.mover
	if m == nil {
		return w.start(ctx, f, in, capacity)
	}
	var suspect *Lease
	for moves := 0; ; moves++ {
		home, err := m.where(ctx, f.op(), suspect)
		if err != nil {
			return Call{}, err
		}
		g := f.on(home)
		if g == nil {
			return Call{}, fail(f.op(), StatusNoFunction, "the library on %s has none of this name", home.held.Node)
		}
		c, err := home.workers[w.index].start(ctx, g, in, capacity)
		var e *Error
		if err == nil || moves == movesMax || !errors.As(err, &e) || e.Started || !(repeats{}).again(ctx, e) {
			return c, err
		}
		suspect = home
	}
}

// start is Submit on the worker itself.
func (w *Worker) start(ctx context.Context, f *Function, in []byte, capacity int) (Call, error) {
	if w.lease.local != nil {
		return w.startHere(ctx, f, in, capacity)
	}
	if err := w.claim(ctx, "invoke"); err != nil {
		return Call{}, err
	}
	slot, st := w.submit(f.index, in, capacity)
	if st.Class() == ErrConnection {
		if mine, err := w.repairWithin(ctx, f.op()); err != nil {
			if mine {
				w.lease.give(w)
			}
			return Call{}, err
		}
		slot, st = w.submit(f.index, in, capacity)
	}
	if st != dataplane.OK {
		_, _, err := w.recover(ctx, f, in, nil, false, outcome{status: st, started: st.Class() == ErrConnection})
		return Call{}, err
	}
	defer w.lease.give(w)
	c := Call{worker: w, f: f, slot: slot, seq: w.number()}
	w.slots[slot] = submitted{seq: c.seq, capacity: capacity}
	return c, nil
}

// enter claims the call's worker. lost is set when the call ended with a worker that was replaced.
func (c Call) enter(ctx context.Context, op string) (lost *outcome, err error) {
	if c.worker == nil {
		return nil, fail(op, dataplane.StatusInvalid, "the zero Call")
	}
	w := c.worker
	if err := w.claim(ctx, op); err != nil {
		return nil, err
	}
	if w.slots[c.slot].seq == c.seq {
		return nil, nil
	}
	if o, ok := w.lost[c.seq]; ok {
		return &o, nil
	}
	w.lease.give(w)
	return nil, fail(op, dataplane.StatusInvalid, "call %d of %s on worker %d was asked for or cancelled already", c.seq, c.f.name, w.index)
}

// late says whether the first attempt of an idempotent call has taken as long as it may.
func (c Call) late() bool {
	return c.again != nil && c.again.attempt > 0 && c.worker.lease.now() >= c.again.until
}

// Wait returns nil when the call has ended, well or not: Result tells. When the context ends first the call goes on and
// may be waited for again.
func (c Call) Wait(ctx context.Context) error {
	const op = "wait"
	for slice := int64(firstSlice); ; slice = min(2*slice, lastSlice) {
		lost, err := c.enter(ctx, op)
		if err != nil {
			return err
		}
		w := c.worker
		until := w.until(ctx, slice)
		if c.again != nil && c.again.attempt > 0 {
			until = min(until, c.again.until)
		}
		ended := lost != nil || w.ch.Wait(c.slot, until) == dataplane.OK || c.late()
		if w.waiting.Load() > 0 {
			slice = firstSlice / 2 // others want to submit
		}
		w.lease.give(w)
		if ended {
			return nil
		}
		if ctx.Err() != nil {
			return contextError(ctx, op, fmt.Sprintf("%s on worker %d goes on", c.f.name, w.index), true)
		}
	}
}

// Test says whether the call has ended. It does not wait for the call, but for other goroutines that are using the
// worker.
func (c Call) Test() (bool, error) {
	lost, err := c.enter(context.Background(), "test")
	if err != nil {
		return false, err
	}
	defer c.worker.lease.give(c.worker)
	return lost != nil || c.worker.ch.Test(c.slot) || c.late(), nil
}

// Result stores the result of an ended call to out and frees its slot: once per call. n is its size. ErrBusy when the
// call has not ended; other errors are as of Invoke. A call of [Idempotent] that failed is made again here, which blocks.
func (c Call) Result(out []byte) (n int, err error) {
	n, err = c.result(out)
	var e *Error
	if err == nil || c.again == nil || !errors.As(err, &e) {
		return n, err
	}
	a, r := c.again, repeatsOf(c.again.ctx)
	if !e.Started || !r.again(a.ctx, e) || a.f.lease.mover == nil && e.Status.Class() == ErrLease {
		return n, err
	}
	r.times--
	a.f.lease.repeated.Add(1)
	n, err = a.f.invokeAgain(a.ctx, r, c.worker.index, a.in, out)
	return n, maybeRan(err, true)
}

func (c Call) result(out []byte) (n int, err error) {
	lost, err := c.enter(context.Background(), "result")
	if err != nil {
		return 0, err
	}
	w := c.worker
	defer w.lease.give(w)
	var o outcome
	if lost != nil {
		o = *lost
		delete(w.lost, c.seq)
		if o.status == dataplane.OK {
			if len(o.data) > len(out) {
				return len(o.data), w.explain(c.f.op(), len(o.data), true, StatusResultTooLarge)
			}
			return copy(out, o.data), nil
		}
	} else {
		if ended := w.ch.Test(c.slot); !ended && c.late() {
			w.ch.Abandon(c.slot)
			w.slots[c.slot] = submitted{}
			return 0, contextError(context.Background(), c.f.op(), fmt.Sprintf("on worker %d: no result within %v", w.index, c.again.attempt), true)
		} else if !ended {
			return 0, fail("result", dataplane.StatusBusy, "%s on worker %d has not ended", c.f.name, w.index)
		}
		o = w.collect(c.slot, out)
		w.slots[c.slot] = submitted{}
	}
	if o.status == dataplane.OK {
		return o.n, nil
	}
	if o.err != nil {
		return 0, fmt.Errorf("%s: %w", c.f.op(), o.err)
	}
	if o.status != StatusResultTooLarge {
		return 0, w.explain(c.f.op(), o.n, o.started, o.status)
	}
	return o.n, w.explain(c.f.op(), o.n, true, o.status)
}

// Cancel gives up the call. The function may run nevertheless; its result is dropped and the slot is free when the
// worker has answered. Cancelling a call that was asked for already does nothing.
func (c Call) Cancel() {
	lost, err := c.enter(context.Background(), "cancel")
	if err != nil {
		return
	}
	w := c.worker
	if lost != nil {
		delete(w.lost, c.seq)
	} else {
		w.ch.Abandon(c.slot)
		w.slots[c.slot] = submitted{}
	}
	w.lease.give(w)
}
