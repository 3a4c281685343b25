package slurm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The prolog and the epilog run as root. The node daemon usually runs as a dedicated user, which owns the directory of the socket.
// That user must not gain rights by what root does with the socket. Three rules ensure that:
//
//   - Only root and the owner of the socket's directory can change any part of its path, no part is a symbolic link, and
//     the owner of the directory also owns the socket. All of this is checked on open descriptors.
//   - Only a process of that owner that runs this program is killed.
//   - It is killed with the rights of the owner, not with those of root. So the kernel refuses to kill a process that the
//     owner could not kill without the prolog.

// errShared is why a directory on the path to the socket is refused.
var errShared = errors.New("a user other than the owner of the socket's directory could replace the socket")

// place is the checked directory of a node daemon's socket.
type place struct {
	dir   int    // a descriptor of the directory; the caller closes it
	owner uint32 // of the directory
}

// openPlace opens the directory of a socket and checks it and all directories above it. The error wraps unix.ENOENT when a
// directory is missing.
func openPlace(path string) (place, error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
		return place{}, fmt.Errorf("socket %q: want an absolute path without . or .. in it", path)
	}
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	at := "/"
	fd, err := unix.Open(at, flags, 0)
	if err != nil {
		return place{}, fmt.Errorf("socket %s: directory %s: %w", path, at, err)
	}
	type directory struct {
		name        string
		owner, mode uint32
	}
	var all []directory
	for rest := filepath.Dir(path)[1:]; ; {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			unix.Close(fd)
			return place{}, fmt.Errorf("socket %s: directory %s: %w", path, at, err)
		}
		all = append(all, directory{at, st.Uid, st.Mode & 0o7777})
		if rest == "" {
			break
		}
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		at = filepath.Join(at, name)
		next, err := unix.Openat(fd, name, flags, 0)
		unix.Close(fd)
		if errors.Is(err, unix.ENOTDIR) {
			err = errors.New("it is not a directory, or it is a symbolic link: use the path that the link points to")
		}
		if err != nil {
			return place{}, fmt.Errorf("socket %s: directory %s: %w", path, at, err)
		}
		fd = next
	}
	owner := all[len(all)-1].owner
	for i, d := range all {
		// In a sticky directory like /tmp only root and the owner of the next directory can replace the next one.
		sticky := d.mode&unix.S_ISVTX != 0 && i < len(all)-1
		if d.mode&0o022 != 0 && !sticky || d.owner != 0 && d.owner != owner {
			unix.Close(fd)
			return place{}, fmt.Errorf("socket %s: directory %s has the mode %04o and the owner %d: %w", path, d.name, d.mode, d.owner, errShared)
		}
	}
	return place{fd, owner}, nil
}

// openSocket opens a node daemon's socket by its checked path and returns it with its owner. The descriptor refers to this
// socket even if the path changes later. The error wraps unix.ENOENT if there is no socket.
func openSocket(path string) (*os.File, uint32, error) {
	p, err := openPlace(path)
	if err != nil {
		return nil, 0, err
	}
	defer unix.Close(p.dir)
	fd, err := unix.Openat(p.dir, filepath.Base(path), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("socket %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		f.Close()
		return nil, 0, fmt.Errorf("socket %s: %w", path, err)
	case st.Mode&unix.S_IFMT != unix.S_IFSOCK:
		f.Close()
		return nil, 0, fmt.Errorf("socket %s: it is not a socket", path)
	case st.Uid != p.owner:
		f.Close()
		return nil, 0, fmt.Errorf("socket %s: it belongs to user %d, but its directory to user %d", path, st.Uid, p.owner)
	}
	return f, p.owner, nil
}

// killPeer kills the process that listens at the other end of a connection, if it is a node daemon of the owner. It waits up
// to a second until the process has ended, and returns its number.
func killPeer(conn int, owner uint32) (int, error) {
	pidfd, err := peerProcess(conn, owner)
	if err != nil {
		return 0, err
	}
	defer unix.Close(pidfd)
	pid, err := checkAgent(pidfd, owner)
	if err != nil {
		return 0, err
	}
	if err := killAs(owner, pidfd); err != nil {
		return 0, fmt.Errorf("SIGKILL to process %d with the rights of user %d: %w", pid, owner, err)
	}
	for end := time.Now().Add(time.Second); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(max(0, time.Until(end)).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR): // by a signal of the Go runtime
		case err != nil:
			return 0, fmt.Errorf("wait for the end of process %d: %w", pid, err)
		case n == 0:
			return 0, fmt.Errorf("process %d has not ended within a second of SIGKILL", pid)
		default:
			return pid, nil
		}
	}
}

