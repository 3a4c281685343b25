package observe

import (
	"container/list"
	"net"
	"net/http"
	"sync"
)

// crowd is a listener with a bounded number of connections. A new connection is always accepted. If there are too many,
// it closes the one that has made no request for the longest time. So slow connections cannot block others.
type crowd struct {
	net.Listener
	most int

	mu   sync.Mutex
	list list.List // of *member, ordered by the last request, the oldest first
}

// member is one connection.
type member struct {
	net.Conn
	of *crowd
	at *list.Element // nil: closed; under of.mu
}

func (c *crowd) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	m := &member{Conn: conn, of: c}
	c.mu.Lock()
	m.at = c.list.PushBack(m)
	var first *member
	if c.list.Len() > c.most {
		first = c.list.Front().Value.(*member)
	}
	c.mu.Unlock()
	if first != nil {
		first.Close()
	}
	return m, nil
}

// Close closes the connection.
func (m *member) Close() error {
	m.of.mu.Lock()
	if m.at != nil {
		m.of.list.Remove(m.at)
		m.at = nil
	}
	m.of.mu.Unlock()
	return m.Conn.Close()
}

// connState is a hook of http.Server: it moves a connection to the back of the list when all headers of a request have
// arrived.
func connState(conn net.Conn, state http.ConnState) {
	if t, ok := conn.(interface{ NetConn() net.Conn }); ok { // TLS
		conn = t.NetConn()
	}
	m, ok := conn.(*member)
	if !ok || state != http.StateActive {
		return
	}
	m.of.mu.Lock()
	defer m.of.mu.Unlock()
	if m.at != nil {
		m.of.list.MoveToBack(m.at)
	}
}
