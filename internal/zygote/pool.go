package zygote

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// errNoneReady: no worker waits for such a lease.
var errNoneReady = errors.New("no worker in advance")

// pool is workers that wait for their leases: cloned, with their device open, on no core of their own.
type pool struct {
	poke chan struct{} // capacity 1: one is missing, perhaps

	mu      sync.Mutex
	want    int // of each kind
	kinds   []Spec
	waiting map[string][]*Worker // by deviceBody
}

func newPool() pool {
	return pool{poke: make(chan struct{}, 1), waiting: map[string][]*Worker{}}
}

func (p *pool) wake() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// KeepWarm keeps n workers waiting for leases on each of the given devices, cloned in the background whenever one is missing,
// until Close. Of the specs what names a device counts, and what most leases will be: MaxDepth, MaxEager and MaxBulk are the
// sizes of a channel, whose worker's side is made ahead (MaxDepth 0: none is), MemoryLimit and ChannelMemory what the worker's
// control group may have, and CPUs those that it may use while it waits. A lease that differs gets such a worker too, which makes anew what does not fit. Call it once, at most.
func (z *Zygote) KeepWarm(n int, devices ...Spec) error {
	for i := range devices {
		if _, err := prepareBody(&devices[i]); err != nil {
			return err
		}
	}
	z.pool.mu.Lock()
	z.pool.want, z.pool.kinds = n, slices.Clone(devices)
	z.pool.mu.Unlock()
	if n > 0 && len(devices) > 0 {
		z.tasks.Add(1)
		go z.fill()
	}
	return nil
}

// Waiting is how many workers wait for a lease.
func (z *Zygote) Waiting() (n int) {
	z.pool.mu.Lock()
	defer z.pool.mu.Unlock()
	for _, list := range z.pool.waiting {
		n += len(list)
	}
	return n
}

// fill makes what is missing until Close. When that fails it tries again, later and later.
func (z *Zygote) fill() {
	defer z.tasks.Done()
	const shortest, longest = 100 * time.Millisecond, 10 * time.Second
	delay := shortest
	for {
		err := z.fillUp()
		if z.ctx.Err() != nil || errors.Is(err, errClosed) {
			return
		}
		var again <-chan time.Time
		if err != nil {
			z.cfg.Log.Warn("no worker can be started in advance", "err", err, "next_try", delay)
			again = time.After(delay)
			delay = min(2*delay, longest)
		} else {
			delay = shortest
		}
		select {
		case <-z.ctx.Done():
			return
		case <-z.pool.poke:
			z.pool.settle(z.ctx)
		case <-again:
		}
	}
}

// settleTime is how long the pool waits after a start before it clones another worker: the lease has its answer then, and its first
// result. When no worker is left it does not wait.
const settleTime = 5 * time.Millisecond

func (p *pool) settle(ctx context.Context) {
	p.mu.Lock()
	left := true
	for i := range p.kinds {
		kind, err := deviceBody(&p.kinds[i])
		left = left && err == nil && len(p.waiting[string(kind)]) > 0
	}
	p.mu.Unlock()
	if !left {
		return
	}
	select {
	case <-time.After(settleTime):
	case <-ctx.Done():
	}
}

// pin binds a worker that waits for its lease to the lease's CPUs, so that it wakes up there. Without a cpuset that is a hint: the
// worker binds itself when it has its lease, and this process may not have the right to.
func (w *Worker) pin(cpus []int) error {
	if len(cpus) == 0 {
		return nil
	}
	if err := w.group.Pin(cpus); err != nil || w.group.HoldsCPUs() {
		return err
	}
	var set unix.CPUSet
	for _, c := range cpus {
		set.Set(c)
	}
	_ = unix.SchedSetaffinity(w.pid, &set)
	return nil
}

func (z *Zygote) fillUp() error {
	for i := range z.pool.kinds {
		spec := &z.pool.kinds[i]
		kind, err := deviceBody(spec)
		if err != nil {
			return err
		}
		body, err := prepareBody(spec)
		if err != nil {
			return err
		}
		for z.pool.missing(string(kind)) {
			ctx, cancel := context.WithTimeoutCause(z.ctx, SpawnTimeout, errSpawnTimeout)
			w, err := z.spawn(ctx, spec, body, nil)
			cancel()
			if err != nil {
				return err
			}
			z.pool.add(string(kind), w)
		}
	}
	return nil
}

func (p *pool) missing(kind string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiting[kind]) < p.want
}

// add lets a worker wait, and forgets it should it die meanwhile.
func (p *pool) add(kind string, w *Worker) {
	p.mu.Lock()
	p.waiting[kind] = append(p.waiting[kind], w)
	p.mu.Unlock()
	go func() {
		<-w.done
		p.mu.Lock()
		before := len(p.waiting[kind])
		p.waiting[kind] = slices.DeleteFunc(p.waiting[kind], func(x *Worker) bool { return x == w })
		died := len(p.waiting[kind]) < before
		p.mu.Unlock()
		if died {
			w.started() // nobody will see it through
			p.wake()
		}
	}()
}

// take returns a worker that waits, the one that does so for the longest time; nil if there is none.
func (p *pool) take(kind string) *Worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.waiting[kind]
	if len(list) == 0 {
		return nil
	}
	p.waiting[kind] = list[1:]
	return list[0]
}

// lend gives a lease to a worker that waits. errNoneReady: there is none, or all of them are dead.
func (z *Zygote) lend(ctx context.Context, spec *Spec, body []byte, names *os.File) (*Worker, error) {
	kind, err := deviceBody(spec)
	if err != nil {
		return nil, err
	}
	for range lendMost {
		w := z.pool.take(string(kind))
		if w == nil {
			return nil, errNoneReady
		}
		w.conn.SetReadDeadline(time.Time{})
		w.asked = time.Now()
		w.steps.Warm = true
		w.serves.Store(spec)
		m := wire.Message{Type: wire.Spawn, ID: w.id, Body: body}
		err := w.group.Limit(spec.groupMemory())
		if err == nil {
			err = w.pin(spec.CPUs)
		}
		if err != nil {
			return nil, w.abort(fmt.Errorf("start worker: %w", err))
		}
		err = leaseFDs(spec.Code, names, func(code, names int) error {
			w.conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			_, _, err := w.conn.WriteMsgUnix(m.Encode(), unix.UnixRights(code, names), nil)
			return err
		})
		if err != nil {
			err = w.abort(err)
		} else if _, err = w.begin(ctx, spec); err == nil {
			return w, nil
		}
		if w.page.phase() >= phaseLeased || ctx.Err() != nil {
			return nil, err
		}
		z.cfg.Log.Warn("a worker in advance has died before it took its lease", "pid", w.pid, "err", err)
	}
	return nil, errNoneReady
}

// lendMost is how many workers in advance are tried for one lease. User code can make its worker look like one that died before it ran.
const lendMost = 2
