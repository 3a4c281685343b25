package zygote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// errZygoteDied: the zygote ended before it answered. Nothing was started, or it has been killed again.
var errZygoteDied = errors.New("zygote ended")

const (
	// helloTimeout is how long a zygote may take to load its providers.
	helloTimeout = 10 * time.Second
	// answerTimeout is how long it may take for one clone (about 0.2 ms) before it counts as hung. Well below what
	// callers wait for a worker, so that another zygote can still serve them.
	answerTimeout = 4 * time.Second
)

// process is one life of the zygote.
type process struct {
	log     *slog.Logger
	cmd     *exec.Cmd
	conn    *net.UnixConn
	devices int
	parts   uint32        // of the sandbox
	missing string        // of it, and why
	version string        // of the program; "": it does not say
	gone    chan struct{} // closed when reaped; err is set before
	err     error

	mu      sync.Mutex
	dead    bool
	pending map[uint32]chan answer // by worker; each gets exactly one answer

	stopNoticed atomic.Bool
}

// answer is what became of a SPAWN: a pidfd, or err.
type answer struct {
	pidfd *os.File
	pid   int
	guard *os.File // pidfd of the first process of its name space; nil: it has none
	err   error
}

// startProcess starts a zygote and returns when it has said HELLO.
func startProcess(ctx context.Context, cfg *Config) (*process, error) {
	path, log := cfg.Path, cfg.Log
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	child := os.NewFile(uintptr(theirs), "zygote socket")
	defer child.Close()
	p := &process{log: log, conn: ours, gone: make(chan struct{}), pending: map[uint32]chan answer{}}
	lines := &lineLogger{log: log}
	p.cmd = exec.Command(path, cfg.Sandbox.arguments()...)
	p.cmd.ExtraFiles = []*os.File{child}
	p.cmd.Env = cfg.Sandbox.environment(os.Environ())
	p.cmd.Stdout, p.cmd.Stderr = lines, lines
	p.cmd.WaitDelay = time.Second
	// Own session: Ctrl-C at the executor's terminal is the executor's to handle.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	onStarterThread(func() { err = p.cmd.Start() })
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("start zygote: %w", err)
	}
	child.Close()
	go p.wait()
	if err := p.hello(ctx); err != nil {
		p.stop()
		return nil, fmt.Errorf("start zygote %s: %w", path, err)
	}
	if err := sameVersion(cfg.Version, p.version); err != nil {
		p.stop()
		return nil, fmt.Errorf("start zygote %s: %w", path, err)
	}
	if err := cfg.Sandbox.check(p, log); err != nil {
		p.stop()
		return nil, err
	}
	go p.receive()
	return p, nil
}

// socketPair returns our end and the other's descriptor.
func socketPair() (*net.UnixConn, int, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(fds[0]), "socket")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		unix.Close(fds[1])
		return nil, -1, err
	}
	return c.(*net.UnixConn), fds[1], nil
}

func (p *process) hello(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { p.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, msgMax)
	n, err := p.conn.Read(buf)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("no greeting: %w", ctx.Err())
		}
		p.stop()
		return fmt.Errorf("no greeting: %w", p.err)
	}
	m, err := decodeMessage(buf[:n])
	if err != nil {
		return otherVersion("%v", err)
	}
	if m.typ != msgHello || len(m.body) < 12 {
		return fmt.Errorf("greeting of type %d with %d bytes", m.typ, len(m.body))
	}
	if v := m.u32(0); v != wireVersion {
		return otherVersion("it speaks wire version %d, this executor %d", v, wireVersion)
	}
	p.devices = int(m.u32(1))
	missing, version, _ := bytes.Cut(m.body[12:], []byte{0})
	p.parts, p.missing, p.version = m.u32(2), printable(missing), printable(version)
	return nil
}

// stop ends the process and returns when it is reaped.
func (p *process) stop() {
	p.conn.Close() // a healthy zygote exits
	select {
	case <-p.gone:
	case <-time.After(time.Second):
		p.cmd.Process.Kill()
		<-p.gone
	}
}

func (p *process) wait() {
	err := p.cmd.Wait()
	if err == nil {
		err = errors.New("exit status 0")
	}
	p.err = err
	close(p.gone)
}

