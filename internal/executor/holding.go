package executor

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// holding is a lease's processes and what its holder has to be told. It lives from before the workers are started
// until the last of them is reaped.
//
// There is no queue of events: a stream compares what is with what it has told (events.go), so that a slow reader
// costs no memory and a stream that is opened again misses nothing.
type holding struct {
	id     lease.ID
	tenant string
	code   *code
	spec   zygote.Spec // of every worker, without CPUs and blob

	// ctx ends when no more workers shall be started.
	ctx     context.Context
	cancel  context.CancelFunc
	started chan struct{}  // closed when the first workers have all started, or none is left
	gone    chan struct{}  // closed when the workers are reaped or kept, and the cores are free
	kept    chan struct{}  // closed when the workers are kept: they are no more of this lease
	spawns  sync.WaitGroup // replacements being started; Add under mu while not ending

	mu       sync.Mutex
	seats    []seat
	granted  []*control.WorkerGrant // of the first workers; set before the grant
	presence uint64                 // newest event stream
	flag     string                 // of the grant, see LeaseEntry
	reserved func()                 // gives back what the tenant has reserved for it; nil: nothing
	unwatch  func() bool            // ends what askedOn began; nil: nothing
	ending   bool
	notice   *control.Event // that the end is near, told while it is so
	leaving  *control.Event // that the node drains
	deadline time.Time      // of notice or, once the node drains, of leaving
	final    *control.Event // the last event, once it shall be told
	last     *control.Event // what final will be
	changed  chan struct{}  // closed and replaced at every change
}

// seat is one worker's place in a lease: its cores stay when the worker is replaced.
type seat struct {
	cpus      []int
	worker    Worker
	offer     sum                  // of the client blob that worker is connected to
	grant     *control.WorkerGrant // what the holder was told of worker
	dead      bool                 // reaped, not replaced
	overdue   Worker               // that is being ended by its client's word
	deaths    uint64               // that the holder is to be told of
	death     *control.Event       // the latest of them
	replacing chan struct{}        // closed when the replacement under way has started or failed; nil: there is none
}

func newHolding(id lease.ID, c *code, spec zygote.Spec, cpus [][]int) *holding {
	h := &holding{id: id, code: c, spec: spec, started: make(chan struct{}), gone: make(chan struct{}), kept: make(chan struct{}),
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
	if b, err := invoke.UnmarshalChannelBlob(blob); err == nil {
		s.Channel = zygote.Channel{Depth: uint32(b.Depth), Eager: b.Eager, Bulk: b.Bulk}
	}
	return s
}

// channelsMemory is what a worker's side of the largest of some channels takes, in bytes. Blobs that are none take nothing.
func channelsMemory(blobs [][]byte) (most uint64) {
	for _, blob := range blobs {
		if b, err := invoke.UnmarshalChannelBlob(blob); err == nil {
			most = max(most, channelMemory(uint64(b.Depth), uint64(b.Eager), b.Bulk))
		}
	}
	return most
}

// channelMemory is what a worker's side of a channel takes: as many bytes again where results are staged.
func channelMemory(depth, eager, bulk uint64) uint64 { return 2 * (depth*eager + bulk) }

// grant describes worker w on the cores of seat i.
func (h *holding) grant(i int, w Worker) *control.WorkerGrant {
	steps := w.Steps()
	g := &control.WorkerGrant{Blob: w.Blob(), Pid: int32(w.PID()), Steps: &control.StartSteps{Fork: uint64(steps.Fork),
		Connect: uint64(steps.Connect), Code: uint64(steps.Code), Sandbox: uint64(steps.Sandbox)}, Start: control.StartPath_START_PATH_COLD}
	switch {
	case steps.Cached:
		g.Start = control.StartPath_START_PATH_CACHED
	case steps.Warm:
		g.Start = control.StartPath_START_PATH_WARM
	}
	for _, c := range h.seats[i].cpus {
		g.Cpus = append(g.Cpus, uint32(c))
	}
	return g
}

// seatWorker puts a started worker into its seat. nil: the lease is ending, and the worker is still the caller's to
// kill.
func (h *holding) seatWorker(i int, w Worker, blob []byte) *control.WorkerGrant {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ending {
		return nil
	}
	s := &h.seats[i]
	s.worker, s.offer, s.grant, s.dead = w, sha256.Sum256(blob), h.grant(i, w), false
	return s.grant
}

// claimed is what a request to replace a worker may do next: exactly one field is set.
type claimed struct {
	grant *control.WorkerGrant // nothing: this is the worker that an earlier copy of the request got
	wait  <-chan struct{}      // wait for another replacement and look again
	old   Worker               // replace this one, dead or not; settle must follow
}

// claimSeat looks at a seat for somebody who offers blob in the place of its worker. A worker that lives makes
// room: its holder cannot use it, since a connection broke or the answer that named it was lost.
func (h *holding) claimSeat(i uint32, blob []byte) (c claimed, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i >= uint32(len(h.seats)) {
		return c, invalidf("worker %d: lease %d has workers 0 to %d", i, h.id, len(h.seats)-1)
	}
	s := &h.seats[i]
	switch {
	case h.ending || h.leaving != nil:
		return c, h.endingError()
	case s.replacing != nil:
		c.wait = s.replacing
	case !s.dead && s.offer == sha256.Sum256(blob):
		c.grant = s.grant
	default:
		c.old = s.worker
		s.replacing = make(chan struct{})
		h.spawns.Add(1)
	}
	return c, nil
}

// settle ends what claimSeat began.
func (h *holding) settle(i uint32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.seats[i].replacing)
	h.seats[i].replacing = nil
	h.spawns.Done()
}

