package latency

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// session is an open channel to a running peer, which also serves the bare floors. It belongs to a locked thread.
type session struct {
	cfg   *Config
	mode  dataplane.WaitMode
	dev   *dataplane.Device
	bench *raw.Bench

	mu       sync.Mutex // orders abort and close
	closed   bool
	peerEnd  chan struct{} // closed when the peer has ended
	peerErr  error         // valid after peerEnd is closed
	kill     func()
	process  *os.Process // the peer, if it runs on this machine
	closeFDs func()
}

// openFDs creates the descriptors that client and peer share. closeAll closes all but the peer's end of the socket.
func openFDs(memory int64) (mine, theirs raw.FDs, closeAll func(), err error) {
	var open []int
	closeAll = func() {
		for _, fd := range open {
			_ = unix.Close(fd)
		}
	}
	fail := func(what string, err error) (raw.FDs, raw.FDs, func(), error) {
		closeAll()
		if theirs.Socket > 0 {
			_ = unix.Close(theirs.Socket)
		}
		return mine, theirs, nil, fmt.Errorf("%s: %w", what, err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fail("socketpair", err)
	}
	open = append(open, pair[0])
	theirs.Socket = pair[1]
	mem, err := unix.MemfdCreate("rfaas-bench", unix.MFD_CLOEXEC)
	if err != nil {
		return fail("memfd", err)
	}
	open = append(open, mem)
	if err := unix.Ftruncate(mem, memory); err != nil {
		return fail(fmt.Sprintf("shared memory of %d bytes", memory), err)
	}
	var events [2]int
	for i := range events {
		if events[i], err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
			return fail("eventfd", err)
		}
		open = append(open, events[i])
	}
	mine = raw.FDs{Socket: pair[0], Memory: mem, Ping: events[0], Pong: events[1]}
	theirs.Memory, theirs.Ping, theirs.Pong = mem, events[0], events[1]
	return mine, theirs, closeAll, nil
}

// openSession starts a peer and connects to it.
func openSession(cfg *Config, mode dataplane.WaitMode) (*session, error) {
	payload := max(slices.Max(cfg.Payloads), cfg.Result)
	mine, theirs, closeFDs, err := openFDs(raw.Memory(payload, cfg.Depth))
	if err != nil {
		return nil, err
	}
	closeTheirs := sync.OnceFunc(func() { _ = unix.Close(theirs.Socket) })
	s := &session{cfg: cfg, mode: mode, peerEnd: make(chan struct{}), closeFDs: func() { closeTheirs(); closeFDs() }}
	if cfg.Remote != "" {
		mine.Memory = -1
		err = s.joinPeer(theirs.Socket)
	} else {
		err = s.startPeer(theirs)
	}
	if err != nil {
		s.closeFDs()
		return nil, err
	}
	if cfg.Remote == "" {
		closeTheirs() // the peer has a copy: when it ends, we read the end of the file
	}
	if err := s.connect(mine, payload); err != nil {
		err = s.explain(err)
		s.close()
		return nil, err
	}
	go s.watch()
	return s, nil
}

func (s *session) startPeer(fds raw.FDs) error {
	cmd := exec.Command(s.cfg.Peer)
	cmd.Stderr = os.Stderr
	for i, fd := range []int{fds.Socket, fds.Memory, fds.Ping, fds.Pong} {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("descriptor %d of the peer: %w", i, err)
		}
		f := os.NewFile(uintptr(dup), "")
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	// Its own process group: Ctrl-C ends this process, which then ends the peer. The peer dies with this process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the bench's peer: %w (make build makes it; --peer says where it is)", err)
	}
	s.process = cmd.Process
	s.kill = func() { _ = cmd.Process.Kill() }
	go func() {
		s.peerErr = cmd.Wait()
		close(s.peerEnd)
	}()
	return nil
}

