package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// here looks at what settings name on this machine, and makes and changes nothing. Settings that name nothing are left out.
func here(identityDir, stateDir, auditFile string) error {
	var v validator
	if identityDir != "" {
		_, err := identity.OpenNode(identityDir, nil, nil, time.Now())
		v.check("identity-dir", err)
	}
	if stateDir != "" {
		v.check("state-dir", canMake(stateDir))
	}
	if auditFile != "" {
		v.check("audit-file", canAppend(auditFile))
	}
	return v.err()
}

// canMake says why a directory cannot be made and written to, going by what there is of its path.
func canMake(dir string) error {
	path, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	for {
		err := writable(path)
		if errors.Is(err, fs.ErrNotExist) && path != "/" {
			if _, e := os.Lstat(path); e != nil {
				path = filepath.Dir(path)
				continue
			}
			err = &fs.PathError{Op: "use", Path: path, Err: errors.New("a link to what is not there")}
		}
		if err != nil && path != dir {
			return fmt.Errorf("%s: %w", dir, err)
		}
		return err
	}
}

// writable says why nothing can be made in a directory.
func writable(dir string) error {
	st, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !st.IsDir() {
		return &fs.PathError{Op: "use", Path: dir, Err: syscall.ENOTDIR}
	}
	return access(dir, unix.W_OK|unix.X_OK)
}

func access(path string, mode uint32) error {
	if err := unix.Access(path, mode); err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// canAppend says why a file, or a device like /dev/stderr, cannot be opened to append to it, or be made.
func canAppend(file string) error {
	st, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		if to, err := os.Readlink(file); err == nil { // opening it makes what it leads to
			if !filepath.IsAbs(to) {
				to = filepath.Join(filepath.Dir(file), to)
			}
			return writable(filepath.Dir(to))
		}
		return canMake(filepath.Dir(file))
	}
	switch {
	case err != nil:
		return err
	case st.IsDir():
		return &fs.PathError{Op: "open", Path: file, Err: syscall.EISDIR}
	case st.Mode()&fs.ModeSocket != 0:
		return &fs.PathError{Op: "open", Path: file, Err: syscall.ENXIO}
	}
	return access(file, unix.W_OK)
}
