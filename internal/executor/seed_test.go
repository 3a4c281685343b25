package executor

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// seedCPU is the processor time of each process that makes a seed.
const seedCPU = time.Hour

// MakeSeed makes a seed that is an empty file, or what seeds returns.
func (z *fakeSpawner) MakeSeed(ctx context.Context, spec *zygote.SeedSpec) (*zygote.Seed, error) {
	spec.CPU = seedCPU
	if z.seeds != nil {
		return z.seeds(ctx)
	}
	return fakeSeed(4096)
}

func fakeSeed(bytes uint64) (*zygote.Seed, error) {
	f, err := os.Open(os.DevNull)
	return &zygote.Seed{File: f, Units: 2, Bytes: bytes}, err
}

func refusedSeed() (*zygote.Seed, error) {
	return nil, &zygote.WorkerError{Status: zygote.StatusUnsupported, Text: "seed: the init call has left 1 threads"}
}

// A seed is made once for all leases that want it, counts as memory, and is evicted when no lease uses it. A state that cannot be kept is tried once, an
// init call that fails is tried again.
func TestSeedStore(t *testing.T) {
	n := newNode(t)
	s := n.e.tables
	var calls atomic.Int32
	get := func(key byte, make func() (*zygote.Seed, error)) (*table, error) {
		return s.seed(t.Context(), sum{key}, "tenant ann", func(*seedRoom) (*zygote.Seed, error) {
			calls.Add(1)
			return make()
		})
	}
	aside := func() uint64 { return n.e.table.Capacity().SetAside }
	const memory = 5000 // such a file has no pages that are hashed
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			got, err := get(1, func() (*zygote.Seed, error) { return fakeSeed(5000) })
			if err != nil || got.seed == nil {
				t.Error(err)
				return
			}
			s.release([]*table{got})
		})
	}
	wg.Wait()
	if calls.Swap(0) != 1 || aside() != memory {
		t.Errorf("made %d times, %d bytes set aside", calls.Load(), aside())
	}
	if s.take(sum{1}, "tenant bob") != nil {
		t.Error("bob may use ann's seed")
	}
	if got, _ := s.acquire([]tableRef{{sum{1}, isTable}}, "tenant ann"); got != nil {
		t.Error("a seed can be mapped as a table")
	}
	for range 2 {
		got, err := get(2, refusedSeed)
		if err != nil || got.seed != nil || !strings.Contains(got.refused, "1 threads") {
			t.Errorf("refused: %v", err)
			continue
		}
		s.release([]*table{got})
	}
	if calls.Swap(0) != 1 {
		t.Error("a state that cannot be kept was made twice")
	}
	broken := errors.New("it has ended")
	for range 2 {
		if _, err := get(3, func() (*zygote.Seed, error) { return nil, broken }); !errors.Is(err, broken) {
			t.Errorf("failed: %v", err)
		}
	}
	if calls.Swap(0) != 2 {
		t.Error("an init call that failed was not made again")
	}
	if _, err := get(4, func() (*zygote.Seed, error) { return fakeSeed(s.limit + 1) }); err == nil || !strings.Contains(err.Error(), "table-limit") {
		t.Errorf("a seed beyond the limit: %v", err)
	}
	used, err := get(1, refusedSeed) // it is still there
	if err != nil || used.seed == nil {
		t.Fatal(err)
	}
	s.drop(used)
	if s.take(sum{1}, "tenant ann") != nil || aside() != memory {
		t.Errorf("a dropped seed is still used by new leases, or was freed too early: %d bytes", aside())
	}
	if s.release([]*table{used}); aside() != 0 {
		t.Errorf("%d bytes set aside after the last release", aside())
	}
	got, err := get(5, func() (*zygote.Seed, error) { return fakeSeed(6000) })
	if err != nil {
		t.Fatal(err)
	}
	s.release([]*table{got})
	for s.evictOne() {
	}
	if aside() != 0 {
		t.Errorf("%d bytes set aside after the eviction", aside())
	}
}

// Who waits for another lease's seed stops when its own time is over.
func TestSeedWaits(t *testing.T) {
	s := newNode(t).e.tables
	making, finish := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() {
		got, err := s.seed(t.Context(), sum{1}, "tenant ann", func(*seedRoom) (*zygote.Seed, error) {
			close(making)
			<-finish
			return fakeSeed(1)
		})
		s.release([]*table{got})
		first <- err
	}()
	<-making
	late := errors.New("late")
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, late)
	defer cancel()
	if _, err := s.seed(ctx, sum{1}, "tenant ann", func(*seedRoom) (*zygote.Seed, error) { return refusedSeed() }); !errors.Is(err, late) {
		t.Errorf("%v, want %v", err, late)
	}
	close(finish)
	if err := <-first; err != nil {
		t.Error(err)
	}
}

