package client

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// lanes is how many threads may wait in C for synchronous calls of a lease at a time. In leases with more workers all calls are requests.
const lanes = 64

// Bounds of one stay inside C, after which Go checks the context.
const (
	firstSlice = 200 * time.Microsecond
	lastSlice  = 5 * time.Millisecond
)

// ---- contexts ----

// settings are those of Idempotent, IdempotentWithin, KillLate and InPlace.
type settings struct {
	times   int           // how often a call may be repeated
	attempt time.Duration // longest time of an attempt; 0: no limit
	inPlace bool
	kill    bool
}

type settingsKey struct{}

// InPlace returns a context for calls whose payload or result lies in a [Buffer]: a worker of this node uses it where it is, and nothing is
// copied. Payload and result must begin at a multiple of 64 bytes of the buffer and must not overlap. The function can read the payload, but
// not write to it. A call that is given up when its context ends may read the payload and write the result until its function returns.
// Meanwhile [Buffer.Free] returns ErrBusy. With [KillLate] and a result in place, such a call ends after its worker has ended.
// A result in place cannot be combined with [IdempotentWithin]. Over verbs and tcp, and with
// LeaseOptions.Local in this process, calls are as without InPlace.
func InPlace(ctx context.Context) context.Context {
	s := settingsOf(ctx)
	s.inPlace = true
	return context.WithValue(ctx, settingsKey{}, s)
}

// Idempotent returns a context for calls of functions that may run more than once. If such a call may have been executed when its
// worker dies or its lease ends (ErrConnection, ErrLease), it is repeated, at most the given number of times. It runs again on another
// worker if one is free, or at another executor if the lease has moved there (LeaseOptions.Failover). Without Failover the end of
// a lease ends its calls. Calls that cannot have been executed are repeated without this context, too, if that can help.
func Idempotent(ctx context.Context, times int) context.Context {
	return IdempotentWithin(ctx, times, 0)
}

// IdempotentWithin is Idempotent with a bound for each attempt: a longer attempt is given up and counts as failed; 0: no bound. The
// first attempt of a submitted call begins with Submit. If abandoned attempts still occupy all slots, the next one waits for a slot, at
// most for the session's time-out. The context's own deadline bounds the whole call.
func IdempotentWithin(ctx context.Context, times int, attempt time.Duration) context.Context {
	if times <= 0 {
		times, attempt = 0, 0
	}
	s := settingsOf(ctx)
	s.times, s.attempt = times, max(attempt, 0)
	return context.WithValue(ctx, settingsKey{}, s)
}

// KillLate returns a context for calls whose worker is killed, and replaced by a new one, if the context's deadline, or the bound of an
// attempt (IdempotentWithin), passes while the function may be running. Other calls in flight on the worker end with ErrConnection. State
// that functions kept in the worker is lost. Without KillLate the function continues, and later calls on the worker wait until it returns. Calls
// with neither a deadline nor a bound are refused (ErrInvalid). Calls in this process (LeaseOptions.Local) are not affected.
func KillLate(ctx context.Context) context.Context {
	s := settingsOf(ctx)
	s.kill = true
	return context.WithValue(ctx, settingsKey{}, s)
}

func settingsOf(ctx context.Context) settings {
	s, _ := ctx.Value(settingsKey{}).(settings)
	return s
}

// options returns the options of a call on a worker or on c.AnyWorker, without the context's deadline.
func (s settings) options(worker int) c.CallOptions {
	return c.CallOptions{Worker: int32(worker), Repeats: uint32(s.times), Attempt: s.attempt, Kill: s.kill, InPlace: s.inPlace}
}

// timeout returns the time until the context's deadline; 0: it has none; below 0: the context has ended.
func timeout(ctx context.Context) time.Duration {
	if ctx.Err() != nil {
		return -1
	}
	d, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	if left := time.Until(d); left > 0 {
		return left
	}
	return -1
}

// ---- calls ----

// Function is a function of a lease's library. Safe for concurrent use.
type Function struct {
	lease *Lease
	index uint32
	name  string
}

// Name is the function's name.
func (f *Function) Name() string { return f.name }

func (f *Function) op() string { return "invoke " + f.name }

