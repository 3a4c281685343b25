package privilege

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// User is the user that a daemon becomes.
type User struct {
	Name     string // name in the settings or in the user database
	UID, GID uint32
}

const (
	// defaultName is the user that an administrator may create for the daemon.
	defaultName = "rfaas"
	// defaultID is the user and group id if that user does not exist. It needs no entry in the user database. Nothing
	// else on a node should use it, since it is just below the ids of workers.
	defaultID = 1899999999
)

// Find returns the user that a setting names, by name or by number. For an empty setting it returns the user rfaas if
// the node has one, else id 1899999999. It refuses root.
func Find(setting string) (User, error) {
	name := setting
	if name == "" {
		name = defaultName
	}
	if id, err := strconv.ParseUint(name, 10, 32); err == nil {
		return checked(User{name, uint32(id), uint32(id)})
	}
	u, err := user.Lookup(name)
	var unknown user.UnknownUserError
	switch {
	case setting == "" && errors.As(err, &unknown):
		return User{strconv.Itoa(defaultID), defaultID, defaultID}, nil
	case err != nil:
		return User{}, fmt.Errorf("user: %w (name an existing user, or a number)", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(err, gerr); err != nil {
		return User{}, fmt.Errorf("user %s: %w", name, err)
	}
	return checked(User{name, uint32(uid), uint32(gid)})
}

func checked(u User) (User, error) {
	if u.UID == 0 || u.GID == 0 || u.UID == 1<<32-1 || u.GID == 1<<32-1 {
		return User{}, fmt.Errorf("user %s: the user id %d and the group id %d must be those of an ordinary user", u.Name, u.UID, u.GID)
	}
	return u, nil
}

// Own gives a directory of the daemon, and the regular files in it, to the user. It does not follow links. It returns
// an error if the directory belongs to another user than root or u.
func (u User) Own(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	d := os.NewFile(uintptr(fd), dir)
	defer d.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Uid != 0 && st.Uid != u.UID {
		return fmt.Errorf("directory %s belongs to user %d, not to root or to user %s: choose another one, or chown it", dir, st.Uid, u.Name)
	}
	names, err := d.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := u.ownFile(fd, name); err != nil {
			return &fs.PathError{Op: "chown", Path: filepath.Join(dir, name), Err: err}
		}
	}
	if err := unix.Fchown(fd, int(u.UID), int(u.GID)); err != nil {
		return &fs.PathError{Op: "chown", Path: dir, Err: err}
	}
	return nil
}

// ownFile gives a regular file to the user if root owns it and it has only one name.
func (u User) ownFile(dir int, name string) error {
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 || st.Uid != 0 {
		return nil
	}
	return unix.Fchownat(fd, "", int(u.UID), int(u.GID), unix.AT_EMPTY_PATH)
}

// As calls fn with the user's rights on files and none of root's, on a thread of its own. fn must not open files on other
// goroutines. The process must run as root.
func (u User) As(fn func()) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		groups, err := u.borrow()
		if err == nil {
			fn()
			err = restore(groups)
		}
		if err == nil { // after an error the thread stays locked, and ends with the goroutine
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// borrow gives the calling thread alone the user's rights on files. It returns the groups that the thread had.
func (u User) borrow() (groups []int, err error) {
	if groups, err = unix.Getgroups(); err != nil {
		return nil, fmt.Errorf("getgroups: %w", err)
	}
	if err := setThreadGroups(nil); err != nil {
		return nil, err
	}
	return groups, setThreadFiles(int(u.UID), int(u.GID))
}

// restore undoes borrow.
func restore(groups []int) error {
	if err := setThreadFiles(0, 0); err != nil {
		return err
	}
	return setThreadGroups(groups)
}

// setThreadFiles sets the ids with which the calling thread opens files. The kernel then removes root's rights on files
// from the thread, or restores them.
func setThreadFiles(uid, gid int) error {
	unix.SetfsgidRetGid(gid) // these return the previous id, and no error
	unix.SetfsuidRetUid(uid)
	g, _ := unix.SetfsgidRetGid(-1)
	if u, _ := unix.SetfsuidRetUid(-1); u != uid || g != gid {
		return fmt.Errorf("open files as user %d, group %d: the kernel refuses it", uid, gid)
	}
	return nil
}

// setThreadGroups sets the groups of the calling thread alone.
func setThreadGroups(groups []int) error {
	ids := make([]uint32, len(groups)+1) // one more, so that ids has an address when there are no groups
	for i, g := range groups {
		ids[i] = uint32(g)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&ids[0])), 0); errno != 0 {
		return fmt.Errorf("setgroups: %w", errno)
	}
	return nil
}

// devices are the files of RDMA devices. On some nodes only a group may open them.
const devices = "/dev/infiniband/uverbs*"

// deviceGroups returns the groups that may open RDMA devices that not every user may open.
func deviceGroups() (groups []int) {
	files, _ := filepath.Glob(devices)
	for _, f := range files {
		var st unix.Stat_t
		if unix.Stat(f, &st) == nil && st.Mode&0o006 != 0o006 && st.Mode&0o060 == 0o060 && st.Gid != 0 {
			groups = append(groups, int(st.Gid))
		}
	}
	return groups
}

// Drop makes the whole process run as u, for good. The process must be root. Afterwards only root can trace the process
// or read its memory.
func Drop(u User) error {
	// Root may lock any amount of memory. Without root, memory that the daemon registers with an RDMA device counts
	// against this limit.
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("give up new privileges: %w", err)
	}
	// These calls change all threads, through the C library if the program uses cgo.
	if err := syscall.Setgroups(deviceGroups()); err != nil {
		return fmt.Errorf("setgroups: %w", err)
	}
	if err := syscall.Setresgid(int(u.GID), int(u.GID), int(u.GID)); err != nil {
		return fmt.Errorf("become group %d: %w", u.GID, err)
	}
	if err := syscall.Setresuid(int(u.UID), int(u.UID), int(u.UID)); err != nil {
		return fmt.Errorf("become user %s (%d): %w", u.Name, u.UID, err)
	}
	if os.Geteuid() != int(u.UID) || syscall.Setresuid(-1, 0, -1) == nil {
		return fmt.Errorf("become user %s (%d): the process could become root again", u.Name, u.UID)
	}
	return Hide()
}

// Hide lets only root trace the process and read its memory, until the next execve.
func Hide() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid tracing of the process: %w", err)
	}
	return nil
}
