package executor

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// growing leases four workers while fewer cores are free, and returns the request and the grant of `there` workers.
func (n *node) growing(there int) (*control.LeaseRequest, *control.LeaseReply) {
	n.t.Helper()
	req := n.request(4)
	req.WorkersMin = 1
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		n.t.Fatal(err)
	}
	if len(l.GetWorkers()) != there {
		n.t.Fatalf("%d workers granted, want %d", len(l.GetWorkers()), there)
	}
	return req, l
}

func (n *node) grow(req *control.LeaseRequest, l *control.LeaseReply, i int) (*control.WorkerGrant, error) {
	n.t.Helper()
	r, err := n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), Worker: uint32(i), ClientBlob: req.ClientBlobs[i]})
	return r.GetWorker(), err
}

// TestGrow adds workers to a lease as cores become free, and gives all of them back with the lease.
func TestGrow(t *testing.T) {
	n := newNode(t)
	var fails atomic.Bool
	n.z.before = func(context.Context, zygote.Spec) error {
		if fails.Load() {
			return errors.New("no fork")
		}
		return nil
	}
	n.e.limits = newLimiter(nil, n.e.incarnation, true, n.e.log)
	n.e.accounts = newAccounts("node", n.e.incarnation, time.Now, nil, n.e.log)
	charged := func(id uint64) uint64 { // cores
		n.e.accounts.sample()
		n.e.accounts.step(t.Context(), newLedgerStub())
		n.e.accounts.mu.Lock()
		defer n.e.accounts.mu.Unlock()
		return n.e.accounts.leases[lease.ID(id)].meter.Save().Cores
	}
	impossible := n.request(2)
	impossible.WorkersMin = 3
	if _, err := n.Lease(n.ctx(), impossible); control.ClassOf(err) != control.ClassInvalid || !strings.Contains(err.Error(), "workers_min 3") {
		t.Errorf("more at least than at most: %v", err)
	}
	held := n.lease(2)
	req, l := n.growing(2)
	if _, err := n.grow(req, l, 2); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("a worker on a full node: %v", err)
	}
	n.release(held.GetLeaseId())
	third, err := n.grow(req, l, 2)
	if err != nil {
		t.Fatal(err)
	}
	if cores := charged(l.GetLeaseId()); cores != 3 {
		t.Errorf("a lease with three of four workers is charged for %d cores", cores)
	}
	if again, err := n.grow(req, l, 2); err != nil || again.GetPid() != third.GetPid() {
		t.Errorf("the same offer again got process %d, not %d: %v", again.GetPid(), third.GetPid(), err)
	}
	fails.Store(true)
	if _, err := n.grow(req, l, 3); err == nil || n.free() != 1 {
		t.Errorf("a start that fails leaves %d free cores, want 1: %v", n.free(), err)
	}
	fails.Store(false)
	admit := func(yes bool) {
		n.e.limits.mu.Lock()
		defer n.e.limits.mu.Unlock()
		n.e.limits.admit = yes
	}
	admit(false)
	if _, err := n.grow(req, l, 3); control.ClassOf(err) != control.ClassBusy || !strings.Contains(err.Error(), "limit") || n.free() != 1 {
		t.Errorf("beyond the tenant's limit: %d free cores: %v", n.free(), err)
	}
	admit(true)
	if _, err := n.grow(req, l, 3); err != nil || n.free() != 0 {
		t.Errorf("the last worker: %d free cores: %v", n.free(), err)
	}
	n.release(l.GetLeaseId())
	if n.free() != 4 {
		t.Errorf("%d free cores after the release, want 4", n.free())
	}
	if used := n.e.limits.tenants["alice"].cores; used != 0 {
		t.Errorf("%d cores of the tenant are counted after the release", used)
	}
}

// TestGrowYields lets clients that wait for leases go first.
func TestGrowYields(t *testing.T) {
	n := newNode(t)
	held := n.lease(3)
	req, l := n.growing(1)
	ctx, done := context.WithCancel(n.ctx())
	waiting, err := n.Room(ctx, &control.RoomRequest{Cores: 2})
	if err != nil {
		t.Fatal(err)
	}
	n.nextRoom(waiting)
	more, err := n.Room(n.ctx(), &control.RoomRequest{Cores: 1, Growing: true})
	if err != nil {
		t.Fatal(err)
	}
	n.nextRoom(more)
	n.release(held.GetLeaseId())
	if !n.nextRoom(waiting) || !n.nextRoom(more) { // three cores: enough for both
		t.Fatal("no room after the release")
	}
	if _, err := n.grow(req, l, 1); err != nil {
		t.Error(err)
	}
	if _, err := n.grow(req, l, 2); control.ClassOf(err) != control.ClassBusy || !strings.Contains(err.Error(), "wait for") {
		t.Errorf("a worker on a core that another client waits for: %v", err)
	}
	done() // the client does not wait any more
	if !n.nextRoom(more) {
		t.Error("no room for the lease after the end of the wait")
	}
	if _, err := n.grow(req, l, 2); err != nil {
		t.Error(err)
	}
}

// TestGrowYieldsForAWhile holds up growth by clients that wait for leases and do not take them.
func TestGrowYieldsForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := &control.InfoReply{Cores: 4, FreeCores: 2, MemoryBytes: 8, FreeMemoryBytes: 8}
		one := &control.RoomRequest{Cores: 1, MemoryBytes: 1, Growing: true}
		r := room{info: func() *control.InfoReply { return node }, firstFor: firstFor}
		r.wait("mallory", &control.RoomRequest{Cores: 4})
		r.wait("mallory", &control.RoomRequest{Cores: 1, MemoryBytes: math.MaxUint64})
		if !r.leaves(node, one) {
			t.Error("growth yields to clients for which there is no room")
		}
		for _, need := range []*control.RoomRequest{{Cores: 2}, {MemoryBytes: 8}} {
			changes := r.changes()
			_, _, done := r.wait("mallory", need)
			if r.leaves(node, one) {
				t.Errorf("growth takes the room that there is for %v", need)
			}
			<-changes // growth looks again
			if !r.leaves(node, one) {
				t.Errorf("growth yields for ever to %v", need)
			}
			done()
			r.wait("mallory", need)
			if !r.leaves(node, one) {
				t.Errorf("growth yields to a client that waits again for %v", need)
			}
			r.took("mallory")
		}
		for range waitingMost {
			r.wait("mallory", &control.RoomRequest{})
		}
		if n := r.tenants["mallory"].clients; n != waitingMost {
			t.Errorf("%d clients of one tenant are counted", n)
		}
	})
}