// Invoke calls the function with payload in and waits for the result. It waits for a free worker if there is none. The
// result is stored to out and has at most len(out) bytes; n is its size. A len(out) above the lease's eager size reserves
// that much of its bulk area. Invoke makes no allocation.
//
// When the context ends first, the call is given up and may still run (Error.Started). With a context that cannot be
// cancelled (context.Background()), a call is one crossing into C. A dead worker is replaced while others take its calls. A
// call that waits for the new worker waits until its context ends, and the replacement continues afterwards. See
// [Idempotent] for calls that may be repeated.
//
// Errors: ErrFunction (the function failed, or the result is too large: StatusResultTooLarge, n is its size), ErrConnection
// (the worker died), ErrInvalid (the payload is too large), ErrBusy (submitted calls occupy all slots), ErrLease.
func (f *Function) Invoke(ctx context.Context, in, out []byte) (n int, err error) {
	l := f.lease
	if !l.turns.take(ctx, l.over) {
		return 0, l.noTurn(ctx, f.op())
	}
	if isBackground(ctx) && !l.large && !l.released.Load() { // no deadline and no repeats; querying ctx takes longer
		if n, err = l.c.Call(f.index, in, out); err != nil {
			err = l.explain(err)
		}
	} else {
		n, err = f.call(ctx, c.AnyWorker, in, out)
	}
	l.turns.give()
	return n, err
}

// Invoke is Function.Invoke on this worker.
func (w *Worker) Invoke(ctx context.Context, f *Function, in, out []byte) (n int, err error) {
	if err := w.check(f); err != nil {
		return 0, err
	}
	if !w.turns.take(ctx, w.lease.over) {
		return 0, w.lease.noTurn(ctx, f.op())
	}
	w.lease.chosen.Add(1)
	n, err = f.call(ctx, w.index, in, out)
	w.lease.chosen.Add(-1)
	w.turns.give()
	return n, err
}

// InvokeUpTo is [Function.Invoke] for results whose size is not known before the call. It returns the part of out that has the result. If the
// result is larger than out, it returns new memory of the result's size. The function runs once. The result may have up to most bytes, for
// which memory is reserved as if out had that size. A context of [InPlace] has no effect if most is larger than len(out).
//
// Errors: those of Invoke. StatusResultTooLarge: the result has more than most bytes.
func (f *Function) InvokeUpTo(ctx context.Context, in, out []byte, most int) ([]byte, error) {
	l := f.lease
	if !l.turns.take(ctx, l.over) {
		return nil, l.noTurn(ctx, f.op())
	}
	defer l.turns.give()
	return f.callUpTo(ctx, c.AnyWorker, in, out, most)
}

// InvokeUpTo is Function.InvokeUpTo on this worker.
func (w *Worker) InvokeUpTo(ctx context.Context, f *Function, in, out []byte, most int) ([]byte, error) {
	if err := w.check(f); err != nil {
		return nil, err
	}
	if !w.turns.take(ctx, w.lease.over) {
		return nil, w.lease.noTurn(ctx, f.op())
	}
	w.lease.chosen.Add(1)
	defer w.lease.chosen.Add(-1)
	defer w.turns.give()
	return f.callUpTo(ctx, w.index, in, out, most)
}

// callUpTo makes a call whose result C may keep. The caller holds a turn.
func (f *Function) callUpTo(ctx context.Context, worker int, in, out []byte, most int) ([]byte, error) {
	if f.lease.released.Load() {
		return nil, f.lease.noTurn(ctx, f.op())
	}
	if most < 0 {
		return nil, fail(f.op(), dataplane.StatusInvalid, "results of up to %d bytes", most)
	}
	runtime.LockOSThread() // C keeps the result for the thread that has waited for the call
	defer runtime.UnlockOSThread()
	o := settingsOf(ctx).options(worker)
	o.Keep = most
	n, err := f.callWithin(ctx, o, in, out, nil)
	if e, ok := err.(*Error); ok && e.Status == StatusResultTooLarge && len(out) < n && n <= most {
		out = make([]byte, n)
		if err = c.KeptResult(out); err != nil {
			err = f.lease.explain(err)
		}
	}
	if err != nil {
		return nil, err
	}
	return out[:n], nil
}

func (w *Worker) check(f *Function) error {
	if f == nil || f.lease != w.lease {
		return fail("invoke", dataplane.StatusInvalid, "the function is nil or of another lease")
	}
	return nil
}

