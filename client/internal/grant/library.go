package grant

import (
	"crypto/sha256"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Libraries are remembered with their hashes, so that not every lease reads and hashes one again: those of files that are as they
// were, up to librariesMost bytes together.
const librariesMost = 64 << 20

// settled is for how long a file must not have changed to be remembered: two changes at about the same time may show one time.
const settled = time.Second

// library is the code of a lease.
type library struct {
	code []byte
	sha  [sha256.Size]byte
	file fileState
}

// fileState is what changes with a file's content.
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

// library reads, checks and hashes what a lease names.
func (c *Control) library(path string, code []byte, now time.Time) (*library, error) {
	if code != nil {
		return newLibrary(path, code)
	}
	if l := c.rememberedLibrary(path); l != nil {
		return l, nil
	}
	code, state, err := readLibrary(path)
	if err != nil {
		return nil, err
	}
	l, err := newLibrary(path, code)
	if err != nil {
		return nil, err
	}
	if l.file = state; now.Sub(time.Unix(state.ctime.Unix())) > settled {
		c.rememberLibrary(path, l)
	}
	return l, nil
}

func newLibrary(path string, code []byte) (*library, error) {
	if err := checkELF(path, code); err != nil {
		return nil, err
	}
	return &library{code: code, sha: sha256.Sum256(code)}, nil
}

// rememberedLibrary is the library of a file that has not changed; nil if there is none.
func (c *Control) rememberedLibrary(path string) *library {
	c.mu.Lock()
	l := c.libraries[path]
	c.mu.Unlock()
	if l == nil {
		return nil
	}
	if i, err := os.Stat(path); err == nil {
		if now, ok := stateOf(i); ok && now == l.file {
			return l
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.libraries[path] == l {
		delete(c.libraries, path)
	}
	return nil
}

func (c *Control) rememberLibrary(path string, l *library) {
	if len(l.code) > librariesMost {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	room := librariesMost - len(l.code)
	for other, have := range c.libraries {
		if room -= len(have.code); room < 0 {
			delete(c.libraries, other)
		}
	}
	c.libraries[path] = l
}

func readLibrary(path string) ([]byte, fileState, error) {
	const op = "read the library"
	if path == "" {
		return nil, fileState{}, fail(op, dataplane.StatusInvalid, "no library is given: want a path or bytes")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fileState{}, fail(op, dataplane.StatusBadLibrary, "%v", err)
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, fileState{}, fail(op, dataplane.StatusBadLibrary, "%v", err)
	case !st.Mode().IsRegular():
		return nil, fileState{}, fail(op, dataplane.StatusBadLibrary, "%s is not a regular file", path)
	case st.Size() > MaxLibrary:
		return nil, fileState{}, fail(op, dataplane.StatusBadLibrary, "%s has %d bytes, want at most %d", path, st.Size(), MaxLibrary)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, fileState{}, fail(op, dataplane.StatusBadLibrary, "%v", err)
	}
	state, _ := stateOf(st)
	return b, state, nil
}

// checkELF finds at once what needs no executor to find. The executor checks everything.
func checkELF(path string, b []byte) error {
	if path == "" {
		path = "library"
	}
	if len(b) < 64 || string(b[:4]) != "\x7fELF" {
		return fail("check the library", dataplane.StatusBadLibrary, "%s is not an ELF shared library (%d bytes, begins with %q)", path, len(b), b[:min(len(b), 8)])
	}
	return nil
}
