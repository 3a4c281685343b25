package manager

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/history"
	"github.com/rfaas-go/rfaas/internal/identity"
)

const (
	// missed is how many heartbeats an executor misses before it counts as silent.
	missed = 3
	// forgetAfter is how long a silent executor is still listed.
	forgetAfter = time.Hour
)

// entry is one executor. The table's lock protects it.
type entry struct {
	id      uint64
	address string
	key     string
	owner   owner
	info    *control.InfoReply
	slot    uint32
	beat    uint64      // of the line, as last read or written here
	seen    time.Time   // when the beat changed
	state   board.State // as reported to subscribers
	stats   board.Stats // that were counted
	memory  *attachment // connection to its line and cells; nil: it reports by messages, and the table writes its line
}

// table has the executors by id and by address, and their slots on the board. It is safe for concurrent use. Lock
// order: the table's lock, then the locks that changed takes.
type table struct {
	interval time.Duration // of heartbeats
	now      func() time.Time
	changed  func(board.Change)                // called under the lock; must not block
	dropped  func(*attachment)                 // likewise: the attachment is no longer used
	left     func([16]byte)                    // likewise: the incarnation has gone or is attached, so its reservations by message end
	counted  func(node string, s *board.Stats) // likewise: an executor has counted this since its last report
	quotas   *quotas

	mu            sync.Mutex
	board         *board.Table
	nextID        uint64
	byID          map[uint64]*entry
	byKey         map[string]*entry
	byIncarnation map[[16]byte][]*entry
	fresh         map[[16]byte]owner // registered since the last call of unclaimed
	swept         time.Time          // last sweep
}

func newTable(interval time.Duration, firstID uint64, now func() time.Time, b *board.Table) *table {
	return &table{interval: interval, now: now, nextID: firstID, byID: map[uint64]*entry{}, byKey: map[string]*entry{},
		byIncarnation: map[[16]byte][]*entry{}, fresh: map[[16]byte]owner{}, board: b, quotas: newQuotas(1<<30, 1<<62, now),
		changed: func(board.Change) {}, dropped: func(*attachment) {}, left: func([16]byte) {}, counted: func(string, *board.Stats) {}}
}

// key returns a key that is unique for an executor: its address, with the node if the address is local.
func key(address string, info *control.InfoReply) string {
	if a, err := control.ParseAddress(address); err == nil && a.Local() {
		return info.GetNodeId() + " " + address
	}
	return address
}

func incarnationOf(info *control.InfoReply) (i [16]byte) {
	copy(i[:], info.GetIncarnation())
	return i
}

// identityOf returns what clients are told about an executor.
func identityOf(address string, info *control.InfoReply) *board.Identity {
	id := &board.Identity{Incarnation: incarnationOf(info), Cores: info.GetCores(), MaxDepth: info.GetMaxDepth(), MaxEager: info.GetMaxEager(),
		MaxBulk: info.GetMaxBulk(), Memory: info.GetMemoryBytes(), Node: info.GetNode(), NodeID: info.GetNodeId(), Control: address}
	if ap, err := netip.ParseAddrPort(address); err == nil {
		kind := board.IPv6
		if ap.Addr().Is4() {
			kind = board.IPv4
		}
		id.Addresses = append(id.Addresses, board.Address{Kind: kind, IP: ap.Addr(), Port: ap.Port()})
	}
	for _, f := range info.GetFabric() {
		a := board.Address{Kind: board.RoCE, IP: netip.AddrFrom16([16]byte(f.GetGid()))}
		if f.GetInfiniband() {
			a.Kind, a.LID = board.InfiniBand, uint16(f.GetLid())
		}
		id.Addresses = append(id.Addresses, a)
	}
	return id
}

// line returns the line for an executor that has no remote memory.
func (t *table) line(e *entry) *board.Line {
	e.beat++
	l := lineOf(e.info, e.slot, e.beat, t.now())
	return &l
}

// lineOf returns the line of an executor.
func lineOf(info *control.InfoReply, slot uint32, beat uint64, now time.Time) board.Line {
	l := board.Line{Beat: beat, Incarnation: board.ShortIncarnation(incarnationOf(info)), Written: now, Slot: slot,
		Cores: info.GetCores(), FreeCores: info.GetFreeCores(), MemoryMiB: uint32(min(info.GetMemoryBytes()>>20, 1<<32-1)),
		FreeMiB: uint32(min(info.GetFreeMemoryBytes()>>20, 1<<32-1)), Leases: info.GetLeases(), State: board.Open, Providers: board.ProvidersOf(info.GetProviders()),
		Slowdown: info.GetNeighbourSlowdown()}
	if info.GetDraining() {
		l.State, l.Cordoned = board.Draining, info.GetCordoned()
	}
	if until := info.GetAvailableUntil(); until > 0 && until < 1<<40 {
		l.Until = time.Unix(int64(until), 0)
	}
	return l
}

