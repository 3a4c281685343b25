package executor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// seedOf makes a seed of two units with some bytes, in three segments.
func seedOf(t testing.TB, b []byte) *zygote.Seed {
	t.Helper()
	part := len(b) / 3
	c := &zygote.SeedCopy{Units: 2}
	for _, at := range []uint64{0, 40 << 20, 90 << 20} {
		c.Segments = append(c.Segments, zygote.SeedSegment{Offset: at, Size: uint64(part)})
	}
	c.SumSegments(b)
	s, err := zygote.CopySeed(c, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// hasSeed gives a node a seed of the caller's.
func (n *node) hasSeed(key sum, b []byte) {
	n.t.Helper()
	got, err := n.e.tables.seed(n.ctx(), key, "", func(*seedRoom) (*zygote.Seed, error) { return seedOf(n.t, b), nil })
	if err != nil {
		n.t.Fatal(err)
	}
	n.e.tables.release([]*table{got})
}

// copySeed has one node copy a seed from another, with a changed request, as an agent does.
func copySeed(from, to *node, key sum, provider string, change func(*control.FetchRequest)) (digest sum, err error) {
	ctx, cancel := context.WithCancelCause(from.ctx())
	defer cancel(nil)
	loan, offer, err := askLoan(ctx, from, &control.LendRequest{Seed: key[:], Provider: provider})
	if err != nil {
		return digest, err
	}
	go func() {
		_, err := loan.Recv()
		cancel(err)
	}()
	req := &control.FetchRequest{Provider: provider, Blob: offer.GetBlob(), Memory: offer.GetMemory(), Proofs: offer.GetProofs(), Seed: offer.GetSeed()}
	if change != nil {
		change(req)
	}
	fetch, err := to.Fetch(ctx, req)
	for err == nil {
		var r *control.FetchReply
		if r, err = fetch.Recv(); err == nil && r.GetDone() {
			return sum(r.GetSeed()), nil
		}
		if err == nil {
			err = loan.Send(&control.LendRequest{Blob: r.GetBlob()})
		}
		if errors.Is(err, io.EOF) {
			<-ctx.Done()
		}
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return digest, err
}

// askLoan asks an executor to lend a seed, and returns the stream and the offer.
func askLoan(ctx context.Context, from control.ExecutorClient, req *control.LendRequest) (loan grpc.BidiStreamingClient[control.LendRequest, control.LendReply], offer *control.LendReply, err error) {
	if loan, err = from.Lend(ctx); err != nil {
		return nil, nil, err
	}
	if err = loan.Send(req); err == nil || errors.Is(err, io.EOF) { // EOF: Recv says why
		offer, err = loan.Recv()
	}
	return loan, offer, err
}

// newNodes returns nodes that also offer tcp, each connected before the next one starts. They free what they have before the first of them looks for leaks.
func newNodes(t *testing.T, count int) (nodes []*node) {
	t.Helper()
	for range count {
		n := newTCPNode(t)
		if _, err := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion}); err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	t.Cleanup(func() {
		for _, n := range nodes {
			n.e.lender.close()
			n.e.fabric.close()
			for n.e.tables.evictOne() {
			}
		}
	})
	return nodes
}

// lendTo lets nodes connect to each other on tcp.
func lendTo(nodes ...*node) {
	for _, n := range nodes {
		n.e.lender.peers = func(context.Context) (map[netip.AddrPort]bool, error) {
			known := map[netip.AddrPort]bool{}
			for _, x := range nodes {
				known[netip.MustParseAddrPort(x.e.cfg.Data.Address)] = true
			}
			return known, nil
		}
	}
}

// A seed is copied byte by byte from one executor to another, and from there to a third one. The copy is sealed, belongs to the caller, and is used once.
func TestCopySeed(t *testing.T) {
	for _, provider := range []string{dataplane.SHM, dataplane.TCP} {
		t.Run(provider, func(t *testing.T) {
			nodes := newNodes(t, 3)
			a, b, c := nodes[0], nodes[1], nodes[2]
			lendTo(nodes...)
			data, key := library(3 * (256 << 10))
			a.hasSeed(key, data)
			digest, err := copySeed(a, b, key, provider, nil)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := copySeed(a, b, key, provider, nil); err != nil || again != digest {
				t.Errorf("again: %x, want %x, %v", again, digest, err)
			}
			var s *zygote.Seed
			size := uint64(len(data)) + uint64(len(data))/128 + uint64(len(data))/64 // and the hashes of its pages, and their proofs
			next, err := b.e.tables.seed(b.ctx(), key, "", func(room *seedRoom) (*zygote.Seed, error) {
				if b.e.tables.takeCopy(copyKey("tenant bob", digest), "tenant bob", room) != nil {
					t.Error("another tenant has the copy")
				}
				if s = b.e.tables.takeCopy(copyKey("", digest), "", room); s == nil {
					t.Fatal("there is no copy")
				}
				if b.e.tables.takeCopy(copyKey("", digest), "", room) != nil {
					t.Error("the copy is still in the store")
				}
				if aside := b.e.table.Capacity().SetAside; aside != size || b.e.tables.bytesOf("") != size {
					t.Errorf("%d bytes are set aside, %d are the owner's, want %d", aside, b.e.tables.bytesOf(""), size)
				}
				return s, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if aside := b.e.table.Capacity().SetAside; aside != size || b.e.tables.bytesOf("") != size {
				t.Errorf("then %d bytes are set aside, %d are the owner's, want %d", aside, b.e.tables.bytesOf(""), size)
			}
			const all = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
			if seals, err := unix.FcntlInt(s.File.Fd(), unix.F_GET_SEALS, 0); err != nil || seals&all != all {
				t.Errorf("seals %#x, %v", seals, err)
			}
			if st, err := s.File.Stat(); err != nil || st.Mode().Perm() != 0o400 || uint64(st.Size()) != zygote.FileSize(2) {
				t.Errorf("%v of %d bytes, %v", st.Mode(), st.Size(), err)
			}
			var got []byte
			for _, at := range []int64{0, 40 << 20, 90 << 20} {
				part, err := io.ReadAll(io.NewSectionReader(s.File, at, 256<<10))
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, part...)
			}
			if !bytes.Equal(got, data) {
				t.Error("the copy differs")
			}
			b.e.tables.release([]*table{next})
			if third, err := copySeed(b, c, key, provider, nil); err != nil || third != digest {
				t.Errorf("from the copy: %x, want %x, %v", third, digest, err)
			}
		})
	}
}

// Requests that are wrong are refused, and nothing is left of them.
func TestCopySeedRefused(t *testing.T) {
	nodes := newNodes(t, 2)
	a, b := nodes[0], nodes[1]
	data, key := library(3 * (256 << 10))
	a.hasSeed(key, data)
	for what, c := range map[string]struct {
		change func(*control.FetchRequest)
		class  control.Class
		text   string
	}{
		"hash":        {func(r *control.FetchRequest) { r.Seed.Segments[1].Sha256 = make([]byte, 32) }, control.ClassConnection, "announced as SHA-256"},
		"short hash":  {func(r *control.FetchRequest) { r.Seed.Segments[0].Sha256 = nil }, control.ClassInvalid, "0 bytes"},
		"units":       {func(r *control.FetchRequest) { r.Seed.Units = 1 << 31 }, control.ClassInvalid, "a heap of"},
		"no segments": {func(r *control.FetchRequest) { r.Seed.Segments = nil }, control.ClassInvalid, "0 segments"},
		"order":       {func(r *control.FetchRequest) { r.Seed.Segments[1].Offset = 4096 }, control.ClassInvalid, "segment 1"},
		"beyond":      {func(r *control.FetchRequest) { r.Seed.Segments[2].Offset = 1 << 40 }, control.ClassInvalid, "segment 2"},
		"unaligned":   {func(r *control.FetchRequest) { r.Seed.Segments[0].Size-- }, control.ClassInvalid, "segment 0"},
		"overflow":    {func(r *control.FetchRequest) { r.Seed.At[1] = ^uint64(0) - 5 }, control.ClassInvalid, "segment 1"},
		"memory":      {func(r *control.FetchRequest) { r.Memory.Size = 8192 }, control.ClassInvalid, "8192 bytes of memory"},
		"proofs":      {func(r *control.FetchRequest) { r.Proofs.Size-- }, control.ClassInvalid, "proofs of"},
		"no copying":  {func(r *control.FetchRequest) { r.Instead = true }, control.ClassLease, "not copying this seed"},
		"key":         {func(r *control.FetchRequest) { r.Memory.Key++ }, control.ClassConnection, "cannot read"},
		"provider":    {func(r *control.FetchRequest) { r.Provider = "smoke" }, control.ClassInvalid, `provider "smoke" is unknown`},
		"too large": {func(r *control.FetchRequest) {
			r.Seed.Units, r.Seed.Segments[2].Size = 1<<10, 30<<30
			r.Memory.Size = 1 << 50
		}, control.ClassConnection, "table-limit"},
	} {
		_, err := copySeed(a, b, key, dataplane.SHM, c.change)
		refuses(t, what, err, c.class, c.text)
		if aside := b.e.table.Capacity().SetAside; aside != 0 {
			t.Errorf("%s: %d bytes set aside", what, aside)
		}
	}
	_, err := copySeed(a, b, sum{1}, dataplane.SHM, nil)
	refuses(t, "another seed", err, control.ClassLease, "does not have the seed")
	_, err = copySeed(a, b, key, dataplane.OFI, nil)
	refuses(t, "a provider that it does not offer", err, control.ClassUnsupported, "not available")
}

// A seed is hashed when it has been made, and no request waits for that. Requests hash one seed at a time. One that is given up leaves nothing behind.
func TestSeedIsHashedAhead(t *testing.T) {
	n := newNodes(t, 1)[0]
	data, _ := library(3 * (256 << 10))
	made := make(chan *zygote.Seed, 1)
	n.z.seeds = func(context.Context) (*zygote.Seed, error) {
		s := layoutSeed(t)
		made <- s
		return s, nil
	}
	seed := func() *zygote.Seed {
		t.Helper()
		if _, err := n.createSeed(); err != nil {
			t.Fatal(err)
		}
		return <-made
	}
	alone := seed()
	lendTo(n)
	ahead := seed()
	eventually(t, "the seed is hashed", ahead.Hashed)
	if alone.Hashed() {
		t.Error("a seed that no executor can copy is hashed")
	}
	other := layoutSeed(t)
	defer other.Close()
	if _, err := other.File.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	n.e.lender.hashing <- struct{}{} // another seed is being hashed
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.e.lender.contents(ctx, other); control.ClassOf(err) != control.ClassConnection {
		t.Errorf("given up: %v", err)
	}
	if _, err := n.e.lender.contents(ctx, ahead); err != nil {
		t.Errorf("a seed that is hashed: %v", err)
	}
	<-n.e.lender.hashing
	if _, err := n.e.lender.contents(ctx, other); err == nil || other.Hashed() {
		t.Errorf("given up while it is hashed: %v", err)
	}
	c, err := n.e.lender.contents(t.Context(), other)
	want := &zygote.SeedCopy{Units: 2, Segments: []zygote.SeedSegment{{Size: 256 << 10}}}
	want.SumSegments(data)
	if err != nil || len(c.Segments) < 4 || c.Segments[0] != want.Segments[0] {
		t.Errorf("%+v, %v", c, err)
	}
}

// A tenant's seed is lent to no other tenant.
func TestLendOfAnotherTenant(t *testing.T) {
	n := newTenants(t)
	key := sum{7}
	got, err := n.e.tables.seed(n.ctx(), key, "tenant ann", func(*seedRoom) (*zygote.Seed, error) { data, _ := library(3 * 4096); return seedOf(t, data), nil })
	if err != nil {
		t.Fatal(err)
	}
	n.e.tables.release([]*table{got})
	ask := func(c control.ExecutorClient) (*control.LendReply, error) {
		loan, r, err := askLoan(n.ctx(), c, &control.LendRequest{Seed: key[:], Provider: dataplane.SHM})
		if err == nil && loan.CloseSend() == nil {
			_, _ = loan.Recv() // its end
		}
		return r, err
	}
	_, err = ask(n.as("bob", identity.RoleTenant.String(), 0))
	refuses(t, "of another tenant", err, control.ClassLease, "does not have the seed")
	if r, err := ask(n.as("ann", identity.RoleTenant.String(), 0)); err != nil || len(r.GetSeed().GetSegments()) != 3 {
		t.Errorf("of the tenant: %v, %v", r, err)
	}
}

// A loan over verbs takes memory from what leases may have, for as long as it lasts, because it exposes copies. Without memory there is no such loan.
func TestRealLoanTakesMemory(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Providers = []string{realProvider()} })
	data, key := library(3 * (256 << 10))
	n.hasSeed(key, data)
	before := n.e.table.Capacity()
	ask := &control.LendRequest{Seed: key[:], Provider: realProvider()}
	loan, offer, err := askLoan(n.ctx(), n, ask)
	if err != nil {
		t.Fatal(err)
	}
	copies := uint64(0) // shm and tcp: the borrower reads the memory of the seed itself
	if ask.Provider == dataplane.Verbs {
		copies = uint64(len(data)) + offer.GetProofs().GetSize()
	}
	if took := n.e.table.Capacity().SetAside - before.SetAside; took != copies {
		t.Errorf("the loan takes %d bytes, want %d", took, copies)
	}
	if err := loan.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the memory is given back", func() bool { return n.e.table.Capacity().SetAside == before.SetAside })
	rest := before.Memory - before.SetAside
	if err := n.e.table.SetAside(rest); err != nil {
		t.Fatal(err)
	}
	defer n.e.tables.giveBack(rest)
	_, _, err = askLoan(n.ctx(), n, ask)
	if copies > 0 {
		refuses(t, "without memory", err, control.ClassBusy, "no memory")
	} else if err != nil {
		t.Errorf("without memory: %v", err)
	}
}

// An executor that lends a seed connects to other executors on tcp, and nowhere else.
func TestLendToExecutorsOnly(t *testing.T) {
	nodes := newNodes(t, 2)
	a, b := nodes[0], nodes[1]
	data, key := library(3 * (256 << 10))
	a.hasSeed(key, data)
	_, err := copySeed(a, b, key, dataplane.TCP, nil)
	refuses(t, "without a manager", err, control.ClassUnsupported, "no resource manager")
	lendTo(a)
	_, blob := newTCPConn(t, dataplane.Options{GIDIndex: -1, Handed: true, Advertise: b.e.cfg.Data.Address})
	check := func(blob []byte) error {
		list := <-a.e.lender.askPeers(t.Context(), dataplane.TCP)
		return list.check(blob)
	}
	refuses(t, "an unknown address", check(blob), control.ClassInvalid, b.e.cfg.Data.Address)
	refuses(t, "no blob", check(nil), control.ClassInvalid, "names no address")
	down := errors.New("it is down")
	a.e.lender.peers = func(context.Context) (map[netip.AddrPort]bool, error) { return nil, down }
	refuses(t, "the manager is down", check(blob), control.ClassConnection, "it is down")
	lendTo(a, b)
	if err := check(blob); err != nil {
		t.Error(err)
	}
}

// If the executor that lends a seed goes while its pages travel, the other one has the whole seed or nothing, and says so soon.
func TestLenderGoes(t *testing.T) {
	for range 3 {
		nodes := newNodes(t, 2)
		a, b := nodes[0], nodes[1]
		lendTo(a, b)
		data, key := library(3 * (16 << 20))
		a.hasSeed(key, data)
		over := make(chan error, 1)
		go func() {
			_, err := copySeed(a, b, key, dataplane.TCP, nil)
			over <- err
		}()
		eventually(t, "the transfer begins", func() bool { return b.e.table.Capacity().SetAside > 0 })
		a.e.lender.close()
		if err := <-over; err != nil && control.ClassOf(err) != control.ClassConnection {
			t.Errorf("the transfer ended with %v", err)
		} else if err != nil {
			eventually(t, "nothing is left", func() bool { return b.e.table.Capacity().SetAside == 0 })
		}
		_, err := copySeed(a, b, key, dataplane.TCP, nil)
		refuses(t, "afterwards", err, control.ClassBusy, "draining")
	}
}

// onDemand is copySeed on demand. The streams stay open until end is called. over gets how the rest of the transfer has ended.
func onDemand(t *testing.T, from, to *node, key sum) (digest sum, end context.CancelFunc, over chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(from.ctx())
	t.Cleanup(cancel)
	loan, offer, err := askLoan(ctx, from, &control.LendRequest{Seed: key[:], Provider: dataplane.SHM, OnDemand: true})
	if err != nil {
		t.Fatal(err)
	}
	fetch, err := to.Fetch(ctx, &control.FetchRequest{Provider: dataplane.SHM, Blob: offer.GetBlob(), Memory: offer.GetMemory(), Proofs: offer.GetProofs(), Seed: offer.GetSeed(), OnDemand: true})
	if err != nil {
		t.Fatal(err)
	}
	r, err := fetch.Recv()
	if err == nil {
		err = loan.Send(&control.LendRequest{Blob: r.GetBlob()})
	}
	if err == nil {
		r, err = fetch.Recv()
	}
	if err != nil || !r.GetDone() || !r.GetFilling() {
		t.Fatalf("%v, %v", r, err)
	}
	over = make(chan error, 1)
	go func() {
		_, err := fetch.Recv()
		over <- err
	}()
	return sum(r.GetSeed()), cancel, over
}

// A seed that is copied on demand is usable before all of it has arrived. A handover of either executor waits for the rest, but not for a
// caller that keeps the loan. If the transfer ends before that,
// the seed is lost and leaves the store.
func TestCopySeedOnDemand(t *testing.T) {
	nodes := newNodes(t, 2)
	a, b := nodes[0], nodes[1]
	b.z.pages = true
	data, key := library(3 * (4 << 20))
	a.hasSeed(key, data)
	digest, _, over := onDemand(t, a, b, key)
	for _, n := range nodes { // the caller keeps the loan, which would last longer than this
		ctx, cancel := context.WithTimeout(n.ctx(), fetchConnect)
		defer cancel()
		if err := n.e.turns.close(ctx); err != nil {
			t.Fatal(err)
		}
		n.e.turns.open()
	}
	if err := <-over; !errors.Is(err, io.EOF) {
		t.Errorf("the rest: %v", err)
	}
	room := &seedRoom{b.e.tables, &arrivingTable{}, ""}
	s := b.e.tables.takeCopy(copyKey("", digest), "", room)
	if s == nil || s.Filling() || s.Lost() != nil {
		t.Fatalf("the copy is not whole: %v", s)
	}
	got := make([]byte, 4<<20)
	if _, err := s.File.ReadAt(got, 90<<20); err != nil || !bytes.Equal(got, data[2*(4<<20):]) {
		t.Errorf("the copy differs, %v", err)
	}
	s.Close()
	b.e.tables.giveBack(s.Memory())

	_, end, over := onDemand(t, a, b, key)
	end()
	<-over
	if err := b.e.turns.close(b.ctx()); err != nil { // the handler has ended
		t.Fatal(err)
	}
	b.e.turns.open()
	if s := b.e.tables.takeCopy(copyKey("", digest), "", room); s != nil && s.Lost() != nil {
		t.Error("the store has a seed whose pages are lost")
	} else if s != nil { // all pages had arrived
		s.Close()
		b.e.tables.giveBack(s.Memory())
	}
}
