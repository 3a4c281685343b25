package zygote

import (
	"cmp"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/beat"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

const (
	// tracePatience is how long a function that exceeded its time limit may take to report where it is.
	tracePatience = time.Second

	shortestLook = 5 * time.Millisecond
	longestLook  = 250 * time.Millisecond
)

// end kills the worker for a reason of the executor. The first reason counts.
func (w *Worker) end(v verdict) {
	w.judge(v)
	w.command(wire.Kill)
}

// judge records why the executor ends the worker. The first reason counts.
func (w *Worker) judge(v verdict) {
	w.z.verdicts.RLock()
	defer w.z.verdicts.RUnlock()
	w.verdict.CompareAndSwap(nil, &v)
}

// callLimit is how long a worker's calls may run; 0: no limit.
type callLimit struct {
	call, init time.Duration
	before     atomic.Uint64 // calls of the process before its present lease
	inits      atomic.Int64  // nanoseconds for which calls have run under the limit of the init call
	begun      atomic.Bool   // the init call has returned, or has had its time. A function cannot undo this by writing to the page
}

// now returns how long the present call may run, when the process has executed so many calls.
func (l *callLimit) now(calls uint64) time.Duration {
	if !l.begun.Load() && calls == l.before.Load() {
		return l.init
	}
	l.begun.Store(true)
	return l.call
}

// ran notes that calls have run for d. A thread that the init call has left behind could write to the page, so that this call seems not to have returned.
// So the init call's limit no longer holds when calls have run for that long. slack: how late a call at its limit is ended.
func (l *callLimit) ran(d, slack time.Duration) {
	if !l.begun.Load() && l.init > 0 && l.inits.Add(int64(d)) > int64(l.init+slack) {
		l.begun.Store(true)
	}
}

// next makes the next call of the process the init call of another lease.
func (l *callLimit) next(calls uint64) {
	l.before.Store(calls)
	l.inits.Store(0)
	l.begun.Store(false)
}

// CallLimit returns how long the present call may run; 0: no limit.
func (w *Worker) CallLimit() time.Duration { return w.limit.now(w.page.calls()) }

// limitCalls ends the worker when one call takes longer than its limit. It reads the worker's page at intervals, so the
// worker itself reads no clock. A call is never ended early, and at most about two intervals late. Time in which it
// could not read the page, for instance because the whole node was suspended, counts as one interval. A function that
// writes to the page can deceive it. Then the client's report (Executor.Inspect) or the end of the lease ends the
// worker.
func (w *Worker) limitCalls() {
	pause := min(max(min(cmp.Or(w.limit.call, w.limit.init), cmp.Or(w.limit.init, w.limit.call))/8, shortestLook), longestLook)
	look := beat.New(pause)
	defer look.Stop()
	var seen uint64
	var lasted time.Duration
	last := time.Now()
	for {
		select {
		case <-w.done:
			return
		case <-look.C:
			look.Next()
		}
		now := time.Now()
		passed := min(now.Sub(last), 2*pause)
		last = now
		limit := w.CallLimit()
		call, _, running := w.page.running()
		if running {
			w.limit.ran(passed, 4*pause)
		}
		switch {
		case !running || call != seen:
			seen, lasted = call, 0
		case limit == 0 || lasted+passed < limit:
			lasted += passed
		default:
			w.EndCall(limit)
			return
		}
	}
}

// EndCall ends a worker whose call takes longer than limit. The worker first reports where it is.
func (w *Worker) EndCall(limit time.Duration) {
	w.judge(verdict{wire.StatusTimeLimit, timeLimitText(limit)})
	w.command(wire.Explain)
	select {
	case <-w.done:
	case <-time.After(tracePatience):
	}
	w.command(wire.Kill)
}
