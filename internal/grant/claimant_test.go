package grant

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// attacher is an executor that takes claimants. It records what it is asked for.
type attacher struct {
	*lessor
	mu       sync.Mutex
	size     uint64 // of a cell
	refuses  bool
	last     uint64   // id of the last claimant
	detached []uint64 // ids
	released []*control.ReleaseRequest
	claim    *control.Claim // in the reply to a release
	before   func()         // of the next reply to an attach; may be nil
}

func (x *attacher) AttachClaims(_ context.Context, r *control.AttachClaimsRequest) (*control.AttachClaimsReply, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if before := x.before; before != nil {
		x.before = nil
		before()
	}
	if x.refuses || !r.GetOwn() || r.GetProvider() != dataplane.Verbs {
		return nil, control.Errorf(control.ClassBusy, "too many claimants")
	}
	x.last++
	return &control.AttachClaimsReply{Blob: []byte("the executor's"), Region: &control.MemoryRef{Addr: 64, Key: 7, Size: x.size}, Claimant: x.last}, nil
}

func (x *attacher) DetachClaims(_ context.Context, r *control.DetachClaimsRequest) (*control.DetachClaimsReply, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.detached = append(x.detached, r.GetClaimant())
	return &control.DetachClaimsReply{}, nil
}

func (x *attacher) Release(_ context.Context, r *control.ReleaseRequest) (*control.ReleaseReply, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.released = append(x.released, r)
	return &control.ReleaseReply{Cached: r.GetKeep(), CacheMs: 60_000, Claim: x.claim}, nil
}

// ended returns the claimants that were detached.
func (x *attacher) ended() []uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.detached)
}

// ids returns the leases that were released.
func (x *attacher) ids() (ids []uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range x.released {
		ids = append(ids, r.GetLeaseId())
	}
	return ids
}

