package executor

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

var thisProcess = bytes.Repeat([]byte{7}, clientIDSize)

// keepable is a request whose workers may be cached; change may alter it.
func (n *node) keepable(workers int, change ...func(*control.LeaseRequest)) *control.LeaseRequest {
	r := n.request(workers)
	r.ClientId, r.KeepsState = thisProcess, true
	for _, c := range change {
		c(r)
	}
	return r
}

func (n *node) mustLease(r *control.LeaseRequest) *control.LeaseReply {
	n.t.Helper()
	l, err := n.Lease(n.ctx(), r)
	if err != nil {
		n.t.Fatal(err)
	}
	return l
}

// keepLease takes a lease and releases it so that its workers are cached.
func (n *node) keepLease(workers int, change ...func(*control.LeaseRequest)) *control.LeaseReply {
	n.t.Helper()
	l := n.mustLease(n.keepable(workers, change...))
	n.releaseCached(l.GetLeaseId())
	return l
}

func (n *node) releaseCached(id uint64) {
	n.t.Helper()
	r, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: id, Keep: true})
	if err != nil || !r.GetCached() || r.GetCacheMs() == 0 {
		n.t.Fatalf("release of lease %d: %v, %v, want its workers cached", id, r, err)
	}
}

// free checks how many cores are free and how many workers live.
func (n *node) freeAndLiving(cores, workers int) {
	n.t.Helper()
	if c := n.e.table.Capacity(); c.FreeCores != cores {
		n.t.Errorf("%d cores are free, want %d", c.FreeCores, cores)
	}
	eventually(n.t, "the right number of workers", func() bool { return len(n.z.alive()) == workers })
}

// becomesFree is freeAndLiving where workers end by themselves: their cores belong to no lease in between.
func (n *node) becomesFree(cores int) {
	n.t.Helper()
	eventually(n.t, "all workers gone and their cores free", func() bool {
		return len(n.z.alive()) == 0 && n.e.table.Capacity().FreeCores == cores
	})
}

func reuse(id uint64) func(*control.LeaseRequest) {
	return func(r *control.LeaseRequest) { r.Reuse = id }
}

func TestCachedWorkersGoOn(t *testing.T) {
	n := newNode(t)
	first := n.keepLease(2)
	for range 5 {
		n.freeAndLiving(4, 2)
		next := n.mustLease(n.keepable(2, reuse(first.GetLeaseId())))
		if next.GetNotCached() || len(next.GetWorkers()) != 2 || next.GetLeaseId() == first.GetLeaseId() {
			t.Fatalf("the next lease: %v", next)
		}
		for i, w := range next.GetWorkers() {
			if old := first.GetWorkers()[i]; w.GetPid() != old.GetPid() || w.GetStart() != control.StartPath_START_PATH_CACHED ||
				w.GetCpus()[0] != old.GetCpus()[0] {
				t.Errorf("worker %d: %v, want %v, cached", i, w, old)
			}
		}
		n.freeAndLiving(2, 2)
		n.events(next.GetLeaseId()).cancel()
		n.releaseCached(next.GetLeaseId())
		first = next
	}
	// A client that no longer wants the cached workers releases the lease again.
	n.release(first.GetLeaseId())
	n.freeAndLiving(4, 0)
	if r := n.mustLease(n.keepable(2, reuse(first.GetLeaseId()))); !r.GetNotCached() {
		t.Errorf("dropped workers were granted again: %v", r)
	}
}

