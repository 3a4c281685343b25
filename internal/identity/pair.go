package identity

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// staged is a file of an identity directory that is about to be replaced.
type staged struct {
	name string
	b    []byte
	mode os.FileMode
	tmp  string // path of the temporary file; empty: not written yet
}

// replace creates a node's directory if necessary and writes files to it, in their order. All new files are synced before
// the first one replaces an older file. Afterwards it checks that certificates and keys belong together. Concurrent calls
// for one directory wait for each other.
func (c *Cluster) replace(dir string, files []staged) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	defer func() {
		for i := range files {
			if files[i].tmp != "" {
				os.Remove(files[i].tmp)
			}
		}
	}()
	for i := range files {
		f := &files[i]
		if f.tmp, err = stage(filepath.Join(dir, f.name), f.b, f.mode); err != nil {
			return err
		}
	}
	for i := range files {
		f := &files[i]
		if err := c.rename(f.tmp, filepath.Join(dir, f.name)); err != nil {
			return err
		}
		f.tmp = ""
	}
	if err := lock.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return checkPairs(dir)
}

// lockDir opens a directory and waits for its lock. Closing the file releases the lock.
func lockDir(dir string) (*os.File, error) {
	lock, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return lock, nil
}

// checkLocked is checkPairs while no files of the directory are being replaced.
func checkLocked(dir string) error {
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	return checkPairs(dir)
}

// checkPairs returns an error if a certificate in a node's directory and the key beside it do not belong together. The
// keys may belong to another user, such as that of the daemon. The page's pair may be missing.
func checkPairs(dir string) error {
	for _, pair := range [][2]string{{fileNode, fileNodeKey}, {filePage, filePageKey}} {
		cert, key := filepath.Join(dir, pair[0]), filepath.Join(dir, pair[1])
		certPEM, err := Opener(nil).read(cert, false, maxFile)
		if errors.Is(err, fs.ErrNotExist) && pair[0] == filePage {
			continue
		}
		if err != nil {
			return err
		}
		keyPEM, err := Opener(nil).read(key, false, maxFile)
		if err != nil {
			return err
		}
		if _, err := tls.X509KeyPair(certPEM, keyPEM); err != nil {
			return fmt.Errorf("certificate %s and key %s: %w", cert, key, err)
		}
	}
	return nil
}