func (s *session) connect(fds raw.FDs, payload int) error {
	dev, err := dataplane.Open(s.cfg.Provider, s.cfg.Device)
	if err != nil {
		return err
	}
	s.dev = dev
	var bulk int64
	if payload > s.cfg.Eager {
		bulk = int64((payload+63)&^63) * int64(s.cfg.Depth)
	}
	s.bench, err = raw.Open(dev, s.cfg.Device, raw.Config{Slots: s.cfg.Slots, Depth: s.cfg.Depth, Eager: s.cfg.Eager,
		Bulk: max(bulk, dataplane.DefaultBulk), Payload: payload, Mode: s.mode, PeerCPU: s.cfg.peerCPU(),
		Registered: s.cfg.Buffers == BuffersRegistered, CallsOnly: s.cfg.callsOnly}, fds)
	if err != nil {
		return err
	}
	s.bench.Delay(int64(s.cfg.delay))
	return nil
}

// watch ends all waits for the peer when the peer has ended unexpectedly.
func (s *session) watch() {
	<-s.peerEnd
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.bench.Abort()
	}
}

// close ends the peer and waits for it.
func (s *session) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	if s.bench != nil {
		s.bench.Close() // a peer on shm ends when its client disconnects
	}
	if s.bench == nil || s.cfg.Provider != dataplane.SHM {
		s.kill()
	}
	select {
	case <-s.peerEnd:
	case <-time.After(5 * time.Second):
		s.kill()
		<-s.peerEnd
	}
	if s.dev != nil {
		s.dev.Close()
	}
	s.closeFDs()
}

// floor runs one batch of bare round trips and returns its average, ns. If the batch was given up because something else used the
// processors, the average is NaN and the samples are meaningless; the caller then discards the pair.
func (s *session) floor(k raw.Kind, size, reply, warm, n int, samples []int64) (float64, error) {
	return s.average(n, samples, func(samples []int64) (int64, error) {
		ns, err := s.bench.Floor(k, size, reply, warm, n, samples)
		var given *dataplane.Error
		if errors.As(err, &given) && given.Status == dataplane.StatusDeadline {
			return -1, nil
		}
		return ns, err
	})
}

// average is the figure of a batch of n, ns: its mean, or NaN if its time is negative. Between machines it is the median of its round
// trips, each of which is timed: a packet that queues in the network takes ten times as long as the others, and the mean of some
// dozen round trips would mostly show how many packets queued.
func (s *session) average(n int, samples []int64, run func(samples []int64) (int64, error)) (float64, error) {
	byMedian := s.cfg.byMedian()
	if byMedian && samples == nil {
		samples = make([]int64, n)
	}
	ns, err := run(samples)
	switch {
	case err != nil:
		return 0, err
	case ns < 0:
		return math.NaN(), nil
	case byMedian:
		return medianOf(samples[:n]), nil
	}
	return float64(ns) / float64(n), nil
}

// calibrate is the median average of a few short batches of n round trips, ns, so that one interrupted batch does not look like a
// change of placement. NaN if one was given up.
func (s *session) calibrate(k raw.Kind, size, n int) (float64, error) {
	means := make([]float64, 5)
	if s.cfg.byMedian() {
		means = means[:1]
	}
	for i := range means {
		mean, err := s.floor(k, size, size, n/4, n, nil)
		if err != nil || math.IsNaN(mean) {
			return mean, err
		}
		means[i] = mean
	}
	return median(means), nil
}

func (s *session) function() uint32 {
	switch s.cfg.Function {
	case FunctionEmpty:
		return raw.FnEmpty
	case functionDelayed:
		return raw.FnDelayed
	case functionReply:
		return raw.FnReply
	}
	return raw.FnEcho
}

// calls runs one batch of calls and returns its average, ns.
func (s *session) calls(size, reply, warm, n int, samples []int64) (float64, error) {
	return s.average(n, samples, func(samples []int64) (int64, error) {
		return s.bench.Calls(s.function(), size, reply, warm, n, samples)
	})
}

// explain adds the cause of the peer's end to an error of the client, if the peer has ended.
func (s *session) explain(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-s.peerEnd:
		if s.peerErr != nil {
			return errors.Join(err, fmt.Errorf("the peer ended: %w", s.peerErr))
		}
	case <-time.After(100 * time.Millisecond):
	}
	return err
}
