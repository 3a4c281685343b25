package zygote

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// startTimeout bounds the start of a spawner, including its first zygote (spawner.helloTimeout).
const startTimeout = 15 * time.Second

// connection is the spawner process and the socket to it.
type connection struct {
	process *os.Process
	conn    *net.UnixConn
	output  *os.File // its standard output and error
	lines   *lineLogger
	reaped  chan struct{} // closed when the process is reaped; err is set before
	err     error
}

// startSpawner starts the program. The caller must then read its first message.
func startSpawner(cfg *Config) (*connection, error) {
	ours, theirs, err := wire.SocketPair()
	if err != nil {
		return nil, err
	}
	child := os.NewFile(uintptr(theirs), "spawner socket")
	defer child.Close()
	c := &connection{conn: ours, lines: &lineLogger{log: cfg.Log}, reaped: make(chan struct{})}
	box := &cfg.Sandbox
	args := spawner.Config{Worker: cfg.Path, Version: cfg.Version, Mode: box.Mode, Paths: box.paths(), Bundles: box.Bundles, UIDs: box.UIDs, UIDFile: box.UIDFile,
		Processes: box.Processes, OpenFiles: box.Files, Idle: box.Idle, Files: cfg.Files, Append: cfg.Append, UID: cfg.UID, GID: cfg.GID, Renew: cfg.Renew, Identity: cfg.Identity, Remove: cfg.Remove,
		Without: box.without, OwnGroups: box.ownGroups, Runtimes: cfg.Runtimes}
	var output *os.File
	if c.output, output, err = os.Pipe(); err != nil {
		ours.Close()
		return nil, fmt.Errorf("start spawner: %w", err)
	}
	defer output.Close()
	cmd := exec.Command(cfg.spawnerPath(), args.Arguments()...)
	cmd.ExtraFiles = []*os.File{child}
	cmd.Env = box.environment(os.Environ())
	cmd.Stdout, cmd.Stderr = output, output
	// In a separate session, so that only the executor handles Ctrl-C at its terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	wire.OnStarterThread(func() { err = cmd.Start() })
	if err != nil {
		ours.Close()
		c.output.Close()
		return nil, fmt.Errorf("start spawner: %w", err)
	}
	c.process = cmd.Process
	c.watch()
	return c, nil
}

// lastOutput is how long to read the output of a spawner that has ended. A process that outlives it may keep the pipe open.
const lastOutput = time.Second

// watch starts to log the spawner's output, and reaps the spawner when it ends.
func (c *connection) watch() {
	read := make(chan struct{})
	go func() {
		defer close(read)
		io.Copy(c.lines, c.output)
	}()
	go func() {
		st, err := c.process.Wait()
		switch {
		case err != nil:
			c.err = err
		default:
			c.err = errors.New(st.String())
		}
		select {
		case <-read:
		case <-time.After(lastOutput):
		}
		c.output.Close()
		close(c.reaped)
	}()
}

// spawnerPath returns the path of rfaas-spawner: beside the worker program, or beside this one.
func (c *Config) spawnerPath() string {
	const name = "rfaas-spawner"
	if c.Spawner != "" {
		return c.Spawner
	}
	beside := filepath.Join(filepath.Dir(c.Path), name)
	if _, err := os.Stat(beside); err == nil {
		return beside
	}
	self, err := os.Executable()
	if err != nil {
		return beside
	}
	return filepath.Join(filepath.Dir(self), "..", "libexec", name)
}

// close closes the socket. The spawner then ends its workers and itself. close waits until it is reaped.
func (c *connection) close() {
	c.conn.Close()
	select {
	case <-c.reaped:
	case <-time.After(startTimeout):
		c.process.Kill()
		<-c.reaped
	}
}

