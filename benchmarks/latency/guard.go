package latency

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Bound is the largest allowed ratio of a measurement to the floor of the same run. 0: not bounded.
type Bound struct {
	Provider       string
	Mode           dataplane.WaitMode
	Payload, Depth int
	Result         int // bytes back; 0: as many as the payload

	Ratio       float64 // to the floor
	PayloadOnly float64 // to the floor without our headers (verbs); the values are those of the first rFaaS
}

// Bounds are the promises about calls. `rfaas bench latency --check` and `rfaas bench guard` compare results with them. They are
// defined only here.
var Bounds = []Bound{
	{dataplane.SHM, dataplane.Hot, 8, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 64, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 512, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 1 << 10, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 4 << 10, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 8 << 10, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 64 << 10, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 1 << 20, 1, 0, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 8, 1, 4 << 10, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 4 << 10, 1, 8, 1.15, 0},
	{dataplane.SHM, dataplane.Hot, 8, 64, 0, 4, 0}, // a quarter of the bare rings' rate
	{dataplane.SHM, dataplane.Warm, 8, 1, 0, 1.25, 0},
	{dataplane.Verbs, dataplane.Hot, 8, 1, 0, 1.08, 1.17},
	{dataplane.Verbs, dataplane.Hot, 64, 1, 0, 1.08, 1.10},
	{dataplane.Verbs, dataplane.Hot, 1 << 10, 1, 0, 1.03, 1.09},
	{dataplane.Verbs, dataplane.Hot, 4 << 10, 1, 0, 1.03, 1.03},
	{dataplane.Verbs, dataplane.Hot, 64 << 10, 1, 0, 1.03, 0},
	{dataplane.Verbs, dataplane.Hot, 8, 64, 0, 1.08, 0},
}

// minPairs is how many good pairs a verdict needs. Fewer mean that the machine was busy, not that calls are slow.
const minPairs = 5

// roughly is the factor by which the ratio of disturbed pairs may exceed a bound. Disturbances hit floor and calls alike, so
// the median stays near the undisturbed one.
const roughly = 2

// Verdict is the comparison of a result with its bound.
type Verdict struct {
	Bounded   bool     // there is a bound for it
	Disturbed bool     // too few pairs for a verdict
	Rough     bool     // too few good pairs: all pairs were compared with roughly times the bound
	Exceeds   []string // descriptions of what is above its bound
}

func (v Verdict) firm() bool { return !v.Disturbed && !v.Rough }

// rank orders verdicts by how reliable they are.
func (v Verdict) rank() int {
	switch {
	case v.Disturbed:
		return 0
	case v.Rough:
		return 1
	}
	return 2
}

// OK reports that nothing is known to be above its bound.
func (v Verdict) OK() bool { return len(v.Exceeds) == 0 }

func (b *Bound) covers(r *Result) bool {
	return b.Provider == r.Provider && b.Mode.String() == r.Mode && b.Payload == r.Payload && b.Result == r.Result && b.Depth == r.Depth
}

// config is cfg with the mode, payload and depth of b.
func (b *Bound) config(cfg Config) Config {
	cfg.Modes, cfg.Payloads, cfg.Depth = []dataplane.WaitMode{b.Mode}, []int{b.Payload}, b.Depth
	cfg.Slots, cfg.Result = max(cfg.Slots, b.Depth), b.Result
	return cfg
}

// Check compares a result with Bounds.
func Check(r *Result) Verdict { return CheckSlack(r, 1) }

// CheckSlack compares a result with slack times its bound: for machines on which a good program is sometimes above
// its bound.
func CheckSlack(r *Result, slack float64) Verdict {
	var v Verdict
	for _, b := range Bounds {
		if !b.covers(r) {
			continue
		}
		v.Bounded = true
		if r.Pairs < minPairs {
			v.Rough = r.PairsRough >= minPairs && b.Ratio > 0
			v.Disturbed = !v.Rough
			if most := roughly * slack * b.Ratio; v.Rough && !(float64(r.RatioRough) <= most) {
				v.Exceeds = append(v.Exceeds, fmt.Sprintf("%s: ratio to %s of %d pairs, disturbed ones too, is %.4g, %d times the bound %.4g", r.Key(), r.FloorName,
					r.PairsRough, float64(r.RatioRough), roughly, most))
			}
			continue
		}
		for _, c := range []struct {
			what         string
			value, bound float64
		}{
			{"ratio to " + r.FloorName, float64(r.Ratio), b.Ratio},
			{"ratio to payload-only bytes", float64(r.RatioPayloadOnly), b.PayloadOnly},
		} {
			if bound := slack * c.bound; bound > 0 && (c.value > bound || math.IsNaN(c.value)) {
				v.Exceeds = append(v.Exceeds, fmt.Sprintf("%s: %s is %.4g, bound %.4g", r.Key(), c.what, c.value, bound))
			}
		}
	}
	return v
}

