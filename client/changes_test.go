package client_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// A subscriber receives every change: executors that register, drain, leave and die, also across a restart of the
// manager.
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
	states := map[string]string{} // last state of each executor; a slow machine may make a live executor silent for a while
	want := func(x *daemon, state string) {
		t.Helper()
		for states[x.Address] != state {
			c, more := <-changes
			if !more {
				t.Fatalf("%s is never %q, but %q", x.Address, state, states[x.Address])
			}
			states[c.Executor] = c.State
		}
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

	// A session that is opened later first receives each registered executor once. Its changes are polled and then
	// called back.
	late := w.connect(t, client.Options{Manager: address}).Changes()
	poll := func(last string) string {
		t.Helper()
		found, err := late.Poll(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range found {
			if x.Executor != c.Address || x.State == last || x.Node == "" {
				t.Errorf("%+v after %q", x, last)
			}
			last = x.State
		}
		return last
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	last := poll("")
	for end := time.Now().Add(20 * time.Second); last != "open" && time.Now().Before(end); <-tick.C {
		last = poll(last)
	}
	if last != "open" {
		t.Errorf("%q", last)
	}
	poll(last)
	called, end := context.WithCancel(ctx)
	err := w.connect(t, client.Options{Manager: address}).Changes().Each(called, func(x client.ExecutorChange) {
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
