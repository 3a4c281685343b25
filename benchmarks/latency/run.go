package latency

import (
	"context"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/topology"
)

// Run measures every mode and payload of cfg, passes each result to emit as soon as it exists, and returns the first
// error. It locks the calling thread, pins it to a CPU of cfg, and stops the garbage collector while it measures.
func Run(ctx context.Context, cfg Config, emit func(*Result) error) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, mode := range cfg.Modes {
		if err := runMode(ctx, &cfg, mode, emit); err != nil {
			return fmt.Errorf("%s %s: %w", cfg.Provider, mode, err)
		}
	}
	return nil
}

func runMode(ctx context.Context, cfg *Config, mode dataplane.WaitMode, emit func(*Result) error) error {
	allowed, err := topology.Affinity()
	if err != nil {
		return err
	}
	undo, err := pin(cfg.CPUs[0], cfg.peerCPU(), allowed)
	if err != nil {
		return err
	}
	defer undo()
	s, err := openSession(cfg, mode)
	if err != nil {
		return err
	}
	defer func() { s.close() }() // s is the last peer's by then
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for _, payload := range cfg.Payloads {
		if err := s.bench.Verify(payload); err != nil {
			return s.explain(err)
		}
		runtime.GC()
		m := &measurement{s: s, cfg: cfg, payload: payload, reply: or(cfg.Result, payload), pairs: pairing{tolerance: cfg.tolerance()}}
		r, err := m.run(ctx)
		s = m.s
		if err != nil {
			return s.explain(err)
		}
		if err := emit(r); err != nil {
			return err
		}
	}
	return nil
}

// side is a part of a pair: a floor or the calls.
type side struct {
	name string
	run  func(warm, n int, samples []int64) (float64, error)
}

// measurement collects one result.
type measurement struct {
	s       *session
	cfg     *Config
	payload int
	reply   int // bytes of the result

	sides    []side // the floor first, the calls last
	only     int    // index of the payload-only floor in sides; 0: none
	n, warm  int    // calls of a batch
	floor    *floorKind
	pairs    pairing
	peers    int // earlier peers
	awake    int // warm pairs in which the client did not block
	shared   int // pairs in which a hot waiter blocked, because something else ran on its core
	samples  Histogram
	floors   Histogram
	room     []int64
	calibN   int
	calibOf  raw.Kind
	calibLen int
}

func (m *measurement) run(ctx context.Context) (*Result, error) {
	began := time.Now()
	load := LoadAverage()
	m.chooseCalibration()
	var err error
	if m.floor, err = m.chooseFloor(); err != nil {
		return nil, err
	}
	m.setSides()
	if err := m.sizeBatch(); err != nil {
		return nil, err
	}
	said := time.Now()
	wanted, peers := m.wanted()
	for attempt := 0; m.pairs.len() < wanted && m.pairs.discarded+m.awake < (attemptsPerPair-1)*wanted; attempt++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if attempt > 0 && time.Since(began) > m.cfg.Duration {
			break
		}
		if m.pairs.len() >= (m.peers+1)*wanted/peers {
			if err := m.nextPeer(); err != nil {
				return nil, err
			}
		}
		shared := m.shared
		if err := m.pair(attempt%2 == 1); err != nil {
			return nil, err
		}
		if m.shared > shared {
			// The waiter blocks for 50 ms or more before it spins again, and nothing reports when it does.
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
		if time.Since(said) > time.Second {
			said = time.Now()
			m.cfg.Progress(fmt.Sprintf("%s %s %d B depth %d: %d of %d pairs, %d discarded, %d on a shared core, %d awake", m.cfg.Provider, m.s.mode,
				m.payload, m.cfg.Depth, m.pairs.len(), wanted, m.pairs.discarded, m.shared, m.awake))
		}
	}
	r := m.result()
	r.Load, r.StartedAt, r.Seconds = load, began.UTC().Format(time.RFC3339), time.Since(began).Seconds()
	return r, nil
}

