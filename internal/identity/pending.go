package identity

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// filePending is the name of the file that puts new files of a node's directory in force. The new files are first written completely, as `.NAME-SUFFIX`. Then
// filePending is made, by a rename. From that moment on, this package reads the new files instead of those at NAME. Then the new files are renamed to NAME one
// by one, and filePending is removed. If the process is killed meanwhile, finish does the rest. If a file at NAME was replaced after the kill, for example by a
// newer revocation list, the file at NAME is in force.
const filePending = ".pending"

// pending is the content of filePending.
type pending struct {
	Suffix string            `json:"suffix"`
	Old    map[string][]byte `json:"old"` // SHA-256 of each file that is replaced; empty: it is missing
}

// maxPending is the largest size of filePending, in bytes.
const maxPending = 4 << 10

// stagedPath returns the path of a new file that is not in its place yet.
func stagedPath(dir, name, suffix string) string { return filepath.Join(dir, "."+name+"-"+suffix) }

// open opens a file for reading. While the file is being replaced, it opens the version in force.
func (o Opener) open(path string) (fs.File, error) {
	dir, name := filepath.Split(path)
	if !isReplaced(name) {
		return o.direct(path)
	}
	p, err := o.pending(dir)
	if err != nil || p == nil || !p.replaces(o, dir, name) {
		return o.direct(path)
	}
	f, err := o.direct(stagedPath(dir, name, p.Suffix))
	if errors.Is(err, fs.ErrNotExist) { // it has reached its place meanwhile
		return o.direct(path)
	}
	return f, err
}

// isReplaced reports whether a file has one of the names whose files are replaced together.
func isReplaced(name string) bool {
	switch name {
	case fileNode, fileNodeKey, filePage, filePageKey, fileCA, fileTokenPub, fileRevoked, fileIssuer:
		return true
	}
	return false
}

// direct opens the file at a path, even if a new file is in force instead of it.
func (o Opener) direct(path string) (fs.File, error) {
	if o != nil {
		return o(path)
	}
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // so that a FIFO does not block
}

// pending returns what is being replaced in a directory, or nil.
func (o Opener) pending(dir string) (*pending, error) {
	path := filepath.Join(dir, filePending)
	f, err := o.direct(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxPending+1))
	if err != nil {
		return nil, err
	}
	p := &pending{}
	if err = json.Unmarshal(b, p); err == nil {
		_, err = strconv.ParseUint(p.Suffix, 10, 64)
	}
	if err != nil || len(b) > maxPending { // without the content: it may be a link to another file
		return nil, fmt.Errorf("%s is malformed: remove it", path)
	}
	return p, nil
}

// replaces reports whether the new file of this name is in force. It is while the file at NAME is still the old one.
func (p *pending) replaces(o Opener, dir, name string) bool {
	old, listed := p.Old[name]
	if !listed {
		return false
	}
	now, err := o.sum(filepath.Join(dir, name))
	return err == nil && bytes.Equal(old, now)
}

// sum returns the SHA-256 of the file at path; empty: there is none.
func (o Opener) sum(path string) ([]byte, error) {
	f, err := o.direct(path)
	if errors.Is(err, fs.ErrNotExist) {
		return []byte{}, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := regular(f, path); err != nil {
		return nil, err
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.LimitReader(f, maxRevoked+1)); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// isPending reports whether files of a directory are being replaced.
func isPending(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, filePending))
	return err == nil
}

// Complete finishes a replacement of a node's files that was interrupted. If there is none, it does nothing.
func Complete(dir string) error {
	if !isPending(dir) {
		return nil
	}
	lock, err := lockDir(dir, lockPatience)
	if err != nil {
		return err
	}
	defer lock.Close()
	return finish(dir, lock, func() {})
}

// finish moves the new files that are in force to their places. The caller holds lock, the lock of the directory.
func finish(dir string, lock *os.File, step func()) error {
	p, err := Opener(nil).pending(dir)
	if err != nil || p == nil {
		return err
	}
	for name := range p.Old {
		if !isReplaced(name) {
			continue
		}
		made := stagedPath(dir, name, p.Suffix)
		step()
		if p.replaces(nil, dir, name) {
			err = os.Rename(made, filepath.Join(dir, name))
		} else {
			err = os.Remove(made)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	step()
	if err := lock.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return os.Remove(filepath.Join(dir, filePending))
}
