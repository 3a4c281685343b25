package spawner

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

const (
	// helloTimeout bounds the time in which a zygote loads its providers.
	helloTimeout = 10 * time.Second
	// RuntimeTimeout bounds the time in which the zygote of a runtime imports its modules.
	RuntimeTimeout = 60 * time.Second
	// answerTimeout is how long a zygote may take for one clone (about 0.2 ms) before it counts as hung. It is well
	// below the time that callers wait for a worker, so that the next zygote can still serve them.
	answerTimeout = 4 * time.Second
	// StopPatience is how long a worker or the zygote may be stopped (SIGSTOP) before it is killed.
	StopPatience = time.Second
)

// zygote is one run of a zygote process.
type zygote struct {
	s       *Spawner
	at      int // its position: 0 has no runtime
	cmd     *exec.Cmd
	conn    *net.UnixConn
	devices uint32
	parts   uint32        // of the sandbox
	missing string        // parts of the sandbox, and why
	gone    chan struct{} // closed when the process is reaped and its last message read
	err     error         // how it ended, set before gone is closed

	stopNoticed atomic.Bool
}

// startZygote starts the zygote at a position and waits for its greeting. The error is a *wire.Error if the zygote is of another
// program version, or its runtime cannot start.
func (s *Spawner) startZygote(ctx context.Context, at int) (*zygote, error) {
	ours, theirs, err := wire.SocketPair()
	if err != nil {
		return nil, err
	}
	child := os.NewFile(uintptr(theirs), "zygote socket")
	defer child.Close()
	z := &zygote{s: s, at: at, conn: ours, gone: make(chan struct{})}
	z.cmd = exec.Command(s.cfg.Worker, s.zygoteArguments(at)...)
	z.cmd.ExtraFiles = []*os.File{child}
	if pages := s.openPages(at); pages != nil {
		defer pages.Close()
		z.cmd.ExtraFiles = append(z.cmd.ExtraFiles, pages)
		z.cmd.Args = append(z.cmd.Args, "--pages")
	}
	z.cmd.Stdout, z.cmd.Stderr = os.Stderr, os.Stderr
	z.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	s.asking.Lock() // findStrays must not see a zygote that is unknown
	wire.OnStarterThread(func() { err = z.cmd.Start() })
	if err == nil {
		s.mu.Lock()
		s.pids[z.cmd.Process.Pid] = true
		s.mu.Unlock()
	}
	s.asking.Unlock()
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("start the program of workers: %w", err)
	}
	child.Close()
	reaped := make(chan error, 1)
	go func() {
		err := z.cmd.Wait()
		s.mu.Lock()
		delete(s.pids, z.cmd.Process.Pid)
		s.mu.Unlock()
		if err == nil {
			err = errors.New("exit status 0")
		}
		reaped <- err
	}()
	version, err := z.hello(ctx, reaped)
	if err == nil {
		err = SameVersion(s.cfg.Version, version)
	}
	if err == nil {
		err = s.cfg.checkSandbox(z)
	}
	if err != nil {
		z.conn.Close()
		z.cmd.Process.Kill()
		<-z.drained(reaped)
		return nil, fmt.Errorf("start the program of workers %s: %w", s.cfg.Worker, err)
	}
	go z.receive(reaped)
	return z, nil
}

// openPages opens the device with which memory of workers is filled on demand, for the zygote at a position. Only root may open it. Nil: seeds of other nodes
// are copied as a whole before workers start from them.
func (s *Spawner) openPages(at int) *os.File {
	if s.cfg.Mode == sandbox.Off || at > 0 {
		return nil
	}
	f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return f
}

// drained returns a channel that is closed once the process is reaped. hello may have read the result from reaped
// already.
func (z *zygote) drained(reaped chan error) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		if z.err == nil {
			z.err = <-reaped
		}
		close(done)
	}()
	return done
}

func (z *zygote) hello(ctx context.Context, reaped chan error) (version string, err error) {
	limit := helloTimeout
	if z.at > 0 {
		limit = RuntimeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { z.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, wire.Max)
	n, err := z.conn.Read(buf)
	if err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("no greeting: %w", ctx.Err())
		}
		z.conn.Close()
		z.err = <-reaped
		return "", fmt.Errorf("no greeting: %w", z.err)
	}
	m, err := wire.Decode(buf[:n])
	if err != nil {
		return "", otherVersion("%v", err)
	}
	if m.Type == wire.Failed {
		return "", m.Failure()
	}
	if m.Type != wire.Hello || len(m.Body) < 12 {
		return "", fmt.Errorf("greeting of type %d with %d bytes", m.Type, len(m.Body))
	}
	if v := m.U32(0); v != wire.Version {
		return "", otherVersion("it speaks wire version %d, this executor %d", v, wire.Version)
	}
	missing, told, _ := bytes.Cut(m.Body[12:], []byte{0})
	z.devices, z.parts, z.missing = m.U32(1), m.U32(2), wire.Printable(missing)
	return wire.Printable(told), nil
}

// receive handles the zygote's answers until the socket closes, then reaps the process.
func (z *zygote) receive(reaped chan error) {
	buf := make([]byte, wire.Max)
	for {
		m, fds, err := wire.Receive(z.conn, buf, 4)
		if err != nil {
			break
		}
		if err := z.s.answered(&m, fds); err != nil {
			z.s.logf("the process that starts workers broke the protocol: %v", err)
			break
		}
	}
	z.cmd.Process.Kill()
	z.conn.Close()
	z.err = <-reaped
	close(z.gone)
}

