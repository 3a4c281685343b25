package spawner

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// The executor asks for files that the administrator's settings name. Its user owns the executor's state directory and
// may own others, but must not choose where these paths lead. A path is therefore opened step by step, relative to open
// directories, and is refused as soon as the executor's user could have changed the rest of it.

// mostLinks bounds the symbolic links of a path. It is the kernel's bound.
const mostLinks = 40

// opening is a path that is being opened.
type opening struct {
	path     string // for errors
	uid, gid uint32 // of the executor's user; 0: the executor has the spawner's own rights, and nothing is refused
	dir      int    // the directory reached so far, opened with O_PATH; -1: none yet
	sticky   bool   // other users may make files in dir, but can replace only their own
}

// PathIsSafe returns an error if a user could change where a path leads, or could make the path's last part if that is
// missing.
func PathIsSafe(path string, uid, gid uint32) error {
	dir, _, err := walk(path, false, uid, gid)
	if errors.Is(err, unix.ENOENT) { // the existing part of the path was checked
		return nil
	}
	if err == nil {
		unix.Close(dir)
	}
	return err
}

// openPath opens a file for an executor that runs as a user. With O_CREAT in flags it makes a missing file, mode 0600.
func openPath(path string, flags int, uid, gid uint32) (int, error) {
	dir, name, err := walk(path, true, uid, gid)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat(dir, name, flags&^unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) && flags&unix.O_CREAT != 0 {
		fd, err = unix.Openat(dir, name, flags|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	}
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// connectPath connects to a unix stream socket. It does not block: it returns EAGAIN if the socket's queue is full.
func connectPath(path string, uid, gid uint32) (int, error) {
	dir, name, err := walk(path, true, uid, gid)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	socket, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "connect", Path: path, Err: err}
	}
	defer unix.Close(socket)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d", socket)}); err != nil {
		unix.Close(fd)
		return -1, &fs.PathError{Op: "connect", Path: path, Err: err}
	}
	return fd, nil
}

// removePath removes a file that is not a directory. If the path is a symbolic link, it removes the link.
func removePath(path string, uid, gid uint32) error {
	dir, name, err := walk(path, false, uid, gid)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Unlinkat(dir, name, 0); err != nil {
		return &fs.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

// walk opens the directory that has the last part of a path, which need not exist. If follow is set, a symbolic link
// there is followed; otherwise the path names the link itself. The caller closes dir. Only root and the owner of the
// file called name can replace it there.
func walk(path string, follow bool, uid, gid uint32) (dir int, name string, err error) {
	if !strings.HasPrefix(path, "/") {
		return -1, "", &fs.PathError{Op: "open", Path: path, Err: unix.EINVAL}
	}
	o := &opening{path: path, uid: uid, gid: gid, dir: -1}
	defer func() {
		if err != nil {
			unix.Close(o.dir)
		}
	}()
	if err := o.enterRoot(); err != nil {
		return -1, "", err
	}
	links := 0
	for rest := path; ; {
		name, more, _ := strings.Cut(strings.TrimLeft(rest, "/"), "/")
		more = strings.TrimLeft(more, "/")
		if name == "" {
			return -1, "", &fs.PathError{Op: "open", Path: path, Err: unix.EISDIR}
		}
		if err := o.checkDirectory(); err != nil {
			return -1, "", err
		}
		if more == "" && !follow {
			return o.dir, name, nil
		}
		fd, err := unix.Openat(o.dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) && more == "" {
			return o.dir, name, nil
		}
		if err != nil {
			return -1, "", &fs.PathError{Op: "open", Path: path, Err: err}
		}
		link, err := o.step(fd, name)
		switch {
		case err != nil:
			unix.Close(fd)
			return -1, "", err
		case link != "":
			unix.Close(fd)
			if links++; links > mostLinks {
				return -1, "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
			}
			if rest = link + "/" + more; strings.HasPrefix(link, "/") {
				if err := o.enterRoot(); err != nil {
					return -1, "", err
				}
			}
		case more == "":
			unix.Close(fd)
			return o.dir, name, nil
		default:
			o.enter(fd)
			rest = more
		}
	}
}

func (o *opening) enterRoot() error {
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: "/", Err: err}
	}
	o.enter(fd)
	return nil
}

