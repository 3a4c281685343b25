package executor

import (
	"cmp"
	"context"
	"crypto/sha256"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// holding has a lease's processes and the events for its client. It exists from before the workers are started until
// the last of them is reaped.
//
// There is no queue of events: a stream compares the state with what it has sent (events.go). So a slow reader uses no
// memory, and a stream that is opened again misses nothing.
type holding struct {
	id     lease.ID
	tenant string
	code   *code
	tables []*table      // with references
	wish   *wish         // for a seed; nil: the lease has none
	seed   *table        // with a reference; nil: none
	spec   zygote.Spec   // of every worker, without CPUs and blob
	spare  bool          // its first workers were spare: no lease had used them before
	met    chan struct{} // of spare workers on tcp: gets a value when a worker's client has connected

	// ctx ends when no more workers may be started.
	ctx     context.Context
	cancel  context.CancelFunc
	started chan struct{}  // closed when all first workers have started, or none is left
	gone    chan struct{}  // closed when the workers are reaped or cached, and the cores are free
	cached  chan struct{}  // closed when the workers are cached and no longer belong to this lease
	spawns  sync.WaitGroup // replacements being started, and the process that makes a named seed; Add under mu while not ending

	mu       sync.Mutex
	seats    []seat
	granted  []*control.WorkerGrant // of the first workers; set before the grant
	presence uint64                 // newest event stream
	away     time.Time              // when an event stream ended last
	flag     string                 // of the grant, see LeaseEntry
	reserved func()                 // returns the tenant's reservation for this lease; may be nil
	unwatch  func() bool            // stops watching the connection (askedOn); may be nil
	making   bool                   // a named seed is being made
	ending   bool
	notice   *control.Event // the lease expires soon; nil after a renewal
	leaving  *control.Event // the node drains
	deadline time.Time      // of notice or, once the node drains, of leaving
	final    *control.Event // the last event, as soon as it may be sent
	last     *control.Event // the future value of final
	changed  chan struct{}  // closed and replaced at every change
}

// seat is the position of one worker in a lease. Its cores do not change when the worker is replaced. A seat without cores is vacant: its
// worker has not been added yet (grow.go).
type seat struct {
	cpus      []int
	worker    Worker
	offer     sum                  // hash of the client blob that worker is connected to
	grant     *control.WorkerGrant // sent to the client
	dead      bool                 // reaped, not replaced
	died      time.Time            // when it was reaped, if dead
	overdue   Worker               // being ended because its client reported it as overdue
	deaths    uint64               // number of deaths to report to the client
	death     *control.Event       // the latest of them
	replacing chan struct{}        // closed when the replacement in progress has started or failed; nil: none in progress
}

func (s *seat) vacant() bool { return len(s.cpus) == 0 }

func newHolding(id lease.ID, c *code, spec zygote.Spec, cpus [][]int) *holding {
	h := &holding{id: id, code: c, spec: spec, started: make(chan struct{}), gone: make(chan struct{}), cached: make(chan struct{}),
		changed: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	for _, c := range cpus {
		h.seats = append(h.seats, seat{cpus: c})
	}
	return h
}

// shared returns what the lease shares with others: its tables, its bundle and its seed.
func (h *holding) shared() []*table {
	if h.seed == nil {
		return h.tables
	}
	return append(slices.Clip(h.tables), h.seed)
}

// bundleSum returns the hash of the lease's bundle; nil: it has none.
func (h *holding) bundleSum() []byte {
	if n := len(h.spec.Tables); n < len(h.tables) { // the bundle comes last
		return h.tables[n].sum[:]
	}
	return nil
}

// present returns the number of workers that have cores.
func (h *holding) present() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.seats {
		if !h.seats[i].vacant() {
			n++
		}
	}
	return n
}

// notify wakes the streams. The caller holds mu.
func (h *holding) notify() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// workerSpec returns the spec of worker i for a client blob.
func (h *holding) workerSpec(i int, blob []byte) zygote.Spec {
	s := h.spec
	s.CPUs, s.ClientBlob = h.seats[i].cpus, blob
	if b, err := invoke.UnmarshalChannelBlob(blob); err == nil {
		s.Channel = zygote.Channel{Depth: uint32(b.Depth), Eager: b.Eager, Bulk: b.Bulk}
		s.Late = len(b.QueuePair) == 0
	}
	return s
}

// channelsMemory returns the memory of a worker's side of the largest of some channels, in bytes. Malformed blobs count
// as 0.
func channelsMemory(blobs [][]byte) (most uint64) {
	for _, blob := range blobs {
		if b, err := invoke.UnmarshalChannelBlob(blob); err == nil {
			most = max(most, channelMemory(uint64(b.Depth), uint64(b.Eager), b.Bulk))
		}
	}
	return most
}

// channelMemory returns the memory of a worker's side of a channel, in bytes: its size twice, because results are
// staged in as much memory again.
func channelMemory(depth, eager, bulk uint64) uint64 { return 2 * (depth*eager + bulk) }

// grant returns the description of worker w on the cores of seat i.
func (h *holding) grant(i int, w Worker) *control.WorkerGrant {
	steps := w.Steps()
	g := &control.WorkerGrant{Blob: w.Blob(), Pid: int32(w.PID()), Steps: &control.StartSteps{Fork: uint64(steps.Fork),
		Connect: uint64(steps.Connect), Code: uint64(steps.Code), Sandbox: uint64(steps.Sandbox)}, Start: control.StartPath_START_PATH_COLD}
	why := steps.Unseeded
	if h.wish != nil {
		why = cmp.Or(why, h.wish.refused)
	}
	g.Unseeded = cutText(why)
	switch {
	case steps.Seeded:
		g.Start = control.StartPath_START_PATH_SEEDED
	case steps.Cached && !h.spare:
		g.Start = control.StartPath_START_PATH_CACHED
	case steps.Cached, steps.Pooled:
		g.Start = control.StartPath_START_PATH_POOLED
	}
	for _, c := range h.seats[i].cpus {
		g.Cpus = append(g.Cpus, uint32(c))
	}
	return g
}

// seatWorker puts a started worker into its seat. It returns nil if the lease is ending; the caller must then kill the
// worker.
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

// claimed is the next step of a request to replace a worker. Exactly one field is set.
type claimed struct {
	grant *control.WorkerGrant // done: an earlier copy of the request got this worker
	wait  <-chan struct{}      // wait for another replacement, then claim again
	old   Worker               // replace this worker, dead or not; settle must follow
	grow  bool                 // add this worker to the lease; settle must follow
}

// claimSeat claims a seat for a client that offers blob to a new worker. A living worker is replaced too: its client
// cannot use it, because a connection broke or the answer with its grant was lost.
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
	case !s.dead && s.worker != nil && s.offer == sha256.Sum256(blob):
		c.grant = s.grant
	case s.worker == nil && !s.vacant():
		return c, control.Errorf(control.ClassBusy, "worker %d of lease %d is being started", i, h.id)
	default:
		c.old, c.grow = s.worker, s.vacant()
		s.replacing = make(chan struct{})
		h.spawns.Add(1)
	}
	return c, nil
}

