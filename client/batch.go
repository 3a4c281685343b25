package client

import (
	"context"
	"math"
	"runtime"
	"time"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Batch is a list of calls that cross into C together, for programs that make many short calls: a crossing costs as much as a short call
// itself. The calls run on all workers of the lease, as many at a time as its depth permits (LeaseOptions.Depth), and each has an outcome of
// its own. To compute while calls are in flight, or to leave no gap between batches, use two batches and Submit. While a
// batch fills all slots, other calls of the lease may fail with ErrBusy. A batch is for one goroutine at a time.
type Batch struct {
	lease   *Lease
	c       *c.Batch
	options c.CallOptions // of the calls, since the first Submit or Wait
	errs    map[int]error // of calls that failed
	freed   bool
}

// NewBatch returns an empty batch. It has memory outside of Go, for payloads and results, until Free or the garbage collector frees it.
func (l *Lease) NewBatch() *Batch {
	b := &Batch{lease: l, c: &c.Batch{}}
	runtime.AddCleanup(b, func(b *c.Batch) {
		b.Cancel(func(int, bool) {})
		b.Free()
	}, b.c)
	return b
}

// usable returns an error if the batch was freed or its lease released.
func (b *Batch) usable(op string) error {
	if b.freed {
		return fail(op, dataplane.StatusInvalid, "the batch was freed")
	}
	if b.lease.released.Load() {
		return fail(op, StatusLeaseEnded, "the lease was released")
	}
	return nil
}

// Add adds a call with a copy of the payload; capacity is the most bytes that the result may have. Errors: ErrInvalid (the function belongs
// to another lease, the batch was submitted and not Reset, or a size is negative or above 4 GiB), ErrLease.
func (b *Batch) Add(f *Function, in []byte, capacity int) error {
	const op = "add to batch"
	if f == nil || f.lease != b.lease {
		return fail(op, dataplane.StatusInvalid, "the function is nil or of another lease")
	}
	if capacity < 0 || capacity > math.MaxUint32 || len(in) > math.MaxUint32 || b.c.Len() >= math.MaxInt32 {
		return fail(op, dataplane.StatusInvalid, "%s: payload of %d bytes, capacity of %d bytes, %d calls already in the batch: at least one exceeds its limit", f.name, len(in), capacity, b.c.Len())
	}
	if b.c.Begun() {
		return fail(op, dataplane.StatusInvalid, "the batch was submitted: call Reset first")
	}
	if err := b.usable(op); err != nil {
		return err
	}
	b.c.Add(f.index, in, capacity)
	return nil
}

// Len returns the number of calls.
func (b *Batch) Len() int { return b.c.Len() }

// Submit submits as many calls as there are free slots, and returns at once. Wait submits the others. The context's deadline and its settings
// ([IdempotentWithin], [KillLate]) hold for all calls of the batch. Contexts of [InPlace] are refused (ErrInvalid).
func (b *Batch) Submit(ctx context.Context) error {
	err := b.begin(ctx, "submit batch")
	if err == nil {
		b.run(0)
	}
	return err
}

// begin sets the options of the calls if this is their first context.
func (b *Batch) begin(ctx context.Context, op string) error {
	if err := b.usable(op); err != nil || b.c.Begun() {
		return err
	}
	s := settingsOf(ctx)
	if s.inPlace {
		return fail(op, dataplane.StatusInvalid, "the context is of InPlace, which batches do not support: use Invoke or Submit for calls whose payload or result is in a Buffer")
	}
	b.options = s.options(c.AnyWorker)
	if b.options.Timeout = timeout(ctx); b.options.Timeout < 0 {
		return contextError(ctx, op, "before it began", false)
	}
	return nil
}

// run continues the batch in C.
func (b *Batch) run(patience time.Duration) {
	b.c.Run(b.lease.c, &b.options, patience)
	runtime.KeepAlive(b)
}

// Wait submits the remaining calls as slots become free, and returns nil when all calls have ended. Result returns the outcome of each.
// With a context that cannot be cancelled (context.Background()) it is one crossing into C, otherwise one every 5 ms. When the context ends
// first, calls in flight go on, and Wait may be called again. Without Submit, the context is also that of the calls. Wait makes no
// allocation. Errors: those of the context, ErrInvalid (as for Submit), ErrLease.
func (b *Batch) Wait(ctx context.Context) error {
	const op = "wait for batch"
	for {
		if err := b.begin(ctx, op); err != nil {
			return err
		}
		patience := time.Duration(-1)
		if ctx.Done() != nil {
			patience = slice(ctx, lastSlice)
		}
		b.run(patience)
		if b.c.Ended() {
			return nil
		}
		if ctx.Err() != nil {
			return contextError(ctx, op, "the calls go on", true)
		}
	}
}

// Result stores the result of call i, 0 <= i < Len, to out; n is its size. It may be called again until Reset or Free. Errors: ErrBusy
// (the call has not ended), and those of Invoke.
func (b *Batch) Result(i int, out []byte) (n int, err error) {
	const op = "result of batch"
	if i < 0 || i >= b.c.Len() {
		return 0, fail(op, dataplane.StatusInvalid, "there is no call %d: the batch has %d calls", i, b.c.Len())
	}
	if !b.c.Has(i) {
		return 0, fail(op, dataplane.StatusBusy, "call %d has not ended", i)
	}
	result, n := b.c.Result(i)
	if b.c.Failed() > 0 || len(b.errs) > 0 {
		if err := b.c.TakeError(i); err != nil {
			b.note(i, b.lease.explain(err))
		}
		if err := b.errs[i]; err != nil {
			return n, err
		}
	}
	if n > len(out) {
		return n, &Error{Status: StatusResultTooLarge, Started: true, Text: op + ": the result is larger than the room for it"}
	}
	copy(out, result)
	runtime.KeepAlive(b)
	return n, nil
}

func (b *Batch) note(i int, err error) {
	if b.errs == nil {
		b.errs = map[int]error{}
	}
	b.errs[i] = err
}

// Cancel gives up the calls that have not ended: their Result is StatusCancelled. Functions that have started run on.
func (b *Batch) Cancel() {
	b.c.Cancel(func(i int, submitted bool) {
		b.note(i, &Error{Status: StatusCancelled, Text: "invoke: cancelled: the batch was cancelled", Started: submitted, Cause: context.Canceled})
	})
}

// Reset cancels the calls that have not ended, and removes all calls. The batch keeps its memory for the next ones.
func (b *Batch) Reset() {
	b.Cancel()
	b.c.Reset()
	clear(b.errs)
}

// Free cancels the calls that have not ended, removes all calls and frees the batch's memory.
func (b *Batch) Free() {
	b.Reset()
	b.c.Free()
	b.freed = true
}
