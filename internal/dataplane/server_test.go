package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

func newServer(t *testing.T) *Server {
	t.Helper()
	s, err := NewServer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// hall is memory that one server serves to many peers over tcp. The test accepts their connections and hands them over.
type hall struct {
	t      *testing.T
	l      *net.TCPListener
	dev    *Device
	domain *Domain
	memory *Memory
	server *Server
}

func newHall(t *testing.T) *hall {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	dev, err := Open(TCP, Options{GIDIndex: -1, Handed: true, Advertise: l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	h := &hall{t: t, l: l.(*net.TCPListener), dev: dev}
	h.domain = side{dev, t}.domain()
	h.memory = alloc(t, h.domain, 8192, RemoteRead|RemoteWrite|RemoteAtomic)
	h.server = newServer(t)
	return h
}

// accept reads the hello of the next connection and hands the connection to the device.
func (h *hall) accept() {
	c, err := h.l.AcceptTCP()
	if err != nil {
		h.t.Error(err)
		return
	}
	defer c.Close()
	hello := make([]byte, HelloSize)
	if _, err := io.ReadFull(c, hello); err != nil {
		h.t.Error(err)
	} else if err := h.dev.Hand(c, hello); err != nil {
		h.t.Error(err)
	}
}

// conn makes a connection through which peers reach the memory.
func (h *hall) conn() (c *Conn, blob []byte) {
	h.t.Helper()
	c, err := h.domain.NewConn(h.memory)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(c.Close)
	if blob, err = c.Blob(); err != nil {
		h.t.Fatal(err)
	}
	return c, blob
}

// join connects a peer to a new served connection.
func (h *hall) join() (mine, peer *Conn) {
	h.t.Helper()
	dev, err := Open(TCP, Options{GIDIndex: -1, ActiveOnly: true})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(dev.Close)
	mine, blob := h.conn()
	peer, err = side{dev, h.t}.domain().NewConn()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(peer.Close)
	theirs, err := peer.Blob()
	if err != nil {
		h.t.Fatal(err)
	}
	go h.accept()
	if err := errors.Join(peer.Connect(h.t.Context(), blob), mine.Connect(h.t.Context(), theirs), mine.Serve(h.server)); err != nil {
		h.t.Fatal(err)
	}
	return mine, peer
}

// The thread wakes up at most once for each operation. Connections on which nothing arrives never wake it.
func TestServerSleepsWhileNothingArrives(t *testing.T) {
	h := newHall(t)
	idle := make([]*Conn, 50)
	for i := range idle {
		idle[i], _ = h.join()
	}
	_, busy := h.join()
	ref := h.memory.Ref()
	buf := make([]byte, 64)
	read := func(n int) {
		for range n {
			if err := busy.Read(buf, ref.Addr, ref.Key, soon); err != nil {
				t.Fatal(err)
			}
		}
	}
	read(1)
	before := h.server.Wakes()
	read(200)
	if n := h.server.Wakes() - before; n < 1 || n > 201 {
		t.Errorf("200 reads woke the thread %d times", n)
	}
	before = h.server.Wakes()
	for range 100 { // what the owner does meanwhile
		for _, c := range idle {
			if err := c.Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := h.server.Wakes() - before; n > 1 { // 1: the end of the last read
		t.Errorf("idle connections woke the thread %d times", n)
	}
}

// The owner posts while peers read: both arrive. Operations that wait are refused.
func TestServerPosts(t *testing.T) {
	h := newHall(t)
	dev, err := Open(TCP, Options{GIDIndex: -1, ActiveOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	d := side{dev, t}.domain()
	box := alloc(t, d, 64, RemoteWrite)
	mine, blob := h.conn()
	peer, err := d.NewConn(box)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(peer.Close)
	theirs, err := peer.Blob()
	if err != nil {
		t.Fatal(err)
	}
	go h.accept()
	if err := errors.Join(peer.Connect(t.Context(), blob), mine.Connect(t.Context(), theirs), mine.Serve(h.server)); err != nil {
		t.Fatal(err)
	}
	if err := mine.Read(make([]byte, 8), box.Ref().Addr, box.Ref().Key, soon); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a read on a served connection: %v", err)
	}
	ref := h.memory.Ref()
	buf := make([]byte, 64)
	for i := byte(1); i <= 100; i++ {
		line := bytes.Repeat([]byte{i}, 64)
		for {
			err := mine.Post(line, box.Ref().Addr, box.Ref().Key)
			if err == nil {
				break
			}
			if !errors.Is(err, ErrBusy) {
				t.Fatal(err)
			}
			if err := peer.Read(buf, ref.Addr, ref.Key, soon); err != nil { // the peer polls
				t.Fatal(err)
			}
		}
	}
	for end := time.Now().Add(soon); box.Bytes()[63] != 100; {
		if err := peer.Read(buf, ref.Addr, ref.Key, soon); err != nil || time.Now().After(end) {
			t.Fatalf("the last post has not arrived: %v, %v", box.Bytes()[63], err)
		}
	}
}

// frame is the head of a frame of tcp (docs/PROTOCOL.md).
func frame(op byte, size, key uint32, addr uint64) []byte {
	b := make([]byte, 24)
	b[0] = op
	binary.LittleEndian.PutUint32(b[4:], size)
	binary.LittleEndian.PutUint32(b[12:], key)
	binary.LittleEndian.PutUint64(b[16:], addr)
	return b
}

// A peer that breaks the protocol, or that takes no answers, loses its own connection. The others are served, and memory is unchanged.
func TestServerHostilePeers(t *testing.T) {
	h := newHall(t)
	_, good := h.join()
	ref := h.memory.Ref()
	flood := bytes.Repeat(frame(3, 4096, ref.Key, ref.Addr), 4096) // 16 MiB of answers
	cases := map[string][]byte{
		"no frame":               bytes.Repeat([]byte{0xff}, 64),
		"wrong key":              frame(3, 8, ref.Key+1, ref.Addr),
		"behind the end":         frame(3, 8, ref.Key, ref.Addr+8185),
		"before the start":       frame(3, 8, ref.Key, ref.Addr-8),
		"much":                   frame(3, 1<<31, ref.Key, ref.Addr),
		"unaligned add":          append(frame(4, 8, ref.Key, ref.Addr+1), 1, 0, 0, 0, 0, 0, 0, 0),
		"unknown operation":      frame(9, 8, ref.Key, ref.Addr),
		"answer without request": frame(5, 0, 0, 0),
		"immediate":              append(frame(2, 8, ref.Key, ref.Addr), make([]byte, 8)...),
		"takes no answers":       flood,
	}
	for name, bytes := range cases {
		t.Run(name, func(t *testing.T) {
			mine, blob := h.conn()
			token, _ := BlobToken(blob)
			hello, theirs := make([]byte, HelloSize), make([]byte, 128)
			copy(hello, "RFHT\x01\x00")
			copy(hello[8:], token[:])
			copy(theirs, "RFQT\x01\x00\x03")
			for i := range token {
				hello[24+i], theirs[8+i] = 7, 7
			}
			c, err := net.Dial("tcp", h.l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Write(hello); err != nil {
				t.Fatal(err)
			}
			h.accept()
			if err := errors.Join(mine.Connect(t.Context(), theirs), mine.Serve(h.server)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, hello); err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(soon))
			_, _ = c.Write(bytes) // the server may close the connection before the last byte
			testkit.Eventually(t, "the connection has ended", func() bool { return mine.Err() != nil })
			var e *Error
			if err := mine.Err(); !errors.As(err, &e) || e.Status != StatusProtocol {
				t.Errorf("ended by %v", err)
			}
			buf := make([]byte, 8)
			if err := good.Read(buf, ref.Addr, ref.Key, soon); err != nil || binary.LittleEndian.Uint64(buf) != 0 {
				t.Errorf("another peer reads %x, %v", buf, err)
			}
		})
	}
}