// settle ends a claim of claimSeat.
func (h *holding) settle(i uint32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.seats[i].replacing)
	h.seats[i].replacing = nil
	h.spawns.Done()
}

// beginMaking admits the process that makes a named seed. The lease's cores are not free before endMaking.
func (h *holding) beginMaking() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.ending:
		return h.endingError()
	case h.leaving != nil:
		return grpcError(lease.ErrDraining)
	case h.making:
		return control.Errorf(control.ClassBusy, "lease %d makes another seed: each lease makes one at a time", h.id)
	}
	select {
	case <-h.started:
	default:
		return control.Errorf(control.ClassBusy, "the workers of lease %d are being started", h.id)
	}
	h.making = true
	h.spawns.Add(1)
	return nil
}

func (h *holding) endMaking() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.making = false
	h.spawns.Done()
}

// leaves reports whether the node drains and the lease has not ended yet.
func (h *holding) leaves() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.leaving != nil && !h.ending
}

func (h *holding) endingError() error {
	return control.CodeErrorf(control.ClassLease, codes.FailedPrecondition, "lease %d is ending", h.id)
}

// died records that a worker is reaped, unless its seat has another worker by now. It reports whether the lease is
// ending.
func (h *holding) died(i int, w Worker) (ending bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := &h.seats[i]; s.worker == w {
		s.dead, s.died = true, time.Now()
	}
	return h.ending
}

