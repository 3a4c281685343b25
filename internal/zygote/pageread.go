package zygote

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"sort"
)

// join makes one run of runs that follow each other.
func join(runs []SeedRun) (list []SeedRun) {
	for _, r := range runs {
		if n := len(list) - 1; n >= 0 && list[n].First+list[n].Count == r.First {
			list[n].Count += r.Count
		} else {
			list = append(list, r)
		}
	}
	return list
}

// recordedMost returns how many leaves of a seed a list may name. If workers touch more, the list saves little, and a list that names everything would make every node read everything.
func recordedMost(leaves uint32) uint32 { return min(leaves, max(leaves/4, 512)) }

// cleanRuns returns the valid part of a list, with each leaf once, and at most recordedMost of them. The list may come from an untrusted process.
func cleanRuns(list []SeedRun, leaves uint32) (clean []SeedRun) {
	left, has := recordedMost(leaves), make([]bool, leaves)
	for _, r := range list[:min(len(list), touchedMost)] {
		if r.First >= leaves {
			continue
		}
		for l := r.First; l < r.First+min(r.Count, leaves-r.First) && left > 0; l++ {
			if has[l] {
				continue
			}
			has[l] = true
			left--
			if n := len(clean) - 1; n >= 0 && clean[n].First+clean[n].Count == l {
				clean[n].Count++
			} else if n+1 < touchedMost {
				clean = append(clean, SeedRun{l, 1})
			}
		}
	}
	return clean
}

// count returns the number of leaves.
func (p *paging) count() uint32 { return p.base[len(p.c.Segments)] }

// segment returns the segment of a leaf.
func (p *paging) segment(l uint32) int {
	return sort.Search(len(p.c.Segments), func(i int) bool { return p.base[i+1] > l })
}

// bytes returns the place of a run in the file. The run must lie in one segment.
func (p *paging) bytes(r SeedRun) SeedSegment {
	i := p.segment(r.First)
	x := p.c.Segments[i]
	from := uint64(r.First-p.base[i]) * p.leaf
	return SeedSegment{Offset: x.Offset + from, Size: min(uint64(r.Count)*p.leaf, x.Size-from)}
}

// window returns what is read for a leaf for which a worker waits.
func (p *paging) window(l uint32) SeedRun {
	if p.o.Exact {
		return SeedRun{l, 1}
	}
	i, most := p.segment(l), uint32(max(segmentSize/p.leaf, 1))
	from := l - (l-p.base[i])%most
	return SeedRun{from, min(most, p.base[i+1]-from)}
}

// grow returns what is read for a leaf for which a worker waits. For the first such leaf in a window it is the leaf alone, for the second one its group, and for later
// ones the whole window. If the leaf is the first one of the window, and the leaf before it has arrived, workers probably read in sequence. Then it is the whole window
// at once. So scattered pages take few bytes, and a sequence takes few reads. The caller holds mu.
func (p *paging) grow(l uint32) SeedRun {
	w := p.window(l)
	before := p.asks[w.First]
	p.asks[w.First]++
	switch from := l - (l-w.First)%groupLeaves; {
	case before > 1 || l == w.First && l > 0 && p.valid[l-1]:
		return w
	case before == 0:
		return SeedRun{l, 1}
	default:
		return SeedRun{from, min(groupLeaves, w.First+w.Count-from)}
	}
}

// take removes about fetchMost bytes from the front of a list. It returns the leaves of these that are not valid, as runs each of which lies in one segment.
func (p *paging) take(list *[]SeedRun) (runs []SeedRun) {
	for room := uint32(max(fetchMost/p.leaf, 1)); len(*list) > 0 && room > 0; {
		r := &(*list)[0]
		n := min(r.Count, room)
		runs = p.missing(runs, SeedRun{r.First, n})
		room -= n
		r.First, r.Count = r.First+n, r.Count-n
		if r.Count == 0 {
			*list = (*list)[1:]
		}
	}
	return runs
}

// windows returns what is read for the leaves of a list, each only once.
func (p *paging) windows(list []SeedRun) (all []SeedRun) {
	done := make([]bool, p.count())
	for _, r := range list {
		for l := r.First; l < r.First+r.Count; l++ {
			if done[l] {
				continue
			}
			w := p.window(l)
			for k := w.First; k < w.First+w.Count; k++ {
				done[k] = true
			}
			all = append(all, w)
		}
	}
	return join(all)
}

// missing appends the parts of a run that are not valid, as runs each of which lies in one segment.
func (p *paging) missing(list []SeedRun, r SeedRun) []SeedRun {
	for l, i := r.First, -1; l < r.First+r.Count; l++ {
		if p.valid[l] {
			i = -1
			continue
		}
		if i < 0 || l == p.base[i+1] {
			i, list = p.segment(l), append(list, SeedRun{l, 0})
		}
		list[len(list)-1].Count++
	}
	return list
}

