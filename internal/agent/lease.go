package agent

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// Pauses between two attempts to find an executor. Each is twice the one before. A new executor ends a pause.
const (
	pauseMin = 5 * time.Millisecond
	pauseMax = 500 * time.Millisecond
)

// lease is the state of one key: being acquired, granted, released.
type lease struct {
	c       *client
	key     uint64
	session *session

	draining atomic.Bool // its executor has reported that the node drains
	finished sync.Once

	mu        sync.Mutex
	acquiring bool               // a request looks for an executor
	cancel    context.CancelFunc // of that request
	given     bool               // the client has released the key
	pending   *grant.Pending     // nil before plan
	held      *grant.Held        // nil: not granted
	replaced  map[int]*replacement

	// Of the request that looks for an executor.
	next  *grant.Candidate // named to the client, which has not offered it channels yet
	pause time.Duration
}

// replacement is a worker that is being replaced. It continues after the deadline of the request that started it.
type replacement struct {
	offer  string
	done   chan struct{} // closed when worker and err are set
	worker grant.Worker
	err    error
}

const opLease = "lease"

// admit does the part of a request that must happen in the order of the requests, so that a release finds the lease of
// the acquisition before it.
func (c *client) admit(r *request) {
	switch r.Op {
	case protocol.OpAcquire:
		if r.acquire, r.err = protocol.DecodeAcquire(r.body); r.err != nil {
			return
		}
		if r.acquire.First {
			r.lease, r.err = c.newLease(r.acquire.Key, r.acquire.Session)
		} else {
			r.lease, r.err = c.lease(opLease, r.acquire.Key)
		}
	case protocol.OpAdopt:
		if r.adopt, r.err = protocol.DecodeAdopt(r.body); r.err != nil {
			return
		}
		r.lease, r.err = c.newLease(r.adopt.Key, r.adopt.Session)
	}
	if r.lease != nil {
		r.ctx, r.err = r.lease.begin()
	}
}

// acquire is one step towards a lease.
func (c *client) acquire(r *request) (func(bool), body, error) {
	if r.err != nil {
		return nil, nil, r.err
	}
	l := r.lease
	held, cand, err := l.acquire(r.ctx, &r.acquire, r)
	if !l.done(held, err) { // the client released it meanwhile
		return nil, nil, failed(opLease, dataplane.StatusCancelled, "the lease was released while it was being acquired")
	}
	if err != nil {
		return nil, nil, err
	}
	if held == nil {
		d := protocol.Candidate{Executor: cand.Address, Node: cand.Node, Provider: cand.Provider}
		return nil, d.Encode, nil
	}
	d := protocol.Candidate{Granted: true, LeaseID: held.ID, UntilNs: untilNs(held), Library: held.Library(), Executor: held.Address,
		Node: held.Node, Provider: held.Provider, Functions: held.Functions}
	for i := range held.Workers {
		d.Workers = append(d.Workers, workerOf(&held.Workers[i]))
	}
	return l.granted, d.Encode, nil
}

// granted runs after the reply that grants the lease, so that no event precedes the reply.
func (l *lease) granted(sent bool) {
	l.mu.Lock()
	given := l.given
	if sent && !given {
		l.held.Watch(l.tell)
	}
	l.mu.Unlock()
	if !sent && !given {
		l.drop()
	}
}

// drop releases a lease that the client does not know of.
func (l *lease) drop() {
	l.c.forget(l)
	l.c.background(func() { l.abandon(false) })
}

func untilNs(h *grant.Held) int64 { return dataplane.Now() + int64(time.Until(h.Until())) }

func workerOf(w *grant.Worker) protocol.Worker {
	return protocol.Worker{PID: uint64(w.PID), Start: uint32(w.Start), Blob: w.Blob, ForkNs: int64(w.Fork), SandboxNs: int64(w.Sandbox),
		ConnectNs: int64(w.Connect), CodeNs: int64(w.Code)}
}

// newLease adds a lease to the client.
func (c *client) newLease(key, session uint64) (*lease, error) {
	s, err := c.session(opLease, session)
	if err != nil {
		return nil, err
	}
	l := &lease{c: c, key: key, session: s, pause: pauseMin}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, failed(opLease, dataplane.StatusCancelled, "the connection has ended")
	case key == 0 || c.leases[key] != nil:
		return nil, failed(opLease, dataplane.StatusInvalid, "key %#x is in use", key)
	case len(c.leases) >= 2*protocol.MaxLeases: // a lost lease and its successor count as two
		return nil, failed(opLease, dataplane.StatusBusy, "%d leases, the most for a process", len(c.leases))
	}
	c.leases[key] = l
	return l, nil
}

