package executor

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// sum is a SHA-256.
type sum [sha256.Size]byte

// code is a library in a sealed memfd. Its fields do not change after it is in the store, except refs and used,
// which the store's lock guards.
type code struct {
	sum   sum
	size  uint64
	file  *os.File
	names []string // functions by index
	// The names in the form that workers read. nil: writing the file failed; the next start tries again.
	namesFile *os.File

	refs   int
	used   uint64          // the store's tick at the last release
	owners map[string]bool // owners that have uploaded the library
}

func (c *code) close() {
	c.file.Close()
	if c.namesFile != nil {
		c.namesFile.Close()
	}
}

// usable reports whether an owner may use the library: it has uploaded the library, or is an operator (""). Knowing the
// hash is not enough.
func (c *code) usable(owner string) bool { return owner == "" || c.owners[owner] }

// codeStore has the node's libraries by hash. Each library is stored once, in memory that is sealed before it is used.
// Unused libraries are evicted for new ones, the longest unused first.
type codeStore struct {
	limit, total uint64 // bytes of one library, of all
	most         int    // number of libraries: each uses two descriptors, however small it is
	// Reads the functions of a library in a separate process, which takes some milliseconds.
	inspect func(context.Context, *os.File) ([]string, error)

	mu      sync.Mutex
	used    uint64 // bytes, those being uploaded included
	tick    uint64
	codes   map[sum]*code
	uploads map[sending]chan struct{} // closed when the upload is over
	reading map[string]*reading       // owners whose libraries are being read, by name

	// How slow an upload may be: the longest time without data, and the lowest rate on top of that, in bytes per
	// second.
	pause   time.Duration
	slowest float64
}

// sending is an upload in progress. Other owners do not wait for it, since it may be slow.
type sending struct {
	sum   sum
	owner string
}

// reading is an owner whose libraries are being inspected: one at a time, so that other owners find a free reader.
type reading struct {
	turn  chan struct{} // capacity 1
	users int           // uploads that have the turn or wait for it
}

// takeTurn waits for an owner's turn. The caller ends the turn by calling done.
func (s *codeStore) takeTurn(ctx context.Context, owner string) (done func(), err error) {
	s.mu.Lock()
	r := s.reading[owner]
	if r == nil {
		r = &reading{turn: make(chan struct{}, 1)}
		s.reading[owner] = r
	}
	r.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if r.users--; r.users == 0 {
			delete(s.reading, owner)
		}
	}
	select {
	case r.turn <- struct{}{}:
		return func() { <-r.turn; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("waiting for the owner's other libraries to be read: %w", context.Cause(ctx))
	}
}

// within returns how long an upload may take.
func (s *codeStore) within(size uint64) time.Duration {
	return s.pause + time.Duration(float64(size)/s.slowest*float64(time.Second))
}

// mostLibraries leaves seven eighths of the descriptors to workers and connections.
func mostLibraries() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		limit.Cur = 256
	}
	return int(min(max(limit.Cur/16, 16), 4096))
}

func newCodeStore(limit, total uint64, inspect func(context.Context, *os.File) ([]string, error)) *codeStore {
	return &codeStore{limit: limit, total: total, most: mostLibraries(), codes: map[sum]*code{}, reading: map[string]*reading{}, uploads: map[sending]chan struct{}{}, pause: uploadPause,
		slowest: slowestUpload, inspect: inspect}
}

// acquire returns the library with a new reference. It returns nil if the owner has not uploaded it to this node.
func (s *codeStore) acquire(h sum, owner string) *code {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.codes[h]
	if c == nil || !c.usable(owner) {
		return nil
	}
	c.refs++
	return c
}

// release drops a reference.
func (s *codeStore) release(c *code) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.refs--
	s.tick++
	c.used = s.tick
}

// add stores a library whose bytes next returns in pieces. If an owner adds the same hash several times at once, one
// call reads its pieces and the others wait for it. If it fails, one of the others continues. known means that nothing
// was read. If other owners have uploaded the library, the bytes are read and compared, since the hash alone does not
// prove that this owner has the library.
func (s *codeStore) add(ctx context.Context, h sum, owner string, size uint64, next func() ([]byte, error)) (names []string, known bool, err error) {
	if size == 0 || size > s.limit {
		return nil, false, control.Errorf(control.ClassInvalid, "library of %d bytes: this executor accepts 1 to %d", size, s.limit)
	}
	u := sending{h, owner}
	for {
		c, over, err := s.claim(u, size)
		if err != nil {
			return nil, false, err
		}
		if c != nil {
			known, err := s.share(c, owner, size, next)
			return c.names, known, err
		}
		if over == nil {
			break
		}
		select {
		case <-over:
		case <-ctx.Done():
			return nil, false, interrupted(ctx, "upload")
		}
	}
	c, err := s.receive(ctx, u, size, next)
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.uploads[u])
	delete(s.uploads, u)
	if err != nil {
		s.used -= size
		return nil, false, err
	}
	if other := s.codes[h]; other != nil { // another owner has uploaded it in the meantime
		s.used -= size
		c.close()
		other.owners[owner] = true
		return other.names, false, nil
	}
	s.tick++
	c.used = s.tick
	c.owners = map[string]bool{owner: true}
	s.codes[h] = c
	return c.names, false, nil
}

