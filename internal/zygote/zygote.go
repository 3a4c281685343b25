package zygote

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/spawner"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// SpawnTimeout bounds a Spawn whose context has no deadline, because constructors of user code can hang.
const SpawnTimeout = 10 * time.Second

const spawnTries = 3 // with different zygotes

var (
	errSpawnTimeout = fmt.Errorf("timed out after %v", SpawnTimeout)
	errClosed       = errors.New("the executor ends")
	// errZygoteDied means that the zygote ended before it answered. Nothing of the worker is left.
	errZygoteDied = errors.New("the process that starts workers ended")
)

// WorkerError says why a worker could not be started.
type WorkerError = wire.Error

// BundleID identifies a bundle: the name of its directory in Sandbox.Bundles, in hexadecimal digits.
type BundleID [16]byte

func (b BundleID) String() string { return hex.EncodeToString(b[:]) }

// Config of a Zygote. Path and Log are mandatory.
type Config struct {
	Path    string // path of the rfaas-worker program
	Spawner string // path of the rfaas-spawner program; "": beside the worker program
	Version string // required version of the worker program; "": any
	Log     *slog.Logger
	Sandbox Sandbox
	Files   []string // files, directories of files, and sockets that the spawner may read or connect to for this process
	Append  []string // files that OpenFile may open for appending
	// UID and GID are those of the user that this process becomes. The spawner opens nothing for this process that the
	// user could replace. 0: this process keeps its user.
	UID, GID uint32
	Renew    string   // program for Zygote.Renew; "": none
	Identity string   // the node's identity directory
	Remove   []string // files for RemoveFiles
	Runtimes []Runtime
}

// Runtime is an interpreter with imported modules that workers can have from their start.
type Runtime = spawner.Runtime

// RenewArgument is the first argument of Config.Renew. The second one is Config.Identity.
const RenewArgument = spawner.RenewArgument

// Spec describes a worker.
type Spec struct {
	Provider string // "shm", "verbs", "tcp" or "ofi"
	// For verbs, as in dp_dev_options: zero values mean automatic, except GIDIndex, where -1 means automatic. For tcp,
	// Device is the IP address and port to which the worker's client connects. For ofi, it is libfabric's provider, a
	// comma, and its device.
	Device       string
	Encrypt      int // for tcp and ofi: dataplane.EncryptOff to EncryptRequire
	Port         int
	GIDIndex     int
	PKeyIndex    int
	TrafficClass int
	ServiceLevel int
	MTU          int

	WaitMode   uint8    // api.WaitAdaptive, api.WaitHot or api.WaitWarm
	CPUs       []int    // to pin to; none: not pinned
	Code       *os.File // the user's library in a sealed memfd (SealedMemfd); the caller keeps it
	Names      []string // functions, in index order
	NamesFile  *os.File // the result of NamesMemfd, which the caller keeps; nil: created for each worker
	ClientBlob []byte   // the client's channel blob
	Late       bool     // ClientBlob has only sizes (verbs): the first Resume names the client
	Tables     []Table  // which the worker maps before Spawn returns
	Bundle     BundleID // the bundle that it sees; zero: none
	Seed       *Seed    // from which it starts; nil: none
	Runtime    string   // name of its runtime; "": none. Not with a Seed
	Channel    Channel  // sizes in that blob, as read by the caller; zero: unknown

	// Limits for the client's channel; 0: the protocol's limit.
	MaxDepth uint32
	MaxEager uint32
	MaxBulk  uint64
	// MemoryLimit is how much private writable memory user code may add, in bytes; 0: no limit. Allocations beyond it
	// fail. It does not count shared mappings and child processes, but a control group does, if there is one.
	MemoryLimit uint64
	// ChannelMemory is the memory of the worker's side of the channel, in bytes, which a control group counts too.
	ChannelMemory uint64
	// CallLimit is how long one call may take; 0: no limit. A worker that exceeds it is killed.
	CallLimit time.Duration
	// InitLimit is the same for the first call of a worker without a seed. It is CallLimit if this call is not an init call.
	InitLimit time.Duration
	// UID and GID identify the verified user that the worker runs as; 0: an id of the sandbox's range, if it has one.
	// Without a sandbox, or if the executor is not root, workers run as the executor's user.
	UID, GID uint32
}

// Channel has the sizes of a client's channel. The zygote prepares memory for such a channel for the next worker,
// without reading the client's blob.
type Channel struct {
	Depth, Eager uint32
	Bulk         uint64
}

