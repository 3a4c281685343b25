package faults

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// starvation knows when a processor did not run a thread of this test that was ready. Linux 6.18 schedules each session as a group (autogroup), and
// processes of one session have kept a processor from all others for over 11 s. Calls that need a thread there wait as long, whatever rfaas does.
type starvation struct {
	mu   sync.Mutex
	gaps []gap
}

type gap struct{ from, to time.Time }

const (
	starvedLook  = 10 * time.Millisecond  // pause of the thread on each processor
	starvedLeast = 250 * time.Millisecond // shorter gaps are not kept
)

// watchStarvation keeps a thread on each processor that only sleeps and looks at the time.
func watchStarvation(t *testing.T) *starvation {
	s := &starvation{}
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatalf("sched_getaffinity: %v", err)
	}
	var over atomic.Bool
	var threads sync.WaitGroup
	for cpu := range 64 * len(all) {
		if all.IsSet(cpu) {
			threads.Go(func() { s.stayOn(cpu, &over) })
		}
	}
	t.Cleanup(func() {
		over.Store(true)
		threads.Wait()
	})
	return s
}

func (s *starvation) stayOn(cpu int, over *atomic.Bool) {
	runtime.LockOSThread() // never unlocked, so that the thread ends with this function
	var one unix.CPUSet
	one.Set(cpu)
	if unix.SchedSetaffinity(0, &one) != nil {
		return // the processor has been taken away
	}
	pause := unix.NsecToTimespec(int64(starvedLook))
	for last := time.Now(); !over.Load(); {
		_ = unix.Nanosleep(&pause, nil) // a signal may end it early
		now := time.Now()
		if now.Sub(last) >= starvedLeast {
			s.mu.Lock()
			s.gaps = append(s.gaps, gap{last, now})
			s.mu.Unlock()
		}
		last = now
	}
}

// longest returns for how long at a time, between from and to, some processor did not run this test.
func (s *starvation) longest(from, to time.Time) (most time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.gaps {
		begin, end := g.from, g.to
		if begin.Before(from) {
			begin = from
		}
		if end.After(to) {
			end = to
		}
		most = max(most, end.Sub(begin))
	}
	return most
}

func TestStarvationOverlap(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	s := &starvation{gaps: []gap{{at(2), at(10)}, {at(12), at(15)}}}
	for _, c := range []struct{ from, to, want int }{{0, 20, 8}, {4, 9, 5}, {9, 20, 3}, {0, 3, 1}, {10, 12, 0}, {16, 20, 0}} {
		if got := s.longest(at(c.from), at(c.to)); got != time.Duration(c.want)*time.Second {
			t.Errorf("from %d to %d s: %v, want %d s", c.from, c.to, got, c.want)
		}
	}
}