// peerProcess returns a pidfd of the process that listened at the other end of a connection. The caller closes it.
func peerProcess(conn int, owner uint32) (int, error) {
	cred, err := unix.GetsockoptUcred(conn, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	if cred.Pid <= 0 {
		return 0, errors.New("the listening process is in another process namespace")
	}
	if cred.Uid != owner {
		return 0, fmt.Errorf("the listening process %d was started by user %d, but the socket belongs to user %d", cred.Pid, cred.Uid, owner)
	}
	pidfd, err := unix.GetsockoptInt(conn, unix.SOL_SOCKET, unix.SO_PEERPIDFD) // Linux 6.5 and later
	if errors.Is(err, unix.ENOPROTOOPT) {
		pidfd, err = peerByNumber(conn, int(cred.Pid))
	}
	if err != nil {
		return 0, fmt.Errorf("the listening process %d: %w", cred.Pid, err)
	}
	return pidfd, nil
}

// peerByNumber returns a pidfd of the listening process at the other end of a connection, whose number is pid, on
// kernels without SO_PEERPIDFD. The kernel may have given the number to another process. But the connection ends with
// the listening process, so the number is still valid while the connection exists.
func peerByNumber(conn, pid int) (int, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, err
	}
	poll := []unix.PollFd{{Fd: int32(conn), Events: unix.POLLRDHUP}}
	if _, err := unix.Poll(poll, 0); err != nil || poll[0].Revents != 0 {
		unix.Close(pidfd)
		return 0, errors.Join(errors.New("it has ended"), err)
	}
	return pidfd, nil
}

// checkAgent returns an error unless a process runs this program with owner as its only user id. It returns the
// process's number.
func checkAgent(pidfd int, owner uint32) (int, error) {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", pidfd))
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(field(info, "Pid:"))
	if err != nil || pid <= 0 {
		return 0, errors.New("the listening process has ended")
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	exe, err := readExe(pid)
	if err != nil {
		return 0, err
	}
	// While the pidfd's process lives, no other process has its number, so what was read above belongs to it.
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, 0); n != 0 || err != nil && !errors.Is(err, unix.EINTR) {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	ids := strings.Fields(field(status, "Uid:"))
	for _, id := range ids {
		if id != strconv.FormatUint(uint64(owner), 10) {
			return 0, fmt.Errorf("the listening process %d has the user ids %s, not only that of the socket's owner, %d", pid, strings.Join(ids, " "), owner)
		}
	}
	own, err := readExe(os.Getpid())
	if err != nil {
		return 0, err
	}
	if len(ids) != 4 || !own.same(exe) {
		return 0, fmt.Errorf("the listening process %d runs %q and not %q, so it is not a node daemon", pid, exe.path, own.path)
	}
	return pid, nil
}

// field returns the text after a name at the beginning of a line.
func field(text []byte, name string) string {
	for line := range bytes.Lines(text) {
		if value, ok := bytes.CutPrefix(line, []byte(name)); ok {
			return string(bytes.TrimSpace(value))
		}
	}
	return ""
}

// program identifies the file that a process runs.
type program struct {
	path  string
	dev   uint64
	inode uint64
}

func readExe(pid int) (program, error) {
	link := fmt.Sprintf("/proc/%d/exe", pid)
	path, err := os.Readlink(link)
	if err != nil {
		return program{}, err
	}
	var st unix.Stat_t
	if err := unix.Stat(link, &st); err != nil {
		return program{}, fmt.Errorf("%s: %w", link, err)
	}
	return program{path, st.Dev, st.Ino}, nil
}

// same reports whether another process runs the same file, or the file that it replaced during an installation.
func (p program) same(other program) bool {
	if p.dev == other.dev && p.inode == other.inode {
		return true
	}
	before, replaced := strings.CutSuffix(other.path, " (deleted)")
	return replaced && before == strings.TrimSuffix(p.path, " (deleted)")
}

// killAs sends SIGKILL with the rights of a user.
func killAs(uid uint32, pidfd int) error {
	if uid == uint32(os.Geteuid()) {
		return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread has other rights now and must end with the goroutine
		id := uintptr(uid)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, id, id, id); errno != 0 { // of this thread only
			done <- fmt.Errorf("setresuid: %w", errno)
			return
		}
		done <- unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	}()
	return <-done
}
