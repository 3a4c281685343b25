package zygote

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// SpawnTimeout bounds a Spawn whose context has no deadline: constructors of user code can hang.
const SpawnTimeout = 10 * time.Second

const spawnTries = 3 // with different zygotes

var (
	errSpawnTimeout = fmt.Errorf("not done within %v", SpawnTimeout)
	errClosed       = errors.New("zygote supervisor is closed")
)

// Config of a Zygote. Path and Log are mandatory.
type Config struct {
	Path    string // of the rfaas-worker program
	Version string // that it must have; "": any
	Log     *slog.Logger
	Sandbox Sandbox
}

// Spec says what a worker is to be.
type Spec struct {
	Provider string // "shm" or "verbs"
	// For verbs, as in dp_dev_options: zero values choose, except GIDIndex, where -1 does.
	Device       string
	Port         int
	GIDIndex     int
	PKeyIndex    int
	TrafficClass int
	ServiceLevel int
	MTU          int

	WaitMode   uint8    // 0 adaptive, 1 hot, 2 warm
	CPUs       []int    // to pin to; none: not pinned
	Code       *os.File // the user's library in a sealed memfd (SealedMemfd); stays the caller's
	Names      []string // functions, in index order
	NamesFile  *os.File // the same of NamesMemfd, stays the caller's; nil: made anew for each worker
	ClientBlob []byte   // the client's channel blob

	// What the client may ask for at most; 0 is the protocol's own limit.
	MaxDepth uint32
	MaxEager uint32
	MaxBulk  uint64
	// MemoryLimit is how much private writable memory, in bytes, user code may add; 0: no limit. Allocations beyond it
	// fail. It does not count shared mappings and child processes; those a control group counts, where there can be one.
	MemoryLimit uint64
	// ChannelMemory is what the worker's side of the channel may take, in bytes, which a control group counts too.
	ChannelMemory uint64
	// CallLimit is how long one call may take; 0: no limit. A worker that exceeds it is killed.
	CallLimit time.Duration
	// UID and GID are those of the user that the worker shall run as, who must have been verified; 0: one of the sandbox's own
	// range, where it has one. Without a sandbox, or where the executor is not root, workers run as the executor's user.
	UID, GID uint32
	// Processes is how many processes and threads that user may have; 0: no limit. Only with an own user.
	Processes uint32
	// Symbol names a place in the user's library by its offset, for backtraces; "" if it has no name. May be nil.
	Symbol func(offset uint64) string
}

// Zygote supervises the zygote process and holds the workers. All methods may be called by any goroutine.
type Zygote struct {
	cfg    Config
	nextID atomic.Uint32
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup // supervise, watchStops, the pool
	pool   pool
	uids   *sandbox.UIDs
	groups *sandbox.Groups // nil: none

	mu      sync.Mutex
	current *process      // nil while there is none
	noStart error         // why the last one did not start, while there is none
	changed chan struct{} // closed and renewed when current changes
	devices int
	parts   uint32 // of the sandbox
	closed  bool
	workers map[*Worker]struct{}
}

// Start starts the zygote process and returns when it has loaded its providers. A zygote that dies is replaced;
// workers live on meanwhile. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Zygote, error) {
	groups := openGroups(&cfg)
	p, err := startProcess(ctx, &cfg)
	if err != nil {
		if groups != nil {
			err = errors.Join(err, groups.Close())
		}
		return nil, err
	}
	z := &Zygote{
		cfg:     cfg,
		current: p,
		changed: make(chan struct{}),
		devices: p.devices,
		parts:   p.parts,
		uids:    sandbox.NewUIDs(cfg.Sandbox.UIDs),
		groups:  groups,
		workers: map[*Worker]struct{}{},
		pool:    newPool(),
	}
	z.shareUIDs()
	z.ctx, z.cancel = context.WithCancel(context.Background())
	z.tasks.Add(2)
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD) // from now on, not from when the goroutine gets to run
	go z.supervise(p)
	go z.watchStops(changed)
	p.noticeStop() // before
	return z, nil
}

// VerbsDevices is how many RDMA devices the zygote found when it last started.
func (z *Zygote) VerbsDevices() int {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.devices
}