// Zygote starts workers through a spawner process and keeps track of them. It is safe for concurrent use.
type Zygote struct {
	cfg      Config
	spawner  *connection
	once     sync.Once    // of Resume
	leaving  atomic.Bool  // Leave was called
	verdicts sync.RWMutex // read-locked while a worker gets a verdict; locked for ever by Leave
	nextID   atomic.Uint32
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	tasks    sync.WaitGroup // the pool
	received chan struct{}  // closed when receive has ended
	pool     pool
	failed   chan error // capacity 1

	inspectors inspectors

	mu       sync.Mutex
	zygotes  []zygoteProcess // by position: the first one has no runtime
	changed  chan struct{}   // closed and replaced when zygotes change
	devices  int
	parts    uint32 // of the sandbox
	missing  string // missing parts of the sandbox, and why; "" if none
	closed   bool
	workers  map[uint32]*Worker
	opens    map[uint32]chan opened
	nextOpen uint32
	spare    *parts // made ahead for the next worker, nil: none
}

// zygoteProcess is the zygote at a position.
type zygoteProcess struct {
	runtime string
	pid     int   // 0 while none runs
	noStart error // why none runs
	unable  error // why a restart has failed; nil while it runs or the first restart is in progress
}

// Start starts the spawner and the zygote processes. It blocks until they have loaded providers and runtimes. A zygote that
// dies is replaced, and workers live on. ctx bounds only the start.
func Start(ctx context.Context, cfg Config) (*Zygote, error) {
	c, err := startSpawner(&cfg)
	if err != nil {
		return nil, err
	}
	z := newZygote(cfg, c)
	for range z.zygotes {
		m, err := c.readHello(ctx, len(cfg.Runtimes) > 0)
		if err == nil {
			err = z.zygoteStarted(m)
		}
		if err != nil {
			c.close()
			return nil, err
		}
	}
	z.begin()
	return z, nil
}

func newZygote(cfg Config, c *connection) *Zygote {
	z := &Zygote{cfg: cfg, spawner: c, changed: make(chan struct{}), workers: map[uint32]*Worker{}, opens: map[uint32]chan opened{},
		received: make(chan struct{}), failed: make(chan error, 1), pool: newPool(), inspectors: newInspectors(), zygotes: make([]zygoteProcess, 1, 1+len(cfg.Runtimes))}
	for _, r := range cfg.Runtimes {
		z.zygotes = append(z.zygotes, zygoteProcess{runtime: r.Name})
	}
	z.ctx, z.cancel = context.WithCancel(context.Background())
	return z
}

// begin starts to handle the spawner's messages.
func (z *Zygote) begin() {
	go func() {
		defer close(z.received)
		z.receive()
	}()
}

// VerbsDevices returns how many RDMA devices the zygote found when it last started.
func (z *Zygote) VerbsDevices() int {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.devices
}

// FillsPages reports whether workers can start from a seed before all of it has been read.
func (z *Zygote) FillsPages() bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.parts&wire.PartPages != 0
}

// Runtimes returns the names of the runtimes.
func (z *Zygote) Runtimes() (names []string) {
	for i := range z.zygotes[1:] {
		names = append(names, z.zygotes[1+i].runtime)
	}
	return names
}

// Lacks returns which parts of a complete sandbox this node cannot provide, and why; "" if none.
func (z *Zygote) Lacks() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.missing
}

// CannotStart returns why no worker can be started, or nil. The first restart of a zygote that ended does not count as
// an error. changed is closed when the answer may have changed.
func (z *Zygote) CannotStart() (changed <-chan struct{}, reason error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.changed, z.zygotes[0].unable
}

// Close kills and reaps the remaining workers, the zygote and the spawner.
func (z *Zygote) Close() error {
	z.mu.Lock()
	first := !z.closed
	z.closed = true
	var workers []*Worker
	for _, w := range z.workers {
		workers = append(workers, w)
	}
	z.mu.Unlock()
	z.dropParts()
	for _, w := range workers {
		w.Kill()
	}
	z.cancel()
	z.tasks.Wait()
	z.spawner.close()
	<-z.received
	for _, w := range workers {
		<-w.gone
	}
	if !first {
		return errClosed
	}
	return nil
}

// ready waits until the zygote at a position runs. It does not wait if the worker program has another version, or a runtime cannot start again,
// and returns a *WorkerError.
func (z *Zygote) ready(ctx context.Context, at int) error {
	for {
		z.mu.Lock()
		pid, changed, closed, noStart := z.zygotes[at].pid, z.changed, z.closed, z.zygotes[at].noStart
		z.mu.Unlock()
		if closed {
			return errClosed
		}
		if pid != 0 {
			return nil
		}
		var other *WorkerError
		if errors.As(noStart, &other) && (other.Status == wire.StatusProtocol || other.Status == wire.StatusInvalid) {
			return noStart
		}
		select {
		case <-changed:
		case <-z.ctx.Done():
			return errClosed
		case <-ctx.Done():
			if noStart != nil { // not wrapped: a later start may succeed, so the time-out is the error
				return fmt.Errorf("no process that starts workers: %w (the previous one: %v)", context.Cause(ctx), noStart)
			}
			return fmt.Errorf("no process that starts workers: %w", context.Cause(ctx))
		}
	}
}

