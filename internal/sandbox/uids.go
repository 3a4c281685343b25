package sandbox

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrNoUID means that all ids of the range are in use.
var ErrNoUID = errors.New("all user ids for workers are in use")

// UIDs assigns the ids of a range, each to one worker at a time. It is safe for concurrent use.
type UIDs struct {
	r    Range
	mu   sync.Mutex
	next uint32
	used map[uint32]bool
	file *os.File // of Share, or nil
}

// NewUIDs returns UIDs that start at a random id of the range, since other executors of the node may use the same range
// without sharing it.
func NewUIDs(r Range) *UIDs {
	u := &UIDs{r: r, used: map[uint32]bool{}}
	if r.N > 0 {
		u.next = rand.Uint32N(r.N)
	}
	return u
}

// Share ensures that all users of the same file have different ids, even if their ranges overlap: the byte of the file
// with an id's number is locked while the id is in use, or until the process ends. It creates the file and its
// directory. Call it at most once, before the first Take, and call Close at the end.
func (u *UIDs) Share(path string) (err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	u.file, err = os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	return err
}

// Close returns all ids.
func (u *UIDs) Close() {
	if u.file != nil {
		u.file.Close()
	}
}

// lock locks or unlocks an id. It returns false if another process has locked it.
func (u *UIDs) lock(id uint32, how int16) bool {
	if u.file == nil {
		return true
	}
	err := unix.FcntlFlock(u.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: how, Start: int64(id), Len: 1})
	return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) // a file system without locks is not an error
}

// Take returns a free id, the one that has been free for the longest time. The error is ErrNoUID.
func (u *UIDs) Take() (uint32, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for range u.r.N {
		id := u.r.First + u.next
		u.next = (u.next + 1) % u.r.N
		if !u.used[id] && u.lock(id, unix.F_WRLCK) {
			u.used[id] = true
			return id, nil
		}
	}
	return 0, fmt.Errorf("%w: %d, %v", ErrNoUID, u.r.N, u.r)
}

// Give returns an id. No process may use it any more. 0 is ignored.
func (u *UIDs) Give(id uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.used[id] {
		delete(u.used, id)
		u.lock(id, unix.F_UNLCK)
	}
}
