package executor

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/lease"
	"google.golang.org/protobuf/proto"
)

var segfault = zygote.Exit{Signal: 11, Reason: "signal 11 (SIGSEGV)", OutputTail: []byte("last words")}

func TestWorkerDeathIsReported(t *testing.T) {
	n := newNode(t)
	l := n.lease(3)
	ev := n.events(l.GetLeaseId())
	w := n.z.alive()[0]
	var index uint32
	for i, g := range l.GetWorkers() {
		if int(g.GetPid()) == w.pid {
			index = uint32(i)
		}
	}
	w.die(segfault)
	e := ev.want(control.Event_KIND_WORKER_DIED)
	if e.GetWorker() != index || e.GetReason() != segfault.Reason || string(e.GetOutputTail()) != "last words" || int(e.GetPid()) != w.pid {
		t.Errorf("event %v", e)
	}
	if n.free() != 1 {
		t.Errorf("%d cores free: a dead worker's core stays with its lease", n.free())
	}
	n.release(l.GetLeaseId())
	ev.want(control.Event_KIND_LEASE_ENDED) // and no further deaths before it
}

// A death before the stream opens, or between two streams, is reported.
func TestDeathIsToldToALateStream(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	n.z.alive()[0].die(segfault)
	eventually(t, "the worker is reaped", func() bool { return len(n.z.alive()) == 0 })
	for range 2 {
		ev := n.events(l.GetLeaseId())
		ev.want(control.Event_KIND_WORKER_DIED)
		ev.cancel()
	}
}

func TestReplace(t *testing.T) {
	n := newNode(t)
	l := n.lease(2)
	id := l.GetLeaseId()
	ev := n.events(id)
	replace := func(worker uint32, blob []byte) (*control.ReplaceReply, error) {
		return n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: id, Worker: worker, ClientBlob: blob})
	}
	_, err := replace(2, clientBlob(invoke.ProviderSHM))
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "worker 2", "0 to 1")
	_, err = replace(1, nil)
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "client_blob", "0 bytes")
	_, err = n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: 1, ClientBlob: clientBlob(invoke.ProviderSHM)})
	wantError(t, err, codes.NotFound, control.ClassLease, "lease 1:")

	victim := func() *fakeWorker {
		h, err := n.e.find(lease.ID(id))
		if err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.seats[1].worker.(*fakeWorker)
	}
	for range 3 {
		w := victim()
		w.die(segfault)
		if e := ev.want(control.Event_KIND_WORKER_DIED); e.GetWorker() != 1 || int(e.GetPid()) != w.pid {
			t.Fatalf("event %v", e)
		}
		r, err := replace(1, clientBlob(invoke.ProviderSHM))
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(r.GetWorker().GetCpus()) != fmt.Sprint(l.GetWorkers()[1].GetCpus()) || int(r.GetWorker().GetPid()) == w.pid {
			t.Errorf("replacement %v for %v", r.GetWorker(), l.GetWorkers()[1])
		}
	}

	// A worker that does not start leaves the seat free for another attempt.
	victim().die(segfault)
	ev.want(control.Event_KIND_WORKER_DIED)
	n.z.before = func(context.Context, zygote.Spec) error { return &zygote.WorkerError{Status: -203, Text: "blob"} }
	_, err = replace(1, clientBlob(invoke.ProviderSHM))
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "blob")
	n.z.before = nil
	if _, err = replace(1, clientBlob(invoke.ProviderSHM)); err != nil {
		t.Fatal(err)
	}
	n.release(id)
	_, err = replace(1, clientBlob(invoke.ProviderSHM))
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "released")
}

// A client that cannot reach a living worker, or that never heard of it because the answer was lost, gets another one
// for a new blob, and the same one for the same blob.
func TestReplaceOfALivingWorker(t *testing.T) {
	n := newNode(t)
	id := n.lease(1).GetLeaseId()
	ev := n.events(id)
	replace := func(blob []byte) int32 {
		t.Helper()
		r, err := n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: id, ClientBlob: blob})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetWorker().GetPid()
	}
	first := n.z.alive()[0]
	blob := clientBlob(invoke.ProviderSHM)
	second := replace(blob)
	if !first.killed.Load() || int(second) == first.pid {
		t.Errorf("the living worker %d was killed: %t; its replacement is %d", first.pid, first.killed.Load(), second)
	}
	if again := replace(blob); again != second {
		t.Errorf("the same blob got worker %d, then %d", second, again)
	}
	third := replace(clientBlob(invoke.ProviderSHM))
	if list := n.z.alive(); len(list) != 1 || int32(list[0].pid) != third {
		t.Errorf("%d workers alive, want worker %d alone", len(list), third)
	}
	// The late reports about earlier workers do not end it.
	n.z.alive()[0].die(segfault)
	for {
		e, err := ev.s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if e.GetPid() == third {
			break
		}
	}
	n.release(id)
}

