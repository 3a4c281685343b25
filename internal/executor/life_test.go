package executor

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"google.golang.org/protobuf/proto"
)

func (n *node) renew(id uint64, d time.Duration) (*control.RenewReply, error) {
	return n.Renew(n.ctx(), &control.RenewRequest{LeaseId: id, DurationMs: proto.Uint64(uint64(d.Milliseconds()))})
}

func TestRenew(t *testing.T) {
	n := newNode(t)
	req := n.request(1)
	req.DurationMs = proto.Uint64(4500) // what is left after the notice must do for the renewal
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	if l.GetDurationMs() != 4500 || l.GetClientMs() > 4050 || l.GetClientMs() == 0 {
		t.Errorf("a lease of 4.5 s: %d ms, of which the client has %d", l.GetDurationMs(), l.GetClientMs())
	}
	ev := n.events(l.GetLeaseId())
	if e := ev.want(control.Event_KIND_EXPIRING); e.GetInMs() > 1500 {
		t.Errorf("a lease of 4.5 s is told to expire in %d ms, want at most a third", e.GetInMs())
	}
	r, err := n.renew(l.GetLeaseId(), time.Minute)
	if err != nil || r.GetDurationMs() > 60_000 || r.GetDurationMs() < 30_000 || r.GetClientMs() >= r.GetDurationMs() {
		t.Fatalf("renewed: %v, %v", r, err)
	}
	if again, err := n.renew(l.GetLeaseId(), time.Second); err != nil || again.GetDurationMs() < 30_000 {
		t.Errorf("renewed for less than is left: %v, %v", again, err)
	}
	if again, err := n.Renew(n.ctx(), &control.RenewRequest{LeaseId: l.GetLeaseId()}); err != nil || again.GetDurationMs() < 30_000 {
		t.Errorf("renewed for what it was granted for: %v, %v", again, err)
	}
	list, err := n.Leases(n.ctx(), &control.LeasesRequest{})
	if err != nil || len(list.GetLeases()) != 1 {
		t.Fatalf("leases %v, %v", list, err)
	}
	if e := list.GetLeases()[0]; e.GetLeaseId() != l.GetLeaseId() || e.GetState() != "active" || e.GetTenant() != "alice" ||
		e.GetWorkers() != 1 || fmt.Sprint(e.GetCpus()) != "[0]" || e.GetLeftMs() < 30_000 || e.GetMemoryBytes() != 1<<30 {
		t.Errorf("entry %v", e)
	}
	n.release(l.GetLeaseId())
	ev.want(control.Event_KIND_LEASE_ENDED)
	_, err = n.renew(l.GetLeaseId(), time.Minute)
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "released")
}

func TestBadRenewals(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	_, err := n.renew(42, time.Minute)
	wantError(t, err, codes.NotFound, control.ClassLease, "lease 42")
	_, err = n.Renew(n.ctx(), &control.RenewRequest{LeaseId: l.GetLeaseId(), DurationMs: proto.Uint64(0)})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "duration_ms 0", "1h")
	_, err = n.Renew(n.ctx(), &control.RenewRequest{LeaseId: l.GetLeaseId(), DurationMs: proto.Uint64(86_400_001)})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "86400001", "24h")
	_, err = n.Renew(n.ctx(), &control.RenewRequest{LeaseId: l.GetLeaseId(), DurationMs: proto.Uint64(1 << 63)})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "9223372036854775808")
	n.e.BeginDrain()
	_, err = n.renew(l.GetLeaseId(), time.Minute)
	wantError(t, err, codes.Unavailable, control.ClassBusy, "draining")
	n.release(l.GetLeaseId())
}

// A stream that is opened late still hears that the end is near; one that has been told is not told again.
func TestNoticeIsToldToALateStream(t *testing.T) {
	n := newNode(t)
	req := n.request(1)
	req.DurationMs = proto.Uint64(20_000)
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	n.events(l.GetLeaseId()).cancel()
	h := n.e.holding(leaseID(l))
	h.expiring(time.Now().Add(time.Hour))
	for range 2 {
		ev := n.events(l.GetLeaseId())
		ev.want(control.Event_KIND_EXPIRING)
		ev.cancel()
	}
	if _, err := n.renew(l.GetLeaseId(), time.Minute); err != nil {
		t.Fatal(err)
	}
	ev := n.events(l.GetLeaseId())
	n.release(l.GetLeaseId())
	ev.want(control.Event_KIND_LEASE_ENDED)
}

