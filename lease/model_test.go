package lease

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// model records in simple lists which lease has which resources.
type model struct {
	cores  []Core
	share  int
	memory uint64
	now    time.Time
	held   map[ID]Lease         // leases that have resources, without cached ones
	cached []Lease              // oldest first
	lost   map[ID]map[int]int   // cores that an evicted lease has yielded, by its lowest CPU
	lostM  map[ID]uint64        // memory likewise
	ends   map[ID]time.Time     // of granted leases that have not ended
	keeps  map[ID]time.Time     // until when leases are cached
	states map[ID]State         // of everything ever granted or requested
	away   map[ID]time.Time     // deadlines of absent clients
	left   map[ID]time.Time     // when absent clients went away
	told   map[ID]time.Duration // duration that set the present end
	drops  map[ID]bool          // leases that were cached and are to be reaped
}

const (
	modelMargin, modelNotice = time.Second, 20 * time.Second
	modelKeep                = 15 * time.Second
	modelFirst, modelReturn  = 10 * time.Second, 4 * time.Second
	modelConnected           = 12 * time.Second
)

func coresOf(l Lease) map[int]int {
	n := map[int]int{}
	for _, w := range l.CPUs {
		for _, c := range w {
			n[c]++
		}
	}
	return n
}

// takenBy is how often each CPU is taken by leases that are held, and how much memory.
func (m *model) taken() (map[int]int, uint64) {
	cpus, memory := map[int]int{}, uint64(0)
	for id, l := range m.held {
		for c, n := range coresOf(l) {
			cpus[c] += n - m.lost[id][c]
		}
		memory += memoryOf(l.Terms) - m.lostM[id]
	}
	return cpus, memory
}

// possible reports whether terms can be granted if all cached leases are evicted.
func (m *model) possible(tm Terms) bool {
	cpus, memory := m.taken()
	sum := 0
	for _, c := range m.cores {
		sum += min(m.share-cpus[c.CPUs[0]], tm.Workers)
	}
	return sum >= tm.Workers*tm.CoresPerWorker && m.memory-memory >= memoryOf(tm)
}

// check compares the table with the model: the same amounts, no core with more leases than it may have.
func (m *model) check(t *testing.T, tab *Table) {
	t.Helper()
	cpus, memory := m.taken()
	used := 0
	for _, c := range m.cores {
		used += cpus[c.CPUs[0]]
	}
	got := tab.Capacity()
	want := Capacity{Cores: len(m.cores) * m.share, FreeCores: len(m.cores)*m.share - used, Memory: m.memory,
		FreeMemory: m.memory - memory, Leases: len(m.held), Cached: len(m.cached)}
	if got != want {
		t.Fatalf("table %+v, model %+v", got, want)
	}
	all := slices.Clone(m.cached)
	for id, l := range m.held {
		if len(m.lost[id]) == 0 {
			all = append(all, l)
		}
	}
	owners := map[int]int{}
	for _, l := range all {
		for _, w := range l.CPUs {
			whole := 0
			for _, c := range m.cores {
				if slices.Contains(w, c.CPUs[0]) {
					whole += len(c.CPUs)
					for _, cpu := range c.CPUs {
						if !slices.Contains(w, cpu) {
							t.Fatalf("lease %d has CPU %d and not its sibling %d", l.ID, c.CPUs[0], cpu)
						}
					}
				}
			}
			if whole != len(w) {
				t.Fatalf("lease %d: CPUs %v are not whole cores", l.ID, w)
			}
		}
		for c, n := range coresOf(l) {
			if owners[c] += n; owners[c] > m.share {
				t.Fatalf("CPU %d has %d owners, %d are allowed; one is lease %d", c, owners[c], m.share, l.ID)
			}
		}
	}
}