// tell records the state of an executor and notifies subscribers if it is new. The line must have the state already,
// since subscribers read it as soon as they are notified. The caller holds the lock.
func (t *table) tell(e *entry, s board.State) {
	if e.state == s {
		return
	}
	e.state = s
	t.changed(board.Change{Slot: e.slot, Incarnation: uint32(board.ShortIncarnation(incarnationOf(e.info))), State: s})
}

// register adds an executor. It replaces an earlier executor at the same address, which must have ended. The same
// incarnation keeps its id. The error is errOwner if another owner has registered the incarnation or the address, and
// errQuota if the owner's quota is used up.
func (t *table) register(o owner, address string, info *control.InfoReply) (id uint64, replaced bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k, incarnation := key(address, info), incarnationOf(info)
	for _, e := range t.byIncarnation[incarnation] {
		if !o.may(e.owner.name) {
			return 0, false, fmt.Errorf("%w: incarnation %x at %s", errOwner, incarnation, e.address)
		}
	}
	old := t.byKey[k]
	if old != nil && incarnationOf(old.info) == incarnation {
		old.renew(&o)
		t.detach(old) // it has lost its connection and will attach again
		t.heard(old, info)
		return old.id, false, nil
	}
	// Two certificates may be for the same name, or an operator may have registered the address. A silent executor is
	// replaced.
	if old != nil && !o.may(old.owner.name) && !t.silent(old, t.now()) {
		return 0, false, fmt.Errorf("%w: %s", errOwner, address)
	}
	if old != nil {
		t.drop(old)
	}
	if err := t.quotas.register(&o); err != nil {
		return 0, old != nil, err
	}
	e := &entry{id: t.nextID, address: address, key: k, owner: o, info: info, seen: t.now()}
	if e.slot, err = t.board.Take(identityOf(address, info), t.line(e)); err != nil {
		t.quotas.give(&o, 1, registrationBytes)
		if !errors.Is(err, board.ErrFull) {
			err = control.Errorf(control.ClassInvalid, "%v", err)
		}
		return 0, old != nil, err
	}
	t.nextID++
	t.byID[e.id], t.byKey[k] = e, e
	t.byIncarnation[incarnation] = append(t.byIncarnation[incarnation], e)
	t.fresh[incarnation] = o
	e.stats = board.StatsOf(info.GetStats()) // what it counted while no manager knew it is not in the history
	t.tell(e, t.stateOf(e))
	return e.id, old != nil, nil
}

func (t *table) stateOf(e *entry) board.State {
	if e.info.GetDraining() {
		return board.Draining
	}
	return board.Open
}

// heard records a message of an executor. The caller holds the lock.
func (t *table) heard(e *entry, info *control.InfoReply) {
	e.info, e.seen = info, t.now()
	t.count(e, board.StatsOf(info.GetStats()), len(info.GetStats()) > 0)
	if e.memory == nil {
		t.board.WriteLine(t.line(e))
	}
	t.tell(e, t.stateOf(e))
}

// ofOwner returns a registration; nil: there is none. The error is errOwner if it belongs to another owner. The caller
// holds the lock.
func (t *table) ofOwner(o *owner, id uint64) (*entry, error) {
	e := t.byID[id]
	if e != nil && !o.may(e.owner.name) {
		return nil, fmt.Errorf("%w: executor %d at %s", errOwner, id, e.address)
	}
	e.renew(o)
	return e, nil
}

// renew stores the owner's current certificate. The caller holds the lock.
func (e *entry) renew(o *owner) {
	if e != nil && e.owner.name == o.name {
		e.owner = *o
	}
}

// expel removes the executors whose owner's certificate is no longer valid according to ended, and returns the reasons
// by address.
func (t *table) expel(ended func(*identity.Identity) error) map[string]error {
	t.mu.Lock()
	bound := map[uint64]*identity.Identity{}
	for id, e := range t.byID {
		if e.owner.bound != nil {
			bound[id] = e.owner.bound
		}
	}
	t.mu.Unlock()
	why := map[string]error{}
	for id, who := range bound {
		err := ended(who)
		if err == nil {
			continue
		}
		t.mu.Lock()
		if e := t.byID[id]; e != nil && e.owner.bound == who {
			t.drop(e)
			why[e.address] = err
		}
		t.mu.Unlock()
	}
	return why
}

// heartbeat records that an executor is alive. known is false if it must register. back is true if it had counted as
// silent. The error is errOwner if another owner has registered it.
func (t *table) heartbeat(o owner, id uint64, info *control.InfoReply) (known, back bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, err := t.ofOwner(&o, id)
	if e == nil || string(e.info.GetIncarnation()) != string(info.GetIncarnation()) {
		return false, false, err
	}
	back = e.state == board.Silent
	t.detach(e) // an executor that sends messages does not write its line
	t.heard(e, info)
	return true, back, nil
}

