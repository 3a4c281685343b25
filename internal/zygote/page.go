package zygote

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The page of worker/page.h, byte for byte. TestMessagesMatchC compares the two.
const (
	pageSize    = 4096
	pagePhase   = 56  // offset of dp_worker_page.phase
	pageGone    = 60  // of client_gone
	pageDeath   = 256 // of dp_worker_death
	deathText   = 40  // offset in it
	textMax     = 3584
	deathNoted  = 0x44454144
	deathTraced = 0x44454145
	overflowed  = 1 // a stack
	byItself    = 2 // the signal was sent
)

// Counters are what a worker says of its work. User code can write there, so they are good for information and for
// charging a tenant whose code it is, and never above what the clock allows.
type Counters struct {
	Calls    uint64 // functions that returned
	Refused  uint64 // requests that were malformed
	Failed   uint64 // of Calls: failed, or the result was too large
	BytesIn  uint64 // payload
	BytesOut uint64 // results
}

// since is what was counted after b, nothing where a worker has counted backwards.
func (c Counters) since(b *Counters) Counters {
	less := func(now, then uint64) uint64 { return now - min(now, then) }
	return Counters{Calls: less(c.Calls, b.Calls), Refused: less(c.Refused, b.Refused), Failed: less(c.Failed, b.Failed),
		BytesIn: less(c.BytesIn, b.BytesIn), BytesOut: less(c.BytesOut, b.BytesOut)}
}

// page is what a worker shows of itself, in memory that it may write at any time and that nobody can shrink.
type page struct {
	mu  sync.Mutex
	mem []byte // once the worker is dead: a copy
}

// newPage returns the page and the descriptor for the worker, which is the caller's.
func newPage() (*page, int, error) {
	fd, err := fixedMemfd("rfaas-page", pageSize)
	if err != nil {
		return nil, -1, err
	}
	mem, err := unix.Mmap(fd, 0, pageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, -1, fmt.Errorf("page of a worker: %w", err)
	}
	return &page{mem: mem}, fd, nil
}

// freeze keeps what is there and lets the shared memory go: a process that the worker left behind may still write.
func (p *page) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	mem := p.mem
	p.mem = append(make([]byte, 0, pageSize), mem...)
	unix.Munmap(mem)
}

// word reads the i-th 8-byte word. Under mu.
func (p *page) word(i int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.mem[8*i])))
}

// running is the word that tells the present call, and its function's index. ok is false between calls.
func (p *page) running() (call uint64, function int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	call = p.word(0)
	return call, int(call & 0xffff), call>>16 > p.word(1)
}

// Phases of a worker's start (worker/page.h).
const (
	phaseLeased  = 1
	phaseLoading = 2
	phaseLoaded  = 3
)

// phase is how far a start has come. Good until user code runs, which may say what it likes.
func (p *page) phase() uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return binary.LittleEndian.Uint32(p.mem[pagePhase:])
}

// clientGone reports whether the worker has seen the end of its client's process.
func (p *page) clientGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(&p.mem[pageGone]))) != 0
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
