package executor

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// table is a client's table in a sealed memory file, a bundle, unpacked into a directory, or a seed. Its fields do not change after it is in the store,
// except refs, used, owners and gone, which the store's lock guards.
type table struct {
	sum  sum
	kind tableKind
	size uint64
	file *os.File // of a table, opened for reading
	// bundle identifies an unpacked bundle.
	bundle zygote.BundleID
	// seed is nil if the state of the init call cannot be kept, for the reason refused.
	seed    *zygote.Seed
	refused string

	refs   int
	gone   bool            // not in the store any more: freed at the last release
	used   uint64          // the store's tick at the last release
	owners map[string]bool // owners that have sent the table
}

type tableKind int

const (
	isTable tableKind = iota
	isBundle
	isSeed
)

// usable is code.usable.
func (t *table) usable(owner string) bool { return owner == "" || t.owners[owner] }

// tableStore has the node's tables by hash. The node has one copy of each. Unused tables are evicted for new ones and for leases, the longest
// unused first.
type tableStore struct {
	limit uint64 // bytes of one owner's tables
	most  int    // number of tables: each uses a descriptor
	// bundles has the directories of bundles; nil: none are taken.
	bundles *bundles
	// reserve takes memory from what leases may have, and giveBack returns it.
	reserve  func(bytes uint64) error
	giveBack func(bytes uint64)
	// dropCached ends the cached workers of a lease with tables, the oldest first. It returns false if there are none.
	dropCached func() bool
	// withdraw is called for a seed that is not in the store any more, because its file has grown, but has references.
	withdraw func(*table)

	mu       sync.Mutex
	tick     uint64
	closed   bool
	tables   map[sum]*table
	arriving map[sending]*arrivingTable
	freeing  int       // tables that are not in the store any more, whose memory is not free yet
	freed    sync.Cond // one of them is freed

	received atomic.Uint64 // bytes that clients have sent
}

// arrivingTable is a table that an owner is sending.
type arrivingTable struct {
	size uint64
	over chan struct{} // closed when the table has arrived, or cannot arrive any more
}

func newTableStore(limit uint64, bundles *bundles, reserve func(uint64) error, giveBack func(uint64), dropCached func() bool) *tableStore {
	s := &tableStore{limit: limit, bundles: bundles, most: mostLibraries(), reserve: reserve, giveBack: giveBack, dropCached: dropCached,
		withdraw: func(*table) {}, tables: map[sum]*table{}, arriving: map[sending]*arrivingTable{}}
	s.freed.L = &s.mu
	return s
}

// tableRef names a table of a lease.
type tableRef struct {
	sum  sum
	kind tableKind
}

// find returns a table that the owner may use, or nil. A seed is one of this executor, or a copy (mappedKey). The caller holds mu.
func (s *tableStore) find(r tableRef, owner string) *table {
	suits := func(t *table) bool {
		return t != nil && t.usable(owner) && t.kind == r.kind && (t.kind != isSeed || t.seed != nil)
	}
	if t := s.tables[r.sum]; suits(t) {
		return t
	}
	if t := s.tables[mappedKey(owner, r.sum)]; r.kind == isSeed && suits(t) {
		return t
	}
	return nil
}

// acquire returns the tables with new references, or the positions of the tables that the owner has not sent to this node. A client can name a bundle as a
// table, and a table as a bundle: the owner has not sent those either.
func (s *tableStore) acquire(wanted []tableRef, owner string) (got []*table, unknown []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, r := range wanted {
		if t := s.find(r, owner); t != nil {
			got = append(got, t)
		} else {
			unknown = append(unknown, uint32(i))
		}
	}
	if len(unknown) > 0 {
		return nil, unknown
	}
	for _, t := range got {
		t.refs++
	}
	return got, nil
}

// release drops references.
func (s *tableStore) release(tables []*table) {
	var over, grown []*table
	s.mu.Lock()
	for _, t := range tables {
		t.refs--
		s.tick++
		t.used = s.tick
		if t.seed != nil && s.tables[t.sum] == t && t.seed.Grown() {
			delete(s.tables, t.sum)
			t.gone = true
			if t.refs > 0 {
				grown = append(grown, t)
			}
		}
		if t.gone && t.refs == 0 {
			s.freeing++
			over = append(over, t)
		}
	}
	s.mu.Unlock()
	s.free(over...)
	for _, t := range grown {
		s.withdraw(t)
	}
}

