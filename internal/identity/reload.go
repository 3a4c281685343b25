package identity

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"
)

// Opener opens a file for reading. A daemon reads all files of its identity through one Opener, at its start and later,
// so that a daemon that has given up root can pass an Opener that still reaches its files. nil uses the file system
// directly.
type Opener func(path string) (fs.File, error)

// info returns a file's description. A missing file is fs.ErrNotExist.
func (o Opener) info(path string) (fs.FileInfo, error) {
	f, err := o.open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Stat()
}

// read reads a file of at most most bytes. If private is set, the file must belong to this user or root, and must not
// be accessible to others.
func (o Opener) read(path string, private bool, most int64) ([]byte, error) {
	f, err := o.open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := regular(f, path)
	if err != nil {
		return nil, err
	}
	if private {
		if st.Mode().Perm()&0o077 != 0 {
			return nil, fmt.Errorf("%s has mode %04o, so other users can access it; chmod 600 it", path, st.Mode().Perm())
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() && sys.Uid != 0 {
			return nil, fmt.Errorf("%s belongs to user %d, not to this user (%d)", path, sys.Uid, os.Geteuid())
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = fmt.Errorf("%s has more than %d bytes", path, most)
	}
	return b, err
}

// regular returns what the system knows about an open file, or an error if it is not a regular file.
func regular(f fs.File, path string) (fs.FileInfo, error) {
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	return st, err
}

// lookAgain is how long the last check of the files is valid, and lookSoon how long if it failed.
const (
	lookAgain = time.Second
	lookSoon  = 100 * time.Millisecond
)

// reloaded is a value that is made from files, and made again when one of them changes. If that fails, the old value
// stays in use, along with the error. It is safe for concurrent use.
type reloaded[T any] struct {
	open  Opener
	paths []string // may name missing files: their creation counts as a change
	make  func() (T, error)
	told  func(value T, err error) // called under the lock after each attempt but the first; may be nil

	mu         sync.Mutex
	looked     time.Time
	seen       []fs.FileInfo // nil for a missing file
	value      T
	generation uint64 // of the value; 0: no value yet
	err        error  // of the last attempt
}

// get returns the value of the files as they are now, or as they last were valid, with the error of the last attempt.
// generation is 0 if there has never been a valid value.
func (r *reloaded[T]) get(now time.Time) (value T, generation uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := lookAgain
	if r.err != nil {
		counts = lookSoon
	}
	if r.looked.IsZero() || now.Sub(r.looked).Abs() >= counts {
		r.look(now)
	}
	return r.value, r.generation, r.err
}

// look reads the files if they have changed. The caller holds the lock.
func (r *reloaded[T]) look(now time.Time) {
	first := r.looked.IsZero()
	r.looked = now
	infos := make([]fs.FileInfo, len(r.paths))
	changed := r.err != nil || r.generation == 0
	for i, path := range r.paths {
		var err error
		if infos[i], err = r.open.info(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			changed = true // reading the file returns the reason
		}
		changed = changed || r.seen == nil || !same(r.seen[i], infos[i])
	}
	if !changed {
		return
	}
	value, err := r.make()
	if err == nil {
		r.value, r.seen = value, infos // from before the read, so that a change during it is noticed
		r.generation++
	}
	r.err = err
	if !first && r.told != nil {
		r.told(r.value, err)
	}
}

func same(before, now fs.FileInfo) bool {
	if before == nil || now == nil {
		return before == nil && now == nil
	}
	return Unchanged(before, now)
}
