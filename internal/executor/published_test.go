package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// layoutMemory is the memory of layoutSeed: the bytes that it names, and for the 21 pages of its file their hashes and the proofs of 4 groups.
const layoutMemory = 8192 + 21*32 + 4*512

// layoutSeed is a seed of a process without libraries, with one page of memory.
func layoutSeed(t *testing.T) *zygote.Seed {
	t.Helper()
	fd, err := unix.MemfdCreate("seed", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "seed")
	const heap = 2 * zygote.SeedUnit
	header := make([]byte, 80<<10)
	le := binary.LittleEndian
	le.PutUint64(header, 0x4445455352)
	le.PutUint32(header[8:], zygote.SeedVersion)
	le.PutUint64(header[16:], heap)
	le.PutUint64(header[24:], 0x7000)
	if _, err := f.WriteAt([]byte("heap"), 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(header, heap); err != nil {
		t.Fatal(err)
	}
	return &zygote.Seed{File: f, Units: 2, Bytes: 8192}
}

// createSeed publishes a seed beside a lease.
func (n *node) createSeed(change ...func(*control.CreateSeedRequest)) (*control.SeedReply, error) {
	n.t.Helper()
	id := n.lease(1).GetLeaseId()
	defer n.release(id)
	r := &control.CreateSeedRequest{LeaseId: id, Name: "xs", Function: "prepare", LimitMs: 1000, TtlMs: 60_000}
	for _, f := range change {
		f(r)
	}
	return n.CreateSeed(n.ctx(), r)
}

// seededLease creates a seed, and returns a lease that starts from it.
func (n *node) seededLease() (*control.LeaseReply, *holding) {
	n.t.Helper()
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		n.t.Fatal(err)
	}
	r := n.request(1)
	r.Seed = &control.Seed{Function: "prepare", LimitMs: 1000, Name: "xs", Version: made.GetSeed().GetVersion()}
	l := n.mustLease(r)
	h, _ := n.e.find(lease.ID(l.GetLeaseId()))
	return l, h
}

func (n *node) seeds() {
	n.z.seeds = func(context.Context) (*zygote.Seed, error) { return layoutSeed(n.t), nil }
}

// A seed that was created is found by its name until it is released, also after its lease has ended, and each creation is another version. Leases that name it start from
// it.
func TestNamedSeed(t *testing.T) {
	n := newNode(t)
	n.seeds()
	first, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	d := first.GetSeed()
	if d.GetName() != "xs" || d.GetFunction() != "prepare" || d.GetHeapUnits() != 2 || d.GetThreadPointer() != 0x7000 || first.GetLeftMs() == 0 || first.GetLeftMs() > 60_000 {
		t.Errorf("created %v", first)
	}
	second, err := n.createSeed()
	if err != nil || second.GetSeed().GetVersion() <= d.GetVersion() {
		t.Fatalf("second creation: %v, %v", second, err)
	}
	got, err := n.DescribeSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs", Segments: true})
	if err != nil || got.GetSeed().GetVersion() != second.GetSeed().GetVersion() {
		t.Fatalf("the latest is %v, %v", got, err)
	}
	if s := got.GetSeed().GetSegments(); len(s) != 2 || s[0].GetOffset() != 1<<20 || s[0].GetSize() != 4096 || s[1].GetOffset() != 2*zygote.SeedUnit || len(s[0].GetSha256()) != 32 {
		t.Errorf("segments %v", s)
	}
	makes := 0
	n.z.seeds = func(context.Context) (*zygote.Seed, error) {
		makes++
		return layoutSeed(t), nil
	}
	r := n.request(1)
	r.Seed = &control.Seed{Function: "prepare", LimitMs: 1000, Name: "xs", Version: d.GetVersion()}
	l, err := n.Lease(n.ctx(), r)
	if err != nil {
		t.Fatal(err)
	}
	h, _ := n.e.find(lease.ID(l.GetLeaseId()))
	if makes != 0 || h.seed == nil {
		t.Errorf("the seed was made again %d times: %v", makes, h.wish.refused)
	}
	if _, err := n.ReleaseSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs", Version: d.GetVersion()}); err != nil {
		t.Fatal(err)
	}
	_, err = n.DescribeSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs", Version: d.GetVersion()})
	refuses(t, "released", err, control.ClassLease, "released")
	before := n.e.table.Capacity().SetAside
	n.release(l.GetLeaseId())
	if after := n.e.table.Capacity().SetAside; before-after != layoutMemory {
		t.Errorf("a released seed still takes memory: %d bytes, then %d", before, after)
	}
	n.e.published.close()
	if aside := n.e.table.Capacity().SetAside; aside != 0 {
		t.Errorf("%d bytes stay set aside", aside)
	}
}