// A seed whose file has grown is freed with its last reference. Nothing waits for ever for a record that is no seed.
func TestSeedGrown(t *testing.T) {
	n := newNode(t)
	s := n.e.tables
	fd, err := unix.MemfdCreate("seed", 0)
	if err != nil {
		t.Fatal(err)
	}
	grows := &zygote.Seed{File: os.NewFile(uintptr(fd), "seed"), Units: 2, Bytes: 4096}
	got, err := s.seed(t.Context(), sum{1}, "tenant ann", func(*seedRoom) (*zygote.Seed, error) { return grows, nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := grows.File.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	s.release([]*table{got})
	if got = s.take(sum{1}, "tenant ann"); got == nil {
		t.Fatal("a seed that has grown a little is dropped")
	}
	if _, err := grows.File.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	s.release([]*table{got})
	if aside := n.e.table.Capacity().SetAside; s.take(sum{1}, "tenant ann") != nil || aside != 0 {
		t.Errorf("a seed that has grown by 2 MiB stays: %d bytes", aside)
	}
	s.mu.Lock()
	other := &table{sum: sum{2}, owners: map[string]bool{"tenant ann": true}, refs: 1}
	s.tables[sum{2}] = other
	s.mu.Unlock()
	late := errors.New("late")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(late)
	if _, err := s.seed(ctx, sum{2}, "tenant ann", func(*seedRoom) (*zygote.Seed, error) { return refusedSeed() }); !errors.Is(err, late) {
		t.Errorf("%v, want %v", err, late)
	}
	s.mu.Lock()
	delete(s.tables, sum{2})
	s.mu.Unlock()
}

// An init call that does not return ends with the client's request, with its lease, for a handover, and after the time of a call.
func TestSeedEnds(t *testing.T) {
	for name, end := range map[string]func(n *node, id uint64, giveUp func()) (code codes.Code, unseeded string){
		"given up": func(_ *node, _ uint64, giveUp func()) (codes.Code, string) {
			giveUp()
			return codes.Canceled, ""
		},
		"revoked": func(n *node, id uint64, _ func()) (codes.Code, string) {
			if _, err := n.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: id}); err != nil {
				n.t.Error(err)
			}
			return codes.Unavailable, ""
		},
		"released": func(n *node, id uint64, _ func()) (codes.Code, string) {
			n.release(id)
			return codes.Unavailable, ""
		},
		"handover": func(n *node, _ uint64, _ func()) (codes.Code, string) {
			if err := n.e.turns.close(n.ctx()); err != nil {
				n.t.Error(err)
			}
			n.e.turns.open()
			return codes.Unavailable, ""
		},
		"call-limit": func(*node, uint64, func()) (codes.Code, string) {
			return codes.OK, "seed: the init call has not returned within 10ms"
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(c *Config) {
				if name == "call-limit" {
					c.Settings.CallLimit = 10 * time.Millisecond
				}
			})
			making, ended := make(chan struct{}), make(chan struct{})
			n.z.seeds = func(ctx context.Context) (*zygote.Seed, error) {
				close(making)
				<-ctx.Done()
				close(ended)
				return nil, context.Cause(ctx)
			}
			r := n.request(1)
			r.Seed = &control.Seed{Function: "prepare", LimitMs: 1 << 60}
			ctx, giveUp := context.WithCancel(context.Background()) // without a deadline
			defer giveUp()
			type result struct {
				reply *control.LeaseReply
				err   error
			}
			got := make(chan result, 1)
			go func() {
				reply, err := n.Lease(ctx, r)
				got <- result{reply, err}
			}()
			<-making
			l, err := n.Leases(n.ctx(), &control.LeasesRequest{})
			if err != nil || len(l.GetLeases()) != 1 {
				t.Fatalf("%v, %v", l, err)
			}
			id := l.GetLeases()[0].GetLeaseId()
			code, unseeded := end(n, id, giveUp)
			<-ended
			res := <-got
			if status.Code(res.err) != code {
				t.Errorf("error %v, want %v", res.err, code)
			}
			if w := res.reply.GetWorkers(); code == codes.OK && (len(w) != 1 || w[0].GetUnseeded() != unseeded) {
				t.Errorf("workers %v, want one that says %q", w, unseeded)
			}
			if code != codes.Unavailable {
				n.release(id) // it goes on without a seed
			} else {
				eventually(t, "its cores are free", func() bool { return n.free() == 4 })
			}
		})
	}
	n := newNode(t)
	s := &n.e.cfg.Settings
	if got := n.e.seedLimit(context.Background(), &wish{Seed: &control.Seed{LimitMs: 1 << 60}}); got != s.SpawnTimeout {
		t.Errorf("without a deadline: %v, want %v", got, s.SpawnTimeout)
	}
	if got := cutText(strings.Repeat("é", 200)); len(got) > unseededMost || !utf8.ValidString(got) {
		t.Errorf("cut to %d bytes: %q", len(got), got)
	}
}

