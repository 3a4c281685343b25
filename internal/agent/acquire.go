package agent

import (
	"context"
	"errors"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// Pauses between two attempts to find an executor with room. A pause doubles after each attempt, up to roomPause if a report of room caused
// the attempt, else up to pauseMax. After vainAttempts attempts in a row that were refused although there was room, for example because of a
// limit of the tenant, it grows up to vainPause. A new executor ends a pause.
const (
	pauseMin  = 5 * time.Millisecond
	roomPause = 40 * time.Millisecond
	pauseMax  = 500 * time.Millisecond

	vainAttempts = 10
	vainPause    = 2 * time.Second
)

// backoff is the pause before the next attempt.
type backoff struct {
	pause time.Duration
	vain  int // attempts in a row for which an executor had reported room
}

// next sets the pause after the one that has just ended. room: a report of room ended it.
func (b *backoff) next(room bool) {
	most := pauseMax
	switch {
	case !room:
		b.vain = 0
	case b.vain < vainAttempts:
		b.vain++
		most = roomPause
	default:
		most = vainPause
	}
	b.pause = min(2*b.pause, most)
}

// admit does the part of a request that must happen in the order of the requests, so that a release finds the lease of an
// earlier acquisition.
func (c *client) admit(r *request) {
	switch r.Op {
	case protocol.OpAcquire:
		if r.acquire, r.err = protocol.DecodeAcquire(r.body); r.err != nil {
			return
		}
		if r.acquire.First {
			if from := r.acquire.From; from != 0 { // found here, because its release may follow at once
				if r.from, r.err = c.lease(opLease, from); r.err != nil {
					return
				}
			}
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

// acquire runs one step of an acquisition.
func (c *client) acquire(r *request) (func(bool), body, error) {
	if r.err != nil {
		return nil, nil, r.err
	}
	l := r.lease
	held, cand, err := l.acquire(r.ctx, &r.acquire, r)
	err = c.explainLibrary(err)
	if !l.done(held, err) { // the client released it meanwhile
		return nil, nil, failed(opLease, dataplane.StatusCancelled, "the lease was released while it was being acquired")
	}
	if err != nil {
		return nil, nil, err
	}
	if held == nil {
		d := protocol.Candidate{Executor: cand.Address, Node: cand.Node, Provider: cand.Provider}
		l.giveTaken(r, &d)
		return nil, d.Encode, nil
	}
	d := protocol.Candidate{Granted: true, Handed: l.holds(), LeaseID: held.ID, UntilNs: untilNs(held), Library: held.Library(), Executor: held.Address,
		Node: held.Node, Provider: held.Provider, Functions: held.Functions}
	l.growth.present = len(held.Workers)
	c.a.spares.acquired(l.pending, held, held.Cached == nil, time.Now())
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
		l.growth.begin(l)
	}
	l.mu.Unlock()
	if !sent && !given {
		l.drop()
	}
}

// drop releases a lease whose grant did not reach the client.
func (l *lease) drop() {
	l.c.forget(l)
	l.c.background(func() { l.abandon(false) })
}

// newLease adds a lease to the client.
func (c *client) newLease(key, session uint64) (*lease, error) {
	s, err := c.session(opLease, session)
	if err != nil {
		return nil, err
	}
	l := &lease{c: c, key: key, session: s, backoff: backoff{pause: pauseMin}}
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

// begin marks the lease as being acquired. The context ends when the client releases the key.
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
	if err != nil {
		l.clear(false)
	}
	switch {
	case given:
		l.c.background(func() { l.abandon(false) })
	case err != nil:
		l.c.forget(l)
	}
	return !given
}

// acquire finds an executor. It returns the lease, or the candidate for which the client must offer channels.
func (l *lease) acquire(ctx context.Context, m *protocol.Acquire, r *request) (*grant.Held, *grant.Candidate, error) {
	control := l.session.control
	if m.First {
		if err := l.prepare(ctx, m, r); err != nil {
			return nil, nil, err
		}
	}
	until := time.Now().Add(time.Duration(max(m.WaitNs, 0)))
	ctx, stop := context.WithDeadline(ctx, until.Add(control.Timeout()+l.pending.ExtraTime()))
	defer stop()
	offers := m.Offers
	if m.First {
		if m.Cached != 0 {
			held, err := l.resume(ctx, m)
			if held != nil || err != nil {
				return held, nil, err
			}
			offers = nil // these channels belonged to workers that have ended
		}
		if cand := l.takeCached(ctx); cand != nil && !l.offersSuit(m) {
			return nil, cand, nil
		}
	}
	k := l.takeTaken()
	look := m.First && m.From == 0 || k != nil
	if m.First && len(m.Offers) == 0 && m.WaitNs > 0 {
		l.pending.Recheck() // the client makes channels only when there is room
	}
	if k != nil {
		held, err := l.resumeTaken(ctx, m, k)
		if held != nil || err != nil {
			return held, nil, err
		}
		offers = nil
	}
	var w waiter
	defer w.close()
	for {
		seen := control.Arrivals()
		held, cand, err := l.try(ctx, look, &offers, m.Provider)
		if err == nil {
			return held, cand, nil
		}
		if final(err) || l.pending.Impossible(err) || !w.await(ctx, l.pending, until, seen, &l.backoff) {
			return nil, nil, err
		}
		if cand := l.takeCached(ctx); cand != nil { // it was released while this client was waiting
			return nil, cand, nil
		}
		look = true
		l.pending.Recheck() // so that the client does not make channels for an unusable executor
	}
}

// takeCached takes a cached lease with the same terms. The client gets its channels with the reply. It waits for a lease that
// is being released. It returns the executor of the cached lease, or nil if there is none.
func (l *lease) takeCached(ctx context.Context) *grant.Candidate {
	k := l.pending.TakeHanded(ctx)
	if k == nil {
		return nil
	}
	l.mu.Lock()
	l.taken = k
	l.mu.Unlock()
	cand := k.Candidate()
	return &cand
}

// offersSuit reports whether the workers that were taken are late (grant.Cached.Late), and the client has already offered new channels for them.
func (l *lease) offersSuit(m *protocol.Acquire) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken.Late() && m.Cached == 0 && len(m.Offers) > 0 && m.Provider == l.taken.Candidate().Provider
}

// seeker looks for executors.
type seeker interface {
	Rooms(ctx context.Context) *grant.Rooms
	Follow(ctx context.Context, r *grant.Rooms) bool
}

// waiter waits between attempts to find room. The zero value is ready.
type waiter struct{ rooms *grant.Rooms }

// await returns true when another attempt may succeed, and false when `until` has passed or ctx has ended. seen is the value of Arrivals
// before the last attempt.
func (w *waiter) await(ctx context.Context, s seeker, until time.Time, seen uint64, b *backoff) bool {
	if time.Until(until) <= 0 || ctx.Err() != nil {
		return false
	}
	if w.rooms == nil {
		w.rooms = s.Rooms(ctx)
	}
	all := s.Follow(ctx, w.rooms)
	bounded, stop := context.WithDeadline(ctx, until)
	defer stop()
	b.next(w.rooms.Await(bounded, seen, b.pause, all))
	return ctx.Err() == nil
}

func (w *waiter) close() {
	if w.rooms != nil {
		w.rooms.Close()
	}
}

// prepare plans a lease in the first step of its acquisition.
func (l *lease) prepare(ctx context.Context, m *protocol.Acquire, r *request) error {
	if r.from != nil {
		return l.planBeyond(r.from, dataplane.Status(m.Status), m.Reason)
	}
	if r.file == nil {
		return failed("read the library", dataplane.StatusBadLibrary, "the request has no descriptor of the library")
	}
	lib, err := l.session.control.Library(r.file, m.Spec.Library)
	if err != nil {
		return err
	}
	spec := l.c.spec(&m.Spec)
	if spec.Seed, err = seedOf(m); err != nil {
		return err
	}
	spec.At = l.c.env.address(m.At)
	spec.Tables = l.session.tables.current()
	if spec.Bundle, err = l.bundle(ctx, lib, &m.Spec, r); err != nil {
		return err
	}
	l.pending, err = l.session.control.Plan(lib, spec)
	return err
}

// planBeyond continues the search that led to the lease old. It does not ask the executor of old again.
func (l *lease) planBeyond(old *lease, st dataplane.Status, reason string) error {
	old.mu.Lock()
	defer old.mu.Unlock()
	if old.held == nil || old.pending == nil {
		return failed(opLease, dataplane.StatusInvalid, "lease %#x was not granted", old.key)
	}
	var err error
	l.pending, err = old.pending.Beyond(old.held, st, reason)
	return err
}

// seedOf returns the seed of a lease, or nil.
func seedOf(m *protocol.Acquire) (*control.Seed, error) {
	if m.SeedFunction == "" {
		return nil, nil
	}
	s := &control.Seed{Function: m.SeedFunction, Payload: m.SeedPayload, LimitMs: uint64(max(m.SeedLimitNs/1e6, 1))}
	if m.SeedName == "" {
		return s, nil
	}
	var err error
	s.Name, s.Version, s.Origin, err = grant.ParseSeedName(m.SeedName)
	return s, err
}

func (c *client) spec(s *protocol.Spec) grant.Spec {
	return grant.Spec{Library: s.Library, Runtime: s.Runtime, Workers: int(s.Workers), WorkersMin: int(s.WorkersMin), CoresPerWorker: int(s.CoresPerWorker), Memory: s.Memory,
		Mode: control.WaitMode(s.WaitMode), Duration: time.Duration(s.DurationNs), Renew: s.Flags&protocol.Renew != 0 || s.DurationNs == 0,
		CallLimit: time.Duration(s.CallLimitNs), InitCall: s.Init != 0, KeepsState: s.Flags&protocol.Reuse != 0, Executor: c.env.address(s.Executor), Depth: int(s.Depth), Eager: int(s.Eager), Bulk: s.Bulk}
}

// resume asks for the workers that are cached under a key. If they have ended, it returns no lease and no error, and the
// client needs new channels.
func (l *lease) resume(ctx context.Context, m *protocol.Acquire) (*grant.Held, error) {
	k := l.session.control.TakeCached(m.Cached)
	switch {
	case k == nil: // given up, or taken by another session; the client learns this by an event
		return nil, nil
	case len(m.Offers) != l.pending.Workers() || !l.pending.UseCached(k):
		l.session.control.GiveUp(k)
		return nil, nil
	}
	return l.grantCached(ctx, m, k)
}

// try asks the next candidate if the offers suit it. Otherwise it returns the candidate, and the client makes new offers. A set of
// offers is used for one executor only, because workers of a failed start may have connected to some of them.
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

// goesOn reports whether another executor may be asked after this error of a grant.
func goesOn(err error) bool {
	var typed *dataplane.Error
	protocolError := errors.As(err, &typed) && typed.Status == dataplane.StatusProtocol
	return errors.Is(err, dataplane.ErrBusy) || errors.Is(err, dataplane.ErrConnection) && !protocolError
}

// refusal is an error of an executor that was asked for the lease.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// final reports whether an error also holds for every other executor, so that waiting is useless.
func final(err error) bool {
	var asked *refusal
	return errors.As(err, &asked) && (errors.Is(err, dataplane.ErrInvalid) || errors.Is(err, dataplane.ErrUnsupported) ||
		errors.Is(err, dataplane.ErrFatal))
}

// resumeTaken is like resume. It is for workers whose channels the agent has given to the client, and for late workers, to which the client has
// offered new channels.
func (l *lease) resumeTaken(ctx context.Context, m *protocol.Acquire, k *grant.Cached) (*grant.Held, error) {
	offered := l.key
	if k.Late() {
		offered = 0
	}
	if m.Cached != offered || m.Provider != k.Candidate().Provider || len(m.Offers) != l.pending.Workers() || !l.pending.UseCached(k) {
		l.session.control.Forget(k)
		return nil, nil
	}
	return l.grantCached(ctx, m, k)
}

func (l *lease) grantCached(ctx context.Context, m *protocol.Acquire, k *grant.Cached) (*grant.Held, error) {
	ctx, stop := uncancelled(ctx)
	defer stop()
	held, err := l.pending.GrantCached(ctx, k, m.Offers)
	if err == nil {
		l.keepHanded(k)
		return held, nil
	}
	k.Failed()
	k.Close()
	if !l.pending.Granted() {
		return nil, nil
	}
	return nil, err
}
