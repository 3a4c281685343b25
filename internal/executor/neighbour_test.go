package executor

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/reference"
	"github.com/rfaas-go/rfaas/lease"
)

// fakeReference needs `slow` times as long beside workers. Every third measurement is interrupted, and has meaningless times.
type fakeReference struct {
	slow, measured, open atomic.Int32
	others               chan []int
	interrupted          atomic.Bool // all measurements are
}

func (f *fakeReference) Measure(cpu int, others []int, _ bool) (reference.Times, error) {
	if f.measured.Add(1)%3 == 0 || f.interrupted.Load() {
		return reference.Times{Beside: time.Hour, Alone: 1}, nil
	}
	select {
	case f.others <- append([]int{cpu}, others...):
	default:
	}
	return reference.Times{Complete: true, Beside: time.Duration(f.slow.Load()) * time.Microsecond, Alone: time.Microsecond}, nil
}

func (f *fakeReference) Close() { f.open.Add(-1) }

// The slowdown is measured while there are leases. Clients and the resource manager can read it.
func TestWatchNeighbour(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.YieldAfter, c.Cores = time.Second, testCores(3) })
	f := &fakeReference{others: make(chan []int)}
	f.slow.Store(1)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		n.e.watchNeighbour(ctx, time.Millisecond, func() (referenceWork, error) {
			f.open.Add(1)
			return f, nil
		})
	})
	published := func(thousandths uint32) {
		t.Helper()
		eventually(t, "the slowdown is published", func() bool { return n.e.info().GetNeighbourSlowdown() == thousandths })
	}
	one := n.lease(1)
	published(1000)
	if n.e.reported().GetNeighbourSlowdown() != 1000 {
		t.Error("the resource manager does not learn of the slowdown")
	}
	eventually(t, "the work runs on the CPUs without workers in turn", func() bool {
		a, b := <-f.others, <-f.others
		return len(a) == 2 && len(b) == 2 && a[0] != b[0] && a[1] == b[1]
	})
	two := n.lease(1)
	eventually(t, "the work runs on the CPUs of the workers in turn", func() bool {
		a, b := <-f.others, <-f.others
		return len(a) == 2 && len(b) == 2 && a[0] == b[1] && a[1] == b[0]
	})
	f.slow.Store(3) // as beside workers that use much memory bandwidth
	published(3000)
	n.release(one.GetLeaseId())
	n.release(two.GetLeaseId())
	published(0)
	if f.open.Load() != 0 {
		t.Error("the work keeps its memory although nothing is leased")
	}
	n.lease(3)
	published(3000)
	f.interrupted.Store(true)
	published(0)
	f.interrupted.Store(false)
	published(3000)
	cancel()
	wg.Wait()
	if f.open.Load() != 0 || n.e.info().GetNeighbourSlowdown() != 0 {
		t.Error("the work keeps its memory after its end")
	}
}

// An executor with one core has no CPU on which the work could run beside the worker.
func TestReferenceCPUsOfOneCore(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Cores = []lease.Core{{CPUs: []int{0}}} })
	n.lease(1)
	if cpu, others := n.e.referenceCPUs(0); len(others) > 0 {
		t.Errorf("CPU %d beside %v", cpu, others)
	}
}
