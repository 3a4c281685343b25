package grant

import (
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// farExecutor lets a client attach to a claim region on tcp. It records the leases that are released.
type farExecutor struct {
	control.ExecutorClient
	t         *testing.T
	data      *datalisten.Listener
	dev       *dataplane.Device
	done      chan struct{}
	theirs    []byte // blob of the client's queue pair
	domain    *dataplane.Domain
	server    *dataplane.Server
	region    *dataplane.Memory
	conn      *dataplane.Conn
	released  []uint64
	onRelease func()
}

func newFarExecutor(t *testing.T) *farExecutor {
	data, err := datalisten.Open("127.0.0.1:0", "", slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(data.Close)
	data.Serve()
	x := &farExecutor{t: t, data: data, done: make(chan struct{})}
	if x.dev, err = dataplane.Open(dataplane.TCP, dataplane.Options{GIDIndex: -1, Handed: true, Advertise: data.Address}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.dev.Close)
	if x.domain, err = x.dev.NewDomain(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.domain.Close)
	if x.region, err = x.domain.Alloc(uint64(claim.Size), dataplane.RemoteAtomic); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.region.Free)
	if x.server, err = dataplane.NewServer(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.server.Close)
	if x.conn, err = x.domain.NewConn(x.region); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.conn.Close)
	return x
}

func (x *farExecutor) AttachClaims(_ context.Context, r *control.AttachClaimsRequest, opts ...grpc.CallOption) (*control.AttachClaimsReply, error) {
	for _, o := range opts {
		if p, ok := o.(grpc.PeerCallOption); ok {
			p.PeerAddr.Addr, p.PeerAddr.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}
		}
	}
	x.theirs = r.GetBlob()
	blob, err := x.conn.Blob()
	if err == nil {
		token, _ := dataplane.BlobToken(blob)
		err = x.data.Expect(token, "claims", x)
	}
	ref := x.region.Ref()
	return &control.AttachClaimsReply{Blob: blob, Region: &control.MemoryRef{Addr: ref.Addr, Key: ref.Key, Size: ref.Size}}, err
}

func (x *farExecutor) Done() <-chan struct{} { return x.done }

func (x *farExecutor) Connect(c *net.TCPConn, hello []byte) error {
	err := x.dev.Hand(c, hello)
	if err == nil {
		err = x.conn.Connect(context.Background(), x.theirs)
	}
	if err == nil {
		err = x.conn.Serve(x.server)
	}
	return err
}

func (x *farExecutor) Release(_ context.Context, r *control.ReleaseRequest, _ ...grpc.CallOption) (*control.ReleaseReply, error) {
	x.released = append(x.released, r.GetLeaseId())
	if x.onRelease != nil {
		x.onRelease()
	}
	return &control.ReleaseReply{}, nil
}

// claimFar returns the lease that a claim gets.
func claimFar(p *Pending, k *Cached) *Held {
	h, _ := p.claimFar(k)
	return h
}

// refuser is an executor that refuses leases. Before a refusal, it calls decide.
type refuser struct {
	*lessor
	decide func()
}

func (x *refuser) Leasing(s grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	for {
		if _, err := s.Recv(); err != nil {
			return err
		}
		x.decide()
		if err := s.Send(&control.LeaseReply{NotCached: true}); err != nil {
			return err
		}
	}
}

