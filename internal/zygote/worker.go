package zygote

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Worker is a running worker process, or one that ran. All methods may be called by any goroutine.
type Worker struct {
	id     uint32
	pid    int // written before the Worker is handed out
	z      *Zygote
	group  *sandbox.Group // nil: it has none
	memory uint64         // limit of the group at first, in bytes
	conn   *net.UnixConn
	output *output
	page   *page
	blob   []byte
	began  bool // it has said STARTED
	asked  time.Time
	steps  Steps // of start

	// From the spawner, each with room for one.
	answer chan answer    // to the request for this worker
	exited chan wire.Exit // its end
	device chan uint32    // wire.Device*

	used atomic.Int64 // CPU time of its control group, once nothing of the worker is left; 0: no group

	serves atomic.Pointer[Spec] // of its lease; an empty one while it waits for that

	stopped atomic.Bool // Stop was called: a clean exit is as it should be
	killed  atomic.Bool
	verdict atomic.Pointer[verdict] // why the executor ended it by itself
	done    chan struct{}
	gone    chan struct{} // closed when nothing of it is left, also where it never came to be
	exit    Exit          // written before done is closed

	// conn is closed by the later of watch and start: what the worker sent before it ended is still to be read.
	mu       sync.Mutex
	starting bool
	heard    chan struct{} // closed when starting ends, if somebody waits for that
	ended    bool

	before atomic.Pointer[Counters] // of earlier leases
}

// Blob is the worker's channel blob, for the client to connect to. The caller does not change it.
func (w *Worker) Blob() []byte { return w.blob }

// PID is the worker's process id, good for messages only: after Done it may be another's.
func (w *Worker) PID() int { return w.pid }

// Done is closed when the process has ended and has been reaped: then its cores are free and its keys dead.
func (w *Worker) Done() <-chan struct{} { return w.done }

// Exit says how the worker ended. Before Done is closed its Reason is "running".
func (w *Worker) Exit() Exit {
	select {
	case <-w.done:
		return w.exit
	default:
		return Exit{Reason: "running"}
	}
}

// OutputTail is the last TailSize bytes of what the worker has printed so far.
func (w *Worker) OutputTail() []byte { return w.output.bytes() }

// Counters is what the worker says that it has done so far, since it was last resumed.
func (w *Worker) Counters() Counters {
	c := w.page.counters()
	if b := w.before.Load(); b != nil {
		c = c.since(b)
	}
	return c
}

// CPUTime is how much CPU time all processes of the worker's control group have used, also when they have ended. Without a group it is
// that of the worker's own process, and false when that has ended.
func (w *Worker) CPUTime() (time.Duration, bool) {
	if used := w.used.Load(); used > 0 {
		return time.Duration(used), true
	}
	if used, ok := w.group.CPUTime(); ok {
		return used, true
	}
	// The clock of another process, as clock_getcpuclockid makes it: ~pid << 3 | CPUCLOCK_SCHED.
	var ts unix.Timespec
	err := unix.ClockGettime(int32(^w.pid)<<3|2, &ts)
	select {
	case <-w.done: // the number may be another process's by now
		used := w.used.Load()
		return time.Duration(used), used > 0
	default:
		return time.Duration(ts.Nano()), err == nil
	}
}

// Running is the function that runs now, "" between calls.
func (w *Worker) Running() string {
	names := w.serves.Load().Names
	if _, index, ok := w.page.running(); ok && index < len(names) {
		return names[index]
	}
	return ""
}

// Steps is what a worker's start took, as seen from here.
type Steps struct {
	Fork    time.Duration // from the request to its first instruction; what its first messages took is here, too
	Sandbox time.Duration // name spaces, credentials, filters; what its guard process does meanwhile is in Fork
	Connect time.Duration // device, memory, queue pair; of one in advance, on shm, up to its client's answer
	Code    time.Duration // the library, its constructors included
	Warm    bool          // the process was there already: Fork is what it took to wake it
	Cached  bool          // it was connected and had the code too: Connect is what Resume took
}

// Steps is what this worker's start took.
func (w *Worker) Steps() Steps { return w.steps }

// Kill ends the process now. It does not wait; Done does.
func (w *Worker) Kill() {
	w.killed.Store(true)
	w.command(wire.Kill)
}

// command has the spawner do something to the worker. One that has ended is no error.
func (w *Worker) command(typ wire.Type) {
	if err := w.z.send(&wire.Message{Type: typ, ID: w.id}); err != nil {
		w.z.spawner.conn.Close() // receive ends everything
	}
}

// Stop lets the running call finish and ends the worker; when ctx ends first, it is killed. Returns when the process
// has been reaped: nil after a stop, an error that wraps ctx's when it took a kill.
func (w *Worker) Stop(ctx context.Context) error { return w.leave(ctx, wire.Stop) }

