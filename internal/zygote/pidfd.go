package zygote

import (
	"errors"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// status is what waitid tells about a child that ended.
type status struct {
	pid    int
	signal unix.Signal // 0: it exited
	code   int
}

// siginfo_t of a SIGCHLD on 64-bit Linux.
type childInfo struct {
	signo, errno, code, _ int32
	pid                   int32
	uid                   uint32
	status                int32
}

func childOf(si *unix.Siginfo) *childInfo { return (*childInfo)(unsafe.Pointer(si)) }

const cldExited = 1 // CLD_EXITED

// waitPidfd asks for the end of a child. ok is false while it runs. The child stays a zombie with unix.WNOWAIT.
func waitPidfd(fd int, options int) (st status, ok bool, err error) {
	var si unix.Siginfo
	for {
		err = unix.Waitid(unix.P_PIDFD, fd, &si, unix.WEXITED|unix.WNOHANG|options, nil)
		if err != unix.EINTR {
			break
		}
	}
	if err == unix.EAGAIN {
		return status{}, false, nil
	}
	if err != nil {
		return status{}, false, os.NewSyscallError("waitid", err)
	}
	ci := childOf(&si)
	if ci.pid == 0 {
		return status{}, false, nil
	}
	st = status{pid: int(ci.pid)}
	if ci.code == cldExited {
		st.code = int(ci.status)
	} else {
		st.signal = unix.Signal(ci.status)
	}
	return st, true, nil
}

// newPidfd makes a file of a pidfd, in nonblocking mode so that the runtime's poller waits for it.
func newPidfd(fd int) (*os.File, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// reap waits until the child ended, ends whatever is left of its session and, if it has a guard, of its process name space,
// and takes its status, under the lock if there is one: its number may be another's afterwards. No OS thread is blocked.
func reap(pidfd, guard *os.File, lock sync.Locker) (status, error) {
	st, err := awaitEnd(pidfd)
	if err != nil {
		return st, err
	}
	// Processes that a function forked would go on using the cores. The zombie keeps its id, so the group is no other.
	if st.pid > 1 {
		unix.Kill(-st.pid, unix.SIGKILL)
	}
	if lock != nil {
		lock.Lock()
	}
	err = collect(pidfd)
	if lock != nil {
		lock.Unlock()
	}
	if guard != nil {
		// Its end takes all others with it, and comes after theirs.
		killPidfd(guard)
		_, gerr := awaitEnd(guard)
		err = errors.Join(err, gerr, collect(guard))
		guard.Close()
	}
	return st, err
}

// collect takes the status of a zombie.
func collect(pidfd *os.File) error {
	return control(pidfd, func(fd int) error {
		_, _, err := waitPidfd(fd, 0)
		return err
	})
}

// awaitEnd waits until the child ended and leaves it a zombie.
func awaitEnd(pidfd *os.File) (status, error) {
	c, err := pidfd.SyscallConn()
	if err != nil {
		return status{}, err
	}
	var st status
	var ok bool
	var werr error
	err = c.Read(func(fd uintptr) bool {
		st, ok, werr = waitPidfd(int(fd), unix.WNOWAIT)
		return ok || werr != nil
	})
	if err != nil { // the kernel's pidfds cannot be polled by epoll
		c.Control(func(fd uintptr) {
			for !ok && werr == nil {
				unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
				st, ok, werr = waitPidfd(int(fd), unix.WNOWAIT)
			}
		})
	}
	return st, werr
}

func killPidfd(pidfd *os.File) {
	// ESRCH: it has been reaped. Anything else cannot happen to a child of ours.
	control(pidfd, func(fd int) error { return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) })
}
