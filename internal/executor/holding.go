package executor

import (
	"context"
	"sync"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// holding is a lease's processes and what its holder has to be told. It lives from before the workers are started
// until the last of them is reaped.
//
// There is no queue of events: a stream compares what is with what it has told (events.go), so that a slow reader
// costs no memory and a stream that is opened again misses nothing.
type holding struct {
	id   lease.ID
	code *code
	spec zygote.Spec // of every worker, without CPUs and blob

	// ctx ends when no more workers shall be started.
	ctx     context.Context
	cancel  context.CancelFunc
	started chan struct{}  // closed when the first workers have all started, or none is left
	gone    chan struct{}  // closed when the workers are reaped and the cores are free
	spawns  sync.WaitGroup // replacements being started; Add under mu while not ending

	mu       sync.Mutex
	seats    []seat
	reply    *control.LeaseReply // set before the grant
	presence uint64              // newest event stream
	ending   bool
	draining bool
	final    *control.Event // the last event, once it shall be told
	last     *control.Event // what final will be
	changed  chan struct{}  // closed and replaced at every change
}

// seat is one worker's place in a lease: its cores stay when the worker is replaced.
type seat struct {
	cpus      []int
	worker    Worker
	dead      bool // reaped, not replaced
	deaths    uint64
	replacing bool
}

func newHolding(id lease.ID, c *code, spec zygote.Spec, cpus [][]int) *holding {
	h := &holding{id: id, code: c, spec: spec, started: make(chan struct{}), gone: make(chan struct{}),
		changed: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	for _, c := range cpus {
		h.seats = append(h.seats, seat{cpus: c})
	}
	return h
}

// notify wakes the streams. Under mu.
func (h *holding) notify() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// workerSpec is the spec of worker i for a client blob.
func (h *holding) workerSpec(i int, blob []byte) zygote.Spec {
	s := h.spec
	s.CPUs, s.ClientBlob = h.seats[i].cpus, blob
	return s
}

// grant describes worker w on the cores of seat i.
func (h *holding) grant(i int, w Worker) *control.WorkerGrant {
	g := &control.WorkerGrant{Blob: w.Blob(), Pid: int32(w.PID())}
	for _, c := range h.seats[i].cpus {
		g.Cpus = append(g.Cpus, uint32(c))
	}
	return g
}

// seatWorker puts a started worker into its seat, watched. False: the lease is ending, and the worker is still
// the caller's to kill.
func (h *holding) seatWorker(i int, w Worker) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.seats[i]
	s.replacing = false
	if h.ending {
		return false
	}
	s.worker, s.dead = w, false
	return true
}

// watch notes a worker's death; it returns when the worker is reaped. report says whether it died while its lease
// went on.
func (h *holding) watch(i int, w Worker, report func(zygote.Exit)) {
	<-w.Done()
	h.mu.Lock()
	s := &h.seats[i]
	s.dead = true
	s.deaths++
	ending := h.ending
	h.notify()
	h.mu.Unlock()
	if !ending {
		report(w.Exit())
	}
}

// drain tells the holder that the node will leave, and starts no more workers.
func (h *holding) drain() {
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.draining = true
	h.notify()
}

// end notes that the lease has ended. Whoever is killed learns why before its connection breaks; a holder that
// releases, or whose calls may still finish, is told when they have.
func (h *holding) end(how lease.State, reason string) {
	text := how.String()
	if reason != "" {
		text += ": " + reason
	}
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ending = true
	h.last = &control.Event{Kind: control.Event_KIND_LEASE_ENDED, Reason: text}
	if how != lease.Released && !h.draining {
		h.final = h.last
	}
	h.notify()
}

// over tells the rest: the lease's workers are reaped and its cores are free.
func (h *holding) over() {
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.final = h.last
	close(h.gone)
	h.notify()
}

// stopWorkers ends all workers of an ending lease and returns when they are reaped. Not polite: killed at once.
func (h *holding) stopWorkers(ctx context.Context, polite bool) {
	h.spawns.Wait() // none is added any more
	h.mu.Lock()
	var workers []Worker
	for _, s := range h.seats {
		if s.worker != nil && !s.dead {
			workers = append(workers, s.worker)
		}
	}
	h.mu.Unlock()
	stopAll(ctx, workers, polite)
}

// stopAll ends workers side by side and returns when all are reaped.
func stopAll(ctx context.Context, workers []Worker, polite bool) {
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() {
			if !polite || w.Stop(ctx) != nil {
				w.Kill()
			}
			<-w.Done()
		})
	}
	wg.Wait()
}