// readHello reads one of the spawner's first messages, which says that a zygote runs, or why it could not start.
func (c *connection) readHello(ctx context.Context, runtimes bool) (*wire.Message, error) {
	limit := startTimeout
	if runtimes {
		limit += spawner.RuntimeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { c.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	m, fds, err := wire.Receive(c.conn, make([]byte, wire.Max), 0)
	wire.CloseAll(fds)
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("the spawner has not started the program of workers: %w", context.Cause(ctx))
	case errors.Is(err, io.EOF):
		c.conn.Close()
		<-c.reaped
		return nil, fmt.Errorf("the spawner ended: %w", c.err)
	case err != nil:
		return nil, fmt.Errorf("the spawner's first message: %w", err)
	case m.Type == wire.ZygoteEnded:
		return nil, m.Failure()
	case m.Type != wire.Hello:
		return nil, fmt.Errorf("the spawner's first message has type %d", m.Type)
	}
	return &m, nil
}

// ---- messages from the spawner ----

// receive handles the spawner's messages until it ends.
func (z *Zygote) receive() {
	buf := make([]byte, wire.Max)
	for {
		m, fds, err := wire.Receive(z.spawner.conn, buf, wire.MaxFDs)
		if errors.Is(err, wire.ErrDescriptors) {
			err = z.lostDescriptors(&m)
		}
		if err == nil {
			err = z.handle(&m, fds)
		}
		if err != nil && z.leaving.Load() && errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		if err != nil {
			z.spawnerEnded(err)
			return
		}
	}
}

// lostDescriptors handles a message whose descriptors could not be received, so that other workers live on. If they belonged
// to a new worker's control group, it kills the worker, whose limits could not be set.
func (z *Zygote) lostDescriptors(m *wire.Message) error {
	if m.Type != wire.Spawned || len(m.Body) != wire.SpawnedSize {
		return nil
	}
	z.cfg.Log.Error("no file descriptors are left: killing a worker that has just started")
	z.mu.Lock()
	w := z.workers[m.ID]
	z.mu.Unlock()
	if w != nil {
		w.scarce.Store(true)
		w.judge(verdict{wire.StatusWorkerDied, "killed, because the executor has no file descriptors left"})
	}
	clear(m.Body[4:]) // the layout of the control group's files
	return z.send(&wire.Message{Type: wire.Kill, ID: m.ID})
}

// handle handles a message and takes over fds.
func (z *Zygote) handle(m *wire.Message, fds []int) error {
	switch m.Type {
	case wire.Hello:
		wire.CloseAll(fds)
		return z.zygoteStarted(m)
	case wire.ZygoteEnded:
		wire.CloseAll(fds)
		return z.zygoteEnded(m.ID, m.Failure())
	case wire.Opened, wire.OpenFailed:
		z.opened(m, fds)
		return nil
	}
	z.mu.Lock()
	w := z.workers[m.ID]
	z.mu.Unlock()
	if w == nil && m.Type == wire.DeviceIs { // the worker ended after the question
		wire.CloseAll(fds)
		return nil
	}
	if w == nil {
		wire.CloseAll(fds)
		return fmt.Errorf("message of type %d for the unknown worker %d", m.Type, m.ID)
	}
	switch m.Type {
	case wire.Spawned:
		var files []*os.File
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "control group"))
		}
		group, err := sandbox.NewGroup(m.U32(1), files, w.memory)
		if err == nil && len(m.Body) != wire.SpawnedSize {
			err = fmt.Errorf("answer of %d bytes", len(m.Body))
		}
		if err != nil {
			return err
		}
		w.answer <- answer{pid: int(m.U32(0)), group: group}
		return nil
	case wire.SpawnFailed:
		z.forget(w)
		w.answer <- answer{err: m.Failure()}
	case wire.NoZygote:
		z.forget(w)
		w.answer <- answer{err: errZygoteDied}
	case wire.DeviceIs:
		select {
		case w.device <- m.U32(0):
		default:
		}
	case wire.Exited:
		exit, err := wire.DecodeExit(m.Body)
		if err != nil {
			return err
		}
		z.forget(w)
		w.exited <- exit
	default:
		wire.CloseAll(fds)
		return fmt.Errorf("message of type %d", m.Type)
	}
	wire.CloseAll(fds)
	return nil
}

// answer is the result of a request for a worker.
type answer struct {
	pid   int
	group *sandbox.Group // of the worker; without files if it has no group
	err   error
}

func (z *Zygote) forget(w *Worker) {
	z.mu.Lock()
	defer z.mu.Unlock()
	delete(z.workers, w.id)
}