// Two requests for one seat run one after the other. The blob of the later one stays, and no core ever has two workers.
func TestReplaceTwiceAtOnce(t *testing.T) {
	n := newNode(t)
	id := n.lease(1).GetLeaseId()
	n.z.alive()[0].die(segfault)
	entered, gate := make(chan struct{}, 2), make(chan struct{})
	n.z.before = func(context.Context, zygote.Spec) error {
		entered <- struct{}{}
		<-gate
		return nil
	}
	pids := make(chan int32, 3)
	blob := clientBlob(invoke.ProviderSHM)
	ask := func(blob []byte) {
		r, err := n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: id, ClientBlob: blob})
		if err != nil {
			t.Error(err)
		}
		pids <- r.GetWorker().GetPid()
	}
	go ask(blob)
	<-entered
	go ask(blob)
	impatient, cancel := context.WithTimeout(anOperator(n.ctx()), 20*time.Millisecond)
	defer cancel()
	// Not over the connection: there the server's deadline is a little later than the caller's, who opens the gate.
	_, err := n.e.Replace(impatient, &control.ReplaceRequest{LeaseId: id, ClientBlob: clientBlob(invoke.ProviderSHM)})
	wantError(t, err, codes.Unavailable, control.ClassConnection, "replaced")
	close(gate)
	if a, b := <-pids, <-pids; a != b {
		t.Errorf("the same blob got workers %d and %d", a, b)
	}
	n.release(id)
}

// A lease that expires while its worker is replaced ends the replacement with it.
func TestExpiryDuringReplace(t *testing.T) {
	n := newNode(t)
	var granted, replaced atomic.Bool
	n.z.before = func(ctx context.Context, _ zygote.Spec) error {
		if !granted.Load() {
			return nil
		}
		replaced.Store(true)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	var err error
	for d := uint64(500); !replaced.Load(); d *= 2 { // until the request comes before the lease's end
		granted.Store(false)
		r := n.request(1)
		r.DurationMs = proto.Uint64(d)
		l, lerr := n.Lease(n.ctx(), r)
		if lerr != nil {
			t.Fatal(lerr)
		}
		granted.Store(true)
		if _, err = n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), ClientBlob: clientBlob(invoke.ProviderSHM)}); err == nil {
			t.Fatal("a worker of a lease that has ended was replaced")
		}
	}
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "ending")
	eventually(t, "the cores are free", func() bool { return n.free() == 4 })
}

// A lease that ends while a replacement starts takes the replacement with it.
func TestReplaceDuringRelease(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	ev := n.events(l.GetLeaseId())
	n.z.alive()[0].die(segfault)
	ev.want(control.Event_KIND_WORKER_DIED)
	released := make(chan error, 1)
	n.z.before = func(ctx context.Context, _ zygote.Spec) error {
		go func() {
			_, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
			released <- err
		}()
		<-ctx.Done() // the end of the lease ends the start
		return nil   // but it was too late
	}
	_, err := n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), ClientBlob: clientBlob(invoke.ProviderSHM)})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "released")
	if err := <-released; err != nil {
		t.Fatal(err)
	}
	if n.free() != 4 || len(n.z.alive()) != 0 {
		t.Errorf("%d cores free, %d workers alive", n.free(), len(n.z.alive()))
	}
}

func TestClientThatNeverComes(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.ClientFirstUse = 20 * time.Millisecond })
	l := n.lease(4)
	eventually(t, "the lease has ended", func() bool { return n.free() == 4 })
	if len(n.z.alive()) != 0 {
		t.Errorf("%d workers alive with all cores free", len(n.z.alive()))
	}
	s, err := n.Events(n.ctx(), &control.EventsRequest{LeaseId: l.GetLeaseId()})
	if err == nil {
		_, err = s.Recv()
	}
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "revoked", "did not open")
}

