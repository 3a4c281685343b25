package lease

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// twoNodes are eight cores with two CPUs each, four on each NUMA node; CPU n and n+8 are siblings.
func twoNodes() (list []Core) {
	for i := range 8 {
		list = append(list, Core{CPUs: []int{i, i + 8}, Node: i / 4})
	}
	return list
}

func TestCoresComeWithTheirSiblings(t *testing.T) {
	tab := newTable(t, Config{Cores: twoNodes()})
	l := granted(t, tab, 1, Terms{Workers: 2, CoresPerWorker: 2, Duration: time.Minute})
	if !slices.EqualFunc(l.CPUs, [][]int{{0, 1, 8, 9}, {2, 3, 10, 11}}, slices.Equal) {
		t.Errorf("CPUs %v", l.CPUs)
	}
	if c := tab.Capacity(); c.Cores != 8 || c.FreeCores != 4 {
		t.Errorf("capacity %+v, want physical cores", c)
	}
	// A sibling that may not be leased is not handed out with the other.
	tab = newTable(t, Config{Cores: []Core{{CPUs: []int{0, 4}}, {CPUs: []int{5}}}})
	l = granted(t, tab, 1, Terms{Workers: 2, CoresPerWorker: 1, Duration: time.Minute})
	if !slices.EqualFunc(l.CPUs, [][]int{{0, 4}, {5}}, slices.Equal) {
		t.Errorf("CPUs %v", l.CPUs)
	}
}

func TestPlacement(t *testing.T) {
	for _, c := range []struct {
		name          string
		near          []int
		taken         []int // workers of one core that are there first
		workers, each int
		want          [][]int // of the first CPU of each core
	}{
		{"the NIC's node first", []int{1}, nil, 2, 1, [][]int{{4}, {5}}},
		{"no preference", nil, nil, 2, 1, [][]int{{0}, {1}}},
		{"an unknown node", []int{7}, nil, 1, 1, [][]int{{0}}},
		{"one node rather than the near one in part", []int{1}, []int{2}, 3, 1, [][]int{{0}, {1}, {2}}},
		{"each worker on one node", nil, []int{1}, 2, 3, [][]int{{1, 2, 3}, {4, 5, 6}}},
		{"a worker on two nodes if need be", nil, nil, 1, 6, [][]int{{0, 1, 2, 3, 4, 5}}},
		{"all", []int{1}, nil, 8, 1, [][]int{{4}, {5}, {6}, {7}, {0}, {1}, {2}, {3}}},
	} {
		tab := newTable(t, Config{Cores: twoNodes(), Near: c.near})
		for i, n := range c.taken {
			granted(t, tab, byte(100+i), Terms{Workers: n, CoresPerWorker: 1, Duration: time.Minute})
		}
		l := granted(t, tab, 1, Terms{Workers: c.workers, CoresPerWorker: c.each, Duration: time.Minute})
		for i, want := range c.want {
			if got := l.CPUs[i][:len(l.CPUs[i])/2]; !slices.Equal(got, want) {
				t.Errorf("%s: CPUs %v, want cores %v", c.name, l.CPUs, c.want)
				break
			}
		}
	}
}

// Several leases have the same core only if this is configured, and no worker has the same core twice.
func TestSharedCores(t *testing.T) {
	tab := newTable(t, Config{Cores: singles(0, 1), Share: 2})
	if c := tab.Capacity(); c.Cores != 4 {
		t.Errorf("%d cores, want 2 shared by 2", c.Cores)
	}
	a := granted(t, tab, 1, Terms{Workers: 1, CoresPerWorker: 2, Duration: time.Minute})
	b := granted(t, tab, 2, Terms{Workers: 1, CoresPerWorker: 1, Duration: time.Minute})
	if !slices.Equal(a.CPUs[0], []int{0, 1}) || len(b.CPUs[0]) != 1 {
		t.Errorf("CPUs %v and %v", a.CPUs, b.CPUs)
	}
	if _, _, err := tab.Request(rid(3), Terms{Workers: 1, CoresPerWorker: 3, Duration: time.Minute}, 0); !errors.Is(err, ErrInvalid) {
		t.Errorf("three of two cores for one worker: %v, want ErrInvalid", err)
	}
	if _, _, err := tab.Request(rid(4), Terms{Workers: 1, CoresPerWorker: 2, Duration: time.Minute}, 0); !errors.Is(err, ErrBusy) {
		t.Errorf("two of one free core: %v, want ErrBusy", err)
	}
	c := granted(t, tab, 5, Terms{Workers: 1, CoresPerWorker: 1, Duration: time.Minute})
	if c.CPUs[0][0] == b.CPUs[0][0] {
		t.Errorf("both on core %d while the other has room", c.CPUs[0][0])
	}
	// Spread evenly, however many.
	tab = newTable(t, Config{Cores: singles(0, 1, 2), Share: 3})
	l := granted(t, tab, 1, Terms{Workers: 3, CoresPerWorker: 3, Duration: time.Minute})
	for _, cpus := range l.CPUs {
		if !slices.Equal(cpus, []int{0, 1, 2}) {
			t.Errorf("CPUs %v", l.CPUs)
		}
	}
}

// No new lease gets a withheld core. The core does not count as free, and can be lent again later. The leases on it are named.
func TestWithheldCores(t *testing.T) {
	tab := newTable(t, Config{Cores: twoNodes(), Keep: time.Minute})
	first := granted(t, tab, 1, Terms{Workers: 2, CoresPerWorker: 1, Duration: time.Minute, Kind: [32]byte{1}})
	if _, err := tab.End(first.ID, Released, ""); err != nil {
		t.Fatal(err)
	}
	if err := tab.Keep(first.ID); err != nil {
		t.Fatal(err)
	}
	second := granted(t, tab, 2, Terms{Workers: 1, CoresPerWorker: 1, Duration: time.Minute})
	free := func() int { return tab.Capacity().FreeCores }
	if ids, err := tab.Withhold(9, true); err != nil || !slices.Equal(ids, []ID{first.ID}) || free() != 6 { // sibling of CPU 1
		t.Errorf("leases %v on CPU 9, want %d; %v; %d cores are free, want 6", ids, first.ID, err, free())
	}
	if ids, err := tab.Withhold(2, true); err != nil || !slices.Equal(ids, []ID{second.ID}) || free() != 6 {
		t.Errorf("leases %v on CPU 2, want %d; %v; %d cores are free, want 6", ids, second.ID, err, free())
	}
	if _, _, err := tab.Request(rid(3), Terms{Workers: 7, CoresPerWorker: 1, Duration: time.Minute}, 0); !errors.Is(err, ErrBusy) {
		t.Errorf("seven workers on six cores: %v", err)
	}
	third := granted(t, tab, 4, Terms{Workers: 6, CoresPerWorker: 1, Duration: time.Minute}) // evicts the cached lease
	for _, cpus := range third.CPUs {
		if cpus[0] == 1 || cpus[0] == 2 {
			t.Errorf("a lease got the withheld CPU %d", cpus[0])
		}
	}
	if err := tab.Reaped(first.ID); err != nil {
		t.Fatal(err)
	}
	for _, cpu := range []int{1, 2} {
		if _, err := tab.Withhold(cpu, false); err != nil {
			t.Error(err)
		}
	}
	if free() != 1 {
		t.Errorf("%d cores are free, want 1", free())
	}
	if _, err := tab.Withhold(16, true); !errors.Is(err, ErrInvalid) {
		t.Errorf("a CPU that is not lent: %v", err)
	}
}
