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
	// unauthCost is the memory that is assumed for an unauthenticated connection besides the bytes that it has sent, in
	// bytes: the buffers and goroutines of gRPC and TLS.
	unauthCost = 64 << 10
	// unauthBytes is how many bytes an unauthenticated connection may send. A TLS handshake and the headers of a call
	// need a tenth of it. gRPC reads no more at a time, so a client whose first call has a large message is
	// authenticated before it has sent that much.
	unauthBytes = 64 << 10
)

// unauthConns are the unauthenticated connections of a port. They are bounded in number and in memory: a new
// connection, or more bytes of one, close the oldest. Authenticated connections do not count and are never closed for
// others.
type unauthConns struct {
	most   int           // connections
	memory int           // bytes
	within time.Duration // time limit from the connection to its first authenticated call

	mu   sync.Mutex
	list list.List // of *boundedConn, the oldest first
	used int       // bytes of memory
}

// mostUnauth returns the largest number of unauthenticated connections. It leaves three quarters of the descriptors to
// authenticated connections and to the daemon's own work.
func mostUnauth() int { return int(min(max(descriptors()/4, 16), 4096)) }

// descriptors returns how many descriptors this process may have.
func descriptors() uint64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 256
	}
	return limit.Cur
}

// boundedConn is a connection whose input is bounded until it is authenticated.
type boundedConn struct {
	net.Conn
	of            *unauthConns
	late          *time.Timer
	authenticated atomic.Bool // its bytes are no longer counted

	at   *list.Element // nil: authenticated, or closed; this and sent under of.mu
	sent int           // bytes
}

// guarded is a listener whose connections are unauthenticated at first.
type guarded struct {
	net.Listener
	unauth *unauthConns
}

// Accept closes the oldest unauthenticated connection if the new one exceeds the bounds, or if no descriptor is free.
func (g *guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err == nil {
			return g.unauth.add(c), nil
		}
		if !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) || !g.unauth.dropOldest() {
			return nil, err // gRPC tries again with growing delays
		}
	}
}

func (s *unauthConns) add(c net.Conn) *boundedConn {
	g := &boundedConn{Conn: c, of: s}
	s.mu.Lock()
	g.at = s.list.PushBack(g)
	g.late = time.AfterFunc(s.within, func() {
		if g.known() {
			g.Conn.Close()
		}
	})
	s.used += unauthCost
	s.mu.Unlock()
	s.fit()
	return g
}

// fit closes the oldest connections until the rest is within the bounds.
func (s *unauthConns) fit() {
	for {
		s.mu.Lock()
		full := s.list.Len() > s.most || s.used > s.memory
		s.mu.Unlock()
		if !full || !s.dropOldest() {
			return
		}
	}
}

// dropOldest closes the oldest unauthenticated connection. It returns false if there is none.
func (s *unauthConns) dropOldest() bool {
	s.mu.Lock()
	first := s.list.Front()
	if first != nil {
		s.remove(first.Value.(*boundedConn))
	}
	s.mu.Unlock()
	if first == nil {
		return false
	}
	first.Value.(*boundedConn).Conn.Close()
	return true
}

// remove takes a connection off the list. The caller holds mu.
func (s *unauthConns) remove(g *boundedConn) {
	g.late.Stop()
	g.authenticated.Store(true)
	s.list.Remove(g.at)
	s.used -= unauthCost + g.sent
	g.at = nil
}

// known stops counting a connection as unauthenticated, because it is authenticated or closed. It reports whether it
// was counted until now.
func (g *boundedConn) known() bool {
	g.of.mu.Lock()
	defer g.of.mu.Unlock()
	if g.at == nil {
		return false
	}
	g.of.remove(g)
	return true
}

// errUnauthBytes ends a connection that has sent too many bytes without a credential.
var errUnauthBytes = errors.New("too many bytes before the first authenticated call")

// Read reads from the connection. While the connection is unauthenticated, its bytes are bounded and counted.
func (g *boundedConn) Read(b []byte) (int, error) {
	if g.authenticated.Load() {
		return g.Conn.Read(b)
	}
	g.of.mu.Lock()
	left := unauthBytes - g.sent
	g.of.mu.Unlock()
	if left == 0 {
		return 0, errUnauthBytes
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
func (g *boundedConn) Close() error {
	g.known()
	return g.Conn.Close()
}

// Bound returns a listener for a server that answers one request on each connection: a connection lasts at most for `within`, and may send
// 64 KiB. If there are too many connections, the oldest is closed.
func Bound(l net.Listener, within time.Duration) net.Listener {
	return &guarded{Listener: l, unauth: &unauthConns{most: min(mostUnauth(), 1024), memory: 64 << 20, within: within}}
}