// receive gives the zygote's answers to those who wait. It ends with the socket and takes the process with it.
func (p *process) receive() {
	buf := make([]byte, msgMax)
	oob := make([]byte, unix.CmsgSpace(4*4))
	for {
		n, oobn, _, _, err := p.conn.ReadMsgUnix(buf, oob)
		fds := rights(oob[:oobn])
		if err != nil {
			closeAll(fds)
			break
		}
		m, err := decodeMessage(buf[:n])
		if err == nil {
			err = p.deliver(&m, fds)
		} else {
			closeAll(fds)
		}
		if err != nil {
			p.log.Error("zygote broke the protocol", "err", err)
			break
		}
	}
	p.cmd.Process.Kill()
	p.conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	for id, ch := range p.pending {
		delete(p.pending, id)
		ch <- answer{err: errZygoteDied}
	}
}

// deliver passes on one answer. It owns fds.
func (p *process) deliver(m *message, fds []int) error {
	p.mu.Lock()
	ch := p.pending[m.id]
	delete(p.pending, m.id)
	p.mu.Unlock()
	if ch == nil {
		closeAll(fds)
		return fmt.Errorf("message of type %d for worker %d, which nobody waits for", m.typ, m.id)
	}
	switch {
	case m.typ == msgSpawned && len(fds) == 1 && len(m.body) == 4:
		f, err := newPidfd(fds[0])
		ch <- answer{pidfd: f, pid: int(m.u32(0)), err: err}
		return nil
	case m.typ == msgSpawned && len(fds) == 3 && len(m.body) == 4:
		reapNow(fds[2])
		f, err := newPidfd(fds[0])
		guard, gerr := newPidfd(fds[1])
		ch <- answer{pidfd: f, pid: int(m.u32(0)), guard: guard, err: errors.Join(err, gerr)}
		return nil
	case m.typ == msgSpawnFailed:
		for _, fd := range fds {
			reapNow(fd)
		}
		ch <- answer{err: m.failure()}
		return nil
	}
	closeAll(fds)
	ch <- answer{err: errZygoteDied}
	return fmt.Errorf("message of type %d, %d bytes, %d descriptors", m.typ, len(m.body), len(fds))
}

// send sends a SPAWN or PREPARE. The channel gets exactly one answer, unless there is an error.
func (p *process) send(typ msgType, id uint32, body []byte, fds []int) (<-chan answer, error) {
	ch := make(chan answer, 1)
	p.mu.Lock()
	if p.dead {
		p.mu.Unlock()
		return nil, errZygoteDied
	}
	p.pending[id] = ch
	p.mu.Unlock()
	m := message{typ, id, body}
	p.conn.SetWriteDeadline(time.Now().Add(answerTimeout))
	_, _, err := p.conn.WriteMsgUnix(m.encode(), unix.UnixRights(fds...), nil)
	if err == nil {
		return ch, nil
	}
	p.log.Error("zygote cannot be reached", "err", err)
	p.cmd.Process.Kill()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	delete(p.pending, id)
	return nil, errZygoteDied
}

// isDead is true from when the end was noticed, before gone is closed.
func (p *process) isDead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

// await waits for an answer; a zygote that does not give one is killed, and then it comes.
func (p *process) await(ch <-chan answer) answer {
	select {
	case a := <-ch:
		return a
	case <-time.After(answerTimeout):
	}
	p.log.Error("zygote does not answer; killed", "after", answerTimeout)
	p.cmd.Process.Kill()
	return <-ch
}

// rights are the descriptors of a control message.
func rights(oob []byte) []int {
	var fds []int
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

// sender is the process that sent a message, 0 if it does not say.
func sender(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return 0
	}
	for i := range msgs {
		if cred, err := unix.ParseUnixCredentials(&msgs[i]); err == nil {
			return int(cred.Pid)
		}
	}
	return 0
}

// fds are the descriptors of files, which stay open as long as these do.
func fds(files []*os.File) (list []int) {
	for _, f := range files {
		list = append(list, int(f.Fd()))
	}
	return list
}

func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// lineLogger logs what the zygote prints, line by line.
type lineLogger struct {
	log  *slog.Logger
	line []byte
}

func (l *lineLogger) Write(b []byte) (int, error) {
	for _, c := range b {
		if c != '\n' && len(l.line) < 1024 {
			l.line = append(l.line, c)
			continue
		}
		l.log.Warn("zygote: " + printable(l.line))
		l.line = l.line[:0]
	}
	return len(b), nil
}
