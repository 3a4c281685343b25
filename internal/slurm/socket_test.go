package slurm

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// nobody is an unprivileged user.
const nobody = 65534

// listener is a test daemon that listens on a socket and never answers.
type listener struct {
	*exec.Cmd
	t *testing.T
}

// listen starts a daemon: this test program, or a copy of it, as a user.
func listen(t *testing.T, as, exe, socket string, uid uint32) listener {
	t.Helper()
	cmd := exec.Command(exe, socket)
	cmd.Env = append(os.Environ(), "RFAAS_TEST_AS="+as)
	if int(uid) != os.Geteuid() {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	start(t, cmd)
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return listener{cmd, t}
}

// lives fails the test if the daemon has ended.
func (l listener) lives() {
	l.t.Helper()
	pidfd, err := unix.PidfdOpen(l.Process.Pid, 0)
	if err != nil {
		l.t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0); n != 0 || err != nil {
		l.t.Errorf("the daemon with the socket %s was killed", l.Args[1])
	}
}

// prolog does what the prolog does, with a short time limit.
func prolog(t *testing.T, path string, force bool) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := TellDaemon(ctx, path, "prolog 1", force)
	if err == nil {
		t.Error("a daemon that does not answer counts as an answer")
	}
	return err
}

// ofNobody makes a directory that belongs to nobody. It needs root.
func ofNobody(t *testing.T) string {
	t.Helper()
	testkit.Root(t, "can be two users")
	dir := filepath.Join(t.TempDir(), "nobody")
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.Chown(dir, nobody, nobody))
	// t.TempDir makes two directories, which may be accessible to root only.
	for d := filepath.Dir(dir); d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		must(t, os.Chmod(d, 0o755))
	}
	return dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// copied returns the path of a copy of this test program.
func copied(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	path := filepath.Join(t.TempDir(), "other")
	must(t, os.WriteFile(path, text, 0o755))
	return path
}

// The prolog kills a node daemon that hangs when the prolog's time is over, and only then.
func TestHungAgentIsKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	hung := listen(t, "hung", "/proc/self/exe", path, uint32(os.Geteuid()))
	if err := prolog(t, path, false); strings.Contains(err.Error(), "was killed") {
		t.Errorf("without force: %v", err)
	}
	hung.lives()
	if err := prolog(t, path, true); !strings.Contains(err.Error(), "was killed") {
		t.Errorf("with force: %v", err)
	}
	hung.Wait()
	if s := hung.ProcessState.String(); s != "signal: killed" {
		t.Errorf("it ended by %q", s)
	}
}

// Root's prolog kills another user's node daemon, with the rights of that user.
func TestHungAgentOfAnotherUserIsKilled(t *testing.T) {
	path := filepath.Join(ofNobody(t), "socket")
	hung := listen(t, "hung", "/proc/self/exe", path, nobody)
	if err := prolog(t, path, true); !strings.Contains(err.Error(), "was killed") {
		t.Error(err)
	}
	hung.Wait()
}

// A node daemon keeps running after an installation has replaced its program file, and is still recognised.
func TestAgentOfAReplacedProgram(t *testing.T) {
	own := program{"/usr/local/bin/rfaas", 1, 2}
	for _, c := range []struct {
		other program
		want  bool
	}{
		{own, true},
		{program{"/elsewhere/rfaas", 1, 2}, true}, // another mount of it
		{program{"/usr/local/bin/rfaas (deleted)", 1, 9}, true},
		{program{"/usr/local/bin/rfaas", 1, 9}, false},
		{program{"/usr/local/bin/sshd (deleted)", 1, 9}, false},
		{program{"/usr/sbin/sshd", 1, 9}, false},
	} {
		if own.same(c.other) != c.want {
			t.Errorf("%v: %v", c.other, !c.want)
		}
	}
}

