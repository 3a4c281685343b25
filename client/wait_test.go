package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// opened is what an attempt to lease in the background came to.
type opened struct {
	lease *client.Lease
	err   error
}

// waitFor asks for a lease in the background.
func (w *world) waitFor(t *testing.T, s *client.Session, o client.LeaseOptions) <-chan opened {
	t.Helper()
	o.Library = built(t, "build/functions/echo.so")
	c := make(chan opened, 1)
	go func() {
		l, err := s.Lease(context.Background(), o)
		c <- opened{l, err}
	}()
	return c
}

// TestLeaseWaits gives waiting leases the cores that others release. Which of them is first does not matter.
func TestLeaseWaits(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	held := w.lease(t, client.LeaseOptions{Workers: 2})
	other := w.connect(t, w.options())
	first := w.waitFor(t, w.session, client.LeaseOptions{Workers: 2, Wait: time.Hour})
	second := w.waitFor(t, other, client.LeaseOptions{Workers: 2, Depth: 2, Wait: time.Hour})
	_, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2, Wait: time.Millisecond})
	if !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), "2 cores") || !strings.Contains(err.Error(), " of 2 ") {
		t.Errorf("no room within the time: %v", err)
	}
	for range 2 {
		if err := held.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		var o opened
		select {
		case o = <-first:
		case o = <-second:
		case <-time.After(20 * time.Second):
			t.Fatal("no waiting lease has the free cores after 20 s")
		}
		if o.err != nil {
			t.Fatal(o.err)
		}
		held = o.lease
		if _, err := function(t, held, "echo").Invoke(t.Context(), u64(1), make([]byte, 8)); err != nil {
			t.Error(err)
		}
	}
}

// TestLeaseStopsWaiting ends waits: with a context, and for a lease that the only executor can never grant.
func TestLeaseStopsWaiting(t *testing.T) {
	w := newWorld(t, "--pool", "0")
	held := w.lease(t, client.LeaseOptions{Workers: 2})
	options := client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2, Wait: time.Hour}
	ctx, cancel := context.WithCancel(t.Context())
	given := make(chan error, 1)
	go func() {
		_, err := w.session.Lease(ctx, options)
		given <- err
	}()
	cancel()
	if err := ends(t, "the cancelled wait", given); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := held.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l, err := w.session.Lease(t.Context(), options); err != nil { // the cancelled wait has left nothing
		t.Error(err)
	} else if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	options.Wait = -1
	if _, err := w.session.Lease(t.Context(), options); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "wait -1ns") {
		t.Errorf("a negative wait: %v", err)
	}
	if options.Workers, options.Wait = 3, time.Hour; w.options().Manager == "" {
		impossible := w.waitFor(t, w.session, options)
		if o := ends(t, "an impossible lease", impossible); !errors.Is(o.err, client.ErrInvalid) || !strings.Contains(o.err.Error(), "lends 2") {
			t.Errorf("more cores than the only executor lends: %v", o.err)
		}
	}
}

// TestLeaseWaitsForAnExecutor opens leases before there is an executor, and on more executors than there are.
func TestLeaseWaitsForAnExecutor(t *testing.T) {
	w := &world{secret: secretFile(t)}
	manager := start(t, managerProgram, w.secret)
	w.session = w.connect(t, client.Options{Manager: manager.Address})
	waiting := w.waitFor(t, w.session, client.LeaseOptions{Workers: 2, Wait: time.Hour})
	across := make(chan error, 1)
	executor := func() *daemon {
		return start(t, "bin/executor", w.secret, "--cores", "2", "--pool", "0", "--providers", provider(), "--grace", "2s", "--manager", manager.Address)
	}
	executor()
	o := ends(t, "the wait for an executor", waiting)
	if o.err != nil {
		t.Fatal(o.err)
	}
	go func() {
		g, err := w.session.LeaseAcross(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 4, Wait: time.Hour})
		if err == nil {
			err = g.Release(context.Background())
		}
		across <- err
	}()
	executor()
	if err := o.lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := ends(t, "the wait for two executors", across); err != nil {
		t.Error(err)
	}
}