// add stores a table of an owner, whose bytes fetch copies. If an owner adds the same hash several times at once, one call fetches it and the
// others wait. known means that nothing was fetched. If other owners have sent the table, its bytes are fetched and compared, since the hash
// alone does not prove that this owner has the table.
func (s *tableStore) add(ctx context.Context, h sum, bundle bool, owner string, size uint64, fetch func() (io.Reader, error)) (known bool, err error) {
	if size == 0 || size > s.limit {
		return false, invalidf("table of %d bytes: this executor keeps 1 to %d bytes of tables for a tenant (table-limit)", size, s.limit)
	}
	if bundle {
		h = bundleKey(h)
	}
	u := sending{h, owner}
	for {
		has, over, err := s.claim(u, size)
		if err != nil && s.dropCached() {
			continue
		}
		if has || err != nil {
			return has, err
		}
		if over == nil {
			break
		}
		select {
		case <-over:
		case <-ctx.Done():
			return false, interrupted(ctx, "table")
		}
	}
	err = s.receive(u, bundle, size, fetch)
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.arriving[u].over)
	delete(s.arriving, u)
	return false, err
}

// claim reports whether the owner has sent the table, or returns the end of another transfer to wait for. If it does neither, the caller
// must fetch the table.
func (s *tableStore) claim(u sending, size uint64) (has bool, over chan struct{}, err error) {
	var evicted []*table
	defer func() { s.free(evicted...) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false, nil, grpcError(lease.ErrDraining)
	}
	if t := s.tables[u.sum]; t != nil && t.usable(u.owner) {
		return true, nil, nil
	}
	if a := s.arriving[u]; a != nil {
		return false, a.over, nil
	}
	for used := s.bytesOf(u.owner); used > s.limit-size; used = s.bytesOf(u.owner) {
		t := s.evict(func(t *table) bool { return t.owners[u.owner] })
		if t == nil {
			return false, nil, control.Errorf(control.ClassBusy, "table of %d bytes: leases of this tenant use tables of %d bytes here, and it may have %d (table-limit). "+
				"Release leases, or ask the administrator for more", size, used, s.limit)
		}
		evicted = append(evicted, t)
	}
	for len(s.tables)+len(s.arriving) >= s.most {
		t := s.evict(anyTable)
		if t == nil {
			return false, nil, control.Errorf(control.ClassBusy, "table of %d bytes: leases use %d tables here, the most that this executor keeps", size, s.most)
		}
		evicted = append(evicted, t)
	}
	s.arriving[u] = &arrivingTable{size, make(chan struct{})}
	return false, nil, nil
}

// bytesOf returns what an owner's tables take. The caller holds mu.
func (s *tableStore) bytesOf(owner string) (bytes uint64) {
	for _, t := range s.tables {
		if t.owners[owner] {
			bytes += t.size
		}
	}
	for u, a := range s.arriving {
		if u.owner == owner {
			bytes += a.size
		}
	}
	return bytes
}

func anyTable(*table) bool { return true }

// evict takes out of the store the table that has been unused for the longest time, of those that may be dropped. It returns nil if all are
// in use. The caller holds mu, and calls free when it has released mu.
func (s *tableStore) evict(may func(*table) bool) *table {
	var oldest *table
	for _, t := range s.tables {
		if t.refs == 0 && may(t) && (oldest == nil || t.used < oldest.used) {
			oldest = t
		}
	}
	if oldest != nil {
		delete(s.tables, oldest.sum)
		s.freeing++
	}
	return oldest
}

// free frees the memory of tables that are not in the store any more, and are counted in freeing. The caller does not hold mu: it takes long
// to remove a bundle of many files.
func (s *tableStore) free(tables ...*table) {
	for _, t := range tables {
		switch {
		case t.kind == isTable:
			t.file.Close()
		case t.kind == isBundle:
			s.bundles.remove(t.bundle)
		case t.seed != nil:
			t.seed.Close()
		}
		s.giveBack(t.size)
		s.mu.Lock()
		s.freeing--
		s.freed.Broadcast()
		s.mu.Unlock()
	}
}

// evictOne evicts a table for a lease or table that needs memory. If there is none, but others are being freed, it waits for one of those. It
// returns false if no memory has become free.
func (s *tableStore) evictOne() bool {
	s.mu.Lock()
	t := s.evict(anyTable)
	waits := t == nil && s.freeing > 0
	if waits {
		s.freed.Wait()
	}
	s.mu.Unlock()
	if t != nil {
		s.free(t)
	}
	return t != nil || waits
}

