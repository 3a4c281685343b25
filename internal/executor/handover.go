package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// Handover lets the executor continue as another program in the same process, and take over from an earlier one. The zero
// value does neither.
type Handover struct {
	Asked   <-chan os.Signal // receives requests to hand over
	Program string           // path of the program that takes over
	Args    []string         // its arguments, with its name
	Environ []string
	Check   func() error    // reports settings that the new program would refuse
	State   *handover.State // of the earlier program; nil: there was none
	Version string          // of this program, for the log
	// StopSignals ends the effect of signals on Asked and on the contexts of Serve. It returns the descriptor of a pipe. Later signals wait there.
	StopSignals func() int
	Execve      func(path string, args, environ []string) error // executes the new program, as syscall.Exec does, and keeps signals for it
}

// handoverPatience is how long a handover waits for the operations on leases that are running when it is requested. A start of workers
// and a release take less. Transfers and init calls of seeds are ended, because they may take as long as their clients want.
const handoverPatience = 15 * time.Second

// handing is a handover in progress.
type handing struct {
	*Handover
	e    *Executor
	z    *zygote.Zygote
	port *control.Port
	web  *observe.Server
	own  *rights
	open identity.Opener // of identity-dir
	ctx  context.Context // ends with a request to drain
	stop func()          // ends the goroutines that talk to the resource manager, without signing off
}

// SameForHandover returns an error if settings that the program keeps, or that its leases depend on, differ between the settings of a
// running executor and those of the program that would continue.
func SameForHandover(now, next *config.Executor) error {
	for _, s := range []struct {
		name      string
		now, next any
	}{
		{"share-cores", now.ShareCores, next.ShareCores}, {"yield-after", now.YieldAfter, next.YieldAfter}, {"identity-dir", now.IdentityDir, next.IdentityDir},
		{"audit-file", now.AuditFile, next.AuditFile}, {"state-dir", now.StateDir, next.StateDir}, {"manager", now.Manager, next.Manager},
		{"data-encryption", now.DataEncryption, next.DataEncryption}, {"secret-file", now.SecretFile, next.SecretFile},
		{"bundle-dir", now.BundleDir, next.BundleDir},
	} {
		if s.now != s.next {
			return fmt.Errorf("%s was %v and is %v now: restart the executor with a drain to change it", s.name, s.now, s.next)
		}
	}
	return nil
}

// possible returns why the new program could not take over. Nothing has changed then.
func (h *handing) possible() error {
	if h.z == nil {
		return errors.New("the workers of this executor cannot be handed over")
	}
	if err := handover.Readable(h.Program); err != nil {
		return err
	}
	if h.Check != nil {
		if err := h.Check(); err != nil {
			return fmt.Errorf("settings: %w", err)
		}
	}
	// A daemon goes on with an identity that has become invalid, but does not start with one.
	if s := &h.e.cfg.Settings; s.IdentityDir != "" {
		if _, err := identity.OpenNode(s.IdentityDir, h.open, nil, time.Now()); err != nil {
			return fmt.Errorf("identity-dir: %w", err)
		}
	}
	_, err := h.z.CannotStart()
	return err
}