// call makes a call. The caller holds a turn.
func (f *Function) call(ctx context.Context, worker int, in, out []byte) (n int, err error) {
	if f.lease.released.Load() {
		return 0, f.lease.noTurn(ctx, f.op())
	}
	if f.lease.large || ctx.Done() != nil {
		return f.callWithin(ctx, settingsOf(ctx).options(worker), in, out, nil)
	}
	if n, err = f.lease.c.Invoke(f.index, in, out, settingsOf(ctx).options(worker)); err != nil {
		err = f.lease.explain(err)
	}
	return n, err
}

// callWithin makes a call that ends with its context. A short call is one crossing into C. Payload and result are in and out, or in
// pieces.
func (f *Function) callWithin(ctx context.Context, o c.CallOptions, in, out []byte, pieces *c.Pieces) (n int, err error) {
	if o.Timeout = timeout(ctx); o.Timeout < 0 {
		return 0, f.ended(ctx, "before it began", false)
	}
	var pin runtime.Pinner // C keeps out, and in for repeats, between one slice and the next
	defer pin.Unpin()
	pinBytes(&pin, out)
	if o.Repeats > 0 {
		pinBytes(&pin, in)
	}
	r, n, done, err := f.start(ctx, in, out, pieces, o, firstSlice)
	if o.Attempt > 0 {
		// Attempts that were given up may occupy all slots, until the worker has answered them.
		for until := time.Now().Add(f.lease.session.timeout); errors.Is(err, ErrBusy) && ctx.Err() == nil && time.Now().Before(until); {
			f.lease.c.AwaitSlot(o.Worker, lastSlice)
			r, n, done, err = f.start(ctx, in, out, pieces, o, firstSlice)
		}
	}
	request := [1]c.Request{r}
	for slice := 2 * firstSlice; !done; slice = min(2*slice, lastSlice) {
		if ctx.Err() != nil && !(o.Kill && errors.Is(ctx.Err(), context.DeadlineExceeded)) { // the request has the same deadline, and kills
			_ = request[0].Cancel() // an error: it has ended
			return 0, f.ended(ctx, "given up", true)
		}
		var i int
		i, n, err = c.WaitAny(request[:], slice)
		done = i >= 0 || err != nil
	}
	if err != nil {
		err = f.renamed(f.lease.explain(err))
	}
	return n, err
}

// renamed replaces the name of a C function, at the beginning of an error, by the name of this call.
func (f *Function) renamed(err error) error {
	if e, ok := err.(*Error); ok {
		for _, op := range []string{"waitany ", "iinvokev ", "iinvoke "} {
			if text, found := strings.CutPrefix(e.Text, op+f.name); found {
				e.Text = f.op() + text
				break
			}
		}
	}
	return err
}

// isLate reports whether err says that the deadline passed before the call started.
func isLate(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Status == StatusDeadline && !e.Started
}

// start starts a call and waits for up to patience for its end. While it waits for a new worker or another executor, the end of ctx
// ends the wait.
func (f *Function) start(ctx context.Context, in, out []byte, pieces *c.Pieces, o c.CallOptions, patience time.Duration) (r c.Request, n int, done bool, err error) {
	wait := lastSlice
	if ctx.Done() == nil {
		wait = 0
	}
	var until time.Time
	for {
		if pieces == nil {
			r, n, done, err = f.lease.c.Start(f.index, in, out, o, wait, patience)
		} else {
			r, n, done, err = f.lease.c.StartPieces(f.index, pieces, o, wait, patience)
		}
		if err == nil || wait == 0 || !isLate(err) {
			return r, n, done, err
		}
		if until.IsZero() {
			until = time.Now().Add(f.lease.session.timeout)
		}
		switch left := timeout(ctx); {
		case ctx.Err() != nil:
			return 0, 0, true, f.ended(ctx, "given up before it began", false)
		case left < 0 || time.Now().After(until):
			return r, n, done, err
		default:
			o.Timeout = left
		}
	}
}

func (f *Function) ended(ctx context.Context, detail string, started bool) error {
	err := contextError(ctx, f.op(), detail, started)
	if e := err.(*Error); ctx.Err() == nil { // our clock was a little ahead
		e.Status, e.Cause = StatusDeadline, context.DeadlineExceeded
	}
	return err
}

func pinBytes(p *runtime.Pinner, b []byte) {
	if len(b) > 0 {
		p.Pin(unsafe.SliceData(b))
	}
}