// ---- spawning ----

// Spawn starts a worker. It blocks until the worker is connected to the client (its Blob is the answer for the client)
// and has loaded the code, at most until ctx's deadline, or SpawnTimeout if ctx has none, plus a few seconds if the
// zygote hangs. After an error, the worker's process and resources are gone. A *WorkerError is an error of the worker, the zygote or the
// check of the Spec. If ctx ends, the error wraps ctx's and says what Spawn was waiting for.
func (z *Zygote) Spawn(ctx context.Context, spec Spec) (*Worker, error) {
	seed := spec.Seed
	if seed == nil {
		return z.start(ctx, &spec)
	}
	seed.starting()
	if seed.Lost() == nil {
		if w, err := z.start(ctx, &spec); err == nil || seed.Lost() == nil {
			return w, err
		}
	}
	spec.Seed = nil
	w, err := z.start(ctx, &spec)
	if err == nil {
		w.steps.Unseeded = "seed: " + strings.TrimPrefix(seed.Lost().Error(), "seed: ")
	}
	return w, err
}

// start is Spawn without a second attempt.
func (z *Zygote) start(ctx context.Context, own *Spec) (*Worker, error) {
	spec := *own
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
		return nil, &WorkerError{Status: wire.StatusBadLibrary, Text: "no code"}
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, SpawnTimeout, errSpawnTimeout)
		defer cancel()
	}
	defer z.pool.wake()                                                                          // deferred, since its clones would take processor time from this start
	if spec.Runtime == "" && spec.Bundle == (BundleID{}) && (spec.UID == 0 || !z.canGiveUID()) { // pooled workers already run under a fixed UID, without a bundle or a runtime
		if w, err := z.lend(ctx, &spec, body, names); !errors.Is(err, errNoneReady) {
			return w, err
		}
	}
	if spec.Seed != nil {
		return z.spawnSeeded(ctx, &spec, body, names)
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

// parts are the executor's ends of a worker's descriptors, and the descriptors for the worker.
type parts struct {
	conn   *net.UnixConn
	output *output
	page   *page
	theirs []int // for the worker: socket, output, page; closed after sending
}

func newParts() (*parts, error) {
	conn, sock, err := wire.SocketPair()
	if err != nil {
		return nil, err
	}
	out, log, err := newOutput()
	if err != nil {
		conn.Close()
		wire.CloseAll([]int{sock})
		return nil, err
	}
	page, pageFD, err := newPage()
	if err != nil {
		conn.Close()
		wire.CloseAll([]int{sock, log})
		out.finish()
		return nil, err
	}
	return &parts{conn: conn, output: out, page: page, theirs: []int{sock, log, pageFD}}, nil
}

// leaseFDs calls use with the descriptors that a lease brings to its worker: the code and the names.
func leaseFDs(code, names *os.File, use func(code, names int) error) error {
	return wire.Control(names, func(namesFD int) error {
		return wire.Control(code, func(codeFD int) error { return use(codeFD, namesFD) })
	})
}

// takeParts returns the parts of the next worker.
func (z *Zygote) takeParts() (*parts, error) {
	z.mu.Lock()
	p := z.spare
	z.spare = nil
	z.mu.Unlock()
	if p != nil {
		return p, nil
	}
	return newParts()
}

// makeParts makes the parts of the next worker while the present worker starts on another processor. That shortens the next start by some 50 us.
func (z *Zygote) makeParts() {
	z.mu.Lock()
	needed := z.spare == nil && !z.closed
	z.mu.Unlock()
	if !needed {
		return
	}
	p, err := newParts()
	if err != nil {
		return // the next start reports it
	}
	z.mu.Lock()
	if z.spare == nil && !z.closed {
		z.spare, p = p, nil
	}
	z.mu.Unlock()
	if p != nil {
		p.close()
	}
}

// dropParts frees the parts that were made ahead.
func (z *Zygote) dropParts() {
	z.mu.Lock()
	p := z.spare
	z.spare = nil
	z.mu.Unlock()
	if p != nil {
		p.close()
	}
}

func (p *parts) closeTheirs() {
	wire.CloseAll(p.theirs)
	p.theirs = nil
}

// close frees the parts of a worker that was not started.
func (p *parts) close() {
	p.closeTheirs()
	p.conn.Close()
	p.output.finish()
	p.page.freeze()
}

func (z *Zygote) newWorker(id uint32, memory uint64) *Worker {
	return &Worker{id: id, z: z, memory: memory, answer: make(chan answer, 1), exited: make(chan wire.Exit, 1), device: make(chan uint32, 1),
		done: make(chan struct{}), gone: make(chan struct{})}
}

// zygoteOf returns the position of a runtime's zygote, or -1. It reads only the names, which do not change, so it needs no lock.
func (z *Zygote) zygoteOf(runtime string) int {
	for i := range z.zygotes {
		if z.zygotes[i].runtime == runtime {
			return i
		}
	}
	return -1
}

// spawn requests a worker from the spawner and completes its start. Without names the worker waits for its lease.
func (z *Zygote) spawn(ctx context.Context, spec *Spec, body []byte, names *os.File) (*Worker, error) {
	asked := time.Now()
	at := z.zygoteOf(spec.Runtime)
	if at < 0 {
		return nil, &WorkerError{Status: wire.StatusUnsupported, Text: fmt.Sprintf("no runtime %q", spec.Runtime)}
	}
	if err := z.ready(ctx, at); err != nil {
		return nil, err
	}
	p, err := z.takeParts()
	if err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	w := z.newWorker(z.nextID.Add(1), spec.groupMemory())
	w.conn, w.output, w.page, w.asked, w.starting = p.conn, p.output, p.page, asked, true
	w.serves.Store(&Spec{})
	if names != nil {
		w.serves.Store(spec)
	}
	z.mu.Lock()
	closed := z.closed
	if !closed {
		z.workers[w.id] = w
	}
	z.mu.Unlock()
	if closed {
		p.close()
		return nil, errClosed
	}
	r := wire.SpawnRequest{Worker: body, UID: spec.UID, GID: spec.GID, Memory: w.memory, Zygote: uint32(at)}
	for _, cpu := range spec.CPUs {
		r.CPUs.Set(cpu)
	}
	m := wire.Message{Type: wire.Prepare, ID: w.id, Body: r.Encode()}
	if names == nil {
		err = z.send(&m, p.theirs...)
	} else {
		m.Type = wire.Spawn
		err = leaseFDs(spec.Code, names, func(code, names int) error {
			return z.send(&m, p.theirs[0], code, names, p.theirs[1], p.theirs[2])
		})
	}
	p.closeTheirs()
	if err != nil {
		z.spawner.conn.Close() // receive then closes z
	}
	var a answer
	select {
	case a = <-w.answer:
	case <-ctx.Done():
		// The caller considers the worker's cores free when this returns, but the worker may be about to start, so wait for the
		// answer. The spawner kills a zygote that hangs, and then answers.
		w.Kill()
		a = <-w.answer
		if a.err == nil {
			a.err = fmt.Errorf("start worker: waiting for the process that starts workers: %w", context.Cause(ctx))
			a.group.Close()
			<-w.exited
		} else if !errors.Is(a.err, errClosed) {
			a.err = fmt.Errorf("start worker: waiting for the process that starts workers: %w", context.Cause(ctx))
		}
	}
	if a.err != nil {
		p.close()
		close(w.gone)
		return nil, a.err
	}
	w.pid = a.pid
	w.group = a.group
	go w.watch()
	z.makeParts()
	if names == nil {
		if err := w.await(ctx); err != nil {
			return nil, w.abort(err)
		}
		return w, nil // still starting
	}
	return w.begin(ctx, spec)
}

// abort ends a worker whose start has failed, and waits until its process and resources are gone.
func (w *Worker) abort(err error) error {
	w.started()
	w.Kill()
	<-w.done
	return err
}

// begin completes the start of a worker that has its lease.
func (w *Worker) begin(ctx context.Context, spec *Spec) (*Worker, error) {
	err := w.start(ctx)
	for i := range spec.Tables {
		if err == nil {
			err = w.mapTable(ctx, &spec.Tables[i])
		}
	}
	if err != nil {
		return nil, w.abort(err)
	}
	w.late = spec.Late
	w.steps.Seeded = spec.Seed != nil && w.steps.Unseeded == ""
	w.started()
	w.startWatchdogs(spec)
	return w, nil
}

// startWatchdogs starts the watchdogs that kill a worker whose call takes too long or whose RDMA device is closed.
func (w *Worker) startWatchdogs(spec *Spec) {
	w.limit.call, w.limit.init = spec.CallLimit, spec.InitLimit
	w.limit.begun.Store(w.steps.Seeded)
	if spec.CallLimit > 0 || spec.InitLimit > 0 {
		go w.limitCalls()
	}
	if spec.Provider == "verbs" {
		go w.watchDevice()
	}
}