// Close kills and reaps the remaining workers and the zygote.
func (z *Zygote) Close() error {
	z.mu.Lock()
	first := !z.closed
	z.closed = true
	var workers []*Worker
	for w := range z.workers {
		workers = append(workers, w)
	}
	z.mu.Unlock()
	for _, w := range workers {
		w.Kill()
	}
	for _, w := range workers {
		<-w.done
	}
	z.cancel()
	z.tasks.Wait()
	if !first {
		return errClosed
	}
	z.uids.Close()
	if z.groups != nil {
		return z.groups.Close()
	}
	return nil
}

// ---- supervision ----

func (z *Zygote) set(p *process) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.current, z.noStart = p, nil
	if p != nil {
		z.devices, z.parts = p.devices, p.parts
	}
	close(z.changed)
	z.changed = make(chan struct{})
	if p != nil {
		p.noticeStop() // of which the signal came before watchStops knew it
	}
}

// supervise keeps a zygote alive until Close.
func (z *Zygote) supervise(p *process) {
	defer z.tasks.Done()
	const shortest, longest = 20 * time.Millisecond, 5 * time.Second
	delay := shortest
	for {
		since := time.Now()
		select {
		case <-p.gone:
		case <-z.ctx.Done():
			p.stop()
			return
		}
		z.set(nil)
		z.cfg.Log.Error("zygote ended; starting another", "status", p.err)
		if time.Since(since) > longest {
			delay = shortest
		}
		if p = z.replace(&delay, longest); p == nil {
			return
		}
		z.set(p)
	}
}

// replace starts zygotes until one works; the first at once, later ones with growing delay. nil after Close.
func (z *Zygote) replace(delay *time.Duration, longest time.Duration) *process {
	for {
		p, err := startProcess(z.ctx, &z.cfg)
		if err == nil {
			if z.ctx.Err() != nil {
				p.stop()
				return nil
			}
			return p
		}
		if z.ctx.Err() != nil {
			return nil
		}
		z.cfg.Log.Error("zygote does not start", "err", err, "next_try", *delay)
		z.failed(err)
		select {
		case <-time.After(*delay):
		case <-z.ctx.Done():
			return nil
		}
		*delay = min(2**delay, longest)
	}
}

// failed tells those who wait for a zygote why there is none yet.
func (z *Zygote) failed(err error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.noStart = err
	close(z.changed)
	z.changed = make(chan struct{})
}

// process waits for a living zygote, but not for a program of another version to be replaced: a *WorkerError.
func (z *Zygote) process(ctx context.Context) (*process, error) {
	for {
		z.mu.Lock()
		p, changed, closed, noStart := z.current, z.changed, z.closed, z.noStart
		z.mu.Unlock()
		if closed {
			return nil, errClosed
		}
		if p != nil && !p.isDead() {
			return p, nil
		}
		var other *WorkerError
		if errors.As(noStart, &other) {
			return nil, noStart
		}
		select {
		case <-changed:
		case <-z.ctx.Done():
			return nil, errClosed
		case <-ctx.Done():
			if noStart != nil {
				return nil, fmt.Errorf("no zygote: %w: %w", context.Cause(ctx), noStart)
			}
			return nil, fmt.Errorf("no zygote: %w", context.Cause(ctx))
		}
	}
}

// ---- spawning ----

// Spawn starts a worker and returns when it is connected to the client (its Blob is the answer for the client) and has
// loaded the code. Blocks until ctx's deadline, for SpawnTimeout if it has none, and a few seconds more if the zygote
// hangs. When it fails, nothing of the worker is left; a *WorkerError says what the worker, the zygote or the check of
// the Spec found. When ctx ends, the error wraps ctx's and says what was waited for.
func (z *Zygote) Spawn(ctx context.Context, spec Spec) (*Worker, error) {
	body, err := spawnBody(&spec)
	if err != nil {
		return nil, err
	}
	names := spec.NamesFile
	if names == nil {
		if names, err = NamesMemfd(spec.Names); err != nil {
			return nil, err
		}
		defer names.Close()
	}
	if spec.Code == nil {
		return nil, &WorkerError{statusBadLibrary, "no code"}
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, SpawnTimeout, errSpawnTimeout)
		defer cancel()
	}
	defer z.pool.wake()                   // not before: its clones would take processor time from this start
	if spec.UID == 0 || !z.canGiveUID() { // those that wait are somebody already
		if w, err := z.lend(ctx, &spec, body, names); !errors.Is(err, errNoneReady) {
			return w, err
		}
	}
	for try := 1; ; try++ {
		w, err := z.spawn(ctx, &spec, body, names)
		if !errors.Is(err, errZygoteDied) {
			return w, err
		}
		if try == spawnTries {
			return nil, fmt.Errorf("start worker: %w, %d times", err, try)
		}
	}
}

