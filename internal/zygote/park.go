package zygote

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Park ends a worker's service for a lease and keeps the process: it runs no function any more, whatever its client sends,
// and when Park returns it is stopped (SIGSTOP), all of its process group, so that it uses no processor. Its memory, queue
// pair and code stay. The calls that it has got are finished first. After an error the worker is of no use and must be
// killed. Not to be called together with Resume, Stop or Finish.
func (w *Worker) Park(ctx context.Context) error {
	if _, err := w.tell(ctx, msgPark, nil, msgParked); err != nil {
		return fmt.Errorf("park worker %d: %w", w.id, err)
	}
	w.parked.Store(true)
	w.signalAll(unix.SIGSTOP)
	return nil
}

// Resume makes a parked worker serve its client again, under the new generation that the client's blob has; Blob is the
// answer. After an error the worker must be killed.
func (w *Worker) Resume(ctx context.Context, clientBlob []byte) error {
	asked := time.Now()
	before := w.page.counters()
	w.before.Store(&before)
	w.signalAll(unix.SIGCONT)
	w.parked.Store(false)
	m, err := w.tell(ctx, msgResume, clientBlob, msgResumed)
	if err != nil {
		return fmt.Errorf("resume worker %d: %w", w.id, err)
	}
	if len(m.body) == 0 || len(m.body) > blobMax {
		return fmt.Errorf("resume worker %d: its blob has %d bytes", w.id, len(m.body))
	}
	w.blob = append([]byte(nil), m.body...)
	w.steps = Steps{Cached: true, Connect: time.Since(asked)}
	return nil
}

// signalAll sends a signal to the worker's process group, unless it has ended: then the number may be another's.
func (w *Worker) signalAll(s unix.Signal) {
	w.mu.Lock() // keeps it from being reaped
	defer w.mu.Unlock()
	here := control(w.pidfd, func(fd int) error { return unix.PidfdSendSignal(fd, 0, nil, 0) }) == nil
	if here && w.pid > 1 {
		unix.Kill(-w.pid, s)
	}
}

// tell sends a message and waits for its answer. User code can speak on that socket too: the answer says that the worker
// claims something, and another one is an error.
func (w *Worker) tell(ctx context.Context, typ msgType, body []byte, want msgType) (message, error) {
	w.conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	m := message{typ, w.id, body}
	if _, err := w.conn.Write(m.encode()); err != nil {
		return message{}, err
	}
	w.conn.SetReadDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { w.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, msgMax)
	n, err := w.conn.Read(buf)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer: %w", context.Cause(ctx))
		}
		return message{}, err
	}
	m, err = decodeMessage(buf[:n])
	switch {
	case err != nil:
		return message{}, err
	case m.typ == msgFailed:
		return message{}, m.failure()
	case m.typ != want:
		return message{}, fmt.Errorf("unexpected message of type %d with %d bytes", m.typ, len(m.body))
	}
	return m, nil
}