// request does and checks one request.
func (m *model) request(t *testing.T, tab *Table, rid RequestID, tm Terms, reuse ID) (ID, error) {
	t.Helper()
	possible := m.possible(tm)
	l, first, err := tab.Request(rid, tm, reuse)
	if !first {
		if errors.Is(err, ErrBusy) && possible {
			t.Fatalf("refused %+v, which is there: %v", tm, err)
		}
		return 0, err
	}
	m.states[l.ID] = Requested
	if reuse != 0 {
		i := slices.IndexFunc(m.cached, func(k Lease) bool { return k.ID == reuse })
		if i < 0 || fmt.Sprint(m.cached[i].CPUs) != fmt.Sprint(l.CPUs) || l.Reuses != reuse {
			t.Fatalf("lease %d with cores %v reuses %d, which has cores of its own", l.ID, l.CPUs, reuse)
		}
		m.cached = slices.Delete(m.cached, i, i+1)
		m.held[l.ID] = l
		return l.ID, nil
	}
	if !possible {
		t.Fatalf("granted %+v, which is not there", tm)
	}
	if len(l.CPUs) != tm.Workers {
		t.Fatalf("%d workers, %d wanted", len(l.CPUs), tm.Workers)
	}
	// The evicted leases are the oldest ones, and the new lease has their resources.
	others, memory := m.taken() // and cached
	for _, k := range m.cached {
		for c, n := range coresOf(k) {
			others[c] += n
		}
		memory += memoryOf(k.Terms)
	}
	for i, id := range l.Evict {
		if m.cached[i].ID != id {
			t.Fatalf("lease %d evicts %v, the oldest cached is %d", l.ID, l.Evict, m.cached[i].ID)
		}
		m.held[id], m.lost[id], m.drops[id] = m.cached[i], map[int]int{}, true
	}
	m.cached = m.cached[len(l.Evict):]
	for c, n := range coresOf(l) {
		over := others[c] + n - m.share
		for _, id := range l.Evict {
			give := min(max(over, 0), coresOf(m.held[id])[c])
			m.lost[id][c] = give
			over -= give
		}
		if over > 0 {
			t.Fatalf("lease %d has CPU %d, which is taken", l.ID, c)
		}
	}
	need := int64(memoryOf(tm)) - int64(m.memory-memory)
	for _, id := range l.Evict {
		give := min(max(need, 0), int64(memoryOf(m.held[id].Terms)))
		m.lostM[id] = uint64(give)
		need -= give
	}
	m.held[l.ID] = l
	return l.ID, nil
}

// claim does and checks one claim.
func (m *model) claim(t *testing.T, tab *Table, old, id ID) (bool, error) {
	t.Helper()
	i := slices.IndexFunc(m.cached, func(k Lease) bool { return k.ID == old })
	_, err := tab.Get(id)
	inUse := err == nil
	l, err := tab.Claim(old, id, m.now)
	if want := i >= 0 && !inUse && id != 0; (err == nil) != want {
		t.Fatalf("claim of %d for %d, which is in use: %t; cached: %t: %v", old, id, inUse, i >= 0, err)
	}
	if err != nil {
		return false, err
	}
	if fmt.Sprint(m.cached[i].CPUs) != fmt.Sprint(l.CPUs) || l.Reuses != old || l.State != Granted {
		t.Fatalf("the claim of %+v is %+v", m.cached[i], l)
	}
	m.cached = slices.Delete(m.cached, i, i+1)
	m.held[id], m.states[id] = l, Granted
	m.set(id, l.Terms.Duration)
	m.away[id] = m.now.Add(modelFirst)
	return true, nil
}

func (m *model) gone(id ID) {
	delete(m.held, id)
	delete(m.lost, id)
	delete(m.lostM, id)
}

// due is what the model expects Due to say of a lease; 0: nothing.
func (m *model) due(id ID) State {
	if end, ok := m.keeps[id]; ok && slices.ContainsFunc(m.cached, func(l Lease) bool { return l.ID == id }) && !end.After(m.now) {
		return Released
	}
	end, ok := m.ends[id]
	if !ok {
		return 0
	}
	first, how := end, Expired
	if notice := end.Add(-min(modelNotice, m.told[id]/3)); m.states[id] == Active && m.now.Before(end) {
		first, how = notice, Expiring
	}
	if by, ok := m.away[id]; ok && by.Before(first) {
		first, how = by, Revoked
	}
	if first.After(m.now) {
		return 0
	}
	return how
}

// end forgets the deadlines of a lease that has ended.
func (m *model) end(id ID, how State) {
	m.states[id] = how
	delete(m.ends, id)
	delete(m.away, id)
}

func (m *model) set(id ID, d time.Duration) { m.ends[id], m.told[id] = m.now.Add(d), d }

