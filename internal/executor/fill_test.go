package executor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// transfer is a seed on its way to a node, over streams of Lend and Fetch that the test has.
type transfer struct {
	loan   lendStream
	fetch  fetchStream
	digest sum
	offer  *control.LendReply
	end    context.CancelFunc // ends the loan
	leave  context.CancelFunc // ends the stream of Fetch
}

type (
	lendStream interface {
		Send(*control.LendRequest) error
		Recv() (*control.LendReply, error)
		CloseSend() error
	}
	fetchStream interface {
		Recv() (*control.FetchReply, error)
	}
)

// move makes a node copy a seed on demand.
func move(t *testing.T, from, to *node, key sum, instead bool) *transfer {
	t.Helper()
	ctx, cancel := context.WithCancel(from.ctx())
	t.Cleanup(cancel)
	loan, offer, err := askLoan(ctx, from, &control.LendRequest{Seed: key[:], Provider: dataplane.TCP, OnDemand: true})
	if err != nil {
		t.Fatal(err)
	}
	fetching, leave := context.WithCancel(to.ctx())
	t.Cleanup(leave)
	m := &transfer{loan: loan, offer: offer, end: cancel, leave: leave}
	if m.fetch, err = to.Fetch(fetching, &control.FetchRequest{Provider: dataplane.TCP, Blob: m.offer.GetBlob(), Memory: m.offer.GetMemory(), Proofs: m.offer.GetProofs(), Seed: m.offer.GetSeed(),
		OnDemand: true, Instead: instead}); err != nil {
		t.Fatal(err)
	}
	r, err := m.fetch.Recv()
	if err == nil {
		err = loan.Send(&control.LendRequest{Blob: r.GetBlob()})
	}
	if err == nil {
		r, err = m.fetch.Recv()
	}
	if err != nil || !r.GetDone() || !r.GetFilling() {
		t.Fatalf("%v, %v", r, err)
	}
	m.digest = sum(append(r.GetSeed(), make([]byte, 32)...)[:32])
	return m
}

// arriving returns the seed that arrives at a node.
func (n *node) arriving(digest sum) *filling { return n.e.fillings.get(copyKey("", digest)).all[0] }

// twoSources returns a node that reads only what workers touch of a seed, and two others that have the seed.
func twoSources(t *testing.T, key sum, data []byte) (one, reader, other *node) {
	t.Helper()
	nodes := newNodes(t, 3)
	lendTo(nodes...)
	nodes[1].z.pages = true
	nodes[1].e.cfg.Settings.SeedFill = "touched"
	nodes[0].hasSeed(key, data)
	nodes[2].hasSeed(key, data)
	return nodes[0], nodes[1], nodes[2]
}

// An executor that has lost the source of a seed asks for another one, and reads from it. Without another one, it says so. It lends the seed only when it has all of it. The list of
// touched pages reaches the source, and from there the next executor.
func TestSecondSource(t *testing.T) {
	data, key := library(3 * (4 << 20))
	a, b, c := twoSources(t, key, data)
	first := move(t, a, b, key, false)
	f := b.arriving(first.digest)
	read := func() error { // as package zygote does after a page fault
		got := make([]byte, 4096)
		err := f.read([]zygote.SeedPart{{Segment: 2, Offset: 8192, Size: 4096}}, got)
		if err == nil && !bytes.Equal(got, data[2*(4<<20)+8192:][:4096]) {
			t.Error("the bytes differ")
		}
		return err
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}
	list := []zygote.SeedRun{{First: 3, Count: 2}, {First: 100, Count: 1}}
	f.touched(list)
	if r, err := first.fetch.Recv(); err != nil || len(r.GetTouched()) != 4 {
		t.Fatalf("%v, %v", r, err)
	} else if err := first.loan.Send(&control.LendRequest{Touched: r.GetTouched()}); err != nil {
		t.Fatal(err)
	}
	ours := a.e.tables.take(key, "")
	eventually(t, "the source has the list", func() bool { return len(ours.seed.Touched()) == 2 })
	a.e.tables.release([]*table{ours})
	if later, err := ask(a, key); err != nil || len(later.GetSeed().GetTouched()) != 4 {
		t.Errorf("a later offer: %v, %v", later.GetSeed().GetTouched(), err)
	}
	name := copyKey("", first.digest)
	_, err := ask(b, name)
	refuses(t, "a part of the seed", err, control.ClassConnection, "reads only what workers touch")

	if err := first.loan.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var lost error
	eventually(t, "the source is lost", func() bool { lost = read(); return lost != nil })
	answer := make(chan error, 1)
	go func() { answer <- f.lost(lost) }()
	if r, err := first.fetch.Recv(); err != nil || r.GetLost() == "" {
		t.Fatalf("%v, %v", r, err)
	}
	second := move(t, c, b, key, true)
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if err := read(); err != nil {
		t.Errorf("from the second source: %v", err)
	}
	if err := second.loan.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second source is lost", func() bool { lost = read(); return lost != nil })
	go func() { answer <- f.lost(lost) }()
	if r, err := first.fetch.Recv(); err != nil || r.GetLost() == "" {
		t.Fatalf("%v, %v", r, err)
	}
	b.e.fabric.close() // a drain
	if err := <-answer; err == nil || !strings.Contains(err.Error(), "no other executor") {
		t.Error(err)
	}
}

