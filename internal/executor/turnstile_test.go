package executor

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// TestTurnstile shuts a turnstile while something is inside.
func TestTurnstile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns turnstile
		leave := turns.enter()
		yielding, leaveToo := turns.enterToYield(t.Context())
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := turns.close(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("shut while something is inside: %v", err)
		}
		if context.Cause(yielding) != errHandsOver {
			t.Errorf("an operation that yields: %v", context.Cause(yielding))
		}
		leaveToo()
		turns.enter()() // it is open again
		if ctx, leave := turns.enterToYield(t.Context()); ctx.Err() != nil {
			t.Errorf("it is open again, and ends an operation: %v", context.Cause(ctx))
		} else {
			leave()
		}
		shut := make(chan error)
		go func() { shut <- turns.close(t.Context()) }()
		synctest.Wait()
		entered := false
		go func() {
			defer turns.enter()()
			entered = true
		}()
		synctest.Wait()
		if entered {
			t.Error("entered while it is being shut")
		}
		leave()
		if err := <-shut; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if entered {
			t.Error("entered while it is shut")
		}
		turns.open()
		synctest.Wait()
		if !entered {
			t.Error("not entered after it was opened")
		}
	})
}