// Cached workers go only to a request with the same terms. Any other request is told to ask for new workers.
func TestCachedWorkersAreNobodyElses(t *testing.T) {
	n := newNode(t)
	cached := n.keepLease(1)
	for what, change := range map[string]func(*control.LeaseRequest){
		"another tenant":    func(r *control.LeaseRequest) { r.Tenant = "mallory" },
		"another process":   func(r *control.LeaseRequest) { r.ClientId = bytes.Repeat([]byte{8}, clientIDSize) },
		"more memory":       func(r *control.LeaseRequest) { r.MemoryPerWorker = 1 << 29 },
		"more workers":      func(r *control.LeaseRequest) { r.Workers, r.ClientBlobs = 2, n.request(2).ClientBlobs },
		"more cores":        func(r *control.LeaseRequest) { r.CoresPerWorker = 2 },
		"another wait mode": func(r *control.LeaseRequest) { r.WaitMode = control.WaitMode_WAIT_MODE_HOT },
		"another limit":     func(r *control.LeaseRequest) { r.CallLimitMs = 1000 },
		"another lease":     func(r *control.LeaseRequest) { r.Reuse++ },
	} {
		r, err := n.Lease(n.ctx(), n.keepable(1, reuse(cached.GetLeaseId()), change))
		if err != nil || !r.GetNotCached() || r.GetLeaseId() != 0 {
			t.Errorf("%s: %v, %v, want not_cached", what, r, err)
		}
	}
	for what, change := range map[string]func(*control.LeaseRequest){
		"no client":        func(r *control.LeaseRequest) { r.ClientId = nil },
		"a short client":   func(r *control.LeaseRequest) { r.ClientId = []byte{1} },
		"somebody's grant": func(r *control.LeaseRequest) { r.ClientBlobs[0] = []byte("x") },
	} {
		if r, err := n.Lease(n.ctx(), n.keepable(1, reuse(cached.GetLeaseId()), change)); control.ClassOf(err) != control.ClassInvalid {
			t.Errorf("%s: %v, %v, want class invalid", what, r, status.Convert(err).Message())
		}
	}
	if r := n.mustLease(n.keepable(1, reuse(cached.GetLeaseId()))); r.GetNotCached() {
		t.Error("the refused requests have ended the cached workers")
	}
}

// Workers that have executed a function are cached only between leases that keep state.
func TestDirtyWorkersAreNotCached(t *testing.T) {
	n := newNode(t)
	forgets := func(r *control.LeaseRequest) { r.KeepsState = false }
	dirty := n.mustLease(n.keepable(1, forgets))
	if r, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: dirty.GetLeaseId(), Keep: true}); err != nil || r.GetCached() {
		t.Errorf("a worker that was called: %v, %v", r, err)
	}
	n.freeAndLiving(4, 0)
	clean := n.mustLease(n.keepable(1, forgets))
	n.z.alive()[0].uncalled = true
	n.releaseCached(clean.GetLeaseId())
	if l := n.mustLease(n.keepable(1, reuse(clean.GetLeaseId()))); !l.GetNotCached() {
		t.Error("a lease that keeps state got the worker of one that does not")
	}
	if l := n.mustLease(n.keepable(1, forgets, reuse(clean.GetLeaseId()))); l.GetNotCached() {
		t.Error("the worker that was not called is not cached")
	}
	kept := n.keepLease(1)
	if l := n.mustLease(n.keepable(1, forgets, reuse(kept.GetLeaseId()))); !l.GetNotCached() {
		t.Error("a lease that does not keep state got the worker of one that does")
	}
}

// Workers that could not be suspended are not resumed, even if a lease has taken them meanwhile: their answer may still come, and would be taken for that
// to a later request.
func TestFailedSuspensionEndsWorkers(t *testing.T) {
	n := newNode(t)
	l := n.keepLease(1)
	w, k := n.z.alive()[0], n.e.cached[lease.ID(l.GetLeaseId())]
	k.awake = true // as after a release whose workers can be claimed
	began, may := make(chan struct{}), make(chan struct{})
	w.suspend = func() error {
		w.suspend = nil
		close(began)
		<-may
		return errors.New("no answer")
	}
	cooled := make(chan struct{})
	go func() { defer close(cooled); n.e.cool(k) }()
	<-began
	granted := make(chan *control.LeaseReply, 1)
	go func() {
		granted <- n.mustLease(n.keepable(1, func(r *control.LeaseRequest) { r.Reuse = l.GetLeaseId() }))
	}()
	eventually(t, "the lease has taken the workers", func() bool {
		n.e.mu.Lock()
		defer n.e.mu.Unlock()
		return n.e.cached[k.id] == nil
	})
	close(may)
	<-cooled
	if r := <-granted; len(r.GetWorkers()) != 0 { // the client offers new channels next
		t.Errorf("the lease has the workers %v", r.GetWorkers())
	}
	if !w.killed.Load() {
		t.Error("the worker that could not be suspended was not killed")
	}
}

