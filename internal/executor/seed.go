package executor

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// A seed is the memory of a process that has made the init call of a lease. The first lease that needs it makes it, on the cores of its first
// worker, before its workers start. Later leases of the same tenant with the same library, bundle, init call and memory start from it, too. It
// is kept among the tables: it counts against the tenant's table-limit, is paid for like a table, and is evicted when no lease uses it. Where
// no seed can be made, or a worker cannot start from it, the client makes the init call. A seed fails a lease only if the lease ends while the seed
// is made, or if the executor hands over: then the client repeats its request.

const (
	seedPayloadMost  = 64 << 10
	seedFunctionMost = 1024
	seedOriginMost   = 255
)

// Results of attempts to make a seed, in the metrics.
const (
	seedMade    = "made"
	seedCopied  = "copied"
	seedRefused = "refused"
	seedFailed  = "failed"
)

// wish is a lease's request for a seed.
type wish struct {
	*control.Seed
	key     sum
	owner   string
	heap    uint64
	tenant  string
	refused string        // why there is no seed
	cpu     time.Duration // processor time of the process that has made the seed for this lease
}

// checkSeed checks the seed of a request.
func checkSeed(req *control.LeaseRequest) error {
	s := req.GetSeed()
	if s == nil {
		return nil
	}
	if err := checkSetup(s.GetFunction(), s.GetPayload(), s.GetLimitMs()); err != nil {
		return err
	}
	if req.GetRuntime() != "" {
		return invalidf("a seed together with the runtime %.64q, which is a state of its own", req.GetRuntime())
	}
	if n := len(s.GetCopy()); n != 0 && n != sha256.Size {
		return invalidf("copy of the seed: %d bytes, want none or %d", n, sha256.Size)
	}
	if req.GetSpare() || req.GetReuse() != 0 || req.GetKeepsState() {
		return invalidf("a seed together with spare, reuse or keeps_state: such workers have a state of their own")
	}
	if s.GetName() == "" {
		return nil
	}
	if s.GetVersion() == 0 || len(s.GetOrigin()) > seedOriginMost {
		return invalidf("seed %.80q: version %d and an origin of %d bytes, want a version and at most %d bytes", s.GetName(), s.GetVersion(), len(s.GetOrigin()), seedOriginMost)
	}
	return checkSeedName(s.GetName())
}

// checkSetup checks the function that makes a seed.
func checkSetup(function string, payload []byte, limitMs uint64) error {
	switch {
	case len(function) < 1 || len(function) > seedFunctionMost || !utf8.ValidString(function) || strings.Contains(function, "\x00"):
		return invalidf("function of the seed: %d bytes, want 1 to %d of UTF-8 without NUL", len(function), seedFunctionMost)
	case len(payload) > seedPayloadMost:
		return invalidf("payload of the seed: %d bytes, want at most %d", len(payload), seedPayloadMost)
	case limitMs == 0:
		return invalidf("limit_ms of the seed is 0")
	}
	return nil
}

// newWish returns the wish of a checked request, or nil.
func newWish(req *control.LeaseRequest, t *lease.Terms, owner string) *wish {
	if req.GetSeed() == nil {
		return nil
	}
	w := &wish{Seed: req.GetSeed(), owner: owner, tenant: t.Tenant, heap: zygote.SeedHeap(t.MemoryPerWorker - channelsMemory(req.GetClientBlobs()))}
	h := sha256.New()
	for _, part := range [][]byte{[]byte(owner), []byte(t.Tenant), req.GetCodeSha256(), req.GetBundle().GetSha256(), []byte(w.GetFunction()), w.GetPayload()} {
		_ = binary.Write(h, binary.LittleEndian, uint64(len(part))) // a hash returns no error
		h.Write(part)
	}
	_ = binary.Write(h, binary.LittleEndian, []uint64{uint64(t.UID), uint64(t.GID), uint64(t.CoresPerWorker), w.heap})
	if w.GetName() != "" { // another seed of the same function can have another content
		fmt.Fprintf(h, "%s:%d@%s", w.GetName(), w.GetVersion(), w.GetOrigin())
	}
	h.Sum(w.key[:0])
	w.key[1] = ^w.key[1] // no client can make a table with this hash
	if req.GetProvider() == dataplane.OFI {
		w.refused = "seed: workers on libfabric cannot start from one: use another provider, or open the lease without a seed"
	}
	if i := slices.IndexFunc(req.GetTables(), (*control.Table).GetSeed); i >= 0 {
		w.refused = fmt.Sprintf("seed: the lease maps another seed as its table %q, at the address of its own: drop the table, or open the lease without a seed", cutText(req.GetTables()[i].GetName()))
	} else if len(req.GetTables()) > 0 {
		w.refused = "seed: the lease has tables, and the init call could keep their addresses: open the lease without tables, or without the flag"
	}
	return w
}

