package latency

import (
	"math"
	"slices"
)

// median of values in any order, which it does not change; NaN when there are none.
func median(values []float64) float64 {
	return quantile(values, 0.5)
}

// medianOf is the median of times in any order, which it does not change; NaN when there are none.
func medianOf(times []int64) float64 {
	values := make([]float64, len(times))
	for i, t := range times {
		values[i] = float64(t)
	}
	return median(values)
}

// quantile interpolates between the values, as in R's type 7. NaN when there are none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	at := q * float64(len(s)-1)
	low := int(at)
	if low+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[low] + (at-float64(low))*(s[low+1]-s[low])
}

// sameMode says whether calibrations were taken in one mode of the machine: cross-core latency jumps by factors when
// a hypervisor moves a virtual CPU, and drifts by a few per cent otherwise. False if one is NaN.
func sameMode(calibrations []float64, tolerance float64) bool {
	if len(calibrations) == 0 {
		return true
	}
	low, high := slices.Min(calibrations), slices.Max(calibrations)
	return low > 0 && high <= low*(1+tolerance)
}

// pairing collects paired batch means of several sides, the first of which is the floor.
type pairing struct {
	means     [][]float64 // by side, in the order of pairs
	before    []float64   // calibration before each pair
	after     []float64
	discarded int
	tolerance float64   // 0: modeTolerance
	rough     []float64 // ratios of calls to floor of all pairs, including those whose calibrations differ
}

// add takes the batch means of one pair and the calibrations around them. It reports whether the pair counts. NaN discards it.
func (p *pairing) add(means, calibrations []float64) bool {
	whole := !slices.ContainsFunc(means, math.IsNaN)
	if whole {
		p.rough = append(p.rough, means[len(means)-1]/means[0])
	}
	if !whole || !sameMode(calibrations, or(p.tolerance, modeTolerance)) {
		p.discarded++
		return false
	}
	if p.means == nil {
		p.means = make([][]float64, len(means))
	}
	for i, m := range means {
		p.means[i] = append(p.means[i], m)
	}
	if len(calibrations) > 0 {
		p.before = append(p.before, calibrations[0])
		p.after = append(p.after, calibrations[len(calibrations)-1])
	}
	return true
}

func (p *pairing) len() int {
	if p.means == nil {
		return 0
	}
	return len(p.means[0])
}

// last is the index of the measured side.
func (p *pairing) last() int { return len(p.means) - 1 }

// mean is the median of a side's batch means.
func (p *pairing) mean(side int) float64 {
	if p.means == nil {
		return math.NaN()
	}
	return median(p.means[side])
}

// fill stores the pairs, and the samples of the measured side and of the floor, into a result. floor names the floor; if it is
// empty, there was none, and the result has no ratio.
func (p *pairing) fill(r *Result, samples, floors *Histogram, floor string) {
	nan := Number(math.NaN())
	r.Samples, r.P50NS, r.P90NS, r.P99NS = samples.Count(), samples.Quantile(0.5), samples.Quantile(0.9), samples.Quantile(0.99)
	r.P999NS, r.MaxNS, r.Disturbed = samples.Quantile(0.999), samples.Quantile(1), samples.Above(10*samples.Quantile(0.5))
	r.Histogram, r.FloorHistogram = samples.Encode(), floors.Encode()
	r.FloorName, r.Ratio, r.RatioLow, r.RatioHigh, r.FloorMeanNS = "none", nan, nan, nan, nan
	r.MeanNS, r.Pairs, r.PairsDiscarded = Number(p.mean(p.last())), p.len(), p.discarded
	if p.len() > 0 {
		r.OpsPerS = 1e9 / float64(r.MeanNS)
		r.BytesPerS = r.OpsPerS * float64(r.Payload)
	}
	if floor != "" {
		ratios := p.ratios(p.last(), 0)
		r.FloorName, r.FloorP50, r.FloorMeanNS = floor, floors.Quantile(0.5), Number(p.mean(0))
		r.Ratio, r.RatioLow, r.RatioHigh = Number(median(ratios)), Number(quantile(ratios, 0.25)), Number(quantile(ratios, 0.75))
	}
	r.Calibration = Calibration{Number(median(p.before)), Number(median(p.after))}
}

// each applies f to the two sides' means of every pair.
func (p *pairing) each(a, b int, f func(a, b float64) float64) []float64 {
	out := make([]float64, p.len())
	for i := range out {
		out[i] = f(p.means[a][i], p.means[b][i])
	}
	return out
}

func (p *pairing) ratios(of, to int) []float64 {
	return p.each(of, to, func(a, b float64) float64 { return a / b })
}
