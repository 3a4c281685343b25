package client_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// Coming, draining, leaving, dying, and a manager that dies itself: a subscriber hears of all of it.
func TestChanges(t *testing.T) {
	secret, address := secretFile(t), fixedManager(t)
	manager := func() *daemon {
		return start(t, "bin/resource-manager", secret, "--listen", address, "--heartbeat", "50ms", "--executors", "64")
	}
	executor := func() *daemon {
		return start(t, "bin/executor", secret, "--cores", "1", "--providers", provider(), "--grace", "1s", "--manager", address)
	}
	m := manager()
	w := &world{daemon: m, secret: secret}
	s := w.connect(t, client.Options{Manager: address})
	ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
	defer stop()
	changes := s.Changes().Channel(ctx)
	want := func(x *daemon, states ...string) {
		t.Helper()
		for c := range changes {
			if c.Executor == x.Address && c.State == states[0] {
				if states = states[1:]; len(states) == 0 {
					return
				}
			}
		}
		t.Fatalf("never %q", states)
	}
	a := executor()
	want(a, "open")
	b := executor()
	want(b, "open")
	a.signal(syscall.SIGTERM)
	want(a, "left")
	b.signal(syscall.SIGKILL)
	want(b, "silent")
	m.signal(syscall.SIGKILL)
	<-m.done
	manager()
	c := executor()
	want(c, "open")

	// A late subscriber begins with those that are there. Polled, and called back.
	late := s.Changes()
	var there []client.ExecutorChange
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); len(there) == 0 && time.Now().Before(end); <-tick.C {
		var err error
		if there, err = late.Poll(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if len(there) != 1 || there[0].Executor != c.Address || there[0].State != "open" || there[0].Node == "" {
		t.Errorf("%+v", there)
	}
	if again, err := late.Poll(ctx); err != nil || again != nil {
		t.Errorf("%+v %v", again, err)
	}
	called, end := context.WithCancel(ctx)
	err := s.Changes().Each(called, func(x client.ExecutorChange) {
		if x.Executor == c.Address {
			end()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	direct := (&world{daemon: c, secret: secret}).connect(t, client.Options{Executor: c.Address})
	if _, err := direct.Changes().Poll(ctx); !errors.Is(err, client.ErrUnsupported) {
		t.Errorf("without a manager: %v", err)
	}
}
