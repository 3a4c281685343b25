package dataplane

/*
#include "dp_raw.h"
*/
import "C"

import (
	"context"
	"fmt"
	"math"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Access is what a peer may do with memory.
type Access uint32

// The rights. A peer with RemoteAtomic may add to aligned words of 8 bytes.
const (
	RemoteRead   Access = C.DP_REMOTE_READ
	RemoteWrite  Access = C.DP_REMOTE_WRITE
	RemoteAtomic Access = C.DP_REMOTE_ATOMIC
)

// Limits of a Conn.
const (
	MaxExposed = C.DP_EXPOSE_MAX     // regions
	MaxAdds    = C.DP_RAW_BATCH      // of one FetchAdd
	MaxPosted  = C.DP_RAW_POSTED_MAX // bytes of one Post
)

// Domain is a protection domain: on verbs a peer reaches the memory of the domain that its connection is in, and no other.
// Safe for concurrent use.
type Domain struct {
	c      *C.dp_domain
	thread *thread // of the device
}

// NewDomain makes a domain.
func (d *Device) NewDomain() (*Domain, error) {
	dom := Domain{thread: d.thread}
	var e C.dp_error
	if C.dp_domain_create(d.c, &dom.c, &e) != 0 {
		return nil, cError("create domain", &e)
	}
	return &dom, nil
}

// Close frees the domain; its connections and memory must be closed.
func (d *Domain) Close() {
	C.dp_domain_destroy(d.c)
	d.c = nil
}

// Memory is registered memory outside the Go heap that peers may reach.
type Memory struct {
	c   *C.dp_mem
	own []byte // mapping of a file, or nil
}

// Ref is what a peer needs to reach memory.
type Ref struct {
	Addr uint64
	Key  uint32
	Size uint64
}

// Alloc allocates size bytes of zeroed, page-aligned memory, which peers may reach as access says.
func (d *Domain) Alloc(size uint64, access Access) (*Memory, error) {
	var m Memory
	var e C.dp_error
	if C.dp_mem_alloc(d.c, C.uint64_t(size), C.uint32_t(access), &m.c, &e) != 0 {
		return nil, cError("allocate memory", &e)
	}
	return &m, nil
}

// Window makes size bytes at offset of whole reachable by peers of this domain, with rights of their own. whole must
// stay until the window is freed; on verbs it may be of any device.
func (d *Domain) Window(whole *Memory, offset, size uint64, access Access) (*Memory, error) {
	var m Memory
	var e C.dp_error
	if C.dp_mem_window(d.c, whole.c, C.uint64_t(offset), C.uint64_t(size), C.uint32_t(access), &m.c, &e) != 0 {
		return nil, cError("window of memory", &e)
	}
	return &m, nil
}

// File makes a memory file of size bytes readable by peers, without a copy, except on verbs before Linux 6.2. It must be sealed against
// shrinking and growing. The caller may close f.
func (d *Domain) File(f *os.File, size uint64) (*Memory, error) {
	if size == 0 || size > math.MaxInt {
		return nil, &Error{Op: "register file", Status: StatusInvalid, Detail: fmt.Sprintf("%d bytes", size)}
	}
	var m Memory
	var e C.dp_error
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	failed := false
	if cerr := raw.Control(func(fd uintptr) {
		if m.own, err = unix.Mmap(int(fd), 0, int(size), unix.PROT_READ, unix.MAP_SHARED); err == nil {
			failed = C.dp_mem_file(d.c, C.int(fd), unsafe.Pointer(&m.own[0]), C.uint64_t(size), &m.c, &e) != 0
		}
	}); cerr != nil {
		return nil, cerr
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("map a file of %d bytes: %w", size, err)
	case failed:
		_ = unix.Munmap(m.own)
		return nil, cError("register file", &e)
	}
	return &m, nil
}

// Shared registers a memory file of size bytes, which other processes may have mapped too, with the given rights. It must be sealed against shrinking. The
// caller may close f. Not on shm.
func (d *Domain) Shared(f *os.File, size uint64, access Access) (*Memory, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var m Memory
	if cerr := raw.Control(func(fd uintptr) {
		m.own, err = unix.Mmap(int(fd), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, fmt.Errorf("map a file of %d bytes: %w", size, err)
	}
	var e C.dp_error
	if C.dp_mem_register(d.c, unsafe.Pointer(&m.own[0]), C.uint64_t(size), C.uint32_t(access), &m.c, &e) != 0 {
		_ = unix.Munmap(m.own)
		return nil, cError("register memory", &e)
	}
	return &m, nil
}

// Bytes is the memory, valid until Free. Peers change it as they may.
func (m *Memory) Bytes() []byte { return unsafe.Slice((*byte)(m.c.addr), int(m.c.size)) }

// Ref is what a peer needs.
func (m *Memory) Ref() Ref {
	return Ref{Addr: uint64(uintptr(m.c.addr)), Key: uint32(m.c.rkey), Size: uint64(m.c.size)}
}

// Free takes the memory away. No connection may expose it any more.
func (m *Memory) Free() {
	C.dp_mem_free(m.c)
	m.c = nil
	if m.own != nil {
		_ = unix.Munmap(m.own)
		m.own = nil
	}
}

// Conn is a connection for control: remote operations that are waited for one by one. After an error it is of no use any more.
// Safe for concurrent use; operations take turns. An *Error with StatusInvalid means that the peer refused: nothing happened.
// With another status the operation may have happened.
type Conn struct {
	mu     sync.Mutex
	c      *C.dp_raw // nil after Close
	thread *thread   // of the device
}

// ConnTCPBytes is the most memory that a Conn on tcp uses.
const ConnTCPBytes = C.DP_RAW_TCP_BYTES

// NewConn makes a connection that is not connected yet. The peer may reach the exposed memory, which is of this domain.
func (d *Domain) NewConn(expose ...*Memory) (*Conn, error) { return d.newConn(false, expose) }

// NewBulkConn is NewConn for connections by which a peer reads much. Both sides use it.
func (d *Domain) NewBulkConn(expose ...*Memory) (*Conn, error) { return d.newConn(true, expose) }

func (d *Domain) newConn(bulk bool, expose []*Memory) (*Conn, error) {
	if len(expose) > MaxExposed {
		return nil, &Error{Op: "create connection", Status: StatusInvalid, Detail: fmt.Sprintf("%d exposed regions, at most %d", len(expose), MaxExposed)}
	}
	var regions [MaxExposed]*C.dp_mem
	for i, m := range expose {
		regions[i] = m.c
	}
	c := Conn{thread: d.thread}
	var e C.dp_error
	var st C.int
	if bulk {
		st = C.dp_raw_create_bulk(d.c, &regions[0], C.uint32_t(len(expose)), &c.c, &e)
	} else {
		st = C.dp_raw_create(d.c, &regions[0], C.uint32_t(len(expose)), &c.c, &e)
	}
	if st != 0 {
		return nil, cError("create connection", &e)
	}
	return &c, nil
}

// Blob is what the peer needs to connect.
func (c *Conn) Blob() ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil {
		return nil, closedConn("export connection")
	}
	blob := make([]byte, C.DP_BLOB_MAX)
	n := C.uint32_t(len(blob))
	var e C.dp_error
	if C.dp_raw_export(c.c, unsafe.Pointer(&blob[0]), &n, &e) != 0 {
		return nil, cError("export connection", &e)
	}
	return blob[:n], nil
}

// Connect takes the peer's blob. Both sides connect, in any order. The first of them waits for the other's process, on shm for
// 2 s at most, and holds an operating system's thread for as long. It gives up when ctx ends. A Conn that failed to connect
// can only be closed.
func (c *Conn) Connect(ctx context.Context, blob []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil {
		return closedConn("connect")
	}
	cancelled := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		C.dp_raw_cancel(c.c)
		close(cancelled)
	})
	var e C.dp_error
	failed := C.dp_raw_connect(c.c, unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0
	if !stop() {
		<-cancelled // it uses c.c
	}
	switch {
	case failed && ctx.Err() != nil:
		return fmt.Errorf("%w: %w", cError("connect", &e), context.Cause(ctx))
	case failed:
		return cError("connect", &e)
	}
	return nil
}

// Close ends the connection. What was under way may still happen at the peer.
func (c *Conn) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	C.dp_raw_destroy(c.c)
	c.c = nil
}

