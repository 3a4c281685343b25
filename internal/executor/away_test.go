package executor

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// hold leases two workers on a connection of its own and opens the event stream.
func (n *node) hold() (id uint64, hangUp func()) {
	n.t.Helper()
	conn := n.dial()
	cl := control.NewExecutorClient(conn)
	l, err := cl.Lease(n.ctx(), n.request(2))
	if err != nil {
		n.t.Fatal(err)
	}
	s, err := cl.Events(n.ctx(), &control.EventsRequest{LeaseId: l.GetLeaseId()})
	if err == nil {
		_, err = s.Recv()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return l.GetLeaseId(), func() { conn.Close() }
}

// absent waits until the executor has noticed that the client of a lease is away.
func (n *node) absent(id uint64, patience time.Duration) {
	n.t.Helper()
	eventually(n.t, "the client is away", func() bool {
		_, next := n.e.table.Due()
		return !next.IsZero() && time.Until(next) <= patience
	})
}

// While a worker is connected to the client's process, a lease waits for the client's next agent.
func TestLeaseOfAConnectedClientWaits(t *testing.T) {
	const grace = 20 * time.Minute
	n := newNode(t, func(c *Config) { c.Settings.ClientReturn, c.Settings.AgentGrace = time.Nanosecond, grace })
	id, hangUp := n.hold()
	hangUp()
	n.absent(id, grace)
	time.Sleep(3 * lookEvery) // no event shows that nothing happens
	if n.free() != 2 || len(n.z.alive()) != 2 {
		t.Fatalf("%d cores free, %d workers alive, want 2 and 2", n.free(), len(n.z.alive()))
	}
	eventually(t, "the log says so", func() bool { return strings.Contains(n.log.String(), "waiting for its next agent") })
	ev := n.events(id)
	n.z.alive()[0].alone.Store(true) // has no effect while the client is present
	time.Sleep(3 * lookEvery)
	n.z.alive()[1].die(zygote.Exit{Code: exitClientGone, Reason: "its client is gone"})
	ev.want(control.Event_KIND_WORKER_DIED)
	n.release(id)
	ev.want(control.Event_KIND_LEASE_ENDED)
}

// When one worker has noticed the end of an absent client, or all have died, the lease waits only for client-return.
func TestLeaseOfAnEndedClient(t *testing.T) {
	const grace = 20 * time.Minute
	for name, c := range map[string]struct {
		end  func(w *fakeWorker)
		many int // workers
	}{
		"a worker has ended":   {func(w *fakeWorker) { w.die(zygote.Exit{Code: exitClientGone, Reason: "its client is gone"}) }, 1},
		"a worker runs a call": {func(w *fakeWorker) { w.alone.Store(true) }, 1},
		"workers are crashed":  {func(w *fakeWorker) { w.die(segfault) }, 2},
	} {
		for _, first := range []string{"agent", "client"} {
			t.Run(name+", first the "+first, func(t *testing.T) {
				n := newNode(t, func(c *Config) { c.Settings.ClientReturn, c.Settings.AgentGrace = time.Millisecond, grace })
				id, hangUp := n.hold()
				if first == "agent" {
					hangUp()
					n.absent(id, grace)
				}
				for _, w := range n.z.alive()[:c.many] {
					if n.free() != 2 {
						t.Fatalf("%d cores are free while a worker is connected", n.free())
					}
					c.end(w)
				}
				hangUp()
				eventually(t, "the lease has ended", func() bool { return n.free() == 4 })
				_, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: id})
				wantError(t, err, codes.FailedPrecondition, control.ClassLease, "revoked", "went away")
			})
		}
	}
}

// A worker whose connection broke long before the client went away says nothing about the client.
func TestLeaseAfterABrokenConnectionWaits(t *testing.T) {
	const grace = 20 * time.Minute
	n := newNode(t, func(c *Config) { c.Settings.ClientReturn, c.Settings.AgentGrace = time.Nanosecond, grace })
	id, hangUp := n.hold()
	n.z.alive()[1].die(zygote.Exit{Code: exitClientGone, Reason: "its connection broke"})
	h := n.e.holding(lease.ID(id))
	eventually(t, "the death is known", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for i := range h.seats {
			if s := &h.seats[i]; s.dead {
				s.died = s.died.Add(-2 * noticeBefore)
				return true
			}
		}
		return false
	})
	hangUp()
	n.absent(id, grace)
	time.Sleep(3 * lookEvery) // no event shows that nothing happens
	if n.free() != 2 {
		t.Errorf("%d cores free, want 2", n.free())
	}
}

// The wait for an agent is bounded.
func TestAgentGraceEnds(t *testing.T) {
	n := newNode(t, func(c *Config) {
		c.Settings.ClientReturn, c.Settings.AgentGrace = time.Nanosecond, 100*time.Millisecond
	})
	id, hangUp := n.hold()
	hangUp()
	eventually(t, "the lease has ended", func() bool { return n.free() == 4 })
	_, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: id})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "revoked", "went away")
}
