package zygote

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Worker is a worker process, running or ended. It is safe for concurrent use.
type Worker struct {
	id     uint32
	pid    int // set before the Worker is returned
	z      *Zygote
	group  *sandbox.Group // may be nil
	memory uint64         // initial memory limit of the group, in bytes
	conn   *net.UnixConn
	output *output
	page   *page
	blob   []byte
	late   bool // no client yet: the first Resume names it
	paged  bool // its seed's pages come on demand, and it has not asked for that yet
	began  bool // STARTED was received; later workers set begun in their page instead
	ready  bool // PREPARED was received, so user code may run from now on
	asked  time.Time
	steps  Steps // of the start

	// From the spawner; each has capacity 1.
	answer chan answer    // to the request for this worker
	exited chan wire.Exit // its end
	device chan uint32    // wire.Device*

	used atomic.Int64 // CPU time of its control group, set when the worker and its resources are gone; 0: no group

	pages atomic.Pointer[os.File] // its userfaultfd, until it is used or cannot be any more; nil: none

	limit  callLimit
	serves atomic.Pointer[Spec] // spec of its lease; empty while it waits for a lease

	stopped atomic.Bool // Stop was called, so a clean exit is expected
	killed  atomic.Bool
	frozen  atomic.Bool             // Suspend has begun to freeze it
	verdict atomic.Pointer[verdict] // why the executor ended it
	scarce  atomic.Bool             // it ended because this process has no file descriptors left
	done    chan struct{}
	gone    chan struct{} // closed when its process and resources are gone, even if it was never started
	exit    Exit          // set before done is closed

	// conn is closed by the later of watch and start, since start may still read what the worker sent before its end.
	mu       sync.Mutex
	starting bool
	heard    chan struct{} // closed when starting ends; nil: nothing waits for that
	ended    bool

	before atomic.Pointer[Counters] // of earlier leases
}

// Blob returns the worker's channel blob, for the client to connect to. That of a late worker is valid after its first Resume. The caller must
// not change it.
func (w *Worker) Blob() []byte { return w.blob }

// PID returns the worker's process id, for messages only: after Done another process may have it.
func (w *Worker) PID() int { return w.pid }

// Done returns a channel that is closed when the process has ended and was reaped. Its cores are then free and its keys
// invalid.
func (w *Worker) Done() <-chan struct{} { return w.done }

// Exit returns how the worker ended. Before Done is closed its Reason is "running".
func (w *Worker) Exit() Exit {
	select {
	case <-w.done:
		return w.exit
	default:
		return Exit{Reason: "running"}
	}
}

// OutputTail returns the last TailSize bytes that the worker has printed so far.
func (w *Worker) OutputTail() []byte { return w.output.bytes() }

// Counters returns the worker's own counters since it was last resumed. User code can forge them.
func (w *Worker) Counters() Counters {
	c := w.page.counters()
	if b := w.before.Load(); b != nil {
		c = c.since(b)
	}
	return c
}

// ClientGone reports whether the worker has noted that its client's process has ended. A worker on shared memory notes it also while
// it runs a function. A worker on verbs exits instead, as soon as it runs none. User code can forge the answer.
func (w *Worker) ClientGone() bool { return w.page.clientGone() }

// CPUTime returns how much CPU time all processes of the worker's control group have used, including ended ones.
// Without a group it returns that of the worker's own process, and false when that has ended.
func (w *Worker) CPUTime() (time.Duration, bool) {
	if used := w.used.Load(); used > 0 {
		return time.Duration(used), true
	}
	if used, ok := w.group.CPUTime(); ok {
		return used, true
	}
	// The CPU clock of another process, as clock_getcpuclockid computes it: ~pid << 3 | CPUCLOCK_SCHED.
	var ts unix.Timespec
	err := unix.ClockGettime(int32(^w.pid)<<3|2, &ts)
	select {
	case <-w.done: // another process may have the process id now
		used := w.used.Load()
		return time.Duration(used), used > 0
	default:
		return time.Duration(ts.Nano()), err == nil
	}
}

// Running returns the function that is running now, "" between calls.
func (w *Worker) Running() string {
	names := w.serves.Load().Names
	if _, index, ok := w.page.running(); ok && index < len(names) {
		return names[index]
	}
	return ""
}

