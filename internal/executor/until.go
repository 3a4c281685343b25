package executor

import (
	"context"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// wantedBack is when the node is wanted back: the time of the setting, until an operator reports another one. The executor starts to drain one grace
// earlier, so that it has ended by then. Safe for concurrent use.
type wantedBack struct {
	grace time.Duration
	moved chan struct{} // capacity 1
	told  func()        // called when the time has changed; does not block

	mu sync.Mutex
	at time.Time // zero: not known
}

func newWantedBack(at time.Time, grace time.Duration) *wantedBack {
	return &wantedBack{grace: grace, at: at, moved: make(chan struct{}, 1), told: func() {}}
}

// get is the time, zero if it is not known.
func (w *wantedBack) get() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.at
}

// unix is get in seconds, 0 if it is not known.
func (w *wantedBack) unix() uint64 {
	if at := w.get(); !at.IsZero() {
		return uint64(max(at.Unix(), 0))
	}
	return 0
}

func (w *wantedBack) set(at time.Time) {
	w.mu.Lock()
	w.at = at
	w.mu.Unlock()
	w.told()
	select {
	case w.moved <- struct{}{}:
	default:
	}
}

// wait returns when it is time to drain, or when ctx ends. One goroutine at a time.
func (w *wantedBack) wait(ctx context.Context) {
	for {
		var due <-chan time.Time
		var timer *time.Timer
		if at := w.get(); !at.IsZero() {
			timer = time.NewTimer(time.Until(at.Add(-w.grace)))
			due = timer.C
		}
		select {
		case <-due:
			return
		case <-ctx.Done():
		case <-w.moved:
		}
		if timer != nil {
			timer.Stop()
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// before shortens a lease that would outlast the executor. It stays above zero: at the very end the drain decides.
func (w *wantedBack) before(d time.Duration, now time.Time) time.Duration {
	at := w.get()
	if at.IsZero() {
		return d
	}
	return max(min(d, at.Add(-w.grace).Sub(now)), time.Millisecond)
}

// latestUntil bounds what Until takes: the board has 40 bits for it.
const latestUntil = 1<<40 - 1

// Until moves the time at which the node is wanted back. What was leased for longer ends with the drain.
func (e *Executor) Until(_ context.Context, req *control.UntilRequest) (*control.UntilReply, error) {
	s := req.GetUntil()
	if s > latestUntil {
		return nil, invalidf("until %d: want a Unix time in seconds, 0 if it is not known", s)
	}
	var at time.Time
	if s > 0 {
		at = time.Unix(int64(s), 0)
	}
	if e.back.unix() != s {
		e.back.set(at)
		e.log.Info("the time at which the node is wanted back has changed", "until", s)
		e.changed()
	}
	return &control.UntilReply{}, nil
}
