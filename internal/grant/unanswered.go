package grant

import (
	"context"
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// A worker that does not answer either runs a long function, or never will answer because a function has damaged its memory. The
// executor can tell these apart: a damaged worker runs nothing and counts no calls, although calls wait for it. It takes two looks that
// find this, and no answer until after the second, because a good worker may be about to begin a call or have just ended one.
const (
	lookAgain  = time.Second      // between two looks at a worker that runs nothing
	lookMost   = 30 * time.Second // longest pause between looks at a worker that runs a function; each is twice the one before
	lookBound  = 2 * time.Second  // longest time of one look
	enoughCPU  = time.Millisecond // CPU time between two looks; with less, a worker that is ready to run is not judged
	reportsMax = 64               // reports in the queue; more are dropped, because channels repeat them
)

// Unanswered is the report of a channel about a worker that does not answer. Times are of dataplane.Now.
type Unanswered struct {
	Worker    int
	Since, At int64 // no answer in this time, although calls that were sent before must have reached it
}

// Unanswered starts to find out why a worker does not answer, and returns at once. The caller repeats the report while that lasts. If
// the worker never will answer, the watch reports that it died, although its process lives; replacing it ends the process. Safe for
// concurrent use.
func (h *Held) Unanswered(s Unanswered) {
	if s.Since == 0 || s.Worker < 0 || s.Worker >= h.Wanted {
		return
	}
	select {
	case h.unanswered <- s:
	default:
	}
}

// suspicion is the state of one worker that does not answer.
type suspicion struct {
	since  int64
	looked int64 // when the last look was over; 0: none was
	next   int64 // not to be looked at again before
	pause  time.Duration
	idle   int // looks in a row that found the same worker as it was, running nothing
	saw    Inspection
	over   bool
}

// judge handles reports until ctx ends, and calls dead for workers that never will answer.
func (h *Held) judge(ctx context.Context, dead func(Event)) {
	known := make(map[int]*suspicion)
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-h.unanswered:
			k := known[s.Worker]
			if k == nil || k.since != s.Since {
				k = &suspicion{since: s.Since, pause: lookAgain}
				known[s.Worker] = k
			}
			switch k.now(s.At, dataplane.Now()) {
			case bury:
				dead(k.verdict(&s))
			case look:
				bound, cancel := context.WithTimeout(ctx, lookBound)
				i, err := h.inspect(bound, s.Worker, time.Duration(s.At-s.Since))
				cancel()
				k.take(&i, err, dataplane.Now())
			}
		}
	}
}

// What to do about a suspicion.
const (
	wait = iota
	look
	bury
)

// now returns what to do if there was no answer until at.
func (k *suspicion) now(at, now int64) int {
	switch {
	case k.over || at <= k.looked: // of before the last look
		return wait
	case k.idle >= 2:
		k.over = true
		return bury
	case now < k.next:
		return wait
	}
	return look
}

// take handles the result of a look that ended at now.
func (k *suspicion) take(i *Inspection, err error, now int64) {
	k.looked = now
	k.next = k.looked + int64(lookAgain)
	switch {
	case err != nil: // the event stream notices an executor that does not answer
		k.idle = 0
	case i.Running != "":
		k.idle = 0
		k.next = k.looked + int64(k.pause)
		k.pause = min(2*k.pause, lookMost)
	case k.idle > 0 && i.PID == k.saw.PID && i.Runnable && i.CPU-k.saw.CPU < enoughCPU: // other processes occupy its processor
	case k.idle > 0 && i.PID == k.saw.PID && i.Calls == k.saw.Calls && i.Refused == k.saw.Refused:
		k.idle++
	default:
		k.idle = 1
	}
	k.saw = *i
}

func (k *suspicion) verdict(s *Unanswered) Event {
	return Event{Kind: WorkerDied, Worker: s.Worker, PID: k.saw.PID, Status: dataplane.StatusWorkerDied, Output: k.saw.Output,
		Reason: fmt.Sprintf("it is alive but runs no function, and has not answered for %v: a function may have overwritten its memory",
			time.Duration(s.At-s.Since).Round(100*time.Millisecond))}
}