// Steps has the durations of the steps of a worker's start, as measured by this process.
type Steps struct {
	Fork    time.Duration // from the request to its first instruction, including its first messages
	Sandbox time.Duration // namespaces, credentials, filters; the work of its guard process is in Fork
	Connect time.Duration // device, memory, queue pair; of a pooled worker on shm, until its client's answer
	Code    time.Duration // the library, including its constructors
	Overlay time.Duration // the part of Code in which the seed is laid over the worker's memory
	Pooled  bool          // a pooled worker: Fork is the time to wake it
	Cached  bool          // a cached worker: Connect is the duration of Resume
	Seeded  bool          // it has the state of its seed. Code includes the time for that
	// Unseeded says why a worker whose Spec has a seed does not have the seed's state.
	Unseeded string
}

// Steps returns the durations of this worker's start.
func (w *Worker) Steps() Steps { return w.steps }

// Kill kills the process without waiting for its end.
func (w *Worker) Kill() {
	w.killed.Store(true)
	w.command(wire.Kill)
}

// command sends the spawner a command for the worker. A worker that has ended is no error.
func (w *Worker) command(typ wire.Type) {
	if err := w.z.send(&wire.Message{Type: typ, ID: w.id}); err != nil {
		w.z.spawner.conn.Close() // receive ends everything
	}
}

// Stop lets the running call finish and ends the worker. If ctx ends first, the worker is killed. Stop blocks until the
// process is reaped. It returns an error that wraps ctx's if the worker was killed.
func (w *Worker) Stop(ctx context.Context) error { return w.leave(ctx, wire.Stop) }

// Finish is Stop after all calls that the client has sent.
func (w *Worker) Finish(ctx context.Context) error { return w.leave(ctx, wire.Finish) }

func (w *Worker) leave(ctx context.Context, how wire.Type) error {
	w.stopped.Store(true)
	if w.frozen.Load() {
		_ = w.group.Thaw() // after an error the worker reads nothing, and is killed when ctx ends
	}
	_ = w.send(how, nil) // fails if the worker has ended or does not read its socket; both cases are handled below
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-w.done:
		return nil
	default:
	}
	w.Kill()
	<-w.done
	return fmt.Errorf("worker %d did not stop and was killed: %w", w.id, context.Cause(ctx))
}

// watch waits for the end of the process and cleans up.
func (w *Worker) watch() {
	end := <-w.exited
	w.closePages()
	w.output.finish()
	w.page.freeze()
	w.used.Store(int64(end.CPU))
	w.exit = w.makeExit(&end)
	w.exit.Reason += w.lastWords(&end)
	w.mu.Lock()
	w.ended = true
	if !w.starting {
		w.conn.Close()
	}
	w.mu.Unlock()
	w.group.Close()
	close(w.gone)
	close(w.done)
}

// closePages closes the worker's userfaultfd if nothing uses it.
func (w *Worker) closePages() {
	if f := w.pages.Swap(nil); f != nil {
		f.Close()
	}
}

// lastWords returns the message of a worker that failed after its start, for example because its client's memory cannot
// be mapped.
func (w *Worker) lastWords(end *wire.Exit) string {
	if end.Code != exitFailed || end.Signal != 0 {
		return ""
	}
	w.mu.Lock()
	var heard chan struct{}
	if w.starting { // start has not read LOADED or FAILED yet, and must read it itself
		heard = make(chan struct{})
		w.heard = heard
	}
	w.mu.Unlock()
	if heard != nil {
		select {
		case <-heard:
		case <-time.After(100 * time.Millisecond): // start waits for watch, or is slow: leave the message to it
			return ""
		}
	}
	w.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // the message or the end of file is already there
	buf := make([]byte, wire.Max)
	n, err := w.conn.Read(buf)
	if err != nil {
		return ""
	}
	m, err := wire.Decode(buf[:n])
	if err != nil || m.Type != wire.Failed {
		return ""
	}
	return ": " + m.Failure().Error()
}

// started ends the start: the worker's messages are no longer read.
func (w *Worker) started() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.starting = false
	if w.heard != nil {
		close(w.heard)
		w.heard = nil
	}
	if w.ended {
		w.conn.Close()
	}
}

// await reads the messages of a worker that will wait for its lease, up to PREPARED.
func (w *Worker) await(ctx context.Context) error {
	err := w.hear(ctx, func(m *wire.Message) bool { return m.Type == wire.Prepared })
	w.ready = true
	return err
}

// start reads the worker's messages up to LOADED.
func (w *Worker) start(ctx context.Context) error {
	return w.hear(ctx, func(m *wire.Message) bool {
		if m.Type != wire.Loaded || len(m.Body) <= loadedTimes || len(m.Body) > loadedTimes+blobMax {
			return false
		}
		w.blob = append([]byte(nil), m.Body[loadedTimes:]...)
		w.loaded(time.Since(w.asked), m.Body[:loadedTimes])
		return true
	})
}

