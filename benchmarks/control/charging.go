package control

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/daemon"
)

// ChargingConfig says how to measure what charging adds to a call. Executor, Manager, Library and Provider are mandatory.
type ChargingConfig struct {
	Executor, Manager string // paths of the programs
	Library           string // build/functions/echo.so
	Provider          string
	CPUs              []int // of client and worker; nil: chosen
	Dir               string
	Pairs             int           // 0: 21
	Batch             time.Duration // 0: 100 ms
}

// caller makes calls of one lease.
type caller struct {
	session  *client.Session
	lease    *client.Lease
	function *client.Function
}

// Charging compares calls to an executor that charges every 10 ms, a hundred times as often as by default, with calls to
// one that has no resource manager. Both workers have the same core, on which the idle one sleeps. OverFloor is the
// median difference of batch means.
func Charging(ctx context.Context, cfg ChargingConfig) (r *latency.Result, err error) {
	l := latency.Config{Provider: cfg.Provider, Modes: nil, Payloads: []int{8}, CPUs: cfg.CPUs}
	l.Modes = append(l.Modes, 0)
	if err := l.Validate(); err != nil {
		return nil, err
	}
	if cfg.Pairs == 0 {
		cfg.Pairs = 21
	}
	if cfg.Batch == 0 {
		cfg.Batch = 100 * time.Millisecond
	}
	secret := filepath.Join(cfg.Dir, "secret")
	m, err := daemon.Start(ctx, cfg.Manager, "--listen", "127.0.0.1:0", "--secret-file", secret, "--providers", cfg.Provider)
	if err != nil {
		return nil, err
	}
	defer m.Stop()
	core := fmt.Sprintf("%d-%d", l.CPUs[1], l.CPUs[1])
	var callers [2]caller // without accounts, with them
	defer func() {
		for _, c := range callers {
			if c.lease != nil {
				err = errors.Join(err, c.lease.Release(context.WithoutCancel(ctx)))
			}
			if c.session != nil {
				err = errors.Join(err, c.session.Close())
			}
		}
	}()
	for i, more := range [][]string{{}, {"--manager", m.Address, "--charge-interval", "10ms"}} {
		d, err := daemon.Start(ctx, cfg.Executor, append([]string{"--listen", "127.0.0.1:0", "--secret-file", secret, "--providers", cfg.Provider,
			"--cores", core, "--grace", "2s", "--state-dir", filepath.Join(cfg.Dir, fmt.Sprint("state", i))}, more...)...)
		if err != nil {
			return nil, err
		}
		defer d.Stop()
		c := &callers[i]
		if c.session, err = client.Connect(ctx, client.Options{Executor: d.Address, Provider: cfg.Provider, SecretFile: secret}); err != nil {
			return nil, err
		}
		if c.lease, err = c.session.Lease(ctx, client.LeaseOptions{Library: cfg.Library, WaitMode: client.Adaptive}); err != nil {
			return nil, err
		}
		if c.function, err = c.lease.Function("echo"); err != nil {
			return nil, err
		}
	}
	r = &latency.Result{Name: "control", Provider: cfg.Provider, Client: "go", Mode: "adaptive", Function: "call while charged", Buffers: latency.BuffersCopied,
		Payload: 8, Depth: 1, CPUClient: l.CPUs[0], CPUPeer: l.CPUs[1]}
	end := latency.Start(r)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, err
	}
	mine.Set(l.CPUs[0])
	if err := unix.SchedSetaffinity(0, &mine); err != nil {
		return nil, err
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	in, out := make([]byte, 8), make([]byte, 8)
	batch := func(c *caller, n int, samples *latency.Histogram) (float64, error) {
		for range 200 { // wakes the worker
			if _, err := c.function.Invoke(ctx, in, out); err != nil {
				return 0, err
			}
		}
		runtime.Gosched()
		began := time.Now()
		last := time.Duration(0)
		for range n {
			if _, err := c.function.Invoke(ctx, in, out); err != nil {
				return 0, err
			}
			if samples != nil {
				now := time.Since(began)
				samples.Add(int64(now - last))
				last = now
			}
		}
		return float64(time.Since(began)) / float64(n), nil
	}
	const trial = 5000
	mean, err := batch(&callers[0], trial, nil)
	if err != nil {
		return nil, err
	}
	n := max(int(float64(cfg.Batch)/mean), 20)
	r.BatchCalls = n
	var p latency.Paired
	var differences []float64
	for pair := range cfg.Pairs {
		var means [2]float64
		for k := range means {
			side := (k + pair) % 2
			if means[side], err = batch(&callers[side], n, nil); err != nil {
				return nil, err
			}
		}
		p.Add(means[1], means[0])
		differences = append(differences, means[1]-means[0])
	}
	for _, side := range []struct {
		c *caller
		h *latency.Histogram
	}{{&callers[0], &p.FloorSamples}, {&callers[1], &p.Samples}} {
		if _, err := batch(side.c, min(n, 20_000), side.h); err != nil {
			return nil, err
		}
	}
	p.Fill(r, "the same without accounts")
	r.OverFloor = latency.Number(latency.Median(differences))
	end()
	r.Complete = true
	r.Method = fmt.Sprintf("%d paired, interleaved batches of %d calls of the Go client, pinned, to two executors on one core, one of which charges every 10 ms", cfg.Pairs, n)
	return r, nil
}
