package zygote

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The page of worker/page.h, byte for byte. TestMessagesMatchC compares the two.
const (
	pageSize    = 4096
	pagePhase   = 56  // offset of dp_worker_page.phase
	pageGone    = 60  // offset of dp_worker_page.client_gone
	pageBegun   = 240 // offset of dp_worker_page.begun
	pageOverlay = 248 // offset of dp_worker_page.overlay_ns
	pageDeath   = 256 // offset of dp_worker_page.death
	deathText   = 40  // offset of dp_worker_death.text
	textMax     = 3584
	deathNoted  = 0x44454144
	deathTraced = 0x44454145
	overflowed  = 1 // DP_DEATH_STACK_OVERFLOW
	byItself    = 2 // DP_DEATH_BY_ITSELF
)

// Counters are a worker's own counters. User code can forge them. So they serve as information, and to charge the tenant
// whose code it is, but never for more than the clock allows.
type Counters struct {
	Calls    uint64 // functions that returned
	Refused  uint64 // requests that were malformed
	Failed   uint64 // of Calls: failed, or the result was too large
	BytesIn  uint64 // payload
	BytesOut uint64 // results
}

// since returns what was counted after b; 0 for a counter that went backwards.
func (c Counters) since(b *Counters) Counters {
	less := func(now, then uint64) uint64 { return now - min(now, then) }
	return Counters{Calls: less(c.Calls, b.Calls), Refused: less(c.Refused, b.Refused), Failed: less(c.Failed, b.Failed),
		BytesIn: less(c.BytesIn, b.BytesIn), BytesOut: less(c.BytesOut, b.BytesOut)}
}

// plus returns the sum of two counts.
func (c Counters) plus(b *Counters) Counters {
	return Counters{Calls: c.Calls + b.Calls, Refused: c.Refused + b.Refused, Failed: c.Failed + b.Failed, BytesIn: c.BytesIn + b.BytesIn,
		BytesOut: c.BytesOut + b.BytesOut}
}

// page is the page that a worker shares. The worker may write it at any time, and no process can shrink it.
type page struct {
	mu  sync.Mutex
	mem []byte // a copy once the worker is dead
	fd  int    // for the program that takes over this process; -1 once the worker is dead
}

// newPage returns the page and its descriptor for the worker, which the caller closes.
func newPage() (*page, int, error) {
	fd, err := fixedMemfd("rfaas-page", pageSize, unix.F_SEAL_SEAL)
	if err != nil {
		return nil, -1, err
	}
	theirs, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		unix.Close(fd)
		return nil, -1, fmt.Errorf("page of a worker: %w", err)
	}
	p, err := openPage(fd)
	if err != nil {
		unix.Close(theirs)
		return nil, -1, err
	}
	return p, theirs, nil
}

// openPage maps the page of a descriptor, which it takes over.
func openPage(fd int) (*page, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil && st.Size != pageSize {
		err = unix.EINVAL
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(fd, 0, pageSize, unix.PROT_READ, unix.MAP_SHARED)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("page of a worker: %w", err)
	}
	return &page{mem: mem, fd: fd}, nil
}

// freeze copies the page and unmaps the shared memory, which a process that the worker left behind may still write.
func (p *page) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	mem := p.mem
	p.mem = append(make([]byte, 0, pageSize), mem...)
	unix.Munmap(mem)
	unix.Close(p.fd)
	p.fd = -1
}

// share returns another descriptor of the shared memory, which the caller closes.
func (p *page) share() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fd < 0 {
		return -1, errors.New("the worker has ended")
	}
	return unix.FcntlInt(uintptr(p.fd), unix.F_DUPFD_CLOEXEC, 3)
}

// word reads the i-th 8-byte word. Under mu.
func (p *page) word(i int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.mem[8*i])))
}

// running returns the word that identifies the present call, and the index of its function. ok is false between calls.
func (p *page) running() (call uint64, function int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	call = p.word(0)
	return call, int(call & 0xffff), call>>16 > p.word(1)
}

// calls returns how many functions have returned.
func (p *page) calls() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.word(1)
}

// Phases of a worker's start (worker/page.h).
const (
	phaseLeased  = 1
	phaseLoading = 2
	phaseLoaded  = 3
)

// phase returns the phase of the start. It is reliable until user code runs, which can forge it.
func (p *page) phase() uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return binary.LittleEndian.Uint32(p.mem[pagePhase:])
}

// begun reports whether the worker runs. A worker of an earlier version sends STARTED instead.
func (p *page) begun() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(&p.mem[pageBegun]))) != 0
}

// clientGone reports whether the worker has noted the end of its client's process.
func (p *page) clientGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(&p.mem[pageGone]))) != 0
}

// overlay returns how long the worker has laid its seed over its memory. User code can forge it.
func (p *page) overlay() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Duration(p.word(pageOverlay / 8))
}

func (p *page) counters() Counters {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Counters{Calls: p.word(1), Refused: p.word(2), Failed: p.word(3), BytesIn: p.word(4), BytesOut: p.word(5)}
}

// death is what a worker wrote of its end.
type death struct {
	noted    bool
	signal   unix.Signal // 0: exit was called
	code     int32
	errno    unix.Errno
	address  uint64
	sender   uint32
	overflow bool
	byItself bool
	text     []byte
}

// death reads the record of a worker that is dead.
func (p *page) death() death {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := append([]byte(nil), p.mem[pageDeath:]...)
	le := binary.LittleEndian
	state := le.Uint32(b)
	if state != deathNoted && state != deathTraced {
		return death{}
	}
	return death{
		noted:    true,
		signal:   unix.Signal(int32(le.Uint32(b[4:]))),
		code:     int32(le.Uint32(b[8:])),
		errno:    unix.Errno(le.Uint32(b[12:])),
		address:  le.Uint64(b[16:]),
		sender:   le.Uint32(b[24:]),
		overflow: le.Uint32(b[28:])&overflowed != 0,
		byItself: le.Uint32(b[28:])&byItself != 0,
		text:     b[deathText : deathText+min(le.Uint32(b[32:]), textMax)],
	}
}
