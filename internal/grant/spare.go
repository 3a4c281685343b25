package grant

import (
	"context"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// EnvPool is the environment variable with the most spare leases with the same terms that the agent keeps ahead of demand; 0: none.
const EnvPool = "RFAAS_POOL"

// defaultPool is the number without the variable.
const defaultPool = 2

// spareBytes bounds the memory of the channels of a spare lease.
const spareBytes = 64 << 20

// poolOf returns the most spare leases with the same terms.
func poolOf(environment string) int {
	if n, err := strconv.Atoi(environment); err == nil {
		return min(max(n, 0), MaxWorkers)
	}
	return defaultPool
}

// Terms are what a lease must have in common with a spare one to get its workers: sizes, library, tables, executor, and the sessions whose
// connections it may use. Comparable.
type Terms struct {
	of       *shared
	key      cachedKey
	executor string
}

// Spare starts workers that no lease uses yet, with the terms of a granted lease. Use by one goroutine at a time.
type Spare struct {
	p   Pending
	use func() // gives up the connections
}

// Terms returns the terms of a granted lease. ok is false if there can be no spare leases with these terms: the provider is ofi, the lease got
// fewer workers than it wants, the channels are too large, its workers start from a seed, or the session permits no cached or no spare leases.
func (p *Pending) Terms(h *Held) (t Terms, ok bool) {
	s := &p.spec
	channels := uint64(s.Workers) * (uint64(s.Depth)*uint64(s.Eager) + s.Bulk)
	ok = h.Provider != dataplane.OFI && s.Seed == nil && p.c.opts.Keep > 0 && p.c.opts.Pool > 0 && len(h.Workers) == s.Workers && s.Bulk <= spareBytes && channels <= spareBytes
	return Terms{p.c.shared, p.key(), h.Address}, ok
}

// Closed reports whether the connections are closed, so that no lease can have these terms any more. It does not wait: connections that are being made are not closed.
func (t Terms) Closed() bool {
	if !t.of.mu.TryLock() {
		return false
	}
	defer t.of.mu.Unlock()
	return t.of.closed
}

// Pool returns the most spare leases that the session permits for the terms of one lease.
func (p *Pending) Pool() int { return p.c.opts.Pool }

// Spare prepares spare leases with the terms of a granted lease. The caller closes it.
func (p *Pending) Spare(h *Held) *Spare {
	cand := h.Candidate
	cand.Cached = nil
	s := &Spare{p: Pending{c: p.c, spec: p.spec, name: p.name, sha: p.sha, candidates: []Candidate{cand}}, use: p.c.retain()}
	s.p.spec.WorkersMin, s.p.spec.spare = 0, true
	return s
}

// Close gives up the connections. Spare leases that were kept stay.
func (s *Spare) Close() { s.use() }

// Library returns the name of the library.
func (s *Spare) Library() string { return s.p.name }

// Executor returns the address of the executor.
func (s *Spare) Executor() string { return s.p.candidates[0].Address }

// Bound reports whether channels of the provider belong to the process that makes them. If so, either the connections of spare workers pass through the
// agent at first (Brokered), or the workers are late: StartLate starts them, and they connect only when a lease takes them.
func (s *Spare) Bound() bool { return s.p.candidates[0].Provider == dataplane.Verbs }

// EnvBroker is the environment variable that decides whether the first calls of leases with spare workers on verbs pass through the agent; default 1.
const EnvBroker = "RFAAS_BROKER"

// brokerOf reports whether a value of EnvBroker lets these calls pass through the agent.
func brokerOf(environment string) bool {
	on, err := strconv.ParseBool(environment)
	return on || err != nil
}

// Brokered reports whether the agent is to connect channels on verbs, and to post for clients until they have queue pairs of their own. A client
// moves each channel with a completion queue of its own, of which it has at most dataplane.MaxLanes.
func (s *Spare) Brokered() bool {
	return s.Bound() && s.p.c.opts.Broker && s.p.spec.Workers <= dataplane.MaxLanes
}

// sizes returns offers that contain only the sizes of the channels, for StartLate.
func (s *Spare) sizes() (offers [][]byte) {
	n, _, cfg := s.Channels()
	return slices.Repeat([][]byte{dataplane.SizesOffer(cfg)}, n)
}

// Device returns the provider and the options of the device on which Start wants channels.
func (s *Spare) Device() (provider string, o dataplane.Options) {
	opts := &s.p.c.opts
	provider = s.p.candidates[0].Provider
	o = dataplane.Options{Packable: true, GIDIndex: -1, ActiveOnly: provider == dataplane.TCP}
	if provider == dataplane.Verbs {
		o = opts.verbs()
	}
	if o.ActiveOnly {
		o.Encrypt, _ = dataplane.Encryption(opts.DataEncryption, opts.AllowPlaintext)
	}
	return provider, o
}

// Channels returns the number and sizes of the channels that Start wants offers of.
func (s *Spare) Channels() (n int, mode dataplane.WaitMode, cfg dataplane.ChannelConfig) {
	spec := &s.p.spec
	return spec.Workers, dataplane.WaitMode(spec.Mode), dataplane.ChannelConfig{Depth: spec.Depth, Eager: spec.Eager, Bulk: spec.Bulk}
}

// Started are spare workers that the executor caches.
type Started struct {
	Workers []Worker
	k       *Cached
	cache   time.Duration
	p       *Pending
}

// Start starts the workers, and has the executor cache them. The caller then calls Keep or Drop. Errors: ErrBusy (too few cores or too
// little memory is free at the executor), ErrUnsupported (the executor has an earlier version).
func (s *Spare) Start(ctx context.Context, offers [][]byte) (*Started, error) {
	return s.start(ctx, offers, false)
}

// StartLate starts late workers.
func (s *Spare) StartLate(ctx context.Context) (*Started, error) {
	return s.start(ctx, s.sizes(), true)
}

func (s *Spare) start(ctx context.Context, offers [][]byte, late bool) (*Started, error) {
	const op = "start spare workers"
	p, cand := &s.p, s.p.candidates[0]
	ctx, cancel := p.c.bound(ctx)
	defer cancel()
	conn, err := p.c.dial(op, cand.Address)
	if err != nil {
		return nil, err
	}
	cl := control.NewExecutorClient(conn)
	r, _, err := p.ask(ctx, cl, offers)
	switch {
	case err != nil:
		return nil, fromControl(op, cand.Address, err)
	case r.CodeUnknown || len(r.TablesUnknown) > 0:
		return nil, fail(op, dataplane.StatusBusy, "%s has evicted the library or a table", cand.Address)
	}
	last := &Held{Candidate: cand, Wanted: p.spec.Workers, Functions: r.Functions, Duration: milliseconds(r.DurationMs), asked: p.spec.Duration, sha: p.sha}
	for _, w := range r.Workers {
		last.Workers = append(last.Workers, workerOf(w))
	}
	st := &Started{Workers: last.Workers, k: &Cached{cand: cand, id: r.LeaseId, key: p.key(), library: p.name, cl: cl, last: last, fresh: true, late: late},
		cache: milliseconds(r.CacheMs), p: p}
	st.k.claimable(p.c, r.Claim)
	switch {
	case r.CacheMs == 0:
		err = fail(op, dataplane.StatusUnsupported, "%s has an earlier version", cand.Address)
	case len(r.Workers) != p.spec.Workers || r.Tables != uint32(len(p.spec.all())):
		err = fail(op, dataplane.StatusProtocol, "%s started %d workers with %d tables, want %d with %d", cand.Address, len(r.Workers), r.Tables, p.spec.Workers,
			len(p.spec.all()))
	default:
		return st, nil
	}
	st.Drop()
	return nil, err
}

// Drop ends the workers.
func (s *Started) Drop() { s.p.c.Forget(s.k) }

// Keep lists the workers for the next lease of any session with these terms. It takes over their channels, which are nil if the workers are late.
// gone is called once, when the workers are no longer listed: a lease has taken them, or they were given up unused. failed is called if a lease has taken
// them and does not get them. Neither may call this package.
func (s *Started) Keep(channels io.Closer, gone func(taken bool), failed func()) {
	c, k := s.p.c, s.k
	k.handed, k.spare, k.failed, k.use = channels, gone, failed, c.retain()
	cache := &c.cache
	cache.mu.Lock()
	k.expireIn(c, s.cache)
	cache.all = append(cache.all, k)
	closed, oldest := cache.closed, cache.beyond(nil, c.opts.Keep)
	cache.mu.Unlock()
	if closed {
		c.expire(k)
	}
	if oldest != nil {
		c.expire(oldest)
	}
}

// left tells the agent that a spare lease is no longer listed. It does nothing for other leases.
func (k *Cached) left(taken bool) {
	if k.spare != nil {
		k.spare(taken)
		k.spare = nil
	}
}

// Failed reports that a lease has taken the workers and does not get them. It is for spare leases, and does nothing for others.
func (k *Cached) Failed() {
	if k.failed != nil {
		k.failed()
	}
}

// TakeSpare removes and returns a spare lease that a client can claim, with the terms and on the executor of a lease that is being released. It returns nil
// if there is none, or if the session has as many cached leases as it may. The caller passes it to PutAhead.
func (p *Pending) TakeSpare(h *Held) *Cached {
	s := &p.c.cache
	s.mu.Lock()
	defer s.mu.Unlock()
	own := 0
	for _, k := range s.all {
		if k.owner == p.c {
			own++
		}
	}
	if own >= p.c.opts.Keep { // PutAhead would make the session give up one of its own
		return nil
	}
	i := slices.IndexFunc(s.all, func(k *Cached) bool {
		return k.fresh && k.owner == nil && k.claim != nil && k.handed != nil && k.cand.Address == h.Address && p.suits(k) && p.Lasts(k) && !k.Claimed()
	})
	if i < 0 {
		return nil
	}
	k := s.all[i]
	s.remove(k)
	return k
}

// PutAhead lists a spare lease under a name of this session, whose client may claim it from now on. The session's cached leases include it.
func (p *Pending) PutAhead(k *Cached, name uint64) {
	s := &p.c.cache
	s.mu.Lock()
	use := k.use
	k.name, k.last.by, k.use = name, p, nil
	s.mu.Unlock()
	p.c.keep(k, time.Until(k.expires))
	use()
}
