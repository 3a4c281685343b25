package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// Socket is the listening socket of an agent.
type Socket struct {
	listener *net.UnixListener
	path     string
	self     unix.Stat_t // of the socket's file
}

// EnvSocket is the environment variable with the socket's path.
const EnvSocket = "RFAAS_AGENT_SOCKET"

// Path returns the path of the socket of this user's and job's agent, as the client library finds it: $RFAAS_AGENT_SOCKET,
// else agent-NET.sock or agent-NET-JOB.sock in $XDG_RUNTIME_DIR/rfaas, or in /tmp/rfaas-UID if the library can neither use nor make the former.
// NET is the inode of the network namespace and JOB names the batch job (protocol.Job). Path makes no directory. Errors: ErrDirectory, or fs.ErrNotExist
// if the library would make the directory first.
func Path(getenv func(string) string) (string, error) {
	if p := getenv(EnvSocket); p != "" {
		return p, nil
	}
	name := "agent-" + strconv.FormatUint(networkNamespace(), 10)
	if job := protocol.Job(getenv); job != "" {
		name += "-" + job
	}
	name += ".sock"
	shared := filepath.Join("/tmp", "rfaas-"+strconv.Itoa(os.Geteuid()), name)
	if d := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) && len(d)+len("/rfaas/")+len(name) <= maxPath {
		p := filepath.Join(d, "rfaas", name)
		err := usable(p)
		if err == nil || errors.Is(err, fs.ErrNotExist) && unix.Access(d, unix.W_OK) == nil {
			return p, err
		}
		if serr := usable(shared); serr != nil {
			return "", errors.Join(err, serr)
		}
	}
	return shared, usable(shared)
}

// maxPath is the longest path of a socket (struct sockaddr_un without its last zero).
const maxPath = 107

// usable checks the directory of a socket as the library does before it uses the directory. Errors: those of CheckDirectory, and of access.
func usable(socket string) error {
	if err := CheckDirectory(socket); err != nil {
		return err
	}
	if err := unix.Access(filepath.Dir(socket), unix.W_OK); err != nil {
		return fmt.Errorf("cannot write to the directory of the agent's socket, %s: %w; set %s to a path in a directory that you can write to",
			filepath.Dir(socket), err, EnvSocket)
	}
	return nil
}

// networkNamespace returns the inode of this process's network namespace, 0 without /proc.
func networkNamespace() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/net", &st) != nil {
		return 0
	}
	return st.Ino
}

// ErrDirectory means that another user could put a socket into the directory.
var ErrDirectory = errors.New("unsafe directory of the agent's socket")

// CheckDirectory checks the directory of a socket. It must be a directory and not a symbolic link, owned by this user, and
// without access for others. Errors: ErrDirectory, or that of lstat.
func CheckDirectory(socket string) error { return checkDirectory(socket, 0o077, "0700") }

func checkDirectory(socket string, forbidden os.FileMode, want string) error {
	dir := filepath.Dir(socket)
	st, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("directory of the agent's socket: %w", err)
	}
	sys, _ := st.Sys().(*syscall.Stat_t)
	switch {
	case st.Mode()&os.ModeSymlink != 0:
		return fmt.Errorf("%w: %s is a symbolic link; remove it, or set %s", ErrDirectory, dir, EnvSocket)
	case !st.IsDir():
		return fmt.Errorf("%w: %s is not a directory; remove it, or set %s", ErrDirectory, dir, EnvSocket)
	case sys == nil || int(sys.Uid) != os.Geteuid():
		return fmt.Errorf("%w: %s belongs to uid %d, not to uid %d; set %s to a path in a directory of yours", ErrDirectory, dir, sys.Uid, os.Geteuid(), EnvSocket)
	case st.Mode().Perm()&forbidden != 0:
		return fmt.Errorf("%w: %s has mode %#o, want %s; run chmod %s %s", ErrDirectory, dir, st.Mode().Perm(), want, want, dir)
	}
	return nil
}

// Inherited returns the listening socket that a client has passed as a descriptor, and takes ownership of fd.
func Inherited(fd int) (*Socket, error) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil || kind == 0 {
		return nil, fmt.Errorf("descriptor %d is not a listening socket; to start an agent by hand, use --socket PATH", fd)
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "agent socket")
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d: %w", fd, err)
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, fmt.Errorf("descriptor %d is a %s socket, want a unix socket", fd, l.Addr().Network())
	}
	return newSocket(ul)
}

// Listen makes a socket at a path. It makes the directory, with mode 0700, if that does not exist, and replaces a socket on
// which no agent listens.
func Listen(path string) (*Socket, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("directory of the agent's socket: %w", err)
	}
	if err := checkDirectory(path, 0o022, "0755"); err != nil { // other users must not make or replace files in it
		return nil, err
	}
	lock, err := takeLock(path, 0)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if conn, err := net.Dial("unix", path); err == nil {
		conn.Close()
		return nil, fmt.Errorf("an agent listens at %s already: stop it with `rfaas agent stop`, or choose another --socket", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return nil, fmt.Errorf("%s exists and is not a socket: remove it, or choose another --socket", path)
	}
	_ = os.Remove(path)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	return newSocket(l)
}

func newSocket(l *net.UnixListener) (*Socket, error) {
	l.SetUnlinkOnClose(false)
	path, err := filepath.Abs(l.Addr().String())
	if err != nil {
		l.Close()
		return nil, err
	}
	s := &Socket{listener: l, path: path}
	if err := unix.Lstat(s.path, &s.self); err != nil {
		l.Close()
		return nil, fmt.Errorf("socket %s: %w", s.path, err)
	}
	return s, nil
}

// Path returns the socket's path.
func (s *Socket) Path() string { return s.path }

// Close closes the socket and keeps its file.
func (s *Socket) Close() { s.listener.Close() }

// takeLock locks the lock file of a socket, which a process does before it makes, replaces or removes the socket. how may
// contain unix.LOCK_NB.
func takeLock(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the agent's socket: %w", err)
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|how); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock of the agent's socket: %s: %w", f.Name(), err)
	}
	return f, nil
}

// ours reports whether a path is still this agent's socket, which another agent may have replaced.
func (s *Socket) ours(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Dev == s.self.Dev && st.Ino == s.self.Ino
}

// remove removes the socket's file, unless another process holds the lock because it starts an agent.
func (s *Socket) remove() {
	lock, err := takeLock(s.path, unix.LOCK_NB)
	if err != nil {
		return
	}
	defer lock.Close()
	if s.ours(s.path) {
		_ = os.Remove(s.path)
	}
}

// lastWait is how long lastLook waits for a client.
const lastWait = 2 * time.Millisecond

// lastLook removes the socket unless a client has connected. Under the lock, it renames the socket before it waits, so that
// a client that comes later finds no socket and starts another agent.
func (s *Socket) lastLook() (conn *net.UnixConn, gone bool) {
	lock, err := takeLock(s.path, unix.LOCK_NB)
	switch {
	case err == nil:
		defer lock.Close()
	case s.ours(s.path):
		return nil, false // a client holds the lock and is going to connect, or the directory cannot be written to
	}
	// Without a lock, the socket or its directory was removed: no client can find this agent any more.
	aside := s.path + ".exit"
	moved := s.ours(s.path) && os.Rename(s.path, aside) == nil
	_ = s.listener.SetDeadline(time.Now().Add(lastWait))
	if conn, err := s.listener.AcceptUnix(); err == nil {
		if moved {
			_ = os.Rename(aside, s.path)
		}
		return conn, false
	}
	if moved {
		_ = os.Remove(aside)
	}
	s.listener.Close()
	return nil, true
}
