package executor

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/lease"
)

func TestShort(t *testing.T) {
	for _, c := range []struct {
		available, free uint64
		stall, want     bool
	}{{100, 5, false, false}, {9, 9, false, true}, {19, 5, true, true}, {20, 5, true, false}, {100, 50, true, false}, {10, 10, true, false}} {
		if got := short(topology.Memory{Total: 1000, Available: c.available, Free: c.free}, 10, c.stall); got != c.want {
			t.Errorf("%+v: short is %v", c, got)
		}
	}
	for _, c := range []struct {
		memory config.Bytes
		after  time.Duration
		want   uint64
	}{{0, 0, 0}, {0, time.Second, 100}, {7, 0, 7}, {7, time.Second, 7}} {
		if got := memoryReserve(&config.Executor{YieldMemory: c.memory, YieldAfter: c.after}, 1600); got != c.want {
			t.Errorf("%+v: %d bytes are reserved", c, got)
		}
	}
}

// The memory is read before fast programs can have used what is above the reserve, and not too often.
func TestNextLook(t *testing.T) {
	const reserve = 1 << 30
	for _, c := range []struct {
		available uint64
		want      time.Duration
	}{{0, memorySoon}, {reserve, memorySoon}, {reserve + memoryRate/1000, memorySoon}, {reserve + memoryRate/8, time.Second / 8}, {reserve + memoryRate, memoryEvery},
		{1 << 60, memoryEvery}} {
		if got := nextLook(c.available, reserve); got != c.want {
			t.Errorf("%d bytes available: %v, want %v", c.available, got, c.want)
		}
	}
}

// fakeMemory is a node whose other programs use memory. Each worker uses some memory, and so does each cached worker.
type fakeMemory struct {
	n *node

	mu     sync.Mutex
	others uint64
}

const (
	fakeTotal   = 100
	perWorker   = 10
	fakeReserve = 20
)

func (m *fakeMemory) use(others uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.others = others
}

func (m *fakeMemory) measure() (topology.Memory, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	used := m.others + perWorker*uint64(len(m.n.z.alive()))
	left := fakeTotal - min(used, fakeTotal)
	return topology.Memory{Total: fakeTotal, Available: left, Free: left}, nil
}

// When other programs need memory, cached workers go first, then the youngest leases, and only as many as necessary. New leases are refused until
// enough memory has been available for a while.
func TestYieldMemory(t *testing.T) {
	n := newNode(t)
	m := &fakeMemory{n: n}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	stalled := make(chan struct{}, 1)
	wg.Go(func() { n.e.yieldMemory(ctx, fakeReserve, stalled, 20*time.Millisecond, m.measure) })
	defer wg.Wait()
	defer cancel()
	code := n.e.codes.acquire(n.sum, "") // an unused library is freed, too
	defer n.e.codes.release(code)
	oldest, older, young := n.lease(1), n.lease(1), n.lease(1)
	alive := func(l *control.LeaseReply) bool {
		g, err := n.e.table.Get(lease.ID(l.GetLeaseId()))
		return err == nil && !g.State.Ended()
	}

	m.use(55) // 3 workers use 30: 15 are available
	eventually(t, "the youngest lease has ended", func() bool { return !alive(young) })
	_, err := n.Renew(n.ctx(), &control.RenewRequest{LeaseId: young.GetLeaseId()})
	if control.ClassOf(err) != control.ClassLease || !strings.Contains(err.Error(), "other programs of the node need memory: 15 available (yield-memory 20)") {
		t.Errorf("a lease whose memory was needed: %v", err)
	}
	if _, err := n.Lease(n.ctx(), n.request(1)); control.ClassOf(err) != control.ClassBusy || !strings.Contains(err.Error(), "need memory") {
		t.Errorf("a lease while the node's memory is short: %v", err)
	}
	if i := n.e.info(); i.GetFreeMemoryBytes() != 0 || i.GetFreeCores() != 0 {
		t.Errorf("an executor that lends no memory shows %v", i)
	}
	m.use(0)
	eventually(t, "memory is lent again", func() bool { return !n.e.memoryShort.Load() })
	young = n.lease(1)

	m.use(85) // one worker may stay at most, and it may not
	eventually(t, "all leases have ended", func() bool { return !alive(oldest) && !alive(older) && !alive(young) && len(n.z.alive()) == 0 })
	if got := fmt.Sprint(counterOf(t, n.e.metrics.memoryYielded), counterOf(t, n.e.metrics.memoryShort)); got != "4 2" {
		t.Errorf("leases ended, times short: %s", got)
	}
	m.use(0)
	eventually(t, "memory is lent again", func() bool { return !n.e.memoryShort.Load() })
	last := n.lease(1)
	m.use(65)
	stalled <- struct{}{} // 25 are free, more than the reserve: a control group has reached its own limit
	stalled <- struct{}{}
	stalled <- struct{}{} // the first one is handled
	if !alive(last) {
		t.Error("a lease ended because a control group reached its own limit")
	}
	n.release(last.GetLeaseId())
}

// The kernel accepts a trigger of an unprivileged process, and closing ends the wait for it.
func TestStalls(t *testing.T) {
	s, err := openStalls("/proc/pressure/memory")
	if err != nil {
		t.Skip(err)
	}
	done := make(chan error)
	go func() { done <- s.watch(make(chan struct{}, 1)) }()
	s.close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := openStalls("/proc/pressure/none"); !os.IsNotExist(err) {
		t.Errorf("a kernel without pressure figures: %v", err)
	}
	if s, err := openStalls("/dev/null"); err == nil {
		s.close()
		t.Error("a file without triggers was accepted")
	}
}

// counterOf returns the value of a counter.
func counterOf(t *testing.T, c prometheus.Collector) float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return all[0].GetMetric()[0].GetCounter().GetValue()
}