func (h *holding) endingError() error {
	return control.CodeErrorf(control.ClassLease, codes.FailedPrecondition, "lease %d is ending", h.id)
}

// watch waits for a worker's death. It returns true when the worker has died while its lease goes on, and false when the lease
// is ending or its workers are kept.
func (h *holding) watch(i int, w Worker) bool {
	select {
	case <-w.Done():
		return !h.died(i, w)
	case <-h.kept:
		return false
	}
}

// died notes that a worker is reaped, unless another one has its seat. It says whether the lease is ending.
func (h *holding) died(i int, w Worker) (ending bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := &h.seats[i]; s.worker == w {
		s.dead = true
	}
	return h.ending
}

// announce tells the holder how a worker of seat i has died. The seat may have another worker by now: the process id says which one
// it was.
func (h *holding) announce(i int, pid int, x *zygote.Exit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.seats[i]
	s.deaths++
	s.death = &control.Event{Kind: control.Event_KIND_WORKER_DIED, Worker: uint32(i), Pid: int32(pid), Reason: x.Reason,
		OutputTail: x.OutputTail, Status: x.Status, Function: x.Function, Backtrace: x.Backtrace}
	h.notify()
}

// drain tells the holder that the node will leave at a time, and starts no more workers.
func (h *holding) drain(until time.Time, reason string) {
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notice, h.deadline = nil, until
	h.leaving = &control.Event{Kind: control.Event_KIND_DRAINING, Reason: reason}
	h.notify()
}

// expiring tells the holder that the lease ends at a time.
func (h *holding) expiring(end time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving != nil {
		return
	}
	h.notice, h.deadline = &control.Event{Kind: control.Event_KIND_EXPIRING}, end
	h.notify()
}

// renewed takes a notice back that a stream has not told yet.
func (h *holding) renewed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notice = nil
}

// end notes that the lease has ended. Whoever is killed learns why before its connection breaks; a holder that
// releases, or whose calls may still finish, is told when they have.
func (h *holding) end(how lease.State, reason string) {
	text := how.String()
	if reason != "" {
		text += ": " + reason
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ending = true
	h.cancel() // after ending is set: a start that this ends must see why
	h.last = &control.Event{Kind: control.Event_KIND_LEASE_ENDED, Reason: text}
	if how != lease.Released && how != lease.Drained {
		h.final = h.last
	}
	h.notify()
}

// askedOn calls gone if a connection ends, the newest one on which the lease was asked for, before its holder has come.
func (h *holding) askedOn(conn context.Context, gone func()) {
	stop := context.AfterFunc(conn, func() {
		<-h.started // bounded by the spawn time-out
		gone()
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.presence > 0 || h.ending {
		stop()
		return
	}
	h.forgetConnection()
	h.unwatch = stop
}

// forgetConnection ends what askedOn began. Under mu.
func (h *holding) forgetConnection() {
	if h.unwatch != nil {
		h.unwatch()
		h.unwatch = nil
	}
}

// over tells the rest: the lease's workers are reaped and its cores are free.
func (h *holding) over() {
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forgetConnection()
	h.final = h.last
	close(h.gone)
	h.notify()
}

// living returns the workers of an ending lease that are not reaped, and whether every seat has one.
func (h *holding) living() (workers []Worker, all bool) {
	h.spawns.Wait() // none is added any more
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.seats {
		if s.worker != nil && !s.dead {
			workers = append(workers, s.worker)
		}
	}
	return workers, len(workers) == len(h.seats)
}

// stopWorkers ends all workers of an ending lease and returns when they are reaped.
func (h *holding) stopWorkers(ctx context.Context, how ending) {
	workers, _ := h.living()
	stopAll(ctx, workers, how)
}

// ending says how workers end. Those that may finish something are killed when the context ends.
type ending int

const (
	killed   ending = iota // at once
	stopped                // after the call that runs
	finished               // after all calls that were sent
)

// stopAll ends workers side by side and returns when all are reaped.
func stopAll(ctx context.Context, workers []Worker, how ending) {
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() {
			var err error
			switch how {
			case stopped:
				err = w.Stop(ctx)
			case finished:
				err = w.Finish(ctx)
			}
			if how == killed || err != nil {
				w.Kill()
			}
			<-w.Done()
		})
	}
	wg.Wait()
}