// parts are what an executor holds of a worker, and the descriptors that go to it.
type parts struct {
	conn   *net.UnixConn
	output *output
	page   *page
	group  *sandbox.Group // nil: none
	theirs []int          // worker socket, log, page; closed once sent
}

func newParts() (*parts, error) {
	conn, sock, err := socketPair()
	if err != nil {
		return nil, err
	}
	// What the kernel says of who sends is true across process name spaces.
	if err := control(conn, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) }); err != nil {
		conn.Close()
		closeAll([]int{sock})
		return nil, os.NewSyscallError("setsockopt", err)
	}
	out, log, err := newOutput()
	if err != nil {
		conn.Close()
		closeAll([]int{sock})
		return nil, err
	}
	page, pageFD, err := newPage()
	if err != nil {
		conn.Close()
		closeAll([]int{sock, log})
		out.finish()
		return nil, err
	}
	return &parts{conn: conn, output: out, page: page, theirs: []int{sock, log, pageFD}}, nil
}

// leaseFDs are what a lease brings to its worker: the code, and the names.
func leaseFDs(code, names *os.File, use func(code, names int) error) error {
	return control(names, func(namesFD int) error {
		return control(code, func(codeFD int) error { return use(codeFD, namesFD) })
	})
}

func (p *parts) closeTheirs() {
	closeAll(p.theirs)
	p.theirs = nil
}

func (p *parts) close() {
	p.closeTheirs()
	p.conn.Close()
	p.output.finish()
	p.page.freeze()
}

// spawn clones a worker and sees it through its start. Without names it is one that waits for its lease.
func (z *Zygote) spawn(ctx context.Context, spec *Spec, body []byte, names *os.File) (*Worker, error) {
	c, err := z.confine(spec, body)
	if err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	w, err := z.spawnConfined(ctx, spec, c, names)
	if err != nil {
		z.release(c)
		return nil, err
	}
	w.whenGone(func() {
		z.giveUID(c)
		z.tasks.Go(func() { z.removeGroup(c) }) // takes time, for which no lease waits, but Close does
	})
	if c.group != nil {
		time.AfterFunc(settleTime, z.groups.Prepare)
	}
	return w, nil
}

func (z *Zygote) spawnConfined(ctx context.Context, spec *Spec, c *confinement, names *os.File) (*Worker, error) {
	asked := time.Now()
	proc, err := z.process(ctx)
	if err != nil {
		return nil, err
	}
	parts, err := newParts()
	if err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	parts.group = c.handle()
	id := z.nextID.Add(1)
	var ch <-chan answer
	if sock, log, page := parts.theirs[0], parts.theirs[1], parts.theirs[2]; names == nil {
		ch, err = proc.send(msgPrepare, id, c.body, append([]int{sock, log, page}, c.joins()...))
	} else {
		err = leaseFDs(spec.Code, names, func(code, names int) (err error) {
			ch, err = proc.send(msgSpawn, id, c.body, append([]int{sock, code, names, log, page}, c.joins()...))
			return err
		})
	}
	parts.closeTheirs()
	if c.group != nil {
		c.group.CloseJoin()
	}
	if err != nil {
		// Not sent, or sent to a dead zygote; but if the zygote made a worker before, that one tells us.
		parts.discard(answer{})
		return nil, err
	}
	answered := make(chan answer, 1)
	go func() { answered <- proc.await(ch) }()
	select {
	case a := <-answered:
		if errors.Is(a.err, errZygoteDied) {
			// A worker that was made all the same lives on, and has used up the client's blob perhaps: it is kept.
			if a.pidfd, a.guard, a.pid = parts.orphan(); a.pidfd != nil {
				a.err = nil
			}
		}
		if a.err != nil {
			parts.discard(a)
			return nil, a.err
		}
		return z.adopt(ctx, id, spec, names == nil, parts, a, asked)
	case <-ctx.Done():
		// The worker may be there in a moment, on cores that the caller takes for free when this returns. A zygote that
		// hangs is killed after answerTimeout.
		parts.discard(<-answered)
		return nil, fmt.Errorf("start worker: waiting for the zygote to clone it: %w", context.Cause(ctx))
	}
}

