// Package others measures alternatives to rfaas: ping-pongs of MPI_Send and MPI_Recv (OpenMPI, MPICH), UCX active messages,
// unary gRPC in Go and HTTP with keep-alive. Each is optional: the result of one that cannot run has the reason. rfaas itself is
// measured over TCP, for comparison with gRPC and HTTP.
//
// Every batch is paired with the bare ping-pong of as many bytes, to which the ratio is, as for rfaas's own calls.
package others

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

// Names are the systems that can be measured, as Config.Only takes them.
var Names = []string{"openmpi", "mpich", "ucx", "grpc-unix", "grpc-tcp", "http", "rfaas-tcp"}

// Config says what to measure. Latency is mandatory; it has provider, payloads, pairs, peer and CPUs.
type Config struct {
	Latency           latency.Config
	Only              []string // of Names; nil: all
	MPI               string   // path of the ping-pong without the MPI's name: build/bench/pingpong
	Self              []string // command line that runs Serve: rfaas bench echo-server
	Executor, Library string   // paths of the executor's program and of a library with echo, for rfaas-tcp
	Rounds            int      // round trips of a batch; 0: 5000

	patience time.Duration // how long a batch may take beyond Latency.Duration; 0: the constant patience
}

// other is a system to compare with.
type other interface {
	// start prepares the system. An error is the reason why it is skipped.
	start(ctx context.Context) error
	// batch makes about n round trips of size bytes, and returns their mean and, as far as it knows them, the samples.
	batch(ctx context.Context, size, n int) (mean float64, samples []int64, err error)
	stop()
	how() string
}

// Run measures the systems of cfg, and passes a result for each payload to emit.
func Run(ctx context.Context, cfg Config, emit func(*latency.Result) error) error {
	if cfg.Only == nil {
		cfg.Only = Names
	}
	for _, name := range cfg.Only {
		if !slices.Contains(Names, name) {
			return fmt.Errorf("%q is not one of %s", name, strings.Join(Names, ", "))
		}
	}
	if err := cfg.Latency.Validate(); err != nil {
		return err
	}
	if cfg.Rounds == 0 {
		cfg.Rounds = 5000
	}
	floor, err := latency.OpenFloor(cfg.Latency)
	if err != nil {
		return err
	}
	defer floor.Close()
	for _, name := range cfg.Only {
		if err := one(ctx, &cfg, name, cfg.make(name), floor, emit); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func (c *Config) make(name string) other {
	client, peer := c.Latency.CPUs[0], c.Latency.CPUs[1]
	verbs := c.Latency.Provider == "verbs"
	switch name {
	case "openmpi", "mpich":
		return &mpi{name: name, program: c.MPI + "." + name, cpus: fmt.Sprintf("%d,%d", client, peer), verbs: verbs}
	case "ucx":
		return &ucx{client: client, peer: peer, verbs: verbs}
	case "rfaas-tcp":
		return &overTCP{executor: c.Executor, library: c.Library, verbs: verbs, largest: slices.Max(c.Latency.Payloads)}
	}
	return &server{kind: name, command: c.Self, verbs: verbs}
}

// one measures one system with all payloads.
func one(ctx context.Context, cfg *Config, name string, o other, floor *latency.Floor, emit func(*latency.Result) error) error {
	blank := func(size int) *latency.Result {
		r := &latency.Result{Name: "other", Provider: name, Client: "c", Mode: "hot", Function: "echo", Buffers: latency.BuffersCopied, Payload: size, Depth: 1}
		if _, isServer := o.(*server); isServer {
			r.Client, r.Mode = "go", "blocking"
		}
		if _, isClient := o.(*overTCP); isClient {
			r.Client = "go"
		}
		if cfg.Latency.Provider != "shm" {
			r.Provider += " on " + cfg.Latency.Provider
		}
		r.CPUClient, r.CPUPeer = floor.CPUs()
		return r
	}
	skip := func(why error) error {
		r := blank(cfg.Latency.Payloads[0])
		latency.Start(r)()
		(&latency.Paired{}).Fill(r, "")
		r.Skipped = strings.Join(strings.Fields(why.Error()), " ")
		return emit(r)
	}
	defer o.stop()
	if err := o.start(ctx); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return skip(err)
	}
	for _, size := range cfg.Latency.Payloads {
		r := blank(size)
		p, err := measure(ctx, cfg, r, o, floor)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if p.Samples.Count() == 0 && err != nil {
			return skip(err)
		}
		p.Fill(r, floor.PingPong().String())
		r.Complete = r.Pairs >= cfg.Latency.Pairs
		r.Method = o.how() + fmt.Sprintf("; batches, each paired with bare ping-pongs between calibrations, until %d pairs count, at most %d pairs or %v", cfg.Latency.Pairs,
			triesMost*cfg.Latency.Pairs, cfg.Latency.Duration)
		if err != nil {
			r.Method += fmt.Sprintf("; ended early: %v", err)
		}
		if err := emit(r); err != nil {
			return err
		}
		if err != nil {
			return nil // larger payloads would fail in the same way
		}
	}
	return nil
}

// triesMost is how many pairs are tried for each that is wanted: virtual CPUs often move while an MPI starts.
const triesMost = 4

// measure makes pairs of one payload, at least one, until as many as wanted count or tries or duration are used up. After an error,
// the pairs measured before it are kept.
func measure(ctx context.Context, cfg *Config, r *latency.Result, o other, floor *latency.Floor) (p *latency.Paired, err error) {
	defer latency.Start(r)()
	p = new(latency.Paired)
	n := cfg.Rounds
	if r.Payload > 16<<10 {
		n = max(n/20, 20)
	}
	bare := make([]int64, min(n, 1000))
	began := time.Now()
	for tried := 0; p.Len() < cfg.Latency.Pairs && tried < triesMost*cfg.Latency.Pairs && (tried == 0 || time.Since(began) < cfg.Latency.Duration); tried++ {
		before, err := floor.Calibrate()
		if err != nil {
			return p, err
		}
		base, err := floor.Batch(floor.PingPong(), r.Payload, len(bare), bare)
		if err != nil {
			return p, err
		}
		mean, samples, err := oneBatch(ctx, cfg, o, r.Payload, n)
		if err != nil {
			return p, err
		}
		after, err := floor.Calibrate()
		if err != nil {
			return p, err
		}
		p.Samples.Add(samples...) // also of a pair that does not count: percentiles include disturbances
		if !math.IsNaN(base) {
			p.FloorSamples.Add(bare...)
		}
		p.Add(mean, base, before, after)
		r.BatchCalls = max(len(samples), r.BatchCalls)
		cfg.Latency.Progress(fmt.Sprintf("%s %d B: %d of %d pairs", r.Provider, r.Payload, p.Len(), cfg.Latency.Pairs))
	}
	return p, nil
}

// patience is how long a batch may take beyond the duration of a result. A busy machine takes seconds instead of milliseconds.
const patience = 10 * time.Second

// oneBatch makes a batch, and ends it if it hangs.
func oneBatch(ctx context.Context, cfg *Config, o other, size, n int) (mean float64, samples []int64, err error) {
	limit := cfg.Latency.Duration + cmp.Or(cfg.patience, patience)
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	mean, samples, err = o.batch(bounded, size, n)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("a batch of %d B did not end within %v: check that this system runs on the device (%w)", size, limit, err)
	}
	return mean, samples, err
}

// lookup finds a program. Its error names the package that has it.
func lookup(program, from string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%s is not installed (Debian: %s)", program, from)
	}
	return path, nil
}

var errVerbs = errors.New("not on verbs: it supports shared memory and TCP only")
