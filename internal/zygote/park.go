package zygote

import (
	"context"
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/sandbox"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Park ends a worker's service for a lease and keeps the process. The worker runs no function any more, whatever its client sends,
// and when Park returns it is frozen with all processes that its functions have started: none of them uses a processor, whatever
// signals and timers they have. Its memory, queue pair and code stay. The calls that the worker has got are finished first. Where
// its control group has no freezer, the error wraps sandbox.ErrNoFreezer: a function that arranged for SIGCONT would run on after
// SIGSTOP. After an error the worker is of no use and must be killed. Not to be called together with Resume, Stop or Finish.
func (w *Worker) Park(ctx context.Context) error {
	err := sandbox.ErrNoFreezer
	if w.group.CanFreeze() {
		_, err = w.tell(ctx, wire.Park, nil, wire.Parked)
	}
	if err == nil {
		err = w.group.Freeze(ctx)
	}
	if err != nil {
		return fmt.Errorf("park worker %d: %w", w.id, err)
	}
	if w.killed.Load() || w.verdict.Load() != nil { // while it froze, perhaps: the spawner may have thawed it too early
		w.group.LetDie()
	}
	return nil
}

// Resume makes a parked worker serve its client again, under the new generation that the client's blob has; Blob is the
// answer. After an error the worker must be killed.
func (w *Worker) Resume(ctx context.Context, clientBlob []byte) error {
	asked := time.Now()
	before := w.page.counters()
	w.before.Store(&before)
	if err := w.group.Thaw(); err != nil {
		return fmt.Errorf("resume worker %d: %w", w.id, err)
	}
	m, err := w.tell(ctx, wire.Resume, clientBlob, wire.Resumed)
	if err != nil {
		return fmt.Errorf("resume worker %d: %w", w.id, err)
	}
	if len(m.Body) == 0 || len(m.Body) > blobMax {
		return fmt.Errorf("resume worker %d: its blob has %d bytes", w.id, len(m.Body))
	}
	w.blob = append([]byte(nil), m.Body...)
	w.steps = Steps{Cached: true, Connect: time.Since(asked)}
	return nil
}

// tell sends a message and waits for its answer. User code can speak on that socket too: the answer says that the worker
// claims something, and another one is an error.
func (w *Worker) tell(ctx context.Context, typ wire.Type, body []byte, want wire.Type) (wire.Message, error) {
	w.conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	m := wire.Message{Type: typ, ID: w.id, Body: body}
	if _, err := w.conn.Write(m.Encode()); err != nil {
		return wire.Message{}, err
	}
	w.conn.SetReadDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { w.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, wire.Max)
	n, err := w.conn.Read(buf)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer: %w", context.Cause(ctx))
		}
		return wire.Message{}, err
	}
	m, err = wire.Decode(buf[:n])
	switch {
	case err != nil:
		return wire.Message{}, err
	case m.Type == wire.Failed:
		return wire.Message{}, m.Failure()
	case m.Type != want:
		return wire.Message{}, fmt.Errorf("unexpected message of type %d with %d bytes", m.Type, len(m.Body))
	}
	return m, nil
}
