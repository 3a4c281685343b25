package dataplane

/*
#include "dp_raw.h"
*/
import "C"

// Server is a thread that executes the operations of peers on provider tcp, where no device does. On verbs it only receives their rings. It serves many connections, and sleeps
// while nothing arrives. Safe for concurrent use.
type Server struct{ c *C.dp_raw_server }

// NewServer starts a server. The caller closes it.
func NewServer() (*Server, error) {
	var s Server
	var e C.dp_error
	if C.dp_raw_server_start(&s.c, &e) != 0 {
		return nil, cError("serve remote memory", &e)
	}
	return &s, nil
}

// NewServer starts a server for connections of this device, also if the device has OneThread.
func (d *Device) NewServer() (s *Server, err error) {
	d.thread.do(func() { s, err = NewServer() }) // the new thread has the credentials of this one
	return s, err
}

// Close ends the thread. The connections that it serves must be closed.
func (s *Server) Close() {
	C.dp_raw_server_stop(s.c)
	s.c = nil
}

// Wakes counts how often the thread has woken up.
func (s *Server) Wakes() uint64 { return uint64(C.dp_raw_server_wakes(s.c)) }

// Serve lets a server execute the peer's operations on a connected Conn of provider tcp or verbs, until Close. Then Post, Posted and Err can be
// used, and operations that wait are ErrUnsupported. A peer that breaks the protocol ends its own connection only.
func (c *Conn) Serve(s *Server) error { return c.serve(s, nil) }

// ServeAndRing is Serve. Each time the peer has executed operations, on verbs each time it has called WriteRing, the server also raises and wakes the futex at the start of bell, which stays until
// Close.
func (c *Conn) ServeAndRing(s *Server, bell *uint32) error { return c.serve(s, bell) }

func (c *Conn) serve(s *Server, bell *uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil {
		return closedConn("serve remote memory")
	}
	var e C.dp_error
	failed := false
	c.thread.do(func() { failed = C.dp_raw_serve(c.c, s.c, (*C.uint32_t)(bell), &e) != 0 })
	if failed {
		return cError("serve remote memory", &e)
	}
	return nil
}
