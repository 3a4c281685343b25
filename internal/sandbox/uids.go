package sandbox

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
)

// Range is a range of user ids, which are group ids too: from First on, N of them. The zero Range has none.
type Range struct{ First, N uint32 }

// maxUIDs bounds a range; more than any node has workers.
const maxUIDs = 1 << 20

// UnmarshalText reads "FIRST-LAST", or nothing for no ids.
func (r *Range) UnmarshalText(text []byte) error {
	*r = Range{}
	s := strings.TrimSpace(string(text))
	if s == "" {
		return nil
	}
	from, to, ok := strings.Cut(s, "-")
	first, err1 := strconv.ParseUint(from, 10, 32)
	last, err2 := strconv.ParseUint(to, 10, 32)
	// The highest number means "no user" to the kernel.
	if !ok || err1 != nil || err2 != nil || first < 1 || last < first || last >= 1<<32-1 || last-first >= maxUIDs {
		return fmt.Errorf("user ids %q: want FIRST-LAST, without 0, at most %d of them", text, maxUIDs)
	}
	*r = Range{uint32(first), uint32(last - first + 1)}
	return nil
}

// String writes what UnmarshalText reads.
func (r Range) String() string {
	if r.N == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%d", r.First, r.First+(r.N-1))
}

// ErrNoUID: all ids of the range are in use.
var ErrNoUID = errors.New("all user ids for workers are in use")

// UIDs gives out the ids of a range, each to one at a time. Any goroutine may call its methods.
type UIDs struct {
	r    Range
	mu   sync.Mutex
	next uint32
	used map[uint32]bool
}

// NewUIDs begins anywhere in the range: other executors of the node may have the same one.
func NewUIDs(r Range) *UIDs {
	u := &UIDs{r: r, used: map[uint32]bool{}}
	if r.N > 0 {
		u.next = rand.Uint32N(r.N)
	}
	return u
}

// Take returns an id that nobody else has, the one that has been free for longest.
func (u *UIDs) Take() (uint32, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if uint32(len(u.used)) == u.r.N {
		return 0, fmt.Errorf("%w: %d, %v", ErrNoUID, u.r.N, u.r)
	}
	for u.used[u.r.First+u.next] {
		u.next = (u.next + 1) % u.r.N
	}
	id := u.r.First + u.next
	u.next = (u.next + 1) % u.r.N
	u.used[id] = true
	return id, nil
}

// Give takes an id back, of which no process must be left. 0 is none.
func (u *UIDs) Give(id uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.used, id)
}
