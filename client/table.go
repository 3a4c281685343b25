package client

import (
	"context"
	"strings"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// PutTable publishes read-only data, the pieces one after the other. Leases that are taken from now on have it. Their functions find it by
// rfaas_table (rfaas_function.h). Each node has one copy, which its workers map. The data is copied before PutTable returns, and may be larger
// than 4 GiB. See rfaas_table_put(3). Errors: ErrInvalid, ErrFatal (no memory for the copy).
func (s *Session) PutTable(ctx context.Context, name string, parts ...Piece) error {
	return s.PutTableAt(ctx, name, 0, parts...)
}

// PutTableAt is PutTable for a table that all workers map at the same address, a multiple of the page size.
func (s *Session) PutTableAt(ctx context.Context, name string, address uint64, parts ...Piece) error {
	const op = "publish a table"
	if strings.Contains(name, "\x00") {
		return fail(op, dataplane.StatusInvalid, "%q has a NUL", name)
	}
	_, err := during(ctx, s, op, func() (struct{}, error) {
		p, err := collectParts(op, parts)
		defer dropPieces(p)
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, s.c.TablePut(name, p, address)
	}, func(struct{}) { _ = s.c.TableDrop(name) })
	return err
}

// PutTableSeed publishes the memory of a seed as a table. Functions of any library get the bytes that its setup function has passed to rfaas_set_root, read-only and at the
// same address. seed is its full name (Seed.Name). A session can have one such table. See rfaas_table_put_seed(3). Errors: ErrInvalid (also if the setup function has not
// called rfaas_set_root), ErrLease (the seed has ended).
func (s *Session) PutTableSeed(ctx context.Context, name, seed string) error {
	const op = "publish a seed as a table"
	if strings.Contains(name+seed, "\x00") {
		return fail(op, dataplane.StatusInvalid, "%q, seed %q: want no NUL", name, seed)
	}
	_, err := during(ctx, s, op, func() (struct{}, error) {
		return struct{}{}, s.c.TablePutSeed(name, seed)
	}, func(struct{}) { _ = s.c.TableDrop(name) })
	return err
}

// DropTable withdraws a table. ErrInvalid: the session has no such table, or has leases.
func (s *Session) DropTable(name string) error {
	const op = "drop a table"
	if strings.Contains(name, "\x00") {
		return fail(op, dataplane.StatusInvalid, "%q has a NUL", name)
	}
	end, err := s.begin(op)
	if err != nil {
		return err
	}
	defer end()
	return s.c.TableDrop(name)
}
