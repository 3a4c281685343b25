package control

import (
	"container/list"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// strangerCost is what an unauthenticated connection is reckoned with besides the bytes that it has sent, in bytes: gRPC's
	// buffers and goroutines, and those of TLS.
	strangerCost = 64 << 10
	// strangerBytes is what an unauthenticated connection may send. A TLS handshake and the headers of a call take a tenth of it. gRPC
	// reads no more at a time, so a client whose first call has a large message is authenticated before it has sent that much.
	strangerBytes = 64 << 10
)

// strangers are the unauthenticated connections of a port. They are bounded in number and in memory: a new connection, or more bytes of
// one, close the oldest. Authenticated connections do not count and are never closed for others.
type strangers struct {
	most   int           // connections
	memory int           // bytes
	within time.Duration // from the connection to its first authenticated call

	mu   sync.Mutex
	list list.List // of *guest, the oldest first
	used int       // bytes of memory
}

// mostStrangers leaves three quarters of the descriptors to authenticated connections and to the daemon's own work.
func mostStrangers() int { return int(min(max(descriptors()/4, 16), 4096)) }

// descriptors returns how many descriptors this process may have.
func descriptors() uint64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 256
	}
	return limit.Cur
}

// guest is one connection.
type guest struct {
	net.Conn
	of   *strangers
	late *time.Timer
	free atomic.Bool // authenticated: what it sends is not counted

	at   *list.Element // nil: authenticated, or closed; this and sent under of.mu
	sent int           // bytes
}

// guarded is a listener whose connections are unauthenticated at first.
type guarded struct {
	net.Listener
	strangers *strangers
}

// Accept closes the oldest unauthenticated connection if there is no room or no descriptor for a new one.
func (g *guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err == nil {
			return g.strangers.add(c), nil
		}
		if !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) || !g.strangers.dropOldest() {
			return nil, err // gRPC tries again, later and later
		}
	}
}

func (s *strangers) add(c net.Conn) *guest {
	g := &guest{Conn: c, of: s}
	s.mu.Lock()
	g.at = s.list.PushBack(g)
	g.late = time.AfterFunc(s.within, func() {
		if g.known() {
			g.Conn.Close()
		}
	})
	s.used += strangerCost
	s.mu.Unlock()
	s.fit()
	return g
}

// fit closes the oldest connections until the others are within the bounds.
func (s *strangers) fit() {
	for {
		s.mu.Lock()
		full := s.list.Len() > s.most || s.used > s.memory
		s.mu.Unlock()
		if !full || !s.dropOldest() {
			return
		}
	}
}

// dropOldest says whether there was an unauthenticated connection to close.
func (s *strangers) dropOldest() bool {
	s.mu.Lock()
	first := s.list.Front()
	if first != nil {
		s.remove(first.Value.(*guest))
	}
	s.mu.Unlock()
	if first == nil {
		return false
	}
	first.Value.(*guest).Conn.Close()
	return true
}

// remove takes a connection off the list. Under mu.
func (s *strangers) remove(g *guest) {
	g.late.Stop()
	g.free.Store(true)
	s.list.Remove(g.at)
	s.used -= strangerCost + g.sent
	g.at = nil
}

// known notes that the connection is authenticated, or is no more, and says whether it counted as unauthenticated until now.
func (g *guest) known() bool {
	g.of.mu.Lock()
	defer g.of.mu.Unlock()
	if g.at == nil {
		return false
	}
	g.of.remove(g)
	return true
}

// errStranger ends a connection that has sent too much without a credential.
var errStranger = errors.New("too many bytes before the first authenticated call")

// Read reads; while the connection is unauthenticated, what it reads is bounded and counted.
func (g *guest) Read(b []byte) (int, error) {
	if g.free.Load() {
		return g.Conn.Read(b)
	}
	g.of.mu.Lock()
	left := strangerBytes - g.sent
	g.of.mu.Unlock()
	if left == 0 {
		return 0, errStranger
	}
	n, err := g.Conn.Read(b[:min(len(b), left)])
	g.of.mu.Lock()
	if g.at != nil {
		g.sent += n
		g.of.used += n
	}
	g.of.mu.Unlock()
	g.of.fit()
	return n, err
}

// Close closes the connection.
func (g *guest) Close() error {
	g.known()
	return g.Conn.Close()
}
