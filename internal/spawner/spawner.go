package spawner

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// maxWorkers bounds the workers of one executor, prepared ones included.
const maxWorkers = 16384

// Spawner serves one executor.
type Spawner struct {
	cfg     Config
	version string // of this program
	conn    *net.UnixConn
	uids    *sandbox.UIDs
	groups  *sandbox.Groups // nil: control groups cannot be made
	// fixedCPUs is set if no cpuset keeps workers on their CPUs. The system call filter then refuses sched_setaffinity.
	fixedCPUs bool

	reaping     sync.WaitGroup
	refusedOnce sync.Once // the log line about a refused path
	renewing    atomic.Bool

	asking   sync.Mutex // held while a request is sent to a zygote, and while one is started; taken before mu
	mu       sync.Mutex
	zygotes  []*zygote    // by position; nil while there is none
	pids     map[int]bool // of running and starting zygotes, and of the program that renews the certificate
	children map[uint32]*child
	requests uint64
	guards   bool // workers have process namespaces, with guards
}

// child is a worker, from the executor's request until the executor has been told of the worker's end.
type child struct {
	id     uint32
	uid    uint32 // taken from the range, or 0
	group  *sandbox.GroupDir
	timer  *time.Timer // kills a zygote that does not answer
	number uint64      // of the request; the zygote answers in this order
	of     *zygote     // to which the request went
	// answered is closed when the zygote has answered.
	answered chan struct{}

	// Set under Spawner.mu once the zygote has answered.
	pidfd    *os.File
	guard    *os.File
	pid      int
	guardPID int

	unwanted    bool // kill the worker as soon as it exists; under Spawner.mu
	stopNoticed atomic.Bool
	stopped     atomic.Bool // killed because it was stopped
}

// Run serves the executor at the other end of conn until the executor closes its end. Then it ends all workers and
// returns. The error says why the spawner ended before that. version is the version of this program.
func Run(conn *net.UnixConn, cfg Config, version string) error {
	s := &Spawner{cfg: cfg, version: version, conn: conn, uids: sandbox.NewUIDs(cfg.UIDs), children: map[uint32]*child{},
		zygotes: make([]*zygote, 1+len(cfg.Runtimes)), pids: map[int]bool{}}
	s.openGroups()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	first, err := s.startZygotes(ctx)
	if err != nil {
		return nil // the executor reports it
	}
	s.shareUIDs(first[0])
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD) // before the first worker
	go s.watchStops(changed)
	var supervised sync.WaitGroup
	for _, z := range first {
		s.zygoteUp(z)
		supervised.Go(func() { s.supervise(ctx, z) })
	}
	err = s.serve()
	s.killAll()
	cancel()
	supervised.Wait()
	s.killAll() // workers that the zygote has cloned meanwhile
	s.reaping.Wait()
	s.uids.Close()
	if s.groups != nil {
		err = errors.Join(err, s.groups.Close())
	}
	return err
}

// startZygotes starts the first zygote of each position at the same time. After an error, which it has reported, none is left.
func (s *Spawner) startZygotes(ctx context.Context) ([]*zygote, error) {
	first, errs := make([]*zygote, len(s.zygotes)), make([]error, len(s.zygotes))
	var wg sync.WaitGroup
	for at := range first {
		wg.Go(func() { first[at], errs[at] = s.startZygote(ctx, at) })
	}
	wg.Wait()
	bad := slices.IndexFunc(errs, func(err error) bool { return err != nil })
	if bad < 0 {
		return first, nil
	}
	for _, z := range first {
		if z != nil {
			z.stop()
		}
	}
	s.sayZygoteEnded(bad, errs[bad])
	return nil, errs[bad]
}

// logf prints a line to standard error, which the executor logs.
func (s *Spawner) logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (s *Spawner) openGroups() {
	if s.cfg.Mode == sandbox.Off {
		return
	}
	// The executor moves too: with version 2, a group that contains processes cannot give controllers to its children.
	groups, err := sandbox.OpenGroups(sandbox.GroupsConfig{Processes: []int{os.Getpid(), os.Getppid()}, PIDs: s.cfg.Processes, Idle: s.cfg.Idle, Self: s.cfg.OwnGroups})
	s.fixedCPUs = err != nil || !groups.HoldCPUs()
	if err != nil {
		s.logf("workers have no control groups: %v", err)
		return
	}
	for _, m := range groups.Missing() {
		s.logf("control groups of workers lack a controller: %s", m)
	}
	if dir := groups.Competes(); s.cfg.Idle && dir != "" {
		s.logf("workers have idle priority only among the programs of control group %s; for the whole node, set CPUWeight=idle in the executor's unit (Linux 5.15, systemd 252), or CPUWeight=1", dir)
	}
	groups.Prepare()
	s.groups = groups
}

