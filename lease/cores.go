package lease

import (
	"cmp"
	"fmt"
	"slices"
)

// Core is a physical core, or the part of it that may be leased.
type Core struct {
	CPUs []int // its logical CPUs, at least one
	Node int   // NUMA node
}

// cores says how often each core is taken. A share is one lease's hold on one core; with Config.Share 1 a core has one.
type cores struct {
	list   []Core
	share  int
	used   []int  // shares of leases, by index into list
	cached []int  // shares of cached leases, which may be evicted
	away   []bool // cores that are withheld: no lease gets them
	nodes  []int  // NUMA nodes, the preferred ones first
}

func newCores(list []Core, near []int, share int) (*cores, error) {
	if len(list) == 0 {
		return nil, fmt.Errorf("lease table: no cores: %w", ErrInvalid)
	}
	if share < 1 {
		return nil, fmt.Errorf("lease table: %d leases for each core, want at least 1: %w", share, ErrInvalid)
	}
	c := &cores{share: share, used: make([]int, len(list)), cached: make([]int, len(list)), away: make([]bool, len(list))}
	seen := map[int]bool{}
	for i, core := range list {
		if len(core.CPUs) == 0 {
			return nil, fmt.Errorf("lease table: core %d has no CPUs: %w", i, ErrInvalid)
		}
		cpus := slices.Sorted(slices.Values(core.CPUs))
		for _, n := range cpus {
			if n < 0 || seen[n] {
				return nil, fmt.Errorf("lease table: CPU %d is negative or named twice: %w", n, ErrInvalid)
			}
			seen[n] = true
		}
		c.list = append(c.list, Core{CPUs: cpus, Node: core.Node})
		if !slices.Contains(c.nodes, core.Node) {
			c.nodes = append(c.nodes, core.Node)
		}
	}
	// Neighbours stand beside each other.
	slices.SortFunc(c.list, func(a, b Core) int { return cmp.Compare(a.CPUs[0], b.CPUs[0]) })
	rank := func(node int) int {
		if i := slices.Index(near, node); i >= 0 {
			return i - len(near)
		}
		return 0
	}
	slices.SortFunc(c.nodes, func(a, b int) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a, b)) })
	return c, nil
}

// total returns the number of shares, free how many of them a request can have, including those of cached leases.
func (c *cores) total() int { return len(c.list) * c.share }

func (c *cores) free() int {
	n := c.total()
	for i, u := range c.used {
		n -= u
		if c.away[i] {
			n -= c.share - u
		}
	}
	return n
}

// available is how often core i can be had without taking anything away.
func (c *cores) available(i int) int {
	if c.away[i] {
		return 0
	}
	return c.share - c.used[i] - c.cached[i]
}

// has returns the index of the core that has a logical CPU, or -1.
func (c *cores) has(cpu int) int {
	return slices.IndexFunc(c.list, func(core Core) bool { return slices.Contains(core.CPUs, cpu) })
}

// place chooses `each` different cores for each of some workers, given how often each core can be had; nil if there are
// not enough. It takes nothing.
func (c *cores) place(workers, each int, have []int) [][]int {
	left := slices.Clone(have)
	for _, node := range c.nodes {
		if out := c.within(workers, each, left, func(i int) bool { return c.list[i].Node == node }); out != nil {
			return out
		}
	}
	// Not on one node together; each worker on one, then.
	var out [][]int
	for range workers {
		var one [][]int
		for _, node := range c.nodes {
			if one = c.within(1, each, left, func(i int) bool { return c.list[i].Node == node }); one != nil {
				break
			}
		}
		if one == nil {
			break
		}
		out = append(out, one[0])
		for _, i := range one[0] {
			left[i]--
		}
	}
	if len(out) == workers {
		return out
	}
	return c.within(workers, each, have, func(int) bool { return true })
}

// within does the same as place, but uses only the cores for which the function which returns true. A worker gets the cores with the most free
// shares, and the lowest of equal ones. This leaves the most room for the next worker.
func (c *cores) within(workers, each int, have []int, which func(int) bool) [][]int {
	var list []int
	sum := 0
	for i, n := range have {
		if n > 0 && which(i) {
			list = append(list, i)
			sum += min(n, workers)
		}
	}
	if len(list) < each || sum/each < workers {
		return nil
	}
	left := slices.Clone(have)
	out := make([][]int, workers)
	for w := range out {
		slices.SortFunc(list, func(a, b int) int { return cmp.Or(cmp.Compare(left[b], left[a]), cmp.Compare(a, b)) })
		out[w] = slices.Sorted(slices.Values(list[:each]))
		for _, i := range out[w] {
			if left[i]--; left[i] < 0 {
				return nil
			}
		}
	}
	return out
}

// cpus are the logical CPUs of each worker's cores.
func (c *cores) cpus(shares [][]int) [][]int {
	out := make([][]int, len(shares))
	for w, s := range shares {
		for _, i := range s {
			out[w] = append(out[w], c.list[i].CPUs...)
		}
		slices.Sort(out[w])
	}
	return out
}

// count adds n to each of the shares' cores.
func count(of []int, shares [][]int, n int) {
	for _, s := range shares {
		for _, i := range s {
			of[i] += n
		}
	}
}
