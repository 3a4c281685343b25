// Package scaling measures how calls per second grow with workers and with clients, on one executor of this node. The floor of each
// batch is the same work by as many threads of this process, without calls.
package scaling

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/daemon"
)

// Config says what to measure. Executor, Library and Provider are mandatory.
type Config struct {
	Executor string // path of the program
	Library  string // build/functions/echo.so
	Provider string
	Secret   string          // path of a secret; created if it does not exist
	Max      int             // largest number of workers and of clients; 0: the CPUs of this machine, at least 2
	Works    []time.Duration // of one call; nil: 1 ms and 100 us
	Pairs    int             // 0: 7
	Batch    time.Duration   // 0: 100 ms
	Progress func(string)
}

// Run starts an executor and measures 1 to Max workers of one client, then 1 to Max clients of one worker each.
func Run(ctx context.Context, cfg Config, emit func(*latency.Result) error) error {
	if cfg.Max == 0 {
		cfg.Max = max(runtime.NumCPU(), 2)
	}
	if cfg.Max < 1 || cfg.Max > 1024 || cfg.Pairs < 0 || cfg.Batch < 0 {
		return fmt.Errorf("up to %d workers, %d pairs, batches of %v: want at most 1024 workers, and nothing negative", cfg.Max, cfg.Pairs, cfg.Batch)
	}
	if cfg.Works == nil {
		cfg.Works = []time.Duration{time.Millisecond, 100 * time.Microsecond}
	}
	if cfg.Pairs == 0 {
		cfg.Pairs = 7
	}
	if cfg.Batch == 0 {
		cfg.Batch = 100 * time.Millisecond
	}
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	shared := (cfg.Max + runtime.NumCPU() - 1) / runtime.NumCPU()
	d, err := daemon.Start(ctx, cfg.Executor, "--listen", "127.0.0.1:0", "--secret-file", cfg.Secret, "--providers", cfg.Provider,
		"--share-cores", fmt.Sprint(shared), "--grace", "2s")
	if err != nil {
		return err
	}
	defer d.Stop()
	for _, work := range cfg.Works {
		for n := 1; n <= cfg.Max; n = next(n, cfg.Max) {
			if err := measure(ctx, &cfg, d.Address, n, 1, work, emit); err != nil {
				return err
			}
		}
		for n := 2; n <= cfg.Max; n = next(n, cfg.Max) {
			if err := measure(ctx, &cfg, d.Address, 1, n, work, emit); err != nil {
				return err
			}
		}
	}
	return nil
}

// next is twice n, but at most the largest number.
func next(n, most int) int {
	if n < most && 2*n > most {
		return most
	}
	return 2 * n
}

// callers are the goroutines that call, one for each worker.
type callers struct {
	sessions []*client.Session
	leases   []*client.Lease
	calls    []func(ctx context.Context, in, out []byte) error
}

func (c *callers) close(ctx context.Context) error {
	var errs []error
	for _, l := range c.leases {
		errs = append(errs, l.Release(ctx))
	}
	for _, s := range c.sessions {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// open leases workers for each of the clients.
func open(ctx context.Context, cfg *Config, address string, workers, clients int) (*callers, error) {
	var c callers
	for range clients {
		s, err := client.Connect(ctx, client.Options{Executor: address, Provider: cfg.Provider, SecretFile: cfg.Secret})
		if err != nil {
			return &c, err
		}
		c.sessions = append(c.sessions, s)
		l, err := s.Lease(ctx, client.LeaseOptions{Library: cfg.Library, Workers: workers, WaitMode: client.Adaptive})
		if err != nil {
			return &c, err
		}
		c.leases = append(c.leases, l)
		f, err := l.Function("spin")
		if err != nil {
			return &c, err
		}
		for i := range workers {
			w := l.Worker(i)
			c.calls = append(c.calls, func(ctx context.Context, in, out []byte) error {
				_, err := w.Invoke(ctx, f, in, out)
				return err
			})
		}
	}
	return &c, nil
}

// together runs each of the functions n times on a thread of its own. It returns the time until the last has ended, divided by the
// number of all runs. samples are the times of single runs.
func together(fs []func() error, n int, samples [][]int64) (mean float64, err error) {
	errs := make([]error, len(fs))
	var ready, done sync.WaitGroup
	begin := make(chan struct{})
	for i, f := range fs {
		ready.Add(1)
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ready.Done()
			<-begin
			last := time.Now()
			for range n {
				if errs[i] = f(); errs[i] != nil {
					return
				}
				now := time.Now()
				if samples != nil {
					samples[i] = append(samples[i], int64(now.Sub(last)))
				}
				last = now
			}
		})
	}
	ready.Wait()
	began := time.Now()
	close(begin)
	done.Wait()
	return float64(time.Since(began)) / float64(n*len(fs)), errors.Join(errs...)
}

func measure(ctx context.Context, cfg *Config, address string, workers, clients int, work time.Duration, emit func(*latency.Result) error) error {
	c, err := open(ctx, cfg, address, workers, clients)
	defer func() { _ = c.close(context.WithoutCancel(ctx)) }()
	if err != nil {
		return fmt.Errorf("%d workers of %d clients: %w", workers, clients, err)
	}
	r := &latency.Result{Name: "scaling", Provider: cfg.Provider, Client: "go", Mode: "adaptive", Function: "spin " + work.String(),
		Buffers: latency.BuffersCopied, Payload: 8, Depth: 1, Workers: workers, Clients: clients}
	end := latency.Start(r)
	in := binary.LittleEndian.AppendUint64(nil, uint64(work))
	calls, bare := make([]func() error, len(c.calls)), make([]func() error, len(c.calls))
	for i, call := range c.calls {
		out := make([]byte, 8)
		calls[i] = func() error { return call(ctx, in, out) }
		bare[i] = func() error {
			for until := time.Now().Add(work); time.Now().Before(until); {
			}
			return nil
		}
	}
	n := max(int(cfg.Batch/work), 5)
	r.BatchCalls = n * len(calls)
	if _, err := together(calls, max(n/10, 2), nil); err != nil { // warm-up
		return err
	}
	var p latency.Paired
	for pair := range cfg.Pairs {
		samples, floors := make([][]int64, len(calls)), make([][]int64, len(calls))
		var means [2]float64
		sides := []int{0, 1}
		if pair%2 == 1 {
			slices.Reverse(sides)
		}
		for _, side := range sides {
			var err error
			if side == 0 {
				means[0], err = together(bare, n, floors)
			} else {
				means[1], err = together(calls, n, samples)
			}
			if err != nil {
				return err
			}
		}
		p.Samples.Add(slices.Concat(samples...)...)
		p.FloorSamples.Add(slices.Concat(floors...)...)
		p.Add(means[1], means[0])
		cfg.Progress(fmt.Sprintf("scaling: %d workers, %d clients, %v: pair %d of %d", workers, clients, work, pair+1, cfg.Pairs))
	}
	p.Fill(r, "as many threads of one process")
	r.Complete = true
	end()
	r.Method = fmt.Sprintf("median of %d paired, interleaved batches of %d calls a worker on %d CPUs, clients not pinned; the function uses its core for %v; a time is that of the batch divided by all calls",
		cfg.Pairs, n, runtime.NumCPU(), work)
	return emit(r)
}
