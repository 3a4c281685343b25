package zygote

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/sandbox"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Suspend ends a worker's service for a lease and keeps the process. The worker first finishes the calls that it has
// received. Then it runs no function, whatever its client sends. When Suspend returns, the worker and all processes that
// its functions have started are frozen: they use no processor time, whatever signals and timers they have. Memory,
// queue pair and code stay. If the control group has no freezer, the error wraps sandbox.ErrNoFreezer: SIGSTOP would
// not stop a function that has arranged for a SIGCONT. After Suspend, even if it fails, Stop and Finish end the worker as
// before. After an error it cannot be resumed. Suspend must not run at the same time as Resume, Stop or Finish.
func (w *Worker) Suspend(ctx context.Context) error {
	err := sandbox.ErrNoFreezer
	if w.group.CanFreeze() {
		_, err = w.tell(ctx, wire.Suspend, nil, wire.Suspended)
	}
	if err == nil {
		w.frozen.Store(true) // also after an error, which may leave some of the processes frozen
		err = w.group.Freeze(ctx)
	}
	if err != nil {
		return fmt.Errorf("suspend worker %d: %w", w.id, err)
	}
	w.ExpectLease()
	if w.killed.Load() || w.verdict.Load() != nil { // the spawner may have thawed the group before it was frozen
		w.group.LetDie()
	}
	return nil
}

// ExpectLease makes the next call of the worker the init call of another lease, which may claim the worker before it is suspended.
func (w *Worker) ExpectLease() { w.limit.next(w.page.calls()) }

// Resume makes a suspended worker serve its client again, under the generation of the new client blob. It does not wait for
// the worker, which serves calls that arrive earlier. The worker ends if the blob is not that of its client. After an error the worker must be
// killed.
//
// The first Resume of a late worker (Spec.Late) connects it to the client of that blob. It waits for the worker's own blob until ctx ends, and Blob
// returns it from then on.
func (w *Worker) Resume(ctx context.Context, clientBlob []byte) error {
	asked := time.Now()
	before := w.page.counters()
	w.before.Store(&before)
	if err := w.group.Thaw(); err != nil {
		return fmt.Errorf("resume worker %d: %w", w.id, err)
	}
	w.frozen.Store(false)
	err := w.sendResume(ctx, clientBlob)
	if err != nil {
		return fmt.Errorf("resume worker %d: %w", w.id, err)
	}
	w.steps = Steps{Cached: true, Connect: time.Since(asked)}
	return nil
}

func (w *Worker) sendResume(ctx context.Context, clientBlob []byte) error {
	if !w.late {
		return w.send(wire.Resume, clientBlob)
	}
	m, err := w.tell(ctx, wire.Resume, clientBlob, wire.Resumed)
	if err == nil && (len(m.Body) == 0 || len(m.Body) > blobMax) {
		err = fmt.Errorf("its blob has %d bytes, not 1..%d", len(m.Body), blobMax)
	}
	if err == nil {
		w.blob, w.late = bytes.Clone(m.Body), false
	}
	return err
}

// Claimable returns what a claim needs to resume the worker once it is suspended (internal/claim). The caller closes it. The worker may end at any
// time, and then its own descriptors are closed and their numbers may name other files. So these are copies.
func (w *Worker) Claimable() (c claim.Worker, err error) {
	if c.Freezer, c.Old, err = w.group.Freezer(); err != nil {
		return c, err
	}
	if c.Page, err = w.page.share(); err != nil {
		unix.Close(c.Freezer)
	}
	return c, err
}

// Claimed records that another lease has claimed the worker. counted is what Counters has returned for the lease before; what the worker counts
// beyond that belongs to the new lease.
func (w *Worker) Claimed(counted Counters) {
	if b := w.before.Load(); b != nil {
		counted = counted.plus(b)
	}
	w.before.Store(&counted)
	w.frozen.Store(false)
	w.steps = Steps{Cached: true}
}

// Connect hands the worker its client's connection, and the hello with which it began. The worker continues with it from the byte after
// the hello. The caller keeps c.
func (w *Worker) Connect(c *net.TCPConn, hello []byte) error {
	err := wire.Control(c, func(fd int) error { return w.send(wire.Socket, hello, fd) })
	if err != nil {
		return fmt.Errorf("connect worker %d: %w", w.id, err)
	}
	return nil
}

// roomWithin is how long a message to a worker waits for room in the worker's socket.
const roomWithin = 100 * time.Millisecond

// send sends a message. The worker has to read its socket, so that there is room for the message.
func (w *Worker) send(typ wire.Type, body []byte, fds ...int) error {
	return wire.SendWithin(w.conn, roomWithin, &wire.Message{Type: typ, ID: w.id, Body: body}, fds...)
}

// tell sends a message and waits for its answer. User code can write to that socket too, so the answer is only the
// worker's claim. Any other message is an error.
func (w *Worker) tell(ctx context.Context, typ wire.Type, body []byte, want wire.Type) (wire.Message, error) {
	if err := w.send(typ, body); err != nil {
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
	m, err := wire.Decode(buf[:n])
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