// run replaces this program. It returns only an error that leaves everything as it was.
func (h *handing) run() error {
	if err := h.possible(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(h.ctx, handoverPatience, fmt.Errorf("timed out after %v", handoverPatience))
	defer cancel()
	if err := h.e.turns.close(ctx); err != nil {
		return err
	}
	h.e.dropAllCached()
	h.e.claims.collect() // claims that were earlier
	err := h.e.savable()
	if len(h.e.asked) > 0 {
		err = errors.New("the executor was asked to drain")
	}
	if err != nil {
		h.e.turns.open()
		return err
	}
	h.e.gate.Audit().Write(identity.AuditEntry{Event: identity.AuditHandover, Detail: h.Program})
	h.e.log.Info("handing over to the program that is installed now", "program", h.Program, "leases", h.e.table.Capacity().Leases)
	h.stop()
	state, err := h.save()
	if err == nil {
		err = handover.Exec(h.Execve, h.Program, h.Args, h.Environ, state)
		h.e.log.Error("cannot execute the new program; the old one continues", "program", h.Program, "error", err)
		err = handover.Exec(h.Execve, "/proc/self/exe", h.Args, h.Environ, state)
	}
	// This program serves no longer. When it ends, the spawner and all workers end too.
	h.e.log.Error("handover failed: all leases end", "error", err)
	os.Exit(1)
	return nil
}

// savable returns an error if a lease is in a state that cannot be handed over. The turnstile must be shut.
func (e *Executor) savable() error {
	leases, err := e.table.Save()
	if err != nil {
		return err
	}
	for i := range leases {
		h := e.holding(leases[i].ID)
		if h == nil {
			return fmt.Errorf("lease %d has no workers", leases[i].ID)
		}
		h.mu.Lock()
		ending := h.ending || h.leaving != nil
		h.mu.Unlock()
		if ending {
			return fmt.Errorf("lease %d is ending", h.id)
		}
	}
	return nil
}

// save stops everything that could change the state, and returns the state.
func (h *handing) save() (*handover.State, error) {
	e := h.e
	s := &handover.State{Program: h.Version, Incarnation: e.incarnation[:], Secret: h.port.Secret[:], WantedBack: e.back.unix(), Dropped: h.own.dropped,
		Node: &handover.Node{Memory: e.cfg.Memory, Providers: e.cfg.Providers}}
	for _, c := range e.cfg.Cores {
		s.Node.Cores = append(s.Node.Cores, &handover.Core{Cpus: int32s(c.CPUs), Node: int32(c.Node)})
	}
	var err error
	if s.Spawner, err = h.z.Leave(); err != nil {
		return nil, err
	}
	if err := h.saveListeners(s); err != nil {
		return nil, err
	}
	if h.own.state != nil {
		s.StateDir = int32(h.own.state.Fd())
	}
	if s.Charges, err = e.accounts.saveOwed(); err != nil { // before the meters, which it reads once more
		return nil, err
	}
	clock := handover.NewClock()
	leases, err := e.table.Save()
	if err != nil {
		return nil, err
	}
	for i := range leases {
		l, err := e.saveLease(&leases[i], clock)
		if err != nil {
			return nil, fmt.Errorf("lease %d: %w", leases[i].ID, err)
		}
		s.Leases = append(s.Leases, l)
	}
	s.Libraries = e.codes.save()
	s.Tables = e.tables.save()
	s.Seeds = e.published.save(clock)
	if b := e.cfg.Bundles; b != nil {
		s.Bundles, s.BundlesLock = b.path, int32(b.lock.Fd())
	}
	s.Signals = int32(h.StopSignals())
	s.Ending = h.ctx.Err() != nil
	s.Cordoned = e.whyCordoned()
	return s, nil
}

func (h *handing) saveListeners(s *handover.State) error {
	if d := h.e.cfg.Data; d != nil {
		fd, err := d.Leave()
		if err != nil {
			return err
		}
		s.Data = &handover.Listener{Socket: int32(fd), Address: d.Address}
	}
	fd, err := h.web.Leave()
	if err != nil {
		return err
	}
	s.Web = &handover.Listener{Socket: int32(fd)}
	if fd, err = h.port.Leave(); err != nil {
		return err
	}
	s.Control = &handover.Listener{Socket: int32(fd), Address: h.port.Address}
	return nil
}

func int32s(list []int) (out []int32) {
	for _, n := range list {
		out = append(out, int32(n))
	}
	return out
}

// save returns the stored libraries.
func (s *codeStore) save() (all []*handover.Library) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.codes {
		l := &handover.Library{Sum: c.sum[:], File: int32(c.file.Fd()), Size: c.size, Used: c.used, Names: c.names}
		if c.namesFile != nil {
			l.NamesFile = int32(c.namesFile.Fd())
		}
		for owner := range c.owners {
			l.Owners = append(l.Owners, owner)
		}
		slices.Sort(l.Owners)
		all = append(all, l)
	}
	return all
}

// save returns the stored tables.
func (s *tableStore) save() (all []*handover.Table) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tables {
		m := &handover.Table{Sum: t.sum[:], Size: t.size, Used: t.used}
		switch {
		case t.kind == isTable:
			m.File = int32(t.file.Fd())
		case t.kind == isBundle:
			m.Bundle = t.bundle.String()
		case t.seed != nil:
			m.File, m.SeedUnits, m.Size, m.Charged = int32(t.seed.File.Fd()), t.seed.Units, t.seed.Bytes, t.size
		default:
			continue // the next program tries again to make it
		}
		for owner := range t.owners {
			m.Owners = append(m.Owners, owner)
		}
		slices.Sort(m.Owners)
		all = append(all, m)
	}
	return all
}

