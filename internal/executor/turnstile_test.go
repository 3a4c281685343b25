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
		yielded := make(chan error, 1)
		go func() {
			yielded <- turns.yieldTo(t.Context(), func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			})
		}()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := turns.close(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("shut while something is inside: %v", err)
		}
		if err := <-yielded; err != errHandsOver {
			t.Errorf("a transfer: %v", err)
		}
		turns.enter()() // it is open again
		if err := turns.yieldTo(t.Context(), func(ctx context.Context) error { return ctx.Err() }); err != nil {
			t.Errorf("it is open again, and ends a transfer: %v", err)
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
