package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/lease"
)

// An executor with the setting yield-memory lends memory that other programs of the node may need. When the node runs short of it, the executor
// first frees what no lease uses, and then ends leases, the youngest first. It lends its memory again after a quiet time.

const (
	memoryEvery = 200 * time.Millisecond // longest time between two readings of the available memory, for which the kernel has no event
	memorySoon  = 20 * time.Millisecond  // shortest time between two readings
	memoryRate  = 16 << 30               // the most bytes per second that programs are expected to take
	memoryQuiet = 10 * time.Second       // how long enough memory has to be available before the executor lends it again
)

// nextLook returns when to read the available memory again. By then, programs that take memory at memoryRate have not yet used what is above the reserve.
func nextLook(available, reserve uint64) time.Duration {
	above := min(available-min(available, reserve), memoryRate)
	return min(max(time.Duration(above*uint64(time.Second)/memoryRate), memorySoon), memoryEvery)
}

// stallTriggers are events to ask the kernel for, the best first: programs have waited for memory for 0.1 s within 1 s, or for 0.2 s within 2 s.
// Without CAP_SYS_RESOURCE, the kernel accepts only multiples of 2 s. The event comes as soon as they have waited for so long.
var stallTriggers = []string{"some 100000 1000000", "some 200000 2000000"}

// stalls receives the kernel's events of programs that wait for memory (PSI).
type stalls struct {
	psi    int
	closed atomic.Bool
	waiter *os.File // an epoll descriptor for psi: the runtime waits for it, but not for EPOLLPRI
}

// openStalls asks for the events of a pressure file.
func openStalls(path string) (s *stalls, err error) {
	for _, trigger := range stallTriggers {
		if s, err = openStall(path, trigger); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func openStall(path, trigger string) (*stalls, error) {
	psi, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		unix.Close(psi)
		return nil, err
	}
	if _, err = unix.Write(psi, append([]byte(trigger), 0)); err == nil {
		err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, psi, &unix.EpollEvent{Events: unix.EPOLLPRI})
	}
	if err == nil {
		err = unix.SetNonblock(ep, true)
	}
	if err != nil {
		unix.Close(psi)
		unix.Close(ep)
		return nil, fmt.Errorf("%s: trigger %q: %w", path, trigger, err)
	}
	return &stalls{psi: psi, waiter: os.NewFile(uintptr(ep), path)}, nil
}

// watch sends each event until close is called or the kernel has no more events. It never blocks on the receiver.
func (s *stalls) watch(events chan<- struct{}) error {
	c, err := s.waiter.SyscallConn()
	for err == nil {
		var got [1]unix.EpollEvent
		var n int
		var failed error
		err = c.Read(func(fd uintptr) bool {
			n, failed = unix.EpollWait(int(fd), got[:], 0)
			return n != 0 && failed != unix.EINTR
		})
		switch {
		case err != nil:
		case failed != nil:
			err = failed
		case got[0].Events&unix.EPOLLERR != 0:
			err = errors.New("the kernel has ended the trigger")
		default:
			select {
			case events <- struct{}{}:
			default: // one is not handled yet
			}
		}
	}
	if s.closed.Load() {
		return nil
	}
	return err
}

// close ends watch.
func (s *stalls) close() {
	s.closed.Store(true)
	s.waiter.Close()
	unix.Close(s.psi)
}

// memoryReserve returns how much memory of a node other programs must find available; 0: the executor does not watch it.
func memoryReserve(s *config.Executor, total uint64) uint64 {
	switch {
	case s.YieldMemory != 0:
		return uint64(s.YieldMemory)
	case s.YieldAfter != 0:
		return total / 16
	}
	return 0
}

// yieldMemory watches the node's memory until ctx ends. stalled has the kernel's events; nil: there are none.
func (e *Executor) yieldMemory(ctx context.Context, reserve uint64, stalled <-chan struct{}, quiet time.Duration, measure func() (topology.Memory, error)) {
	look := time.NewTimer(0)
	defer look.Stop()
	said := ""
	var last time.Time // when too little memory was last available to lend it again
	for {
		stall := false
		select {
		case <-ctx.Done():
			return
		case <-stalled:
			stall = true
		case <-look.C:
		}
		m, err := measure()
		wait := memoryEvery
		if err == nil {
			wait = nextLook(m.Available, reserve)
		}
		look.Reset(min(wait, quiet))
		switch now := e.now(); {
		case err != nil:
			if err.Error() != said {
				said = err.Error()
				e.log.Error("cannot measure the node's memory; no lease ends because other programs need it", "error", err)
			}
		case short(m, reserve, stall):
			last = now
			e.giveUpMemory(m, reserve, stall, measure)
			last = e.now()
		case !e.memoryShort.Load():
		case m.Available < 2*reserve:
			last = now
		case now.Sub(last) >= quiet:
			e.memoryShort.Store(false)
			e.log.Info("the node has enough memory: it is lent again", "available", config.Bytes(m.Available).String())
			e.changed()
		}
	}
}

