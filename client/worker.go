package client

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// explainTime is how long an error waits for the event that tells how its worker died: the error is there within a second
// of the death, with the cause unless the executor's node is very busy.
const explainTime = 900 * time.Millisecond

// Worker is one place in a lease: a remote process on its cores, replaced when it dies. Safe for concurrent use:
// calls on one worker run one after the other, except that up to the lease's depth may be submitted before the first
// is waited for.
type Worker struct {
	lease *Lease
	index int
	connection

	wake    chan struct{}
	waiting atomic.Int32 // goroutines in claim

	// Of whoever holds the claim:
	slots   []submitted        // by slot of the channel
	lastSeq uint32             // of submitted calls
	lost    map[uint32]outcome // by sequence: calls that ended when the worker was replaced, not yet asked for
	buffers []*Buffer

	mu      sync.Mutex    // what events touch
	pid     int           // the process that the channel is connected to, 0 while there is none
	deadPID int           // the last one reported dead
	silent  int           // one that broke and of which no event has told in time
	failing int           // calls of fail that are inside the data plane
	death   grant.Event   // of deadPID
	changed chan struct{} // closed and replaced at each event
}

// submitted is a slot's call; seq 0 means none.
type submitted struct {
	seq      uint32
	capacity int
}

// outcome is what a call came to.
type outcome struct {
	data    []byte
	n       int
	started bool
	status  Status
	err     error
}

// connection is a channel to one worker, with what it lives on.
type connection struct {
	ep *dataplane.Endpoint
	ch *dataplane.Channel
}

func newConnection(dev *dataplane.Device, cfg dataplane.ChannelConfig, mode dataplane.WaitMode) (c connection, err error) {
	if c.ep, err = dev.NewEndpoint(1, cfg.Depth, mode); err != nil {
		return c, err
	}
	if c.ch, err = c.ep.NewChannel(cfg); err != nil {
		c.ep.Close()
	}
	return c, err
}

func (c connection) close() {
	c.ch.Close()
	c.ep.Close()
}

// connections are those of a lease, by worker.
type connections []connection

// connections are n that are not connected: spare ones or new ones.
func (s *Session) connections(n int, kind spareKind) (list connections, err error) {
	for range n {
		c, ok := s.spares.take(kind)
		if !ok {
			if c, err = newConnection(kind.dev, kind.cfg, kind.mode); err != nil {
				list.close()
				return nil, err
			}
		}
		list = append(list, c)
	}
	return list, nil
}

func (list connections) close() {
	for _, c := range list {
		c.close()
	}
}

func newWorker(l *Lease, i int, c connection) *Worker {
	return &Worker{lease: l, index: i, connection: c, wake: make(chan struct{}, 1), slots: make([]submitted, l.config.Depth),
		changed: make(chan struct{})}
}

func (w *Worker) freeBuffers() {
	for _, b := range w.buffers {
		b.region.Free()
		b.region = nil
	}
	w.buffers = nil
}

// at is the worker that has this one's place: another one when the lease went on elsewhere.
func (w *Worker) at() *Worker {
	if w.lease.front != nil {
		return w.lease.front.at().workers[w.index]
	}
	return w
}

// Index is the worker's number in its lease.
func (w *Worker) Index() int { return w.index }

// Start is how a worker came to its lease.
type Start int

// The ways, the slowest first.
const (
	StartUnknown Start = iota // the executor does not say
	StartCold                 // a process was cloned for it
	StartWarm                 // a process was there, cloned in advance
	StartCached               // it has served an earlier lease of this process, and the connection to it stood
)

func (s Start) String() string {
	if s < 0 || int(s) >= len(startNames) {
		s = StartUnknown
	}
	return startNames[s]
}

var startNames = [...]string{StartUnknown: "unknown", StartCold: "cold", StartWarm: "warm", StartCached: "cached"}

// StartSteps is what the start of a worker took, as its executor saw it.
type StartSteps struct {
	Start   Start
	Fork    time.Duration // from the request to the worker's first instruction, or until it has its lease
	Connect time.Duration // device, memory, queue pair
	Code    time.Duration // the library
	Sandbox time.Duration // credentials, namespaces, filters; 0: there is none, or by an executor that does not say
}