// saveTables returns the tables of a lease.
func (h *holding) saveTables() (all [][]byte, err error) {
	for i, t := range h.spec.Tables {
		b, err := proto.Marshal(&control.Table{Name: t.Name, Sha256: h.tables[i].sum[:], Size: t.Size, Address: t.Address, Seed: t.Seed != nil})
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	return all, nil
}

// saveLease returns a lease with its workers and its account.
func (e *Executor) saveLease(l *lease.Saved, clock handover.Clock) (*handover.Lease, error) {
	h := e.holding(l.ID)
	t := &l.Terms
	s := &handover.Lease{Id: uint64(l.ID), Request: l.RequestID[:], State: uint32(l.State), Granted: clock.Put(l.Granted), Expires: clock.Put(l.Expires),
		ClientEnd: clock.Put(l.ClientEnd), Notice: clock.Put(l.Notice), ComeBy: clock.Put(l.ComeBy), Presence: l.Presence, Present: l.Present,
		Left: clock.Put(l.Left), Reuses: uint64(l.Reuses),
		Terms: &handover.Terms{Workers: uint32(t.Workers), WorkersMin: uint32(t.WorkersMin), Cores: uint32(t.CoresPerWorker), Memory: t.MemoryPerWorker, Duration: int64(t.Duration),
			Wait: uint32(t.Wait), CallLimit: int64(t.CallLimit), Tenant: t.Tenant, Uid: t.UID, Gid: t.GID, Kind: t.Kind[:],
			Fingerprint: t.Fingerprint[:], KeepsState: t.KeepsState, InitCall: t.InitCall}}
	for _, share := range l.Shares {
		p := &handover.Places{}
		for _, core := range share {
			p.Core = append(p.Core, uint32(core))
		}
		s.Shares = append(s.Shares, p)
	}
	s.Account = e.accounts.saveLease(l.ID, clock)
	h.mu.Lock()
	defer h.mu.Unlock()
	s.Library, s.Provider, s.ChannelMemory, s.Flag, s.Expiring = h.code.sum[:], h.spec.Provider, h.spec.ChannelMemory, h.flag, h.notice != nil
	var err error
	if s.Tables, err = h.saveTables(); err != nil {
		return nil, err
	}
	s.Bundle, s.Runtime = h.bundleSum(), h.spec.Runtime
	if h.spec.Seed != nil {
		s.Seed = h.seed.sum[:]
	}
	for _, g := range h.granted {
		b, err := proto.Marshal(g)
		if err != nil {
			return nil, err
		}
		s.GrantedWorkers = append(s.GrantedWorkers, b)
	}
	for i := range h.seats {
		seat, err := e.saveSeat(h, i, clock)
		if err != nil {
			return nil, fmt.Errorf("worker %d: %w", i, err)
		}
		s.Seats = append(s.Seats, seat)
	}
	return s, nil
}

// saveSeat returns a seat and its worker. The caller holds the holding's lock.
func (e *Executor) saveSeat(h *holding, i int, clock handover.Clock) (s *handover.Seat, err error) {
	seat := &h.seats[i]
	if seat.vacant() {
		return &handover.Seat{}, nil
	}
	w, ok := seat.worker.(*zygote.Worker)
	if !ok {
		return nil, fmt.Errorf("it is a %T", seat.worker)
	}
	s = &handover.Seat{Offer: seat.offer[:], Dead: seat.dead, Died: clock.Put(seat.died), Deaths: seat.deaths}
	if s.Worker, err = w.Save(); err != nil {
		return nil, err
	}
	if s.Grant, err = proto.Marshal(seat.grant); err != nil {
		return nil, err
	}
	if seat.death != nil {
		if s.Death, err = proto.Marshal(seat.death); err != nil {
			return nil, err
		}
	}
	if token, ok := dataplane.ChannelToken(w.Blob()); ok && h.spec.Provider == dataplane.TCP {
		s.Expected = e.cfg.Data.Expected(token)
	}
	return s, nil
}

// saveLease returns the account of a lease; nil: nothing is charged.
func (a *accounts) saveLease(id lease.ID, clock handover.Clock) *handover.Account {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	acc := a.leases[id]
	if acc == nil {
		return nil
	}
	m := acc.meter.Save()
	s := &handover.Account{Tenant: acc.tenant, Began: acc.began.UnixNano(), MeteredSince: clock.Put(m.Began), Part: acc.part, Cores: m.Cores, Memory: m.Memory,
		Base: m.Base[:]}
	for i, w := range acc.workers {
		if w == nil {
			s.Workers = append(s.Workers, &handover.Metered{Meter: &handover.Report{}, Past: slices.Clone(m.Past[i][:])})
			continue
		}
		s.Workers = append(s.Workers, &handover.Metered{Polls: w.polls, At: clock.Put(w.at), Cpu: int64(w.cpu), Base: int64(w.base),
			Seen: saveReport(w.report), Meter: saveReport(m.Now[i]), Past: slices.Clone(m.Past[i][:])})
	}
	return s
}

func saveReport(r accounting.Report) *handover.Report {
	return &handover.Report{Exec: int64(r.Exec), Hot: int64(r.Hot), Calls: r.Calls, BytesIn: r.BytesIn, BytesOut: r.BytesOut, Failures: r.Failures}
}

// saveOwed measures the leases once more, writes the journal, and returns what the ledger may not have yet.
func (a *accounts) saveOwed() (all [][]byte, err error) {
	if a == nil {
		return nil, nil
	}
	a.endTables()
	a.lookAtAll()
	a.step(context.Background(), nil)
	a.settling.Lock()
	defer a.settling.Unlock()
	for _, o := range a.inOrder(nil) {
		b, err := proto.Marshal(entryMessage(&o.entry))
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	if a.journal != nil {
		err = a.journal.Close()
	}
	return all, err
}
