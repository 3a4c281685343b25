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

// waitPidfd asks whether a child has ended. ok is false while it runs. With unix.WNOWAIT the child stays a zombie.
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

// reap waits until the child has ended, ends what is left of its session and, if it has a guard, of its process name space, and reaps both. No
// OS thread is blocked.
func reap(pidfd, guard *os.File) (status, error) {
	st, err := awaitEnd(pidfd)
	if err != nil {
		return st, err
	}
	// Processes that a function forked would go on using the cores. The zombie keeps its id, so the group is no other.
	if st.pid > 1 {
		unix.Kill(-st.pid, unix.SIGKILL)
	}
	err = collect(pidfd)
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

// killPidfd kills a child. ESRCH, after it was reaped, is the only possible error.
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

// strays are children that no answer named: what a zygote had cloned when it died. Descriptors are pidfds, -1: none.
type strays struct {
	worker, guard int
	pid           int // of the worker
}

// findStrays finds the strays of a zygote that has died. There is no other zygote meanwhile, so all other children are known.
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
			default: // the stem, which is about to end, and may clone the worker before it does
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

// end kills and reaps what there is. A guard ends only when its worker is reaped.
func (f *strays) end() {
	for _, fd := range []int{f.worker, f.guard} {
		if fd >= 0 {
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			reapNow(fd)
		}
	}
	f.worker, f.guard = -1, -1
}

// unknownChildren lists the children that are neither known nor found.
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
	s.mu.Unlock()
	for _, pid := range pids {
		if !known[pid] {
			unknown = append(unknown, pid)
		}
	}
	return unknown
}

// awaitOrKill reaps a child that is about to end, and kills it first if it takes longer than a second.
func awaitOrKill(fd int) {
	if n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000); n < 1 {
		unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
	reapNow(fd)
}

// namespacePID says in how many nested process name spaces a process is, and its id in the innermost one.
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