// shareUIDs ensures that no other executor of the node uses the same user ids.
func (s *Spawner) shareUIDs(z *zygote) {
	if s.cfg.UIDFile == "" || s.cfg.UIDs.N == 0 || !s.givesUIDs(z) {
		return
	}
	if err := s.uids.Share(s.cfg.UIDFile); err != nil {
		s.logf("workers of two executors of this node may have the same user id: %v", err)
	}
}

func (s *Spawner) givesUIDs(z *zygote) bool {
	return s.cfg.Mode != sandbox.Off && z.parts&wire.PartUID != 0
}

// send sends a message to the executor. It closes the connection if that fails, because the executor has ended or reads
// nothing. That ends serve.
func (s *Spawner) send(m *wire.Message, fds ...int) {
	if err := wire.SendWithin(s.conn, answerTimeout, m, fds...); err != nil {
		s.conn.Close()
	}
}

// serve handles the executor's messages. It returns nil when the executor has closed its end, and an error when a
// message is malformed, which a sound executor never sends.
func (s *Spawner) serve() error {
	buf := make([]byte, wire.Max)
	for {
		m, fds, err := wire.Receive(s.conn, buf, wire.SpawnFDs)
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		switch {
		case err == nil:
			err = s.handle(&m, fds)
			wire.CloseAll(fds)
		case errors.Is(err, wire.ErrDescriptors) && (m.Type == wire.Spawn || m.Type == wire.Prepare):
			err = s.noRoom(&m)
		}
		if err != nil {
			return fmt.Errorf("refused a message of the executor, ending all workers: %w", err)
		}
	}
}

// noRoom refuses a worker for which this process has no descriptors. The other workers live on.
func (s *Spawner) noRoom(m *wire.Message) error {
	s.mu.Lock()
	used := s.children[m.ID] != nil
	s.mu.Unlock()
	if used {
		return fmt.Errorf("worker %d exists", m.ID)
	}
	s.refuse(m.ID, fmt.Errorf("%w: %w", wire.ErrDescriptors, unix.EMFILE))
	return nil
}

func (s *Spawner) handle(m *wire.Message, fds []int) error {
	if m.Type == wire.Spawn || m.Type == wire.Prepare {
		return s.spawn(m, fds)
	}
	if len(fds) > 0 {
		return fmt.Errorf("type %d with %d descriptors", m.Type, len(fds))
	}
	switch m.Type {
	case wire.Kill, wire.Explain, wire.Device:
		if len(m.Body) > 0 {
			return fmt.Errorf("type %d with a body of %d bytes", m.Type, len(m.Body))
		}
		s.command(m.Type, m.ID)
		return nil
	case wire.Renew:
		s.answerOpen(m.ID, s.renew)
		return nil
	case wire.Remove:
		for _, path := range s.cfg.Remove {
			s.tellRefused(removePath(path, s.cfg.UID, s.cfg.GID)) // it may be gone
		}
		return nil
	case wire.Connect:
		if len(m.Body) != 4 {
			return fmt.Errorf("connect request of %d bytes", len(m.Body))
		}
		s.answerOpen(m.ID, func() (int, error) { return s.connect(m.U32(0)) })
		return nil
	case wire.Open:
		r, err := wire.DecodeOpenRequest(m.Body)
		if err == nil {
			s.answerOpen(m.ID, func() (int, error) { return s.openFile(&r) })
		}
		return err
	}
	return fmt.Errorf("unknown type %d", m.Type)
}

// ---- spawning ----

