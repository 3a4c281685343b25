package executor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// restore takes over the leases of a state, with their workers. The zygotes z must have been adopted, and e must be a new executor. After an
// error the caller must end all workers. After success it must call begin when the executor is complete.
func (e *Executor) restore(s *handover.State, z *zygote.Zygote) error {
	if len(s.GetIncarnation()) != len(e.incarnation) {
		return fmt.Errorf("take over: an incarnation of %d bytes", len(s.GetIncarnation()))
	}
	copy(e.incarnation[:], s.GetIncarnation())
	e.cordoned = s.GetCordoned()
	if at := s.GetWantedBack(); at > 0 && at <= latestUntil {
		e.back.set(time.Unix(int64(at), 0))
	}
	if err := e.codes.restore(s.GetLibraries()); err != nil {
		return err
	}
	if err := e.restoreTables(s.GetTables()); err != nil {
		return err
	}
	clock := handover.NewClock()
	e.published.restore(s.GetSeeds(), clock)
	saved := make([]lease.Saved, len(s.GetLeases()))
	for i, l := range s.GetLeases() {
		var err error
		if saved[i], err = savedLease(l, clock); err != nil {
			return fmt.Errorf("take over lease %d: %w", l.GetId(), err)
		}
	}
	if err := e.table.Restore(saved); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	for _, l := range s.GetLeases() {
		if err := e.restoreHolding(l, z, clock); err != nil {
			return fmt.Errorf("take over lease %d: %w", l.GetId(), err)
		}
	}
	return nil
}

// restore takes over libraries.
func (s *codeStore) restore(all []*handover.Library) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range all {
		if len(l.GetSum()) != len(sum{}) || l.GetFile() < 3 || len(l.GetNames()) == 0 {
			return fmt.Errorf("take over a library: hash of %d bytes, descriptor %d, %d functions", len(l.GetSum()), l.GetFile(), len(l.GetNames()))
		}
		c := &code{sum: sum(l.GetSum()), size: l.GetSize(), names: l.GetNames(), used: l.GetUsed(), owners: map[string]bool{},
			file: os.NewFile(uintptr(l.GetFile()), "memfd:rfaas-code")}
		if l.GetNamesFile() > 0 {
			c.namesFile = os.NewFile(uintptr(l.GetNamesFile()), "memfd:rfaas-names")
		}
		for _, owner := range l.GetOwners() {
			c.owners[owner] = true
		}
		s.codes[c.sum] = c
		s.used += c.size
		s.tick = max(s.tick, c.used)
	}
	return nil
}

// restoreTables takes over tables.
func (e *Executor) restoreTables(all []*handover.Table) error {
	s := e.tables
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range all {
		if len(m.GetSum()) != len(sum{}) || m.GetFile() < 3 && (m.GetBundle() == "" || s.bundles == nil) {
			return fmt.Errorf("take over a table: hash of %d bytes, descriptor %d, bundle %q", len(m.GetSum()), m.GetFile(), m.GetBundle())
		}
		t := &table{sum: sum(m.GetSum()), size: m.GetSize(), used: m.GetUsed(), owners: map[string]bool{}}
		switch {
		case m.GetSeedUnits() > 0:
			t.kind = isSeed
			t.seed = &zygote.Seed{File: os.NewFile(uintptr(m.GetFile()), "memfd:rfaas-seed"), Units: m.GetSeedUnits(), Bytes: m.GetSize()}
			// Not Seed.Memory: it may be more than is free beside the leases, because workers have made pages in holes of the file, or an earlier version has charged less.
			t.size = max(m.GetCharged(), t.seed.Bytes)
		case m.GetBundle() == "":
			t.file = os.NewFile(uintptr(m.GetFile()), "memfd:rfaas-table")
		default:
			var err error
			t.kind = isBundle
			if t.bundle, err = bundleIDOf(m.GetBundle()); err != nil {
				return fmt.Errorf("take over a bundle: %w", err)
			}
		}
		if err := e.table.SetAside(t.size); err != nil {
			return fmt.Errorf("take over a table: %w", err)
		}
		for _, owner := range m.GetOwners() {
			t.owners[owner] = true
		}
		s.tables[t.sum] = t
		s.tick = max(s.tick, t.used)
	}
	return nil
}