// TestModel does random steps on table and model, wrong ones included, and compares after each: what is granted, what
// is free, what is due, and which steps are refused.
func TestModel(t *testing.T) {
	const steps = 3000
	granted, evicted, reused, claimed := 0, 0, 0, 0
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		m := &model{share: 1 + int(seed%4)/3, memory: 4000, now: time.Unix(1e9, 0), held: map[ID]Lease{}, lost: map[ID]map[int]int{},
			lostM: map[ID]uint64{}, ends: map[ID]time.Time{}, keeps: map[ID]time.Time{}, states: map[ID]State{},
			away: map[ID]time.Time{}, left: map[ID]time.Time{}, told: map[ID]time.Duration{}, drops: map[ID]bool{}}
		cpus := rnd.Perm(60)
		for n := 1 + rnd.IntN(12); n > 0; n-- {
			smt := 1 + rnd.IntN(3)
			m.cores = append(m.cores, Core{CPUs: slices.Sorted(slices.Values(cpus[:smt])), Node: rnd.IntN(3)})
			cpus = cpus[smt:]
		}
		tab := newTable(t, Config{Cores: m.cores, Memory: m.memory, Share: m.share, Near: []int{rnd.IntN(3)}, FirstUse: modelFirst,
			Return: modelReturn, Connected: modelConnected, Margin: modelMargin, Notice: modelNotice, Keep: modelKeep, Now: func() time.Time { return m.now }, Remember: 8})
		ids := []ID{12345} // of all times, and one that never was
		presence := map[ID]uint64{}
		var rids []RequestID
		for range steps {
			id := ids[rnd.IntN(len(ids))]
			if held := slices.Sorted(maps.Keys(m.held)); len(held) > 0 && rnd.IntN(8) > 0 { // most of all times ended long ago
				id = held[rnd.IntN(len(held))]
			}
			before := tab.Capacity()
			state := m.states[id]
			living := state == Granted || state == Active || state == Expiring
			var err error
			switch rnd.IntN(13) {
			case 0, 1, 2:
				r := RequestID{byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32())}
				if len(rids) > 0 && rnd.IntN(5) == 0 {
					r = rids[rnd.IntN(len(rids))]
				}
				tm := Terms{Workers: rnd.IntN(4), CoresPerWorker: rnd.IntN(4), MemoryPerWorker: rnd.Uint64N(1500),
					Duration: time.Duration(rnd.IntN(100)) * time.Second, Kind: [32]byte{byte(rnd.IntN(3))}}
				var reuse ID
				if len(m.cached) > 0 && rnd.IntN(2) == 0 {
					k := m.cached[rnd.IntN(len(m.cached))]
					if reuse = k.ID; rnd.IntN(4) > 0 {
						tm = k.Terms
					}
				} else if rnd.IntN(8) == 0 {
					reuse = id
				}
				var got ID
				if got, err = m.request(t, tab, r, tm, reuse); got != 0 {
					ids, rids = append(ids, got), append(rids, r)
					evicted += len(m.held[got].Evict)
					if reuse != 0 {
						reused++
					}
				}
			case 3:
				var l Lease
				if l, err = tab.Grant(id); (err == nil) != (state == Requested) {
					t.Fatalf("grant of a lease that is %v: %v", state, err)
				}
				if err == nil {
					granted++
					m.states[id] = Granted
					m.set(id, l.Terms.Duration)
					m.away[id] = m.now.Add(modelFirst)
				}
			case 4:
				if err = tab.Fail(id, errors.New("no")); (err == nil) != (state == Requested) {
					t.Fatalf("fail of a lease that is %v: %v", state, err)
				}
				if err == nil {
					m.gone(id)
					delete(m.states, id)
				}
			case 5:
				var p uint64
				if p, err = tab.Open(id); (err == nil) != living {
					t.Fatalf("open of a lease that is %v: %v", state, err)
				}
				if err == nil {
					presence[id] = p
					if state == Granted {
						m.states[id] = Active
					}
					delete(m.away, id)
				}
			case 6:
				p := presence[id] - uint64(rnd.IntN(2))
				_, absent := m.away[id]
				switch patience, kind := modelReturn, rnd.IntN(3); kind {
				case 0:
					tab.Disconnected(id)
					by := m.now.Add(modelReturn)
					if at, known := m.left[id]; known {
						by = at.Add(modelReturn)
					}
					if by.Before(m.now) {
						by = m.now
					}
					if living && absent && by.Before(m.away[id]) {
						m.away[id] = by
					}
				default:
					if kind == 1 {
						patience = modelConnected
					}
					want := living && !absent && p == presence[id]
					if got := tab.Away(id, p, kind == 1); got != want {
						t.Fatalf("away from a lease that is %v, its client absent %t: %t", state, absent, got)
					}
					if want {
						m.away[id], m.left[id] = m.now.Add(patience), m.now
					}
				}
			case 7:
				how := Released + State(rnd.IntN(4))
				if rnd.IntN(2) == 0 {
					how = Released
				}
				if _, err = tab.End(id, how, ""); (err == nil) != living {
					t.Fatalf("end of a lease that is %v: %v", state, err)
				}
				if err == nil {
					m.end(id, how)
				}
			case 8:
				_, holds := m.held[id]
				if err = tab.Reaped(id); (err == nil) != (state.Ended() && holds) {
					t.Fatalf("reaped, a lease that is %v and has resources %t: %v", state, holds, err)
				}
				if err == nil {
					m.gone(id)
				}
			case 9:
				l, holds := m.held[id]
				want := state == Released && holds && l.Terms.Kind != [32]byte{} && !m.drops[id]
				if err = tab.Keep(id); (err == nil) != want {
					t.Fatalf("keep of a lease that is %v, has resources %t and is to be reaped %t: %v", state, holds, m.drops[id], err)
				}
				if err == nil {
					m.gone(id)
					m.cached, m.keeps[id] = append(m.cached, l), m.now.Add(modelKeep)
				}
			case 10:
				d := time.Duration(rnd.IntN(60)-5) * time.Second
				var l Lease
				if l, err = tab.Renew(id, d); (err == nil) != (living && d > 0 && m.ends[id].After(m.now)) {
					t.Fatalf("renew for %v of a lease that is %v until %v, now %v: %v", d, state, m.ends[id], m.now, err)
				}
				if err == nil {
					if m.ends[id].Before(m.now.Add(d)) {
						m.set(id, d)
					}
					if state == Expiring && m.now.Before(m.ends[id].Add(-min(modelNotice, m.told[id]/3))) {
						m.states[id] = Active
					}
					if !l.Expires.Equal(m.ends[id]) || l.State != m.states[id] {
						t.Fatalf("renewed: %v until %v, want %v until %v", l.State, l.Expires, m.states[id], m.ends[id])
					}
					if gap := l.Expires.Sub(l.ClientEnd); gap <= 0 || gap > modelMargin {
						t.Fatalf("the client's end is %v before the executor's", gap)
					}
				}
			case 11:
				old, fresh := id, ID(1<<40+claimed)
				if len(m.cached) > 0 && rnd.IntN(4) > 0 {
					old = m.cached[rnd.IntN(len(m.cached))].ID
				}
				if rnd.IntN(8) == 0 {
					fresh = id // may be in use
				}
				var got bool
				if got, err = m.claim(t, tab, old, fresh); got {
					ids = append(ids, fresh)
					claimed++
				}
			case 12:
				m.now = m.now.Add(time.Duration(rnd.IntN(5)) * time.Second)
				m.dues(t, tab)
				before = tab.Capacity()
			}
			if err != nil && tab.Capacity() != before {
				t.Fatalf("an error (%v) changed %+v into %+v", err, before, tab.Capacity())
			}
			m.check(t, tab)
		}
		m.finish(t, tab)
	}
	if granted < 1000 || evicted < 30 || reused < 100 || claimed < 100 {
		t.Errorf("the walk saw %d grants, %d evictions, %d reuses and %d claims only", granted, evicted, reused, claimed)
	}
}

