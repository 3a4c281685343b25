package executor

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// Named seeds. CreateSeed executes a setup function beside the workers of a lease, and publishes the memory of its process under a name, until its time to
// live is over. Each publication of a name is another version. Leases that name the seed start from it. Its memory is that of a table of its owner, and is
// charged to the tenant from the publication to its end, whether leases use it or not.

const seedNameMost = 63

// seedUnconfirmed is how long a new seed lasts without a renewal. The agent renews the seed when it has received the reply, so the tenant pays at most this long for a seed
// whose reply was lost.
const seedUnconfirmed = 30 * time.Second

// published is a named seed. The lock of the publications guards what changes: until and timer.
type published struct {
	id    seedID
	table *table // with a reference
	about *control.SeedDescription
	ttl   time.Duration
	until time.Time
	timer *time.Timer // nil until begin, after a handover
}

// seedID names a published seed. Each tenant has its own names.
type seedID struct {
	tenant, name string
	version      uint32
}

// publications has the named seeds of an executor.
type publications struct {
	tables   *tableStore
	accounts func() *accounts // nil: nothing is charged
	now      func() time.Time
	log      *slog.Logger

	mu     sync.Mutex
	closed bool
	all    map[seedID]*published
	last   uint32 // version of the last publication. The first one is random, so that it is unlikely that another executor, or an earlier one at this address, has used the same versions
}

func newPublications(tables *tableStore, accounts func() *accounts, now func() time.Time, log *slog.Logger) *publications {
	return &publications{tables: tables, accounts: accounts, now: now, log: log, all: map[seedID]*published{}, last: uint32(randomID() >> 34)}
}

// add publishes a seed. The seed lasts for seedUnconfirmed unless it is renewed. add takes the reference to the table, and stores the seed's version in its description.
func (p *publications) add(about *control.SeedDescription, t *table, ttl time.Duration) (*published, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, grpcError(lease.ErrDraining)
	}
	p.last++
	about.Version = p.last
	s := p.insert(about, t, ttl, min(ttl, seedUnconfirmed))
	p.accounts().keep(about.GetTenant(), t)
	p.watch(s)
	return s, nil
}

// insert adds a seed that ends after `left`. The caller holds mu.
func (p *publications) insert(about *control.SeedDescription, t *table, ttl, left time.Duration) *published {
	s := &published{id: seedID{about.GetTenant(), about.GetName(), about.GetVersion()}, table: t, about: about, ttl: ttl, until: p.now().Add(left)}
	p.all[s.id] = s
	return s
}

// watch ends a seed when its time is over. The caller holds mu.
func (p *publications) watch(s *published) {
	s.timer = time.AfterFunc(max(s.until.Sub(p.now()), 0), func() { p.expire(s) })
}

// find returns a seed of a tenant, or an error that names it. Version 0 is the latest. The caller holds mu.
func (p *publications) find(tenant, name string, version uint32) (*published, error) {
	latest := p.all[seedID{tenant, name, version}]
	for id, s := range p.all {
		if version == 0 && id.tenant == tenant && id.name == name && (latest == nil || id.version > latest.id.version) {
			latest = s
		}
	}
	if latest != nil {
		return latest, nil
	}
	if version > 0 {
		name = fmt.Sprintf("%s:%d", name, version)
	}
	return nil, control.Errorf(control.ClassLease, "this executor has no seed %.80s of tenant %q: it was released, its time has run out, or the executor was restarted", name, tenant)
}

// acquire returns the table of a seed with a new reference, and its description; nil: there is no such seed.
func (p *publications) acquire(tenant, name string, version uint32) (*table, *control.SeedDescription) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := p.find(tenant, name, version)
	if err != nil {
		return nil, nil
	}
	p.tables.refer(s.table)
	return s.table, s.about
}

// has reports whether a table is that of a seed.
func (p *publications) has(t *table) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		if s.table == t {
			return true
		}
	}
	return false
}

