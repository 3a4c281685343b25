package agent

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// page is the memory that a client shares with the agent. The client may write anything anywhere at any time.
type page struct{ mem []byte }

// mapPage maps the memory file of a client and leaves fd open. The file must be sealed against shrinking, since access
// beyond its end would kill the agent.
func mapPage(fd int) (*page, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	switch {
	case err != nil:
		return nil, fmt.Errorf("shared page: the descriptor is not a memory file (F_GET_SEALS: %w)", err)
	case seals&unix.F_SEAL_SHRINK == 0:
		return nil, fmt.Errorf("shared page: the memory file is not sealed against shrinking (seals %#x, want F_SEAL_SHRINK)", seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("shared page: %w", err)
	}
	if st.Size < protocol.PageSize {
		return nil, fmt.Errorf("shared page: the memory file has %d bytes, want at least %d", st.Size, protocol.PageSize)
	}
	mem, err := unix.Mmap(fd, 0, protocol.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shared page: mmap: %w", err)
	}
	return &page{mem}, nil
}

func (p *page) close() { _ = unix.Munmap(p.mem) }

func (p *page) word(at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&p.mem[at])) }

// events counts the events that were sent.
func (p *page) events() *atomic.Uint32 { return p.word(protocol.OffsetEvents) }

// connection is the number of the connection that the client uses; 0: none.
func (p *page) connection() *atomic.Uint32 { return p.word(protocol.OffsetConnection) }

// line is the line of a lease.
type line struct {
	draining, busy               *atomic.Uint32
	key, claimed, leaseID, until *atomic.Uint64
}

func (p *page) line(key uint64) line {
	at := protocol.OffsetLines + protocol.Line(key)*protocol.LineSize
	long := func(offset int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&p.mem[at+offset])) }
	return line{p.word(at + protocol.OffsetDraining), p.word(at + protocol.OffsetBusy), long(protocol.OffsetKey), long(protocol.OffsetClaimed),
		long(protocol.OffsetLeaseID), long(protocol.OffsetUntil)}
}

// drain sets the flag that makes the client's threads start no more calls in the lease of a key. An earlier agent may have
// set it already. It returns false if another lease uses the line by now, or if the lease is being finished.
func (p *page) drain(key uint64) bool {
	l := p.line(key)
	if l.key.Load() != key || !l.draining.CompareAndSwap(protocol.DrainNot, protocol.DrainSoon) && l.draining.Load() != protocol.DrainSoon {
		return false
	}
	if l.key.Load() != key { // the client has moved the lease after the first check
		l.draining.CompareAndSwap(protocol.DrainSoon, protocol.DrainNot)
		return false
	}
	return true
}

// undrain lets the lease of a key start calls again. A thread of the client has seen the flag that drain set for the lease that used the
// line before, and took this lease for a draining one.
func (p *page) undrain(key uint64) {
	if l := p.line(key); l.key.Load() == key {
		l.draining.CompareAndSwap(protocol.DrainTold, protocol.DrainNot)
	}
}

// left reports whether no thread of the client is inside a draining lease, so that the agent has to finish it. Call it
// after a barrier that follows drain.
func (p *page) left(key uint64) bool {
	l := p.line(key)
	return l.busy.Load() == 0 && l.key.Load() == key && l.draining.CompareAndSwap(protocol.DrainSoon, protocol.DrainTold)
}

const membarrierGlobal = 1 // MEMBARRIER_CMD_GLOBAL

// barriers passes memory barriers on all processors. A barrier takes some milliseconds and a thread, so calls that come
// while one is being passed share the next one.
type barriers struct {
	mu   sync.Mutex // held while a barrier is passed
	next struct {
		sync.Mutex
		turn *turn
	}
}

type turn struct {
	once sync.Once
	err  error
}

// pass returns after a barrier that began after the call.
func (b *barriers) pass() error {
	b.next.Lock()
	if b.next.turn == nil {
		b.next.turn = &turn{}
	}
	t := b.next.turn
	b.next.Unlock()
	t.once.Do(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.next.Lock()
		b.next.turn = nil // later requests need a later barrier
		b.next.Unlock()
		if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
			t.err = errno
		}
	})
	return t.err
}