func TestNotCached(t *testing.T) {
	n := newNode(t)
	plain := n.lease(1) // without a client id
	r, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: plain.GetLeaseId(), Keep: true})
	if err != nil || r.GetCached() {
		t.Errorf("the workers of a client without an id: %v, %v", r, err)
	}
	n.freeAndLiving(4, 0)
	stubborn := n.mustLease(n.keepable(1))
	n.z.alive()[0].stubborn = true
	if r, err = n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: stubborn.GetLeaseId(), Keep: true}); err != nil || r.GetCached() {
		t.Errorf("a worker that does not come to rest: %v, %v", r, err)
	}
	n.freeAndLiving(4, 0)
	half := n.mustLease(n.keepable(2))
	workers := n.z.alive()
	workers[0].stubborn = true
	if r, err = n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: half.GetLeaseId(), Keep: true}); err != nil || r.GetCached() {
		t.Errorf("two workers of which one does not come to rest: %v, %v", r, err)
	}
	if w := workers[1]; !w.suspended || !w.stopped.Load() || w.killed.Load() {
		t.Errorf("the other worker: suspended %t, stopped %t, killed %t, want that it was suspended and ended by itself", w.suspended,
			w.stopped.Load(), w.killed.Load())
	}
	n.freeAndLiving(4, 0)
	dead := n.mustLease(n.keepable(1))
	n.z.alive()[0].die(zygote.Exit{Signal: 11})
	eventually(t, "it is dead", func() bool { return len(n.z.alive()) == 0 })
	if r, err = n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: dead.GetLeaseId(), Keep: true}); err != nil || r.GetCached() {
		t.Errorf("a worker that is dead: %v, %v", r, err)
	}
	n.freeAndLiving(4, 0)

	off := newNode(t, func(c *Config) { c.Settings.CacheTime = 0 })
	l := off.mustLease(off.keepable(1))
	if r, err = off.Release(off.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId(), Keep: true}); err != nil || r.GetCached() {
		t.Errorf("cache-time 0: %v, %v", r, err)
	}
	off.freeAndLiving(4, 0)
}

// Cached workers end for leases that need their cores, for newer cached leases, with their client's connection, and in a drain.
func TestCachedWorkersGiveWay(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.CacheMost = 2; c.Settings.CacheTime = time.Hour })
	a, b := n.keepLease(2), n.keepLease(1)
	n.freeAndLiving(4, 3)
	n.keepLease(1) // the third of two
	n.freeAndLiving(4, 2)
	if r := n.mustLease(n.keepable(2, reuse(a.GetLeaseId()))); !r.GetNotCached() {
		t.Error("the oldest was cached beyond the number")
	}
	whole := n.lease(4)
	n.freeAndLiving(0, 4)
	if r, err := n.Lease(n.ctx(), n.keepable(1, reuse(b.GetLeaseId()))); err != nil || !r.GetNotCached() {
		t.Errorf("an evicted one: %v, %v", r, err)
	}
	n.release(whole.GetLeaseId())

	conn := n.dial()
	other := control.NewExecutorClient(conn)
	l, err := other.Lease(n.ctx(), n.keepable(1))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := other.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId(), Keep: true}); err != nil || !r.GetCached() {
		t.Fatalf("%v, %v", r, err)
	}
	began := time.Now()
	n.freeAndLiving(4, 1)
	conn.Close()
	n.becomesFree(4)
	t.Logf("gone %v after their client", time.Since(began).Round(time.Millisecond))
}

