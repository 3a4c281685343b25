package grant

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Bounds of a lease over several executors. MaxShare is the largest number of workers of one lease in the C library.
const (
	MaxSpread = 1 << 16
	MaxShare  = 1024
)

// Executor returns the address of the session's executor; "" if the session has a manager.
func (c *Control) Executor() string { return c.opts.Executor }

// Share is a number of workers on one executor.
type Share struct {
	Address string
	Workers int
}

// Spread finds room for s.Workers workers on as few executors as possible, without those in avoid. On the board it looks for an
// executor with room for all workers, then for half of them, and so on. The rest is taken from the manager's list. Nothing is reserved,
// so the executors may refuse. Errors: ErrBusy (there is room for fewer now; the text says how many), ErrInvalid (for example, no
// executor lends enough for one worker), those of the manager.
func (c *Control) Spread(ctx context.Context, s Spec, avoid []string) ([]Share, error) {
	const op = "lease across executors"
	s.CoresPerWorker = max(s.CoresPerWorker, 1)
	switch {
	case s.Workers < 1 || s.Workers > MaxSpread:
		return nil, fail(op, dataplane.StatusInvalid, "%d workers, want 1 to %d", s.Workers, MaxSpread)
	case s.CoresPerWorker > 1<<16:
		return nil, fail(op, dataplane.StatusInvalid, "%d cores per worker, want 1 to %d", s.CoresPerWorker, 1<<16)
	case s.Executor != "" || c.opts.Executor != "":
		return nil, fail(op, dataplane.StatusInvalid, "executor %s is given: want a resource manager", s.Executor+c.opts.Executor)
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	sp := spread{spec: s, left: s.Workers, used: slices.Clone(avoid)}
	refused := map[uint32]bool{}
	for want := s.Workers; sp.left > 0; {
		one := s
		one.Workers = min(want, sp.left)
		cand, err := c.pick(ctx, &one, refused)
		switch {
		case err == nil:
			sp.take(cand)
			want = min(want, sp.left)
		case errors.Is(err, board.ErrNone) && want > 1:
			want = (want + 1) / 2
		default:
			return c.spreadList(ctx, &sp)
		}
	}
	return sp.shares, nil
}

// spreadList takes the missing workers from the manager's list.
func (c *Control) spreadList(ctx context.Context, sp *spread) ([]Share, error) {
	one := sp.spec
	one.Workers = 1
	all, unusable, err := c.candidates(ctx, &one)
	if err != nil {
		return nil, err
	}
	for _, cand := range all { // those of this node first, then those with the most free cores
		sp.take(cand)
	}
	if sp.left > 0 {
		return nil, sp.missing(all, unusable)
	}
	return sp.shares, nil
}

// spread is a distribution that is being made.
type spread struct {
	spec   Spec
	left   int
	used   []string // addresses
	shares []Share
}

// missing returns the error for workers without a place. It is StatusInvalid if no executor would have room for one of them even when idle,
// as it is for a lease at one executor.
func (sp *spread) missing(all []Candidate, unusable []error) error {
	const op = "lease across executors"
	text := fmt.Sprintf("%d cores", sp.spec.CoresPerWorker)
	if sp.spec.Memory > 0 {
		text += fmt.Sprintf(" and %d bytes", sp.spec.Memory)
	}
	fits := func(cand Candidate) bool { return sp.room(cand.info.GetCores(), cand.info.GetMemoryBytes()) > 0 }
	later := slices.ContainsFunc(unusable, func(err error) bool { return errors.Is(err, dataplane.ErrBusy) })
	if !slices.ContainsFunc(all, fits) && !later {
		largest := ""
		if len(all) > 0 {
			cand := slices.MaxFunc(all, func(a, b Candidate) int {
				return cmp.Or(cmp.Compare(a.info.GetMemoryBytes(), b.info.GetMemoryBytes()), cmp.Compare(a.info.GetCores(), b.info.GetCores()))
			})
			largest = fmt.Sprintf(": %s lends %d cores and %d bytes", cand.Address, cand.info.GetCores(), cand.info.GetMemoryBytes())
			if len(all) > 1 {
				largest += ", and the others have no more memory"
			}
		}
		err := fail(op, dataplane.StatusInvalid, "no executor lends the %s of one worker%s. Ask for fewer cores or less memory", text, largest)
		return withUnusable(err, unusable)
	}
	return fail(op, dataplane.StatusBusy, "%d workers with %s each: there is room for %d", sp.spec.Workers, text, sp.spec.Workers-sp.left)
}

// room returns how many workers cores and memory suffice for.
func (sp *spread) room(cores uint32, memory uint64) int {
	n := int(cores) / sp.spec.CoresPerWorker
	if m := sp.spec.Memory; m > 0 {
		n = int(min(uint64(n), memory/m))
	}
	return n
}

// take adds a share of a candidate, as large as its room.
func (sp *spread) take(cand Candidate) {
	if slices.Contains(sp.used, cand.Address) {
		return
	}
	n := min(sp.room(cand.info.GetFreeCores(), cand.info.GetFreeMemoryBytes()), sp.left, MaxShare)
	if n == 0 {
		return
	}
	sp.used = append(sp.used, cand.Address)
	sp.shares = append(sp.shares, Share{cand.Address, n})
	sp.left -= n
}
