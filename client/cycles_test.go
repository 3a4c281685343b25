package client_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
)

// cycles is how many leases TestLeaseCycles takes in all.
const cycles = 400

// Leases of real workers come and go from eight clients at once. Each makes a call with its right result, none fails for
// another reason than that no core is free, and in the end the executor has all of its capacity, no worker and no more
// open files than before.
func TestLeaseCycles(t *testing.T) {
	const clients = 8
	w := newWorld(t, "--share-cores", "4", "--warm-pool", "0")
	files := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", w.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	var done, busy atomic.Int64
	cycle := func(s *client.Session, i int) {
		l, err := s.Lease(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Bulk: -1})
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
		if err := l.Release(context.Background()); err != nil {
			t.Error(err)
		}
		done.Add(1)
	}
	cycle(w.session, 0) // what is made once is there now
	sessions := make([]*client.Session, clients)
	for i := range sessions {
		sessions[i] = w.connect(t, client.Options{Executor: w.Address})
		cycle(sessions[i], i)
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
	conn, err := control.Dial(w.Address, control.DialConfig{SecretFile: w.secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	i, err := control.NewExecutorClient(conn).Info(t.Context(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil || i.GetCores() != 8 || i.GetFreeCores() != 8 || i.GetFreeMemoryBytes() != i.GetMemoryBytes() {
		t.Errorf("capacity at the end: %v, %v", i, err)
	}
	within(t, 5*time.Second, "the descriptors are back", func() bool { return files() <= before+1 }) // our connection
	if left := children(t, w.cmd.Process.Pid); len(left) != 1 {
		t.Errorf("the executor has the children %v, want its zygote alone", left)
	}
	t.Logf("%d cycles from %d clients in %v, %d times busy", done.Load(), clients, took.Round(time.Millisecond), busy.Load())
}
