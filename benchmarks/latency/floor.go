package latency

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/topology"
)

// Floor makes bare round trips between the batches of other measurements. Its peer sleeps during those. It belongs to the
// goroutine that opened it, which it locks to its thread.
type Floor struct {
	s   *session
	cfg Config
}

// OpenFloor starts the peer, for payloads up to the largest of cfg. It uses only Provider, Device, Payloads, Depth, CPUs, Peer
// and Remote of cfg.
func OpenFloor(cfg Config) (*Floor, error) {
	cfg.Modes, cfg.Function, cfg.Buffers, cfg.Slots = []dataplane.WaitMode{dataplane.Warm}, "", "", 0
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	s, err := openSession(&cfg, dataplane.Warm)
	if err != nil {
		runtime.UnlockOSThread()
		return nil, err
	}
	return &Floor{s, cfg}, nil
}

// Close ends the peer.
func (f *Floor) Close() {
	f.s.close()
	runtime.UnlockOSThread()
}

// CPUs returns the CPUs of client and peer.
func (f *Floor) CPUs() (client, peer int) { return f.cfg.CPUs[0], f.cfg.peerCPU() }

// pinned runs g on the client's CPU.
func (f *Floor) pinned(g func() error) error {
	allowed, err := topology.Affinity()
	if err != nil {
		return err
	}
	undo, err := pin(f.cfg.CPUs[0], f.cfg.peerCPU(), allowed)
	if err != nil {
		return err
	}
	defer undo()
	return g()
}

// Batch makes untimed bare round trips of a kind, about an eighth of n, then n timed ones, and returns their mean in ns. samples
// is nil or n long. If the batch was given up because something else used the processors, the mean is NaN and the samples are
// meaningless.
func (f *Floor) Batch(k raw.Kind, size, n int, samples []int64) (mean float64, err error) {
	err = f.pinned(func() error {
		mean, err = f.s.floor(k, size, size, 2+n/8, n, samples)
		return err
	})
	return mean, f.s.explain(err)
}

// PingPong is the kind of the bare ping-pong on this provider.
func (f *Floor) PingPong() raw.Kind {
	if f.cfg.Provider == dataplane.Verbs {
		return raw.Imm
	}
	return raw.Apart
}

// Calibrate measures a bare round trip: the median of five short batches, ns. NaN like Batch.
func (f *Floor) Calibrate() (float64, error) {
	kind, size, n := raw.Flag, 0, 400
	switch {
	case f.cfg.Provider == dataplane.Verbs:
		kind, size, n = raw.Imm, 8, 40
	case f.cfg.CPUs[0] == f.cfg.peerCPU():
		kind, size, n = raw.Eventfd, 1, 100
	}
	var now float64
	err := f.pinned(func() (err error) {
		now, err = f.s.calibrate(kind, size, n)
		return err
	})
	return now, f.s.explain(err)
}

// Paired collects batches of a measurement, each with a batch of its floor.
type Paired struct {
	Samples, FloorSamples Histogram
	pairs                 pairing
}

// Add takes one pair's means, ns, and the calibrations before and after it. It reports whether the pair counts: it does not if
// the calibrations differ too much or a mean is NaN.
func (p *Paired) Add(mean, floor float64, calibrations ...float64) bool {
	return p.pairs.add([]float64{floor, mean}, calibrations)
}

// Len is how many pairs count.
func (p *Paired) Len() int { return p.pairs.len() }

// Fill stores percentiles, ratios, rates and calibrations into a result. floor names the floor; if it is empty, there was none,
// and the result has no ratio.
func (p *Paired) Fill(r *Result, floor string) { p.pairs.fill(r, &p.Samples, &p.FloorSamples, floor) }

// Start stores load, time and clock cost into a result before it is measured. end stores the duration.
func Start(r *Result) (end func()) {
	began := time.Now()
	r.Load, r.StartedAt, r.ClockNS = LoadAverage(), began.UTC().Format(time.RFC3339), raw.Clock()
	return func() { r.Seconds = time.Since(began).Seconds() }
}