// StartSteps is what the start of the lease's first process in this place took.
func (w *Worker) StartSteps() StartSteps {
	w = w.at()
	if w.lease.local != nil {
		return StartSteps{}
	}
	g := w.lease.held.Workers[w.index]
	return StartSteps{Start: Start(g.Start), Fork: g.Fork, Connect: g.Connect, Code: g.Code, Sandbox: g.Sandbox}
}

// PID is the process id of the worker on its node, 0 while it is being replaced.
func (w *Worker) PID() int {
	w = w.at()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pid
}

// Inspection is what a worker does and has printed; its counters are its own, which the functions could forge.
type Inspection = grant.Inspection

// Inspect asks the executor about the worker, also while it runs a function or has just died. It takes a control round
// trip and does not disturb the worker.
func (w *Worker) Inspect(ctx context.Context) (Inspection, error) {
	w = w.at()
	if err := w.lease.Err(); err != nil {
		return Inspection{}, err
	}
	if w.lease.local != nil {
		return Inspection{}, fail("inspect a worker", dataplane.StatusUnsupported, "it is this process")
	}
	return w.lease.held.Inspect(ctx, w.index)
}

// ---- claims ----

func (w *Worker) try() bool {
	word, bit := &w.lease.free[w.index/64], uint64(1)<<(w.index%64)
	return word.Load()&bit != 0 && word.And(^bit)&bit != 0
}

// claim takes this worker, waiting until it is free.
func (w *Worker) claim(ctx context.Context, op string) error {
	if w.try() {
		return nil
	}
	w.waiting.Add(1)
	defer w.waiting.Add(-1)
	for {
		if w.try() {
			return nil
		}
		select {
		case <-w.wake:
		case <-w.lease.ctx.Done():
			return fail(op, StatusLeaseEnded, "the lease was released")
		case <-ctx.Done():
			return contextError(ctx, op, fmt.Sprintf("worker %d did not become free", w.index), false)
		}
	}
}

// take claims the worker for good; only for Release.
func (w *Worker) take() {
	w.waiting.Add(1)
	for !w.try() {
		<-w.wake
	}
	w.waiting.Add(-1)
}

// ---- connections ----

// connect takes the executor's answer to this worker's offer.
func (w *Worker) connect(g grant.Worker) error {
	take := w.ch.Connect
	if w.lease.held.Kept != nil && w.ch.Idle() {
		take = w.ch.Resume
	}
	if err := take(g.Blob); err != nil {
		return fmt.Errorf("connect worker %d: %w", w.index, err)
	}
	st := Status(dataplane.OK)
	w.lease.mu.Lock()
	st = w.lease.ended
	w.lease.mu.Unlock()
	w.mu.Lock()
	w.pid = g.PID
	if st == dataplane.OK && w.pid != 0 && w.deadPID == w.pid {
		st = w.death.Status // its event was quicker than the grant
	}
	w.mu.Unlock()
	if st != dataplane.OK {
		w.ch.Fail(st)
	}
	return nil
}

// notify tells that something under mu has changed. Under mu.
func (w *Worker) notify() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// fail ends the calls on the present connection. Any goroutine. No lock is held inside the data plane; repair waits
// until nobody is there, so that a failure meant for one connection never hits the next.
func (w *Worker) fail(st Status) {
	w.mu.Lock()
	hit := w.pid != 0
	if hit {
		w.failing++
	}
	w.mu.Unlock()
	if hit {
		w.ch.Fail(st)
		w.mu.Lock()
		w.failing--
		w.notify()
		w.mu.Unlock()
	}
}

// died handles the event of a worker's death.
func (w *Worker) died(e grant.Event) {
	w.mu.Lock()
	w.deadPID, w.death = e.PID, e
	hit := w.pid != 0 && w.pid == w.deadPID // else a late report of one that was replaced already
	w.notify()
	w.mu.Unlock()
	if !hit {
		return
	}
	w.fail(e.Status)
	w.lease.background(func() { // so that the next call finds a worker
		if w.claim(w.lease.healCtx, "replace worker") != nil {
			return
		}
		defer w.lease.give(w)
		if w.ch.Status() != dataplane.OK {
			_ = w.repair() // whoever uses it next tries again and gets the error
		}
	})
}