func (c *client) lease(op string, key uint64) (*lease, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.leases[key]; l != nil {
		return l, nil
	}
	return nil, failed(op, dataplane.StatusInvalid, "unknown lease %#x", key)
}

// forget removes a lease from the client. It returns false if it was removed before.
func (c *client) forget(l *lease) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leases[l.key] != l {
		return false
	}
	delete(c.leases, l.key)
	return true
}

// background runs f on a goroutine that the end of the client waits for.
func (c *client) background(f func()) {
	c.work.Add(1)
	go func() {
		defer c.work.Done()
		f()
	}()
}

// begin makes a request the one that looks for an executor. The context ends when the client releases the key.
func (l *lease) begin() (context.Context, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.acquiring || l.held != nil {
		return nil, failed(opLease, dataplane.StatusInvalid, "lease %#x is granted or being acquired already", l.key)
	}
	ctx, cancel := context.WithCancel(l.c.ctx)
	l.acquiring, l.cancel = true, cancel
	return ctx, nil
}

// done ends the search that begin started. After an error the key is free again. It returns false if the client has
// released the key.
func (l *lease) done(held *grant.Held, err error) bool {
	l.mu.Lock()
	l.cancel()
	l.acquiring, l.held = false, held
	given := l.given
	l.mu.Unlock()
	switch {
	case given:
		l.c.background(func() { l.abandon(false) })
	case err != nil:
		l.c.forget(l)
	}
	return !given
}

// acquire finds an executor. It returns the lease, or the candidate that the client has to offer channels to.
func (l *lease) acquire(ctx context.Context, m *protocol.Acquire, r *request) (*grant.Held, *grant.Candidate, error) {
	control := l.session.control
	until := time.Now().Add(time.Duration(max(m.WaitNs, 0)))
	ctx, stop := context.WithDeadline(ctx, until.Add(control.Timeout()))
	defer stop()
	offers := m.Offers
	if m.First {
		if err := l.plan(m, r); err != nil {
			return nil, nil, err
		}
		if m.Cached != 0 {
			held, err := l.resume(ctx, m)
			if held != nil || err != nil {
				return held, nil, err
			}
			offers = nil // these channels belonged to workers that have ended
		}
	}
	look := m.First
	for {
		seen := control.Arrivals()
		held, cand, err := l.try(ctx, look, &offers, m.Provider)
		if err == nil {
			return held, cand, nil
		}
		left := time.Until(until)
		if left <= 0 || ctx.Err() != nil || final(err) {
			return nil, nil, err
		}
		pause, stop := context.WithTimeout(ctx, min(l.pause, left))
		control.AwaitArrival(pause, seen)
		stop()
		l.pause = min(2*l.pause, pauseMax)
		look = true
		l.pending.Recheck() // so that the client makes no channels in vain
	}
}

// plan prepares the lease of a first step.
func (l *lease) plan(m *protocol.Acquire, r *request) error {
	if m.From != 0 {
		old, err := l.c.lease(opLease, m.From)
		if err != nil {
			return err
		}
		old.mu.Lock()
		defer old.mu.Unlock()
		if old.pending == nil {
			return failed(opLease, dataplane.StatusInvalid, "lease %#x was never planned", m.From)
		}
		l.pending = old.pending.Like()
		return nil
	}
	if r.file == nil {
		return failed("read the library", dataplane.StatusBadLibrary, "no descriptor came with it")
	}
	lib, err := l.session.control.Library(r.file, m.Spec.Library)
	if err != nil {
		return err
	}
	spec := l.c.spec(&m.Spec)
	spec.At = l.c.env.address(m.At)
	l.pending, err = l.session.control.Plan(lib, spec)
	return err
}

func (c *client) spec(s *protocol.Spec) grant.Spec {
	return grant.Spec{Library: s.Library, Workers: int(s.Workers), CoresPerWorker: int(s.CoresPerWorker), Memory: s.Memory,
		Mode: control.WaitMode(s.WaitMode), Duration: time.Duration(s.DurationNs), Renew: s.Flags&protocol.Renew != 0 || s.DurationNs == 0,
		CallLimit: time.Duration(s.CallLimitNs), Executor: c.env.address(s.Executor), Depth: int(s.Depth), Eager: int(s.Eager), Bulk: s.Bulk}
}