// receive stores a table, or, if the store has it from another owner, compares it. Then the owner may use it.
func (s *tableStore) receive(u sending, bundle bool, size uint64, fetch func() (io.Reader, error)) error {
	s.mu.Lock()
	t := s.tables[u.sum]
	if t != nil {
		t.refs++
	}
	s.mu.Unlock()
	if t == nil {
		var err error
		if t, err = s.store(u.sum, bundle, size, fetch); err != nil {
			return err
		}
		t = s.insert(t)
	} else if err := s.compare(u.sum, bundle, size, fetch); err != nil {
		s.release([]*table{t})
		return err
	}
	s.mu.Lock()
	t.owners[u.owner] = true
	s.mu.Unlock()
	s.release([]*table{t})
	return nil
}

// insert puts a table with a reference into the store. If another owner has sent the same in the meantime, it returns that one instead.
func (s *tableStore) insert(t *table) *table {
	s.mu.Lock()
	other := s.tables[t.sum]
	if other == nil {
		s.tables[t.sum] = t
		s.mu.Unlock()
		return t
	}
	other.refs++
	s.freeing++
	s.mu.Unlock()
	s.free(t)
	return other
}

// compare reads a table or bundle that the store has from another owner.
func (s *tableStore) compare(h sum, bundle bool, size uint64, fetch func() (io.Reader, error)) error {
	if bundle {
		h = bundleKey(h)
	}
	_, err := s.copy(io.Discard, h, size, fetch)
	return err
}

// store copies a table into a sealed file, or unpacks a bundle. It returns the table with a reference, not in the store yet.
func (s *tableStore) store(h sum, bundle bool, size uint64, fetch func() (io.Reader, error)) (*table, error) {
	if err := s.makeRoom(size); err != nil {
		return nil, control.Errorf(control.ClassBusy, "table of %d bytes: no memory: %v", size, err)
	}
	t := &table{sum: h, size: size, refs: 1, owners: map[string]bool{}}
	var err error
	if bundle {
		t.kind = isBundle
		err = s.storeBundle(t, fetch)
	} else {
		err = s.storeFile(t, fetch)
	}
	if err != nil {
		s.giveBack(size)
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) {
			return nil, control.Errorf(control.ClassBusy, "table of %d bytes: the node has no memory: %v", size, err)
		}
		return nil, grpcError(err)
	}
	return t, nil
}

// makeRoom takes memory from what leases may have. It evicts tables and ends cached workers if necessary.
func (s *tableStore) makeRoom(size uint64) error {
	for {
		err := s.reserve(size)
		if err == nil || !s.evictOne() && !s.dropCached() {
			return err
		}
	}
}

// storeFile copies a table into a sealed file.
func (s *tableStore) storeFile(t *table, fetch func() (io.Reader, error)) error {
	file, err := zygote.SealedFile("rfaas-table", func(f io.Writer) error {
		_, err := s.copy(f, t.sum, t.size, fetch)
		return err
	})
	if err == nil {
		t.file, err = reopen(file)
		file.Close()
	}
	return err
}

// reopen opens a memory file for reading only. Before Linux 6.7 a sealed file can be shared only by a mapping of such a descriptor.
func reopen(f *os.File) (*os.File, error) { return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd())) }

// copy copies what fetch reads, and checks its hash. The bytes are hashed as they were copied, so a client that changes them meanwhile is
// refused.
func (s *tableStore) copy(to io.Writer, announced sum, size uint64, fetch func() (io.Reader, error)) (int64, error) {
	from, err := fetch()
	if err != nil {
		return 0, err
	}
	hash := sha256.New()
	n, err := io.CopyN(io.MultiWriter(to, hash), from, int64(size))
	s.received.Add(uint64(n))
	if got := sum(hash.Sum(nil)); err == nil && got != announced {
		err = invalidf("table: announced as SHA-256 %x, but the bytes have %x: they must not change while the table is published", announced[:], got[:])
	}
	return n, err
}

// bytes returns what all tables take, and what of it no lease uses.
func (s *tableStore) bytes() (all, unused uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tables {
		all += t.size
		if t.refs == 0 {
			unused += t.size
		}
	}
	return all, unused
}

// close drops all tables, of which none may be in use, and takes no others. All are freed when it returns.
func (s *tableStore) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	all := slices.Collect(maps.Values(s.tables))
	clear(s.tables)
	s.freeing += len(all)
	s.mu.Unlock()
	s.free(all...)
	s.mu.Lock()
	for s.freeing > 0 {
		s.freed.Wait()
	}
}