// zygoteStarted records that a zygote runs.
func (z *Zygote) zygoteStarted(m *wire.Message) error {
	if len(m.Body) < wire.HelloText || m.U32(0) != wire.Version {
		return fmt.Errorf("greeting of %d bytes, wire version %d; this executor speaks version %d", len(m.Body), m.U32(0), wire.Version)
	}
	missing, version, _ := bytes.Cut(m.Body[wire.HelloText:], []byte{0})
	if err := spawner.SameVersion(z.cfg.Version, wire.Printable(version)); err != nil {
		return fmt.Errorf("spawner %s: %w", z.cfg.spawnerPath(), err)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if m.ID >= uint32(len(z.zygotes)) {
		return fmt.Errorf("greeting of zygote %d of %d", m.ID, len(z.zygotes))
	}
	p := &z.zygotes[m.ID]
	p.pid, p.noStart, p.unable = int(m.U32(3)), nil, nil
	z.devices, z.parts = int(m.U32(1)), m.U32(2)
	if lacks := wire.Printable(missing); lacks != z.missing {
		z.missing = lacks
		z.cfg.Log.Warn("the sandbox of workers is incomplete", "missing", lacks)
	}
	close(z.changed)
	z.changed = make(chan struct{})
	return nil
}

// zygoteEnded records that the zygote at a position does not run, and why.
func (z *Zygote) zygoteEnded(at uint32, err *wire.Error) error {
	if at >= uint32(len(z.zygotes)) {
		return fmt.Errorf("end of zygote %d of %d", at, len(z.zygotes))
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	p := &z.zygotes[at]
	args := []any{"reason", err}
	if p.runtime != "" {
		args = append(args, "runtime", p.runtime)
	}
	z.cfg.Log.Error("the process that starts workers is gone; starting another one", args...)
	if p.pid == 0 { // the message reports a failed start and not the end of a zygote
		p.unable = err
	}
	p.pid, p.noStart = 0, err
	close(z.changed)
	z.changed = make(chan struct{})
	return nil
}

// spawnerEnded closes z: all workers end with the spawner, and an unprivileged executor cannot start another spawner.
func (z *Zygote) spawnerEnded(err error) {
	z.spawner.conn.Close()
	z.mu.Lock()
	closed := z.closed
	z.closed = true
	workers := z.workers
	z.workers = map[uint32]*Worker{}
	opens := z.opens
	z.opens = map[uint32]chan opened{}
	close(z.changed)
	z.changed = make(chan struct{})
	z.mu.Unlock()
	if !closed {
		if errors.Is(err, io.EOF) {
			<-z.spawner.reaped
			err = z.spawner.err
		}
		err = fmt.Errorf("the spawner ended, and all workers with it: %w", err)
		z.cfg.Log.Error(err.Error())
		z.failed <- err
	}
	for _, w := range workers {
		// The worker waits for its answer or its exit.
		select {
		case w.answer <- answer{err: errClosed}:
		default:
		}
		w.exited <- wire.Exit{Signal: int32(unix.SIGKILL)}
	}
	for _, ch := range opens {
		ch <- opened{fd: -1, err: errClosed}
	}
}

// Failed returns a channel that receives an error if the spawner ends before Close. All workers have ended then, and no
// others can be started.
func (z *Zygote) Failed() <-chan error { return z.failed }

// send sends a message to the spawner.
func (z *Zygote) send(m *wire.Message, fds ...int) error {
	return wire.SendWithin(z.spawner.conn, sendTimeout, m, fds...)
}

// sendTimeout is how long a send waits while the spawner's queue is full.
const sendTimeout = 4 * time.Second

// RemoveFiles makes the spawner remove the files of Config.Remove.
func (z *Zygote) RemoveFiles() {
	if len(z.cfg.Remove) > 0 {
		_ = z.send(&wire.Message{Type: wire.Remove}) // fails only if the spawner has ended
	}
}

// ---- files that only the spawner may open ----

type opened struct {
	fd  int // -1: none
	err error
}

// OpenFile opens a file through the spawner. For reading the file must be in Config.Files, or in a directory of
// Config.Files; for appending it must be in Config.Append. The caller closes the file. Errors are *fs.PathError.
func (z *Zygote) OpenFile(path string, appending bool) (*os.File, error) {
	r := wire.OpenRequest{Append: appending}
	files := z.cfg.Files
	if appending {
		files = z.cfg.Append
	}
	file := slices.Index(files, path)
	if file < 0 && !appending {
		file, r.Name = slices.Index(z.cfg.Files, filepath.Dir(path)), filepath.Base(path)
	}
	if file < 0 {
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrPermission}
	}
	r.File = uint32(file)
	fd, err := z.ask(wire.Open, r.Encode())
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Renew makes the spawner run Config.Renew. It returns a pipe with the program's output, which the caller closes. The error is fs.ErrNotExist without
// such a program, and fs.ErrPermission if the user of this process could change Config.Identity.
func (z *Zygote) Renew() (*os.File, error) {
	fd, err := z.ask(wire.Renew, nil)
	if err != nil {
		return nil, &fs.PathError{Op: "renew", Path: z.cfg.Identity, Err: err}
	}
	return os.NewFile(uintptr(fd), z.cfg.Renew), nil
}

// PathIsSafe returns an error if a user could change where a path leads, or could make the path's last part if that is
// missing.
func PathIsSafe(path string, uid, gid uint32) error { return spawner.PathIsSafe(path, uid, gid) }

// Connect connects to a unix socket, which must be one of Config.Files, through the spawner.
func (z *Zygote) Connect(path string) (net.Conn, error) {
	file := slices.Index(z.cfg.Files, path)
	if file < 0 {
		return net.Dial("unix", path)
	}
	fd, err := z.ask(wire.Connect, binary.LittleEndian.AppendUint32(nil, uint32(file)))
	if errors.Is(err, fs.ErrPermission) { // this process connects by itself if its user can change the path
		return net.Dial("unix", path)
	}
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: path, Net: "unix"}, Err: err}
	}
	return wire.Conn(fd)
}