// resume asks for the workers that are cached under a key. If they have ended, it returns no lease and no error, and the
// client needs new channels.
func (l *lease) resume(ctx context.Context, m *protocol.Acquire) (*grant.Held, error) {
	k := l.session.control.TakeCached(m.Cached)
	switch {
	case k == nil: // given up; an event says so
		return nil, nil
	case len(m.Offers) != int(m.Spec.Workers) || !l.pending.UseCached(k):
		l.session.control.GiveUp(k)
		return nil, nil
	}
	grant, stop := uncancelled(ctx)
	defer stop()
	held, err := l.pending.Grant(grant, m.Offers)
	if err != nil && !l.pending.Granted() {
		return nil, nil
	}
	return held, err
}

// try asks the next candidate if it accepts the offers, or returns the candidate that needs other ones. A set of offers is
// used for one executor only, because workers of a failed start may have connected to some of them.
func (l *lease) try(ctx context.Context, look bool, offers *[][]byte, provider string) (*grant.Held, *grant.Candidate, error) {
	p := l.pending
	for {
		if look {
			l.next, look = nil, false
			if err := p.Look(ctx); err != nil {
				return nil, nil, err
			}
		}
		if l.next == nil {
			cand, err := p.Next(ctx)
			if err != nil {
				return nil, nil, err
			}
			if err := fits(opLease, cand.Address); err != nil {
				return nil, nil, &refusal{err}
			}
			l.next = &cand
		}
		if len(*offers) == 0 || provider != l.next.Provider {
			return nil, l.next, nil
		}
		blobs := *offers
		*offers, l.next = nil, nil
		grant, stop := uncancelled(ctx)
		held, err := p.Grant(grant, blobs)
		stop()
		if err == nil {
			return held, nil, nil
		}
		if p.Granted() || !goesOn(err) {
			return nil, nil, &refusal{err}
		}
	}
}

// uncancelled returns a context with the deadline of ctx that is not cancelled with it. If a client did not wait for the
// reply, the executor would keep the cores reserved for a while. done releases such a lease.
func uncancelled(ctx context.Context) (context.Context, context.CancelFunc) {
	at, _ := ctx.Deadline()
	return context.WithDeadline(context.WithoutCancel(ctx), at)
}

// goesOn reports whether the next candidate may be asked after an error of a grant.
func goesOn(err error) bool {
	var typed *dataplane.Error
	protocolError := errors.As(err, &typed) && typed.Status == dataplane.StatusProtocol
	return errors.Is(err, dataplane.ErrBusy) || errors.Is(err, dataplane.ErrConnection) && !protocolError
}

// refusal is an error of an executor that was asked for the lease.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// final reports whether waiting for another executor is useless.
func final(err error) bool {
	var asked *refusal
	return errors.As(err, &asked) && (errors.Is(err, dataplane.ErrInvalid) || errors.Is(err, dataplane.ErrUnsupported) ||
		errors.Is(err, dataplane.ErrFatal))
}

// adopt continues a lease that another agent held.
func (c *client) adopt(r *request) (func(bool), body, error) {
	const op = "adopt a lease"
	if r.err != nil {
		return nil, nil, r.err
	}
	l := r.lease
	held, err := l.adopt(r.ctx, &r.adopt, r)
	if !l.done(held, err) {
		return nil, nil, failed(op, dataplane.StatusCancelled, "the lease was released while it was being adopted")
	}
	if err != nil {
		return nil, nil, err
	}
	return l.granted, func(b []byte) []byte { return protocol.EncodeUntil(b, untilNs(held)) }, nil
}

func (l *lease) adopt(ctx context.Context, m *protocol.Adopt, r *request) (*grant.Held, error) {
	var lib *grant.Library
	if r.file != nil {
		var err error
		if lib, err = l.session.control.Library(r.file, m.Spec.Library); err != nil {
			l.c.log.Debug("the library of an adopted lease cannot be read", "library", m.Spec.Library, "error", err)
		}
	}
	a := grant.Adoption{ID: m.LeaseID, Address: l.c.env.address(m.At), Node: m.Node, Provider: m.Provider, Library: m.Library,
		Until: time.Now().Add(time.Duration(m.UntilNs - dataplane.Now()))}
	for _, pid := range m.PIDs {
		a.PIDs = append(a.PIDs, int(pid))
	}
	pending, held, err := l.session.control.Adopt(ctx, lib, l.c.spec(&m.Spec), a)
	l.pending = pending
	return held, err
}

