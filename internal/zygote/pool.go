package zygote

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// errNoneReady means that no pooled worker fits the lease.
var errNoneReady = errors.New("no pooled worker")

// pool has the pooled workers: cloned, with their device open, and not bound to cores.
type pool struct {
	poke chan struct{} // capacity 1: a worker may be missing

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

// KeepPool keeps n pooled workers for each of the given devices until Close. It clones missing ones in the background.
// A spec names the device and what most leases will need: MaxDepth, MaxEager and MaxBulk are the sizes of a channel,
// whose worker's side is made ahead (MaxDepth 0: no channel); MemoryLimit and ChannelMemory set the memory limit of the
// control group; CPUs are the CPUs that the worker may use while it waits. A lease with other values gets such a worker,
// too, which then replaces the parts that do not fit. Call KeepPool at most once.
func (z *Zygote) KeepPool(n int, devices ...Spec) error {
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

// Waiting returns the number of pooled workers.
func (z *Zygote) Waiting() (n int) {
	z.pool.mu.Lock()
	defer z.pool.mu.Unlock()
	for _, list := range z.pool.waiting {
		n += len(list)
	}
	return n
}

// fill clones missing workers until Close. After a failure it tries again with growing delays.
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
			z.cfg.Log.Warn("cannot start a pooled worker", "err", err, "next_try", delay)
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

// settleTime is how long the pool waits after a start before it clones another worker. By then the lease has its answer
// and its first result. The pool does not wait if no worker is left. worker/startup/startup.h has the gain.
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

// pin binds a pooled worker to its lease's CPUs, so that it wakes up there. Without a cpuset this is a hint: the worker
// binds itself when it has its lease, and this process may lack the right to bind it.
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

// add adds a worker to the pool, and removes it if it dies.
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
			w.started() // no lease will finish its start
			p.wake()
		}
	}()
}

// take returns the worker that has waited for the longest time; nil: none.
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

// lend gives a lease to a pooled worker. The error is errNoneReady if there is none, or all are dead.
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
		w.steps.Pooled = true
		final, err := w.take(ctx, spec, body, names)
		if err == nil {
			return w, nil
		}
		if final {
			return nil, err
		}
		if w.page.phase() >= phaseLeased || ctx.Err() != nil {
			return nil, err
		}
		z.cfg.Log.Warn("a pooled worker died before it took its lease", "pid", w.pid, "err", err)
	}
	return nil, errNoneReady
}

// take gives a prepared worker its lease. After an error nothing of it is left. final: another worker would fail likewise.
func (w *Worker) take(ctx context.Context, spec *Spec, body []byte, names *os.File) (final bool, err error) {
	w.conn.SetReadDeadline(time.Time{})
	w.asked = time.Now()
	w.serves.Store(spec)
	if body, err = w.preparePages(ctx, spec, body); err != nil {
		return false, w.abort(err)
	}
	if err = w.group.Limit(spec.groupMemory()); err == nil {
		err = w.pin(spec.CPUs)
	}
	if err != nil {
		return true, w.abort(fmt.Errorf("start worker: %w", err))
	}
	files := []*os.File{spec.Code, names}
	if spec.Seed != nil {
		files = append(files, spec.Seed.File)
	}
	if err = withFiles(files, func(fds []int) error { return w.send(wire.Spawn, body, fds...) }); err != nil {
		return false, w.abort(err)
	}
	_, err = w.begin(ctx, spec)
	return false, err
}

// preparePages returns the body of a lease for a worker whose seed may not be whole yet. A worker whose memory cannot be filled on demand waits for all of the seed.
func (w *Worker) preparePages(ctx context.Context, spec *Spec, body []byte) ([]byte, error) {
	if spec.Seed == nil || !spec.Seed.Filling() {
		w.closePages()
		return body, nil
	}
	if w.pages.Load() == nil {
		if err := spec.Seed.Whole(ctx); err != nil {
			return nil, fmt.Errorf("start worker: seed: %w", err)
		}
		return body, nil
	}
	body = slices.Clone(body)
	binary.LittleEndian.PutUint32(body[bodyPaged:], 1)
	w.paged = true
	return body, nil
}

// lendMost is how many pooled workers are tried for one lease. User code can make its worker look like one that died
// before it ran.
const lendMost = 2
