package executor

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/reference"
)

// An executor with the setting yield-after measures how much its workers slow down other programs of the node. See internal/reference.

const (
	referenceEvery = time.Second // the shortest time between two measurements
	referenceShare = 500         // the measurements use at most 1/500 of one CPU
	referencePairs = 61          // the latest pairs, of which the median is published; its error is about 1 %
	referenceFirst = 11          // nothing is published before so many pairs
	referenceMiss  = 61          // and nothing after so many interrupted measurements in a row
)

// referenceWork measures the slowdown of a piece of work.
type referenceWork interface {
	Measure(cpu int, others []int, aloneFirst bool) (reference.Times, error)
	Close()
}

func newReference() (referenceWork, error) { return reference.New() }

// watchNeighbour measures until ctx ends, and publishes the median of the latest pairs. Without leases it does nothing and publishes nothing.
func (e *Executor) watchNeighbour(ctx context.Context, every time.Duration, create func() (referenceWork, error)) {
	timer := time.NewTimer(every)
	defer timer.Stop()
	var work referenceWork
	forget := func() {
		if e.slowdown.Store(0); work != nil {
			work.Close()
			work = nil
		}
	}
	defer forget()
	var ratios []float64
	said, missed := "", 0
	for turn := 0; ; turn++ {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		wait := every
		cpu, others := e.referenceCPUs(turn)
		if len(others) == 0 {
			forget()
			ratios = nil
		} else {
			t, err := reference.Times{}, error(nil)
			if work == nil {
				work, err = create()
			}
			if err == nil {
				t, err = work.Measure(cpu, others, turn%2 == 0)
			}
			if err != nil && err.Error() != said {
				said = err.Error()
				e.log.Warn("cannot measure how much workers slow down other programs", "error", err)
			}
			if t.Waited {
				e.metrics.neighbourWait.Observe(t.Wait.Seconds())
			}
			if missed++; t.Complete {
				missed = 0
				ratios = append(ratios[max(0, len(ratios)-referencePairs+1):], float64(t.Beside)/float64(t.Alone))
			} else if missed == referenceMiss {
				ratios = nil
				e.slowdown.Store(0)
			}
			if list := slices.Sorted(slices.Values(ratios)); len(list) >= referenceFirst {
				e.slowdown.Store(uint32(min(math.Round(1000*list[len(list)/2]), board.MaxSlowdown)))
			}
			wait = max(every, referenceShare*t.Cost)
		}
		timer.Reset(wait + rand.N(wait)) // workers must not know when
	}
}

// referenceCPUs returns the CPU on which the work runs next, and the other CPUs of workers. The work runs on each CPU of the workers in
// turn. If they have only one CPU, the work runs on each other CPU that the executor lends in turn. others is empty if nothing can be measured.
func (e *Executor) referenceCPUs(turn int) (cpu int, others []int) {
	var leased []int
	for _, l := range e.table.List() {
		for _, cpus := range l.CPUs {
			leased = append(leased, cpus...)
		}
	}
	slices.Sort(leased)
	leased = slices.Compact(leased)
	candidates := leased
	if len(leased) == 1 {
		candidates = nil
		for _, c := range e.cfg.Cores {
			candidates = append(candidates, c.CPUs...)
		}
		candidates = slices.DeleteFunc(candidates, func(c int) bool { return c == leased[0] })
	}
	if len(candidates) == 0 {
		return 0, nil
	}
	cpu = candidates[turn%len(candidates)]
	return cpu, slices.DeleteFunc(leased, func(c int) bool { return c == cpu })
}
