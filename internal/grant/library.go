package grant

import (
	"bytes"
	"crypto/sha256"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
	"weak"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/bundle"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// librariesMost bounds the bytes of the libraries that are remembered with their hashes. A remembered library is not read and hashed
// again for each lease.
const librariesMost = 64 << 20

// settled is how old the last change of a file must be before its content is remembered. Two changes at about the same
// time may have the same time stamp.
const settled = time.Second

// Library is the code of a lease.
type Library struct {
	code  []byte
	sha   [sha256.Size]byte
	needs *bundle.Object // nil: it cannot be read, which the executor reports
}

// fileState identifies a version of a file: it changes when the content does.
type fileState struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

func stateOf(i os.FileInfo) (st fileState, ok bool) {
	s, ok := i.Sys().(*syscall.Stat_t)
	if ok {
		st = fileState{uint64(s.Dev), s.Ino, s.Size, s.Mtim, s.Ctim}
	}
	return st, ok
}

// Library reads, checks and hashes the library in a regular file or memory file, from its beginning wherever the file's
// offset is. name is for error messages. A file that has not changed since it was read last is not read again. It does
// not close f. Errors: StatusBadLibrary.
func (c *Control) Library(f *os.File, name string) (*Library, error) {
	return c.libraryOf(f, name, time.Now())
}

func (c *shared) libraryOf(f *os.File, name string, now time.Time) (*Library, error) {
	const op = "read the library"
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, fail(op, dataplane.StatusBadLibrary, "%v", err)
	case !st.Mode().IsRegular():
		return nil, fail(op, dataplane.StatusBadLibrary, "%s is not a regular file", name)
	case st.Size() > MaxLibrary:
		return nil, fail(op, dataplane.StatusBadLibrary, "%s has %d bytes, want at most %d", name, st.Size(), MaxLibrary)
	}
	before, known := stateOf(st)
	if known {
		if l := c.remembered(before); l != nil {
			return l, nil
		}
	}
	defer c.lockFile(before)() // leases that start together read a library once
	if known {
		if l := c.remembered(before); l != nil {
			return l, nil
		}
	}
	// The size may change at any time, so the bytes that were read count.
	code, err := io.ReadAll(io.NewSectionReader(f, 0, MaxLibrary+1))
	switch {
	case err != nil:
		return nil, fail(op, dataplane.StatusBadLibrary, "%v", err)
	case len(code) > MaxLibrary:
		return nil, fail(op, dataplane.StatusBadLibrary, "%s has more than %d bytes, want at most that", name, MaxLibrary)
	}
	l, err := newLibrary(name, code)
	if err != nil {
		return nil, err
	}
	l = c.one(l)
	if st, err = f.Stat(); err == nil && known {
		if after, _ := stateOf(st); after == before && (now.Sub(time.Unix(before.ctime.Unix())) > settled || isSealed(f)) {
			c.remember(before, l)
		}
	}
	return l, nil
}

// fileLock is held while a library is read. users counts those who hold it or wait for it; shared.mu protects it.
type fileLock struct {
	mu    sync.Mutex
	users int
}

// lockFile locks a version of a file, so that a file system that hangs delays only the leases of that library.
func (c *shared) lockFile(state fileState) (unlock func()) {
	c.mu.Lock()
	l := c.reading[state]
	if l == nil {
		l = &fileLock{}
		c.reading[state] = l
	}
	l.users++
	c.mu.Unlock()
	l.mu.Lock()
	return func() {
		l.mu.Unlock()
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(c.reading, state)
		}
	}
}

// isSealed reports whether a file is a memory file whose content cannot change.
func isSealed(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	sealed := false
	_ = raw.Control(func(fd uintptr) {
		seals, err := unix.FcntlInt(fd, unix.F_GET_SEALS, 0)
		sealed = err == nil && seals&unix.F_SEAL_WRITE != 0
	})
	return sealed
}

func newLibrary(path string, code []byte) (*Library, error) {
	if err := checkELF(path, code); err != nil {
		return nil, err
	}
	if path == "" {
		path = "the library"
	}
	needs, err := bundle.ReadObject(path, bytes.NewReader(code), int64(len(code)))
	if err != nil {
		needs = nil
	}
	return &Library{code: code, sha: sha256.Sum256(code), needs: needs}, nil
}

// remembered returns the library of a file in that state, nil if it is not known.
func (c *shared) remembered(state fileState) *Library {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.libraries[state]
}

// one returns the copy of a library that other leases use already, or l, so that the code is in memory once.
func (c *shared) one(l *Library) *Library {
	if l == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if known := c.inUse[l.sha].Value(); known != nil {
		return known
	}
	for sha, p := range c.inUse {
		if p.Value() == nil {
			delete(c.inUse, sha)
		}
	}
	c.inUse[l.sha] = weak.Make(l)
	return l
}

func (c *shared) remember(state fileState, l *Library) {
	if len(l.code) > librariesMost {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	room := librariesMost - len(l.code)
	for other, have := range c.libraries {
		if other.dev == state.dev && other.ino == state.ino || len(have.code) > room { // an earlier content, or no room
			delete(c.libraries, other)
			continue
		}
		room -= len(have.code)
	}
	c.libraries[state] = l
}

// checkELF reports errors that can be found without an executor. The executor checks everything again.
func checkELF(path string, b []byte) error {
	if path == "" {
		path = "library"
	}
	if len(b) < 64 || string(b[:4]) != "\x7fELF" {
		return fail("check the library", dataplane.StatusBadLibrary, "%s is not an ELF shared library (%d bytes, begins with %q)", path, len(b), b[:min(len(b), 8)])
	}
	return nil
}