// restoreTables takes over the tables of a lease.
func (h *holding) restoreTables(s *tableStore, saved [][]byte, bundle []byte) error {
	var wanted []*control.Table
	var refs []tableRef
	for _, b := range saved {
		t := &control.Table{}
		if err := proto.Unmarshal(b, t); err != nil {
			return err
		}
		if len(t.GetSha256()) != len(sum{}) {
			return fmt.Errorf("table %q has a hash of %d bytes", t.GetName(), len(t.GetSha256()))
		}
		wanted, refs = append(wanted, t), append(refs, refOf(t, sum(t.GetSha256())))
	}
	if len(bundle) == len(sum{}) {
		refs = append(refs, tableRef{sum(bundle), isBundle})
	}
	tables, unknown := s.acquire(refs, "")
	if len(unknown) > 0 {
		return fmt.Errorf("its table %d of %d is missing", unknown[0], len(refs))
	}
	h.tables = tables
	h.spec.Tables, h.spec.Bundle = specTables(wanted, tables)
	return nil
}

// restoreSeed takes over the seed of a lease. Later workers of a lease whose seed is gone start without.
func (h *holding) restoreSeed(s *tableStore, key []byte) {
	if len(key) == len(sum{}) {
		h.seed = s.take(sum(key), "")
	}
	if h.seed != nil {
		h.spec.Seed = h.seed.seed
	}
}

// savedLease returns the lease table's part of a lease.
func savedLease(l *handover.Lease, clock handover.Clock) (s lease.Saved, err error) {
	t := l.GetTerms()
	if len(l.GetRequest()) != len(s.RequestID) || len(t.GetKind()) != len(s.Terms.Kind) || len(t.GetFingerprint()) != len(s.Terms.Fingerprint) {
		return s, errors.New("an id has the wrong length")
	}
	s.Lease = lease.Lease{ID: lease.ID(l.GetId()), RequestID: lease.RequestID(l.GetRequest()), State: lease.State(l.GetState()),
		Granted: clock.Get(l.GetGranted()), Expires: clock.Get(l.GetExpires()), ClientEnd: clock.Get(l.GetClientEnd()), Reuses: lease.ID(l.GetReuses()),
		Terms: lease.Terms{Workers: int(t.GetWorkers()), WorkersMin: int(t.GetWorkersMin()), CoresPerWorker: int(t.GetCores()), MemoryPerWorker: t.GetMemory(), Duration: time.Duration(t.GetDuration()),
			Wait: lease.Wait(t.GetWait()), CallLimit: time.Duration(t.GetCallLimit()), Tenant: t.GetTenant(), UID: t.GetUid(), GID: t.GetGid(),
			Kind: [32]byte(t.GetKind()), KeepsState: t.GetKeepsState(), InitCall: t.GetInitCall(), Fingerprint: [32]byte(t.GetFingerprint())}}
	s.Presence, s.Present, s.Left = l.GetPresence(), l.GetPresent(), clock.Get(l.GetLeft())
	s.ComeBy, s.Notice = clock.Get(l.GetComeBy()), clock.Get(l.GetNotice())
	for _, p := range l.GetShares() {
		var share []int
		for _, core := range p.GetCore() {
			share = append(share, int(core))
		}
		s.Shares = append(s.Shares, share)
	}
	return s, nil
}

// restoreHolding takes over the workers of a lease that is in the table.
func (e *Executor) restoreHolding(s *handover.Lease, z *zygote.Zygote, clock handover.Clock) error {
	l, err := e.table.Get(lease.ID(s.GetId()))
	if err != nil {
		return err
	}
	if len(s.GetLibrary()) != len(sum{}) || len(s.GetSeats()) != l.Terms.Workers {
		return fmt.Errorf("a library's hash of %d bytes, and %d of %d workers", len(s.GetLibrary()), len(s.GetSeats()), l.Terms.Workers)
	}
	c := e.codes.acquire(sum(s.GetLibrary()), "")
	if c == nil {
		return fmt.Errorf("its library %x is missing", s.GetLibrary()[:6])
	}
	if !slices.Contains(e.cfg.Providers, s.GetProvider()) || s.GetChannelMemory() > l.Terms.MemoryPerWorker {
		return fmt.Errorf("provider %q and %d bytes for channels", s.GetProvider(), s.GetChannelMemory())
	}
	h := newHolding(l.ID, c, e.specFor(s.GetProvider(), s.GetChannelMemory(), l.Terms, c), l.CPUs)
	h.tenant, h.flag, h.presence = l.Terms.Tenant, s.GetFlag(), s.GetPresence()
	if err := h.restoreTables(e.tables, s.GetTables(), s.GetBundle()); err != nil {
		return err
	}
	h.restoreSeed(e.tables, s.GetSeed())
	h.spec.Runtime = s.GetRuntime()
	close(h.started)
	if s.GetExpiring() {
		h.expiring(l.Expires)
	}
	for _, b := range s.GetGrantedWorkers() {
		g := &control.WorkerGrant{}
		if err := proto.Unmarshal(b, g); err != nil {
			return err
		}
		h.granted = append(h.granted, g)
	}
	for i, seat := range s.GetSeats() {
		if err := e.restoreSeat(h, i, seat, z, clock); err != nil {
			return fmt.Errorf("worker %d: %w", i, err)
		}
	}
	e.mu.Lock()
	e.holdings[h.id] = h
	e.mu.Unlock()
	return nil
}