// ask sends a request that is answered with a descriptor.
func (z *Zygote) ask(typ wire.Type, body []byte) (fd int, err error) {
	ch := make(chan opened, 1)
	z.mu.Lock()
	closed := z.closed
	id := z.nextOpen
	z.nextOpen++
	if !closed {
		z.opens[id] = ch
	}
	z.mu.Unlock()
	if closed {
		return -1, errClosed
	}
	err = z.send(&wire.Message{Type: typ, ID: id, Body: body})
	if err == nil {
		select {
		case got := <-ch:
			return got.fd, got.err
		case <-time.After(sendTimeout):
			err = os.ErrDeadlineExceeded
		}
	}
	z.mu.Lock()
	delete(z.opens, id)
	z.mu.Unlock()
	select {
	case got := <-ch: // the answer came after all
		wire.CloseAll([]int{got.fd})
	default:
	}
	return -1, err
}

// opened handles the answer to ask and takes over fds.
func (z *Zygote) opened(m *wire.Message, fds []int) {
	z.mu.Lock()
	ch := z.opens[m.ID]
	delete(z.opens, m.ID)
	z.mu.Unlock()
	switch {
	case ch == nil: // ask has given up
		wire.CloseAll(fds)
	case m.Type == wire.Opened && len(fds) == 1:
		ch <- opened{fd: fds[0]}
	case len(m.Body) == 4:
		wire.CloseAll(fds)
		ch <- opened{fd: -1, err: unix.Errno(binary.LittleEndian.Uint32(m.Body))}
	default:
		wire.CloseAll(fds)
		ch <- opened{fd: -1, err: unix.EPROTO}
	}
}

// lineLimit is the length, in bytes, at which lineLogger breaks lines. The longest known lines, which list what a sandbox lacks, are shorter.
const lineLimit = 4096

// lineLogger logs the output of the spawner and the zygote, line by line. Longer lines are broken at lineLimit.
type lineLogger struct {
	log  *slog.Logger
	mu   sync.Mutex
	line []byte
}

func (l *lineLogger) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range b {
		if c == '\n' {
			l.flush()
			continue
		}
		if len(l.line) == lineLimit {
			l.flush()
		}
		l.line = append(l.line, c)
	}
	return len(b), nil
}

// end logs an incomplete line.
func (l *lineLogger) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.line) > 0 {
		l.flush()
	}
}

func (l *lineLogger) flush() {
	l.log.Warn("spawner: " + wire.Printable(l.line))
	l.line = l.line[:0]
}