// discard ends the worker of a failed spawn, if there is one, and reaps it.
func (p *parts) discard(a answer) {
	defer p.close()
	if a.pidfd == nil {
		a.pidfd, a.guard, _ = p.orphan()
	}
	if a.pidfd == nil {
		return
	}
	killPidfd(a.pidfd)
	reap(a.pidfd, a.guard, nil)
	a.pidfd.Close()
}

// orphan finds the worker of a zygote that died between making it and telling us. The worker says STARTED, and the kernel its
// pid, or its end of the socket closes. It is our child and unreaped, so the pid is still its own.
func (p *parts) orphan() (pidfd, guard *os.File, pid int) {
	p.conn.SetReadDeadline(time.Now().Add(time.Second))
	defer p.conn.SetReadDeadline(time.Time{})
	buf := make([]byte, msgMax)
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred)+unix.CmsgSpace(2*4))
	n, oobn, _, _, err := p.conn.ReadMsgUnix(buf, oob)
	fds := rights(oob[:oobn])
	if len(fds) == 2 { // of a sandbox
		reapNow(fds[1])
		guard, _ = newPidfd(fds[0])
	} else {
		closeAll(fds)
	}
	if pid = sender(oob[:oobn]); err == nil && pid > 1 {
		if m, err := decodeMessage(buf[:n]); err == nil && m.typ == msgStarted {
			pidfd = childPidfd(pid)
		}
	}
	if pidfd == nil && guard != nil { // cannot be
		killPidfd(guard)
		guard.Close()
		guard = nil
	}
	return pidfd, guard, pid
}

// childPidfd is the pidfd of a child of ours, nil if it is none.
func childPidfd(pid int) *os.File {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	if _, _, err := waitPidfd(fd, unix.WNOWAIT); err != nil { // ECHILD: not ours
		unix.Close(fd)
		return nil
	}
	f, err := newPidfd(fd)
	if err != nil {
		return nil
	}
	return f
}

// adopt makes a Worker of a cloned process and sees it through its start, or until it waits for its lease.
func (z *Zygote) adopt(ctx context.Context, id uint32, spec *Spec, waits bool, p *parts, a answer, asked time.Time) (*Worker, error) {
	w := &Worker{
		id: id, pid: a.pid, pidfd: a.pidfd, guard: a.guard, group: p.group, conn: p.conn, output: p.output, page: p.page,
		done: make(chan struct{}), starting: true, asked: asked,
	}
	if waits {
		w.serves.Store(&Spec{})
	} else {
		w.serves.Store(spec)
	}
	z.mu.Lock()
	closed := z.closed
	z.workers[w] = struct{}{}
	z.mu.Unlock()
	w.noticeStop(z) // likewise
	go w.watch(func() {
		z.mu.Lock()
		delete(z.workers, w)
		z.mu.Unlock()
	})
	switch {
	case closed:
		return nil, w.abort(errClosed)
	case waits:
		if err := w.await(ctx); err != nil {
			return nil, w.abort(err)
		}
		return w, nil // still starting
	}
	return w.begin(ctx, spec)
}

// abort ends a worker whose start has failed and returns when nothing of it is left.
func (w *Worker) abort(err error) error {
	w.started()
	w.Kill()
	<-w.done
	return err
}

// begin sees a worker that has its lease through the rest of its start.
func (w *Worker) begin(ctx context.Context, spec *Spec) (*Worker, error) {
	if err := w.start(ctx); err != nil {
		return nil, w.abort(err)
	}
	w.started()
	if spec.CallLimit > 0 {
		go w.limitCalls(spec.CallLimit)
	}
	if spec.Provider == "verbs" {
		go w.watchDevice()
	}
	return w, nil
}