// short reports whether other programs may lack memory that the executor can give them. A stall counts only if the whole node has little memory: little
// that is free, and little page cache that can become free. Otherwise a control group has reached a limit of its own, which may be that of a worker.
func short(m topology.Memory, reserve uint64, stall bool) bool {
	return m.Available < reserve || stall && m.Free < reserve && m.Available < 2*reserve
}

// giveUpMemory frees memory until it is not short any more: first that which no lease uses, then that of the youngest lease, of the next two, the next
// four, and so on, so that the time grows little with the number of leases.
func (e *Executor) giveUpMemory(m topology.Memory, reserve uint64, stall bool, measure func() (topology.Memory, error)) {
	defer e.turns.enter()()
	if !e.memoryShort.Swap(true) {
		e.log.Warn("the node's memory is short: none is lent", "available", config.Bytes(m.Available).String(), "free", config.Bytes(m.Free).String(),
			"yield-memory", config.Bytes(reserve).String(), "programs wait", stall)
		e.metrics.memoryShort.Inc()
		e.claims.revokeAll() // earlier claims have become leases
		e.changed()
	}
	began, ended := e.now(), 0
	e.freeUnused()
	defer func() {
		if ended > 0 {
			e.log.Info("leases have ended because the node's memory was short", "leases", ended, "after", e.now().Sub(began).String())
		}
	}()
	reason := fmt.Sprintf("other programs of the node need memory: %v available (yield-memory %v)", config.Bytes(m.Available), config.Bytes(reserve))
	for n := 1; ; n *= 2 {
		m, err := measure()
		if err != nil || !short(m, reserve, stall) {
			return
		}
		young := e.youngest(n)
		if len(young) == 0 {
			return
		}
		var wg sync.WaitGroup
		for _, id := range young {
			wg.Go(func() { e.giveUp(id, reason, e.metrics.memoryYielded) })
		}
		wg.Wait()
		ended += len(young)
		e.freeUnused() // the tables and libraries of those leases
	}
}

// freeUnused frees memory without ending a lease: cached and spare workers, and tables, bundles, seeds and libraries that no lease uses.
func (e *Executor) freeUnused() {
	e.dropAllCached()
	for e.tables.evictOne() {
	}
	e.codes.evictAll()
}

// youngest returns at most n leases, the youngest first. Leases that have not been granted yet come before all others.
func (e *Executor) youngest(n int) (ids []lease.ID) {
	all := e.table.List() // leases that are not granted come first, then the oldest grant
	granted := 0
	for granted < len(all) && all[granted].Granted.IsZero() {
		granted++
	}
	for i := range min(n, len(all)) {
		if i < granted {
			ids = append(ids, all[i].ID)
		} else {
			ids = append(ids, all[len(all)-1-(i-granted)].ID)
		}
	}
	return ids
}

// lendsMemory returns an error while other programs need the memory.
func (e *Executor) lendsMemory() error {
	if e.memoryShort.Load() {
		return control.Errorf(control.ClassBusy, "other programs of the node need memory; the executor lends none until enough has been available for %v (yield-memory)", memoryQuiet)
	}
	return nil
}

// startMemory begins to watch the node's memory, before the executor gives up its rights. run ends with its context.
func (e *Executor) startMemory() (run func(context.Context), err error) {
	if s := &e.cfg.Settings; s.YieldMemory == 0 && s.YieldAfter == 0 {
		return func(context.Context) {}, nil
	}
	measure := func() (topology.Memory, error) { return topology.NodeMemory("/") }
	m, err := measure()
	if err != nil {
		return nil, err
	}
	reserve := memoryReserve(&e.cfg.Settings, m.Total)
	s, err := openStalls("/proc/pressure/memory")
	if err != nil {
		e.log.Warn("the kernel does not report programs that wait for memory; only the available memory is watched", "error", err)
		return func(ctx context.Context) { e.yieldMemory(ctx, reserve, nil, memoryQuiet, measure) }, nil
	}
	return func(ctx context.Context) {
		events := make(chan struct{}, 1)
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := s.watch(events); err != nil {
				e.log.Warn("cannot receive events of programs that wait for memory any more; only the available memory is watched", "error", err)
			}
		})
		e.yieldMemory(ctx, reserve, events, memoryQuiet, measure)
		s.close()
		wg.Wait()
	}, nil
}