// hear reads the worker's messages until one is wanted.
func (w *Worker) hear(ctx context.Context, wanted func(m *wire.Message) bool) error {
	stop := context.AfterFunc(ctx, func() { w.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, wire.Max)
	for {
		m, fds, err := w.next(buf)
		if err != nil {
			return w.startFailed(ctx, err)
		}
		switch {
		case len(fds) == 1 && m.Type == wire.Pages:
			if old := w.pages.Swap(os.NewFile(uintptr(fds[0]), "userfaultfd")); old != nil {
				old.Close()
			}
		case len(fds) > 0:
			wire.CloseAll(fds)
			return fmt.Errorf("worker %d: a descriptor with a message of type %d", w.id, m.Type)
		case m.Type == wire.Laid && w.paged:
			w.paged = false // a worker may ask once
			if err := w.beginPages(ctx); err != nil {
				return err
			}
		case m.Type == wire.Started && !w.began:
			w.began = true
		case m.Type == wire.Unseeded && w.serves.Load().Seed != nil && w.steps.Unseeded == "": // once
			w.steps.Unseeded = cmp.Or(m.Failure().Text, "the worker gives no reason")
		case m.Type == wire.Failed:
			return m.Failure()
		case wanted(&m):
			return nil
		default:
			return fmt.Errorf("worker %d: unexpected message of type %d with %d bytes", w.id, m.Type, len(m.Body))
		}
	}
}

// next reads a message of the worker, which may have a descriptor before user code runs.
func (w *Worker) next(buf []byte) (m wire.Message, fds []int, err error) {
	if w.ready || w.serves.Load().Code != nil {
		// With Read instead of ReadMsgUnix the kernel closes descriptors that user code may send.
		var n int
		if n, err = w.conn.Read(buf); err == nil {
			m, err = wire.Decode(buf[:n])
		}
		return m, nil, err
	}
	return wire.Receive(w.conn, buf, 1)
}

// beginPages begins to fill the memory of the worker's seed on demand.
func (w *Worker) beginPages(ctx context.Context) error {
	if err := w.serves.Load().Seed.paging.attach(ctx, w); err != nil {
		return &WorkerError{Status: wire.StatusWorkerDied, Text: "seed: " + strings.TrimPrefix(err.Error(), "seed: ")}
	}
	if err := w.send(wire.Paged, nil); err != nil {
		return w.startFailed(ctx, err)
	}
	return nil
}

// loadedTimes is the number of bytes in LOADED before the blob.
const loadedTimes = 24

// loaded records how the worker divides the time to LOADED. Its own time includes the times of the sandbox and of the library, and that of the library
// includes the time of the overlay.
func (w *Worker) loaded(took time.Duration, times []byte) {
	part := func(i int, of time.Duration) time.Duration {
		return min(max(time.Duration(binary.LittleEndian.Uint64(times[8*i:])), 0), of)
	}
	own := part(0, took)
	w.steps.Fork = took - own
	w.steps.Sandbox = part(1, own)
	w.steps.Code = part(2, own-w.steps.Sandbox)
	w.steps.Connect = own - w.steps.Sandbox - w.steps.Code
	w.steps.Overlay = min(max(w.page.overlay(), 0), w.steps.Code)
}

// startFailed returns the error when the socket closed or time ran out before LOADED.
func (w *Worker) startFailed(ctx context.Context, err error) error {
	doing, status := "beginning to run", wire.StatusWorkerDied
	switch {
	case w.page.phase() == phaseLoading:
		// The library's constructors were running by then.
		doing, status = "loading the library", wire.StatusBadLibrary
	case w.began || w.page.begun():
		doing = "connecting to the client"
	}
	if ctx.Err() != nil {
		cause := context.Cause(ctx)
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("%w: %w", &WorkerError{Status: status, Text: "worker hangs while " + doing}, cause)
		}
		return fmt.Errorf("start worker: %s: %w", doing, cause)
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		return fmt.Errorf("worker %d: %w", w.id, err)
	}
	// The socket closes when the process ends, unless user code closed it.
	select {
	case <-w.done:
	case <-time.After(time.Second):
		w.Kill()
		<-w.done
	}
	if w.exit.Signal == int(unix.SIGKILL) && status == wire.StatusBadLibrary {
		status = w.exit.Status // the library is not the cause
	}
	text := fmt.Sprintf("worker ended while %s: %s", doing, w.exit.Reason)
	if len(w.exit.OutputTail) > 0 {
		text += "; it printed: " + wire.Printable(w.exit.OutputTail)
	}
	if w.scarce.Load() {
		return fmt.Errorf("%w: %w", &WorkerError{Status: status, Text: text}, unix.EMFILE)
	}
	return &WorkerError{Status: status, Text: text}
}
