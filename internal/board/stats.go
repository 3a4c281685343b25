package board

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// StatsSize is the size of an executor's record of counts, in bytes.
const StatsSize = 704

// Start paths: indices of Stats.Starts, the slowest first.
const (
	StartCold = iota
	StartSeeded
	StartPooled
	StartCached
	StartPaths
)

// StartNames are the names of the start paths.
var StartNames = [StartPaths]string{"cold", "seeded", "pooled", "cached"}

// How leases end: indices of Stats.Ended.
const (
	EndReleased = iota
	EndExpired
	EndRevoked
	EndDrained
	EndWays
)

// EndNames are the names of the ways in which leases end.
var EndNames = [EndWays]string{"released", "expired", "revoked", "drained"}

// StartBuckets is the number of buckets of a histogram of start times. The last one has no upper bound.
const StartBuckets = 17

// StartBound returns the upper bound of a bucket, for all but the last one.
func StartBound(i int) time.Duration { return 50 * time.Microsecond << i }

// StartCounts has the worker starts of one path.
type StartCounts struct {
	Count   uint64
	Nanos   uint64 // sum of the times
	Buckets [StartBuckets]uint64
}

// Add counts a start.
func (c *StartCounts) Add(took time.Duration) {
	i := 0
	for i < StartBuckets-1 && took > StartBound(i) {
		i++
	}
	c.Count++
	c.Nanos += uint64(max(took, 0))
	c.Buckets[i]++
}

// Quantile returns an estimate of a quantile of the times: a value between the bounds of the bucket that has it. 0: there
// were no starts.
func (c *StartCounts) Quantile(q float64) time.Duration {
	total := 0.0
	for _, n := range c.Buckets {
		total += float64(n)
	}
	rank := q * total
	below := 0.0
	for i, n := range c.Buckets {
		if n == 0 || below+float64(n) < rank {
			below += float64(n)
			continue
		}
		low := time.Duration(0)
		if i > 0 {
			low = StartBound(i - 1)
		}
		if i == StartBuckets-1 {
			return low
		}
		return low + time.Duration((rank-below)/float64(n)*float64(StartBound(i)-low))
	}
	return 0
}

// Stats has what an executor has counted since it started. Counters only grow.
type Stats struct {
	Starts       [StartPaths]StartCounts
	Ended        [EndWays]uint64 // leases
	Deaths       uint64          // workers that ended by themselves while their lease went on
	FailedStarts uint64
}

// NumStats is the number of counters in Stats.
const NumStats = StartPaths*(2+StartBuckets) + EndWays + 2

// The record has the counters, the incarnation and the checksum.
const _ = uint(StatsSize - 8*NumStats - 8 - 4)

// Each calls f with each counter, in the order of the record.
func (s *Stats) Each(f func(*uint64)) {
	for i := range s.Starts {
		c := &s.Starts[i]
		f(&c.Count)
		f(&c.Nanos)
		for k := range c.Buckets {
			f(&c.Buckets[k])
		}
	}
	for i := range s.Ended {
		f(&s.Ended[i])
	}
	f(&s.Deaths)
	f(&s.FailedStarts)
}

// Values returns the counters in the order of the record.
func (s *Stats) Values() []uint64 {
	list := make([]uint64, 0, NumStats)
	s.Each(func(n *uint64) { list = append(list, *n) })
	return list
}

// StatsOf is the inverse of Values. Missing counters are 0, and further ones are ignored.
func StatsOf(values []uint64) (s Stats) {
	s.Each(func(n *uint64) {
		if len(values) > 0 {
			*n, values = values[0], values[1:]
		}
	})
	return s
}

// Since returns how much s is ahead of before. A counter that is smaller than before has restarted at 0.
func (s *Stats) Since(before *Stats) Stats {
	now, then := s.Values(), before.Values()
	for i := range now {
		if now[i] >= then[i] {
			now[i] -= then[i]
		}
	}
	return StatsOf(now)
}

// Sum returns a + b, or the largest number if that is larger.
func Sum(a, b uint64) uint64 {
	if b > math.MaxUint64-a {
		return math.MaxUint64
	}
	return a + b
}

// Add adds o. Counters that would overflow stay at the largest number.
func (s *Stats) Add(o *Stats) {
	values := o.Values()
	i := 0
	s.Each(func(n *uint64) {
		*n = Sum(*n, values[i])
		i++
	})
}

// Encode writes the record of an incarnation into StatsSize bytes.
func (s *Stats) Encode(b []byte, incarnation uint64) {
	b = b[:StatsSize]
	clear(b)
	binary.LittleEndian.PutUint64(b, incarnation)
	for i, n := range s.Values() {
		binary.LittleEndian.PutUint64(b[8+8*i:], n)
	}
	seal(b)
}

// ParseStats reads a record. ok is false if nothing was written yet. ErrTorn: read again.
func ParseStats(b []byte, incarnation uint64) (s Stats, ok bool, err error) {
	b = b[:StatsSize]
	switch {
	case empty(b):
		return s, false, nil
	case !sealed(b):
		return s, false, fmt.Errorf("counts of an executor: %w", ErrTorn)
	case binary.LittleEndian.Uint64(b) != incarnation:
		return s, false, fmt.Errorf("%w: counts of another executor", ErrLayout)
	}
	values := make([]uint64, NumStats)
	for i := range values {
		values[i] = binary.LittleEndian.Uint64(b[8+8*i:])
	}
	return StatsOf(values), true, nil
}
