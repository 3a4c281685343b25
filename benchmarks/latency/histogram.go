package latency

import (
	"fmt"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// maxSample is the longest time that a histogram distinguishes, a minute. Longer ones count as a minute; the true maximum is kept.
const maxSample = 60e9

// Histogram counts single round trips with three significant digits, from one ns to a minute. The zero value is empty.
type Histogram struct {
	h   *hdrhistogram.Histogram
	max int64
}

// Add counts samples, ns.
func (h *Histogram) Add(samples ...int64) {
	if h.h == nil {
		h.h = hdrhistogram.New(1, maxSample, 3)
	}
	for _, s := range samples {
		h.max = max(h.max, s)
		_ = h.h.RecordValue(min(max(s, 1), maxSample)) // cannot fail within the bounds
	}
}

// Count is how many samples there are.
func (h *Histogram) Count() int {
	if h.h == nil {
		return 0
	}
	return int(h.h.TotalCount())
}

// Quantile is the value that a share q of the samples does not exceed, to three digits; 0 without samples.
func (h *Histogram) Quantile(q float64) int64 {
	if h.Count() == 0 {
		return 0
	}
	if q >= 1 {
		return h.max
	}
	return min(h.h.ValueAtQuantile(100*q), h.max)
}

// Above is how many samples are larger than ns, to three digits.
func (h *Histogram) Above(ns int64) int {
	if h.h == nil {
		return 0
	}
	n := int64(0)
	for _, b := range h.h.Distribution() {
		if b.From > ns {
			n += b.Count
		}
	}
	return int(n)
}

// Encode returns the histogram in HdrHistogram's compressed form, base64; "" when it is empty.
func (h *Histogram) Encode() string {
	if h.Count() == 0 {
		return ""
	}
	b, err := h.h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	if err != nil {
		return ""
	}
	return string(b)
}

// Point is one step of a cumulative distribution.
type Point struct {
	NS    int64
	Share float64 // of the samples that are not larger
}

// CDF decodes what Encode returned into a cumulative distribution, ascending.
func CDF(encoded string) ([]Point, error) {
	if encoded == "" {
		return nil, nil
	}
	h, err := hdrhistogram.Decode([]byte(encoded))
	if err != nil {
		return nil, fmt.Errorf("histogram: %w", err)
	}
	total := float64(h.TotalCount())
	if total <= 0 {
		return nil, nil
	}
	var points []Point
	seen := int64(0)
	for _, b := range h.Distribution() {
		if b.Count <= 0 {
			continue
		}
		seen += b.Count
		points = append(points, Point{b.To, float64(seen) / total})
	}
	return points, nil
}
