package executor

import (
	"context"
	"log/slog"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/lease"
)

// answerGrace is how much longer than the call limit a client may have no answer before its word ends a worker. The executor itself
// looks at the worker's page more often than that, and says better what was too long if the page is true.
const answerGrace = time.Second

// Inspect shows what a worker does and has printed. A dead one is shown as it ended, until it is replaced.
// The worker's page could be forged, so the call limit also counts by the client's word: how long the worker has not answered.
func (e *Executor) Inspect(ctx context.Context, req *control.InspectRequest) (*control.InspectReply, error) {
	h, err := e.findFor(ctx, "Inspect", lease.ID(req.GetLeaseId()))
	if err != nil {
		return nil, err
	}
	w, err := h.worker(req.GetWorker())
	if err != nil {
		return nil, err
	}
	if unanswered, limit := req.GetUnansweredMs(), h.spec.CallLimit; limit > 0 && unanswered > uint64((limit+answerGrace)/time.Millisecond) {
		e.endOverdue(h, req.GetWorker(), w, unanswered)
	}
	c := w.Counters()
	return &control.InspectReply{Pid: int32(w.PID()), Running: w.Running(), OutputTail: w.OutputTail(), Calls: c.Calls,
		Failed: c.Failed, Refused: c.Refused, BytesIn: c.BytesIn, BytesOut: c.BytesOut}, nil
}

// endOverdue ends a worker by its client's word, however often the client says it.
func (e *Executor) endOverdue(h *holding, seat uint32, w Worker, unanswered uint64) {
	h.mu.Lock()
	s := &h.seats[seat]
	told := s.overdue == w || s.dead
	s.overdue = w
	h.mu.Unlock()
	if told {
		return
	}
	limit := h.spec.CallLimit
	e.tell(h, slog.LevelInfo, "a worker has not answered its client for longer than a call may take", "lease", uint64(h.id), "worker", seat,
		"pid", w.PID(), "unanswered_ms", unanswered, "limit", limit)
	e.work.Go(func() { w.EndCall(limit) })
}

// worker is the present worker of a seat.
func (h *holding) worker(i uint32) (Worker, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i >= uint32(len(h.seats)) {
		return nil, invalidf("worker %d: lease %d has workers 0 to %d", i, h.id, len(h.seats)-1)
	}
	if w := h.seats[i].worker; w != nil {
		return w, nil
	}
	return nil, control.Errorf(control.ClassBusy, "worker %d of lease %d is being started", i, h.id)
}
