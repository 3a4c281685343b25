package client_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Eight clients take and release leases of real workers. Each call has its right result, and the only error is that no
// core is free. Afterwards the executor has all of its capacity, no worker, and no more open files than before.
func TestLeaseCycles(t *testing.T) {
	for name, c := range map[string]struct {
		cycles int64
		args   []string
	}{
		"new workers":    {100, []string{"--share-cores", "4", "--pool", "0", "--cache-time", "0s"}},
		"cached workers": {500, []string{"--share-cores", "4", "--pool", "0", "--cache-time", "3s"}}, // sessions leave cached workers behind when they close
		"too few cores":  {100, []string{"--share-cores", "2", "--pool", "2", "--cache-time", "3s"}}, // for eight clients: cached workers are evicted all the time
	} {
		if provider() != "shm" {
			c.cycles /= 4 // the full number runs on shared memory
		}
		t.Run(name, func(t *testing.T) { leaseCycles(t, c.cycles, c.args) })
	}
}

func leaseCycles(t *testing.T, cycles int64, args []string) {
	const clients = 8
	w := newWorld(t, args...)
	files := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", w.pid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	var done, busy, cached atomic.Int64
	cycle := func(s *client.Session, i int) {
		l, err := s.Lease(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Bulk: -1, Reuse: true})
		if errors.Is(err, client.ErrBusy) {
			busy.Add(1)
			return
		}
		if err != nil {
			t.Error(err)
			return
		}
		in, out := u64(uint64(i)), make([]byte, 8)
		if n, err := function(t, l, "echo").Invoke(context.Background(), in, out); err != nil || string(out[:n]) != string(in) {
			t.Errorf("call: %x, %v", out, err)
		}
		cached.Add(int64(l.Statistics().Cached))
		if err := l.Release(context.Background()); err != nil {
			t.Error(err)
		}
		done.Add(1)
	}
	cycle(w.session, 0) // creates what is created only once
	sessions := make([]*client.Session, clients)
	for i := range sessions {
		sessions[i] = w.connect(t, client.Options{Executor: w.Address})
		cycle(sessions[i], i)
	}
	closeAll := func() {
		for _, s := range sessions {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	before := files()
	done.Store(0)
	began := time.Now()
	var wg sync.WaitGroup
	for _, s := range sessions {
		wg.Go(func() {
			for i := 0; done.Load() < cycles && !t.Failed(); i++ {
				cycle(s, i)
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	closeAll()
	w.session.Close()
	conn, err := control.Dial(w.Address, control.DialConfig{SecretFile: w.secret, AllowPlaintext: secondNode != ""})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var i *control.InfoReply
	within(t, testkit.Bound, "all capacity is free", func() bool {
		i, err = control.NewExecutorClient(conn).Info(t.Context(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
		return err == nil && i.GetFreeCores() == i.GetCores() && i.GetFreeMemoryBytes() == i.GetMemoryBytes()
	})
	// The count before included the clients' connections, and the pool may not have been full.
	within(t, 20*time.Second, "the descriptors are back", func() bool { return files() <= before+1+4*4 })
	within(t, 20*time.Second, "no worker has a lease", func() bool { return working(t, w.pid()) == 0 })
	t.Logf("%d cycles from %d clients in %v, %d times busy; started cached: %d", done.Load(), clients, took.Round(time.Millisecond), busy.Load(), cached.Load())
}

// working returns how many children of a process are workers with a lease.
func working(t *testing.T, pid int) (n int) {
	for _, c := range children(t, pid) {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", c))
		if err == nil && strings.HasPrefix(string(name), "rfaas-w") && string(name) != "rfaas-pooled\n" {
			n++
		}
	}
	return n
}
