package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// place is a setting that names something on this machine. An empty path is not checked.
type place struct {
	setting, path string
	check         func(path string) error
}

// here checks places, and whether the machine can offer the providers at the addresses. It makes and changes nothing.
func here(providers []string, dataListen string, places ...place) error {
	var v validator
	for _, p := range places {
		if p.path != "" {
			v.check(p.setting, p.check(p.path))
		}
	}
	if slices.Contains(providers, "verbs") {
		if devices, err := os.ReadDir("/sys/class/infiniband"); err != nil || len(devices) == 0 {
			v.failf("providers: verbs, but this node has no RDMA device: remove verbs, or load the device's driver")
		}
	}
	if slices.Contains(providers, "tcp") {
		v.check("data-listen", isLocal(dataListen))
	}
	return v.err()
}

// isLocal returns an error if the host of host:port or host:first-last is not an address of this machine.
func isLocal(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return err
	}
	return l.Close()
}

// opensIdentity returns an error if a daemon could not start with an identity directory.
func opensIdentity(dir string) error {
	_, err := identity.OpenNode(dir, nil, nil, time.Now())
	return err
}

// canReplace returns an error if a file cannot be written to its directory, which must be there.
func canReplace(file string) error { return writable(filepath.Dir(file)) }

// canHaveSecret returns an error if a daemon can neither read the shared secret nor make it.
func canHaveSecret(file string) error {
	_, err := control.LoadSecret(file)
	if errors.Is(err, fs.ErrNotExist) {
		return canMake(filepath.Dir(file))
	}
	return err
}

// isProgram returns an error if a file cannot be executed.
func isProgram(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return &fs.PathError{Op: "execute", Path: path, Err: syscall.EACCES}
	}
	return access(path, unix.X_OK)
}

// canMake returns an error if a directory cannot be made and written to. It checks the part of its path that exists.
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
			err = &fs.PathError{Op: "use", Path: path, Err: errors.New("dangling symbolic link")}
		}
		if err != nil && path != dir {
			return fmt.Errorf("%s: %w", dir, err)
		}
		return err
	}
}

// writable returns an error if no file can be made in a directory.
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
		op := "write"
		if mode == unix.X_OK {
			op = "execute"
		}
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// canAppend returns an error if a file, or a device like /dev/stderr, can neither be opened for appending nor be created.
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
