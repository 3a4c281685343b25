package agent

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
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
	pending   *grant.Pending     // nil before prepare
	held      *grant.Held        // nil: not granted
	replaced  map[int]*replacement
	taken     *grant.Cached // cached lease whose channels the client has received but not offered yet
	handed    *handed       // the lease's channels as they were before the lease; nil: the agent does not hold them
	growth    growth
	coming    *handed // the channels that the client hands over before it releases the lease

	// Of the request that looks for an executor.
	next    *grant.Candidate // named to the client, which has not offered it channels yet
	backoff backoff
}

// replacement is a worker that is being replaced. It continues after the deadline of the request that started it.
type replacement struct {
	offer  string
	done   chan struct{} // closed when worker and err are set
	worker grant.Worker
	err    error
}

const opLease = "lease"

func untilNs(h *grant.Held) int64 { return dataplane.Now() + int64(time.Until(h.Until())) }

func workerOf(w *grant.Worker) protocol.Worker {
	return protocol.Worker{PID: uint64(w.PID), Start: uint32(w.Start), Blob: w.Blob, ForkNs: int64(w.Fork), SandboxNs: int64(w.Sandbox),
		ConnectNs: int64(w.Connect), CodeNs: int64(w.Code), Unseeded: w.Unseeded}
}

// known returns the lease of a key, or nil.
func (c *client) known(key uint64) *lease {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leases[key]
}

func (c *client) lease(op string, key uint64) (*lease, error) {
	c.claiming.Lock() // findClaims may be adding or changing it
	l := c.known(key)
	c.claiming.Unlock()
	if l == nil {
		return nil, failed(op, dataplane.StatusInvalid, "unknown lease %#x", key)
	}
	return l, nil
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

// tell reports an event of a lease to the client.
func (l *lease) tell(e grant.Event) {
	m := protocol.Event{Key: l.key, Kind: uint32(e.Kind), InNs: int64(e.In), Status: int32(e.Status), Text: e.Reason}
	if e.Kind == grant.WorkerDied {
		e.Backtrace = l.plan().WithLines(e.Backtrace)
		m.Text, m.Worker, m.PID, m.Details = e.Death(), uint32(e.Worker), uint64(e.PID), details(&e)
	}
	if e.Kind == grant.LeaseEnded {
		l.growth.end()
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
	if i >= held.Wanted {
		return nil, failed(op, dataplane.StatusInvalid, "worker %d, the lease has workers 0..%d", i, held.Wanted-1)
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
			x.worker, x.err = held.Replace(c.ctx, i, m.Offer, m.Kill)
			l.growth.tried(i, x.err)
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
	default: // a thread has seen the drain flag of the line's previous lease; this lease does not drain
		if c.page.undrain(key); l.draining.Load() { // the node has begun to drain while the line said TOLD
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