// Finish is Stop after all the calls that the client has sent.
func (w *Worker) Finish(ctx context.Context) error { return w.leave(ctx, wire.Finish) }

func (w *Worker) leave(ctx context.Context, how wire.Type) error {
	w.stopped.Store(true)
	m := wire.Message{Type: how, ID: w.id}
	// Fails when the worker is gone already, or never reads its socket; both end below.
	w.conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	w.conn.Write(m.Encode())
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

// watch waits for the end of the process and cleans up behind it.
func (w *Worker) watch() {
	end := <-w.exited
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

// lastWords is what a worker said when it failed after its start: its client's memory cannot be mapped, say.
func (w *Worker) lastWords(end *wire.Exit) string {
	if end.Code != exitFailed || end.Signal != 0 {
		return ""
	}
	w.mu.Lock()
	var heard chan struct{}
	if w.starting { // who starts it has not come to LOADED yet, or to FAILED, which is his to read
		heard = make(chan struct{})
		w.heard = heard
	}
	w.mu.Unlock()
	if heard != nil {
		select {
		case <-heard:
		case <-time.After(100 * time.Millisecond): // he waits for us, or is slow, and what there is to read is his
			return ""
		}
	}
	w.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // it is there, or the end is
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

// started ends the start: nobody reads the worker's messages any more.
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

// await reads the messages of a worker that is to wait for its lease, up to PREPARED.
func (w *Worker) await(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { w.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, wire.Max)
	for {
		n, err := w.conn.Read(buf)
		if err != nil {
			return w.startFailed(ctx, err)
		}
		m, err := wire.Decode(buf[:n])
		switch {
		case err != nil:
			return fmt.Errorf("worker %d: %w", w.id, err)
		case m.Type == wire.Started && !w.began:
			w.began = true
		case m.Type == wire.Prepared && w.began:
			return nil
		case m.Type == wire.Failed:
			return m.Failure()
		default:
			return fmt.Errorf("worker %d: unexpected message of type %d with %d bytes", w.id, m.Type, len(m.Body))
		}
	}
}

// start reads the worker's messages up to LOADED.
func (w *Worker) start(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { w.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, wire.Max)
	for {
		// Read, not ReadMsgUnix: descriptors that user code might send are closed by the kernel.
		n, err := w.conn.Read(buf)
		if err != nil {
			return w.startFailed(ctx, err)
		}
		m, err := wire.Decode(buf[:n])
		if err != nil {
			return fmt.Errorf("worker %d: %w", w.id, err)
		}
		switch {
		case m.Type == wire.Started && !w.began:
			w.began = true
		case m.Type == wire.Loaded && len(m.Body) > loadedTimes && len(m.Body) <= loadedTimes+blobMax:
			w.blob = append([]byte(nil), m.Body[loadedTimes:]...)
			w.loaded(time.Since(w.asked), m.Body[:loadedTimes])
			return nil
		case m.Type == wire.Failed:
			return m.Failure()
		default:
			return fmt.Errorf("worker %d: unexpected message of type %d with %d bytes", w.id, m.Type, len(m.Body))
		}
	}
}

// loadedTimes is how many bytes of LOADED come before the blob.
const loadedTimes = 24

// loaded notes what of the time to LOADED was the worker's own, and of that the sandbox's and the library's, as it says itself.
func (w *Worker) loaded(took time.Duration, times []byte) {
	part := func(i int, of time.Duration) time.Duration {
		return min(max(time.Duration(binary.LittleEndian.Uint64(times[8*i:])), 0), of)
	}
	own := part(0, took)
	w.steps.Fork = took - own
	w.steps.Sandbox = part(1, own)
	w.steps.Code = part(2, own-w.steps.Sandbox)
	w.steps.Connect = own - w.steps.Sandbox - w.steps.Code
}

// startFailed names what happened when the socket closed or time ran out before LOADED.
func (w *Worker) startFailed(ctx context.Context, err error) error {
	doing, status := "beginning to run", wire.StatusWorkerDied
	switch {
	case w.page.phase() == phaseLoading:
		// The process belonged to the library's constructors by then.
		doing, status = "loading the library", wire.StatusBadLibrary
	case w.began:
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
	// The socket closes with the process, unless user code closed it alone.
	select {
	case <-w.done:
	case <-time.After(time.Second):
		w.Kill()
		<-w.done
	}
	if w.exit.Signal == int(unix.SIGKILL) && status == wire.StatusBadLibrary {
		status = w.exit.Status // that was not the library
	}
	text := fmt.Sprintf("worker ended while %s: %s", doing, w.exit.Reason)
	if len(w.exit.OutputTail) > 0 {
		text += "; it printed: " + wire.Printable(w.exit.OutputTail)
	}
	return &WorkerError{Status: status, Text: text}
}