func (e *Executor) restoreSeat(h *holding, i int, s *handover.Seat, z *zygote.Zygote, clock handover.Clock) error {
	seat := &h.seats[i]
	if seat.vacant() {
		return nil
	}
	spec := h.workerSpec(i, nil)
	w, err := z.Restore(s.GetWorker(), &spec)
	if err != nil {
		return err
	}
	if len(s.GetOffer()) != len(sum{}) {
		return fmt.Errorf("a hash of %d bytes", len(s.GetOffer()))
	}
	seat.worker, seat.offer, seat.grant = w, sum(s.GetOffer()), &control.WorkerGrant{}
	seat.dead, seat.died, seat.deaths = s.GetDead(), clock.Get(s.GetDied()), s.GetDeaths()
	if err := proto.Unmarshal(s.GetGrant(), seat.grant); err != nil {
		return err
	}
	if b := s.GetDeath(); b != nil {
		seat.death = &control.Event{}
		if err := proto.Unmarshal(b, seat.death); err != nil {
			return err
		}
	}
	if s.GetExpected() && e.cfg.Data != nil {
		return e.expectClient(h, w)
	}
	return nil
}

// restoreAccounts continues the accounts of a state.
func (e *Executor) restoreAccounts(s *handover.State) error {
	for _, b := range s.GetCharges() {
		m := &control.AccountEntry{}
		if err := proto.Unmarshal(b, m); err != nil {
			return fmt.Errorf("take over charges: %w", err)
		}
		if err := e.accounts.restoreOwed(m); err != nil {
			return err
		}
	}
	clock := handover.NewClock()
	for _, l := range s.GetLeases() {
		if l.GetAccount() == nil {
			continue
		}
		if err := e.accounts.restoreLease(e.holding(lease.ID(l.GetId())), l.GetAccount(), clock); err != nil {
			return fmt.Errorf("take over the account of lease %d: %w", l.GetId(), err)
		}
	}
	return nil
}

// restoreOwed adds a charge that may not have reached the ledger. If its lease goes on, the next measurement replaces it.
func (a *accounts) restoreOwed(m *control.AccountEntry) error {
	e := accounting.Entry{Key: accounting.Key{Lease: m.GetLease(), Part: m.GetPart()}, Tenant: m.GetTenant(), Node: m.GetNode(),
		Began: time.Unix(0, m.GetBeganNs()), AsOf: time.Unix(0, m.GetAsOfNs()), Final: m.GetFinal()}
	if len(m.GetIncarnation()) != len(e.Incarnation) || len(m.GetUse()) != len(e.Use) {
		return fmt.Errorf("take over charges: %d counters of an incarnation of %d bytes", len(m.GetUse()), len(m.GetIncarnation()))
	}
	copy(e.Incarnation[:], m.GetIncarnation())
	copy(e.Use[:], m.GetUse())
	if a == nil {
		return nil // without a resource manager nothing is charged any more
	}
	a.owed[e.Key] = &owed{entry: e, cell: -1, earlier: e.Final}
	return nil
}

// restoreLease continues to charge a lease.
func (a *accounts) restoreLease(h *holding, s *handover.Account, clock handover.Clock) error {
	if a == nil {
		return nil
	}
	if len(s.GetWorkers()) != len(h.seats) || len(s.GetBase()) != accounting.NumCounters {
		return fmt.Errorf("%d workers and %d counters", len(s.GetWorkers()), len(s.GetBase()))
	}
	acc := &account{id: h.id, tenant: s.GetTenant(), began: time.Unix(0, s.GetBegan()), part: s.GetPart()}
	m := accounting.MeterState{Cores: s.GetCores(), Memory: s.GetMemory(), Began: clock.Get(s.GetMeteredSince()), Base: accounting.Use(s.GetBase())}
	for i, w := range s.GetWorkers() {
		if len(w.GetPast()) != accounting.NumCounters {
			return fmt.Errorf("%d counters", len(w.GetPast()))
		}
		m.Past, m.Now = append(m.Past, accounting.Use(w.GetPast())), append(m.Now, restoreReport(w.GetMeter()))
		if h.seats[i].vacant() {
			acc.workers = append(acc.workers, nil)
			continue
		}
		acc.workers = append(acc.workers, &metered{Worker: h.seats[i].worker, polls: w.GetPolls(), at: clock.Get(w.GetAt()), cpu: time.Duration(w.GetCpu()),
			base: time.Duration(w.GetBase()), report: restoreReport(w.GetSeen())})
	}
	acc.meter = accounting.RestoreMeter(m)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leases[h.id] = acc
	a.use(acc, h.shared())
	return nil
}