func TestRevoke(t *testing.T) {
	n := newNode(t)
	l := n.lease(2)
	ev := n.events(l.GetLeaseId())
	_, err := n.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: l.GetLeaseId(), Reason: strings.Repeat("x", 300)})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "300 bytes")
	workers := n.z.alive()
	if _, err := n.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: l.GetLeaseId(), Reason: "needed elsewhere"}); err != nil {
		t.Fatal(err)
	}
	if n.free() != 4 {
		t.Errorf("%d cores free when Revoke has returned", n.free())
	}
	for _, w := range workers {
		if !w.killed.Load() || w.stopped.Load() {
			t.Error("a worker of a revoked lease was asked to stop and not killed")
		}
	}
	if e := ev.want(control.Event_KIND_LEASE_ENDED); e.GetReason() != "revoked: needed elsewhere" {
		t.Errorf("reason %q", e.GetReason())
	}
	_, err = n.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: l.GetLeaseId()})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "needed elsewhere")
}

// A client that gives its lease back when it is told of the drain ends it early.
func TestDrainEndsWithItsClients(t *testing.T) {
	n := newNode(t)
	l := n.lease(3)
	ev := n.events(l.GetLeaseId())
	workers := n.z.alive()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	drained := make(chan time.Duration, 1)
	go func() {
		began := time.Now()
		n.e.DrainUntil(ctx, "maintenance")
		drained <- time.Since(began)
	}()
	if e := ev.want(control.Event_KIND_DRAINING); e.GetReason() != "maintenance" || e.GetInMs() < 1_800_000 || e.GetInMs() > 3_600_000 {
		t.Errorf("event %v", e)
	}
	if _, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId(), Finish: true}); err != nil {
		t.Fatal(err)
	}
	if e := ev.want(control.Event_KIND_LEASE_ENDED); !strings.HasPrefix(e.GetReason(), "drained") {
		t.Errorf("reason %q", e.GetReason())
	}
	if took := <-drained; took > 30*time.Minute {
		t.Errorf("the drain took %v", took)
	}
	for _, w := range workers {
		if !w.finished.Load() || w.killed.Load() {
			t.Errorf("worker %d: asked to finish: %t, killed: %t", w.pid, w.finished.Load(), w.killed.Load())
		}
	}
}

// serving starts serveWith with one core and returns its client, and what ends it.
func serving(t *testing.T, z *fakeSpawner, grace time.Duration) (c control.ExecutorClient, term, kill func(), done chan error) {
	t.Helper()
	s := testSettings(t)
	s.AddressFile = t.TempDir() + "/address"
	s.Cores, s.Memory, s.Grace = config.Cores{Count: 1}, 1<<30, grace
	ctx, term := context.WithCancel(context.Background())
	now, kill := context.WithCancel(context.Background())
	t.Cleanup(kill)
	t.Cleanup(term)
	done = make(chan error, 1)
	go func() { done <- serveWith(ctx, now, s, z, Handover{}, slog.New(slog.DiscardHandler)) }()
	conn, err := control.Dial(waitAddress(t, s.AddressFile), control.DialConfig{SecretFile: s.SecretFile})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return control.NewExecutorClient(conn), term, kill, done
}

func TestDrainOverTheControlPort(t *testing.T) {
	c, _, _, done := serving(t, &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}, time.Hour)
	_, err := c.Drain(t.Context(), &control.DrainRequest{GraceMs: 1 << 60})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "grace_ms 1152921504606846976", "24h")
	for range 2 { // asking twice is once
		if _, err := c.Drain(t.Context(), &control.DrainRequest{GraceMs: 1000, Reason: "maintenance"}); err != nil && control.ClassOf(err) != control.ClassConnection {
			t.Error(err)
		}
	}
	if err := <-done; err != nil {
		t.Errorf("serve: %v", err)
	}
}

// The second signal ends a drain that waits for a call.
func TestSecondSignal(t *testing.T) {
	z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
	c, term, kill, done := serving(t, z, time.Hour)
	n := &node{t: t}
	lib := compile(t, "int f(void) { return 1; }", "-shared", "-fPIC")
	n.sum = upload(t, c, lib)
	req := n.request(1)
	if _, err := c.Lease(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	w := z.alive()[0]
	w.stubborn = true
	term()
	eventually(t, "the worker is asked to finish", w.stopped.Load)
	select {
	case err := <-done:
		t.Fatalf("the executor ended (%v) with a call running", err)
	default:
	}
	kill()
	if err := <-done; err != nil || !w.killed.Load() {
		t.Errorf("serve: %v; the worker was killed: %t", err, w.killed.Load())
	}
}