func closedConn(op string) error {
	return &Error{Op: op, Status: StatusConnection, Detail: "the connection is closed"}
}

// do runs an operation with the connection locked.
func (c *Conn) do(op string, f func(r *C.dp_raw) C.int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil {
		return closedConn(op)
	}
	var st Status
	c.thread.do(func() { st = Status(f(c.c)) })
	if st != OK {
		return &Error{Op: op, Status: st}
	}
	return nil
}

// Err looks whether the peer still exists and returns why the connection is of no use, if so.
func (c *Conn) Err() error {
	return c.do("remote memory", func(r *C.dp_raw) C.int { return C.dp_raw_broken(r) })
}

func deadline(timeout time.Duration) C.int64_t { return C.int64_t(Now() + int64(timeout)) }

// Read copies len(b) bytes of the peer's memory from an address on.
func (c *Conn) Read(b []byte, addr uint64, key uint32, timeout time.Duration) error {
	return c.do("remote read", func(r *C.dp_raw) C.int {
		return C.dp_raw_read(r, unsafe.Pointer(unsafe.SliceData(b)), C.uint64_t(len(b)), C.uint64_t(addr), C.uint32_t(key), deadline(timeout))
	})
}

// Part is a part of the peer's memory.
type Part struct {
	Addr, Size uint64
	Key        uint32
}

