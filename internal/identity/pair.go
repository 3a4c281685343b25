package identity

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// staged is a file of an identity directory that is about to be replaced.
type staged struct {
	name string
	b    []byte
	mode os.FileMode // if there is no older file; a key has 0600
}

// replace creates a node's directory if necessary and replaces the files of content in it, all in one step: a process that is killed at any point leaves
// either all old files in force or all new ones (see filePending). content runs under the lock of the directory, so that the files of a later call are not
// older than those of an earlier one. Each new file gets the owner and the mode of the one that it replaces. Afterwards replace checks that certificates and
// keys belong together. Concurrent calls for one directory wait for each other, at most as long as patience. Temporary files that an earlier call has left
// are removed. step is called before each change of the directory; nil: nothing is called.
func replace(dir string, patience time.Duration, step func(), content func() ([]staged, error)) (err error) {
	if step == nil {
		step = func() {}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock, err := lockDir(dir, patience)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := finish(dir, lock, step); err != nil {
		return err
	}
	files, err := content()
	if err != nil {
		return err
	}
	p := pending{Suffix: strconv.FormatUint(rand.Uint64(), 10), Old: map[string][]byte{}}
	defer func() {
		if err != nil && !isPending(dir) {
			for _, f := range files {
				os.Remove(stagedPath(dir, f.name, p.Suffix))
			}
		}
	}()
	for _, f := range append([]staged{{name: filePending}}, files...) {
		if err := removeStaged(dir, f.name); err != nil {
			return err
		}
	}
	for _, f := range files {
		step()
		path := filepath.Join(dir, f.name)
		if p.Old[f.name], err = Opener(nil).sum(path); err != nil {
			return err
		}
		if err := stageLike(path, p.Suffix, f.b, f.mode); err != nil {
			return err
		}
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	step()
	if err := lock.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	if err := WriteFile(filepath.Join(dir, filePending), text, 0o644, false); err != nil {
		return err
	}
	if err := finish(dir, lock, step); err != nil {
		return err
	}
	return checkPairs(dir)
}

// checkLocked completes an interrupted replacement of files, and then calls checkPairs. It holds the lock, so no files are replaced meanwhile.
func (c *Cluster) checkLocked(dir string) error {
	lock, err := lockDir(dir, c.patience)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := finish(dir, lock, func() {}); err != nil {
		return err
	}
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
