package latency

import (
	"math"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// twoCPUs skips a test that needs two CPUs. CI has two, so the test fails there instead.
func twoCPUs(t *testing.T) {
	t.Helper()
	if all, err := topology.Affinity(); err != nil || len(all) < 2 {
		testkit.Lacks(t, "two CPUs are needed, there are %v (%v)", all, err)
	}
}

// A batch is bounded whatever else runs on the processors. Spinners that share one yield to each other, and give up if other
// programs use it too. Waiting for each other's time slices, thousands of round trips would take half a minute.
func TestSpinnersOnOneCPU(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all, err := topology.Affinity()
	if err != nil {
		t.Fatal(err)
	}
	cfg := quick(dataplane.SHM)
	cfg.Payloads, cfg.CPUs = []int{8}, []int{all[0], all[0]}
	f, err := OpenFloor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var one, every unix.CPUSet
	one.Set(all[0])
	for _, cpu := range all {
		every.Set(cpu)
	}
	defer func() {
		if err := setAffinity(&every); err != nil {
			t.Error(err)
		}
	}()
	if err := setAffinity(&one); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	now, err := f.s.calibrate(raw.Flag, 0, 2000)
	took := time.Since(began)
	t.Logf("%v for a calibration of %g ns on one CPU", took, now)
	if err != nil || took > 8*time.Second {
		t.Errorf("12500 round trips took %v (%v)", took, err)
	}
}

// A batch whose peer does not get a processor is given up and does not count, and the next one succeeds.
func TestBatchIsGivenUp(t *testing.T) {
	twoCPUs(t)
	cfg := quick(dataplane.SHM)
	cfg.Payloads = []int{8}
	f, err := OpenFloor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	over, stopped := make(chan struct{}), make(chan error, 1)
	go func() { // during a batch of some seconds
		for {
			for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
				if err := f.s.process.Signal(signal); err != nil {
					stopped <- err
					return
				}
				select {
				case <-over:
					stopped <- f.s.process.Signal(syscall.SIGCONT)
					return
				case <-time.After(700 * time.Millisecond):
				}
			}
		}
	}()
	mean, err := f.Batch(raw.Flag, 0, 50_000_000, nil)
	close(over)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if err != nil || !math.IsNaN(mean) {
		t.Fatalf("with a peer that is stopped: a mean of %g ns, %v", mean, err)
	}
	var p Paired
	if p.Add(1, mean, 1, 1) || p.Add(mean, 1, 1, 1) || p.Add(1, 1, mean, 1) || p.Add(1, 1, mean, mean) || p.Len() != 0 {
		t.Error("a pair with a batch that was given up counts")
	}
	var pairs pairing
	if pairs.add([]float64{1, mean}, []float64{1, 1}) || pairs.add([]float64{1, 1}, []float64{1, mean}) || pairs.discarded != 2 {
		t.Error("a pair with a batch that was given up counts")
	}
	if mean, err = f.Batch(raw.Flag, 0, 100, nil); err != nil || mean <= 0 {
		t.Errorf("the next batch: %g ns, %v", mean, err)
	}
}

// Between machines the median represents a batch, so that packets that queue do not decide.
func TestAverage(t *testing.T) {
	times := []int64{400, 410, 390, 5_000_000, 405}
	batch := func(samples []int64) (int64, error) {
		copy(samples, times)
		return 5_001_605, nil
	}
	for _, c := range []struct {
		cfg  Config
		want float64
	}{{Config{Depth: 1}, 1_000_321}, {Config{Depth: 1, Remote: "node-b:7470"}, 405}, {Config{Depth: 4, Remote: "node-b:7470"}, 1_000_321}} {
		for _, samples := range [][]int64{nil, make([]int64, len(times))} {
			if got, err := (&session{cfg: &c.cfg}).average(len(times), samples, batch); err != nil || got != c.want {
				t.Errorf("%+v: %g, %v, want %g", c.cfg, got, err, c.want)
			}
		}
		if got, err := (&session{cfg: &c.cfg}).average(1, nil, func([]int64) (int64, error) { return -1, nil }); err != nil || !math.IsNaN(got) {
			t.Errorf("a batch that was given up: %g, %v", got, err)
		}
	}
}