// tell reports an event of a lease to the client.
func (l *lease) tell(e grant.Event) {
	m := protocol.Event{Key: l.key, InNs: int64(e.In), Status: int32(e.Status), Text: e.Reason}
	switch e.Kind {
	case grant.WorkerDied:
		m.Kind, m.Text, m.Worker, m.PID, m.Details = protocol.WorkerDied, e.Death(), uint32(e.Worker), uint64(e.PID), details(&e)
	case grant.LeaseEnded:
		m.Kind = protocol.LeaseEnded
	case grant.Draining:
		m.Kind = protocol.Draining
	case grant.Expiring:
		m.Kind = protocol.Expiring
	}
	drains := false
	if e.Kind == grant.Draining {
		l.draining.Store(true)
		drains = l.c.page.drain(l.key)
	}
	l.c.event(&m)
	if !drains {
		return
	}
	if err := l.c.a.barriers.pass(); err != nil {
		l.c.log.Debug("no memory barrier: the client finishes the lease itself", "error", err)
		return
	}
	if l.c.page.left(l.key) {
		l.finish()
	}
}

// finish ends the lease when its calls have ended. After an error the executor ends the lease by itself and sends an event.
func (l *lease) finish() {
	l.finished.Do(func() { l.c.background(func() { _ = l.held.Finish(l.c.ctx) }) })
}

// details returns the lines below the error about a dead worker: its stack and its last output.
func details(e *grant.Event) string {
	var b strings.Builder
	for _, part := range []struct{ title, text string }{{"on the stack", e.Backtrace}, {"its last output", string(e.Output)}} {
		text := strings.TrimRight(part.text, "\n\x00")
		if text == "" {
			continue
		}
		text = strings.ReplaceAll(strings.ReplaceAll(text, "\x00", "?"), "\n", "\n    ")
		b.WriteString("\n" + part.title + ":\n    " + text)
	}
	return b.String()
}

// abandon releases a lease whose key the client has released, or whose client has ended. If the agent is stopping, another
// agent may take the lease over, so only its watch ends.
func (l *lease) abandon(stopping bool) {
	l.mu.Lock()
	l.given = true
	held, acquiring := l.held, l.acquiring
	if acquiring {
		l.cancel()
	}
	l.mu.Unlock()
	switch {
	case acquiring: // done calls abandon again
	case held == nil:
	case stopping:
		held.StopWatch()
	default:
		if err := held.Release(context.Background()); err != nil {
			l.c.log.Debug("lease not released: its executor ends it", "lease", held.ID, "executor", held.Address, "error", err)
		}
	}
}

// release releases a lease, or caches its workers.
func (c *client) release(r *request) (body, error) {
	m, err := protocol.DecodeRelease(r.body)
	if err != nil {
		return nil, err
	}
	answer := func(cached bool) body {
		return func(b []byte) []byte { return protocol.EncodeReleased(b, cached) }
	}
	l, err := c.lease("release", m.Key)
	if err != nil || !c.forget(l) {
		c.forgetCached(m.Key) // if nothing is cached either, the acquisition failed or never began
		return answer(false), nil
	}
	l.mu.Lock()
	l.given = true
	held, acquiring := l.held, l.acquiring
	if acquiring {
		l.cancel()
	}
	l.mu.Unlock()
	switch {
	case acquiring, held == nil:
		return answer(false), nil
	case !m.Keep:
		return answer(false), held.Release(context.WithoutCancel(c.ctx))
	}
	cached, err := held.ReleaseCached(context.WithoutCancel(c.ctx), m.Key)
	return answer(cached), err
}

// forgetCached ends the workers that are cached under a key, if there are any. No event follows.
func (c *client) forgetCached(key uint64) {
	c.mu.Lock()
	sessions := slices.Collect(maps.Values(c.sessions))
	c.mu.Unlock()
	for _, s := range sessions {
		if s == nil {
			continue
		}
		if k := s.control.TakeCached(key); k != nil {
			s.control.Forget(k)
			return
		}
	}
}