// ---- tables of leases ----

// refOf names a table of a request.
func refOf(t *control.Table, h sum) tableRef {
	if t.GetSeed() {
		return tableRef{h, isSeed}
	}
	return tableRef{h, isTable}
}

// tablesOf checks the tables of a request.
func (e *Executor) tablesOf(req *control.LeaseRequest) (wanted []tableRef, err error) {
	if n := len(req.GetTables()); n > zygote.MaxTables {
		return nil, invalidf("%d tables, want at most %d", n, zygote.MaxTables)
	}
	names := map[string]bool{}
	left := e.tables.limit
	seed := ""
	for i, t := range req.GetTables() {
		h, err := checkSum(fmt.Sprintf("sha256 of table %d", i), t.GetSha256())
		if err != nil {
			return nil, err
		}
		switch name := t.GetName(); {
		case len(name) < 1 || len(name) > zygote.TableName || !utf8.ValidString(name) || containsNUL(name):
			return nil, invalidf("name of table %d: %q, want 1 to %d bytes of UTF-8 without NUL", i, name, zygote.TableName)
		case names[name]:
			return nil, invalidf("two tables have the name %q", name)
		case t.GetSize() == 0:
			return nil, invalidf("table %q has no bytes", name)
		case t.GetAddress()%uint64(os.Getpagesize()) != 0:
			return nil, invalidf("table %q: address %#x is not a multiple of the page size, %d", name, t.GetAddress(), os.Getpagesize())
		case t.GetSeed() && t.GetAddress() != 0:
			return nil, invalidf("table %q is a seed, and has address %#x: a seed has an address of its own", name, t.GetAddress())
		case t.GetSeed() && seed != "":
			return nil, invalidf("tables %q and %q are both seeds, whose memory has the same address: a lease can map one", seed, name)
		case t.GetSize() > left:
			return nil, invalidf("table %q of %d bytes, after others of %d bytes: this executor keeps at most %d bytes of tables for a tenant (table-limit). "+
				"Publish fewer or smaller tables, or ask the administrator for more", name, t.GetSize(), e.tables.limit-left, e.tables.limit)
		default:
			names[name] = true
			left -= t.GetSize()
		}
		if t.GetSeed() {
			seed = t.GetName()
		}
		wanted = append(wanted, refOf(t, h))
	}
	return wanted, nil
}

func containsNUL(s string) bool {
	for i := range len(s) {
		if s[i] == 0 {
			return true
		}
	}
	return false
}

// specTables returns the tables of a request as workers get them, and the bundle, which comes after them.
func specTables(wanted []*control.Table, tables []*table) (list []zygote.Table, bundle zygote.BundleID) {
	for i, t := range wanted {
		list = append(list, zygote.Table{Name: t.GetName(), File: tables[i].file, Size: tables[i].size, Address: t.GetAddress(), Seed: tables[i].seed})
	}
	if len(tables) > len(wanted) {
		bundle = tables[len(wanted)].bundle
	}
	return list, bundle
}

// setAside takes memory from what leases may have. If too little is free, it ends cached workers, the oldest first.
func (e *Executor) setAside(bytes uint64) error {
	for {
		err := e.table.SetAside(bytes)
		if err == nil || e.table.Capacity().FreeMemory < bytes {
			return err
		}
		cached := e.table.Cached()
		if len(cached) == 0 {
			return err
		}
		e.dropCached(cached[0])
	}
}

// dropCachedWithTables is tableStore.dropCached.
func (e *Executor) dropCachedWithTables() bool {
	for _, id := range e.table.Cached() {
		e.mu.Lock()
		k := e.cached[id]
		has := k != nil && len(k.tables) > 0
		e.mu.Unlock()
		if has && e.dropCached(id) {
			return true
		}
	}
	return false
}

// requestWithRoom is request. It evicts unused tables if their memory is what the lease lacks.
func (e *Executor) requestWithRoom(terms *lease.Terms, try func() error) error {
	for {
		err := try()
		short := e.table.Capacity().FreeMemory < uint64(cmp.Or(terms.WorkersMin, terms.Workers))*terms.MemoryPerWorker
		if !errors.Is(err, lease.ErrBusy) || !short || !e.tables.evictOne() {
			return err
		}
	}
}

// tableLimit returns how many bytes of tables a tenant may have on a node that lends so much memory.
func tableLimit(s *config.Executor, memory uint64) uint64 {
	if s.TableLimit == 0 {
		return memory / 4 * 3
	}
	return uint64(s.TableLimit)
}
