package identity

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// staged is a file of an identity directory that is about to be replaced.
type staged struct {
	name string
	b    []byte
	mode os.FileMode // if there is no older file; a key has 0600
	tmp  string      // path of the temporary file; empty: not written yet
}

// replace creates a node's directory if necessary and writes the files of content to it, in their order. content runs under the lock of the
// directory, so that the files of a later call are not older than those of an earlier one. All new files are synced before the first one
// replaces an older file, whose owner and mode it gets. Afterwards replace checks that certificates and keys belong together. Concurrent
// calls for one directory wait for each other, at most as long as patience. Temporary files that an earlier call has left are removed.
func replace(dir string, patience time.Duration, rename func(from, to string) error, content func() ([]staged, error)) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock, err := lockDir(dir, patience)
	if err != nil {
		return err
	}
	defer lock.Close()
	files, err := content()
	if err != nil {
		return err
	}
	defer func() {
		for i := range files {
			if files[i].tmp != "" {
				os.Remove(files[i].tmp)
			}
		}
	}()
	for i := range files {
		f := &files[i]
		if err := removeStaged(dir, f.name); err != nil {
			return err
		}
		if f.tmp, err = stageLike(filepath.Join(dir, f.name), f.b, f.mode); err != nil {
			return err
		}
	}
	for i := range files {
		f := &files[i]
		if err := rename(f.tmp, filepath.Join(dir, f.name)); err != nil {
			return err
		}
		f.tmp = ""
	}
	if err := lock.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return checkPairs(dir)
}

// checkLocked is checkPairs while no files of the directory are being replaced.
func (c *Cluster) checkLocked(dir string) error {
	lock, err := lockDir(dir, c.patience)
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
