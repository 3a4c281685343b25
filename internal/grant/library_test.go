package grant

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"
	"time"
	"weak"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// A library is read once as long as its file stays as it is, and anew whatever becomes of it.
func TestLibraryIsRemembered(t *testing.T) {
	c := &shared{libraries: map[fileState]*Library{}, reading: map[fileState]*fileLock{}, inUse: map[[sha256.Size]byte]weak.Pointer[Library]{}}
	path := filepath.Join(t.TempDir(), "lib.so")
	write := func(fill byte) []byte {
		t.Helper()
		b := append([]byte("\x7fELF"), bytes.Repeat([]byte{fill}, 100)...)
		before, _ := os.Stat(path)
		for { // until the file's times have moved on
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			if now, err := os.Stat(path); before == nil || err != nil || now.ModTime() != before.ModTime() {
				return b
			}
		}
	}
	open := func(now time.Time) (*Library, error) {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		return c.libraryOf(f, path, now)
	}
	get := func(want []byte, now time.Time) *Library {
		t.Helper()
		l, err := open(now)
		if err != nil || !bytes.Equal(l.code, want) || l.sha != sha256.Sum256(want) {
			t.Fatalf("%v, %v", l, err)
		}
		return l
	}
	first, later := write(1), time.Now().Add(time.Minute)
	if l := get(first, time.Now()); len(c.libraries) > 0 {
		t.Error("a file that has just changed is remembered")
	} else if l != get(first, time.Now()) {
		t.Error("there are two copies of the same code")
	}
	if l := get(first, later); l != get(first, later) {
		t.Error("a file that has not changed is read twice")
	}
	second := write(2) // of the same size, in its place
	get(second, later)
}

// What is remembered has a bound.
func TestRememberedLibrariesMakeRoom(t *testing.T) {
	c := &shared{libraries: map[fileState]*Library{}}
	for i := range uint64(3) {
		c.remember(fileState{ino: i}, &Library{code: make([]byte, librariesMost/2)})
	}
	c.remember(fileState{ino: 9}, &Library{code: make([]byte, librariesMost+1)})
	total := 0
	for _, l := range c.libraries {
		total += len(l.code)
	}
	if total > librariesMost || c.libraries[fileState{ino: 9}] != nil {
		t.Errorf("%d bytes in %d libraries are remembered", total, len(c.libraries))
	}
}

// While one library is being read, for example from a file system that hangs, others are read. Two leases of one library take turns.
func TestLibrariesAreReadIndependently(t *testing.T) {
	c := &shared{reading: map[fileState]*fileLock{}}
	one, other := fileState{ino: 1}, fileState{ino: 2}
	unlock := c.lockFile(one)
	c.lockFile(other)()
	turn := make(chan struct{})
	go func() {
		defer close(turn)
		c.lockFile(one)()
	}()
	testkit.Eventually(t, "the second lease waits", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.reading[one].users == 2
	})
	select {
	case <-turn:
		t.Error("two leases read the same library at once")
	default:
	}
	unlock()
	<-turn
	if len(c.reading) > 0 {
		t.Errorf("%d locks are left", len(c.reading))
	}
}
