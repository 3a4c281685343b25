package zygote

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// TailSize is how much of a worker's output is kept, in bytes.
const TailSize = 4 << 10

// tail keeps the last TailSize bytes written to it.
type tail struct {
	mu    sync.Mutex
	ring  [TailSize]byte
	total uint64
}

func (t *tail) write(b []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if skip := len(b) - TailSize; skip > 0 {
		b = b[skip:]
		t.total += uint64(skip)
	}
	at := int(t.total % TailSize)
	n := copy(t.ring[at:], b)
	copy(t.ring[:], b[n:])
	t.total += uint64(len(b))
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.total <= TailSize {
		return append([]byte(nil), t.ring[:t.total]...)
	}
	at := t.total % TailSize
	return append(append(make([]byte, 0, TailSize), t.ring[at:]...), t.ring[:at]...)
}

// A worker's output is read at most at this average rate, in bytes per second, because no tenant pays for the
// executor's time. A function that prints more waits. Each read has a cost, however little it returns. So after a read
// that has emptied the pipe there is a pause, which limits reads to a few hundred per second.
const (
	outputRate  = 8 << 20
	outputChunk = 1 << 20
	outputPause = time.Second * outputChunk / outputRate // shortest time for a chunk
	outputRead  = 64 << 10                               // largest read: a pipe's capacity, unless the worker changes it
	outputRest  = 5 * time.Millisecond
)

// output reads the pipe that is a worker's stdout and stderr, so that the worker never blocks because nothing reads it.
type output struct {
	tail
	pipe   int           // nonblocking
	ready  *os.File      // an epoll instance with the pipe in it: see await
	ending chan struct{} // closed by finish: no more pauses
	done   chan struct{}
	reads  int // successful reads; used by drain until done is closed, then by finish
}

// newOutput returns the reading side, and the descriptor of the writing side, which the caller closes.
func newOutput() (*output, int, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, os.NewSyscallError("pipe2", err)
	}
	o, err := openOutput(p[0], nil)
	if err != nil {
		unix.Close(p[1])
		return nil, -1, err
	}
	return o, p[1], nil
}

// openOutput reads a pipe, which it takes over. before is what was read from it earlier.
func openOutput(pipe int, before []byte) (*output, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err == nil {
		err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, pipe, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT})
	}
	for _, fd := range []int{pipe, epoll} {
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
	}
	if err != nil {
		wire.CloseAll([]int{pipe, epoll})
		return nil, os.NewSyscallError("worker output", err)
	}
	o := &output{pipe: pipe, ready: os.NewFile(uintptr(epoll), "worker output"), ending: make(chan struct{}), done: make(chan struct{})}
	o.write(before)
	go o.drain()
	return o, nil
}

// await waits until there is something to read. The runtime watches an epoll instance that reports the pipe once, until
// again is called. If the runtime watched the pipe itself, every write of the function would wake it, even during
// pauses.
func (o *output) await() error {
	c, err := o.ready.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = c.Read(func(fd uintptr) bool {
		var event [1]unix.EpollEvent
		n, err := unix.EpollWait(int(fd), event[:], 0)
		failed = err
		return n > 0 || err != nil && err != unix.EINTR
	})
	return errors.Join(err, failed)
}

// again makes the next await report the pipe.
func (o *output) again() error {
	return wire.Control(o.ready, func(fd int) error {
		return unix.EpollCtl(fd, unix.EPOLL_CTL_MOD, o.pipe, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT})
	})
}

func (o *output) drain() {
	defer close(o.done)
	buf := make([]byte, TailSize)
	read, began := 0, time.Now() // of this chunk
	for {
		if o.await() != nil {
			return
		}
		n, err := unix.Read(o.pipe, buf)
		if n == 0 || err != nil && err != unix.EAGAIN && err != unix.EINTR {
			return // all writers have closed the pipe
		}
		n = max(n, 0)
		o.write(buf[:n])
		o.reads++
		if n < len(buf) {
			o.pause(outputRest)
		} else if n < outputRead {
			buf = make([]byte, outputRead) // it prints more than most functions
		}
		if read += n; read >= outputChunk {
			o.pause(outputPause - time.Since(began))
			read, began = 0, time.Now()
		}
		if o.again() != nil {
			return
		}
	}
}

// pause waits for d, or until finish is called.
func (o *output) pause(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-o.ending:
	}
}

// finish reads the rest of the pipe and closes it. A process that the function left behind may still have the other
// side open; that does not matter.
func (o *output) finish() {
	o.ready.SetReadDeadline(time.Unix(1, 0))
	close(o.ending) // after the deadline is set, so that drain reads nothing after a pause
	<-o.done
	o.empty(o.pipe)
	unix.Close(o.pipe)
	o.ready.Close()
}

// empty reads everything that is in the pipe now. Others may still write to it. So it stops after as many bytes as the
// pipe can hold, or as many reads as it has pages, since each read takes at least one page, or everything (pages are
// not filled if writes are kept apart, O_DIRECT of pipe(2)).
func (o *output) empty(fd int) {
	size, err := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0) // the worker may have changed it
	if err != nil {
		size = outputRead
	}
	var buf [outputRead]byte
	for reads := size / os.Getpagesize(); size > 0 && reads > 0; reads-- {
		n, _ := unix.Read(fd, buf[:])
		if n <= 0 {
			return
		}
		o.reads++
		o.write(buf[:n])
		size -= n
	}
}