// kill kills the process; receive notices.
func (z *zygote) kill() { z.cmd.Process.Kill() }

// stop ends the process and waits until it is reaped.
func (z *zygote) stop() {
	z.conn.CloseWrite() // a healthy zygote exits when the socket closes
	select {
	case <-z.gone:
	case <-time.After(time.Second):
		z.kill()
		<-z.gone
	}
}

// noticeStop kills a zygote that is stopped for longer than StopPatience.
func (z *zygote) noticeStop() {
	stopped := func() bool { return isStopped(unix.P_PID, z.cmd.Process.Pid) }
	if !stopped() || z.stopNoticed.Swap(true) {
		return
	}
	time.AfterFunc(StopPatience, func() {
		z.stopNoticed.Store(false)
		select {
		case <-z.gone:
			return
		default:
		}
		if stopped() {
			z.s.logf("killing the process that starts workers, %d: it was stopped for %v", z.cmd.Process.Pid, StopPatience)
			z.kill()
		}
	})
}

// supervise keeps the zygote at a position running until ctx ends. z is the first one.
func (s *Spawner) supervise(ctx context.Context, z *zygote) {
	const shortest, longest = 20 * time.Millisecond, 5 * time.Second
	delay, at := shortest, z.at
	for {
		since := time.Now()
		select {
		case <-z.gone:
		case <-ctx.Done():
			z.stop()
			s.zygoteGone(z, nil)
			return
		}
		s.zygoteGone(z, fmt.Errorf("the process that starts workers ended: %w", z.err))
		if time.Since(since) > longest {
			delay = shortest
		}
		for {
			var err error
			if z, err = s.startZygote(ctx, at); err == nil {
				break
			}
			if ctx.Err() != nil {
				return
			}
			s.sayZygoteEnded(at, err)
			select {
			case <-time.After(delay):
			case <-ctx.Done():
				return
			}
			delay = min(2*delay, longest)
		}
		s.zygoteUp(z)
	}
}

// zygoteUp makes z the zygote of its position and tells the executor.
func (s *Spawner) zygoteUp(z *zygote) {
	body := make([]byte, wire.HelloText, wire.HelloText+len(z.missing)+1+len(s.version))
	for i, n := range []uint32{wire.Version, z.devices, z.parts, uint32(z.cmd.Process.Pid)} {
		putU32(body[4*i:], n)
	}
	body = append(append(append(body, z.missing...), 0), s.version...)
	s.mu.Lock()
	s.zygotes[z.at], s.guards = z, z.parts&wire.PartPIDs != 0
	s.send(&wire.Message{Type: wire.Hello, ID: uint32(z.at), Body: body})
	s.mu.Unlock()
	z.noticeStop() // in case it was stopped before watchStops knew it
}

// zygoteGone handles what a dead zygote has left: unanswered requests, and possibly a worker that was cloned for the
// first of them. That worker lives on, since it may have used up its client's offer. err is nil when the spawner itself
// ends.
func (s *Spawner) zygoteGone(z *zygote, err error) {
	s.asking.Lock() // no other zygote clones a worker meanwhile
	defer s.asking.Unlock()
	s.mu.Lock()
	s.zygotes[z.at] = nil // no more requests go to it
	if err != nil {
		s.sayZygoteEnded(z.at, err) // before any NoZygote, so that the executor waits for a Hello instead of asking again at once
	}
	s.mu.Unlock()
	sure := s.awaitOthers(z)
	found := s.findStrays()
	s.mu.Lock()
	var unanswered []*child
	for id, c := range s.children {
		if c.pidfd == nil && c.of == z {
			unanswered = append(unanswered, c)
			delete(s.children, id)
		}
	}
	if !sure {
		s.mu.Unlock()
		found.end()
		s.mu.Lock()
	}
	slices.SortFunc(unanswered, func(a, b *child) int { return cmp.Compare(a.number, b.number) })
	if found.worker >= 0 && len(unanswered) > 0 {
		s.children[unanswered[0].id] = unanswered[0]
	}
	s.mu.Unlock()
	if len(unanswered) == 0 { // the zygote had answered all requests
		found.end()
	}
	for i, c := range unanswered {
		c.timer.Stop()
		if i == 0 && found.worker >= 0 {
			if err := s.adopt(c, found.pid, found.worker, found.guard); err == nil {
				continue
			}
			s.forget(c)
		}
		s.release(c)
		s.send(&wire.Message{Type: wire.NoZygote, ID: c.id})
	}
}

// awaitOthers waits until the other zygotes have answered all requests. It returns false if another one has ended too: a stray may be a worker
// of that one.
func (s *Spawner) awaitOthers(z *zygote) (sure bool) {
	s.mu.Lock()
	var others []*child
	for _, c := range s.children {
		if c.pidfd == nil && c.of != z {
			others = append(others, c)
		}
	}
	s.mu.Unlock()
	sure = true
	for _, c := range others {
		select {
		case <-c.answered:
		case <-c.of.gone:
			sure = false
		}
	}
	return sure
}

func (s *Spawner) sayZygoteEnded(at int, err error) {
	status := wire.StatusFatal
	var known *wire.Error
	if errors.As(err, &known) {
		status = known.Status
	}
	s.send(&wire.Message{Type: wire.ZygoteEnded, ID: uint32(at), Body: wire.EncodeFailure(status, err.Error())})
}
