package lease

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"
)

// model is the plainest possible account of who has what.
type model struct {
	cpus   int
	memory uint64
	held   map[ID]Lease // everything that has cores
}

func (m *model) free() (int, uint64) {
	c, mem := m.cpus, m.memory
	for _, l := range m.held {
		c -= l.Terms.Workers * l.Terms.CoresPerWorker
		mem -= uint64(l.Terms.Workers) * l.Terms.MemoryPerWorker
	}
	return c, mem
}

// check compares the table with the model: the same amounts, and no core twice.
func (m *model) check(t *testing.T, tab *Table) {
	t.Helper()
	cores, memory := m.free()
	got := tab.Capacity()
	if got.FreeCores != cores || got.FreeMemory != memory || got.Leases != len(m.held) {
		t.Fatalf("table %+v, model has %d cores, %d bytes, %d leases", got, cores, memory, len(m.held))
	}
	owner := map[int]ID{}
	for id, l := range m.held {
		for _, w := range l.CPUs {
			if len(w) != l.Terms.CoresPerWorker {
				t.Fatalf("lease %d: worker with cores %v, wants %d", id, w, l.Terms.CoresPerWorker)
			}
			for _, c := range w {
				if o, taken := owner[c]; taken {
					t.Fatalf("core %d belongs to leases %d and %d", c, o, id)
				}
				owner[c] = id
			}
		}
	}
}

// TestModel does random steps on table and model, wrong ones included, and compares after each.
func TestModel(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		now := time.Unix(1e9, 0)
		cpus := rnd.Perm(40)[:1+rnd.IntN(16)]
		m := &model{cpus: len(cpus), memory: 4000, held: map[ID]Lease{}}
		tab := newTable(t, Config{CPUs: cpus, Memory: m.memory, Now: func() time.Time { return now }, Remember: 8})
		ids := []ID{12345} // of all times, and one that never was
		var rids []RequestID
		for range 3000 {
			id := ids[rnd.IntN(len(ids))]
			before := tab.Capacity()
			var err error
			switch rnd.IntN(9) {
			case 0, 1:
				r := RequestID{byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32())}
				if len(rids) > 0 && rnd.IntN(4) == 0 {
					r = rids[rnd.IntN(len(rids))]
				}
				tm := Terms{Workers: rnd.IntN(5), CoresPerWorker: rnd.IntN(4), MemoryPerWorker: rnd.Uint64N(1500),
					Duration: time.Duration(rnd.IntN(100)) * time.Second}
				cores, memory := m.free()
				var l Lease
				var first bool
				l, first, err = tab.Request(r, tm)
				if first {
					if tm.Workers*tm.CoresPerWorker > cores || uint64(tm.Workers)*tm.MemoryPerWorker > memory {
						t.Fatalf("granted %+v with %d cores and %d bytes free", tm, cores, memory)
					}
					m.held[l.ID] = l
					ids, rids = append(ids, l.ID), append(rids, r)
				} else if errors.Is(err, ErrBusy) && tm.Workers*tm.CoresPerWorker <= cores && uint64(tm.Workers)*tm.MemoryPerWorker <= memory {
					t.Fatalf("refused %+v with %d cores and %d bytes free: %v", tm, cores, memory, err)
				}
			case 2:
				_, err = tab.Grant(id)
			case 3:
				if err = tab.Fail(id, errors.New("no")); err == nil {
					delete(m.held, id)
				}
			case 4:
				_, err = tab.Open(id)
			case 5:
				tab.Away(id, rnd.Uint64N(4))
			case 6:
				_, err = tab.End(id, Released+State(rnd.IntN(3)), "")
			case 7:
				if err = tab.Reaped(id); err == nil {
					delete(m.held, id)
				}
			case 8:
				now = now.Add(time.Duration(rnd.IntN(5)) * time.Second)
				due, next := tab.Due()
				if !next.IsZero() && !next.After(now) {
					t.Fatalf("next deadline %v is not after %v", next, now)
				}
				for _, d := range due {
					if _, err := tab.End(d.ID, d.State, d.Reason); err != nil {
						t.Fatalf("lease %d is due and cannot end: %v", d.ID, err)
					}
				}
			}
			if err != nil && tab.Capacity() != before {
				t.Fatalf("an error (%v) changed %+v into %+v", err, before, tab.Capacity())
			}
			m.check(t, tab)
		}
	}
}
