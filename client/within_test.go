package client

import (
	"context"
	"errors"
	"testing"
)

// If the context of an operation ends, the session undoes what the operation has done before it closes.
func TestUndoneBeforeItIsOver(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancelled, undone, over := make(chan struct{}), make(chan struct{}), make(chan bool)
	_, err := within(ctx, "test", func() (int, error) {
		cancel()
		<-cancelled
		return 1, nil
	}, func(int) { close(undone) }, func() {
		select {
		case <-undone:
			over <- true
		default:
			over <- false
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(cancelled)
	if !<-over {
		t.Error("it is over before it is undone")
	}
}
