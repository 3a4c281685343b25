// Package neighbour measures what workers do to another job of their node, and how soon they leave it. The neighbour is a kernel of
// fixed work on threads of this process, which have normal priority and one CPU each. Each pair of batches times the kernel
// alone and with workers that compute without a pause, on the same CPUs or on the other half of the CPUs.
package neighbour

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/daemon"
)

// Config says what to measure. Executor, Library and Secret are mandatory.
type Config struct {
	Executor string        // path of the program
	Library  string        // build/functions/echo.so
	Secret   string        // path of a secret; created if it does not exist
	CPUs     []int         // nil: all of this process
	Pairs    int           // 0: 21
	Batch    time.Duration // of the kernel alone; 0: 100 ms
	Yield    time.Duration // yield-after while leases have to go; 0: 500 ms
	Progress func(string)
}

// Kinds of neighbours: a loop in registers, a triad over arrays that exceed the caches, and threads that wait for each other's words.
var kinds = []struct {
	name string
	make func(batch time.Duration) kernel
}{{"compute", compute}, {"bandwidth", triad}, {"latency", pingPong}}

// kernel is the work of one thread. thread is its index among n. A kernel of one thread alone may be nil.
type kernel func(thread, n int, units int64)

// Run measures each kind of neighbour on the workers' CPUs and beside them, then how soon a lease yields.
func Run(ctx context.Context, cfg Config, emit func(*latency.Result) error) error {
	if cfg.CPUs == nil {
		cfg.CPUs = allowed()
	}
	if cfg.Pairs == 0 {
		cfg.Pairs = 21
	}
	if cfg.Batch == 0 {
		cfg.Batch = 100 * time.Millisecond
	}
	if cfg.Yield == 0 {
		cfg.Yield = 500 * time.Millisecond
	}
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	if cfg.Pairs < 1 || cfg.Batch < time.Millisecond || len(cfg.CPUs) < 2 {
		return fmt.Errorf("%d pairs, batches of %v, %d CPUs: want at least 1 pair, 1ms and 2 CPUs", cfg.Pairs, cfg.Batch, len(cfg.CPUs))
	}
	half := len(cfg.CPUs) / 2
	for _, where := range []struct {
		name         string
		job, workers []int
	}{{"on the same CPUs", cfg.CPUs, cfg.CPUs}, {"beside", cfg.CPUs[:half], cfg.CPUs[half:]}} {
		err := cfg.withExecutor(ctx, where.workers, time.Minute, func(h *harvest) error {
			for _, k := range kinds {
				if len(where.job) == 1 && k.name == "latency" {
					continue // its threads need a CPU each
				}
				if err := cfg.measure(k.name+", workers "+where.name, k.make(cfg.Batch), where.job, h, emit); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return cfg.leaving(ctx, emit)
}

// allowed returns the CPUs that this process may use.
func allowed() (list []int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			list = append(list, cpu)
		}
	}
	return list
}

// harvest is a lease with one worker on each CPU.
type harvest struct {
	session *client.Session
	lease   *client.Lease
	spin    *client.Function
}

// withExecutor calls f with a lease on all cores of an executor that yields.
func (cfg *Config) withExecutor(ctx context.Context, cpus []int, yield time.Duration, f func(*harvest) error) (err error) {
	d, err := daemon.Start(ctx, cfg.Executor, "--listen", "127.0.0.1:0", "--secret-file", cfg.Secret, "--providers", "shm", "--grace", "2s",
		"--cores", config.Cores{List: cpus}.String(), "--yield-after", yield.String(), "--pool", "0", "--cache-time", "0s")
	if err != nil {
		return err
	}
	defer d.Stop()
	h := &harvest{}
	if h.session, err = client.Connect(ctx, client.Options{Executor: d.Address, Provider: "shm", SecretFile: cfg.Secret}); err != nil {
		return err
	}
	defer h.session.Close()
	i, err := h.session.Lease(ctx, client.LeaseOptions{Library: cfg.Library, Workers: len(cpus), WaitMode: client.Warm})
	if err != nil {
		return err
	}
	h.lease = i
	defer func() { err = errors.Join(err, ignoreEnded(h.lease.Release(context.WithoutCancel(ctx)))) }()
	if h.spin, err = h.lease.Function("spin"); err != nil {
		return err
	}
	return f(h)
}

func ignoreEnded(err error) error {
	if errors.Is(err, client.ErrLease) {
		return nil
	}
	return err
}

// during calls f while all workers compute. Their client's threads are blocked meanwhile. failed receives the first error of each worker's calls.
func (h *harvest) during(ctx context.Context, f func(failed <-chan error)) error {
	const piece = 10 * time.Millisecond
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var over atomic.Bool
	var wg sync.WaitGroup
	begun := make(chan error, h.lease.Workers())
	failed := make(chan error, h.lease.Workers())
	for i := range h.lease.Workers() {
		w := h.lease.Worker(i)
		wg.Go(func() {
			in, out := binary.LittleEndian.AppendUint64(nil, uint64(piece)), make([]byte, 8)
			for first := true; !over.Load(); first = false {
				_, err := w.Invoke(ctx, h.spin, in, out)
				if first {
					begun <- err
				}
				if err != nil {
					failed <- err
					return
				}
			}
		})
	}
	var errs []error
	for range h.lease.Workers() {
		errs = append(errs, <-begun)
	}
	if errors.Join(errs...) == nil {
		f(failed)
	}
	over.Store(true)
	wg.Wait()
	close(failed)
	for err := range failed {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// together runs a kernel on a thread for each CPU and returns the time until the last one has ended.
func together(k kernel, cpus []int, units int64) time.Duration {
	var ready, done sync.WaitGroup
	begin := make(chan struct{})
	for i, cpu := range cpus {
		ready.Add(1)
		done.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with its CPU
			var set unix.CPUSet
			set.Set(cpu)
			_ = unix.SchedSetaffinity(0, &set)
			ready.Done()
			<-begin
			k(i, len(cpus), units)
		})
	}
	ready.Wait()
	began := time.Now()
	close(begin)
	done.Wait()
	return time.Since(began)
}

// unitsFor returns how many units of work take about as long as a batch.
func unitsFor(k kernel, cpus []int, batch time.Duration) int64 {
	together(k, cpus, 1) // the first run may allocate
	for units := int64(1); ; units *= 2 {
		if took := together(k, cpus, units); took > batch/4 {
			return max(int64(float64(units)*float64(batch)/float64(took)), 1)
		}
	}
}

func (cfg *Config) measure(name string, k kernel, cpus []int, h *harvest, emit func(*latency.Result) error) error {
	r := &latency.Result{Name: "neighbour", Provider: "shm", Client: "go", Mode: "warm", Function: name, Buffers: latency.BuffersCopied, Depth: 1,
		Workers: h.lease.Workers()}
	end := latency.Start(r)
	units := unitsFor(k, cpus, cfg.Batch)
	var p latency.Paired
	var slowdowns []float64
	for pair := range cfg.Pairs {
		var took [2]time.Duration // alone, with workers
		sides := []int{0, 1}
		if pair%2 == 1 {
			slices.Reverse(sides)
		}
		for _, side := range sides {
			if side == 0 {
				took[0] = together(k, cpus, units)
			} else if err := h.during(context.Background(), func(<-chan error) { took[1] = together(k, cpus, units) }); err != nil {
				return err
			}
		}
		p.Samples.Add(int64(took[1]))
		p.FloorSamples.Add(int64(took[0]))
		p.Add(float64(took[1]), float64(took[0]))
		slowdowns = append(slowdowns, float64(took[1])/float64(took[0]))
		cfg.Progress(fmt.Sprintf("neighbour: %s: pair %d of %d", name, pair+1, cfg.Pairs))
	}
	p.Fill(r, "the neighbour alone")
	r.Complete = true
	end()
	slices.Sort(slowdowns)
	p95 := slowdowns[int(math.Ceil(0.95*float64(len(slowdowns))))-1]
	r.Method = fmt.Sprintf("%d paired, interleaved batches of a kernel with a thread on each of the CPUs %v, alone and with %d workers that compute without a pause; the ratio is the neighbour's slowdown, its 95th percentile over the pairs %.3f",
		cfg.Pairs, cpus, h.lease.Workers(), p95)
	return emit(r)
}

// leaving measures the time from the start of a neighbour on the workers' CPUs to the end of the lease.
func (cfg *Config) leaving(ctx context.Context, emit func(*latency.Result) error) error {
	r := &latency.Result{Name: "neighbour", Provider: "shm", Client: "go", Mode: "warm", Function: fmt.Sprintf("lease ends (yield-after %v)", cfg.Yield),
		Buffers: latency.BuffersCopied, Depth: 1, Workers: len(cfg.CPUs)}
	end := latency.Start(r)
	var p latency.Paired
	const rounds = 5
	for round := range rounds {
		err := cfg.withExecutor(ctx, cfg.CPUs, cfg.Yield, func(h *harvest) error {
			units := unitsFor(compute(0), cfg.CPUs, cfg.Yield/5) // long batches, because no thread computes between two of them
			var took time.Duration
			var why error
			err := h.during(ctx, func(failed <-chan error) {
				for began := time.Now(); why == nil && took < 20*cfg.Yield; took = time.Since(began) {
					together(compute(0), cfg.CPUs, units)
					select {
					case why = <-failed:
					default:
					}
				}
			})
			switch {
			case took == 0:
				return fmt.Errorf("before the neighbour began: %w (if other programs use the CPUs %v, measure without them)", err, cfg.CPUs)
			case why == nil:
				return fmt.Errorf("the lease has not ended %v after the neighbour began", took)
			case !strings.Contains(why.Error(), "yield-after"):
				return fmt.Errorf("%v after the neighbour began: %w", took, why)
			}
			p.Samples.Add(int64(took))
			p.Add(float64(took), float64(took))
			return nil
		})
		if err != nil {
			return err
		}
		cfg.Progress(fmt.Sprintf("neighbour: %s: round %d of %d", r.Function, round+1, rounds))
	}
	p.Fill(r, "")
	r.Complete = true
	end()
	r.Method = fmt.Sprintf("%d times: from the start of a neighbour that computes on all CPUs of a lease to the first call that fails because its lease has ended", rounds)
	return emit(r)
}

var sink atomic.Uint64

// compute is a loop in registers.
func compute(time.Duration) kernel {
	return func(thread, _ int, units int64) {
		x := uint64(thread) + 1
		for range units * 1000 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		sink.Add(x)
	}
}

// triad streams over arrays of 32 MiB.
func triad(time.Duration) kernel {
	const n = 4 << 20
	var mu sync.Mutex
	arrays := map[int][3][]float64{}
	return func(thread, _ int, units int64) {
		mu.Lock()
		a, ok := arrays[thread]
		if !ok {
			for i := range a {
				a[i] = make([]float64, n)
				for j := range a[i] {
					a[i][j] = float64(i)
				}
			}
			arrays[thread] = a
		}
		mu.Unlock()
		for range units {
			x, y, z := a[0], a[1][:n], a[2][:n]
			for j := range x {
				x[j] = y[j] + 3*z[j]
			}
		}
	}
}

// pingPong is a round trip between each pair of threads, as the messages of a job that waits for its neighbours.
func pingPong(time.Duration) kernel {
	words := make([]struct {
		there, back atomic.Int64
		_           [112]byte
	}, 1024)
	return func(thread, n int, units int64) {
		if thread == n-1 && n%2 == 1 {
			return // it has no partner
		}
		w := &words[thread/2]
		for i := range units * 100 {
			if thread%2 == 0 {
				w.there.Store(i + 1)
				for w.back.Load() != i+1 {
				}
			} else {
				for w.there.Load() != i+1 {
				}
				w.back.Store(i + 1)
			}
		}
		if thread%2 == 0 {
			w.there.Store(0)
			w.back.Store(0)
		}
	}
}
