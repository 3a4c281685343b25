package executor

import (
	"context"
	"encoding/binary"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// claimants is an executor on verbs, and a device for the queue pairs of client processes.
type claimants struct {
	*node
	dev *dataplane.Device
}

func newClaimants(t *testing.T) *claimants {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
		t.Skip("RFAAS_REQUIRE_VERBS is not set: this test runs in the lane softroce")
	}
	n := newNode(t, func(c *Config) {
		c.Providers, c.Settings.CacheTime, c.Settings.CacheMost = []string{dataplane.Verbs}, time.Hour, 100
	})
	n.z.claimable = true
	t.Cleanup(n.e.claims.close) // before the drain of newNode, which looks for leaks
	dev, err := dataplane.Open(dataplane.Verbs, dataplane.Options{GIDIndex: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	return &claimants{n, dev}
}

// claimant is the queue pair of a client process.
type claimant struct {
	*dataplane.Conn
	blob []byte
	id   uint64
	cell *control.MemoryRef
}

// pair returns a queue pair that is not connected.
func (c *claimants) pair(t *testing.T) *claimant {
	t.Helper()
	domain, err := c.dev.NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := domain.NewConn()
	if err != nil {
		domain.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		domain.Close()
	})
	blob, err := conn.Blob()
	if err != nil {
		t.Fatal(err)
	}
	return &claimant{Conn: conn, blob: blob}
}

// attach makes the client process behind an agent's connection a claimant.
func (x *claimant) attach(ctx context.Context, agent control.ExecutorClient) error {
	r, err := agent.AttachClaims(ctx, &control.AttachClaimsRequest{Provider: dataplane.Verbs, Blob: x.blob, Own: true})
	if err == nil {
		err = x.Connect(ctx, r.GetBlob())
	}
	x.id, x.cell = r.GetClaimant(), r.GetRegion()
	return err
}

// claim claims the line of a released lease. It reports whether the claimant has got it.
func (x *claimant) claim(m *control.Claim) (won bool, err error) {
	wish, yes, no := claim.Wish(m.GetLine(), m.GetSequence())
	if err := x.WriteRing(binary.NativeEndian.AppendUint64(nil, wish), x.cell.GetAddr(), x.cell.GetKey(), testBound); err != nil {
		return false, err
	}
	for word := make([]byte, 8); ; {
		if err := x.Read(word, x.cell.GetAddr()+claim.AnswerAt, x.cell.GetKey(), testBound); err != nil {
			return false, err
		}
		if answer := binary.NativeEndian.Uint64(word); answer == yes || answer == no {
			return answer == yes, nil
		}
	}
}

// release leases a worker for an agent, and releases it so that a claimant can claim it. It returns the lease and how it is claimed.
func (c *claimants) release(t *testing.T, agent control.ExecutorClient, claimant uint64) (uint64, *control.Claim) {
	t.Helper()
	l, err := agent.Lease(c.ctx(), c.keepable(1, func(r *control.LeaseRequest) {
		r.Provider, r.ClientBlobs = dataplane.Verbs, [][]byte{clientBlob(invoke.ProviderVerbs)}
	}))
	if err != nil {
		t.Fatal(err)
	}
	r, err := agent.Release(c.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId(), Keep: true, Claims: true, Claimant: claimant})
	if err != nil || r.GetClaim() == nil {
		t.Fatalf("%v, %v, want workers that can be claimed\n%s", r, err, c.log.String())
	}
	return l.GetLeaseId(), r.GetClaim()
}

func (c *claimants) agent(t *testing.T) (*grpc.ClientConn, control.ExecutorClient) {
	conn := c.dial()
	t.Cleanup(func() { conn.Close() })
	return conn, control.NewExecutorClient(conn)
}