// expire ends a seed whose time has run out, unless it was renewed meanwhile.
func (p *publications) expire(s *published) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := s.until.Sub(p.now()); left > 0 && p.all[s.id] == s {
		s.timer.Reset(left)
		return
	}
	p.remove(s)
}

// withdraw withdraws the seed of a table whose file has grown: nobody pays for that memory. The memory is free when no lease uses it any more.
func (p *publications) withdraw(t *table) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		if s.table == t {
			p.log.Warn("a seed is withdrawn, because workers have made its file grow", "tenant", s.id.tenant, "seed", s.id.name, "version", s.id.version, "bytes", t.size)
			p.remove(s)
			return
		}
	}
}

// remove withdraws a seed. The caller holds mu.
func (p *publications) remove(s *published) {
	if p.all[s.id] != s {
		return
	}
	delete(p.all, s.id)
	if s.timer != nil {
		s.timer.Stop()
	}
	p.accounts().unkeep(s.about.GetTenant(), s.table)
	p.tables.drop(s.table)
	p.tables.release([]*table{s.table})
}

// close withdraws all seeds.
func (p *publications) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, s := range slices.Collect(maps.Values(p.all)) {
		p.remove(s)
	}
}

// reply describes a seed. The caller holds mu.
func (p *publications) reply(s *published) *control.SeedReply {
	return &control.SeedReply{Seed: s.about, LeftMs: milliseconds(s.until.Sub(p.now())), Children: s.table.seed.Children(), Key: s.table.sum[:]}
}

// ---- requests ----

// seedTTL returns the time to live of a request.
func (e *Executor) seedTTL(ms uint64, def time.Duration) (time.Duration, error) {
	longest := e.cfg.Settings.LeaseMax
	if ms > uint64(longest/time.Millisecond) {
		return 0, invalidf("ttl_ms %d of a seed (option ttl_ns): this executor permits 1 to %d ms (%v)", ms, longest.Milliseconds(), longest)
	}
	return cmp.Or(time.Duration(ms)*time.Millisecond, def), nil
}

func checkSeedName(name string) error {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
	if len(name) < 1 || len(name) > seedNameMost || strings.Trim(name, letters) != "" || strings.ContainsFunc(name, func(r rune) bool { return !strings.ContainsRune(letters, r) }) {
		return invalidf("name of the seed: %.80q, want 1 to %d characters of A-Z, a-z, 0-9, dot, underscore and hyphen", name, seedNameMost)
	}
	return nil
}

