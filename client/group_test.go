package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// acrossSoon leases across executors as soon as enough have registered.
func acrossSoon(t *testing.T, s *client.Session, workers int) *client.Group {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); ; <-tick.C {
		g, err := s.LeaseAcross(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: workers})
		if err == nil {
			return g
		}
		if !errors.Is(err, client.ErrBusy) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// workerDiesBesideBusyOnes kills a worker in a call while the other executors have no free core. The call is repeated
// at the same executor and does not wait for the others.
func workerDiesBesideBusyOnes(t *testing.T, g *client.Group, sleep *client.GroupFunction) {
	t.Helper()
	const long, less = 5 * time.Second, 4 * time.Second
	parts := g.Leases()
	home := parts[slices.IndexFunc(parts, func(l *client.Lease) bool { return l.Workers() == 2 })]
	busy, naps := make(chan error, g.Workers()), 0
	for _, l := range parts {
		nap := function(t, l, "sleep_ns")
		for i := 0; l != home && i < l.Workers(); i++ {
			w := l.Worker(i)
			go func() { busy <- second(w.Invoke(context.Background(), nap, u64(uint64(long)), make([]byte, 8))) }()
			untilRuns(t, w, "sleep_ns")
			naps++
		}
	}
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), less)
		defer cancel()
		ended <- second(sleep.Invoke(client.Idempotent(ctx, 3), u64(300e6), make([]byte, 8)))
	}()
	victim := 0
	within(t, 10*time.Second, "a worker runs it", func() bool {
		for i := range 2 {
			if x, err := home.Worker(i).Inspect(t.Context()); err == nil && x.Running == "sleep_ns" {
				victim = x.PID
			}
		}
		return victim != 0
	})
	kill(t, victim, syscall.SIGKILL)
	if err := ends(t, "the call", ended); err != nil {
		t.Errorf("a call whose worker was killed: %v", err)
	}
	for range naps {
		if err := ends(t, "a long call", busy); err != nil {
			t.Error(err)
		}
	}
}

// A lease across executors gets workers wherever they fit, all or none, also while the manager is stopped.
func TestLeaseAcrossExecutors(t *testing.T) {
	m, nodes, secret := cluster(t, 3) // each with two cores
	s := m.session(t, secret)
	g := acrossSoon(t, s, 5)
	parts := g.Leases()
	if len(parts) != 3 || g.Workers() != 5 {
		t.Fatalf("%d workers on %d executors", g.Workers(), len(parts))
	}
	f, err := g.Function("echo")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := g.Function("pid")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	out := make([]byte, 8)
	for i := range 60 {
		if n, err := f.Invoke(t.Context(), []byte{byte(i)}, out); err != nil || n != 1 || out[0] != byte(i) {
			t.Fatal(n, err)
		}
		if _, err := pid.Invoke(t.Context(), nil, out); err != nil {
			t.Fatal(err)
		}
		seen[binary.LittleEndian.Uint64(out)] = true
	}
	if len(seen) != len(parts) { // a call takes the lowest free worker of each executor
		t.Errorf("workers of %d executors were called, want %d", len(seen), len(parts))
	}
	// One core is left. A lease of two more workers fails, and the core stays free.
	_, err = s.LeaseAcross(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2})
	if !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), "2 workers") {
		t.Errorf("more than there is: %v", err)
	}
	within(t, 20*time.Second, "one core is free", func() bool { return m.freeCores(t, secret) == 1 })
	// When an executor dies, the other parts of the lease go on.
	lost := -1
	for i, n := range nodes {
		if n.Address == parts[0].Executor() {
			lost = i
		}
	}
	sleep, err := g.Function("sleep_ns")
	if err != nil {
		t.Fatal(err)
	}
	workerDiesBesideBusyOnes(t, g, sleep)
	flying := make(chan error, g.Workers())
	var killed atomic.Bool
	for range cap(flying) { // back to back, so that a call is in progress when the executor dies
		go func() {
			out := make([]byte, 8)
			var err error
			for err == nil && !killed.Load() {
				_, err = sleep.Invoke(client.Idempotent(context.Background(), 2), u64(uint64(300*time.Millisecond)), out)
				if err == nil && binary.LittleEndian.Uint64(out) != uint64(300*time.Millisecond) {
					err = fmt.Errorf("a wrong result: %x", out)
				}
			}
			flying <- err
		}()
	}
	untilRuns(t, parts[0].Worker(0), "sleep_ns")
	nodes[lost].signal(syscall.SIGKILL)
	killed.Store(true)
	for range cap(flying) {
		if err := ends(t, "a call", flying); err != nil {
			t.Errorf("an idempotent call while an executor died: %v", err)
		}
	}
	within(t, 20*time.Second, "the part is lost", func() bool { return parts[0].Err() != nil })
	for i := range 20 {
		if n, err := f.Invoke(t.Context(), []byte{byte(i)}, out); err != nil || n != 1 || out[0] != byte(i) {
			t.Fatal(n, err)
		}
	}
	if err := g.Release(context.Background()); err != nil {
		t.Logf("release: %v", err) // the dead executor's
	}
	within(t, 20*time.Second, "the lost executor is not on the board, the others are free", func() bool { return m.freeCores(t, secret) >= 4 })

	leaseSoon(t, s, 1).Release(context.Background()) // the board can be read
	if secondNode == "" {                            // over tcp, executors cannot report to a manager that is stopped
		m.signal(syscall.SIGSTOP)
		defer m.signal(syscall.SIGCONT)
	}
	g = acrossSoon(t, s, 4)
	if len(g.Leases()) != 2 {
		t.Errorf("%d executors", len(g.Leases()))
	}
	if err := g.Release(context.Background()); err != nil {
		t.Error(err)
	}
	for _, o := range []client.LeaseOptions{{Workers: 1 << 17}, {Executor: "a:1"}, {CoresPerWorker: 1 << 17}} {
		if _, err := s.LeaseAcross(t.Context(), o); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