// ReadParts reads parts of the peer's memory, with several reads under way at a time. b gets their bytes, one part after the other, and is as large as all of them.
func (c *Conn) ReadParts(b []byte, parts []Part, timeout time.Duration) error {
	list, left := make([]C.dp_raw_part, 0, len(parts)), uint64(len(b))
	for _, p := range parts {
		if p.Size == 0 || p.Size > left {
			return &Error{Op: "remote read", Status: StatusInvalid, Detail: fmt.Sprintf("a part of %d bytes, of which %d are left in the buffer", p.Size, left)}
		}
		left -= p.Size
		list = append(list, C.dp_raw_part{addr: C.uint64_t(p.Addr), len: C.uint64_t(p.Size), rkey: C.uint32_t(p.Key)})
	}
	if left > 0 {
		return &Error{Op: "remote read", Status: StatusInvalid, Detail: fmt.Sprintf("%d bytes of the buffer belong to no part", left)}
	}
	return c.do("remote read", func(r *C.dp_raw) C.int {
		return C.dp_raw_read_parts(r, unsafe.Pointer(unsafe.SliceData(b)), C.uint32_t(len(list)), unsafe.SliceData(list), deadline(timeout))
	})
}

// Write copies b to the peer's memory.
func (c *Conn) Write(b []byte, addr uint64, key uint32, timeout time.Duration) error {
	return c.do("remote write", func(r *C.dp_raw) C.int {
		return C.dp_raw_write(r, unsafe.Pointer(unsafe.SliceData(b)), C.uint64_t(len(b)), C.uint64_t(addr), C.uint32_t(key), deadline(timeout))
	})
}

// WriteRing copies b, which has at most 4 KiB, to the peer's memory, and then rings the bell of the peer's server (ServeAndRing, verbs).
func (c *Conn) WriteRing(b []byte, addr uint64, key uint32, timeout time.Duration) error {
	return c.do("remote write", func(r *C.dp_raw) C.int {
		return C.dp_raw_write_ring(r, unsafe.Pointer(unsafe.SliceData(b)), C.uint32_t(len(b)), C.uint64_t(addr), C.uint32_t(key), deadline(timeout))
	})
}

// CompareSwap sets a word of the peer's to desired if it is expected. swapped: it was.
func (c *Conn) CompareSwap(addr uint64, key uint32, expected, desired uint64, timeout time.Duration) (swapped bool, err error) {
	var old C.uint64_t
	err = c.do("remote compare-and-swap", func(r *C.dp_raw) C.int {
		return C.dp_raw_compare_swap(r, C.uint64_t(addr), C.uint32_t(key), C.uint64_t(expected), C.uint64_t(desired), &old, deadline(timeout))
	})
	return err == nil && uint64(old) == expected, err
}

// Post is a Write of at most MaxPosted bytes that is not waited for. ErrBusy: too many are under way.
func (c *Conn) Post(b []byte, addr uint64, key uint32) error {
	return c.do("remote write", func(r *C.dp_raw) C.int {
		return C.dp_raw_post(r, unsafe.Pointer(unsafe.SliceData(b)), C.uint32_t(min(len(b), MaxPosted+1)), C.uint64_t(addr), C.uint32_t(key))
	})
}

// Posted is how many Posts are still under way.
func (c *Conn) Posted() (n int, err error) {
	err = c.do("remote write", func(r *C.dp_raw) C.int {
		n = int(C.dp_raw_reap(r))
		return C.int(min(n, 0))
	})
	return max(n, 0), err
}

// Add is an addition to a word of the peer's.
type Add struct {
	Addr  uint64
	Value uint64
	Old   uint64 // result: what the word was before
}

// FetchAdd does up to MaxAdds additions in their order. done is the number of additions that are known to have been executed. Without an
// error, these are all of them. After an error, each of the others may have been executed.
func (c *Conn) FetchAdd(adds []Add, key uint32, timeout time.Duration) (done int, err error) {
	if len(adds) > MaxAdds {
		return 0, &Error{Op: "remote fetch-and-add", Status: StatusInvalid, Detail: fmt.Sprintf("%d additions, at most %d", len(adds), MaxAdds)}
	}
	var addr, value, old [MaxAdds]C.uint64_t
	for i, a := range adds {
		addr[i], value[i] = C.uint64_t(a.Addr), C.uint64_t(a.Value)
	}
	var n C.uint32_t
	err = c.do("remote fetch-and-add", func(r *C.dp_raw) C.int {
		return C.dp_raw_fetch_add(r, C.uint32_t(len(adds)), &addr[0], C.uint32_t(key), &value[0], &old[0], &n, deadline(timeout))
	})
	for i := range int(n) {
		adds[i].Old = uint64(old[i])
	}
	return int(n), err
}