// They also end after the cache time.
func TestCachedWorkersEndAfterATime(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.CacheTime = 100 * time.Millisecond })
	before := time.Now()
	n.keepLease(1)
	n.becomesFree(4)
	if d := time.Since(before); d < 100*time.Millisecond {
		t.Errorf("cached for %v, want 100 ms", d)
	}
}

func TestCachedWorkersEndWithADrain(t *testing.T) {
	n := newNode(t)
	n.keepLease(2)
	held := n.mustLease(n.keepable(1))
	ctx, cancel := context.WithTimeout(context.Background(), testBound)
	defer cancel()
	n.e.BeginDrain()
	if r, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: held.GetLeaseId(), Keep: true}); err != nil || r.GetCached() {
		t.Errorf("cached while the node drains: %v, %v", r, err)
	}
	n.e.DrainUntil(ctx, drainReason)
	n.freeAndLiving(4, 0)
}

// The executor notices at once that a cached worker has died. A lease that asks for it at that moment is told to ask for a new worker.
func TestCachedWorkerDies(t *testing.T) {
	n := newNode(t)
	for range 20 {
		l := n.keepLease(2)
		w := n.z.alive()[1]
		go w.die(zygote.Exit{Signal: 9})
		r := n.mustLease(n.keepable(2, reuse(l.GetLeaseId())))
		if !r.GetNotCached() { // resumed before it died: its client hears of it
			n.release(r.GetLeaseId())
		}
		// The client may be told so before the other worker is reaped.
		eventually(t, "the cores are free", func() bool { return n.e.table.Capacity().FreeCores == 4 })
		n.freeAndLiving(4, 0)
	}
}

// Cached workers are charged to no tenant, and a lease is charged for its own calls only.
func TestCachedWorkersAreFree(t *testing.T) {
	n := newNode(t)
	n.e.accounts = newAccounts("node", [16]byte{1}, n.e.now, nil, n.e.log)
	first := n.keepLease(1)
	entries := n.e.accounts.measure()
	if len(entries) != 1 || !entries[0].Final || entries[0].Key.Lease != first.GetLeaseId() {
		t.Fatalf("after the release: %+v, want the account of lease %d, final", entries, first.GetLeaseId())
	}
	if e := n.e.accounts.measure(); len(e) != 0 {
		t.Errorf("while they are cached: %+v", e)
	}
	next := n.mustLease(n.keepable(1, reuse(first.GetLeaseId())))
	entries = n.e.accounts.measure()
	if len(entries) != 1 || entries[0].Final || entries[0].Key.Lease != next.GetLeaseId() {
		t.Errorf("in the next lease: %+v", entries)
	}
	if l, err := n.e.table.Get(lease.ID(next.GetLeaseId())); err != nil || l.Reuses != lease.ID(first.GetLeaseId()) {
		t.Errorf("%+v, %v", l, err)
	}
}

// The time of a claimed lease runs from the claim on, so it can be over before the executor has booked the claim.
func TestClaimedLeaseEndsWhileItIsBooked(t *testing.T) {
	n := newNode(t)
	first := lease.ID(n.keepLease(1).GetLeaseId())
	n.e.mu.Lock()
	k := n.e.cached[first]
	n.e.mu.Unlock()
	const id = 99
	ended := make(chan struct{})
	k.workers[0].(*fakeWorker).claimed = func() {
		h, err := n.e.beginEnd(t.Context(), id, lease.Expired, "")
		if err != nil {
			t.Error(err)
			return
		}
		go func() {
			defer close(ended)
			n.e.finishEnd(context.Background(), h, killed)
		}()
	}
	n.e.book(t.Context(), context.Background(), k, "", id, 0)
	<-ended
	n.becomesFree(4)
	n.e.work.Wait()
}