// spawn checks a request and passes it to the zygote. answered handles the zygote's reply.
func (s *Spawner) spawn(m *wire.Message, fds []int) error {
	want := wire.SpawnFDs
	if m.Type == wire.Prepare {
		want = wire.PrepareFDs
	}
	if len(fds) != want {
		return fmt.Errorf("type %d with %d descriptors, want %d", m.Type, len(fds), want)
	}
	r, err := wire.DecodeSpawnRequest(m.Body)
	if err != nil {
		return err
	}
	if r.Zygote >= uint32(len(s.zygotes)) {
		return fmt.Errorf("zygote %d of %d", r.Zygote, len(s.zygotes))
	}
	s.asking.Lock()
	defer s.asking.Unlock()
	s.mu.Lock()
	z, n, used := s.zygotes[r.Zygote], len(s.children), s.children[m.ID] != nil
	s.mu.Unlock()
	switch {
	case used:
		return fmt.Errorf("worker %d exists", m.ID)
	case n >= maxWorkers:
		return fmt.Errorf("more than %d workers", maxWorkers)
	case z == nil:
		s.send(&wire.Message{Type: wire.NoZygote, ID: m.ID})
		return nil
	}
	c := &child{id: m.ID, of: z, answered: make(chan struct{})}
	if err := s.confine(c, z, &r); err != nil {
		s.release(c)
		s.refuse(c.id, err)
		return nil
	}
	c.timer = time.AfterFunc(answerTimeout, func() {
		s.logf("killing the process that starts workers: it has not answered within %v", answerTimeout)
		z.kill()
	})
	s.mu.Lock()
	alive := s.zygotes[z.at] == z
	if alive {
		s.requests++
		c.number = s.requests
		s.children[c.id] = c
	}
	s.mu.Unlock()
	if !alive {
		c.timer.Stop()
		s.release(c)
		s.send(&wire.Message{Type: wire.NoZygote, ID: c.id})
		return nil
	}
	all := fds
	if c.group != nil {
		for _, f := range c.group.Join {
			all = append(all[:len(all):len(all)], int(f.Fd()))
		}
	}
	if err := wire.SendWithin(z.conn, answerTimeout, &wire.Message{Type: m.Type, ID: m.ID, Body: r.Worker}, all...); err != nil {
		z.kill() // zygoteGone answers
	}
	if c.group != nil {
		c.group.CloseJoin()
		time.AfterFunc(prepareAfter, s.groups.Prepare)
	}
	return nil
}

// prepareAfter is the delay between a request to the zygote and making the next worker's control group. By then the
// zygote has cloned the worker, and a lease that follows closely still finds the group made. With 5 ms it often did
// not: the fork step of leases back to back then took 1984 us instead of 1382 us (medians of six interleaved pairs, two
// busy cores).
const prepareAfter = 300 * time.Microsecond

// refuse answers a request for which no worker was started.
func (s *Spawner) refuse(id uint32, err error) {
	s.send(&wire.Message{Type: wire.SpawnFailed, ID: id, Body: wire.EncodeFailure(wire.StatusFatal, err.Error())})
}

// answered handles a message of the zygote. It takes over fds. An error means that the zygote broke the protocol.
func (s *Spawner) answered(m *wire.Message, fds []int) error {
	s.mu.Lock()
	c := s.children[m.ID]
	if c != nil && c.pidfd != nil {
		c = nil
	}
	s.mu.Unlock()
	if c == nil {
		wire.CloseAll(fds)
		return fmt.Errorf("unexpected message of type %d for worker %d", m.Type, m.ID)
	}
	defer close(c.answered)
	switch {
	case m.Type == wire.Spawned && len(fds) >= 1 && len(fds) <= 3 && len(m.Body) == 4:
		c.timer.Stop()
		guard := -1
		if len(fds) > 1 {
			guard = fds[1]
		}
		if len(fds) > 2 {
			reapNow(fds[2]) // the stem, which has cloned worker and guard
		}
		return s.adopt(c, int(m.U32(0)), fds[0], guard)
	case m.Type == wire.SpawnFailed:
		c.timer.Stop()
		for _, fd := range fds { // of a guard and a stem that were cloned before the failure
			reapNow(fd)
		}
		s.forget(c)
		s.release(c)
		e := m.Failure()
		s.send(&wire.Message{Type: wire.SpawnFailed, ID: c.id, Body: wire.EncodeFailure(e.Status, e.Text)})
		return nil
	}
	wire.CloseAll(fds)
	return fmt.Errorf("message of type %d with %d bytes and %d descriptors", m.Type, len(m.Body), len(fds))
}