func newAttacher(t *testing.T) (*attacher, *Held) {
	t.Helper()
	x := &attacher{lessor: &lessor{}, size: uint64(claim.CellSize), last: claim.Agent}
	c, port, _, _ := lessee(t, x)
	c.opts.Keep = 10
	conn, err := c.dial("attach", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	return x, &Held{Candidate: Candidate{Address: port.Address, Provider: dataplane.Verbs}, ID: 17, c: c, cl: control.NewExecutorClient(conn)}
}

// A session has one claimant for each executor. A new one takes the place of the earlier one, and the end of the session ends it. A claimant that the
// agent cannot use is detached, too.
func TestAttachClaimant(t *testing.T) {
	x, h := newAttacher(t)
	attach := func() error {
		blob, cell, err := h.AttachClaimant(t.Context(), []byte("the client's"))
		if err == nil && (string(blob) != "the executor's" || cell.GetKey() != 7) {
			t.Errorf("blob %q, cell %v", blob, cell)
		}
		return err
	}
	want := func(what string, err error, class error, claimant uint64, detached ...uint64) {
		t.Helper()
		if got := h.c.claimant(h.Address); !errors.Is(err, class) || got != claimant || !slices.Equal(x.ended(), detached) {
			t.Errorf("%s: %v, claimant %d, detached %v, want %v, %d, %v", what, err, got, x.ended(), class, claimant, detached)
		}
	}
	x.size = uint64(claim.Size)
	want("an executor of another version", attach(), dataplane.ErrConnection, 0, 2)
	x.size = uint64(claim.CellSize)
	want("the first one", attach(), nil, 3, 2)
	want("the next one", attach(), nil, 4, 2, 3)
	x.refuses = true
	want("refused", attach(), dataplane.ErrBusy, 0, 2, 3, 4)
	x.refuses = false
	want("another one", attach(), nil, 5, 2, 3, 4)
	defer h.c.retain()() // another session has the same connection
	x.before = func() {  // the session is closed before the reply
		go h.c.Close()
		testkit.Eventually(t, "the session has left its claimants", func() bool {
			h.c.claimants.mu.Lock()
			defer h.c.claimants.mu.Unlock()
			return h.c.claimants.closed
		})
	}
	want("in a session that is being closed", attach(), dataplane.ErrInvalid, 0, 2, 3, 4, 5, 6)
	h.Provider = dataplane.TCP
	want("on tcp", attach(), dataplane.ErrUnsupported, 0, 2, 3, 4, 5, 6)
}

// The session's end ends its claimants.
func TestCloseEndsClaimants(t *testing.T) {
	x, h := newAttacher(t)
	if _, _, err := h.AttachClaimant(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	h.c.Close()
	testkit.Eventually(t, "the claimant is detached", func() bool { return slices.Equal(x.ended(), []uint64{2}) })
}

// A release names the claimant if the client process is to claim the workers, and keeps the channels. The reply says who can claim them.
func TestReleaseForAClaimant(t *testing.T) {
	for name, c := range map[string]struct {
		own      bool
		handed   io.Closer
		claimant uint64 // in the reply
		asked    uint64 // in the request
		claims   bool   // the client process
		may      bool   // after an attach
	}{
		"own":                     {true, nil, 2, 2, true, false},
		"not known any more":      {true, nil, claim.Agent, 2, false, true},
		"not asked":               {false, nil, claim.Agent, 0, false, true},
		"the agent has channels":  {true, io.NopCloser(nil), claim.Agent, 0, false, false},
		"executor of old version": {true, nil, 0, 2, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			x, h := newAttacher(t)
			if _, _, err := h.AttachClaimant(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			x.claim = &control.Claim{Line: 3, Sequence: 9, LeaseId: 4711, ClientMs: 1000, Claimant: c.claimant}
			k, err := h.ReleaseCached(t.Context(), 1, c.handed, c.own)
			if err != nil || k == nil {
				t.Fatal(k, err)
			}
			own := k.OwnClaim()
			if x.released[0].GetClaimant() != c.asked || own != nil != c.claims || k.MayAttach() != c.may || own != nil && (own.Line != 3 || own.Sequence != 9 || own.LeaseID != 4711) {
				t.Errorf("asked for %v, %+v, may attach: %v", x.released[0], own, k.MayAttach())
			}
			if names := h.c.ClaimedCached(); len(names) > 0 != c.claims {
				t.Errorf("%v may be claimed", names)
			}
		})
	}
}

// If a client process asks for workers that it could have claimed, it does not know whether it has. If the executor refuses, or the session gives the workers
// up, the cached lease is released, and then that of the claim.
func TestClaimOfAClaimantIsSettled(t *testing.T) {
	for _, what := range []string{"refused", "given up"} {
		t.Run(what, func(t *testing.T) {
			x, h := newAttacher(t)
			x.lessor.before = func(*control.LeaseRequest) error { return control.Errorf(control.ClassBusy, "no") }
			k := &Cached{id: 17, cand: h.Candidate, cl: h.cl, last: &Held{}, own: &OwnClaim{LeaseID: 4711}}
			k.cand.Cached = k
			if what == "refused" {
				p := &Pending{c: h.c, candidates: []Candidate{k.cand}}
				if got, err := p.GrantCached(t.Context(), k, nil); err == nil {
					t.Fatalf("%+v, want an error", got)
				}
			} else {
				h.c.Forget(k)
			}
			testkit.Eventually(t, "both leases are released", func() bool { return slices.Equal(x.ids(), []uint64{17, 4711}) })
		})
	}
}

// If a process closes its session or has ended, it does not use the lease of a claim that it has not reported. If it goes on by another agent, it may.
func TestCloseSettlesClaims(t *testing.T) {
	for name, c := range map[string]struct {
		close    func(*Control)
		released []uint64
	}{
		"ends":    {(*Control).Close, []uint64{17, 17, 4711}},
		"goes on": {(*Control).Leave, []uint64{17, 17}},
	} {
		t.Run(name, func(t *testing.T) {
			x, h := newAttacher(t)
			if _, _, err := h.AttachClaimant(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			x.claim = &control.Claim{LeaseId: 4711, ClientMs: 1000, Claimant: 2}
			k, err := h.ReleaseCached(t.Context(), 1, nil, true)
			if err != nil || k == nil || k.OwnClaim() == nil {
				t.Fatal(k, err)
			}
			if c.close(h.c); !slices.Equal(x.ids(), c.released) {
				t.Errorf("released %v, want %v", x.ids(), c.released)
			}
		})
	}
}
