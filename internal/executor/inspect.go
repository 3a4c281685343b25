package executor

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/lease"
)

// answerGrace is how much longer than the call limit a client may wait for an answer before its report ends a worker.
// The executor itself reads the worker's page more often, and reports the overrun more precisely if the page is true.
const answerGrace = time.Second

// Inspect returns what a worker is doing and has printed. A dead worker is shown as it ended, until it is replaced. The
// worker's page may be forged, so the call limit is also enforced by the client's report of how long the worker has not
// answered.
func (e *Executor) Inspect(ctx context.Context, req *control.InspectRequest) (*control.InspectReply, error) {
	e.bookClaimFor(lease.ID(req.GetLeaseId()))
	h, err := e.findFor(ctx, "Inspect", lease.ID(req.GetLeaseId()))
	if err != nil {
		return nil, err
	}
	w, err := h.worker(req.GetWorker())
	if err != nil {
		return nil, err
	}
	if unanswered, limit := req.GetUnansweredMs(), w.CallLimit(); limit > 0 && unanswered > uint64((limit+answerGrace)/time.Millisecond) {
		e.endOverdue(h, req.GetWorker(), w, unanswered, limit)
	}
	c := w.Counters()
	cpu, _ := w.CPUTime()
	return &control.InspectReply{Pid: int32(w.PID()), Running: w.Running(), OutputTail: w.OutputTail(), Calls: c.Calls,
		Failed: c.Failed, Refused: c.Refused, BytesIn: c.BytesIn, BytesOut: c.BytesOut, CpuNs: uint64(cpu), Runnable: runnable(w.PID())}, nil
}

// runnable reports whether the main thread of a process runs or is ready to run.
func runnable(pid int) bool {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, found := bytes.Cut(b, []byte(") "))
	return found && rest[0] == 'R'
}

// endOverdue ends a worker that its client reports as overdue. It does so once, however often the client reports it.
func (e *Executor) endOverdue(h *holding, seat uint32, w Worker, unanswered uint64, limit time.Duration) {
	h.mu.Lock()
	s := &h.seats[seat]
	told := s.overdue == w || s.dead
	s.overdue = w
	h.mu.Unlock()
	if told {
		return
	}
	e.tell(h, slog.LevelInfo, "killing a worker that has not answered its client within the call limit", "lease", uint64(h.id), "worker", seat,
		"pid", w.PID(), "unanswered_ms", unanswered, "limit", limit)
	e.work.Go(func() { w.EndCall(limit) })
}

// worker returns the current worker of a seat.
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