// ---- peers ----

// morePairs is the factor by which Pairs is multiplied if pairs are taken with several peers in succession. This averages over two
// effects that last as long as a peer. On shm, two spinners that pause between looks at memory fall into a rhythm if a round trip takes
// less than a microsecond: a floor or a call then takes two thirds as long with one peer as with the next. On verbs, each peer has
// other memory for the bare queue pair and for the channel, and two floors of the same bytes differ by up to four per cent.
const morePairs = 3

// peers is the number of peers for a result: several if results differ from peer to peer.
func (c *Config) peers(m dataplane.WaitMode, payload int) int {
	switch {
	case m == dataplane.Warm || c.Depth > 1 || c.Remote != "":
	case c.Provider == dataplane.SHM && payload <= 1024:
		return 9
	case c.Provider == dataplane.Verbs && payload <= 4096:
		return 5
	}
	return 1
}

// wanted is how many good pairs a result needs, and from how many peers.
func (m *measurement) wanted() (pairs, peers int) {
	pairs, peers = m.cfg.Pairs, m.cfg.peers(m.s.mode, max(m.payload, m.reply))
	if peers > 1 {
		pairs *= morePairs
	}
	return pairs, min(peers, pairs)
}

// nextPeer replaces the peer, which gives it other memory.
func (m *measurement) nextPeer() error {
	s, err := openSession(m.cfg, m.s.mode)
	if err != nil {
		return err
	}
	m.s.close()
	m.s = s
	m.peers++
	m.setSides()
	return m.warmUp()
}

// ---- floors ----

// floorKind is a kind of bare round trip with its sizes in bytes.
type floorKind struct {
	kind        raw.Kind
	size, reply int
}

// floorKinds are the candidates, the fastest of which is the floor.
func (m *measurement) floorKinds() []floorKind {
	p, reply := m.payload, m.reply
	warm := m.s.mode == dataplane.Warm
	switch {
	case m.cfg.Depth > 1 && warm:
		return nil // blocking with many in flight has no plain counterpart
	case m.cfg.Provider == dataplane.Verbs:
		kind, head := raw.Imm, 0
		if warm {
			kind = raw.ImmWarm
		}
		if m.cfg.Depth > 1 {
			kind = raw.ImmWindow
		}
		if max(p, reply) > m.cfg.Eager {
			head = raw.BulkRequestHeader
		}
		return []floorKind{{kind, p + head, reply}}
	case m.cfg.Depth > 1:
		return []floorKind{{raw.Ring, p, reply}}
	case warm:
		return []floorKind{{raw.Eventfd, p, reply}, {raw.Futex, p, reply}}
	}
	return []floorKind{{raw.Near, p, reply}, {raw.Apart, p, reply}}
}

// chooseFloor returns the fastest candidate: the smallest median of interleaved batches. nil when there is none.
func (m *measurement) chooseFloor() (*floorKind, error) {
	kinds := m.floorKinds()
	if len(kinds) < 2 {
		if len(kinds) == 0 {
			return nil, nil
		}
		return &kinds[0], nil
	}
	const rounds = 7
	n := m.trial()
	means := make([][]float64, len(kinds))
	for range rounds {
		for i, k := range kinds {
			before := blocks()
			mean, err := m.s.floor(k.kind, k.size, k.reply, 2+n/8, n, nil)
			if err != nil {
				return nil, err
			}
			if math.IsNaN(mean) || m.mustBlock() && !blockedIn(n, blocks()-before) {
				mean = math.Inf(1)
			}
			means[i] = append(means[i], mean)
		}
	}
	best := 0
	for i := range kinds {
		if median(means[i]) < median(means[best]) {
			best = i
		}
	}
	return &kinds[best], nil
}