// takeSeed gives a lease that starts its seed, and makes the seed first if the node does not have it. Without a seed, the wish says why. An error
// means that the lease cannot start.
func (e *Executor) takeSeed(caller context.Context, h *holding) error {
	w := h.wish
	if w == nil || w.refused != "" {
		return nil
	}
	if e.takeNamed(h, w) {
		return nil
	}
	ctx, cancel := context.WithCancelCause(h.ctx)
	defer cancel(nil)
	defer context.AfterFunc(caller, func() { cancel(errors.New("the client has given up its request")) })()
	defer e.turns.endOnClose(cancel)()
	limit := e.seedLimit(caller, w)
	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the init call has not returned within %v", limit.Round(time.Millisecond)))
	defer stop()
	t, err := e.tables.seed(ctx, w.key, w.owner, func(room *seedRoom) (*zygote.Seed, error) { return e.findSeed(ctx, h, w, room) })
	switch {
	case err != nil && h.ctx.Err() != nil:
		return control.CodeErrorf(control.ClassBusy, codes.Unavailable, "not started, because the lease ends or the node drains")
	case err != nil && context.Cause(ctx) == errHandsOver:
		return errHandsOver
	case err != nil:
		w.refused = "seed: " + strings.TrimPrefix(err.Error(), "seed: ")
	case t.seed == nil:
		w.refused = t.refused
		e.tables.release([]*table{t})
	default:
		h.seed, h.spec.Seed = t, t.seed
		return nil
	}
	e.unseeded(h, w.refused)
	return nil
}

// seedLimit returns how long a seed may take: at most as long as an init call, and so that the caller has time left for the workers.
func (e *Executor) seedLimit(caller context.Context, w *wish) time.Duration {
	s := &e.cfg.Settings
	limit := min(w.Limit(), cmp.Or(e.initLimit(), s.LeaseMax))
	end, ok := caller.Deadline()
	if !ok {
		return min(limit, s.SpawnTimeout)
	}
	left := max(time.Until(end), 0)
	return min(limit, left-min(left/2, s.SpawnTimeout))
}

// takeNamed gives a lease the seed that it names, and returns true. It returns false if this executor has no such seed, so that one is made. If the seed
// does not suit the lease, the wish says why.
func (e *Executor) takeNamed(h *holding, w *wish) bool {
	if w.GetName() == "" {
		return false
	}
	t, about := e.published.acquire(w.tenant, w.GetName(), w.GetVersion())
	if t == nil {
		return false
	}
	if about.GetFunction() != w.GetFunction() || !bytes.Equal(about.GetPayload(), w.GetPayload()) { // it is another executor's seed with the same name and version
		e.tables.release([]*table{t})
		return false
	}
	heap := uint64(about.GetHeapUnits()) * zygote.SeedUnit
	switch {
	case !bytes.Equal(about.GetCodeSha256(), h.code.sum[:]):
		w.refused = fmt.Sprintf("seed: %s was made with another library than that of this lease", w.GetName())
	case !bytes.Equal(about.GetBundleSha256(), h.bundleSum()):
		w.refused = fmt.Sprintf("seed: %s was made with another bundle than that of this lease", w.GetName())
	case w.heap < heap:
		w.refused = fmt.Sprintf("seed: %s needs workers of %d bytes of memory, and room for the channel: set the option memory", w.GetName(), about.GetMemory())
	default:
		h.seed, h.spec.Seed = t, t.seed
		return true
	}
	e.tables.release([]*table{t})
	e.unseeded(h, w.refused)
	return true
}

func (e *Executor) makeSeed(ctx context.Context, h *holding, w *wish) (*zygote.Seed, error) {
	spec := &zygote.SeedSpec{Worker: h.workerSpec(0, nil), Setup: w.GetFunction(), Payload: w.GetPayload(), Heap: w.heap}
	s, err := e.cfg.Spawner.MakeSeed(ctx, spec)
	w.cpu = spec.CPU
	result := seedMade
	switch {
	case unsupported(err):
		result = seedRefused
	case err != nil:
		result = seedFailed
	default:
		e.tell(h, slog.LevelInfo, "seed made", "lease", uint64(h.id), "function", w.GetFunction(), "bytes", s.Bytes, "load", s.Load, "init_call", s.Setup,
			"capture", s.Capture)
		if s.Warning != "" {
			e.tell(h, slog.LevelWarn, "a seed may contain pointers that its workers cannot use", "lease", uint64(h.id), "function", w.GetFunction(), "reason", s.Warning)
		}
		e.lender.hashAhead(s)
	}
	e.metrics.seeds.WithLabelValues(result).Inc()
	return s, err
}

// unsupported reports whether an init call leaves a state that cannot be kept. It would do so again.
func unsupported(err error) bool {
	var known *zygote.WorkerError
	return errors.As(err, &known) && known.Status == zygote.StatusUnsupported
}

// unseeded logs why a worker of a lease starts without its seed. If the seed does not fit any more, because the zygote was replaced, the next
// lease makes another one.
func (e *Executor) unseeded(h *holding, why string) {
	e.tell(h, slog.LevelInfo, "a worker starts without its seed", "lease", uint64(h.id), "reason", why)
	if h.seed != nil && !e.published.has(h.seed) { // a named one stays until its time is over
		e.tables.drop(h.seed)
	}
}

