package executor

import (
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/lease"
)

// withSeed is a request whose workers map a seed.
func (n *node) withSeed(key []byte) *control.LeaseRequest {
	r := n.request(1)
	r.Tables = []*control.Table{{Name: "xs", Sha256: key, Size: 8192, Seed: true}}
	return r
}

// A lease maps a seed that its executor has made, by the seed's key, and keeps it when the seed is released.
func TestSeedTable(t *testing.T) {
	n := newNode(t)
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	if len(made.GetKey()) != len(sum{}) {
		t.Fatalf("key %x", made.GetKey())
	}
	l, err := n.Lease(n.ctx(), n.withSeed(made.GetKey()))
	if err != nil || l.GetLeaseId() == 0 || l.GetTables() != 1 {
		t.Fatalf("%v, %v", l, err)
	}
	h, _ := n.e.find(lease.ID(l.GetLeaseId()))
	if got := h.spec.Tables; len(got) != 1 || got[0].Seed == nil || got[0].Seed.Units != 2 || got[0].Name != "xs" {
		t.Errorf("workers map %+v", got)
	}
	if _, err := n.ReleaseSeed(n.ctx(), &control.SeedRequest{Tenant: "alice", Name: "xs"}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.spec.Tables[0].Seed.File.Stat(); err != nil {
		t.Errorf("the lease's seed was freed: %v", err)
	}
	again, err := n.Lease(n.ctx(), n.withSeed(made.GetKey()))
	if err != nil || len(again.GetTablesUnknown()) != 1 {
		t.Errorf("a lease after the release: %v, %v", again, err)
	}
	n.release(l.GetLeaseId())
}

// Each request that cannot map a seed is refused, and names why.
func TestSeedTableRefused(t *testing.T) {
	n := newNode(t)
	n.seeds()
	made, err := n.createSeed()
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		change func(*control.LeaseRequest)
		text   string
	}{
		"two seeds": {func(r *control.LeaseRequest) {
			r.Tables = append(r.Tables, &control.Table{Name: "other", Sha256: make([]byte, 32), Size: 1, Seed: true})
		}, `tables "xs" and "other" are both seeds`},
		"an address": {func(r *control.LeaseRequest) { r.Tables[0].Address = 1 << 40 }, "a seed has an address of its own"},
	} {
		r := n.withSeed(made.GetKey())
		c.change(r)
		_, err := n.Lease(n.ctx(), r)
		refuses(t, what, err, control.ClassInvalid, c.text)
	}
	plain := n.withSeed(made.GetKey())
	plain.Tables[0].Seed = false
	if l, err := n.Lease(n.ctx(), plain); err != nil || len(l.GetTablesUnknown()) != 1 {
		t.Errorf("the key of a seed names bytes: %v, %v", l, err)
	}
	own := n.withSeed(made.GetKey())
	own.Seed = &control.Seed{Function: "prepare", LimitMs: 1000}
	l, err := n.Lease(n.ctx(), own)
	if err != nil {
		t.Fatal(err)
	}
	h, _ := n.e.find(lease.ID(l.GetLeaseId()))
	if want := `seed: the lease maps another seed as its table "xs"`; h.seed != nil || len(h.wish.refused) < len(want) || h.wish.refused[:len(want)] != want {
		t.Errorf("a lease with a seed of its own: %v, %q", h.seed, h.wish.refused)
	}
	n.release(l.GetLeaseId())
}

// The key of a seed gives another tenant nothing, neither where the seed was made nor where it was copied to.
func TestSeedTableOfAnotherTenant(t *testing.T) {
	s := newTableStore(1<<20, nil, func(uint64) error { return nil }, func(uint64) {}, func() bool { return false })
	seed := &table{sum: sum{1}, kind: isSeed, seed: &zygote.Seed{}, owners: map[string]bool{"tenant ann": true}}
	copied := &table{sum: mappedKey("tenant ann", sum{2}), kind: isSeed, seed: &zygote.Seed{}, owners: map[string]bool{"tenant ann": true}}
	none := &table{sum: sum{3}, kind: isSeed, refused: "threads", owners: map[string]bool{"tenant ann": true}}
	for _, x := range []*table{seed, copied, none} {
		s.tables[x.sum] = x
	}
	for key, want := range map[byte]*table{1: seed, 2: copied, 3: nil, 4: nil} {
		if got := s.find(tableRef{sum{key}, isSeed}, "tenant ann"); got != want {
			t.Errorf("key %d: %v", key, got)
		}
		if got := s.find(tableRef{sum{key}, isSeed}, "tenant bob"); got != nil {
			t.Errorf("key %d of another tenant: %v", key, got)
		}
		if got := s.find(tableRef{sum{key}, isTable}, "tenant ann"); got != nil {
			t.Errorf("key %d as a table of bytes: %v", key, got)
		}
	}
}

// An executor keeps the copy of a seed that leases map, for all of them, and lends it.
func TestCopySeedTable(t *testing.T) {
	nodes := newNodes(t, 3)
	a, b, c := nodes[0], nodes[1], nodes[2]
	lendTo(nodes...)
	data, key := library(3 * (256 << 10))
	a.hasSeed(key, data)
	as := func(name sum) func(*control.FetchRequest) {
		return func(r *control.FetchRequest) { r.Table, r.OnDemand = name[:], true }
	}
	name := sum{7}
	there, err := copySeed(a, b, key, dataplane.TCP, as(name))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		got, unknown := b.e.tables.acquire([]tableRef{{name, isSeed}}, "")
		if len(unknown) > 0 || got[0].seed.Filling() {
			t.Fatalf("the copy: %v, %v", got, unknown)
		}
		b.e.tables.release(got)
	}
	if _, err := copySeed(b, c, there, dataplane.SHM, as(name)); err != nil {
		t.Fatal(err)
	}
	if got := c.e.tables.find(tableRef{name, isSeed}, ""); got == nil || got.size == 0 {
		t.Errorf("the copy of the copy: %v", got)
	}
	_, err = copySeed(a, b, key, dataplane.SHM, func(r *control.FetchRequest) { r.Table = []byte("short") })
	refuses(t, "a short key", err, control.ClassInvalid, "table")
	if got := b.e.tables.find(tableRef{name, isSeed}, "tenant ann"); got != nil {
		t.Errorf("a tenant has the operator's copy: %v", got)
	}
}