// A seed whose copy a lease has taken out of the store can arrive a second time. Each of the two copies gets another source when it loses its own.
func TestSecondSourceOfTwoCopies(t *testing.T) {
	data, key := library(3 * (4 << 20))
	a, b, c := twoSources(t, key, data)
	first := move(t, a, b, key, false)
	f := b.arriving(first.digest)
	lease := sum{1}
	got, err := b.e.tables.seed(b.ctx(), lease, "", func(room *seedRoom) (*zygote.Seed, error) {
		return b.e.tables.takeCopy(copyKey("", first.digest), "", room), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer b.e.tables.release([]*table{got})
	move(t, a, b, key, false)
	answer := make(chan error, 1)
	go func() { answer <- f.lost(io.ErrUnexpectedEOF) }()
	if r, err := first.fetch.Recv(); err != nil || r.GetLost() == "" {
		t.Fatalf("%v, %v", r, err)
	}
	move(t, c, b, key, true)
	if err := <-answer; err != nil {
		t.Errorf("the first copy: %v", err)
	}
}

// Workers do not depend on the agent that asked for the copy of their seed. When the agent ends, the executor reads the rest at once, and the source lends the seed until that is done.
func TestCopyOutlivesAgent(t *testing.T) {
	nodes := newNodes(t, 2)
	a, b := nodes[0], nodes[1]
	lendTo(nodes...)
	b.z.pages = true
	b.e.cfg.Settings.SeedFill = "touched"
	data, key := library(3 * (4 << 20))
	a.hasSeed(key, data)
	first := move(t, a, b, key, false)
	s := b.arriving(first.digest).seed
	first.end() // as when its process is killed, but the order is certain
	first.leave()
	eventually(t, "the rest has arrived", func() bool { return !s.Filling() })
	if err := s.Lost(); err != nil || s.Missing() != 0 {
		t.Errorf("%d bytes are missing, %v", s.Missing(), err)
	}
	eventually(t, "the loan has ended", func() bool { return a.e.table.Capacity().SetAside == a.e.tables.bytesOf("") })
}

// An executor lends a seed no longer than its own lease-max permits. It asks the other executor in time to read the rest, because that one's lease-max may be longer.
func TestLoanEndsInTime(t *testing.T) {
	nodes := newNodes(t, 2)
	a, b := nodes[0], nodes[1]
	lendTo(nodes...)
	b.z.pages = true
	b.e.cfg.Settings.SeedFill = "touched"
	a.e.cfg.Settings.LeaseMax = time.Millisecond
	data, key := library(3 * (4 << 20))
	a.hasSeed(key, data)
	m := move(t, a, b, key, false)
	if r, err := m.loan.Recv(); err != nil || !r.GetEnding() {
		t.Errorf("%v, %v", r, err)
	}
}

// Memory is set aside for the buffers of copying, which are larger for a large segment, and for the hashes of the copy's pages.
func TestCopyTakesMemory(t *testing.T) {
	nodes := newNodes(t, 2)
	a, b := nodes[0], nodes[1]
	lendTo(nodes...)
	b.z.pages = true
	b.e.cfg.Settings.SeedFill = "touched"
	data, key := library(3 * (4 << 20))
	a.hasSeed(key, data)
	m := move(t, a, b, key, false)
	size := uint64(len(data))
	if aside := b.e.table.Capacity().SetAside; aside <= size+size/128+4*(4<<20)/64 {
		t.Errorf("%d bytes are set aside for a seed of %d while it is copied", aside, size)
	}
	s := b.arriving(m.digest).seed
	s.Hurry()
	eventually(t, "the copying has ended", func() bool { return b.e.fillings.get(copyKey("", m.digest)) == nil })
	eventually(t, "its buffers are free", func() bool {
		aside := b.e.table.Capacity().SetAside
		return aside == 0 || aside == s.Memory()
	})
}

// ask asks a node to lend a seed, and returns its offer.
func ask(n *node, key sum) (*control.LendReply, error) {
	ctx, cancel := context.WithCancel(n.ctx())
	defer cancel()
	_, offer, err := askLoan(ctx, n, &control.LendRequest{Seed: key[:], Provider: dataplane.SHM})
	return offer, err
}

// An executor that drains tells the borrowers of its seeds, which then read the rest at once. It does not wait for a borrower that reads nothing.
func TestLenderDrains(t *testing.T) {
	nodes := newNodes(t, 3)
	a, b, c := nodes[0], nodes[1], nodes[2]
	lendTo(nodes...)
	data, key := library(3 * (4 << 20))
	a.hasSeed(key, data)
	for _, n := range []*node{b, c} {
		n.z.pages = true
		n.e.cfg.Settings.SeedFill = "touched"
	}
	reads, idle := move(t, a, b, key, false), move(t, a, c, key, false)
	f := b.arriving(reads.digest)
	drained := make(chan struct{})
	go func() { defer close(drained); a.e.lender.close() }()
	if r, err := reads.loan.Recv(); err != nil || !r.GetEnding() {
		t.Fatalf("%v, %v", r, err)
	}
	rest, err := b.Fetch(b.ctx(), &control.FetchRequest{Provider: dataplane.TCP, Memory: reads.offer.GetMemory(), Seed: reads.offer.GetSeed(), Rest: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rest.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, err := reads.fetch.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the rest: %v", err)
	}
	if f.seed.Lost() != nil || f.seed.Missing() != 0 {
		t.Errorf("%d bytes are missing, %v", f.seed.Missing(), f.seed.Lost())
	}
	<-drained
	idle.leave()
}

// unreadLoan is a stream of Lend whose caller does not read what follows the offer.
type unreadLoan struct {
	grpc.ServerStream
	ctx      context.Context
	requests chan *control.LendRequest
	offered  chan struct{}
	unread   chan struct{} // closed when Send waits for the caller
}

func (u *unreadLoan) Context() context.Context { return u.ctx }

func (u *unreadLoan) Recv() (*control.LendRequest, error) {
	select {
	case r := <-u.requests:
		return r, nil
	case <-u.ctx.Done():
		return nil, u.ctx.Err()
	}
}

func (u *unreadLoan) Send(r *control.LendReply) error {
	if !r.GetEnding() {
		close(u.offered)
		return nil
	}
	close(u.unread)
	<-u.ctx.Done() // as with gRPC, until the handler has returned
	return u.ctx.Err()
}

// lendDirectly makes a node lend a seed on demand over shm, and waits for its offer. over receives the error with which the loan ends.
func lendDirectly(t *testing.T, n *node, ctx context.Context) (u *unreadLoan, s *zygote.Seed, over chan error) {
	t.Helper()
	data, key := library(3 * (256 << 10))
	got, err := n.e.tables.seed(ctx, key, codeOwner(ctx), func(*seedRoom) (*zygote.Seed, error) { return seedOf(t, data), nil })
	if err != nil {
		t.Fatal(err)
	}
	n.e.tables.release([]*table{got})
	u = &unreadLoan{ctx: ctx, requests: make(chan *control.LendRequest, 2), offered: make(chan struct{}), unread: make(chan struct{})}
	u.requests <- &control.LendRequest{Seed: key[:], Provider: dataplane.SHM, OnDemand: true}
	over = make(chan error, 1)
	go func() { over <- n.e.Lend(u) }()
	select {
	case <-u.offered:
	case err := <-over:
		t.Fatal(err)
	}
	return u, got.seed, over
}

// A caller that does not read its streams delays neither a drain nor the pages of a seed.
func TestCallerDoesNotRead(t *testing.T) {
	n := newNodes(t, 1)[0]
	ctx, handled := context.WithCancel(t.Context())
	defer handled()
	u, _, over := lendDirectly(t, n, ctx)
	u.requests <- &control.LendRequest{}
	n.e.lender.close()
	<-u.unread
	if err := <-over; !errors.Is(err, errNotRead) {
		t.Errorf("the loan: %v", err)
	}

	f := newFilling(t.Context(), func(*control.FetchReply) error { <-ctx.Done(); return ctx.Err() })
	f.touched(nil)
	f.touched(nil)
	if err := f.lost(io.ErrUnexpectedEOF); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the source is lost: %v", err)
	}
}

// A loan whose borrower has never connected ends with the stream of its caller, and not only when its time is over.
func TestLoanWithoutBorrowerEnds(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	defer end()
	u, s, over := lendDirectly(t, newNodes(t, 1)[0], ctx)
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{GIDIndex: -1})
	if err != nil {
		t.Fatal(err)
	}
	domain, err := dev.NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := domain.NewBulkConn()
	if err != nil {
		t.Fatal(err)
	}
	blob, err := conn.Blob()
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	domain.Close()
	dev.Close() // the borrower has ended
	u.requests <- &control.LendRequest{Blob: blob}
	u.requests <- &control.LendRequest{Touched: []uint32{3, 2}}
	eventually(t, "the executor has tried to connect", func() bool { return len(s.Touched()) == 1 })
	end()
	if err := <-over; !errors.Is(err, errCallerGone) {
		t.Errorf("the loan: %v", err)
	}
}