// A client process claims the workers that its agent has released for it. No other claimant gets them, and another agent cannot name or end it.
func TestVerbsClaimants(t *testing.T) {
	c := newClaimants(t)
	mine, others, late := c.pair(t), c.pair(t), c.pair(t)
	refuses(t, "without a region", mine.attach(c.ctx(), c), control.ClassInvalid, "this connection has no claim region yet")
	if _, m := c.release(t, c, 4711); m.GetClaimant() != claim.Agent {
		t.Fatalf("%v, want a claim of the agent, because nobody else is a claimant", m)
	}
	for _, x := range []*claimant{mine, others} {
		if err := x.attach(c.ctx(), c); err != nil || x.id <= claim.Agent || x.cell.GetSize() != uint64(claim.CellSize) {
			t.Fatalf("%+v, %v", x, err)
		}
	}
	_, second := c.agent(t)
	if _, m := c.release(t, second, mine.id); m.GetClaimant() != claim.Agent {
		t.Errorf("another agent has released workers for the claimant: %v", m)
	}
	refuses(t, "of another agent, without a token", func() error {
		_, err := second.AttachClaims(c.ctx(), &control.AttachClaimsRequest{Provider: dataplane.Verbs, Blob: late.blob})
		return err
	}(), control.ClassInvalid, "the token names no claim region")
	if _, err := second.DetachClaims(c.ctx(), &control.DetachClaimsRequest{Claimant: mine.id}); err != nil {
		t.Error(err)
	}

	cached, m := c.release(t, c, mine.id)
	if m.GetClaimant() != mine.id || m.GetLeaseId() == 0 || m.GetClientMs() == 0 {
		t.Fatalf("%v, want a claim of %d", m, mine.id)
	}
	if won, err := others.claim(m); won || err != nil {
		t.Errorf("another process has claimed the workers: %v, %v", won, err)
	}
	if won, err := mine.claim(m); !won || err != nil {
		t.Fatalf("the claimant has not got the workers: %v, %v", won, err)
	}
	eventually(t, "the claim is booked", func() bool {
		l, err := c.e.table.Get(lease.ID(m.GetLeaseId()))
		return err == nil && l.Reuses == lease.ID(cached)
	})
	if won, err := mine.claim(m); !won || err != nil { // the same wish: the answer stays
		t.Errorf("the answer is lost: %v, %v", won, err)
	}
	if won, err := mine.claim(&control.Claim{Line: m.GetLine(), Sequence: m.GetSequence() + 1}); won || err != nil {
		t.Errorf("the same line again: %v, %v", won, err)
	}

	_, m = c.release(t, c, mine.id)
	if _, err := c.DetachClaims(c.ctx(), &control.DetachClaimsRequest{Claimant: mine.id}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the claimant cannot reach its cell any more", func() bool {
		won, err := mine.claim(m)
		if won {
			t.Fatal("a claimant that has ended has claimed workers")
		}
		return err != nil
	})
	if won, err := others.claim(m); won || err != nil {
		t.Errorf("another process has claimed the workers of a claimant that has ended: %v, %v", won, err)
	}
	if _, m := c.release(t, c, mine.id); m.GetClaimant() != claim.Agent {
		t.Errorf("%v, want a claim of the agent, because the claimant has ended", m)
	}
	c.conn.Close()
	eventually(t, "no cell can be reached any more", func() bool {
		_, err := others.claim(m)
		return err != nil
	})
}

// A connection and a tenant have a bounded number of claimants. The agent can always attach, and a claimant that ends makes room for another one.
func TestVerbsClaimantsAreBounded(t *testing.T) {
	c := newClaimants(t)
	x := c.pair(t) // the executor connects to the same queue pair each time, which nothing uses
	attach := func(agent control.ExecutorClient) (uint64, error) {
		r, err := agent.AttachClaims(c.ctx(), &control.AttachClaimsRequest{Provider: dataplane.Verbs, Blob: x.blob, Own: true})
		return r.GetClaimant(), err
	}
	connections := make([]*grpc.ClientConn, 3)
	agents := make([]control.ExecutorClient, 3)
	var ids []uint64
	for i := range agents {
		connections[i], agents[i] = c.agent(t)
		_, m := c.release(t, agents[i], 0)
		for {
			id, err := attach(agents[i])
			if err != nil {
				refuses(t, "one too many", err, control.ClassBusy, "the most are 128 and 63")
				break
			}
			if ids = append(ids, id); len(ids) > claimantsMost {
				t.Fatal("a tenant has too many claimants")
			}
		}
		if want := min((i+1)*(claim.Claimants-1), claimantsMost); len(ids) != want {
			t.Fatalf("%d claimants of %d connections, want %d", len(ids), i+1, want)
		}
		if _, err := agents[i].AttachClaims(c.ctx(), &control.AttachClaimsRequest{Provider: dataplane.Verbs, Blob: x.blob, Token: m.GetToken()}); err != nil {
			t.Errorf("the agent has no room left: %v", err)
		}
	}
	if _, err := agents[0].DetachClaims(c.ctx(), &control.DetachClaimsRequest{Claimant: ids[0]}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a claimant that has ended makes room", func() bool {
		_, err := attach(agents[2])
		return err == nil
	})
	connections[1].Close()
	eventually(t, "the claimants of a connection that has ended are uncounted", func() bool {
		_, err := attach(agents[2])
		return err == nil
	})
}

// A claimant may end at any time: while it is made, while it claims, and while its agent's connection ends. Nothing uses memory that is gone, and nothing is
// left.
func TestVerbsClaimantsEnd(t *testing.T) {
	c := newClaimants(t)
	for i := range 6 {
		conn, agent := c.agent(t)
		c.release(t, agent, 0)
		var all sync.WaitGroup
		for j := range 3 {
			x := c.pair(t)
			all.Go(func() {
				if x.attach(t.Context(), agent) != nil {
					return // the connection has ended before
				}
				all.Go(func() { // rings until the cell is gone
					for n := uint64(1); ; n++ {
						if _, err := x.claim(&control.Claim{Line: uint32(n % 256), Sequence: n}); err != nil {
							return
						}
					}
				})
				if (i+j)%3 > 0 {
					_, _ = agent.DetachClaims(t.Context(), &control.DetachClaimsRequest{Claimant: x.id})
				}
				if j == 2 {
					conn.Close()
				}
			})
		}
		all.Go(func() {
			for range i % 4 {
				if _, err := agent.Leases(t.Context(), &control.LeasesRequest{}); err != nil {
					return
				}
			}
			conn.Close()
		})
		all.Wait()
	}
	eventually(t, "all claimants are uncounted", func() bool {
		c.e.claims.mu.Lock()
		defer c.e.claims.mu.Unlock()
		return len(c.e.claims.claimants) == 0 && len(c.e.claims.regions) == 0
	})
}
