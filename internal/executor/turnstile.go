package executor

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// turnstile lets operations that change leases pass, until it is shut for a handover. The zero value is open.
type turnstile struct {
	mu     sync.Mutex
	inside int
	yields map[*byte]context.CancelCauseFunc // cancel functions of the transfers and init calls that close ends
	shut   chan struct{}                     // closed when the turnstile opens again; nil: it is open
	empty  chan struct{}                     // closed when no operation is inside any more; nil: close is not waiting
}

// enter waits while the turnstile is shut. The caller calls leave after its operation. It must not enter again before, because
// the turnstile may be shut in between.
func (t *turnstile) enter() (leave func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.shut != nil {
		shut := t.shut
		t.mu.Unlock()
		<-shut
		t.mu.Lock()
	}
	t.inside++
	return t.leave
}

// yieldTo runs a transfer, which may take as long as its client wants. close ends the transfer's context. yieldTo then returns errHandsOver
// when the turnstile is open again. If the new program has taken over by then, the client's connection is broken instead. In both cases the
// client repeats its request.
func (t *turnstile) yieldTo(parent context.Context, transfer func(context.Context) error) error {
	leave := t.enter()
	ctx, cancel := context.WithCancelCause(parent)
	stop := t.endOnClose(cancel)
	err := transfer(ctx)
	cancel(nil)
	stop()
	leave()
	if err == nil || context.Cause(ctx) != errHandsOver {
		return err
	}
	t.enter()()
	return errHandsOver
}

// endOnClose lets close call cancel with errHandsOver, until stop is called. The caller has entered.
func (t *turnstile) endOnClose(cancel context.CancelCauseFunc) (stop func()) {
	key := new(byte)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shut != nil { // close was called after enter returned
		cancel(errHandsOver)
	}
	if t.yields == nil {
		t.yields = map[*byte]context.CancelCauseFunc{}
	}
	t.yields[key] = cancel
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.yields, key)
	}
}

// closing returns a context that ends when close is called. The caller has entered, and must call stop.
func (t *turnstile) closing() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	remove := t.endOnClose(cancel)
	return ctx, func() { remove(); cancel(nil) }
}

// errHandsOver has no class, like the error of a connection that breaks, so that clients repeat the request.
var errHandsOver = status.Error(codes.Unavailable, "the executor hands over to the program that is installed now")

func (t *turnstile) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.inside--; t.inside == 0 && t.empty != nil {
		close(t.empty)
		t.empty = nil
	}
}

// close shuts the turnstile, ends the transfers and the init calls of seeds, and waits until no operation is inside. If ctx ends first, it opens the turnstile again and
// returns an error.
func (t *turnstile) close(ctx context.Context) error {
	t.mu.Lock()
	t.shut = make(chan struct{})
	for _, end := range t.yields {
		end(errHandsOver)
	}
	empty := make(chan struct{})
	if t.empty = empty; t.inside == 0 {
		close(empty)
		t.empty = nil
	}
	t.mu.Unlock()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	left := t.inside
	t.mu.Unlock()
	t.open()
	return fmt.Errorf("%d operations on leases have not ended: %w", left, context.Cause(ctx))
}

// open lets operations pass again.
func (t *turnstile) open() {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.shut)
	t.shut, t.empty = nil, nil
}