// adopt registers a cloned worker with its guard (-1: none), reports it to the executor, and starts watch for it. It
// takes over the pidfds.
func (s *Spawner) adopt(c *child, pid, workerFD, guardFD int) error {
	var guard *os.File
	guardPID := 0
	pidfd, err := newPidfd(workerFD)
	if guardFD >= 0 {
		var gerr error
		if guardPID, gerr = pidOfFD(guardFD); gerr == nil {
			guard, gerr = newPidfd(guardFD)
		}
		err = errors.Join(err, gerr)
	}
	if err != nil {
		return err // the caller kills the zygote; findStrays ends what it has cloned
	}
	s.mu.Lock()
	c.pidfd, c.guard, c.pid, c.guardPID = pidfd, guard, pid, guardPID
	unwanted := c.unwanted
	s.mu.Unlock()
	body := make([]byte, wire.SpawnedSize)
	putU32(body, uint32(pid))
	var files []int
	if c.group != nil {
		layout, open := c.group.Files()
		putU32(body[4:], layout)
		for _, f := range open {
			files = append(files, int(f.Fd()))
		}
	}
	s.send(&wire.Message{Type: wire.Spawned, ID: c.id, Body: body}, files...)
	if unwanted {
		c.kill()
	}
	s.noticeStop(c)
	s.reaping.Add(1)
	go s.watch(c)
	return nil
}

// watch reaps a worker and reports its end to the executor.
func (s *Spawner) watch(c *child) {
	defer s.reaping.Done()
	st, err := reap(c.pidfd, c.guard)
	if err != nil {
		s.logf("reap worker %d: %v", c.pid, err)
	}
	exit := wire.Exit{Signal: int32(st.signal), Code: int32(st.code), Stopped: c.stopped.Load()}
	if c.group != nil {
		var killed int
		killed, exit.Full = c.group.Killed()
		exit.Killed = uint32(killed)
		used, _ := c.group.CPUTime()
		exit.CPU = uint64(used)
	}
	s.forget(c)
	c.pidfd.Close()
	s.giveUID(c)
	s.send(&wire.Message{Type: wire.Exited, ID: c.id, Body: exit.Encode()})
	s.removeGroup(c) // last, because no lease waits for it
}

func (s *Spawner) forget(c *child) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.children, c.id)
}

func (s *Spawner) killAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.children {
		c.unwanted = true
		if c.pidfd != nil {
			c.kill()
		}
	}
}

// kill ends a worker that has been cloned, even if it is frozen.
func (c *child) kill() {
	killPidfd(c.pidfd)
	if c.group != nil {
		c.group.LetDie()
	}
}

// ---- commands for one worker ----

// command carries out the executor's command for a worker. A worker that has ended is no error: the executor may not
// have read that yet.
func (s *Spawner) command(typ wire.Type, id uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.children[id]
	there := c != nil && c.pidfd != nil
	switch typ {
	case wire.Kill:
		if c != nil {
			c.unwanted = true
		}
		if there {
			c.kill()
		}
	case wire.Explain:
		if there {
			signalPidfd(c.pidfd, unix.SIGXCPU)
		}
	case wire.Device:
		body := make([]byte, 4)
		if there {
			putU32(body, deviceState(c.pid))
		}
		s.send(&wire.Message{Type: wire.DeviceIs, ID: id, Body: body})
	}
}

// ---- stopped processes ----

// watchStops kills children that are stopped (SIGSTOP) for longer than StopPatience. changed gets SIGCHLD.
func (s *Spawner) watchStops(changed chan os.Signal) {
	for range changed {
		s.mu.Lock()
		zygotes := slices.Clone(s.zygotes)
		children := make([]*child, 0, len(s.children))
		for _, c := range s.children {
			if c.pidfd != nil {
				children = append(children, c)
			}
		}
		s.mu.Unlock()
		for _, c := range children {
			s.noticeStop(c)
		}
		for _, z := range zygotes {
			if z != nil {
				z.noticeStop()
			}
		}
	}
}

func (c *child) isStopped() (yes bool) {
	wire.Control(c.pidfd, func(fd int) error {
		yes = isStopped(unix.P_PIDFD, fd)
		return nil
	})
	return yes
}

func (s *Spawner) noticeStop(c *child) {
	if !c.isStopped() || c.stopNoticed.Swap(true) {
		return
	}
	time.AfterFunc(StopPatience, func() {
		c.stopNoticed.Store(false)
		if c.isStopped() {
			s.logf("killing worker %d: it was stopped for %v", c.pid, StopPatience)
			c.stopped.Store(true)
			c.kill()
		}
	})
}

func putU32(b []byte, n uint32) { binary.LittleEndian.PutUint32(b, n) }