// CreateSeed makes a seed beside the workers of a lease, and publishes it.
func (e *Executor) CreateSeed(ctx context.Context, req *control.CreateSeedRequest) (reply *control.SeedReply, err error) {
	defer e.turns.enter()()
	deepen()
	if err := e.gate.Take(ctx, quota.Leases, 1); err != nil { // it starts a process, as a lease does
		return nil, err
	}
	e.bookClaim(lease.ID(req.GetLeaseId()))
	h, err := e.findFor(ctx, "CreateSeed", lease.ID(req.GetLeaseId()))
	if err != nil {
		return nil, err
	}
	l, err := e.table.Get(h.id)
	if err != nil {
		return nil, grpcError(err)
	}
	if err = checkSeedName(req.GetName()); err == nil {
		err = checkSetup(req.GetFunction(), req.GetPayload(), req.GetLimitMs())
	}
	if err != nil {
		return nil, err
	}
	ttl, err := e.seedTTL(req.GetTtlMs(), e.cfg.Settings.LeaseMax)
	if err != nil {
		return nil, err
	}
	if len(h.spec.Tables) > 0 {
		return nil, control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition, "seed %s: the lease has tables, and the setup function could keep their addresses: use a lease of a session without tables", req.GetName())
	}
	if err = h.beginMaking(); err != nil {
		return nil, err
	}
	defer h.endMaking()
	e.work.Add(1)
	defer e.work.Done()
	w := &wish{Seed: &control.Seed{Function: req.GetFunction(), Payload: req.GetPayload(), LimitMs: req.GetLimitMs()}, owner: codeOwner(ctx), tenant: l.Terms.Tenant,
		heap: zygote.SeedHeap(h.spec.MemoryLimit)}
	w.key = newSeedKey()
	t, err := e.makeNamed(ctx, h, w)
	e.accounts.spent(h.id, w.cpu)
	if err != nil {
		return nil, err
	}
	p := e.published
	about, err := e.describe(h, &l.Terms, w, t)
	var s *published
	if err == nil {
		about.Name = req.GetName()
		s, err = p.add(about, t, ttl)
	}
	if err != nil {
		e.tables.drop(t)
		e.tables.release([]*table{t})
		return nil, grpcError(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reply(s), nil
}

// newSeedKey returns the key of a seed that only its name finds.
func newSeedKey() sum {
	return sha256.Sum256(binary.LittleEndian.AppendUint64([]byte("named seed"), uint64(randomID())))
}

// makeNamed makes the seed of a wish beside the workers of a lease. Its process takes as much memory as a worker, which the tenant pays for
// like that of a table.
func (e *Executor) makeNamed(caller context.Context, h *holding, w *wish) (*table, error) {
	ctx, cancel := context.WithCancelCause(h.ctx)
	defer cancel(nil)
	defer context.AfterFunc(caller, func() { cancel(errors.New("the client has given up its request")) })()
	defer e.turns.endOnClose(cancel)()
	limit := min(w.Limit(), cmp.Or(e.initLimit(), e.cfg.Settings.LeaseMax))
	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the setup function has not returned within %v", limit.Round(time.Millisecond)))
	defer stop()
	memory := h.spec.MemoryLimit
	if err := e.tables.makeRoom(memory); err != nil {
		return nil, control.Errorf(control.ClassBusy, "no memory for the process of the setup function, which may take %d bytes: %v", memory, err)
	}
	process := &table{sum: w.key, size: memory}
	e.accounts.keep(w.tenant, process)
	t, err := e.tables.seed(ctx, w.key, w.owner, func(*seedRoom) (*zygote.Seed, error) { return e.makeSeed(ctx, h, w) })
	e.accounts.unkeep(w.tenant, process)
	e.tables.giveBack(memory)
	switch {
	case err != nil && h.leaves():
		return nil, grpcError(lease.ErrDraining)
	case err != nil && h.ctx.Err() != nil:
		return nil, e.ended(h.id)
	case err != nil && context.Cause(ctx) == errHandsOver:
		return nil, control.Errorf(control.ClassBusy, "the executor hands over to the program that is installed now: try again")
	case err != nil && ctx.Err() != nil && caller.Err() == nil:
		return nil, control.StatusError(int32(dataplane.StatusTimeLimit), context.Cause(ctx).Error())
	case err != nil:
		return nil, grpcError(err)
	case t.seed == nil:
		refused := t.refused
		e.tables.drop(t)
		e.tables.release([]*table{t})
		return nil, control.StatusError(zygote.StatusUnsupported, refused)
	}
	return t, nil
}

// describe describes a seed that a lease has made.
func (e *Executor) describe(h *holding, terms *lease.Terms, w *wish, t *table) (*control.SeedDescription, error) {
	layout, err := t.seed.Layout()
	if err != nil {
		return nil, err
	}
	d := &control.SeedDescription{Tenant: terms.Tenant, CodeSha256: h.code.sum[:], Function: w.GetFunction(), Payload: w.GetPayload(), Memory: h.spec.MemoryLimit, HeapUnits: t.seed.Units,
		Size: layout.Size, Bytes: t.seed.Bytes, ThreadPointer: layout.ThreadPointer, Processor: layout.Processor[:], LoadNs: uint64(t.seed.Load), SetupNs: uint64(t.seed.Setup),
		CaptureNs: uint64(t.seed.Capture), Node: e.cfg.Node, BundleSha256: h.bundleSum(), Root: layout.RootSize, Warning: t.seed.Warning}
	for _, m := range layout.Modules {
		d.Modules = append(d.Modules, &control.SeedModule{Name: m.Name, BuildId: m.Build[:], Base: m.Base, Data: m.Data, DataSize: m.DataSize, Tls: m.TLS, TlsSize: m.TLSSize})
	}
	return d, nil
}

// named returns the seed of a request. The caller holds the lock of the publications.
func (e *Executor) named(ctx context.Context, req *control.SeedRequest) (*published, error) {
	tenant, err := e.payer(ctx, req.GetTenant())
	if err != nil {
		return nil, err
	}
	return e.published.find(tenant, req.GetName(), req.GetVersion())
}

// DescribeSeed describes a named seed.
func (e *Executor) DescribeSeed(ctx context.Context, req *control.SeedRequest) (*control.SeedReply, error) {
	defer e.turns.enter()()
	p := e.published
	p.mu.Lock()
	s, err := e.named(ctx, req)
	var r *control.SeedReply
	if err == nil {
		r = p.reply(s)
		p.tables.refer(s.table)
	}
	p.mu.Unlock()
	if err != nil {
		return nil, err
	}
	defer e.tables.release([]*table{s.table})
	if req.GetSegments() {
		c, err := e.lender.contents(ctx, s.table.seed)
		if err != nil {
			return nil, grpcError(err)
		}
		r.Seed = proto.CloneOf(s.about)
		r.Seed.Segments = segmentsOf(c)
	}
	return r, nil
}

// RenewSeed makes a named seed last longer. It never makes it shorter.
func (e *Executor) RenewSeed(ctx context.Context, req *control.SeedRequest) (*control.SeedReply, error) {
	defer e.turns.enter()()
	p := e.published
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := e.named(ctx, req)
	if err != nil {
		return nil, err
	}
	ttl, err := e.seedTTL(req.GetTtlMs(), s.ttl)
	if err != nil {
		return nil, err
	}
	if until := p.now().Add(ttl); until.After(s.until) {
		s.until = until // the timer looks at it when it fires
	}
	return p.reply(s), nil
}

// ReleaseSeed withdraws a named seed.
func (e *Executor) ReleaseSeed(ctx context.Context, req *control.SeedRequest) (*control.ReleaseSeedReply, error) {
	defer e.turns.enter()()
	p := e.published
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := e.named(ctx, req)
	if err != nil {
		return nil, err
	}
	p.remove(s)
	return &control.ReleaseSeedReply{}, nil
}

// ---- handover ----

// save returns the seeds for another program. Their tables are handed over with all tables.
func (p *publications) save(clock handover.Clock) (all []*handover.NamedSeed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		about, err := proto.Marshal(s.about)
		if err != nil {
			continue // impossible: gRPC has sent it
		}
		all = append(all, &handover.NamedSeed{Table: s.table.sum[:], About: about, Ttl: int64(s.ttl), Until: clock.Put(s.until), Children: s.table.seed.Children()})
	}
	return all
}

// restore takes over seeds. One that it cannot take over is missing afterwards. Leases that name it make it again.
func (p *publications) restore(all []*handover.NamedSeed, clock handover.Clock) {
	for _, m := range all {
		about := &control.SeedDescription{}
		err := proto.Unmarshal(m.GetAbout(), about)
		if err == nil && len(m.GetTable()) != len(sum{}) {
			err = fmt.Errorf("key of %d bytes", len(m.GetTable()))
		}
		var t *table
		if err == nil {
			if t = p.tables.take(sum(m.GetTable()), ""); t == nil {
				err = errors.New("its memory is missing")
			}
		}
		p.mu.Lock()
		p.last = max(p.last, about.GetVersion())
		if err == nil {
			t.seed.Continue(m.GetChildren())
			p.insert(about, t, time.Duration(m.GetTtl()), clock.Get(m.GetUntil()).Sub(p.now()))
		} else {
			p.log.Error("a seed is not taken over", "seed", about.GetName(), "version", about.GetVersion(), "error", err)
		}
		p.mu.Unlock()
	}
}

// begin begins to charge the seeds that were taken over, and to end them when their time is over.
func (p *publications) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		p.accounts().keep(s.about.GetTenant(), s.table)
		p.watch(s)
	}
}
