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

// Opener opens a file to read it. Whatever a daemon reads of its identity, at its start and later, it reads through one Opener, so that a daemon
// that has given up root can pass one that still reaches its files. nil is the file system.
type Opener func(path string) (fs.File, error)

func (o Opener) open(path string) (fs.File, error) {
	if o != nil {
		return o(path)
	}
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO does not block it
}

// info describes a file; nil and fs.ErrNotExist: there is none.
func (o Opener) info(path string) (fs.FileInfo, error) {
	f, err := o.open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Stat()
}

// read reads a file of at most most bytes. A private one must be closed to everybody but its owner, who is this user or root.
func (o Opener) read(path string, private bool, most int64) ([]byte, error) {
	f, err := o.open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	if private {
		if st.Mode().Perm()&0o077 != 0 {
			return nil, fmt.Errorf("%s has mode %04o, others can reach it; chmod 600 it", path, st.Mode().Perm())
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

// lookAgain is how long a look at files counts, and lookSoon, while what they hold cannot be used.
const (
	lookAgain = time.Second
	lookSoon  = 100 * time.Millisecond
)

// reloaded is what is made of some files. It is made again when one of them has changed. When that fails the earlier value stays, with the
// error. Safe for concurrent use.
type reloaded[T any] struct {
	open  Opener
	paths []string // those that are not there count, too
	make  func() (T, error)
	told  func(value T, err error) // called after each attempt but the first one, under the lock; nil: nobody

	mu         sync.Mutex
	looked     time.Time
	seen       []fs.FileInfo // nil where there was no file
	value      T
	generation uint64 // of the value; 0: there is none yet
	err        error  // of the last attempt
}

// get returns the value as the files have it now, or had it when they were last good, and why they are not. Without any value, generation
// is 0.
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

// look reads the files if they have changed. Under the lock.
func (r *reloaded[T]) look(now time.Time) {
	first := r.looked.IsZero()
	r.looked = now
	infos := make([]fs.FileInfo, len(r.paths))
	changed := r.err != nil || r.generation == 0
	for i, path := range r.paths {
		var err error
		if infos[i], err = r.open.info(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			changed = true // reading it says why
		}
		changed = changed || r.seen == nil || !same(r.seen[i], infos[i])
	}
	if !changed {
		return
	}
	value, err := r.make()
	if err == nil {
		r.value, r.seen = value, infos // of before it was read: a later change is seen
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
