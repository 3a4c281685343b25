package history

import (
	"log/slog"
	"maps"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
)

// Tier is a series of buckets of equal width.
type Tier struct {
	Width time.Duration
	Keep  int // most buckets
}

// Tiers are the series, the finest first. Everything is counted in all of them.
var Tiers = [...]Tier{
	{10 * time.Second, 360}, // an hour
	{5 * time.Minute, 288},  // a day
	{time.Hour, 168},        // a week
	{24 * time.Hour, 366},   // a year
}

// Bounds of memory.
const (
	maxTenants = 64                 // of a bucket; the use of others is added up under the name ""
	maxNodes   = 16384              // that are remembered
	forgetNode = 7 * 24 * time.Hour // after its last report
	nodeWidth  = time.Minute        // of a node's series, which is in memory only
	nodeKeep   = 60
)

// Counters are what a bucket adds up. Core times are in microseconds.
type Counters struct {
	Watched   uint64         // microseconds for which the resource manager ran
	Harvested uint64         // cores that leases had
	Idle      uint64         // cores that executors offered and no lease had
	Batch     uint64         // cores that no executor offered: batch jobs or other work had them, or their node was down
	Use       accounting.Use // of all tenants, by the time at which the ledger booked it
	Stats     board.Stats    // of all executors
}

func (c *Counters) each(f func(*uint64)) {
	for _, n := range []*uint64{&c.Watched, &c.Harvested, &c.Idle, &c.Batch} {
		f(n)
	}
	for i := range c.Use {
		f(&c.Use[i])
	}
	c.Stats.Each(f)
}

// Bucket is what happened from Start on, for the width of its tier.
type Bucket struct {
	Start time.Time
	Counters
	Tenants map[string]accounting.Use // "": of further tenants
}

func (b *Bucket) clone() Bucket {
	c := *b
	c.Tenants = maps.Clone(b.Tenants)
	return c
}

func (b *Bucket) use(tenant string, u accounting.Use) {
	b.Use = plus(b.Use, u)
	if _, known := b.Tenants[tenant]; !known && len(b.Tenants) >= maxTenants {
		tenant = ""
	}
	b.Tenants[tenant] = plus(b.Tenants[tenant], u)
}

// Add adds o, whatever its time.
func (b *Bucket) Add(o *Bucket) {
	for tenant, u := range o.Tenants {
		if b.Tenants == nil {
			b.Tenants = map[string]accounting.Use{}
		}
		b.Tenants[tenant] = plus(b.Tenants[tenant], u)
	}
	b.Watched = board.Sum(b.Watched, o.Watched)
	b.Harvested = board.Sum(b.Harvested, o.Harvested)
	b.Idle = board.Sum(b.Idle, o.Idle)
	b.Batch = board.Sum(b.Batch, o.Batch)
	b.Use = plus(b.Use, o.Use)
	b.Stats.Add(&o.Stats)
}

// times returns a * b, or the largest number if that is larger. Executors report what they like.
func times(a, b uint64) uint64 {
	if high, low := bits.Mul64(a, b); high == 0 {
		return low
	}
	return math.MaxUint64
}

func plus(u, v accounting.Use) accounting.Use {
	for i := range u {
		u[i] = board.Sum(u[i], v[i])
	}
	return u
}

// Executor is an executor's cores at a moment.
type Executor struct {
	Node      string
	NodeCores uint32 // physical cores of the node, lent or not; 0: not known
	Cores     uint32 // lent
	Free      uint32 // of them
	Open      bool   // grants leases
	Heard     bool   // is not silent
}

// Minute is what a node did in a minute. Core times are in microseconds.
type Minute struct {
	Start           time.Time
	Watched         uint64
	Harvested, Idle uint64
	Calls, Failures uint64
	Starts, Ended   uint64
}

type node struct {
	cores   uint32
	seen    time.Time
	saved   time.Time // value of seen in the file; zero: the file has other values
	minutes []Minute
}

type series struct {
	Tier
	buckets []*Bucket // ascending
}

// History is safe for concurrent use.
type History struct {
	log *slog.Logger

	mu        sync.Mutex
	tiers     [len(Tiers)]series
	nodes     map[string]*node
	dirty     map[stored]bool // buckets that the file does not have as they are now, and dropped ones
	forgotten map[string]bool // nodes that the next Save removes from the file
	total     Counters        // since this process started

	file file
}

// stored names a bucket.
type stored struct {
	tier  int
	start int64 // Unix time in seconds
}

func empty(log *slog.Logger) *History {
	h := &History{log: log, nodes: map[string]*node{}, dirty: map[stored]bool{}, forgotten: map[string]bool{}}
	for i, t := range Tiers {
		h.tiers[i].Tier = t
	}
	return h
}

// at returns the bucket of a time, and drops those that are too old. A time before the newest bucket, after the clock was
// set back by less than a bucket's width, is counted in the newest one. If it was set back further, the later buckets are dropped.
func (s *series) at(now time.Time, drop func(*Bucket)) *Bucket {
	start := now.Truncate(s.Width)
	for n := len(s.buckets); n > 0 && s.buckets[n-1].Start.Sub(start) > s.Width; n-- {
		drop(s.buckets[n-1])
		s.buckets = s.buckets[:n-1]
	}
	if n := len(s.buckets); n > 0 && !s.buckets[n-1].Start.Before(start) {
		return s.buckets[n-1]
	}
	s.buckets = append(s.buckets, &Bucket{Start: start, Tenants: map[string]accounting.Use{}})
	oldest := start.Add(-time.Duration(s.Keep) * s.Width)
	for !s.buckets[0].Start.After(oldest) {
		drop(s.buckets[0])
		s.buckets = s.buckets[1:]
	}
	return s.buckets[len(s.buckets)-1]
}