// detach closes an executor's connection to its memory, if it has one. The caller holds the lock.
func (t *table) detach(e *entry) {
	if e.memory != nil {
		e.memory.fence() // before the memory is used otherwise
		t.countMemory(e)
		t.dropped(e.memory)
		e.memory = nil
	}
}

// deregister removes an executor and returns its node and address, empty if it does not exist. The error is errOwner if
// another owner has registered it.
func (t *table) deregister(o owner, id uint64) (node, address string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, err := t.ofOwner(&o, id)
	if e == nil {
		return "", "", err
	}
	t.drop(e)
	return e.info.GetNode(), e.address, nil
}

// drop removes an executor. The caller holds the lock.
func (t *table) drop(e *entry) {
	t.detach(e)
	t.left(incarnationOf(e.info))
	t.board.Release(e.slot) // first: notified subscribers read the line
	t.tell(e, board.Left)
	delete(t.byID, e.id)
	delete(t.byKey, e.key)
	incarnation := incarnationOf(e.info)
	if same := slices.DeleteFunc(t.byIncarnation[incarnation], func(x *entry) bool { return x == e }); len(same) > 0 {
		t.byIncarnation[incarnation] = same
	} else {
		delete(t.byIncarnation, incarnation)
		delete(t.fresh, incarnation)
	}
	t.quotas.give(&e.owner, 1, registrationBytes)
}

// attach connects an executor to its memory and replaces an earlier connection. It returns an error if the executor is
// not registered, or by another owner.
func (t *table) attach(o owner, id uint64, incarnation []byte, make func(entry) (*attachment, error)) (*attachment, error) {
	find := func() (*entry, error) {
		e, err := t.ofOwner(&o, id)
		if err != nil {
			return nil, err
		}
		if e == nil || string(e.info.GetIncarnation()) != string(incarnation) {
			return nil, control.Errorf(control.ClassLease, "executor %d of incarnation %x is not registered", id, incarnation)
		}
		return e, nil
	}
	t.mu.Lock()
	e, err := find()
	if err != nil {
		t.mu.Unlock()
		return nil, err
	}
	found := *e
	t.mu.Unlock()
	a, err := make(found) // blocks: it talks to the executor's process
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if again, err := find(); err != nil || again != e {
		a.fence()
		t.dropped(a)
		return nil, cmp.Or(err, control.Errorf(control.ClassBusy, "executor %d has registered again in the meantime", id))
	}
	t.detach(e)
	t.left(incarnationOf(e.info)) // it now counts its reservations by memory instead of by message
	e.memory = a
	return a, nil
}

// heardOf returns the registered incarnations, with true for those that are not silent.
func (t *table) heardOf() map[[16]byte]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make(map[[16]byte]bool, len(t.byID))
	for _, e := range t.byID {
		i := incarnationOf(e.info)
		all[i] = all[i] || e.state != board.Silent
	}
	return all
}

// check returns an error if an owner may not act for an incarnation: it is not registered, or by another owner.
func (t *table) check(o owner, incarnation [16]byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	same := t.byIncarnation[incarnation]
	switch {
	case len(same) == 0:
		return control.Errorf(control.ClassLease, "executor of incarnation %x is not registered", incarnation)
	case !slices.ContainsFunc(same, func(e *entry) bool { return o.may(e.owner.name) }):
		return fmt.Errorf("%w: incarnation %x at %s", errOwner, incarnation, same[0].address)
	}
	return nil
}

// unclaimed returns and removes the claims that the ledger does not have yet.
func (t *table) unclaimed() []accounting.Claim {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]accounting.Claim, 0, len(t.fresh))
	for incarnation, o := range t.fresh {
		all = append(all, o.claim(incarnation))
	}
	clear(t.fresh)
	return all
}

// claimAgain puts back claims that the ledger did not accept, if their executors still exist.
func (t *table) claimAgain(claims []accounting.Claim) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range claims {
		if same := t.byIncarnation[c.Incarnation]; len(same) > 0 {
			t.fresh[c.Incarnation] = same[0].owner
		}
	}
}

// attachments returns all attachments in use, or, if heard is set, only those of executors that are not silent.
func (t *table) attachments(heard bool) []*attachment {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []*attachment
	for _, e := range t.byID {
		if e.memory != nil && (!heard || e.state != board.Silent) {
			all = append(all, e.memory)
		}
	}
	return all
}

// countMemory reports what an executor has counted by its memory. The caller holds the lock.
func (t *table) countMemory(e *entry) {
	s, ok := e.memory.stats(board.ShortIncarnation(incarnationOf(e.info)))
	t.count(e, s, ok)
}

