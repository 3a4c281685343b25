package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

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
	t       *testing.T
	l       *net.TCPListener
	dev     *Device
	domain  *Domain
	memory  *Memory
	server  *Server
	encrypt int     // of both sides
	bell    *uint32 // of each connection, or nil
}

func newHall(t *testing.T, encrypt int) *hall {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	dev, err := Open(TCP, Options{GIDIndex: -1, Handed: true, Advertise: l.Addr().String(), Encrypt: encrypt})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	h := &hall{t: t, l: l.(*net.TCPListener), dev: dev, encrypt: encrypt}
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
	dev, err := Open(TCP, Options{GIDIndex: -1, ActiveOnly: true, Encrypt: h.encrypt})
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
	if err := errors.Join(peer.Connect(h.t.Context(), blob), mine.Connect(h.t.Context(), theirs), mine.ServeAndRing(h.server, h.bell)); err != nil {
		h.t.Fatal(err)
	}
	return mine, peer
}

// both runs a test without and with encryption.
func both(t *testing.T, test func(t *testing.T, encrypt int)) {
	t.Run("plain", func(t *testing.T) { test(t, EncryptOff) })
	t.Run("encrypted", func(t *testing.T) { test(t, EncryptRequire) })
}

// The thread wakes up at most once for each operation. Connections on which nothing arrives never wake it.
func TestServerSleepsWhileNothingArrives(t *testing.T) {
	both(t, testServerSleeps)
}

func testServerSleeps(t *testing.T, encrypt int) {
	h := newHall(t, encrypt)
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
	both(t, testServerPosts)
}

func testServerPosts(t *testing.T, encrypt int) {
	h := newHall(t, encrypt)
	dev, err := Open(TCP, Options{GIDIndex: -1, ActiveOnly: true, Encrypt: encrypt})
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
	if err := errors.Join(peer.Connect(t.Context(), blob), mine.Connect(t.Context(), theirs), mine.ServeAndRing(h.server, h.bell)); err != nil {
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

// forgedPeer is a peer that the test itself implements.
type forgedPeer struct {
	net.Conn
	t      *testing.T
	h      *hall
	mine   *Conn     // the other end, which is served
	blobs  [2][]byte // of the peer, and of mine
	hellos [2][]byte // the same
}

// forge connects a peer to a new served connection.
func (h *hall) forge(t *testing.T) *forgedPeer {
	t.Helper()
	p := &forgedPeer{t: t, h: h, hellos: [2][]byte{make([]byte, HelloSize), make([]byte, HelloSize)}}
	p.mine, p.blobs[1] = h.conn()
	token, _ := BlobToken(p.blobs[1])
	blob := make([]byte, 128)
	copy(blob, "RFQT\x01\x00\x03")
	copy(p.hellos[0], "RFHT\x01\x00")
	copy(p.hellos[0][8:], token[:])
	for i := range token {
		p.hellos[0][24+i], blob[8+i] = 7, 7
		if h.encrypt != EncryptOff {
			blob[104+i] = byte(i + 1)
		}
	}
	blob[120] = byte(h.encrypt)
	p.blobs[0] = blob
	var err error
	if p.Conn, err = net.Dial("tcp", h.l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	_ = p.SetDeadline(time.Now().Add(soon))
	if _, err := p.Write(p.hellos[0]); err != nil {
		t.Fatal(err)
	}
	h.accept()
	if err := errors.Join(p.mine.Connect(t.Context(), blob), p.mine.ServeAndRing(h.server, h.bell)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(p, p.hellos[1]); err != nil {
		t.Fatal(err)
	}
	return p
}

// loses waits until the server has ended the connection for a violation. Then another peer still reads zeros.
func (p *forgedPeer) loses(good *Conn) {
	p.t.Helper()
	testkit.Eventually(p.t, "the connection has ended", func() bool { return p.mine.Err() != nil })
	var e *Error
	if err := p.mine.Err(); !errors.As(err, &e) || e.Status != StatusProtocol {
		p.t.Errorf("ended by %v", err)
	}
	ref := p.h.memory.Ref()
	buf := make([]byte, 8)
	if err := good.Read(buf, ref.Addr, ref.Key, soon); err != nil || binary.LittleEndian.Uint64(buf) != 0 {
		p.t.Errorf("another peer reads %x, %v", buf, err)
	}
}

// A peer that breaks the protocol, or that takes no answers, loses its own connection. The others are served, and memory is unchanged.
func TestServerHostilePeers(t *testing.T) {
	h := newHall(t, EncryptOff)
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
			p := h.forge(t)
			_, _ = p.Write(bytes) // the server may close the connection before the last byte
			p.loses(good)
		})
	}
}

// A compare-and-swap changes the word only if it has the expected value. After it, the server rings the bell of its connection.
func TestServerCompareSwap(t *testing.T) {
	both(t, func(t *testing.T, encrypt int) {
		h := newHall(t, encrypt)
		bell := (*uint32)(unsafe.Pointer(&h.memory.Bytes()[4096]))
		h.bell = bell
		_, peer := h.join()
		at, key, word := h.memory.Ref().Addr+8, h.memory.Ref().Key, h.memory.Bytes()[8:]
		for i, c := range []struct {
			expected, desired uint64
			swapped           bool
		}{{1, 2, false}, {0, 7, true}, {0, 8, false}, {7, 1 << 63, true}} {
			rung := atomic.LoadUint32(bell)
			swapped, err := peer.CompareSwap(at, key, c.expected, c.desired, time.Minute)
			if err != nil || swapped != c.swapped {
				t.Errorf("step %d: swapped %v, %v", i, swapped, err)
			}
			testkit.Eventually(t, "the bell rings", func() bool { return atomic.LoadUint32(bell) != rung })
		}
		if got := binary.NativeEndian.Uint64(word); got != 1<<63 {
			t.Errorf("the word is %#x", got)
		}
	})
}
