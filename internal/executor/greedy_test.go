package executor

import (
	"strings"
	"sync"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
)

// seated is the first worker of a lease.
func (n *node) seated(id uint64) *fakeWorker {
	n.t.Helper()
	h, err := n.e.find(lease.ID(id))
	if err != nil {
		n.t.Fatal(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seats[0].worker.(*fakeWorker)
}

// A client that never reads its event stream costs the executor nothing: what its workers leave behind is not queued, and
// neither other clients, nor the end of its lease, nor the drain (newNode's) wait for it.
func TestClientThatReadsNothing(t *testing.T) {
	n := newNode(t)
	id := n.lease(1).GetLeaseId()
	if _, err := n.Events(n.ctx(), &control.EventsRequest{LeaseId: id}); err != nil {
		t.Fatal(err)
	}
	death := zygote.Exit{Signal: 11, Reason: "killed by SIGSEGV", OutputTail: []byte(strings.Repeat("o", 32<<10)), Backtrace: strings.Repeat("b", 32<<10)}
	const deaths = 300 // 20 MB, if the executor kept it
	for range deaths {
		w := n.seated(id)
		w.die(death)
		<-w.done
		if _, err := n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: id, ClientBlob: clientBlob(invoke.ProviderSHM)}); err != nil {
			t.Fatal(err)
		}
	}
	other := n.lease(2)
	ev := n.events(other.GetLeaseId())
	n.seated(other.GetLeaseId()).die(segfault)
	ev.want(control.Event_KIND_WORKER_DIED)
	n.release(other.GetLeaseId())
	ev.want(control.Event_KIND_LEASE_ENDED)
	n.release(id)
	eventually(t, "all cores are free", func() bool { return n.free() == 4 })
}

// Requests that cannot be granted leave nothing behind, however many there are, and who may be granted something still is.
func TestFloodOfRequests(t *testing.T) {
	n := newNode(t)
	l := n.lease(4) // all there is
	n.events(l.GetLeaseId())
	flood, each := 16, 500
	if testing.Short() {
		each = 100
	}
	var wg sync.WaitGroup
	for range flood {
		wg.Go(func() {
			for i := range each {
				r := n.request(1 + i%6)
				_, err := n.Lease(n.ctx(), r)
				if c := control.ClassOf(err); c != control.ClassBusy && c != control.ClassInvalid {
					t.Errorf("%d workers of none: %v", len(r.GetClientBlobs()), err)
				}
			}
		})
	}
	wg.Wait()
	n.e.mu.Lock()
	holdings, coming := len(n.e.holdings), n.e.coming.cores
	n.e.mu.Unlock()
	if c := n.e.table.Capacity(); holdings != 1 || coming != 0 || c.Leases != 1 {
		t.Errorf("%d requests leave %d holdings, %d leases, %d cores that are to come", flood*each, holdings, c.Leases, coming)
	}
	if left := n.z.alive(); len(left) != 4 {
		t.Errorf("%d workers, want the lease's 4", len(left))
	}
	n.release(l.GetLeaseId())
	n.release(n.lease(4).GetLeaseId())
}