// GuardReport has the results of Guard.
type GuardReport struct {
	Results   []*Result // the best of each
	Exceeds   []string
	Disturbed []string // keys without a verdict
	Rough     []string // keys judged by all pairs, also disturbed ones
}

// Note adds the verdict on r.
func (rep *GuardReport) Note(r *Result, v Verdict) {
	rep.Exceeds = append(rep.Exceeds, v.Exceeds...)
	switch {
	case v.Disturbed:
		rep.Disturbed = append(rep.Disturbed, r.Key())
	case v.Rough:
		rep.Rough = append(rep.Rough, r.Key())
	}
}

// GuardConfig bounds how long Guard measures.
type GuardConfig struct {
	Repeats int           // how often each is measured at most; 0: 3
	Slack   float64       // factor by which bounds may be exceeded; 0: 1
	Total   time.Duration // nothing is measured again after that; 0: no bound
}

// guarded is one bound with the best of its results.
type guarded struct {
	cfg     Config
	best    *Result
	verdict Verdict
}

// open says whether another measurement could change the verdict for the better.
func (g *guarded) open() bool { return g.best == nil || !g.verdict.OK() || !g.verdict.firm() }

// take keeps the better result: the one with the more reliable verdict, then the one that exceeds fewer bounds.
func (g *guarded) take(r *Result, slack float64) {
	v := CheckSlack(r, slack)
	better := g.best == nil || v.rank() > g.verdict.rank() ||
		v.rank() == g.verdict.rank() && (len(v.Exceeds) < len(g.verdict.Exceeds) || len(v.Exceeds) == len(g.verdict.Exceeds) && r.Ratio < g.best.Ratio)
	if better {
		g.best, g.verdict = r, v
	}
}

// ErrNoVerdict reports that every measurement was disturbed.
var ErrNoVerdict = errors.New("every measurement was disturbed: nothing can be said")

// Guard measures everything in Bounds for cfg.Provider. In further rounds it measures again what exceeds its bound: noise
// passes, a regression stays. It ignores the modes, payloads and depth of cfg. Disturbed results do not fail; if all are
// disturbed, it returns ErrNoVerdict.
func Guard(ctx context.Context, cfg Config, patience GuardConfig, emit func(*Result) error) (*GuardReport, error) {
	slack := patience.Slack
	if slack == 0 {
		slack = 1
	}
	var all []*guarded
	for _, b := range Bounds {
		if b.Provider == cfg.Provider {
			all = append(all, &guarded{cfg: b.config(cfg)})
		}
	}
	began := time.Now()
	for round := range or(patience.Repeats, 3) {
		for _, g := range all {
			if !g.open() || round > 0 && patience.Total > 0 && time.Since(began) > patience.Total {
				continue
			}
			if err := Run(ctx, g.cfg, func(r *Result) error { g.take(r, slack); return nil }); err != nil {
				return nil, err
			}
		}
	}
	var rep GuardReport
	for _, g := range all {
		rep.Results = append(rep.Results, g.best)
		rep.Note(g.best, g.verdict)
		if err := emit(g.best); err != nil {
			return nil, err
		}
	}
	if len(rep.Disturbed) == len(all) {
		return &rep, ErrNoVerdict
	}
	return &rep, nil
}

// ErrBlind reports that Guard did not see a regression.
var ErrBlind = errors.New("the guard does not see calls that are too slow")

// Prove shows that Guard can fail. It delays calls of the provider's first bound by the whole time that the bound allows, slack
// included, so they must exceed it. It returns the delay. ErrBlind: they did not exceed the bound; ErrNoVerdict: every
// measurement was disturbed.
func Prove(ctx context.Context, cfg Config, patience GuardConfig) (time.Duration, error) {
	slack := patience.Slack
	if slack == 0 {
		slack = 1
	}
	i := slices.IndexFunc(Bounds, func(b Bound) bool { return b.Provider == cfg.Provider && b.Ratio > 0 })
	if i < 0 {
		return 0, fmt.Errorf("no bound of provider %q", cfg.Provider)
	}
	b := &Bounds[i]
	one := b.config(cfg)
	one.delay = time.Nanosecond
	for range or(patience.Repeats, 3) + 1 {
		var r *Result
		if err := Run(ctx, one, func(got *Result) error { r = got; return nil }); err != nil {
			return 0, err
		}
		if r.Pairs < minPairs {
			continue
		}
		// The delay depends on the floor, which differs between placements. The first round measures the floor.
		delay := time.Duration(math.Ceil(slack * b.Ratio * float64(r.FloorMeanNS)))
		switch {
		case len(CheckSlack(r, slack).Exceeds) > 0 && one.delay > time.Nanosecond:
			return one.delay, nil
		case one.delay >= delay:
			return one.delay, fmt.Errorf("%w: %s, delayed by %v: ratio %.3g", ErrBlind, r.Key(), one.delay, float64(r.Ratio))
		}
		one.delay = delay + delay/4 // the floor's own spread
	}
	return 0, ErrNoVerdict
}
