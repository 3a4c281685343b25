package client_test

import (
	"errors"
	"fmt"
	"strings"
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