// If a client dies between the grant and its event stream, the executor notices it by the end of the connection.
func TestClientThatDiesBeforeItComes(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.ClientFirstUse, c.Settings.ClientReturn = time.Hour, 20*time.Millisecond })
	var holds atomic.Bool
	began, goOn := make(chan struct{}), make(chan struct{})
	n.z.before = func(context.Context, zygote.Spec) error {
		if holds.Load() {
			close(began)
			<-goOn
		}
		return nil
	}
	other := n.dial()
	if _, err := control.NewExecutorClient(other).Lease(n.ctx(), n.request(2)); err != nil {
		t.Fatal(err)
	}
	stays := n.lease(1) // asked for on another connection
	other.Close()
	eventually(t, "the lease has ended", func() bool { return n.free() == 3 })
	n.events(stays.GetLeaseId())

	// Likewise when the connection ends while the workers start.
	other = n.dial()
	holds.Store(true)
	ctx, cancel := context.WithCancel(n.ctx())
	asked := make(chan struct{})
	go func() {
		control.NewExecutorClient(other).Lease(ctx, n.request(1))
		close(asked)
	}()
	<-began
	other.Close()
	<-asked
	cancel()
	close(goOn)
	eventually(t, "the lease has ended", func() bool { return n.free() == 3 })
}

func TestClientThatDies(t *testing.T) {
	n := newNode(t, func(c *Config) {
		c.Settings.ClientReturn, c.Settings.AgentGrace = 20*time.Millisecond, 20*time.Millisecond
	})
	other := n.dial()
	ctx := n.ctx()
	l, err := control.NewExecutorClient(other).Lease(ctx, n.request(2))
	if err != nil {
		t.Fatal(err)
	}
	s, err := control.NewExecutorClient(other).Events(ctx, &control.EventsRequest{LeaseId: l.GetLeaseId()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	other.Close()
	eventually(t, "the lease has ended", func() bool { return n.free() == 4 })
	_, err = n.Release(ctx, &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "revoked", "went away")
}

func TestClientThatComesBack(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.ClientReturn = time.Hour })
	l := n.lease(1)
	n.events(l.GetLeaseId()).cancel()
	ev := n.events(l.GetLeaseId())
	n.z.alive()[0].die(segfault)
	ev.want(control.Event_KIND_WORKER_DIED)
	n.release(l.GetLeaseId())
	ev.want(control.Event_KIND_LEASE_ENDED)
}

// Only the newest stream counts: the late end of an older stream changes nothing.
func TestNewerStreamTakesOver(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.ClientReturn, c.Settings.AgentGrace = time.Nanosecond, time.Nanosecond })
	l := n.lease(1)
	old := n.events(l.GetLeaseId())
	ev := n.events(l.GetLeaseId())
	if _, err := old.s.Recv(); status.Code(err) != codes.Aborted || control.ClassOf(err) != control.ClassConnection {
		t.Errorf("old stream: %v", err)
	}
	n.z.alive()[0].die(segfault)
	ev.want(control.Event_KIND_WORKER_DIED)
	n.release(l.GetLeaseId())
}

func TestExpiry(t *testing.T) {
	n := newNode(t)
	req := n.request(2)
	req.DurationMs = proto.Uint64(3300) // a third of it, the time between the two events, is longer than a machine stands still
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	ev := n.events(l.GetLeaseId())
	ev.want(control.Event_KIND_EXPIRING)
	if e := ev.want(control.Event_KIND_LEASE_ENDED); !strings.Contains(e.GetReason(), "expired") {
		t.Errorf("reason %q", e.GetReason())
	}
	ev.wantEnd()
	eventually(t, "the cores are free", func() bool { return n.free() == 4 })
	_, err = n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "expired")
}