func restoreReport(r *handover.Report) accounting.Report {
	return accounting.Report{Exec: time.Duration(r.GetExec()), Hot: time.Duration(r.GetHot()), Calls: r.GetCalls(), BytesIn: r.GetBytesIn(),
		BytesOut: r.GetBytesOut(), Failures: r.GetFailures()}
}

// takeOver is Serve for a program that takes over from an earlier one in the same process.
func takeOver(ctx, now context.Context, s config.Executor, hand Handover, log *slog.Logger) error {
	path, err := workerPath(&s)
	if err == nil {
		s.Worker = path
	}
	files, appended := rootFiles(&s)
	z, err := zygote.Adopt(zygote.Config{Path: s.Worker, Log: log, Files: files, Append: appended, Remove: socketFiles(&s)}, hand.State.GetSpawner())
	if err != nil {
		return err
	}
	defer z.Close()
	defer z.Resume()
	log.Info("taking over from the program that ran before", "its-version", hand.State.GetProgram(), "leases", len(hand.State.GetLeases()))
	var unpacked *bundles
	if b := hand.State; b.GetBundlesLock() > 0 {
		unpacked = &bundles{path: b.GetBundles(), lock: os.NewFile(uintptr(b.GetBundlesLock()), b.GetBundles())}
		defer unpacked.close()
	}
	err = serveWith(ctx, now, s, zygoteSpawner{z, unpacked}, hand, log)
	z.RemoveFiles()
	return err
}

// inherit continues with the rights of the earlier program.
func (r *rights) inherit(s *config.Executor, before *handover.State) {
	r.dropped = before.GetDropped()
	if fd := before.GetStateDir(); fd > 0 {
		r.state = os.NewFile(uintptr(fd), s.StateDir)
	}
}

// stayDropped restores what execve has undone of Drop.
func (r *rights) stayDropped() error {
	if !r.dropped {
		return nil
	}
	return privilege.Hide()
}

func inheritedPort(before *handover.State) *control.Inherited {
	if before == nil {
		return nil
	}
	in := &control.Inherited{Socket: int(before.GetControl().GetSocket())}
	copy(in.Secret[:], before.GetSecret())
	return in
}

func openData(s *config.Executor, before *handover.State, log *slog.Logger) (*datalisten.Listener, error) {
	if before == nil {
		return datalisten.Open(s.DataListen, s.DataAdvertise, log)
	}
	return datalisten.Inherit(int(before.GetData().GetSocket()), before.GetData().GetAddress(), log)
}

func openWeb(s *config.Executor, before *handover.State, log *slog.Logger) (*observe.Server, error) {
	if before == nil {
		return observe.Open(s.HTTPListen, nil, log)
	}
	return observe.Inherit(int(before.GetWeb().GetSocket()), log)
}

// begin continues restored leases and seeds: it watches the workers, counts their cores and waits for their clients.
func (e *Executor) begin() {
	e.published.begin()
	for _, l := range e.table.List() {
		h := e.holding(l.ID)
		if e.limits != nil {
			release := e.limits.take(l.Terms.Tenant, l.Present()*l.Terms.CoresPerWorker)
			h.mu.Lock()
			h.reserved = release
			h.mu.Unlock()
		}
		for i := range h.seats {
			if s := &h.seats[i]; !s.dead && !s.vacant() {
				e.watch(h, i, s.worker)
			}
		}
		e.away(h, h.presence) // does nothing if the client was absent before
	}
}

// take counts the cores of a lease that runs already, as soon as the manager can be reached. The caller calls release when they
// are free.
func (l *limiter) take(name string, cores int) (release func()) {
	name = tenantOf(name)
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.tenants[name]
	if t == nil {
		t = &tenant{place: -1}
		l.tenants[name] = t
	}
	t.cores += uint32(cores)
	return func() { l.release(name, cores) }
}

// restoredNode sets what the executor lends to what the earlier program lent. Memory in use is not available any more, so it cannot be
// determined again.
func (c *Config) restoredNode(s *handover.Node) error {
	c.Cores, c.Memory, c.Providers = nil, s.GetMemory(), s.GetProviders()
	for _, core := range s.GetCores() {
		one := lease.Core{Node: int(core.GetNode())}
		for _, cpu := range core.GetCpus() {
			one.CPUs = append(one.CPUs, int(cpu))
		}
		c.Cores = append(c.Cores, one)
	}
	if len(c.Cores) == 0 || len(c.Providers) == 0 {
		return fmt.Errorf("take over: %d cores and %d providers", len(c.Cores), len(c.Providers))
	}
	return nil
}
