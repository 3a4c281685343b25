package client

import (
	"sync"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// sparesMost is how many spare connections a session has at a time, spareBytes what the channel of one may take.
const (
	sparesMost = 4
	spareBytes = 8 << 20
)

// spares are connections of released leases whose workers are gone, made ready for others: memory registered, queue pair reset. The next
// lease with such channels does not make its own. Safe for concurrent use.
type spares struct {
	mu     sync.Mutex
	list   []spare // the oldest first
	closed bool
	resets sync.WaitGroup
}

type spare struct {
	connection
	kind spareKind
}

// spareKind is what connections must have in common to take each other's place.
type spareKind struct {
	dev  *dataplane.Device
	cfg  dataplane.ChannelConfig
	mode dataplane.WaitMode
}

// take returns a spare connection, the one that was put last; false if there is none.
func (s *spares) take(kind spareKind) (connection, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.list) - 1; i >= 0; i-- {
		if c := s.list[i]; c.kind == kind {
			s.list = append(s.list[:i], s.list[i+1:]...)
			return c.connection, true
		}
	}
	return connection{}, false
}

// put takes over connections that nobody uses any more. They are reset in the background.
func (s *spares) put(kind spareKind, all connections) {
	s.mu.Lock()
	defer s.mu.Unlock()
	large := int64(kind.cfg.Depth)*int64(kind.cfg.Eager)+kind.cfg.Bulk > spareBytes
	for i, c := range all {
		if s.closed || large || i >= sparesMost {
			c.close()
			continue
		}
		s.resets.Go(func() { s.reset(spare{c, kind}) })
	}
}

func (s *spares) reset(c spare) {
	if c.ch.Reset() != nil {
		c.close()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.close()
		return
	}
	if s.list = append(s.list, c); len(s.list) > sparesMost {
		s.list[0].close()
		s.list = s.list[1:]
	}
}

// close closes all; what is put later is closed at once.
func (s *spares) close() {
	s.mu.Lock()
	s.closed = true
	list := s.list
	s.list = nil
	s.mu.Unlock()
	for _, c := range list {
		c.close()
	}
	s.resets.Wait()
}