// count reports what an executor has counted since its last report. The caller holds the lock.
func (t *table) count(e *entry, s board.Stats, ok bool) {
	if !ok {
		return
	}
	if more := s.Since(&e.stats); more != (board.Stats{}) {
		e.stats = s
		t.counted(e.info.GetNode(), &more)
	}
}

// survey reports what attached executors have counted, and returns the cores of all executors.
func (t *table) survey() []history.Executor {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]history.Executor, 0, len(t.byID))
	for _, e := range t.byID {
		if e.memory != nil {
			t.countMemory(e)
		}
		all = append(all, history.Executor{Node: e.info.GetNode(), NodeCores: e.info.GetNodeCores(), Cores: e.info.GetCores(),
			Free: e.info.GetFreeCores(), Open: e.state == board.Open, Heard: e.state != board.Silent})
	}
	return all
}

// refresh reads an executor's line. The caller holds the lock.
func (t *table) refresh(e *entry) {
	l, err := t.board.ReadLine(e.slot)
	if err == nil && l.Incarnation != board.ShortIncarnation(incarnationOf(e.info)) {
		t.mend(e)
		return
	}
	if err != nil || e.memory == nil || l.Beat == e.beat {
		return // incomplete, written here, or unchanged: the next heartbeat decides
	}
	e.beat, e.seen = l.Beat, t.now()
	info := proto.CloneOf(e.info)
	info.FreeCores, info.FreeMemoryBytes = min(l.FreeCores, info.Cores), uint64(l.FreeMiB)<<20
	info.Draining, info.Cordoned, info.Leases, info.NeighbourSlowdown = l.State == board.Draining, l.Cordoned, l.Leases, l.Slowdown
	e.info = info
	t.tell(e, t.stateOf(e))
}

// mend writes an executor's line again after the slot's previous executor has overwritten it, and notifies subscribers
// that may have read the wrong line. The caller holds the lock.
func (t *table) mend(e *entry) {
	l := lineOf(e.info, e.slot, e.beat, e.seen)
	l.State = e.state
	t.board.WriteLine(&l)
	t.changed(board.Change{Slot: e.slot, Incarnation: uint32(l.Incarnation), State: e.state})
}

func (t *table) silent(e *entry, now time.Time) bool { return now.Sub(e.seen) >= missed*t.interval }

// list returns all executors by address. Silent ones are marked.
func (t *table) list() []*control.ExecutorEntry {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	out := make([]*control.ExecutorEntry, 0, len(t.byID))
	for _, e := range t.byID {
		t.refresh(e)
		out = append(out, &control.ExecutorEntry{ExecutorId: e.id, Address: e.address,
			Info: proto.CloneOf(e.info), AgeMs: uint64(max(0, now.Sub(e.seen)).Milliseconds()), Alive: !t.silent(e, now)})
	}
	slices.SortFunc(out, func(a, b *control.ExecutorEntry) int {
		return cmp.Or(cmp.Compare(a.GetAddress(), b.GetAddress()), cmp.Compare(a.GetExecutorId(), b.GetExecutorId()))
	})
	return out
}

// markSilent marks an executor's line as silent. It returns false if the executor has just written it. The caller holds
// the lock.
func (t *table) markSilent(e *entry) bool {
	l, err := t.board.ReadLine(e.slot)
	if err != nil { // the executor died during a write
		l = lineOf(e.info, e.slot, e.beat, e.seen)
		l.State = board.Silent
		t.board.WriteLine(&l)
		return true
	}
	if e.memory != nil && l.Beat != e.beat && l.Incarnation == board.ShortIncarnation(incarnationOf(e.info)) {
		return false
	}
	return t.board.Mark(l, board.Silent)
}

// sweep reads the lines, marks silent executors, returns the addresses of newly silent ones, and forgets executors that
// have been silent for long. A late sweep marks none, because the delay of the manager may have delayed executors too. It
// counts as one missed heartbeat, however late it is.
func (t *table) sweep() (died []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	var held time.Duration
	if since := now.Sub(t.swept); !t.swept.IsZero() && since > 2*t.interval {
		held = since - t.interval
	}
	t.swept = now
	for _, e := range t.byID {
		t.refresh(e)
		if held > 0 && e.state != board.Silent {
			e.seen = e.seen.Add(min(held, now.Sub(e.seen)))
		}
		if !t.silent(e, now) {
			continue
		}
		if e.state != board.Silent && held == 0 && t.markSilent(e) {
			died = append(died, e.address)
			t.tell(e, board.Silent)
		}
		if now.Sub(e.seen) >= forgetAfter {
			t.drop(e)
		}
	}
	for _, c := range t.board.Tidy() {
		t.changed(c) // notify subscribers that may have read the wrong line
	}
	slices.Sort(died)
	return died
}