// mustBlock says whether round trips count only if the client blocked in them. Two processes that wake each other by system
// calls can fall into a rhythm in which each looks again just before it would sleep, so that neither sleeps. Floor and calls are
// then twenty times faster for hundreds of round trips. A floor that sleeps cannot be compared with calls that do not.
func (m *measurement) mustBlock() bool {
	return m.cfg.Provider == dataplane.SHM && m.s.mode == dataplane.Warm
}

// blocks is how often the calling thread has blocked.
func blocks() int {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return int(u.Nvcsw)
}

// blockedIn says whether the client blocked in n round trips: at least nine times in ten.
func blockedIn(n, blocks int) bool { return blocks >= n-n/10 }

// trial is the number of round trips of a first batch: about a millisecond.
func (m *measurement) trial() int {
	switch {
	case m.cfg.Provider == dataplane.Verbs || m.s.mode == dataplane.Warm:
		return 30
	case max(m.payload, m.reply) > 16<<10:
		return 30
	}
	return 2000
}

// ---- calibration ----

func (m *measurement) chooseCalibration() {
	switch {
	case m.cfg.Provider == dataplane.Verbs:
		m.calibOf, m.calibLen, m.calibN = raw.Imm, 8, 40
	case m.cfg.CPUs[0] == m.cfg.peerCPU():
		m.calibOf, m.calibLen, m.calibN = raw.Eventfd, 1, 100
	default:
		m.calibOf, m.calibLen, m.calibN = raw.Flag, 0, 400
	}
}

// calibrate measures a bare round trip, ns.
func (m *measurement) calibrate() (float64, error) {
	return m.s.calibrate(m.calibOf, m.calibLen, m.calibN)
}

// ---- pairs ----

func (m *measurement) setSides() {
	s, p, floor := m.s, m.payload, m.floor
	m.sides, m.only = nil, 0
	bare := func(k floorKind) func(int, int, []int64) (float64, error) {
		return func(warm, n int, samples []int64) (float64, error) {
			return s.floor(k.kind, k.size, k.reply, warm, n, samples)
		}
	}
	if floor != nil {
		m.sides = append(m.sides, side{floor.kind.String(), bare(*floor)})
		if m.cfg.Provider == dataplane.Verbs {
			m.only = len(m.sides)
			m.sides = append(m.sides, side{"payload only", bare(floorKind{floor.kind, p, m.reply})})
		}
	} else {
		// A batch of the calibration stands in for the floor, so that pairs can be judged. No ratio is reported.
		m.sides = append(m.sides, side{"none", func(warm, n int, samples []int64) (float64, error) {
			return s.floor(m.calibOf, m.calibLen, m.calibLen, warm, n, samples)
		}})
	}
	m.sides = append(m.sides, side{"calls", func(warm, n int, samples []int64) (float64, error) { return s.calls(p, m.reply, warm, n, samples) }})
}

// sizeBatch chooses the number of calls of a batch, and warms everything up.
func (m *measurement) sizeBatch() error {
	measured := m.sides[len(m.sides)-1]
	best := math.Inf(1)
	n := 50 + 2*m.cfg.Depth
	for range 3 {
		mean, err := measured.run(m.cfg.Depth+2, n, nil)
		if err != nil {
			return err
		}
		best = min(best, mean)
		if best*float64(m.trial()) < float64(10*time.Millisecond) {
			n = m.trial() + 2*m.cfg.Depth
		}
	}
	m.n = m.cfg.Rounds
	if m.n == 0 {
		least := max(20, 20*m.cfg.Depth)
		m.n = min(max(int(float64(m.cfg.batch(m.s.mode))/best), least), 500_000)
	}
	m.warm = min(2+m.n/8, 1000) + m.cfg.Depth
	m.room = make([]int64, m.n)
	return m.warmUp()
}

// warmUp runs a batch of each side.
func (m *measurement) warmUp() error {
	for _, side := range m.sides {
		if _, err := side.run(m.warm, m.n, nil); err != nil {
			return err
		}
	}
	return nil
}

