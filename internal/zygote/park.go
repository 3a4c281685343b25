package zygote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
	if err := w.alone(); err != nil {
		w.signalAll(unix.SIGCONT)
		w.parked.Store(false)
		return fmt.Errorf("park worker %d: %w", w.id, err)
	}
	return nil
}

// alone is an error when the worker has processes: those that its functions started run on while it is parked, for some may
// have left its group, and only its end ends them. Those whose parents have ended are the guard's.
func (w *Worker) alone() error {
	if err := hasChildren(w.pid); err != nil || w.guard == nil {
		return err
	}
	guard, err := pidOf(w.guard)
	if err != nil {
		return err
	}
	return hasChildren(guard)
}

// hasChildren is an error when a process has children, or when that cannot be told.
func hasChildren(pid int) error {
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err == nil && len(lists) == 0 {
		err = fmt.Errorf("/proc does not tell the children of process %d", pid)
	}
	for _, list := range lists {
		text, rerr := os.ReadFile(list)
		if rerr != nil && !errors.Is(rerr, fs.ErrNotExist) && !errors.Is(rerr, unix.ESRCH) { // a thread may have ended
			err = errors.Join(err, rerr)
		}
		if len(text) > 0 {
			err = errors.Join(err, fmt.Errorf("process %d has children: %s", pid, bytes.TrimSpace(text)))
		}
	}
	return err
}

// pidOf is the number of the process of a pidfd.
func pidOf(pidfd *os.File) (pid int, err error) {
	var info []byte
	if err := control(pidfd, func(fd int) (err error) {
		info, err = os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
		return err
	}); err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if n, ok := strings.CutPrefix(line, "Pid:"); ok {
			return strconv.Atoi(strings.TrimSpace(n))
		}
	}
	return 0, fmt.Errorf("no process number in %q", info)
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