// share lets an owner use a stored library after its upload was compared. It drops claim's reference.
func (s *codeStore) share(c *code, owner string, size uint64, next func() ([]byte, error)) (known bool, err error) {
	defer s.release(c)
	s.mu.Lock()
	known = c.usable(owner)
	s.mu.Unlock()
	if known {
		return true, nil
	}
	p, hash := &pieces{next: next, left: size}, sha256.New()
	if _, err := io.Copy(hash, p); err != nil {
		return false, grpcError(err)
	}
	if got := sum(hash.Sum(nil)); got != c.sum {
		return false, mismatch(c.sum, got)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.owners[owner] = true
	return false, nil
}

// claim returns a stored library with a reference, or the end of another upload by the same owner to wait for. If it
// returns neither, the caller must upload, and size bytes are reserved for it.
func (s *codeStore) claim(u sending, size uint64) (known *code, over chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.codes[u.sum]; c != nil {
		c.refs++
		return c, nil, nil
	}
	if over := s.uploads[u]; over != nil {
		return nil, over, nil
	}
	for s.used+size > s.total || len(s.codes)+len(s.uploads) >= s.most {
		if !s.evict() {
			return nil, nil, control.Errorf(control.ClassBusy, "library of %d bytes: %d of %d bytes for code and %d of %d libraries are in use", size,
				s.used, s.total, len(s.codes)+len(s.uploads), s.most)
		}
	}
	s.used += size
	s.uploads[u] = make(chan struct{})
	return nil, nil, nil
}

// evict drops the library that has been unused for the longest time. It returns false if all are in use.
func (s *codeStore) evict() bool {
	var oldest *code
	for _, c := range s.codes {
		if c.refs == 0 && (oldest == nil || c.used < oldest.used) {
			oldest = c
		}
	}
	if oldest == nil {
		return false
	}
	delete(s.codes, oldest.sum)
	s.used -= oldest.size
	oldest.close()
	return true
}

// evictAll drops all libraries that no lease uses.
func (s *codeStore) evictAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.evict() {
	}
}

// receive reads, checks and seals a library.
func (s *codeStore) receive(ctx context.Context, u sending, size uint64, next func() ([]byte, error)) (*code, error) {
	p := &pieces{next: next, left: size}
	hash := sha256.New()
	f, err := zygote.SealedMemfd("rfaas-code", io.TeeReader(p, hash), int64(size))
	if p.err != nil {
		err = p.err // unwrapped, because it has a class
	}
	if err != nil {
		return nil, grpcError(err)
	}
	names, err := s.check(ctx, f, u, sum(hash.Sum(nil)))
	if err != nil {
		f.Close()
		return nil, err
	}
	c := &code{sum: u.sum, size: size, file: f, names: names}
	if namesFile, err := zygote.NamesMemfd(names); err == nil {
		c.namesFile = namesFile
	}
	return c, nil
}

func (s *codeStore) check(ctx context.Context, f *os.File, u sending, got sum) (names []string, err error) {
	announced := u.sum
	if got != announced {
		return nil, mismatch(announced, got)
	}
	done, err := s.takeTurn(ctx, u.owner)
	if err == nil {
		names, err = s.inspect(ctx, f)
		done()
	}
	var bad *zygote.WorkerError
	switch {
	case err == nil:
		return names, nil
	case errors.As(err, &bad):
		return nil, control.StatusError(bad.Status, fmt.Sprintf("library %x: %v", announced[:6], err))
	case isScarce(err), errors.Is(err, context.DeadlineExceeded):
		return nil, control.Errorf(control.ClassBusy, "library %x: %v", announced[:6], err)
	}
	return nil, grpcError(fmt.Errorf("library %x: %w", announced[:6], err))
}

func mismatch(announced, got sum) error {
	return invalidf("upload: announced as SHA-256 %x, but the bytes have %x", announced[:], got[:])
}

// pieces is a reader of exactly left bytes that arrive in pieces.
type pieces struct {
	next func() ([]byte, error)
	left uint64
	data []byte // of the current piece, unread
	err  error
}

func (p *pieces) Read(b []byte) (int, error) {
	for len(p.data) == 0 {
		if p.left == 0 {
			return 0, io.EOF
		}
		if p.data, p.err = p.next(); p.err != nil {
			return 0, p.err
		}
		if uint64(len(p.data)) > p.left {
			p.err = invalidf("upload: more bytes than were announced")
			return 0, p.err
		}
		p.left -= uint64(len(p.data))
	}
	n := copy(b, p.data)
	p.data = p.data[n:]
	return n, nil
}

// close drops all libraries. None may be in use.
func (s *codeStore) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h, c := range s.codes {
		c.close()
		delete(s.codes, h)
	}
}

// statusBadLibrary is DP_BAD_LIBRARY of dp_status.h.
const statusBadLibrary = -204