// A claim on tcp gets the lease that the executor has named, if the line is armed.
func TestClaimFar(t *testing.T) {
	x := newFarExecutor(t)
	s, err := newShared(&Options{DataEncryption: "off", Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	c := &Control{shared: s, opts: s.opts}
	const line, sequence, lease = 7, 3, 4711
	at, armed, claimed := claim.Word(line, sequence)
	word := x.region.Bytes()[at:]
	k := &Cached{cand: Candidate{Address: "far:1", Provider: dataplane.TCP}, cl: x, last: &Held{Workers: []Worker{{PID: 9, Connect: time.Second}}}}
	k.claimable(c, &control.Claim{Line: line, Sequence: sequence, Token: make([]byte, claim.Secret), LeaseId: lease, ClientMs: 60_000})
	p := &Pending{c: c}
	if k.far == nil || k.claim != nil {
		t.Fatalf("%+v", k)
	}
	try := func() *Held { return claimFar(p, k) }
	testkit.Eventually(t, "the region is connected", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return k.far.conn != nil
	})
	if h := try(); h != nil {
		t.Errorf("a line that is not armed: %+v", h)
	}
	binary.NativeEndian.PutUint64(word, armed)
	p.spec.Duration = time.Hour
	if h := try(); h != nil {
		t.Errorf("a claim for another duration than that of the released lease: %+v", h)
	}
	p.spec.Duration = 0
	h := try()
	if h == nil || binary.NativeEndian.Uint64(word) != claimed || h.ID != lease || time.Until(h.end) > time.Minute || time.Until(h.end) < 50*time.Second ||
		h.Workers[0].PID != 9 || h.Workers[0].Start != control.StartPath_START_PATH_CACHED || h.Workers[0].Connect != 0 {
		t.Fatalf("word %#x, %+v", binary.NativeEndian.Uint64(word), h)
	}
	if try() != nil || len(x.released) > 0 {
		t.Errorf("claimed twice, or released %v", x.released)
	}
	x.conn.Close()
	if h, sure := p.claimFar(k); h != nil || sure {
		t.Errorf("%+v by a broken connection, sure: %v", h, sure)
	}
	if h, sure := p.claimFar(k); h != nil || !sure || len(x.released) > 0 {
		t.Errorf("tried again by the broken connection: %+v, sure: %v, released %v", h, sure, x.released)
	}
}

// If the outcome of a claim is unknown, the claim may win until the executor has decided about the request by message. So the lease of the claim is released
// after the refusal, and after the cached lease: the executor may have refused for another reason than the claim, and then the workers could still be
// claimed. Nothing is released if the claim has lost.
func TestClaimOfUnknownOutcome(t *testing.T) {
	x := newFarExecutor(t)
	won, refusals, wonAtRelease := false, 0, false
	refuse := &refuser{&lessor{}, func() { refusals++; won = true }} // a claim that arrives now wins
	c, port, _, _ := lessee(t, refuse)
	at, armed, _ := claim.Word(7, 3)
	const lease = 4711
	k := &Cached{id: 17, cand: Candidate{Address: port.Address, Provider: dataplane.TCP}, cl: x, last: &Held{}}
	k.claimable(c, &control.Claim{Line: 7, Sequence: 3, Token: make([]byte, claim.Secret), LeaseId: lease, ClientMs: 60_000})
	k.cand.Cached = k
	p := &Pending{c: c, candidates: []Candidate{k.cand}}
	testkit.Eventually(t, "the region is connected", func() bool {
		c.shared.mu.Lock()
		defer c.shared.mu.Unlock()
		return k.far.conn != nil
	})
	x.onRelease = func() { wonAtRelease = won }
	if h, err := p.GrantCached(t.Context(), k, nil); h != nil || err == nil || refusals != 1 || len(x.released) > 0 {
		t.Fatalf("a claim that loses: %+v, %v, %d requests by message, released %v", h, err, refusals, x.released)
	}
	binary.NativeEndian.PutUint64(x.region.Bytes()[at:], armed)
	won = false
	x.conn.Close()
	if h, err := p.GrantCached(t.Context(), k, nil); h != nil || err == nil || refusals != 2 || !slices.Equal(x.released, []uint64{17, lease}) || !wonAtRelease {
		t.Fatalf("a claim of unknown outcome: %+v, %v, %d requests by message, released %v, after the claim has won: %v", h, err, refusals, x.released, wonAtRelease)
	}
}

// verbsExecutor lets a client attach to a claim region on verbs, as an executor does.
type verbsExecutor struct {
	farExecutor
	claims *claim.Region
}

func newVerbsExecutor(t *testing.T) *verbsExecutor {
	dev, err := dataplane.Open(dataplane.Verbs, dataplane.Options{GIDIndex: -1, OneThread: true})
	if err != nil {
		if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	t.Cleanup(dev.Close)
	x := &verbsExecutor{farExecutor: farExecutor{t: t, dev: dev}}
	if x.claims, err = claim.New(func() {}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.claims.Close)
	if x.server, err = dev.NewServer(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.server.Close)
	if x.domain, err = dev.NewDomain(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.domain.Close)
	if x.region, err = x.domain.Alloc(uint64(claim.CellSize), dataplane.RemoteRead|dataplane.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.region.Free)
	if err = x.claims.Join(1, x.region.Bytes()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.claims.Leave(1) })
	if x.conn, err = x.domain.NewConn(x.region); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.conn.Close)
	return x
}

