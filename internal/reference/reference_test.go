package reference

import (
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

func newWork(t *testing.T) *Work {
	t.Helper()
	w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// worker streams over memory with idle priority on a CPU, as the worker of an executor may, while running is set. used returns its processor time.
func worker(t *testing.T, cpu int) (running *atomic.Bool, used func() time.Duration) {
	t.Helper()
	running = &atomic.Bool{}
	end := make(chan struct{})
	begun, done := make(chan error), make(chan struct{})
	var tid int
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with its policy
		var set unix.CPUSet
		set.Set(cpu)
		err := unix.SchedSetaffinity(0, &set)
		if err == nil {
			err = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0)
		}
		tid = unix.Gettid()
		begun <- err
		memory := make([]uint64, 8<<20)
		for {
			for i := 0; i < len(memory) && running.Load(); i += 8 {
				memory[i]++
			}
			select {
			case <-end:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() {
		running.Store(false)
		close(end)
		<-done
	})
	if err := <-begun; err != nil {
		t.Fatal(err)
	}
	return running, func() time.Duration {
		var ts unix.Timespec
		if err := unix.ClockGettime(int32(^tid)<<3|6, &ts); err != nil { // the CPU clock of another thread, as pthread_getcpuclockid computes it
			t.Fatal(err)
		}
		return time.Duration(ts.Nano())
	}
}

// A worker that uses the memory from another CPU slows the work down. Without it, the measured slowdown is smaller. Only the lane guard runs this test,
// since other programs would interrupt the measurements.
func TestWorkerSlowsDown(t *testing.T) {
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
	cpus, err := topology.Affinity()
	if err != nil || len(cpus) < 2 {
		t.Skipf("CPUs %v, %v: want two", cpus, err)
	}
	w := newWork(t)
	running, used := worker(t, cpus[1])
	var ratios [2][]float64 // without the worker, and with it
	median := func(i int) float64 {
		slices.Sort(ratios[i])
		return ratios[i][len(ratios[i])/2]
	}
	const rounds, pairs = 8, 31
	interrupted := 0
	for round := range rounds {
		for i := range ratios {
			running.Store(i == 1)
			for len(ratios[i]) < (round+1)*pairs {
				before, began := used(), time.Now()
				m, err := w.Measure(cpus[0], cpus[1:2], len(ratios[i])%2 == 0)
				if err != nil {
					t.Fatal(err)
				}
				ran := used()-before > time.Since(began)/2 // else other programs use the worker's CPU
				if m.Complete && ran == (i == 1) {
					ratios[i] = append(ratios[i], float64(m.Beside)/float64(m.Alone))
				} else if interrupted++; interrupted > 300 {
					testkit.NotTested(t, "NOT JUDGED, the machine is too busy: other programs interrupted %d measurements", interrupted)
					return
				}
				if m.Cost < m.Alone {
					t.Fatalf("%+v: the measurement costs less than a part of it", m)
				}
			}
		}
		if median(1) > median(0)+0.01 {
			break
		}
	}
	t.Logf("slowdown %.3f beside the worker, %.3f without, of %d pairs", median(1), median(0), len(ratios[1]))
	if median(1) <= median(0) {
		t.Errorf("slowdown %.3f beside a worker that uses the memory, %.3f without it", median(1), median(0))
	}
}

// A CPU that does not exist is no error, since a CPU may go offline at any time.
func TestMissingCPU(t *testing.T) {
	if m, err := newWork(t).Measure(4000, []int{4001}, false); err != nil || m.Complete {
		t.Errorf("%+v, %v", m, err)
	}
}