// announce reports the death of a worker of seat i to the client. The seat may have another worker by now; the process
// id says which one died.
func (h *holding) announce(i int, pid int, x *zygote.Exit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.seats[i]
	s.deaths++
	s.death = &control.Event{Kind: control.Event_KIND_WORKER_DIED, Worker: uint32(i), Pid: int32(pid), Reason: x.Reason,
		OutputTail: x.OutputTail, Status: x.Status, Function: x.Function, Backtrace: x.Backtrace}
	h.notify()
}

// drain notifies the client that the node drains until a given time, and starts no more workers.
func (h *holding) drain(until time.Time, reason string) {
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notice, h.deadline = nil, until
	h.leaving = &control.Event{Kind: control.Event_KIND_DRAINING, Reason: reason}
	h.notify()
}

// expiring notifies the client that the lease expires at a given time.
func (h *holding) expiring(end time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving != nil {
		return
	}
	h.notice, h.deadline = &control.Event{Kind: control.Event_KIND_EXPIRING}, end
	h.notify()
}

// renewed removes a notice of expiry that a stream has not sent yet.
func (h *holding) renewed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notice = nil
}

// end records that the lease has ended. If its workers are killed, the client learns the reason before its connection
// breaks. If the client released it, or calls may still finish, the client is told after that.
func (h *holding) end(how lease.State, reason string) {
	text := how.String()
	if reason != "" {
		text += ": " + reason
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ending = true
	h.cancel() // after ending is set, so that a cancelled start sees the reason
	h.last = &control.Event{Kind: control.Event_KIND_LEASE_ENDED, Reason: text}
	if how != lease.Released && how != lease.Drained {
		h.final = h.last
	}
	h.notify()
}

// askedOn calls gone if the connection of the lease's latest request ends before its client opens a stream.
func (h *holding) askedOn(conn context.Context, gone func()) {
	stop := context.AfterFunc(conn, func() {
		<-h.started // the start is bounded
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

// forgetConnection stops watching the connection of askedOn. The caller holds mu.
func (h *holding) forgetConnection() {
	if h.unwatch != nil {
		h.unwatch()
		h.unwatch = nil
	}
}

// over sends the remaining events: the lease's workers are reaped and its cores are free.
func (h *holding) over() {
	h.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forgetConnection()
	h.final = h.last
	close(h.gone)
	h.notify()
}

// living returns the workers of an ending lease that are not reaped, and whether every seat has a worker.
func (h *holding) living() (workers []Worker, all bool) {
	h.spawns.Wait() // no more are added
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.seats {
		if s.worker != nil && !s.dead {
			workers = append(workers, s.worker)
		}
	}
	return workers, len(workers) == len(h.seats)
}

// stopWorkers ends all workers of an ending lease and waits until they are reaped.
func (h *holding) stopWorkers(ctx context.Context, how ending) {
	workers, _ := h.living()
	stopAll(ctx, workers, how)
}

// ending says how workers end. Workers that may finish calls are killed when the context ends.
type ending int

const (
	killed   ending = iota // at once
	stopped                // after the running call
	finished               // after all calls that were sent
)

// stopAll ends workers in parallel and waits until all are reaped.
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