// dues does what is due and checks that nothing else was.
func (m *model) dues(t *testing.T, tab *Table) {
	t.Helper()
	due, next := tab.Due()
	if !next.IsZero() && !next.After(m.now) {
		t.Fatalf("next deadline %v is not after %v", next, m.now)
	}
	want := map[ID]State{}
	for id := range m.states {
		if s := m.due(id); s != 0 {
			want[id] = s
		}
	}
	if len(due) != len(want) {
		t.Fatalf("due: %v, want %v", due, want)
	}
	for _, d := range due {
		if want[d.ID] != d.State {
			t.Fatalf("lease %d is due as %v, want %v", d.ID, d.State, want[d.ID])
		}
		var err error
		switch d.State {
		case Expiring:
			if _, err = tab.Notice(d.ID); err == nil {
				m.states[d.ID] = Expiring
			}
		case Released:
			if err = tab.Drop(d.ID); err == nil {
				i := slices.IndexFunc(m.cached, func(l Lease) bool { return l.ID == d.ID })
				m.held[d.ID], m.drops[d.ID] = m.cached[i], true
				m.cached = slices.Delete(m.cached, i, i+1)
			}
		default:
			if _, err = tab.End(d.ID, d.State, d.Reason); err == nil {
				m.end(d.ID, d.State)
			}
		}
		if err != nil {
			t.Fatalf("lease %d is due as %v and cannot be: %v", d.ID, d.State, err)
		}
	}
}

// finish ends everything; all capacity must be back.
func (m *model) finish(t *testing.T, tab *Table) {
	t.Helper()
	for _, id := range tab.Cached() {
		if err := tab.Drop(id); err != nil {
			t.Fatal(err)
		}
		m.held[id] = Lease{}
	}
	for id := range m.held {
		var err error
		switch s := m.states[id]; {
		case s == Requested:
			err = tab.Fail(id, errors.New("over"))
		case s.Ended():
			err = tab.Reaped(id)
		default:
			if _, err = tab.End(id, Revoked, ""); err == nil {
				err = tab.Reaped(id)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c := tab.Capacity()
	if c.FreeCores != c.Cores || c.FreeMemory != c.Memory || c.Leases != 0 || c.Cached != 0 {
		t.Fatalf("at the end: %+v", c)
	}
	for i := range tab.cores.list {
		if tab.cores.used[i] != 0 || tab.cores.cached[i] != 0 {
			t.Fatalf("core %v at the end: %d used, %d cached", tab.cores.list[i], tab.cores.used[i], tab.cores.cached[i])
		}
	}
}

func memoryOf(t Terms) uint64 { return uint64(t.Workers) * t.MemoryPerWorker }
