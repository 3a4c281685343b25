package executor

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/lease"
)

// parkPatience is how long the workers of a released lease may take to come to rest. Those that take longer end.
const parkPatience = 500 * time.Millisecond

// kept is the workers of a released lease that wait, stopped, for the next one of the same client process: their queue
// pairs, memory and code are as they were. Whoever takes it out of Executor.kept decides on them.
type kept struct {
	id      lease.ID
	code    *code // with a reference
	workers []Worker
	taken   chan struct{} // closed when they are somebody's again, or ended
	unwatch func() bool   // of the connection
}

// keep keeps the workers of a lease that its holder has ended, in the place of finishEnd; false: it could not, and nothing
// has happened but that some of them do not serve any more. conn ends with the client.
func (e *Executor) keep(h *holding, conn context.Context) bool {
	s := &e.cfg.Settings
	if l, err := e.table.Get(h.id); err != nil || l.Terms.Kind == [32]byte{} || s.KeepTime == 0 || s.KeepMost == 0 {
		return false
	}
	e.accounts.last(h.id)
	workers, all := h.living()
	if !all {
		return false
	}
	ctx, cancel := context.WithTimeout(conn, parkPatience)
	defer cancel()
	if err := each(workers, func(_ int, w Worker) error { return w.Park(ctx) }); err != nil {
		e.log.Debug("workers not kept", "lease", uint64(h.id), "error", err)
		return false
	}
	e.accounts.end(h.id)
	k := &kept{id: h.id, code: h.code, workers: workers, taken: make(chan struct{})}
	k.unwatch = context.AfterFunc(conn, func() { e.dropKept(k.id) })
	for _, w := range workers {
		e.work.Go(func() {
			select {
			case <-w.Done():
				e.dropKept(k.id)
			case <-k.taken:
			}
		})
	}
	e.mu.Lock()
	err := e.table.Keep(h.id)
	if err == nil {
		e.kept[h.id] = k
	}
	e.mu.Unlock()
	if err != nil { // the node drains
		e.release(k)
		return false
	}
	close(h.kept)
	e.remove(h)
	if gone := each(workers, func(_ int, w Worker) error { return ended(w) }); gone != nil || conn.Err() != nil {
		e.dropKept(k.id) // it may have been too early when that was noticed
	}
	for _, oldest := range e.table.Kept() {
		if len(e.table.Kept()) <= s.KeepMost {
			break
		}
		e.dropKept(oldest)
	}
	e.report()
	return true
}

// ended is an error when a worker has ended.
func ended(w Worker) error {
	select {
	case <-w.Done():
		return errors.New(w.Exit().Reason)
	default:
		return nil
	}
}

// each does something for all workers side by side and returns the first error.
func each(workers []Worker, do func(i int, w Worker) error) error {
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	for i, w := range workers {
		wg.Go(func() {
			if err := do(i, w); err != nil {
				once.Do(func() { first = err })
			}
		})
	}
	wg.Wait()
	return first
}

// take takes kept workers out; nil if somebody else has.
func (e *Executor) take(id lease.ID) *kept {
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.kept[id]
	delete(e.kept, id)
	return k
}

// dropKept ends the keeping of a lease's workers; it returns when they are reaped. false: they are not kept, or somebody
// else was faster.
func (e *Executor) dropKept(id lease.ID) bool {
	l, err := e.table.Get(id)
	if err != nil {
		return false
	}
	cores, memory := l.Terms.Workers*l.Terms.CoresPerWorker, uint64(l.Terms.Workers)*l.Terms.MemoryPerWorker
	e.mu.Lock()
	e.coming.begin(cores, memory)
	e.mu.Unlock()
	dropped := e.table.Drop(id) == nil
	if dropped {
		e.reapKept(id)
	}
	e.mu.Lock()
	e.coming.end(cores, memory)
	e.mu.Unlock()
	return dropped
}

// coming is resources of kept workers that are killed and not reaped yet. They have counted as free, and a request that finds
// nothing else waits for them, so that nobody is refused for workers that nobody holds. Under the executor's lock.
type coming struct {
	cores  int
	memory uint64
	times  uint64 // that something has come
	ended  chan struct{}
}

func (c *coming) begin(cores int, memory uint64) {
	c.cores += cores
	c.memory += memory
	if c.ended == nil {
		c.ended = make(chan struct{})
	}
}

func (c *coming) end(cores int, memory uint64) {
	c.cores -= cores
	c.memory -= memory
	c.times++
	close(c.ended)
	c.ended = nil
	if c.cores > 0 {
		c.ended = make(chan struct{})
	}
}

// requestPatiently tries a request, again when it was busy and something has come meanwhile.
func (e *Executor) requestPatiently(ctx context.Context, try func() error) error {
	for {
		e.mu.Lock()
		times := e.coming.times
		e.mu.Unlock()
		err := try()
		if !errors.Is(err, lease.ErrBusy) {
			return err
		}
		e.mu.Lock()
		more, ended := e.coming.times != times, e.coming.ended
		e.mu.Unlock()
		switch {
		case more:
		case ended == nil:
			return err
		default:
			select {
			case <-ended:
			case <-ctx.Done():
				return err
			}
		}
	}
}

// reapKept ends workers that the table has given up.
func (e *Executor) reapKept(id lease.ID) {
	if k := e.take(id); k != nil {
		e.end(k)
	}
	if err := e.table.Reaped(id); err != nil {
		e.log.Error("cores of kept workers not returned", "lease", uint64(id), "error", err)
	}
	e.report()
}

// end reaps workers that were kept and are not any more.
func (e *Executor) end(k *kept) {
	e.release(k)
	stopAll(context.Background(), k.workers, killed)
	e.codes.release(k.code)
}

// release ends the watch over kept workers.
func (e *Executor) release(k *kept) {
	close(k.taken)
	k.unwatch()
}

// evict reaps what has to make room for another lease.
func (e *Executor) evict(ids []lease.ID) {
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() { e.reapKept(id) })
	}
	wg.Wait()
}

// dropAllKept ends all keeping. The table keeps nothing more.
func (e *Executor) dropAllKept() {
	for _, id := range e.table.Kept() {
		e.dropKept(id)
	}
}

// resumeAll lets kept workers go on for a lease that has taken their place in the table. When one cannot, none is left,
// and the error is lease.ErrNotKept.
func (e *Executor) resumeAll(h *holding, k *kept, blobs [][]byte, limit time.Duration) ([]Worker, error) {
	e.release(k)
	ctx, cancel := spawnContext(h, limit)
	defer cancel()
	err := each(k.workers, func(i int, w Worker) error { return w.Resume(ctx, blobs[i]) })
	e.codes.release(k.code) // the lease has a reference of its own
	if err == nil {
		return k.workers, nil
	}
	e.tell(h, slog.LevelInfo, "kept workers are of no use any more", "lease", uint64(h.id), "of", uint64(k.id), "error", err)
	stopAll(ctx, k.workers, killed)
	return nil, lease.ErrNotKept
}