// The owner of the socket's directory cannot make the prolog kill, or talk to, anything but a node daemon of the same user.
func TestPrologKillsNoOtherDaemon(t *testing.T) {
	self := uint32(os.Geteuid())
	for name, c := range map[string]struct {
		place func(t *testing.T) (socket string, victim listener)
		says  string
	}{
		"the socket is a symbolic link": {func(t *testing.T) (string, listener) {
			dir := t.TempDir()
			victim := listen(t, "hung", "/proc/self/exe", filepath.Join(dir, "victim"), self)
			must(t, os.Symlink("victim", filepath.Join(dir, "socket")))
			return filepath.Join(dir, "socket"), victim
		}, "it is not a socket"},
		"its directory is a symbolic link": {func(t *testing.T) (string, listener) {
			dir := t.TempDir()
			must(t, os.Mkdir(filepath.Join(dir, "real"), 0o755))
			victim := listen(t, "hung", "/proc/self/exe", filepath.Join(dir, "real/socket"), self)
			must(t, os.Symlink("real", filepath.Join(dir, "link")))
			return filepath.Join(dir, "link/socket"), victim
		}, "symbolic link"},
		"its directory is everybody's": {func(t *testing.T) (string, listener) {
			dir := filepath.Join(t.TempDir(), "shared")
			must(t, os.Mkdir(dir, 0o700))
			must(t, os.Chmod(dir, 0o777))
			return filepath.Join(dir, "socket"), listen(t, "hung", "/proc/self/exe", filepath.Join(dir, "socket"), self)
		}, "mode 0777"},
		"its directory is everybody's and sticky": {func(t *testing.T) (string, listener) {
			dir := filepath.Join(t.TempDir(), "shared")
			must(t, os.Mkdir(dir, 0o700))
			must(t, os.Chmod(dir, 0o777|os.ModeSticky))
			return filepath.Join(dir, "socket"), listen(t, "hung", "/proc/self/exe", filepath.Join(dir, "socket"), self)
		}, "mode 1777"},
		"a directory above is the group's": {func(t *testing.T) (string, listener) {
			dir := filepath.Join(t.TempDir(), "shared")
			must(t, os.MkdirAll(filepath.Join(dir, "own"), 0o700))
			must(t, os.Chmod(dir, 0o770))
			return filepath.Join(dir, "own/socket"), listen(t, "hung", "/proc/self/exe", filepath.Join(dir, "own/socket"), self)
		}, "mode 0770"},
		"another program": {func(t *testing.T) (string, listener) {
			path := filepath.Join(t.TempDir(), "socket")
			return path, listen(t, "hung", copied(t), path, self)
		}, "it is not a node daemon"},
		"a path that is not absolute": {func(t *testing.T) (string, listener) {
			path := filepath.Join(t.TempDir(), "socket")
			victim := listen(t, "hung", "/proc/self/exe", path, self)
			return filepath.Dir(path) + "/x/../socket", victim
		}, "without . or .."},
		"a directory above is another user's": {func(t *testing.T) (string, listener) {
			path := filepath.Join(ofNobody(t), "own/socket")
			must(t, os.Mkdir(filepath.Dir(path), 0o755))
			return path, listen(t, "hung", "/proc/self/exe", path, self)
		}, "could replace the socket"},
		"root's daemon in a user's directory": {func(t *testing.T) (string, listener) {
			path := filepath.Join(ofNobody(t), "socket")
			return path, listen(t, "hung", "/proc/self/exe", path, self)
		}, "belongs to user 0"},
		"root's daemon on a user's socket": {func(t *testing.T) (string, listener) {
			path := filepath.Join(ofNobody(t), "socket")
			victim := listen(t, "hung", "/proc/self/exe", path, self)
			must(t, os.Chown(path, nobody, nobody))
			return path, victim
		}, "was started by user 0"},
		"a hard link to root's socket": {func(t *testing.T) (string, listener) {
			path := filepath.Join(ofNobody(t), "socket")
			other := filepath.Join(filepath.Dir(filepath.Dir(path)), "root")
			victim := listen(t, "hung", "/proc/self/exe", other, self)
			must(t, os.Link(other, path))
			return path, victim
		}, "belongs to user 0"},
	} {
		t.Run(name, func(t *testing.T) {
			path, victim := c.place(t)
			if err := prolog(t, path, true); !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v; want %q", err, c.says)
			}
			victim.lives()
		})
	}
}

// A kill with a user's rights fails if the user could not do it.
func TestKillHasTheOwnersRights(t *testing.T) {
	dir := ofNobody(t)
	victim := listen(t, "hung", "/proc/self/exe", filepath.Join(filepath.Dir(dir), "root"), 0)
	pidfd, err := unix.PidfdOpen(victim.Process.Pid, 0)
	must(t, err)
	defer unix.Close(pidfd)
	if err := killAs(nobody, pidfd); !errors.Is(err, unix.EPERM) {
		t.Errorf("nobody kills a process of root: %v", err)
	}
	victim.lives()
	must(t, killAs(0, pidfd))
	victim.Wait()
}

// Without SO_PEERPIDFD, a reused process number is not mistaken for the listening process.
func TestPeerByNumber(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	hung := listen(t, "hung", "/proc/self/exe", path, uint32(os.Geteuid()))
	c, err := net.Dial("unix", path)
	must(t, err)
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	must(t, err)
	peer := func(pid int) (pidfd int, err error) {
		must(t, raw.Control(func(fd uintptr) { pidfd, err = peerByNumber(int(fd), pid) }))
		return pidfd, err
	}
	pidfd, err := peer(hung.Process.Pid)
	must(t, err)
	unix.Close(pidfd)
	hung.Process.Kill()
	hung.Wait()
	// As if this process had been given its number.
	if _, err := peer(os.Getpid()); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("the number of a process that has ended: %v", err)
	}
}

// An endless answer uses neither memory nor time of the prolog.
func TestEndlessAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	flood := listen(t, "flood", "/proc/self/exe", path, uint32(os.Geteuid()))
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	if answer, err := TellDaemon(ctx, path, "prolog 1", true); err == nil || ctx.Err() != nil {
		t.Errorf("%d bytes, %v", len(answer), err)
	}
	flood.lives() // it is slow in nothing
}

// The node daemon listens only where no other user can replace its socket, and removes only sockets.
func TestListenHooksRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, []byte("x"), 0o600))
	shared := filepath.Join(dir, "shared")
	must(t, os.Mkdir(shared, 0o700))
	must(t, os.Chmod(shared, 0o777))
	must(t, os.Symlink("shared", filepath.Join(dir, "link")))
	for path, says := range map[string]string{
		file: "not a socket", filepath.Join(shared, "socket"): "could replace the socket", filepath.Join(dir, "link/socket"): "symbolic link",
		"socket": "absolute path", filepath.Join(dir, "none/of/them"): "no such file",
	} {
		if l, err := ListenHooks(path); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want %q", path, err, says)
			if err == nil {
				l.Close()
			}
		}
	}
	if text, err := os.ReadFile(file); err != nil || !bytes.Equal(text, []byte("x")) {
		t.Errorf("the file is %q now, %v", text, err)
	}
	// A missing directory is created, accessible to this user only.
	l, err := ListenHooks(filepath.Join(dir, "new/socket"))
	must(t, err)
	defer l.Close()
	for path, mode := range map[string]os.FileMode{"new": os.ModeDir | 0o700, "new/socket": os.ModeSocket | 0o600} {
		if st, err := os.Lstat(filepath.Join(dir, path)); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v, %v", path, st, err)
		}
	}
}
