package control

import (
	"container/list"
	"errors"
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// strangers are the connections of a port on which nobody has said yet who he is: there is room for some, and newcomers drop the
// oldest. So whoever connects without a credential, however often, takes no descriptors that the daemon needs, and
// who has one is in the way of nobody as soon as its first call came through the gate.
type strangers struct {
	most int

	mu   sync.Mutex
	list list.List // of *guest, the oldest first
}

// mostStrangers leaves three quarters of the descriptors to those who are known and to the daemon's own work.
func mostStrangers() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 64
	}
	return int(min(max(limit.Cur/4, 16), 4096))
}

// guest is one connection.
type guest struct {
	net.Conn
	of *strangers
	at *list.Element // nil: known, or closed; under of.mu
}

// guarded is a listener whose connections are strangers at first.
type guarded struct {
	net.Listener
	strangers *strangers
}

// Accept makes room for the newcomer if there is none.
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
	full := s.list.Len() > s.most
	s.mu.Unlock()
	if full {
		s.dropOldest()
	}
	return g
}

// dropOldest says whether there was a stranger to drop.
func (s *strangers) dropOldest() bool {
	s.mu.Lock()
	first := s.list.Front()
	if first != nil {
		s.list.Remove(first)
		first.Value.(*guest).at = nil
	}
	s.mu.Unlock()
	if first == nil {
		return false
	}
	first.Value.(*guest).Conn.Close()
	return true
}

// known notes that somebody has proved who he is, or that the connection is no more.
func (g *guest) known() {
	g.of.mu.Lock()
	defer g.of.mu.Unlock()
	if g.at != nil {
		g.of.list.Remove(g.at)
		g.at = nil
	}
}

// Close closes the connection.
func (g *guest) Close() error {
	g.known()
	return g.Conn.Close()
}