func (x *verbsExecutor) AttachClaims(ctx context.Context, r *control.AttachClaimsRequest, _ ...grpc.CallOption) (*control.AttachClaimsReply, error) {
	blob, err := x.conn.Blob()
	if err == nil {
		err = x.conn.Connect(ctx, r.GetBlob())
	}
	if err == nil {
		err = x.conn.ServeAndRing(x.server, x.claims.Bell())
	}
	ref := x.region.Ref()
	return &control.AttachClaimsReply{Blob: blob, Region: &control.MemoryRef{Addr: ref.Addr, Key: ref.Key, Size: ref.Size}}, err
}

// A claim on verbs gets the lease if the workers are frozen and the executor has not revoked the line. Claims and revocations race, and one side wins.
func TestClaimFarOnVerbs(t *testing.T) {
	x := newVerbsExecutor(t)
	s, err := newShared(&Options{Timeout: time.Minute, Verbs: &dataplane.Options{GIDIndex: -1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	c := &Control{shared: s, opts: s.opts}
	p := &Pending{c: c}
	booked := 0 // the region calls one function at a time
	arm := func() (*claim.Slot, *Cached) {
		slot, err := x.claims.Arm(7, time.Minute, 1, claim.Frozen, nil, func(time.Duration) { booked++ })
		if err != nil {
			panic(err)
		}
		k := &Cached{cand: Candidate{Address: "far:1", Provider: dataplane.Verbs}, cl: x, last: &Held{}}
		k.claimable(c, &control.Claim{Line: slot.Line, Sequence: slot.Sequence, Token: make([]byte, claim.Secret), LeaseId: 7, ClientMs: 60_000, Claimant: claim.Agent})
		return slot, k
	}
	slot, k := arm()
	if k.far == nil || k.claim != nil {
		t.Fatalf("%+v", k)
	}
	testkit.Eventually(t, "the region is connected", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return k.far.conn != nil
	})
	h := claimFar(p, k)
	if slot.Collect(); h == nil || h.ID != 7 || booked != 1 || slot.Revoke() {
		t.Fatalf("%+v, %d booked", h, booked)
	}
	slot, k = arm()
	slot.Revoke()
	if h := claimFar(p, k); h != nil || len(x.released) > 0 {
		t.Errorf("claimed a revoked line: %+v, released %v", h, x.released)
	}
	for i := range 200 {
		booked = 0
		slot, k := arm()
		revoked := make(chan bool)
		go func() {
			time.Sleep(time.Duration(i) * 2 * time.Microsecond) // so that sometimes the claim comes first
			revoked <- slot.Revoke()
		}()
		won := claimFar(p, k) != nil
		lost := <-revoked
		if slot.Collect(); won == lost || won != (booked == 1) || len(x.released) > 0 {
			t.Fatalf("claimed %v, revoked %v, %d booked, released %v", won, lost, booked, x.released)
		}
	}
	// Lines are armed again as soon as their claims are booked, before or after the agent has seen the outcome.
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			for range 100 {
				slot, k := arm()
				won := claimFar(p, k) != nil
				if slot.Collect(); !won {
					t.Error("a claim was lost")
				}
			}
		})
	}
	both.Wait()
	_, k = arm()
	x.conn.Close()
	if h, sure := p.claimFar(k); h != nil || sure {
		t.Errorf("%+v by a broken connection, sure: %v", h, sure)
	}
}