// bareKinds are what RunFloors measures, with the payloads that they have.
func bareKinds(cfg *Config) []floorKind {
	var kinds []floorKind
	add := func(k raw.Kind, sizes ...int) {
		for _, n := range sizes {
			kinds = append(kinds, floorKind{k, n, n})
		}
	}
	if cfg.Provider == dataplane.Verbs {
		add(raw.Imm, cfg.Payloads...)
	} else {
		add(raw.Near, cfg.Payloads...)
		add(raw.Apart, cfg.Payloads...)
	}
	add(raw.Read, cfg.Payloads...)
	add(raw.FetchAdd, 8)
	return kinds
}

// RunFloors measures the floors themselves, interleaved in one pair of processes: bare ping-pongs and reads of cfg's payloads, and
// fetch-and-adds. Their ratios are to the calibrations.
func RunFloors(ctx context.Context, cfg Config, emit func(*Result) error) error {
	f, err := OpenFloor(cfg)
	if err != nil {
		return err
	}
	defer f.Close()
	kinds := bareKinds(&f.cfg)
	all := make([]Paired, len(kinds))
	for i := range all {
		all[i].pairs.tolerance = f.cfg.tolerance()
	}
	counts := make([]int, len(kinds))
	first := Result{}
	end := Start(&first)
	began := time.Now()
	for round := range f.cfg.Pairs + 1 {
		if round > 1 && time.Since(began) > f.cfg.Duration*time.Duration(len(kinds)) {
			break
		}
		for i, k := range kinds {
			if err := ctx.Err(); err != nil {
				return err
			}
			if round == 0 { // finds the size of a batch
				mean, err := f.Batch(k.kind, k.size, 30, nil)
				if err != nil {
					return err
				}
				counts[i] = 20
				if !math.IsNaN(mean) {
					counts[i] = min(max(int(float64(f.cfg.batch(dataplane.Hot))/mean), 20), 100_000)
				}
				continue
			}
			before, err := f.Calibrate()
			if err != nil {
				return err
			}
			mean, err := f.Batch(k.kind, k.size, counts[i], nil)
			if err != nil {
				return err
			}
			// A second batch times each round trip, which makes it slower. If a wait was disturbed in it, the pair does not
			// count, because it would have a mean but no percentiles.
			samples := make([]int64, min(counts[i], 5000))
			sampled, err := f.Batch(k.kind, k.size, len(samples), samples)
			if err != nil {
				return err
			}
			if math.IsNaN(sampled) {
				mean = math.NaN()
			}
			after, err := f.Calibrate()
			if err != nil {
				return err
			}
			if all[i].Add(mean, before, before, after) {
				all[i].Samples.Add(samples...)
			}
		}
		f.cfg.Progress(fmt.Sprintf("%s floors: round %d of %d", f.cfg.Provider, round, f.cfg.Pairs))
	}
	end()
	for i, k := range kinds {
		r := first
		r.Name, r.Provider, r.Client, r.Mode, r.Function, r.Buffers = "floor", f.cfg.Provider, "c", "hot", k.kind.String(), BuffersRegistered
		r.Payload, r.Depth, r.BatchCalls = k.size, 1, counts[i]
		r.CPUClient, r.CPUPeer = f.CPUs()
		r.Remote = f.cfg.Remote
		r.Method = fmt.Sprintf("median of %d interleaved batches of bare round trips between calibrations", f.cfg.Pairs)
		all[i].Fill(&r, "calibration")
		r.Complete = r.Pairs >= f.cfg.Pairs
		if err := emit(&r); err != nil {
			return err
		}
	}
	return nil
}

// Median of values in any order; NaN when there are none.
func Median(values []float64) float64 { return median(slices.Clone(values)) }