// enter continues in another directory and takes over its descriptor.
func (o *opening) enter(dir int) {
	if o.dir >= 0 {
		unix.Close(o.dir)
	}
	o.dir = dir
}

// checkDirectory refuses a directory in which the user may replace files of other users.
func (o *opening) checkDirectory() error {
	var st unix.Stat_t
	if err := unix.Fstat(o.dir, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: o.path, Err: err}
	}
	writable := st.Mode&0o002 != 0 || st.Mode&0o020 != 0 && st.Gid == o.gid
	o.sticky = writable && st.Mode&unix.S_ISVTX != 0
	if o.uid != 0 && (st.Uid == o.uid || writable && !o.sticky) {
		return o.refused("the executor's user can change a directory on the path to %s (mode %04o, user %d)", o.path, st.Mode&0o7777, st.Uid)
	}
	return nil
}

// step checks one part of the path. link is the target of a symbolic link, and empty for other files.
func (o *opening) step(fd int, name string) (link string, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", &fs.PathError{Op: "stat", Path: o.path, Err: err}
	}
	if o.uid != 0 && o.sticky && (st.Uid == o.uid || st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink != 1) {
		return "", o.refused("the executor's user can change %q on the path to %s (user %d, %d names)", name, o.path, st.Uid, st.Nlink)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", nil
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil || n == 0 || n == len(buf) {
		return "", &fs.PathError{Op: "readlink", Path: o.path, Err: unix.EINVAL}
	}
	return string(buf[:n]), nil
}

// refused returns an error that wraps EACCES.
func (o *opening) refused(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, unix.EACCES)...)
}

// answerOpen calls open for a file or socket that the administrator's settings name and sends the executor the
// descriptor, or the errno. The executor itself has no right to open it. The spawner does not read the content.
func (s *Spawner) answerOpen(id uint32, open func() (int, error)) {
	fd, err := open()
	if err != nil {
		errno := unix.EIO
		errors.As(err, &errno)
		body := make([]byte, 4)
		putU32(body, uint32(errno))
		s.send(&wire.Message{Type: wire.OpenFailed, ID: id, Body: body})
		return
	}
	s.send(&wire.Message{Type: wire.Opened, ID: id}, fd)
	unix.Close(fd)
}

// openFile opens a file that the administrator's settings name, to read it or to append to it. There is one list for
// each, so that the executor cannot change its own certificates, keys and lists.
func (s *Spawner) openFile(r *wire.OpenRequest) (int, error) {
	files, flags := s.cfg.Files, unix.O_RDONLY|unix.O_NONBLOCK
	if r.Append {
		files, flags = s.cfg.Append, unix.O_CREAT|unix.O_APPEND|unix.O_WRONLY|unix.O_NONBLOCK
	}
	if r.File >= uint32(len(files)) {
		return -1, unix.ENOENT
	}
	path := files[r.File]
	if r.Name != "" {
		if r.Append {
			return -1, unix.EPERM
		}
		path = filepath.Join(path, r.Name)
	}
	fd, err := openPath(path, flags, s.cfg.UID, s.cfg.GID)
	s.tellRefused(err)
	return fd, err
}

// connect connects to a unix stream socket.
func (s *Spawner) connect(file uint32) (int, error) {
	if file >= uint32(len(s.cfg.Files)) {
		return -1, unix.ENOENT
	}
	fd, err := connectPath(s.cfg.Files[file], s.cfg.UID, s.cfg.GID)
	s.tellRefused(err)
	return fd, err
}

// tellRefused logs, once, that a path is refused because the executor's user could change it.
func (s *Spawner) tellRefused(err error) {
	if errors.Is(err, unix.EACCES) {
		s.refusedOnce.Do(func() { s.logf("refused a path to the executor: %v", err) })
	}
}