// fetch reads runs, checks them, and puts them into the file. Each run must lie in one segment. If show is set, workers get the runs even if they do not wait for
// them. The caller holds reading.
func (p *paging) fetch(runs []SeedRun, show bool) error {
	var parts []SeedPart
	var proofs []uint32 // first leaves of the groups whose proofs are read
	size := uint64(0)
	add := func(x SeedPart) {
		size += x.Size
		if n := len(parts) - 1; n >= 0 && parts[n].Segment == x.Segment && parts[n].Offset+parts[n].Size == x.Offset {
			parts[n].Size += x.Size
		} else {
			parts = append(parts, x)
		}
	}
	for _, r := range runs {
		i := p.segment(r.First)
		if r == (SeedRun{p.base[i], p.base[i+1] - p.base[i]}) {
			continue
		}
		for l := r.First - (r.First-p.base[i])%groupLeaves; l < r.First+r.Count; l += groupLeaves {
			if !p.proved[l] && !slices.Contains(proofs, l) {
				proofs = append(proofs, l)
				add(SeedPart{-1, p.proofs[i] + uint64(l-p.base[i])/groupLeaves*proofSize, proofSize})
			}
		}
	}
	for _, r := range runs {
		i := p.segment(r.First)
		add(SeedPart{i, uint64(r.First-p.base[i]) * p.leaf, p.bytes(r).Size})
	}
	p.buffer = slices.Grow(p.buffer[:0], int(size))[:size]
	if err := p.o.Read(parts, p.buffer); err != nil {
		return err
	}
	b := p.buffer
	for _, l := range proofs {
		if err := p.prove(l, b[:proofSize]); err != nil {
			return err
		}
		b = b[proofSize:]
	}
	for _, r := range runs {
		x := p.bytes(r)
		if err := p.check(r, b[:x.Size]); err != nil {
			return err
		}
		if err := p.pages.put(x.Offset, b[:x.Size]); err != nil {
			return err
		}
		b = b[x.Size:]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moved += size
	for _, r := range runs {
		for l := r.First; l < r.First+r.Count; l++ {
			if !p.valid[l] {
				p.valid[l] = true
				p.left--
			}
		}
	}
	if p.left == 0 {
		p.ask()
	}
	for g := range p.pagers {
		g.arrived(runs, show)
	}
	return nil
}

// prove checks the proof of the group that begins with leaf l, and records the hashes of its leaves.
func (p *paging) prove(l uint32, proof []byte) error {
	i := p.segment(l)
	own, err := checkProof(p.c.Segments[i], i, int(l-p.base[i])/groupLeaves, int(p.base[i+1]-p.base[i]), proof)
	if err == nil {
		p.know(l, own)
	}
	return err
}

// know records the hashes of leaves from l on.
func (p *paging) know(l uint32, sums []byte) {
	copy(p.c.leaves[int(l)*sha256.Size:], sums)
	for k := range len(sums) / sha256.Size {
		p.proved[int(l)+k] = true
	}
}

// check checks the bytes of a run.
func (p *paging) check(r SeedRun, b []byte) error {
	i := p.segment(r.First)
	x, got := p.c.Segments[i], appendLeaves(nil, b, p.leaf)
	if r == (SeedRun{p.base[i], p.base[i+1] - p.base[i]}) {
		if root(got) != x.Sum {
			return wrongSum(i, x, got)
		}
		p.know(r.First, got)
		return nil
	}
	for k := range int(r.Count) {
		want, has := p.c.leaves[(int(r.First)+k)*sha256.Size:][:sha256.Size], got[k*sha256.Size:][:sha256.Size]
		if !slices.Equal(want, has) {
			return fmt.Errorf("seed: leaf %d of segment %d was announced as SHA-256 %x, but the bytes have %x", r.First+uint32(k)-p.base[i], i, want, has)
		}
	}
	return nil
}

// pick returns the runs to read next. Runs for which workers wait come first. Then come the runs that were recorded on another node, then a part of the rest.
// The rest is read only if all and now are set. all: everything is to be read. now: reading delays no worker. show: see fetch. last: the runs belong to the rest. err: a
// pager could not read.
func (p *paging) pick(all, now bool) (runs []SeedRun, show, last bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = all
	if err, p.failed = p.failed, nil; err != nil {
		return nil, false, false, err
	}
	for len(p.wanted) > 0 && len(runs) == 0 {
		runs = p.take(&p.wanted)
	}
	for len(p.first) > 0 && len(runs) == 0 {
		runs, show = p.take(&p.first), true
	}
	for all && now && len(p.rest) > 0 && len(runs) == 0 {
		runs, last = p.take(&p.rest), true
	}
	return runs, show, last, nil
}

// leafAt returns the leaf that contains an offset of the file, or false if the offset is in a hole.
func (p *paging) leafAt(offset uint64) (uint32, bool) {
	i := sort.Search(len(p.c.Segments), func(i int) bool { return p.c.Segments[i].Offset+p.c.Segments[i].Size > offset })
	if i < len(p.c.Segments) && p.c.Segments[i].Offset <= offset {
		return p.base[i] + uint32((offset-p.c.Segments[i].Offset)/p.leaf), true
	}
	return 0, false
}

// around returns the run of arrived leaves around a leaf, within its segment. It is empty if the leaf itself has not arrived. The caller holds mu.
func (p *paging) around(l uint32) (r SeedRun) {
	i := p.segment(l)
	from, end := l, l
	for ; end < p.base[i+1] && p.valid[end]; end++ {
	}
	for ; end > l && from > p.base[i] && p.valid[from-1]; from-- {
	}
	return SeedRun{from, end - from}
}