// add calls f with the bucket of a time in each tier. The caller holds the lock.
func (h *History) add(now time.Time, f func(*Bucket)) {
	b := Bucket{Counters: h.total, Tenants: map[string]accounting.Use{}}
	f(&b)
	h.total = b.Counters
	for i := range h.tiers {
		mark := func(b *Bucket) { h.dirty[stored{i, b.Start.Unix()}] = true }
		b := h.tiers[i].at(now, mark)
		f(b)
		mark(b)
	}
}

// node returns a node's record; nil: there are too many. The caller holds the lock.
func (h *History) node(name string, now time.Time) *node {
	n := h.nodes[name]
	if n == nil {
		if len(h.nodes) >= maxNodes {
			return nil
		}
		n = &node{}
		h.nodes[name] = n
	}
	n.seen = now
	return n
}

// minute returns the current minute of a node.
func (n *node) minute(now time.Time) *Minute {
	start := now.Truncate(nodeWidth)
	if k := len(n.minutes); k > 0 && !n.minutes[k-1].Start.Before(start) {
		return &n.minutes[k-1]
	}
	if len(n.minutes) >= nodeKeep {
		n.minutes = slices.Delete(n.minutes, 0, len(n.minutes)-nodeKeep+1)
	}
	n.minutes = append(n.minutes, Minute{Start: start})
	return &n.minutes[len(n.minutes)-1]
}

// Watch counts the cores of all executors for the time elapsed until now. Nodes that are gone count as batch for a week.
func (h *History) Watch(now time.Time, elapsed time.Duration, all []Executor) {
	type cores struct{ total, lent, harvested, idle uint64 }
	byNode := map[string]*cores{}
	for _, e := range all {
		c := byNode[e.Node]
		if c == nil {
			c = &cores{}
			byNode[e.Node] = c
		}
		c.total = max(c.total, uint64(e.NodeCores))
		c.lent += uint64(e.Cores)
		if e.Heard {
			c.harvested += uint64(e.Cores - min(e.Free, e.Cores))
		}
		if e.Heard && e.Open {
			c.idle += uint64(e.Free)
		}
	}
	us := uint64(max(elapsed, 0).Microseconds())
	h.mu.Lock()
	defer h.mu.Unlock()
	var sum cores
	for name, c := range byNode {
		c.total = max(c.total, c.lent)
		sum.harvested += c.harvested
		sum.idle += c.idle
		n := h.node(name, now)
		if n == nil {
			sum.total += c.total
			continue
		}
		if n.cores != uint32(c.total) {
			n.cores, n.saved = uint32(c.total), time.Time{}
		}
		m := n.minute(now)
		m.Watched += us
		m.Harvested = board.Sum(m.Harvested, times(c.harvested, us))
		m.Idle = board.Sum(m.Idle, times(c.idle, us))
	}
	for name, n := range h.nodes {
		if now.Sub(n.seen) > forgetNode {
			delete(h.nodes, name)
			h.forgotten[name] = true
			continue
		}
		sum.total += uint64(n.cores)
	}
	h.add(now, func(b *Bucket) {
		b.Watched += us
		b.Harvested = board.Sum(b.Harvested, times(sum.harvested, us))
		b.Idle = board.Sum(b.Idle, times(sum.idle, us))
		b.Batch = board.Sum(b.Batch, times(sum.total-min(sum.total, sum.harvested+sum.idle), us))
	})
}

// Use counts what a tenant has used on a node since the ledger last booked it.
func (h *History) Use(now time.Time, nodeName, tenant string, u accounting.Use) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.add(now, func(b *Bucket) { b.use(tenant, u) })
	if n := h.nodes[nodeName]; n != nil {
		m := n.minute(now)
		m.Calls = board.Sum(m.Calls, u[accounting.Calls])
		m.Failures = board.Sum(m.Failures, u[accounting.Failures])
	}
}

// Count counts what an executor has counted since its last report.
func (h *History) Count(now time.Time, nodeName string, s *board.Stats) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.add(now, func(b *Bucket) { b.Stats.Add(s) })
	if n := h.nodes[nodeName]; n != nil {
		m := n.minute(now)
		for i := range s.Starts {
			m.Starts = board.Sum(m.Starts, s.Starts[i].Count)
		}
		for _, k := range s.Ended {
			m.Ended = board.Sum(m.Ended, k)
		}
	}
}

// Since returns the buckets of a tier that end after since, the oldest first.
func (h *History) Since(tier int, since time.Time) (list []Bucket) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.tiers[tier]
	for _, b := range s.buckets {
		if b.Start.Add(s.Width).After(since) {
			list = append(list, b.clone())
		}
	}
	return list
}

// Total returns what was counted since this process started.
func (h *History) Total() Counters {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.total
}

// Node returns the last hour of a node. It is lost when the resource manager ends.
func (h *History) Node(name string) []Minute {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := h.nodes[name]; n != nil {
		return slices.Clone(n.minutes)
	}
	return nil
}

// Known is a node that is remembered.
type Known struct {
	Node  string
	Cores uint32
	Seen  time.Time // last time that it had an executor
}

// Nodes returns the nodes that had an executor within the last week, by name.
func (h *History) Nodes() []Known {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]Known, 0, len(h.nodes))
	for _, name := range slices.Sorted(maps.Keys(h.nodes)) {
		list = append(list, Known{name, h.nodes[name].cores, h.nodes[name].seen})
	}
	return list
}
