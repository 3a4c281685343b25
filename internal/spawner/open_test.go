package spawner

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// An executor's user cannot make a path of the administrator's settings lead to another file: not by a symbolic link, a
// renamed directory, or another name of a file.
func TestOpenPath(t *testing.T) {
	testkit.Root(t, "can make files of two users")
	const uid, gid = 1234567, 1234567
	const reading, appending = unix.O_RDONLY, unix.O_CREAT | unix.O_APPEND | unix.O_WRONLY
	dir := t.TempDir() // in a sticky directory that every user may write to
	in := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, mode := range map[string]os.FileMode{"roots": 0o755, "users": 0o755, "everybodys": 0o777, "groups": 0o775, "sticky": 0o777 | os.ModeSticky} {
		must(os.Mkdir(in(name), 0o700))
		must(os.Mkdir(in(name+"/below"), 0o700))
		must(os.WriteFile(in(name+"/file"), []byte("x"), 0o600))
		must(os.WriteFile(in(name+"/below/file"), []byte("x"), 0o600))
		must(os.Chmod(in(name), mode))
	}
	must(os.Chown(in("users"), uid, gid))
	must(os.Chown(in("groups"), 0, gid))
	must(os.Symlink(in("roots/file"), in("sticky/users")))
	must(os.Lchown(in("sticky/users"), uid, gid))
	must(os.Link(in("roots/file"), in("sticky/linked")))
	must(os.Symlink("../roots/below/../file", in("roots/link")))
	must(os.Symlink(in("users/file"), in("roots/astray")))
	must(os.Symlink(in("roots/made-by-link"), in("roots/ahead")))
	must(os.Symlink("circle", in("roots/circle")))
	for _, c := range []struct {
		name  string
		flags int
		want  error
	}{
		{"roots/file", reading, nil}, {"roots/link", reading, nil}, {"roots/file", appending, nil}, {"roots/made", appending, nil},
		{"roots/ahead", appending, nil}, {"roots/below/file", reading, nil}, {"roots/nothing", reading, unix.ENOENT},
		{"roots/nothing/x", appending, unix.ENOENT}, {"roots/circle", reading, unix.ELOOP}, {"roots/file/x", reading, unix.ENOTDIR},
		{"sticky/file", reading, nil}, {"sticky/below/file", reading, nil},
		{"users/file", reading, unix.EACCES}, {"users/made", appending, unix.EACCES}, {"users/below/file", reading, unix.EACCES},
		{"everybodys/file", reading, unix.EACCES}, {"everybodys/below/file", appending, unix.EACCES}, {"groups/file", reading, unix.EACCES},
		{"roots/astray", reading, unix.EACCES}, {"sticky/users", reading, unix.EACCES},
	} {
		fd, err := openPath(in(c.name), c.flags, uid, gid)
		if !errors.Is(err, c.want) {
			t.Errorf("%s, flags %#x: %v, want %v", c.name, c.flags, err, c.want)
		}
		unix.Close(fd)
		if c.want == unix.EACCES { // nothing is refused to an executor with the spawner's rights
			fd, err := openPath(in(c.name), c.flags, 0, 0)
			if err != nil {
				t.Errorf("%s, without another user: %v", c.name, err)
			}
			unix.Close(fd)
		}
	}
	must(os.Remove(in("roots/link")))
	must(os.Remove(in("sticky/linked")))
	must(os.Link(in("roots/below/file"), in("sticky/linked")))
	if fd, err := openPath(in("sticky/linked"), appending, uid, gid); !errors.Is(err, unix.EACCES) {
		unix.Close(fd)
		t.Errorf("another name of root's file: %v", err)
	}
	if _, err := openPath("file", reading, uid, gid); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a path that is not absolute: %v", err)
	}
	if st, err := os.Stat(in("roots/made")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("a file that was made: %v, %v", st, err)
	}
}

// Nor can it make such a path lead to another socket, which would accept the spawner as root, or to a file that root
// then removes.
func TestConnectAndRemovePath(t *testing.T) {
	testkit.Root(t, "can make files of two users")
	const uid, gid = 1234567, 1234567
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	roots, users := in("roots"), in("users")
	if err := errors.Join(os.Mkdir(roots, 0o755), os.Mkdir(users, 0o755), os.Chown(users, uid, gid), os.Symlink(roots, filepath.Join(users, "run"))); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(roots, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Symlink(filepath.Join(roots, "socket"), filepath.Join(users, "socket")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{"roots/socket": nil, "users/socket": unix.EACCES, "users/run/socket": unix.EACCES, "roots": unix.ECONNREFUSED,
		"roots/nothing": unix.ENOENT} {
		fd, err := connectPath(in(path), uid, gid)
		if !errors.Is(err, want) {
			t.Errorf("connect to %s: %v, want %v", path, err, want)
		}
		unix.Close(fd)
	}
	for path, want := range map[string]error{"users/run/socket": unix.EACCES, "users/socket": unix.EACCES, "roots/nothing": unix.ENOENT, "roots": unix.EISDIR} {
		if err := removePath(in(path), uid, gid); !errors.Is(err, want) {
			t.Errorf("remove %s: %v, want %v", path, err, want)
		}
	}
	if err := os.Symlink(filepath.Join(roots, "socket"), filepath.Join(roots, "link")); err != nil {
		t.Fatal(err)
	}
	if err := removePath(filepath.Join(roots, "link"), uid, gid); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(roots, "socket")); err != nil {
		t.Errorf("root's socket: %v", err)
	}
	if err := removePath(filepath.Join(roots, "socket"), uid, gid); err != nil {
		t.Error(err)
	}
}