// settle ends the calls in flight of a failed connection and keeps what they came to.
func (w *Worker) settle() {
	for slot := range w.slots {
		s := w.slots[slot]
		if s.seq == 0 {
			continue
		}
		o := outcome{started: true, status: dataplane.StatusConnection}
		if w.ch.Test(uint32(slot)) {
			o = w.collect(uint32(slot), make([]byte, s.capacity))
		} else {
			w.ch.Abandon(uint32(slot))
		}
		if o.status != dataplane.OK && o.err == nil {
			o.err = w.explain("call", o.n, o.started, o.status)
		}
		w.remember(s.seq, o)
		w.slots[slot] = submitted{}
	}
}

// number is the next submitted call's.
func (w *Worker) number() uint32 {
	if w.lastSeq++; w.lastSeq == 0 {
		w.lastSeq = 1
	}
	return w.lastSeq
}

// remember keeps what a submitted call came to, until it is asked for.
func (w *Worker) remember(seq uint32, o outcome) {
	if w.lost == nil {
		w.lost = make(map[uint32]outcome)
	}
	w.lost[seq] = o
}

// collect takes an ended call off the channel.
func (w *Worker) collect(slot uint32, out []byte) (o outcome) {
	message := w.ch.Message(slot)
	o.n, o.started, o.status = w.ch.Finish(slot, out)
	if o.status == dataplane.OK {
		o.data = out[:o.n]
	} else if o.status == StatusFunctionFailed {
		o.err = &Error{Op: "call", Status: o.status, Detail: message, Started: true}
	}
	return o
}

// explain makes the error of a call that ended with st. For a broken connection it waits a moment for the event
// that tells how the worker died.
func (w *Worker) explain(op string, n int, started bool, st Status) error {
	e := &Error{Op: op, Status: st, Started: started}
	switch st.Class() {
	default:
		e.Detail = fmt.Sprintf("worker %d", w.index)
	case ErrInvalid:
		e.Detail = fmt.Sprintf("worker %d; the lease has depth %d, eager %d, bulk %d bytes", w.index,
			w.lease.config.Depth, w.lease.config.Eager, w.lease.config.Bulk)
	case ErrFunction:
		switch st {
		case StatusResultTooLarge:
			e.Detail = fmt.Sprintf("it has %d bytes", n)
		case StatusFunctionFailed:
			e.Detail = w.ch.LastMessage()
		}
	case ErrBusy:
		e.Detail = fmt.Sprintf("worker %d has %d calls in flight or not asked for", w.index, w.lease.config.Depth)
	case ErrConnection, ErrLease:
		w.explainDeath(e)
	}
	return e
}

func (w *Worker) explainDeath(e *Error) {
	timer := time.NewTimer(explainTime)
	defer timer.Stop()
	for {
		if err, _ := w.lease.endedError(e.Op).(*Error); err != nil {
			e.Status, e.Detail = err.Status, err.Detail
			return
		}
		if !e.Started && w.lease.leaving.Load() {
			err := w.lease.leavingError(e.Op).(*Error)
			e.Status, e.Detail = err.Status, err.Detail
			return
		}
		w.mu.Lock()
		dead, wait, changed := w.pid != 0 && w.deadPID == w.pid, w.pid != 0 && w.silent != w.pid, w.changed
		if dead {
			e.Status, e.Detail, e.Backtrace = w.death.Status, w.death.Death(), w.death.Backtrace
			e.Output = strings.ToValidUTF8(strings.TrimSpace(string(w.death.Output)), "?")
		}
		w.mu.Unlock()
		if dead {
			return
		}
		if e.Detail == "" {
			e.Detail = fmt.Sprintf("worker %d", w.index)
			if e.Status == dataplane.StatusProtocol {
				e.Detail += ": a function has perhaps overwritten what it shares with this process"
			}
		}
		if !wait || !e.Started {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			w.mu.Lock()
			w.silent = w.pid // once is enough
			w.mu.Unlock()
		case <-w.lease.ctx.Done():
			return
		}
	}
}
