package grant

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// A seed can be a table: workers of any library map its heap read-only, at the address that it has in the seed. Executors copy it from each other, as for workers that
// start from it, but they grant the lease only when they have all of it.

// SeedTable returns the seed with this full name as a table.
func (c *Control) SeedTable(ctx context.Context, name, full string) (*Table, error) {
	const op = "publish a seed as a table"
	s, err := c.FindSeed(ctx, full)
	if err != nil {
		return nil, err
	}
	switch {
	case len(s.key) != sha256.Size:
		return nil, fail(op, dataplane.StatusUnsupported, "\"%s\": executor %s has an earlier version, which cannot give the memory of %s to other workers: upgrade it", name, s.Address, full)
	case s.GetRoot() == 0:
		return nil, fail(op, dataplane.StatusInvalid, "\"%s\": seed %s has no root: its setup function %s must call rfaas_set_root", name, full, s.GetFunction())
	}
	return &Table{Name: name, Sum: [sha256.Size]byte(s.key), Size: s.GetBytes(), seed: s}, nil
}

// IsSeed reports whether the table is the memory of a seed.
func (t *Table) IsSeed() bool { return t.seed != nil }

// seedKey returns the key of the table's seed, or nil if t is nil, which stands for the seed of a lease.
func (t *Table) seedKey() []byte {
	if t == nil {
		return nil
	}
	return t.seed.key
}

// seedName returns the name by which the executor that has made a seed knows it: the seed of the table, or if table is nil, that of the lease.
func (p *Pending) seedName(table *Table) (name string, version uint32) {
	if table == nil {
		return p.spec.Seed.GetName(), p.spec.Seed.GetVersion()
	}
	return table.seed.GetName(), table.seed.GetVersion()
}

// loanLimit is how long the executor that lends a seed may take to offer it. It hashes the seed first.
func (p *Pending) loanLimit(table *Table) time.Duration {
	if table == nil {
		return p.spec.Seed.Limit()
	}
	return transferTime([]*Table{table})
}

// copyTable makes the candidate copy the table's seed, from the executor that made the seed or from one that has copied it.
func (p *Pending) copyTable(ctx context.Context, cl control.ExecutorClient, cand *Candidate, table *Table) error {
	t := p.c.copies.sources(table, cand.Address)
	var why error
	for range copyTries {
		from, done := t.take()
		if from == nil {
			break
		}
		var key []byte
		err := repeat(ctx, func() (err error) {
			key, err = p.copyFrom(ctx, cl, cand, from, nil, table, false)
			return err
		})
		done(err != nil && ctx.Err() == nil)
		if err == nil {
			t.has(&seedPlace{address: cand.Address, key: key, info: cand.info})
			return nil
		}
		if why = cmp.Or(why, err); ctx.Err() != nil {
			break
		}
	}
	st := dataplane.Status(control.StatusOf(why))
	var typed *dataplane.Error
	if errors.As(why, &typed) {
		st = typed.Status
	}
	return fail("copy a seed", st, "%s: %v", table.seed.FullName(), why)
}

// sources returns the executors from which the one at this address can copy the table's seed. The executor that has made the seed is added first if it is missing.
func (c *copies) sources(table *Table, address string) *seedTurn {
	id := seedID(sha256.Sum256(fmt.Appendf(nil, "table\x00%x", table.Sum)))
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.seed(id)
	s.at = slices.DeleteFunc(s.at, func(x *seedPlace) bool { return x.address == address })
	if origin := table.seed.Address; !slices.ContainsFunc(s.at, func(x *seedPlace) bool { return x.address == origin }) {
		s.at = slices.Insert(s.at, 0, &seedPlace{address: origin}) // perhaps it was only unreachable
	}
	return &seedTurn{c: c, id: id, address: address, from: slices.Clone(s.at)}
}

// has records that an executor has the seed from now on.
func (t *seedTurn) has(at *seedPlace) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	s := t.c.seed(t.id)
	s.at = append(slices.DeleteFunc(s.at, func(x *seedPlace) bool { return x.address == at.address }), at)
}