// held returns a granted lease.
func (c *client) held(op string, key uint64) (*lease, *grant.Held, error) {
	l, err := c.lease(op, key)
	if err != nil {
		return nil, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil {
		return nil, nil, failed(op, dataplane.StatusInvalid, "lease %#x is not granted yet", key)
	}
	return l, l.held, nil
}

func (c *client) replace(r *request) (body, error) {
	const op = "replace a worker"
	m, err := protocol.DecodeReplace(r.body)
	if err != nil {
		return nil, err
	}
	l, held, err := c.held(op, m.Key)
	if err != nil {
		return nil, err
	}
	i := int(m.Worker)
	if i >= len(held.Workers) {
		return nil, failed(op, dataplane.StatusInvalid, "worker %d, the lease has workers 0..%d", i, len(held.Workers)-1)
	}
	l.mu.Lock()
	x := l.replaced[i]
	if x == nil || x.offer != string(m.Offer) {
		x = &replacement{offer: string(m.Offer), done: make(chan struct{})}
		if l.replaced == nil {
			l.replaced = make(map[int]*replacement)
		}
		l.replaced[i] = x
		c.background(func() {
			defer close(x.done)
			x.worker, x.err = held.Replace(c.ctx, i, m.Offer)
		})
	}
	l.mu.Unlock()
	if !await(c.ctx, x.done, time.Duration(m.TimeoutNs)) {
		return func(b []byte) []byte { return protocol.EncodeWorker(b, &protocol.Worker{}) }, nil
	}
	l.mu.Lock()
	if l.replaced[i] == x {
		delete(l.replaced, i)
	}
	l.mu.Unlock()
	if x.err != nil {
		return nil, x.err
	}
	w := workerOf(&x.worker)
	return func(b []byte) []byte { return protocol.EncodeWorker(b, &w) }, nil
}

// await waits for done, at most for d.
func await(ctx context.Context, done <-chan struct{}, d time.Duration) bool {
	patience := time.NewTimer(d)
	defer patience.Stop()
	select {
	case <-done:
		return true
	case <-patience.C:
	case <-ctx.Done():
	}
	select {
	case <-done: // done already, and d is 0
		return true
	default:
		return false
	}
}

func (c *client) inspect(r *request) (body, error) {
	m, err := protocol.DecodeWorkerName(r.Op, r.body)
	if err != nil {
		return nil, err
	}
	_, held, err := c.held("inspect a worker", m.Key)
	if err != nil {
		return nil, err
	}
	i, err := held.Inspect(c.ctx, int(m.Worker))
	if err != nil {
		return nil, err
	}
	found := protocol.Inspection{PID: i.PID, Calls: i.Calls, Failed: i.Failed, Refused: i.Refused, BytesIn: i.BytesIn,
		BytesOut: i.BytesOut, Running: i.Running, Output: i.Output}
	return found.Encode, nil
}

func (c *client) renew(r *request) (body, error) {
	m, err := protocol.DecodeRenewal(r.body)
	if err != nil {
		return nil, err
	}
	_, held, err := c.held("renew", m.Key)
	if err != nil {
		return nil, err
	}
	if err := held.Renew(c.ctx, time.Duration(m.DurationNs)); err != nil {
		return nil, err
	}
	return func(b []byte) []byte { return protocol.EncodeUntil(b, untilNs(held)) }, nil
}

func (c *client) finish(r *request) error {
	key, err := protocol.DecodeLeaseName(r.Op, r.body)
	if err != nil {
		return err
	}
	l, _, err := c.held("finish", key)
	switch {
	case err != nil: // it was released meanwhile
	case l.draining.Load():
		l.finish()
	default: // a thread has seen the flag of the lease that used the line before: the present one does not drain
		if c.page.undrain(key); l.draining.Load() { // the node has begun to drain meanwhile, and the line said TOLD
			c.page.drain(key)
		}
	}
	return nil
}

func (c *client) silent(r *request) error {
	m, err := protocol.DecodeSilence(r.body)
	if err != nil {
		return err
	}
	if _, held, err := c.held("silent worker", m.Key); err == nil {
		held.Unanswered(grant.Unanswered{Worker: int(m.Worker), Since: m.SinceNs, At: m.AtNs})
	}
	return nil
}
