package manager

import (
	"context"
	"encoding/binary"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// maxLimited is the largest number of tenants with a limit.
const maxLimited = 4096

// mendAfter is how long reserved cores must differ from what executors report before the difference is corrected. It is
// longer than any operation, so that an operation in progress is not mistaken for an error.
const mendAfter = 3 * link.Timeout

// limits counts the cores that tenants have reserved, in a table that executors reach by atomics (accounting.Limit).
// The executors enforce the limits. The manager assigns the records, and returns what executors that have gone still
// had reserved.
type limits struct {
	config accounting.Limits
	log    *slog.Logger
	now    func() time.Time
	table  []byte // of the records
	verbs  *ownWay

	mu      sync.Mutex
	records map[string]uint32   // by tenant
	tenants []string            // by record
	asked   map[[16]byte]*asked // by incarnation
	gone    []debt              // to be returned
	drift   map[debt]*drift     // by record and way; cores is 0 in the key
}

// asked is what an executor has reserved by message, by record. While the executor is silent it does not count.
type asked struct {
	cores  map[uint32]uint32
	silent bool
}

// debt is a number of cores to return.
type debt struct {
	record uint32
	way    accounting.LimitWay
	cores  uint64
}

// drift is how far a word was ahead of what executors report since then: at least low, at most high.
type drift struct {
	since     time.Time
	low, high int64
}

func newLimits(config accounting.Limits, table []byte, verbs *ownWay, log *slog.Logger, now func() time.Time) *limits {
	return &limits{config: config, log: log, now: now, table: table, verbs: verbs, records: map[string]uint32{},
		asked: map[[16]byte]*asked{}, drift: map[debt]*drift{}}
}

// record returns a tenant's record. The first call for a tenant creates it.
func (l *limits) record(tenant string) (uint32, uint64, bool, error) {
	cores, limited := l.config.Of(tenant)
	if !limited {
		return 0, 0, false, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.records[tenant]
	if !ok {
		if len(l.tenants) == maxLimited {
			return 0, 0, false, control.Errorf(control.ClassBusy, "tenant %q: there are already %d tenants with limits, the most possible", tenant, maxLimited)
		}
		r = uint32(len(l.tenants))
		binary.LittleEndian.PutUint64(l.table[r*accounting.LimitSize:], cores)
		l.records[tenant], l.tenants = r, append(l.tenants, tenant)
	}
	return r, cores, true, nil
}

// read returns the current content of a record.
func (l *limits) read(r uint32) accounting.Limit {
	lim := accounting.Limit{Cores: binary.LittleEndian.Uint64(l.table[r*accounting.LimitSize:])}
	for way := range accounting.LimitWay(accounting.NumLimitWays) {
		lim.By[way] = accounting.LimitWord(l.table, r, way).Load()
	}
	return lim
}

// add adds to a word through the same provider as the others that add to it.
func (l *limits) add(d debt) error {
	if d.way == accounting.LimitVerbs {
		return l.verbs.add(accounting.LimitWordOffset(d.record, d.way), d.cores)
	}
	accounting.LimitWord(l.table, d.record, d.way).Add(d.cores)
	return nil
}

// reserve sets the cores reserved by an executor that reports by message. It returns false if they exceed the tenant's
// limit and force is not set.
func (l *limits) reserve(executor [16]byte, r uint32, cores uint32, force bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.asked[executor]
	if a == nil {
		a = &asked{cores: map[uint32]uint32{}}
		l.asked[executor] = a
	}
	l.count(a, false) // an executor that asks is alive
	had := a.cores[r]
	word := accounting.LimitWord(l.table, r, accounting.LimitMessage)
	word.Add(uint64(cores) - uint64(had))
	if lim := l.read(r); cores > had && !force && lim.Reserved() > lim.Cores {
		word.Add(uint64(had) - uint64(cores))
		return false
	}
	if a.cores[r] = cores; cores == 0 {
		delete(a.cores, r)
	}
	return true
}

// count includes an executor's reservations by message, or excludes them while it is silent. The caller holds the lock.
func (l *limits) count(a *asked, silent bool) {
	if a.silent == silent {
		return
	}
	a.silent = silent
	for r, n := range a.cores {
		if silent {
			accounting.LimitWord(l.table, r, accounting.LimitMessage).Add(-uint64(n))
		} else {
			accounting.LimitWord(l.table, r, accounting.LimitMessage).Add(uint64(n))
		}
	}
}

// left returns what an executor that has gone had reserved by message. It does not block.
func (l *limits) left(executor [16]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.asked[executor]; a != nil {
		l.count(a, true)
		delete(l.asked, executor)
	}
}

// hear updates the executors that reserve by message. heard has the registered incarnations, and whether they reported
// lately. Reservations of silent executors are free until they are back. Then they count again, even above the limit,
// like those of attached executors.
func (l *limits) hear(heard map[[16]byte]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for executor, a := range l.asked {
		lately, there := heard[executor]
		l.count(a, !lately)
		if !there || len(a.cores) == 0 {
			delete(l.asked, executor) // it deregistered while it asked, or has nothing reserved
		}
	}
}

// fenced records what an attachment still had reserved, after its connection was closed. It does not block.
func (l *limits) fenced(a *attachment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r, n := range a.holds() {
		l.gone = append(l.gone, debt{r, a.way, -n})
	}
}

// holds returns what an attached executor reports as reserved, by record.
func (a *attachment) holds() map[uint32]uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := map[uint32]uint64{}
	if a.closed || a.held == nil {
		return all
	}
	b := a.held.Bytes()
	for at := 0; at+8 <= len(b); at += 8 {
		w := (*atomic.Uint64)(unsafe.Pointer(&b[at])).Load()
		if r, n, ok := accounting.ParseHeld(w); ok && n > 0 && r < maxLimited {
			all[r] += uint64(n)
		}
	}
	return all
}

// mend returns reservations that are due, and those that no executor reports: an executor may have died between
// reserving and reporting.
func (l *limits) mend(live []*attachment) {
	l.mu.Lock()
	gone := l.gone
	l.gone = nil
	tenants := l.tenants
	l.mu.Unlock()
	if len(tenants) == 0 {
		return
	}
	give := func(d debt) bool {
		if err := l.add(d); err != nil {
			l.log.Warn("cannot return reserved cores; trying again", "tenant", tenants[d.record], "cores", -int64(d.cores), "error", err)
			return false
		}
		return true
	}
	for _, d := range gone {
		if int(d.record) < len(tenants) && !give(d) {
			l.mu.Lock()
			l.gone = append(l.gone, d)
			l.mu.Unlock()
		}
	}
	// An executor that reserves first adds to the word and then reports it. One that returns cores does it in the other
	// order. So a word may be ahead for a moment. Words are read before the reports, so that a reservation in between
	// does not look like an error.
	words := map[debt]uint64{}
	for r := range tenants {
		for way := range accounting.LimitWay(accounting.NumLimitWays) {
			words[debt{record: uint32(r), way: way}] = accounting.LimitWord(l.table, uint32(r), way).Load()
		}
	}
	said := map[debt]uint64{}
	for _, a := range live {
		for r, n := range a.holds() {
			said[debt{record: r, way: a.way}] += n
		}
	}
	l.mu.Lock()
	for _, a := range l.asked {
		if a.silent {
			continue
		}
		for r, n := range a.cores {
			said[debt{record: r, way: accounting.LimitMessage}] += uint64(n)
		}
	}
	var wrong []debt
	now := l.now()
	for k, w := range words {
		ahead := int64(w - said[k])
		d := l.drift[k]
		switch {
		case ahead == 0:
			delete(l.drift, k)
			continue
		case d == nil:
			l.drift[k] = &drift{now, ahead, ahead}
			continue
		}
		d.low, d.high = min(d.low, ahead), max(d.high, ahead)
		if now.Sub(d.since) < mendAfter {
			continue
		}
		if d.low > 0 {
			wrong = append(wrong, debt{k.record, k.way, uint64(-d.low)})
		} else if d.high < 0 {
			wrong = append(wrong, debt{k.record, k.way, uint64(-d.high)})
		}
		delete(l.drift, k)
	}
	l.mu.Unlock()
	for _, d := range wrong {
		if give(d) {
			l.log.Warn("returned reserved cores that no executor has", "tenant", tenants[d.record], "cores", -int64(d.cores))
		}
	}
}

// use returns the reservations of tenants with limits, for people.
func (l *limits) use() map[string]accounting.Limit {
	l.mu.Lock()
	records := maps.Clone(l.records)
	l.mu.Unlock()
	all := map[string]accounting.Limit{}
	for tenant, r := range records {
		all[tenant] = l.read(r)
	}
	return all
}

// Limit returns how many cores a tenant may have, and where they are counted.
func (m *Manager) Limit(_ context.Context, req *control.LimitRequest) (*control.LimitReply, error) {
	if err := checkTenant(req.GetTenant()); err != nil {
		return nil, err
	}
	r, cores, limited, err := m.limits.record(req.GetTenant())
	if err != nil {
		return nil, err
	}
	return &control.LimitReply{Limited: limited, Cores: cores, Record: r}, nil
}

// Reserve reserves cores for executors that cannot reach the manager's memory.
func (m *Manager) Reserve(ctx context.Context, req *control.ReserveRequest) (*control.ReserveReply, error) {
	if err := checkTenant(req.GetTenant()); err != nil {
		return nil, err
	}
	if len(req.GetIncarnation()) != 16 {
		return nil, control.Errorf(control.ClassLease, "executor of incarnation %x is not registered", req.GetIncarnation())
	}
	if err := m.table.check(ownerOf(ctx), [16]byte(req.GetIncarnation())); err != nil {
		return nil, m.answer(ctx, control.Manager_Reserve_FullMethodName, err)
	}
	r, _, limited, err := m.limits.record(req.GetTenant())
	if err != nil || !limited {
		return &control.ReserveReply{Granted: err == nil}, err
	}
	granted := m.limits.reserve([16]byte(req.GetIncarnation()), r, req.GetCores(), req.GetForce())
	lim := m.limits.read(r)
	return &control.ReserveReply{Granted: granted, Cores: lim.Cores, Reserved: lim.Reserved()}, nil
}

func checkTenant(name string) error {
	if n := len(name); n < 1 || n > accounting.MaxName {
		return control.Errorf(control.ClassInvalid, "tenant has %d bytes, want 1 to %d", n, accounting.MaxName)
	}
	return nil
}

// ownWay is the manager's own connection to its memory through its RDMA device. Additions through it are atomic with
// those of executors.
type ownWay struct {
	domain *dataplane.Domain
	memory *dataplane.Memory
	ends   [2]*dataplane.Conn
}

func newOwnWay(dev *dataplane.Device, whole *dataplane.Memory, size uint64) (*ownWay, error) {
	o := &ownWay{}
	var err error
	if o.domain, err = dev.NewDomain(); err == nil {
		o.memory, err = o.domain.Window(whole, 0, size, dataplane.RemoteRead|dataplane.RemoteAtomic)
	}
	var blobs [2][]byte
	for i := range o.ends {
		if err == nil {
			o.ends[i], err = o.domain.NewConn(o.memory)
		}
		if err == nil {
			blobs[i], err = o.ends[i].Blob()
		}
	}
	for i := range o.ends {
		if err == nil {
			err = o.ends[i].Connect(context.Background(), blobs[1-i])
		}
	}
	if err != nil {
		o.close()
		return nil, err
	}
	return o, nil
}

func (o *ownWay) add(offset, n uint64) error {
	ref := o.memory.Ref()
	_, err := o.ends[0].FetchAdd([]dataplane.Add{{Addr: ref.Addr + offset, Value: n}}, ref.Key, link.Timeout)
	return err
}

func (o *ownWay) close() {
	if o == nil {
		return
	}
	for _, c := range o.ends {
		if c != nil {
			c.Close()
		}
	}
	if o.memory != nil {
		o.memory.Free()
	}
	if o.domain != nil {
		o.domain.Close()
	}
}
