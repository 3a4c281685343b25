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
		_, err := identity.OpenNode(identityDir, new(identity.Replays), time.Now())
		v.check("identity-dir", err)
	}
	if stateDir != "" {
		v.check("state-dir", canMake(stateDir))
	}
	if auditFile != "" {
		v.check("audit-file", canMake(filepath.Dir(auditFile)))
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
		st, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) && path != "/" {
			path = filepath.Dir(path)
			continue
		}
		if err == nil && !st.IsDir() {
			err = &fs.PathError{Op: "use", Path: path, Err: syscall.ENOTDIR}
		}
		if err == nil {
			if e := unix.Access(path, unix.W_OK|unix.X_OK); e != nil {
				err = &fs.PathError{Op: "write", Path: path, Err: e}
			}
		}
		if err != nil && path != dir {
			return fmt.Errorf("%s: %w", dir, err)
		}
		return err
	}
}
