package spawner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// status is how a child ended, as waitid reports it.
type status struct {
	pid    int
	signal unix.Signal // 0: it exited
	code   int
}

// childInfo is siginfo_t of a SIGCHLD on 64-bit Linux.
type childInfo struct {
	signo, errno, code, _ int32
	pid                   int32
	uid                   uint32
	status                int32
}

func childOf(si *unix.Siginfo) *childInfo { return (*childInfo)(unsafe.Pointer(si)) }

const cldExited = 1 // CLD_EXITED

// waitPidfd returns how a child has ended. It does not block: ok is false while the child runs. With unix.WNOWAIT the
// child stays a zombie.
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

// newPidfd returns a file for a pidfd, which it takes over. The file is nonblocking, so that the runtime's poller waits
// for it.
func newPidfd(fd int) (*os.File, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// reap waits until the child has ended. Then it ends the rest of the child's session and, if the child has a guard, of
// its process namespace, and reaps both. It blocks no OS thread.
func reap(pidfd, guard *os.File) (status, error) {
	st, err := awaitEnd(pidfd)
	if err != nil {
		return st, err
	}
	// Processes that a function forked would continue to use the cores. The child is a zombie, which keeps its id, so
	// no other group can have that id.
	if st.pid > 1 {
		unix.Kill(-st.pid, unix.SIGKILL)
	}
	err = collect(pidfd)
	if guard != nil {
		// The guard is the first process of the namespace: its end kills all others there, and is complete only after
		// theirs.
		killPidfd(guard)
		_, gerr := awaitEnd(guard)
		err = errors.Join(err, gerr, collect(guard))
		guard.Close()
	}
	return st, err
}

// collect reaps a zombie.
func collect(pidfd *os.File) error {
	return wire.Control(pidfd, func(fd int) error {
		_, _, err := waitPidfd(fd, 0)
		return err
	})
}

// awaitEnd waits until the child has ended and leaves it a zombie.
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

// killPidfd kills a child. The only possible error is ESRCH, after the child was reaped.
func killPidfd(pidfd *os.File) { signalPidfd(pidfd, unix.SIGKILL) }

func signalPidfd(pidfd *os.File, sig unix.Signal) {
	wire.Control(pidfd, func(fd int) error { return unix.PidfdSendSignal(fd, sig, nil, 0) })
}

// reapNow reaps a child that has ended or is about to, and closes its pidfd.
func reapNow(fd int) {
	for {
		err := unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	unix.Close(fd)
}

// isStopped asks the kernel whether a child is stopped by a signal; one that a debugger holds does not count. id is as idType wants it.
func isStopped(idType, id int) bool {
	var si unix.Siginfo
	err := unix.Waitid(idType, id, &si, unix.WSTOPPED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && childOf(&si).pid != 0
}

// childPidfd is the pidfd of a child of this process, -1 if pid is none.
func childPidfd(pid int) int {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1
	}
	if _, _, err := waitPidfd(fd, unix.WNOWAIT); err != nil { // ECHILD
		unix.Close(fd)
		return -1
	}
	return fd
}

// pidOfFD is the process id of a pidfd.
func pidOfFD(fd int) (pid int, err error) {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if n, ok := strings.CutPrefix(line, "Pid:"); ok {
			return strconv.Atoi(strings.TrimSpace(n))
		}
	}
	return 0, fmt.Errorf("no process id in %q", info)
}

// strays are children that no answer named, because the zygote died after it had cloned them. Descriptors are pidfds,
// -1: none.
type strays struct {
	worker, guard int
	pid           int // of the worker
}

// findStrays finds the strays of a dead zygote. No other zygote runs meanwhile in its place, and the others have
// answered all requests, so all other children are known.
func (s *Spawner) findStrays() strays {
	found := strays{worker: -1, guard: -1}
	own, _ := namespacePID("self")
	for again := true; again; {
		again = false
		for _, pid := range s.unknownChildren(found) {
			fd := childPidfd(pid)
			if fd < 0 {
				continue
			}
			levels, inner := namespacePID(strconv.Itoa(pid))
			switch {
			case found.worker < 0 && (levels > own && inner == 2 || levels == own && !s.guards):
				found.worker, found.pid = fd, pid
			case found.guard < 0 && levels > own && inner == 1:
				found.guard = fd
			default: // the stem, which is about to end and may still clone the worker
				awaitOrKill(fd)
				again = true
			}
		}
	}
	if found.worker < 0 {
		found.end()
	}
	return found
}

// end kills and reaps the strays. A guard ends only when its worker is reaped.
func (f *strays) end() {
	for _, fd := range []int{f.worker, f.guard} {
		if fd >= 0 {
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			reapNow(fd)
		}
	}
	f.worker, f.guard = -1, -1
}

// unknownChildren returns the children that are neither zygotes nor in s.children nor in found.
func (s *Spawner) unknownChildren(found strays) (unknown []int) {
	var pids []int
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for field := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	known := map[int]bool{found.pid: true}
	if found.guard >= 0 {
		pid, _ := pidOfFD(found.guard)
		known[pid] = true
	}
	s.mu.Lock()
	for _, c := range s.children {
		known[c.pid], known[c.guardPID] = true, true
	}
	for pid := range s.pids {
		known[pid] = true
	}
	s.mu.Unlock()
	for _, pid := range pids {
		if !known[pid] {
			unknown = append(unknown, pid)
		}
	}
	return unknown
}

// awaitOrKill reaps a child that is about to end. It kills the child if that takes longer than a second.
func awaitOrKill(fd int) {
	if n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000); n < 1 {
		unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
	reapNow(fd)
}

// namespacePID returns the number of nested process namespaces that a process is in, and its id in the innermost one.
func namespacePID(pid string) (levels, inner int) {
	text, _ := os.ReadFile("/proc/" + pid + "/status")
	for line := range strings.Lines(string(text)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(ids)
			for _, f := range fields {
				inner, _ = strconv.Atoi(f)
			}
			return len(fields), inner
		}
	}
	return 0, 0
}
