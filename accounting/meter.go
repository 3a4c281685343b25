package accounting

import (
	"math/bits"
	"time"
)

// Report has the sums that a worker reports since its start. The executor does not trust them: see Meter.
type Report struct {
	Exec     time.Duration // in functions
	Hot      time.Duration // polling for calls
	Calls    uint64
	BytesIn  uint64 // payloads
	BytesOut uint64 // results
	Failures uint64 // calls without a result
}

// Meter makes the counters of one lease out of what the executor knows: cores, memory and time for sure, the rest by
// reports of workers. The time that a worker reports, in functions and polling together, cannot exceed what the kernel
// says that its process computed, and no sum shrinks. Not safe for concurrent use.
type Meter struct {
	cores  uint64
	memory uint64    // bytes
	began  time.Time // since when the lease has had these
	ended  time.Time
	seats  []seatMeter
	base   Use // of earlier parts
}

// seatMeter is one worker's place.
type seatMeter struct {
	past Use    // of those that have left it
	now  Report // of the one that is there
}

func (r *Report) use() Use {
	return Use{ExecMicros: uint64(r.Exec / time.Microsecond), HotMicros: uint64(r.Hot / time.Microsecond), Calls: r.Calls,
		BytesIn: r.BytesIn, BytesOut: r.BytesOut, Failures: r.Failures}
}

// NewMeter starts the meter of a lease of workers with cores logical CPUs and memory bytes in all.
func NewMeter(workers, cores int, memory uint64, began time.Time) *Meter {
	return &Meter{cores: uint64(cores), memory: memory, began: began, seats: make([]seatMeter, workers)}
}

// Observe notes what worker i of the lease reports and how much processor time the kernel has seen of its process.
func (m *Meter) Observe(i int, r Report, cpu time.Duration) {
	if i < 0 || i >= len(m.seats) {
		return
	}
	now := &m.seats[i].now
	cpu = max(cpu, 0)
	now.Exec = max(now.Exec, min(r.Exec, cpu-now.Hot))
	now.Hot = max(now.Hot, min(r.Hot, cpu-now.Exec))
	now.Calls = max(now.Calls, r.Calls)
	now.BytesIn = max(now.BytesIn, r.BytesIn)
	now.BytesOut = max(now.BytesOut, r.BytesOut)
	now.Failures = max(now.Failures, r.Failures)
}

// Replaced says that worker i is gone and that another one has its place.
func (m *Meter) Replaced(i int) {
	if i < 0 || i >= len(m.seats) {
		return
	}
	s := &m.seats[i]
	s.past = s.past.plus(s.now.use())
	s.now = Report{}
}

// Grew notes that the lease has more cores and memory from a time on.
func (m *Meter) Grew(cores int, memory uint64, from time.Time) {
	until := m.held(from)
	m.seats[0].past = m.seats[0].past.plus(until) // as if a worker that has left had used them
	m.began = from
	m.cores += uint64(cores)
	m.memory += memory
}

// End stops the clock of the lease; the first time counts.
func (m *Meter) End(at time.Time) {
	if m.ended.IsZero() {
		m.ended = at
	}
}

// Use is the sums of the present part as of now.
func (m *Meter) Use(now time.Time) Use { return m.whole(now).Since(m.base) }

// Split ends a part when a counter has passed SplitAt. What Use returned last is then final, and Use starts anew.
func (m *Meter) Split(last Use) bool {
	for _, n := range last {
		if n >= SplitAt {
			m.base = m.base.plus(last)
			return true
		}
	}
	return false
}

func (m *Meter) whole(now time.Time) Use {
	if !m.ended.IsZero() && now.After(m.ended) {
		now = m.ended
	}
	u := m.held(now)
	for i := range m.seats {
		u = u.plus(m.seats[i].past).plus(m.seats[i].now.use())
	}
	return u
}

// held is what the present cores and memory have amounted to since the lease has had them.
func (m *Meter) held(now time.Time) Use {
	elapsed := uint64(max(now.Sub(m.began), 0)) // ns
	return Use{CoreMicros: mulDiv(m.cores, elapsed, 1e3), MemoryMiBMillis: mulDiv(m.memory, elapsed, 1<<20*1e6)}
}

// mulDiv is a*b/c without overflow in between; the largest number if the result is larger.
func mulDiv(a, b, c uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	if hi >= c {
		return ^uint64(0)
	}
	q, _ := bits.Div64(hi, lo, c)
	return q
}

// MeterState is the state of a meter, for the program that takes over.
type MeterState struct {
	Cores, Memory uint64
	Began         time.Time
	Base          Use      // of earlier parts
	Past          []Use    // of each seat: workers that have left it
	Now           []Report // of each seat: the worker that is there
}

// Save returns the state of the meter of a lease that has not ended.
func (m *Meter) Save() MeterState {
	s := MeterState{Cores: m.cores, Memory: m.memory, Began: m.began, Base: m.base}
	for i := range m.seats {
		s.Past, s.Now = append(s.Past, m.seats[i].past), append(s.Now, m.seats[i].now)
	}
	return s
}

// RestoreMeter returns the meter that Save was called for. Past and Now must have the same length.
func RestoreMeter(s MeterState) *Meter {
	m := &Meter{cores: s.Cores, memory: s.Memory, began: s.Began, base: s.Base, seats: make([]seatMeter, len(s.Past))}
	for i := range m.seats {
		m.seats[i] = seatMeter{past: s.Past[i], now: s.Now[i]}
	}
	return m
}
