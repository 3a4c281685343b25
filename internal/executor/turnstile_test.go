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
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := turns.close(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("shut while something is inside: %v", err)
		}
		turns.enter()() // it is open again
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
