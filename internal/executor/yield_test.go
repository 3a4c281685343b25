package executor

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/lease"
)

func TestParseUse(t *testing.T) {
	const stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 400 5 6 7 8 50 9\ncpu11 1 2 3 4 5 6 7 8 0 0\nintr 1 2 3\n"
	got, err := parseUse(strings.NewReader(stat))
	if err != nil || len(got) != 2 || got[0] != (use{100, 576}) || got[11] != (use{1, 36}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "intr 1\n", "cpux 1 2 3 4 5 6 7 8\n", "cpu0 1 2 3\n", "cpu0 1 2 3 4 5 6 7 x\n"} {
		if got, err := parseUse(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
	if here, err := readUse(); err != nil || len(here) == 0 {
		t.Errorf("this node: %v, %v", here, err)
	}
}

// A core is taken when others use half of one of its CPUs over the whole time, and lent again when they have hardly used it for twice that time.
func TestYielding(t *testing.T) {
	y := newYielding([]lease.Core{{CPUs: []int{0, 2}}, {CPUs: []int{1, 3}}})
	now := map[int]use{0: {}, 1: {}, 2: {}, 3: {}}
	step := func(share map[int]uint64) []int { // percent of the next 100 ticks
		next := map[int]use{}
		for cpu, u := range now {
			next[cpu] = use{u.others + share[cpu], u.all + 100}
		}
		now = next
		return y.add(now)
	}
	want := func(when string, share map[int]uint64, steps int, changed []int) {
		t.Helper()
		for i := range steps {
			got := step(share)
			if i < steps-1 && len(got) > 0 || i == steps-1 && !slices.Equal(got, changed) {
				t.Errorf("%s, step %d: changed %v", when, i+1, got)
			}
		}
	}
	want("unused", nil, yieldSteps+1, nil)
	want("used in part", map[int]uint64{3: 40}, 20, nil)
	want("used for a moment", map[int]uint64{2: 100}, 2, nil)
	want("unused again", nil, yieldSteps, nil)
	want("used", map[int]uint64{3: 90}, 3, []int{1})
	want("used at times", map[int]uint64{3: 30}, 30, nil)
	want("left", nil, 2*yieldSteps+1, []int{1})
}

// The lease on a core that other programs use ends with a reason, cached workers on it end too, and the core is lent again when they stop.
func TestYieldToOthers(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.YieldAfter, c.Cores = 200*time.Millisecond, testCores(2) })
	var busy [2]atomic.Bool
	var ticks uint64
	var others [2]uint64
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		n.e.yield(ctx, 5*time.Millisecond, func() (map[int]use, error) {
			ticks += 10
			for i := range others {
				if busy[i].Load() {
					others[i] += 10
				}
			}
			return map[int]use{0: {others[0], ticks}, 1: {others[1], ticks}}, nil
		})
	})
	defer wg.Wait()
	defer cancel()
	one, two := n.lease(1), n.lease(1)
	busy[0].Store(true)
	eventually(t, "the lease on CPU 0 has ended", func() bool {
		_, err := n.e.table.Get(lease.ID(one.GetLeaseId()))
		return err != nil || n.e.table.Capacity().Leases == 1
	})
	_, err := n.Renew(n.ctx(), &control.RenewRequest{LeaseId: one.GetLeaseId()})
	if control.ClassOf(err) != control.ClassLease || !strings.Contains(err.Error(), "other programs of the node use CPU 0 (yield-after 200ms)") {
		t.Errorf("a lease that had to yield: %v", err)
	}
	if _, err := n.Lease(n.ctx(), n.request(1)); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("a lease while other programs use the only free core: %v", err)
	}
	busy[0].Store(false)
	eventually(t, "the core is lent again", func() bool { return n.e.table.Capacity().FreeCores == 1 })
	n.release(n.lease(1).GetLeaseId())
	n.release(two.GetLeaseId())
}
