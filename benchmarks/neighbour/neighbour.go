// Package neighbour measures how workers slow down another job of their node, and how soon they leave the node. The job, called the neighbour, is a
// process of normal priority with a thread on each of its CPUs, which repeats fixed work. Batches time this work alone, with workers that
// compute without a pause on the same CPUs or on the other half of the CPUs, and with a control.
package neighbour

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
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
	"github.com/rfaas-go/rfaas/internal/topology"
)

// Config says what to measure. Executor, Job, Library and Secret are mandatory.
type Config struct {
	Executor string        // path of the program
	Job      []string      // command that calls ServeJob
	Library  string        // build/functions/echo.so
	Secret   string        // path of a secret; created if it does not exist
	CPUs     []int         // nil: all of this process
	Only     []string      // of Parts; nil: all
	Pairs    int           // 0: 21
	Batch    time.Duration // of the kernel alone; 0: 100 ms
	Yield    time.Duration // yield-after while leases have to go; 0: 500 ms
	Progress func(string)
}

// Parts are what Run measures: the slowdowns of each kind of job, and the ends of leases.
var Parts = []string{"compute", "bandwidth", "latency", "wake-up", "ends"}

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
	if cfg.Only == nil {
		cfg.Only = Parts
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
		err := cfg.withExecutor(ctx, where.workers, []string{"--yield-after", "1m"}, func(h *harvest) (err error) {
			s := sides{cfg: &cfg, workers: where.workers, h: h}
			if s.j, err = startJob(ctx, cfg.Job); err != nil {
				return err
			}
			defer s.j.end()
			if where.name == "beside" {
				if s.other, err = startJob(ctx, cfg.Job); err != nil {
					return err
				}
				defer s.other.end()
			}
			for _, kind := range Parts[:4] {
				if !slices.Contains(cfg.Only, kind) {
					continue
				}
				if len(where.job) == 1 && kind == "latency" || s.other != nil && kind == "wake-up" {
					continue // threads of latency need a CPU each; wake-up is measured on the workers' CPUs only
				}
				if err := s.measure(ctx, kind, where.name, where.job, emit); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if !slices.Contains(cfg.Only, "ends") {
		return nil
	}
	if err := cfg.leaving(ctx, fmt.Sprintf("yield-after %v", cfg.Yield), cfg.useCPUs, emit); err != nil {
		return err
	}
	return cfg.leaving(ctx, "yield-memory", cfg.useMemory, emit)
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

// ErrOthers says that leases end although the neighbour has not begun.
var ErrOthers = errors.New("other programs use the node's CPUs or memory: measure without them")

// harvest is a lease with one worker on each CPU.
type harvest struct {
	session *client.Session
	lease   *client.Lease
	spin    *client.Function
}

// withExecutor calls f with a lease on all cores of an executor that yields.
func (cfg *Config) withExecutor(ctx context.Context, cpus []int, settings []string, f func(*harvest) error) (err error) {
	d, err := daemon.Start(ctx, cfg.Executor, append(settings, "--listen", "127.0.0.1:0", "--secret-file", cfg.Secret, "--providers", "shm", "--grace", "2s",
		"--cores", config.Cores{List: cpus}.String(), "--pool", "0", "--cache-time", "0s")...)
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

// failure is the first error of a worker's calls.
type failure struct {
	err error
	at  time.Duration // monotonic()
}

// during calls f while all workers compute. Their client's threads are blocked meanwhile. failed receives a failure of each worker whose calls fail.
func (h *harvest) during(ctx context.Context, f func(failed <-chan failure)) error {
	const piece = 10 * time.Millisecond
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var over atomic.Bool
	var wg sync.WaitGroup
	begun := make(chan error, h.lease.Workers())
	failed := make(chan failure, h.lease.Workers())
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
					failed <- failure{err, monotonic()}
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
	for f := range failed {
		errs = append(errs, f.err)
	}
	return errors.Join(errs...)
}

// unitsFor returns how many units of work take about as long as a batch.
func unitsFor(j *job, kind string, cpus []int, batch time.Duration) (int64, error) {
	if _, err := j.do(order{Kind: kind, CPUs: cpus, Units: 1}); err != nil { // the first run may allocate
		return 0, err
	}
	for units := int64(1); ; units *= 2 {
		a, err := j.do(order{Kind: kind, CPUs: cpus, Units: units})
		if err != nil || a.Took > batch/4 {
			return max(int64(float64(units)*float64(batch)/float64(a.Took)), 1), err
		}
	}
}

// sides times three batches in turn: the job alone, the job beside the workers, and the control. The control shows how the machine slows down the
// job without workers: it is the job alone once more, or beside an ordinary program that computes on the workers' CPUs.
type sides struct {
	cfg     *Config
	j       *job
	other   *job // the ordinary program; nil: the job alone once more
	workers []int
	h       *harvest
}

func (s *sides) run(ctx context.Context, side int, o order) (a answer, err error) {
	switch {
	case side == 1:
		for i := range s.h.lease.Workers() {
			o.Workers = append(o.Workers, s.h.lease.Worker(i).PID())
		}
		failed := s.h.during(ctx, func(<-chan failure) { a, err = s.j.do(o) })
		return a, errors.Join(err, failed)
	case side == 2 && s.other != nil:
		units, err := unitsFor(s.other, "compute", s.workers, 2*s.cfg.Batch)
		if err != nil {
			return a, err
		}
		if err := s.other.begin(order{Kind: "compute", CPUs: s.workers, Units: units}); err != nil {
			return a, err
		}
		if a, err = s.j.do(o); err != nil {
			return a, err
		}
		_, err = s.other.finish()
		return a, err
	}
	return s.j.do(o)
}

func percentile95(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[int(math.Ceil(0.95*float64(len(list))))-1]
}

// total adds up what a job's threads did in one kind of batches.
type total struct{ took, cpu, waited, workers time.Duration }

func (t *total) add(a *answer) {
	t.took, t.cpu, t.waited, t.workers = t.took+a.Time, t.cpu+a.CPU, t.waited+a.Waited, t.workers+a.Workers
}

// parts describes the two parts of a slowdown: time that the job waited for a CPU, and more processor time for the same work. If the workers are on the job's
// CPUs, it also gives their processor time there, which they took from the job. Other programs can only make that time shorter.
func (t *total) parts(alone *total) string {
	if t.took == 0 || alone.cpu == 0 {
		return ""
	}
	text := fmt.Sprintf("; its threads waited for a CPU for %.2f %% of their time (alone %.2f %%), and used %.3f times the processor time",
		100*float64(t.waited)/float64(t.took), 100*float64(alone.waited)/float64(alone.took), float64(t.cpu)/float64(alone.cpu))
	if t.workers > 0 {
		text += fmt.Sprintf("; the workers ran for %.2f %% of that time", 100*float64(t.workers)/float64(t.took))
	}
	return text
}

// record adds a pair of batches: their times or, if the job sleeps, the delays of its wake-ups.
func record(p *latency.Paired, with, alone *answer) (ratio float64) {
	if len(with.Late) == 0 || len(alone.Late) == 0 {
		p.Samples.Add(int64(with.Took))
		p.FloorSamples.Add(int64(alone.Took))
		ratio = float64(with.Took) / float64(alone.Took)
		p.Add(float64(with.Took), float64(alone.Took))
		return ratio
	}
	mean := func(h *latency.Histogram, list []time.Duration) float64 {
		sum := time.Duration(0)
		for _, l := range list {
			h.Add(int64(max(l, 1)))
			sum += max(l, 1)
		}
		return float64(sum) / float64(len(list))
	}
	with1, alone1 := mean(&p.Samples, with.Late), mean(&p.FloorSamples, alone.Late)
	p.Add(with1, alone1)
	return with1 / alone1
}

// measure emits a result for the job beside the workers, and one for the control. RatioP95 is over the pairs.
func (s *sides) measure(ctx context.Context, kind, where string, cpus []int, emit func(*latency.Result) error) error {
	control := "alone once more"
	if s.other != nil {
		control = "an ordinary program beside"
	}
	var results [2]*latency.Result
	var paired [2]latency.Paired
	var slowdowns [2][]float64
	var sums [3]total
	var ends [2]func()
	for i, function := range []string{kind + ", workers " + where, kind + ", " + control} {
		results[i] = &latency.Result{Name: "neighbour", Provider: "shm", Client: "go", Mode: "warm", Function: function, Buffers: latency.BuffersCopied, Depth: 1,
			Workers: len(s.workers) * (1 - i)}
		ends[i] = latency.Start(results[i])
	}
	units, err := unitsFor(s.j, kind, cpus, s.cfg.Batch)
	if err != nil {
		return err
	}
	for pair := range s.cfg.Pairs {
		var did [3]answer // alone, with workers, the control
		for i := range did {
			side := (i + pair) % len(did)
			if did[side], err = s.run(ctx, side, order{Kind: kind, CPUs: cpus, Units: units}); err != nil {
				return err
			}
			sums[side].add(&did[side])
		}
		for i := range paired {
			slowdowns[i] = append(slowdowns[i], record(&paired[i], &did[1+i], &did[0]))
		}
		s.cfg.Progress(fmt.Sprintf("neighbour: %s: pair %d of %d", results[0].Function, pair+1, s.cfg.Pairs))
	}
	for i, r := range results {
		paired[i].Fill(r, "the neighbour alone")
		r.RatioP95 = latency.Number(percentile95(slowdowns[i]))
		r.Parts = sums[1+i].parts(&sums[0])
		r.Complete = true
		ends[i]()
		r.Method = fmt.Sprintf("%d interleaved batches of a job with a thread on each of the CPUs %v: alone, with %d workers that compute without a pause, and %s; the ratio is the job's slowdown, its 95th percentile over the pairs %.3f%s",
			s.cfg.Pairs, cpus, len(s.workers), control, float64(r.RatioP95), r.Parts)
		if kind == "wake-up" {
			r.Method += ". Times are the delays from the moment at which a sleeping thread should wake until it runs"
		}
		if err := emit(r); err != nil {
			return err
		}
	}
	return nil
}

// useCPUs starts an executor with a lease and uses its CPUs until the lease ends.
func (cfg *Config) useCPUs(ctx context.Context, j *job) (took time.Duration, err error) {
	err = cfg.withExecutor(ctx, cfg.CPUs, []string{"--yield-after", cfg.Yield.String()}, func(h *harvest) error {
		units, err := unitsFor(j, "compute", cfg.CPUs, cfg.Yield/5) // long batches, because no thread computes between two of them
		if err != nil {
			return err
		}
		took, err = h.untilEnded(ctx, "yield-after", func() (began time.Duration, err error) {
			began = monotonic()
			_, err = j.do(order{Kind: "compute", CPUs: cfg.CPUs, Units: units})
			return began, err
		})
		return err
	})
	return took, err
}

// useMemory starts an executor with a lease, and takes memory of the node until the lease ends. The time begins when less memory is available than the
// executor's setting. The job goes on taking memory after that, as a real job would.
func (cfg *Config) useMemory(ctx context.Context, j *job) (took time.Duration, err error) {
	const spare, step = 512 << 20, 768 << 20 // bytes of the node's memory: free above the setting at first, and taken by the job
	m, err := topology.NodeMemory("/")
	if err != nil {
		return 0, err
	}
	if m.Available < 4*step {
		return 0, fmt.Errorf("%d MiB of memory available: want %d", m.Available>>20, 4*step>>20)
	}
	reserve := (m.Available - spare) >> 20
	settings := []string{"--yield-after", "1m", "--memory", "256MiB", "--yield-memory", fmt.Sprintf("%dMiB", reserve)}
	err = cfg.withExecutor(ctx, cfg.CPUs, settings, func(h *harvest) error {
		took, err = h.untilEnded(ctx, "yield-memory", func() (time.Duration, error) {
			if now, err := topology.NodeMemory("/"); err != nil || now.Available < reserve<<20 {
				return 0, err
			}
			a, err := j.do(order{Bytes: step, Short: reserve << 20}) // more than once, if other programs give memory back meanwhile
			return a.Short, err
		})
		return err
	})
	return took, err
}

// untilEnded calls use until a worker's call fails, for which the setting must be the reason. It returns how long after the beginning the call has failed. The
// beginning is the first time other than 0 that use returns.
func (h *harvest) untilEnded(ctx context.Context, setting string, use func() (time.Duration, error)) (took time.Duration, err error) {
	const most = time.Minute
	var why failure
	var began time.Duration
	failed := h.during(ctx, func(failed <-chan failure) {
		for start := monotonic(); err == nil && why.err == nil && monotonic()-start < most; {
			var at time.Duration
			if at, err = use(); began == 0 {
				began = at
			}
			select {
			case why = <-failed:
			case <-time.After(time.Millisecond):
			}
		}
	})
	switch {
	case err != nil:
		return 0, err
	case why.err == nil && failed != nil:
		return 0, fmt.Errorf("before the neighbour began: %w", failed)
	case why.err == nil:
		return 0, fmt.Errorf("the lease has not ended within %v", most)
	case !strings.Contains(why.err.Error(), setting):
		return 0, fmt.Errorf("%v after the neighbour began: %w", why.at-began, why.err)
	case began == 0 || why.at < began:
		return 0, fmt.Errorf("%w: the lease ended before the neighbour had taken the memory", ErrOthers)
	}
	return why.at - began, nil
}

// leaving measures the time from the start of a neighbour to the end of a lease.
func (cfg *Config) leaving(ctx context.Context, name string, use func(context.Context, *job) (time.Duration, error), emit func(*latency.Result) error) error {
	r := &latency.Result{Name: "neighbour", Provider: "shm", Client: "go", Mode: "warm", Function: "lease ends (" + name + ")", Buffers: latency.BuffersCopied, Depth: 1,
		Workers: len(cfg.CPUs)}
	end := latency.Start(r)
	var p latency.Paired
	const rounds = 5
	others := 0
	for round := 0; round < rounds; {
		j, err := startJob(ctx, cfg.Job)
		if err != nil {
			return err
		}
		took, err := use(ctx, j)
		j.end()
		if errors.Is(err, client.ErrBusy) || errors.Is(err, client.ErrLease) || errors.Is(err, ErrOthers) { // the lease has ended, or was not given, before the job began
			if others++; others > rounds {
				return fmt.Errorf("%w: %w", ErrOthers, err)
			}
			continue
		}
		if err != nil {
			return err
		}
		round++
		p.Samples.Add(int64(took))
		p.Add(float64(took), float64(took))
		cfg.Progress(fmt.Sprintf("neighbour: %s: round %d of %d", r.Function, round, rounds))
	}
	p.Fill(r, "")
	r.Complete = true
	end()
	r.Method = fmt.Sprintf("%d times: from when a neighbour begins to use the CPUs of a lease, or has taken so much of the node's memory that it is short, to the first call that fails because its lease has ended", rounds)
	return emit(r)
}
