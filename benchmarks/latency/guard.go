package latency

import (
	"context"
	"fmt"
	"math"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Bound is what a measurement must not exceed. All bounds are relative to the floor of the same run, but for the cost of
// Go, which is a difference to C in the same run. 0: not bounded.
type Bound struct {
	Provider, Client string
	Mode             dataplane.WaitMode
	Payload, Depth   int

	Ratio       float64 // to the floor
	PayloadOnly float64 // to the floor without our headers (verbs): what the first rFaaS had
	GoOverC     float64 // ns
}

// Bounds are the promises: what `rfaas bench latency --check` and `rfaas bench guard` hold results against. This is the one
// place where they are written down.
var Bounds = []Bound{
	{dataplane.SHM, ClientC, dataplane.Hot, 8, 1, 1.25, 0, 0},
	{dataplane.SHM, ClientC, dataplane.Hot, 64, 1, 1.25, 0, 0},
	{dataplane.SHM, ClientC, dataplane.Hot, 64 << 10, 1, 1.2, 0, 0},
	{dataplane.SHM, ClientC, dataplane.Hot, 1 << 20, 1, 1.2, 0, 0},
	{dataplane.SHM, ClientC, dataplane.Hot, 8, 64, 10, 0, 0}, // a tenth of the bare rings' rate
	{dataplane.SHM, ClientC, dataplane.Warm, 8, 1, 1.25, 0, 0},
	{dataplane.SHM, ClientGo, dataplane.Hot, 8, 1, 0, 0, 80},
	{dataplane.Verbs, ClientC, dataplane.Hot, 8, 1, 1.08, 1.17, 0},
	{dataplane.Verbs, ClientC, dataplane.Hot, 64, 1, 1.08, 1.10, 0},
	{dataplane.Verbs, ClientC, dataplane.Hot, 1 << 10, 1, 1.08, 1.09, 0},
	{dataplane.Verbs, ClientC, dataplane.Hot, 4 << 10, 1, 1.08, 1.03, 0},
	{dataplane.Verbs, ClientC, dataplane.Hot, 64 << 10, 1, 1.08, 0, 0},
}

// minPairs is how many good pairs a verdict needs: with fewer a result says that the machine was busy, not that we are slow.
const minPairs = 5

// Verdict is how a result stands to its bound.
type Verdict struct {
	Bounded   bool     // there is a bound for it
	Disturbed bool     // too few good pairs to say
	Exceeds   []string // what is above its bound, for people
}

// OK reports that nothing is above its bound, as far as can be said.
func (v Verdict) OK() bool { return len(v.Exceeds) == 0 }

func (b *Bound) covers(r *Result) bool {
	return b.Provider == r.Provider && b.Client == r.Client && b.Mode.String() == r.Mode && b.Payload == r.Payload && b.Depth == r.Depth
}

// Check holds a result against Bounds.
func Check(r *Result) Verdict {
	var v Verdict
	for _, b := range Bounds {
		if !b.covers(r) {
			continue
		}
		v.Bounded = true
		if r.Pairs < minPairs {
			v.Disturbed = true
			continue
		}
		for _, c := range []struct {
			what         string
			value, bound float64
		}{
			{"ratio to " + r.FloorName, float64(r.Ratio), b.Ratio},
			{"ratio to payload-only bytes", float64(r.RatioPayloadOnly), b.PayloadOnly},
			{"ns of the Go client over the C client", float64(r.GoOverC), b.GoOverC},
		} {
			if c.bound > 0 && (c.value > c.bound || math.IsNaN(c.value)) {
				v.Exceeds = append(v.Exceeds, fmt.Sprintf("%s: %s is %.4g, bound %.4g", r.Key(), c.what, c.value, c.bound))
			}
		}
	}
	return v
}

// GuardReport is what Guard found.
type GuardReport struct {
	Results   []*Result // the best of each
	Exceeds   []string
	Disturbed []string // keys of which nothing can be said
}

// Guard measures everything that Bounds bounds for cfg.Provider, and what exceeds its bound again, up to repeats times in
// all: noise passes, a regression stays. Of cfg the clients, modes, payloads and depth are not used.
func Guard(ctx context.Context, cfg Config, repeats int, emit func(*Result) error) (*GuardReport, error) {
	var rep GuardReport
	for _, b := range Bounds {
		if b.Provider != cfg.Provider {
			continue
		}
		one := cfg
		one.Clients, one.Modes, one.Payloads, one.Depth = []string{b.Client}, []dataplane.WaitMode{b.Mode}, []int{b.Payload}, b.Depth
		one.Slots = max(cfg.Slots, b.Depth)
		var best *Result
		var verdict Verdict
		for range max(repeats, 1) {
			var r *Result
			if err := Run(ctx, one, func(got *Result) error { r = got; return nil }); err != nil {
				return nil, err
			}
			if v := Check(r); best == nil || len(v.Exceeds) < len(verdict.Exceeds) || verdict.Disturbed && !v.Disturbed ||
				v.Disturbed == verdict.Disturbed && r.Ratio < best.Ratio {
				best, verdict = r, v
			}
			if verdict.OK() && !verdict.Disturbed {
				break
			}
		}
		rep.Results = append(rep.Results, best)
		rep.Exceeds = append(rep.Exceeds, verdict.Exceeds...)
		if verdict.Disturbed {
			rep.Disturbed = append(rep.Disturbed, best.Key())
		}
		if err := emit(best); err != nil {
			return nil, err
		}
	}
	return &rep, nil
}