// pair runs a batch of each side between calibrations. The pair counts if the calibrations agree, no hot waiter blocked and every
// warm one did. Batches in which each round trip is timed follow it.
func (m *measurement) pair(reverse bool) error {
	order := make([]int, len(m.sides))
	for i := range order {
		order[i] = i
	}
	if reverse {
		slices.Reverse(order)
	}
	means := make([]float64, len(m.sides))
	calibrations := make([]float64, 0, len(m.sides)+1)
	client, peer := m.s.bench.Blocked()
	c, err := m.calibrate()
	if err != nil {
		return err
	}
	calibrations = append(calibrations, c)
	awake := false
	for _, i := range order {
		if math.IsNaN(c) { // something else uses the processors: the pair cannot count
			m.pairs.discarded++
			return nil
		}
		before := blocks()
		if means[i], err = m.sides[i].run(m.warm, m.n, nil); err != nil {
			return err
		}
		awake = awake || m.mustBlock() && !blockedIn(m.n, blocks()-before)
		if c, err = m.calibrate(); err != nil {
			return err
		}
		calibrations = append(calibrations, c)
	}
	if awake {
		m.awake++
		return nil
	}
	if c, p := m.s.bench.Blocked(); m.s.mode == dataplane.Hot && (c != client || p != peer) {
		m.shared++
		return nil
	}
	if !m.pairs.add(means, calibrations) {
		return nil
	}
	last := len(m.sides) - 1
	for _, i := range order {
		if i != 0 && i != last {
			continue
		}
		n := min(m.n, 20_000)
		mean, err := m.sides[i].run(m.warm, n, m.room)
		if err != nil {
			return err
		}
		if math.IsNaN(mean) {
			continue
		}
		if i == last {
			m.samples.Add(m.room[:n]...)
		} else {
			m.floors.Add(m.room[:n]...)
		}
	}
	return nil
}

// ---- result ----

func (m *measurement) result() *Result {
	p := &m.pairs
	wanted, _ := m.wanted()
	r := &Result{
		Name: "latency", Provider: m.cfg.Provider, Client: "c", Mode: m.s.mode.String(), Function: m.cfg.Function, Buffers: m.cfg.Buffers,
		Payload: m.payload, Result: m.cfg.Result, Depth: m.cfg.Depth, PairsShared: m.shared, PairsAwake: m.awake, Complete: p.len() >= wanted,
		Slots: m.cfg.Slots, Eager: m.cfg.Eager, BatchCalls: m.n, CPUClient: m.cfg.CPUs[0], CPUPeer: m.cfg.peerCPU(), Remote: m.cfg.Remote,
		ClockNS: raw.Clock(), Method: m.method(),
	}
	if m.peers > 0 {
		r.Peers = m.peers + 1
	}
	floor := ""
	if m.floor != nil {
		floor = m.sides[0].name
		r.PairsRough, r.RatioRough = len(p.rough), Number(median(p.rough))
	}
	p.fill(r, &m.samples, &m.floors, floor)
	if m.only > 0 {
		r.RatioPayloadOnly = Number(median(p.ratios(p.last(), m.only)))
	}
	if m.calibOf == raw.Flag && p.len() > 0 {
		near := r.Calibration.Before < nearNS
		r.Near = &near
	}
	return r
}

func (m *measurement) method() string {
	wanted, peers := m.wanted()
	with := ""
	if m.cfg.byMedian() {
		with = ", each of which stands for the median of its round trips,"
	}
	if peers > 1 {
		with = fmt.Sprintf(" with %d peers in succession", peers)
	}
	return fmt.Sprintf("median of %d paired, interleaved batches of %d calls after %d untimed ones%s, between calibrations by %s that differ by at most %.0f %%; percentiles from separate batches with a clock reading per call",
		wanted, m.n, m.warm, with, m.calibOf, m.cfg.tolerance()*100)
}

// LoadAverage of the last minute, 0 when unknown.
func LoadAverage() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	load, _ := strconv.ParseFloat(first, 64)
	return load
}
