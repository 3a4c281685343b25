package executor

import (
	"time"

	"github.com/rfaas-go/rfaas/internal/config"
)

// wantedBack returns a channel that fires when the executor must begin to drain so as to be gone when its node is wanted
// back: the grace before. It never fires if no time is known. stop frees the timer.
func wantedBack(s *config.Executor, now time.Time) (fires <-chan time.Time, stop func()) {
	if s.Until.IsZero() {
		return nil, func() {}
	}
	t := time.NewTimer(s.Until.Time().Add(-s.Grace).Sub(now))
	return t.C, func() { t.Stop() }
}

// beforeUntil shortens a lease that would outlast the executor. It stays above zero: at the very end the drain decides.
func beforeUntil(s *config.Executor, d time.Duration, now time.Time) time.Duration {
	if s.Until.IsZero() {
		return d
	}
	return max(min(d, s.Until.Time().Add(-s.Grace).Sub(now)), time.Millisecond)
}