// A lease that names a seed of another library, or has less memory, says why it does not start from it. One that names a seed that is gone makes it.
func TestNamedSeedUnsuited(t *testing.T) {
	n := newNode(t)
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	s := made.GetSeed()
	s.HeapUnits = 1000 // the record of the executor itself
	unsuited := func(version uint32) string {
		r := n.request(1)
		r.Seed = &control.Seed{Function: "prepare", LimitMs: 1000, Name: "xs", Version: version}
		l, err := n.Lease(n.ctx(), r)
		if err != nil {
			t.Fatal(err)
		}
		defer n.release(l.GetLeaseId())
		h, _ := n.e.find(lease.ID(l.GetLeaseId()))
		if h.seed != nil {
			return "seeded"
		}
		return h.wish.refused
	}
	p := n.e.published.all[seedID{s.GetTenant(), "xs", s.GetVersion()}]
	p.about.HeapUnits = 1000
	if got := unsuited(s.GetVersion()); !strings.Contains(got, "memory") {
		t.Errorf("with too little memory: %q", got)
	}
	p.about.CodeSha256 = []byte("another")
	if got := unsuited(s.GetVersion()); !strings.Contains(got, "another library") {
		t.Errorf("with another library: %q", got)
	}
	if got := unsuited(7); got != "seeded" {
		t.Errorf("without the seed: %q", got)
	}
}

// Seeds of two executors that started in the same second have different versions, and a lease does not get a seed that was made from another payload.
func TestNamedSeedOfAnotherExecutor(t *testing.T) {
	n := newNode(t)
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	p := n.e.published
	if other := newPublications(p.tables, p.accounts, func() time.Time { return time.Unix(1, 0) }, p.log); other.last == newPublications(p.tables, p.accounts, other.now, p.log).last {
		t.Errorf("two executors begin with version %d", other.last)
	}
	makes := 0
	n.z.seeds = func(context.Context) (*zygote.Seed, error) { makes++; return layoutSeed(t), nil }
	r := n.request(1)
	r.Seed = &control.Seed{Function: "prepare", Payload: []byte("of another executor"), LimitMs: 1000, Name: "xs", Version: made.GetSeed().GetVersion(), Origin: "another:7101"}
	l, err := n.Lease(n.ctx(), r)
	if err != nil {
		t.Fatal(err)
	}
	defer n.release(l.GetLeaseId())
	if makes != 1 {
		t.Errorf("the setup function was executed %d times: the lease has the seed of another executor", makes)
	}
}

// A seed ends when its time is over, unless it is renewed.
func TestNamedSeedExpires(t *testing.T) {
	n := newNode(t)
	n.seeds()
	short, err := n.createSeed(func(r *control.CreateSeedRequest) { r.TtlMs = 1 })
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the seed has expired", func() bool {
		_, err := n.DescribeSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs", Version: short.GetSeed().GetVersion()})
		return err != nil
	})
	long, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	if left := time.Duration(long.GetLeftMs()) * time.Millisecond; left > seedUnconfirmed {
		t.Errorf("a seed whose reply may be lost lasts for %v", left)
	}
	r, err := n.RenewSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs"})
	if left := time.Duration(r.GetLeftMs()) * time.Millisecond; err != nil || left <= seedUnconfirmed || left > time.Minute {
		t.Errorf("the first renewal: %v, %v", left, err)
	}
	r, err = n.RenewSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs", TtlMs: 1})
	if err != nil || r.GetLeftMs() < 10_000 {
		t.Errorf("a renewal has made it shorter: %v, %v", r, err)
	}
	p := n.e.published
	s := p.all[seedID{long.GetSeed().GetTenant(), "xs", long.GetSeed().GetVersion()}]
	p.expire(s) // its timer fires before the renewed time is over
	if _, err := n.DescribeSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs"}); err != nil {
		t.Errorf("a renewed seed has ended: %v", err)
	}
}