func TestDrain(t *testing.T) {
	n := newNode(t)
	a, b := n.lease(2), n.lease(1)
	ea, eb := n.events(a.GetLeaseId()), n.events(b.GetLeaseId())
	running := n.z.alive()
	n.e.DrainUntil(n.ctx(), drainReason)
	for _, ev := range []*events{ea, eb} {
		ev.want(control.Event_KIND_DRAINING)
		if e := ev.want(control.Event_KIND_LEASE_ENDED); !strings.Contains(e.GetReason(), "draining") {
			t.Errorf("reason %q", e.GetReason())
		}
		ev.wantEnd()
	}
	for _, w := range running {
		if !w.stopped.Load() || w.killed.Load() {
			t.Errorf("worker %d: asked to stop: %t, killed: %t", w.pid, w.stopped.Load(), w.killed.Load())
		}
	}
	if n.free() != 4 {
		t.Errorf("%d cores free", n.free())
	}
	_, err := n.Lease(n.ctx(), n.request(1))
	if i, ierr := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: 1}); ierr != nil || !i.GetDraining() {
		t.Errorf("info %v, %v", i, ierr)
	}
	// The code is gone with the drain, so an answer that the code is unknown would send the client uploading.
	wantError(t, err, codes.Unavailable, control.ClassBusy, "draining")
}

func TestDrainIsBounded(t *testing.T) {
	n := newNode(t)
	n.lease(2)
	for _, w := range n.z.alive() {
		w.stubborn = true
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	n.e.DrainUntil(ctx, drainReason)
	if len(n.z.alive()) != 0 {
		t.Errorf("%d workers alive", len(n.z.alive()))
	}
}

func TestDrainDuringLease(t *testing.T) {
	n := newNode(t)
	entered := make(chan struct{}, 4)
	n.z.before = func(ctx context.Context, _ zygote.Spec) error {
		entered <- struct{}{}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	failed := make(chan error, 1)
	go func() {
		_, err := n.Lease(n.ctx(), n.request(2))
		failed <- err
	}()
	<-entered
	n.e.DrainUntil(n.ctx(), drainReason)
	wantError(t, <-failed, codes.Unavailable, control.ClassBusy, "drains")
}

// TestHammer leases, kills, replaces, disconnects and releases from many sides. The fake checks that no core ever has two
// workers; the node's clean-up checks that all capacity is back.
func TestHammer(t *testing.T) {
	n := newNode(t, func(c *Config) {
		c.Cores = testCores(8)
		c.Settings.ClientReturn, c.Settings.AgentGrace = time.Millisecond, time.Millisecond
	})
	n.z.before = func(context.Context, zygote.Spec) error {
		if rand.IntN(20) == 0 {
			return &zygote.WorkerError{Status: -204, Text: "no luck"}
		}
		return nil
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 40 {
				n.hammerOnce(t)
			}
		})
	}
	stop := make(chan struct{})
	var killer sync.WaitGroup
	killer.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if list := n.z.alive(); len(list) > 0 {
				list[rand.IntN(len(list))].die(segfault)
			}
		}
	})
	wg.Wait()
	close(stop)
	killer.Wait()
	n.z.before = nil
	eventually(t, "all cores are free", func() bool { return n.free() == 8 })
}

func (n *node) hammerOnce(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), testBound)
	defer cancel()
	l, err := n.Lease(ctx, n.request(1+rand.IntN(4)))
	if err != nil {
		if c := control.ClassOf(err); c != control.ClassBusy && c != control.ClassInvalid {
			t.Errorf("lease: %v", err)
		}
		return
	}
	id := l.GetLeaseId()
	s, err := n.Events(ctx, &control.EventsRequest{LeaseId: id})
	if err != nil {
		t.Errorf("events: %v", err)
		return
	}
	leave := rand.IntN(3) == 0 // without a word
	released, failed := false, false
	for {
		e, err := s.Recv()
		if err != nil {
			if err != io.EOF && control.ClassOf(err) != control.ClassLease {
				t.Errorf("stream: %v", err)
			}
			return
		}
		switch e.GetKind() {
		case control.Event_KIND_WORKER_DIED:
			_, err := n.Replace(ctx, &control.ReplaceRequest{LeaseId: id, Worker: e.GetWorker(), ClientBlob: clientBlob(invoke.ProviderSHM)})
			if c := control.ClassOf(err); err != nil && c != control.ClassInvalid && c != control.ClassLease {
				t.Errorf("replace: %v", err)
			}
			failed = err != nil // then nothing may ever happen again
		case control.Event_KIND_LEASE_ENDED:
			return
		}
		if leave {
			return
		}
		if !released && (failed || rand.IntN(2) == 0) {
			released = true
			if _, err := n.Release(ctx, &control.ReleaseRequest{LeaseId: id}); err != nil {
				t.Errorf("release: %v", err)
			}
		}
	}
}
