package client

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// MapOptions are the options of Map. The zero value selects the defaults.
type MapOptions struct {
	Chunk int // items of one call; 0: chosen so that all workers end at about the same time
}

// Map calls the function on consecutive items of an array, on all workers of the lease, and gathers the results: with k >= 1
// items of inItem bytes it returns k*outItem bytes, the results of these items in the same order. in is a number of items, out has
// room for as many results. Repeats are those of [Idempotent]. When the context ends, Map returns, and calls in flight may still run.
// After an error Map makes no further calls, the text names the items, and the contents of out are undefined.
func (f *Function) Map(ctx context.Context, in []byte, inItem int, out []byte, outItem int, o MapOptions) error {
	const op = "map"
	count := len(in) / max(inItem, 1)
	switch {
	case inItem < 1 || outItem < 0 || o.Chunk < 0:
		return fail(op, dataplane.StatusInvalid, "items of %d and %d bytes, %d in a chunk", inItem, outItem, o.Chunk)
	case count*inItem != len(in):
		return fail(op, dataplane.StatusInvalid, "%d bytes are not a whole number of items of %d bytes", len(in), inItem)
	case outItem > 0 && count > len(out)/outItem:
		return fail(op, dataplane.StatusInvalid, "room for %d results of %d bytes, want %d", len(out)/outItem, outItem, count)
	}
	return f.runOnItems(ctx, func(options c.CallOptions, cancelled *atomic.Uint32) error {
		return f.lease.c.Map(f.index, in, inItem, out, outItem, count, o.Chunk, options.Timeout, options.Repeats, cancelled)
	})
}

// runOnItems runs a map or a reduction, which ends when the context does.
func (f *Function) runOnItems(ctx context.Context, run func(c.CallOptions, *atomic.Uint32) error) error {
	if f.lease.released.Load() {
		return fail("map", StatusLeaseEnded, "the lease was released")
	}
	options := settingsOf(ctx).options(c.AnyWorker)
	if options.Timeout = timeout(ctx); options.Timeout < 0 {
		return f.ended(ctx, "before it began", false)
	}
	var cancelled *atomic.Uint32
	if ctx.Done() != nil {
		cancelled = new(atomic.Uint32)
		told := make(chan struct{})
		stop := context.AfterFunc(ctx, func() {
			cancelled.Store(1)
			f.lease.c.Interrupt()
			close(told)
		})
		defer func() {
			if !stop() {
				<-told
			}
		}()
	}
	err := run(options, cancelled)
	var e *Error
	if errors.As(err, &e) && e.Status == StatusCancelled {
		return f.ended(ctx, "given up", true)
	}
	if err == nil && ctx.Err() != nil {
		return f.ended(ctx, "it has ended nevertheless", true)
	}
	return f.lease.explain(err)
}