// Setup functions that fail, states that cannot be kept and malformed requests are named errors, and leave nothing.
func TestNamedSeedFails(t *testing.T) {
	n := newNode(t)
	n.seeds()
	for want, change := range map[string]func(r *control.CreateSeedRequest){
		"name of the seed": func(r *control.CreateSeedRequest) { r.Name = "a/b" },
		"characters":       func(r *control.CreateSeedRequest) { r.Name = "" },
		"function":         func(r *control.CreateSeedRequest) { r.Function = "" },
		"ttl_ms":           func(r *control.CreateSeedRequest) { r.TtlMs = 1 << 60 },
	} {
		_, err := n.createSeed(change)
		refuses(t, want, err, control.ClassInvalid, want)
	}
	_, err := n.createSeed(func(r *control.CreateSeedRequest) { r.LeaseId++ })
	refuses(t, "no lease", err, control.ClassLease, "unknown")
	n.z.seeds = func(context.Context) (*zygote.Seed, error) { return refusedSeed() }
	_, err = n.createSeed()
	refuses(t, "threads", err, control.ClassUnsupported, "has left 1 threads")
	n.z.seeds = func(context.Context) (*zygote.Seed, error) { return nil, errors.New("it has ended") }
	_, err = n.createSeed()
	refuses(t, "ended", err, control.ClassFatal, "it has ended")
	n.z.seeds = func(ctx context.Context) (*zygote.Seed, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	_, err = n.createSeed(func(r *control.CreateSeedRequest) { r.LimitMs = 1 })
	refuses(t, "too long", err, control.ClassConnection, "has not returned within 1ms")
	if all, aside := n.e.tables.tables, n.e.table.Capacity().SetAside; len(all) != 0 || aside != 0 {
		t.Errorf("%d seeds and %d bytes are left", len(all), aside)
	}
}

// Another program takes over the seeds with their names and what is left of their time.
func TestNamedSeedHandover(t *testing.T) {
	n := newNode(t)
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	next := newNode(t)
	clock := handover.NewClock()
	saved, tables := n.e.published.save(clock), n.e.tables.save()
	fd, err := unix.Dup(int(tables[0].GetFile()))
	if err != nil {
		t.Fatal(err)
	}
	tables[0].File = int32(fd)
	if _, err := unix.Pwrite(fd, make([]byte, 4096), 8<<20); err != nil { // as a worker that reads a hole of the file
		t.Fatal(err)
	}
	next.e.published.restore(saved, clock)
	if len(next.e.published.all) != 0 || !strings.Contains(next.log.String(), "its memory is missing") {
		t.Errorf("a seed without its memory was taken over, or nobody was told: %s", next.log.String())
	}
	if err := next.e.restoreTables(tables); err != nil {
		t.Fatal(err)
	}
	if aside := next.e.table.Capacity().SetAside; aside != layoutMemory {
		t.Errorf("%d bytes are charged after the handover, want those that were charged before it, %d", aside, layoutMemory)
	}
	saved = append(saved, &handover.NamedSeed{About: saved[0].GetAbout()}, &handover.NamedSeed{About: []byte("x")})
	next.e.published.restore(saved, clock)
	for _, s := range next.e.published.all {
		if s.timer != nil {
			t.Error("its time may run out while the accounts are not there yet")
		}
	}
	next.e.accounts = newAccounts("node", next.e.incarnation, next.e.now, nil, next.e.log)
	next.e.begin()
	if len(next.e.accounts.leases) != 1 {
		t.Errorf("%d accounts, want that of the seed", len(next.e.accounts.leases))
	}
	got, err := next.DescribeSeed(next.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs"})
	if err != nil || got.GetSeed().GetVersion() != made.GetSeed().GetVersion() || got.GetLeftMs() > 60_000 {
		t.Errorf("%v, %v", got, err)
	}
	next.seeds()
	if again, err := next.createSeed(); err != nil || again.GetSeed().GetVersion() <= made.GetSeed().GetVersion() {
		t.Errorf("the next version is %v, %v", again.GetSeed().GetVersion(), err)
	}
}

// A seed is found only for the tenant that has created it, by all requests and by leases.
func TestNamedSeedOfAnotherTenant(t *testing.T) {
	n := newNode(t)
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	version := made.GetSeed().GetVersion()
	other := &control.SeedRequest{Tenant: "bob", Name: "xs", Version: version}
	_, err = n.DescribeSeed(n.ctx(), other)
	refuses(t, "describe", err, control.ClassLease, "no seed xs")
	_, err = n.RenewSeed(n.ctx(), other)
	refuses(t, "renew", err, control.ClassLease, "no seed xs")
	_, err = n.ReleaseSeed(n.ctx(), other)
	refuses(t, "release", err, control.ClassLease, "no seed xs")
	if got, _ := n.e.published.acquire("bob", "xs", version); got != nil {
		t.Error("a lease of another tenant may use it")
	}
	ann := control.WithCaller(n.ctx(), &identity.Identity{Name: "ann", Tenant: "ann", Role: identity.RoleTenant})
	if _, err := n.e.DescribeSeed(ann, &control.SeedRequest{Tenant: "alice", Name: "xs", Version: version}); err == nil {
		t.Error("a tenant has named another one")
	}
	_, err = n.e.DescribeSeed(ann, &control.SeedRequest{Name: "xs", Version: version})
	refuses(t, "ann", err, control.ClassLease, "no seed xs")
}

// A worker that cannot start from a named seed does not take the seed out of the store: it still counts for its tenant, and is handed over.
func TestNamedSeedThatDoesNotFit(t *testing.T) {
	n := newNode(t)
	l, h := n.seededLease()
	n.e.unseeded(h, "another library")
	n.release(l.GetLeaseId())
	if all, _ := n.e.tables.bytes(); all != layoutMemory || len(n.e.tables.save()) != 1 {
		t.Errorf("the store has %d bytes and hands over %d tables", all, len(n.e.tables.save()))
	}
}

// blockSeeds lets the processes that make seeds run until their context ends. When one has begun, its context comes over the channel. It ends when `ended` is closed.
func (n *node) blockSeeds(ended chan struct{}) (begun chan context.Context) {
	begun = make(chan context.Context, 8)
	n.z.seeds = func(ctx context.Context) (*zygote.Seed, error) {
		begun <- ctx
		<-ctx.Done()
		<-ended
		return nil, context.Cause(ctx)
	}
	return begun
}

// A lease makes one seed at a time. Its tenant pays for the memory and the processor time of the process, also if the lease ends meanwhile, and the
// cores are not free before the process has ended.
func TestNamedSeedIsCharged(t *testing.T) {
	n := newNode(t)
	n.e.accounts = newAccounts("node", n.e.incarnation, time.Now, nil, n.e.log)
	ended, over := make(chan struct{}), make(chan error, 1)
	begun := n.blockSeeds(ended)
	l := n.lease(1)
	r := &control.CreateSeedRequest{LeaseId: l.GetLeaseId(), Name: "xs", Function: "prepare", LimitMs: 1 << 30, TtlMs: 60_000}
	go func() {
		_, err := n.CreateSeed(n.ctx(), r)
		over <- err
	}()
	making := <-begun
	h, err := n.e.find(lease.ID(l.GetLeaseId()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.CreateSeed(n.ctx(), r); control.ClassOf(err) != control.ClassBusy || !strings.Contains(err.Error(), "one at a time") {
		t.Errorf("a second seed at the same time: %v", err)
	}
	m := newLedgerStub()
	n.e.accounts.step(t.Context(), m)
	if len(m.last) != 2 {
		t.Errorf("%d accounts, want one of the lease and one of the memory", len(m.last))
	}
	released := make(chan error, 1)
	go func() {
		_, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
		released <- err
	}()
	<-making.Done()
	testkit.Eventually(t, "the end of the lease waits for the process", func() bool {
		select {
		case <-h.gone:
			t.Fatal("the cores are free, but the process has not ended")
		default:
		}
		stacks := make([]byte, 1<<20)
		return slices.ContainsFunc(strings.Split(string(stacks[:runtime.Stack(stacks, true)]), "\n\n"), func(stack string) bool {
			return strings.Contains(stack, "(*holding).living(") && strings.Contains(stack, "sync.(*WaitGroup).Wait(")
		})
	})
	close(ended)
	refuses(t, "released", <-over, control.ClassLease, "released")
	if err := <-released; err != nil {
		t.Error(err)
	}
	n.e.accounts.step(t.Context(), m)
	var exec uint64
	for k, e := range m.last {
		if k.Lease == l.GetLeaseId() {
			exec = e.GetUse()[accounting.ExecMicros]
		}
	}
	if exec < uint64(seedCPU/time.Microsecond) {
		t.Errorf("the lease pays for %d us of the processor, want %v", exec, seedCPU)
	}
}

// A drain ends the process that makes a seed, and the client learns why.
func TestNamedSeedDrain(t *testing.T) {
	n := newNode(t)
	ended, over := make(chan struct{}), make(chan error, 1)
	close(ended)
	begun := n.blockSeeds(ended)
	l := n.lease(1)
	r := &control.CreateSeedRequest{LeaseId: l.GetLeaseId(), Name: "xs", Function: "prepare", LimitMs: 1 << 30, TtlMs: 60_000}
	go func() {
		_, err := n.CreateSeed(n.ctx(), r)
		over <- err
	}()
	<-begun
	h, err := n.e.find(lease.ID(l.GetLeaseId()))
	if err != nil {
		t.Fatal(err)
	}
	h.drain(time.Now().Add(time.Hour), drainReason)
	refuses(t, "drain", <-over, control.ClassOf(grpcError(lease.ErrDraining)), "drain")
	_, err = n.CreateSeed(n.ctx(), r)
	refuses(t, "after it", err, control.ClassOf(grpcError(lease.ErrDraining)), "drain")
}

// A seed whose file has grown is withdrawn with its name: nobody pays for that memory.
func TestNamedSeedGrown(t *testing.T) {
	n := newNode(t)
	l, h := n.seededLease()
	if _, err := h.seed.seed.File.WriteAt(make([]byte, 2<<20), 8<<20); err != nil {
		t.Fatal(err)
	}
	n.release(l.GetLeaseId())
	_, err := n.DescribeSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs"})
	refuses(t, "grown", err, control.ClassLease, "no seed xs")
	if aside := n.e.table.Capacity().SetAside; aside != 0 {
		t.Errorf("%d bytes stay set aside", aside)
	}
}