// Leases share a seed only if everything is the same that its memory may depend on, and if they are of the same tenant and user.
func TestSeedOfAnotherTenant(t *testing.T) {
	request := func() *control.LeaseRequest {
		return &control.LeaseRequest{CodeSha256: []byte("code"), Seed: &control.Seed{Function: "prepare", Payload: []byte("payload"), LimitMs: 1}}
	}
	terms := lease.Terms{Tenant: "ann", MemoryPerWorker: 64 << 20, CoresPerWorker: 1, UID: 1, GID: 1}
	same := newWish(request(), &terms, "tenant ann").key
	if newWish(request(), &terms, "tenant ann").key != same {
		t.Error("the same lease has another key")
	}
	for what, change := range map[string]func(r *control.LeaseRequest, t *lease.Terms){
		"tenant":   func(_ *control.LeaseRequest, t *lease.Terms) { t.Tenant = "bob" },
		"user":     func(_ *control.LeaseRequest, t *lease.Terms) { t.UID = 2 },
		"group":    func(_ *control.LeaseRequest, t *lease.Terms) { t.GID = 2 },
		"memory":   func(_ *control.LeaseRequest, t *lease.Terms) { t.MemoryPerWorker *= 2 },
		"cores":    func(_ *control.LeaseRequest, t *lease.Terms) { t.CoresPerWorker = 2 },
		"code":     func(r *control.LeaseRequest, _ *lease.Terms) { r.CodeSha256 = []byte("edoc") },
		"bundle":   func(r *control.LeaseRequest, _ *lease.Terms) { r.Bundle = &control.Table{Sha256: []byte("bundle")} },
		"function": func(r *control.LeaseRequest, _ *lease.Terms) { r.Seed.Function = "prepar" },
		"payload":  func(r *control.LeaseRequest, _ *lease.Terms) { r.Seed.Payload = []byte("epayload") },
		"name":     func(r *control.LeaseRequest, _ *lease.Terms) { r.Seed.Name, r.Seed.Version = "xs", 1 },
	} {
		r, other := request(), terms
		change(r, &other)
		if newWish(r, &other, "tenant "+other.Tenant).key == same {
			t.Errorf("another %s has the same seed", what)
		}
	}
	named := func(name string, version uint32, origin string) sum {
		r := request()
		r.Seed.Name, r.Seed.Version, r.Seed.Origin = name, version, origin
		return newWish(r, &terms, "tenant ann").key
	}
	first := named("xs", 1, "a:1")
	if first == named("xs", 2, "a:1") || first == named("xs", 1, "b:1") || first == named("sx", 1, "a:1") || first != named("xs", 1, "a:1") {
		t.Error("named seeds of the same function are one")
	}
	if newWish(request(), &terms, "tenant bob").key == same {
		t.Error("another owner has the same seed")
	}
	r := request()
	r.Tables = []*control.Table{{Name: "t"}}
	if !strings.Contains(newWish(r, &terms, "tenant ann").refused, "tables") {
		t.Error("a lease with tables gets a seed")
	}
}

// Malformed requests for seeds are refused before anything is made.
func TestSeedRequests(t *testing.T) {
	for want, r := range map[string]*control.LeaseRequest{
		"function":    {Seed: &control.Seed{LimitMs: 1}},
		"without NUL": {Seed: &control.Seed{Function: "a\x00", LimitMs: 1}},
		"payload":     {Seed: &control.Seed{Function: "a", Payload: make([]byte, seedPayloadMost+1), LimitMs: 1}},
		"limit_ms":    {Seed: &control.Seed{Function: "a"}},
		"keeps_state": {Seed: &control.Seed{Function: "a", LimitMs: 1}, KeepsState: true},
		"reuse":       {Seed: &control.Seed{Function: "a", LimitMs: 1}, Reuse: 1},
	} {
		refuses(t, want, checkSeed(r), control.ClassInvalid, want)
	}
	if kindOf(&control.LeaseRequest{ClientId: make([]byte, clientIDSize), Seed: &control.Seed{}}) != [32]byte{} {
		t.Error("the workers of a lease with a seed can be cached")
	}
}

// Seeds of a tenant that arrive at the same time have no more memory together than the tenant may have.
func TestSeedsArriveTogether(t *testing.T) {
	const limit = 100
	var taken atomic.Int64
	var asked sync.WaitGroup // each is refused, or waits in reserve
	const seeds = 4
	asked.Add(seeds)
	s := newTableStore(limit, nil, func(n uint64) error {
		taken.Add(int64(n))
		asked.Done()
		asked.Wait()
		return nil
	}, func(n uint64) { taken.Add(-int64(n)) }, func() bool { return false })
	var wg sync.WaitGroup
	var refused atomic.Int32
	for i := range seeds {
		wg.Go(func() {
			_, err := s.seed(t.Context(), sum{byte(i)}, "tenant ann", func(r *seedRoom) (*zygote.Seed, error) {
				if err := r.take(limit); err != nil {
					refused.Add(1)
					asked.Done()
				}
				return nil, errors.New("the transfer failed")
			})
			if err == nil {
				t.Error("a failed transfer made a seed")
			}
		})
	}
	wg.Wait()
	if refused.Load() != seeds-1 || taken.Load() != 0 {
		t.Errorf("%d of %d seeds were refused, want all but one; %d bytes are left", refused.Load(), seeds, taken.Load())
	}
}
