package client_test

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// grows waits until a lease of four workers has grown, and checks the events and that calls reach all workers.
func grows(t *testing.T, l *client.Lease, from, to int, events <-chan client.Event) {
	t.Helper()
	for i := from; i < to; i++ {
		want := fmt.Sprintf("the lease has %d of 4 workers", i+1)
		if e := ends(t, "the growth of the lease", events); e.Kind != client.EventWorkerAdded || e.Worker != i || e.Reason != want {
			t.Errorf("event %+v, want worker %d and %q", e, i, want)
		}
	}
	if n := l.Workers(); n != to {
		t.Errorf("%d workers, want %d", n, to)
	}
	echo, pids := function(t, l, "echo"), map[int]bool{}
	for i := range to {
		if _, err := l.Worker(i).Invoke(t.Context(), echo, u64(1), make([]byte, 8)); err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
		pids[l.Worker(i).PID()] = true
	}
	if len(pids) != to || pids[0] {
		t.Errorf("processes %v of %d workers", pids, to)
	}
}

// TestLeaseGrows opens a lease of four workers while one core is free. It gets its other workers when other leases are released, one before
// and two after a handover of the executor.
func TestLeaseGrows(t *testing.T) {
	w := newWorld(t, "--share-cores", "2", "--pool", "0")
	one, two := w.lease(t, client.LeaseOptions{}), w.lease(t, client.LeaseOptions{Workers: 2})
	events := make(chan client.Event, 16)
	l := w.lease(t, client.LeaseOptions{Workers: 4, WorkersMin: 1, OnEvent: func(e client.Event) { events <- e }})
	if n := l.Workers(); n != 1 {
		t.Fatalf("%d workers with one free core", n)
	}
	_, err := l.Worker(3).Invoke(t.Context(), function(t, l, "echo"), u64(1), make([]byte, 8))
	if !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "worker 3 is not there yet: the lease has 1 of 4 workers") {
		t.Errorf("a call on a worker that was not added: %v", err)
	}
	if err := one.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	grows(t, l, 1, 2, events)
	w.handOver(t)
	if err := two.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	grows(t, l, 2, 4, events)
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if l = w.lease(t, client.LeaseOptions{Workers: 4}); l.Workers() != 4 { // all cores are free again
		t.Errorf("%d workers on an idle node", l.Workers())
	}
}

// TestGrowingLeaseMoves kills the executor of a lease that has two of four workers. The lease moves to one with room for three, and grows there.
func TestGrowingLeaseMoves(t *testing.T) {
	w := &world{secret: secretFile(t)}
	manager := start(t, managerProgram, w.secret)
	executor := func() *daemon {
		return start(t, "bin/executor", w.secret, "--cores", "2", "--share-cores", "2", "--providers", provider(), "--manager", manager.Address).joined(t)
	}
	a := executor()
	w.session = w.connect(t, client.Options{Manager: manager.Address})
	w.lease(t, client.LeaseOptions{Workers: 2})
	events := make(chan client.Event, 16)
	l := w.lease(t, client.LeaseOptions{Workers: 4, WorkersMin: 1, Failover: true, OnEvent: func(e client.Event) { events <- e }})
	if n := l.Workers(); n != 2 {
		t.Fatalf("%d workers with two free cores", n)
	}
	b := executor()
	held := w.lease(t, client.LeaseOptions{Executor: b.Address})
	a.signal(syscall.SIGKILL)
	for kind := client.EventKind(0); kind != client.EventMoved; kind = ends(t, "the move", events).Kind {
		_, _ = function(t, l, "echo").Invoke(client.Idempotent(t.Context(), 3), u64(1), make([]byte, 8)) // a call moves the lease
	}
	if n := l.Workers(); n != 3 || l.Executor() != b.Address {
		t.Errorf("%d workers at %s, want 3 at %s", n, l.Executor(), b.Address)
	}
	if err := held.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	grows(t, l, 3, 4, events)
}
