package executor

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// rootFiles returns what the spawner opens for an executor that has given up root: files that the executor reads, with sockets to which it
// connects, and files to which it appends.
func rootFiles(s *config.Executor) (files, appended []string) {
	for _, path := range []string{s.IdentityDir, strings.TrimPrefix(s.Manager, "unix:")} {
		if filepath.IsAbs(path) {
			files = append(files, path)
		}
	}
	if filepath.IsAbs(s.AuditFile) {
		appended = []string{s.AuditFile}
	}
	return files, appended
}

// rights are an executor's rights on files once it serves. The executor opens the files that its user can change with
// these rights from the start, also while it is still root. Otherwise an attacker that took over that user before a
// restart could place a link to another user's file there.
type rights struct {
	user  privilege.User // user that the executor becomes; zero: it keeps its own
	state *os.File       // the state directory, which the user may be unable to reach by its path; nil: use the path

	dropped bool // this process was root before
}

// rightsOf finds the user that an executor becomes.
func rightsOf(s *config.Executor) (rights, error) {
	if !s.Separate || os.Geteuid() != 0 {
		return rights{}, nil
	}
	u, err := privilege.Find(s.User)
	if err == nil && s.SandboxUIDs.Has(u.UID) {
		err = fmt.Errorf("user %s (%d) is in the range sandbox-uids (%v), which is for workers: choose another user", u.Name, u.UID, s.SandboxUIDs)
	}
	if err != nil {
		return rights{}, fmt.Errorf("give up root: %w", err)
	}
	return rights{user: u}, nil
}

// do calls fn with these rights.
func (r rights) do(fn func()) error {
	if r.user.UID == 0 || os.Geteuid() != 0 {
		fn()
		return nil
	}
	return r.user.As(fn)
}

// open opens a file with these rights, or with asRoot, through the spawner, if that needs root.
func (r rights) open(open func() (*os.File, error), asRoot func() (*os.File, error)) (f *os.File, err error) {
	if rerr := r.do(func() { f, err = open() }); rerr != nil {
		return nil, rerr
	}
	if errors.Is(err, fs.ErrPermission) {
		return asRoot()
	}
	return f, err
}

// opener returns a function that opens files of the identity directory.
func (r rights) opener(spawner Spawner) identity.Opener {
	return func(path string) (fs.File, error) {
		f, err := r.open(func() (*os.File, error) { return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) },
			func() (*os.File, error) { return spawner.OpenFile(path, false) })
		if err != nil {
			return nil, err // and not a nil *os.File in an interface
		}
		return f, nil
	}
}

// auditOpener returns a function that opens the audit file.
func (r rights) auditOpener(spawner Spawner) func(path string) (*os.File, error) {
	return func(path string) (*os.File, error) {
		return r.open(func() (*os.File, error) { return identity.OpenAuditFile(r.reach(path)) }, func() (*os.File, error) { return spawner.OpenFile(path, true) })
	}
}

// reach returns a path by which the user can reach a file of the state directory. It returns other paths unchanged.
func (r rights) reach(path string) string {
	if r.state == nil {
		return path
	}
	state := fmt.Sprintf("/proc/self/fd/%d", r.state.Fd())
	switch dir := filepath.Clean(r.state.Name()); {
	case filepath.Clean(path) == dir:
		return state
	case filepath.Dir(path) == dir:
		return filepath.Join(state, filepath.Base(path))
	}
	return path
}

// makeDirectories makes the directories that the settings name, and gives the state directory to the user while this
// process is root.
func (r *rights) makeDirectories(s *config.Executor) error {
	if r.user.UID == 0 {
		return nil
	}
	if s.AuditFile != "" {
		if err := r.makeDirectory(filepath.Dir(s.AuditFile), nil); err != nil {
			return fmt.Errorf("audit file: %w", err)
		}
	}
	if s.StateDir == "" {
		return nil
	}
	err := r.makeDirectory(s.StateDir, func() error { return r.user.Own(s.StateDir) })
	if err == nil {
		var fd int
		if fd, err = unix.Open(s.StateDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
			r.state = os.NewFile(uintptr(fd), s.StateDir)
		}
	}
	if err != nil {
		return fmt.Errorf("state directory %s: %w", s.StateDir, err)
	}
	return nil
}

// makeDirectory makes a directory. It uses root's rights only if the user cannot change where the path leads. In that
// case it also calls then, unless then is nil.
func (r *rights) makeDirectory(path string, then func() error) (err error) {
	path, err = filepath.Abs(path)
	if err != nil {
		return err
	}
	if zygote.PathIsSafe(path, r.user.UID, r.user.GID) != nil {
		if rerr := r.do(func() { err = os.MkdirAll(path, 0o700) }); rerr != nil {
			return rerr
		}
		return err
	}
	if err := os.MkdirAll(path, 0o700); err != nil || then == nil {
		return err
	}
	return then()
}

// close closes the state directory.
func (r *rights) close() {
	if r.state != nil {
		r.state.Close()
	}
}

// separate gives up all rights beyond those of an ordinary user. Afterwards the spawner does everything that needs
// root.
func (r *rights) separate(s *config.Executor, log *slog.Logger) error {
	if !s.Separate {
		return nil
	}
	if os.Geteuid() == 0 {
		if err := privilege.Drop(r.user); err != nil {
			return fmt.Errorf("give up root: %w", err)
		}
		r.dropped = true
		log.Info("gave up root; only the spawner runs as root now", "user", r.user.Name)
	}
	return unfiltered(privilege.Filter(), s.Sandbox.Resolve(r.user.UID != 0, s.IdentityDir != ""), log)
}

// unfiltered decides what an executor does when the system call filter could not be installed. It returns an error if
// workers must have a complete sandbox, except on an architecture for which no such filter exists.
func unfiltered(err error, mode sandbox.Mode, log *slog.Logger) error {
	switch {
	case err == nil:
		return nil
	case mode == sandbox.Require && !errors.Is(err, privilege.ErrArchitecture):
		return fmt.Errorf("a complete sandbox is required, and this process cannot have a system call filter: %w (--sandbox=on starts without it)", err)
	}
	log.Warn("running without a system call filter", "reason", err)
	return nil
}

// openJournal opens the journal of accounts. It returns nil without a directory. Without a manager nothing is charged:
// the directory is only checked, so that an unusable one is reported early.
func (r rights) openJournal(s *config.Executor, node string, log *slog.Logger) (j *accounting.Journal, err error) {
	if s.StateDir == "" {
		return nil, nil
	}
	if rerr := r.do(func() { j, err = accounting.OpenJournal(r.reach(s.StateDir), node) }); rerr != nil {
		err = rerr
	}
	if err != nil && r.state != nil {
		err = fmt.Errorf("state directory %s: %w", s.StateDir, err)
	}
	if err != nil || s.Manager != "" {
		return j, err
	}
	log.Info("the state directory is not used, because without a resource manager nothing is charged", "state-dir", s.StateDir)
	return nil, j.Close()
}