// unseededMost is the size of `unseeded` of rfaas_worker_start. A grant of many workers has one such text for each.
const unseededMost = 160

// cutText cuts a text to what a client gets.
func cutText(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), unseededMost)], "")
}

// ---- the store ----

// seed returns a seed with a new reference, or the record that it cannot be made. It makes a seed that is missing. Others that want it meanwhile
// wait.
func (s *tableStore) seed(ctx context.Context, key sum, owner string, make func(*seedRoom) (*zygote.Seed, error)) (*table, error) {
	u := sending{key, owner}
	for {
		has, over, err := s.claim(u, 0)
		if err != nil && s.dropCached() {
			continue
		}
		if err != nil {
			return nil, err
		}
		if has {
			if t := s.take(key, owner); t != nil {
				return t, nil
			}
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			continue // evicted since
		}
		if over == nil {
			break
		}
		select {
		case <-over:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	t, err := s.storeSeed(u, make)
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.arriving[u].over)
	delete(s.arriving, u)
	if err == nil {
		s.tables[key] = t
	}
	return t, err
}

// take returns a seed of the store with a new reference, or nil.
func (s *tableStore) take(key sum, owner string) *table {
	s.mu.Lock()
	t := s.tables[key]
	ok := t != nil && t.kind == isSeed && t.usable(owner)
	lost := ok && t.seed != nil && t.seed.Lost() != nil
	if ok = ok && !lost; ok {
		t.refs++
	}
	s.mu.Unlock()
	switch {
	case ok:
		return t
	case lost:
		s.dropLost(t.seed)
	}
	return nil
}

// seedRoom is the memory reserved so far for a seed that is being made or copied. It is charged to the seed's owner.
type seedRoom struct {
	store *tableStore
	a     *arrivingTable // its size is the reserved memory; guarded by the store's lock
	owner string
}

// add counts memory that is already reserved. The caller holds the store's lock.
func (r *seedRoom) add(bytes uint64) { r.a.size += bytes }

// take reserves more bytes. It charges them to the owner before there is room for them, so that seeds that arrive at the same time
// cannot exceed the limit together.
func (r *seedRoom) take(bytes uint64) error {
	if err := r.count(bytes); err != nil {
		return err
	}
	if err := r.store.makeRoom(bytes); err != nil {
		r.store.mu.Lock()
		defer r.store.mu.Unlock()
		r.a.size -= bytes
		return err
	}
	return nil
}

// count charges more bytes to the owner. It evicts the owner's unused tables if necessary.
func (r *seedRoom) count(bytes uint64) error {
	s := r.store
	var evicted []*table
	defer func() { s.free(evicted...) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes > s.limit {
		return fmt.Errorf("a tenant may have %d bytes of tables and seeds (table-limit)", s.limit)
	}
	for used := s.bytesOf(r.owner); used > s.limit-bytes; used = s.bytesOf(r.owner) {
		t := s.evict(func(t *table) bool { return t.owners[r.owner] })
		if t == nil {
			return fmt.Errorf("leases of this tenant use %d bytes of tables and seeds, and it may have %d (table-limit)", used, s.limit)
		}
		evicted = append(evicted, t)
	}
	r.add(bytes)
	return nil
}

// has returns the number of reserved bytes.
func (r *seedRoom) has() uint64 {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	return r.a.size
}

// leave gives back all reserved bytes except the given number.
func (r *seedRoom) leave(bytes uint64) {
	r.store.mu.Lock()
	over := r.a.size - bytes
	r.a.size = bytes
	r.store.mu.Unlock()
	if over > 0 {
		r.store.giveBack(over)
	}
}

// storeSeed makes a seed and finds room for it. `make` may reserve memory first. A state that cannot be kept is recorded, so that later leases do not repeat the
// init call in vain.
func (s *tableStore) storeSeed(u sending, make func(*seedRoom) (*zygote.Seed, error)) (*table, error) {
	t := &table{sum: u.sum, kind: isSeed, refs: 1, owners: map[string]bool{u.owner: true}}
	s.mu.Lock()
	room := &seedRoom{s, s.arriving[u], u.owner}
	s.mu.Unlock()
	made, err := make(room)
	if err != nil {
		room.leave(0)
		if unsupported(err) {
			t.refused = err.Error()
			return t, nil
		}
		return nil, err
	}
	memory := made.Memory()
	if has := room.has(); memory > has {
		err = room.take(memory - has)
	}
	if err != nil {
		made.Close()
		room.leave(0)
		return nil, fmt.Errorf("no memory for its %d bytes: %w", memory, err)
	}
	room.leave(memory)
	t.seed, t.size = made, memory
	return t, nil
}

// refer adds a reference to a table that has one.
func (s *tableStore) refer(t *table) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.refs++
}

// drop takes a seed out of the store. Its memory is freed when no lease uses it any more.
func (s *tableStore) drop(t *table) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tables[t.sum] == t {
		delete(s.tables, t.sum)
		t.gone = true
	}
}
