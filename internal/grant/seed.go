package grant

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Seed is a named seed at an executor.
type Seed struct {
	*control.SeedDescription
	Address  string        // of the executor that has made it
	Left     time.Duration // until it ends unless it is renewed
	Children uint32        // workers that have started from it
	key      []byte        // which no other seed has; an executor of an earlier version has none
}

// FullName is the name by which every program of the tenant finds the seed.
func (s *Seed) FullName() string {
	return fmt.Sprintf("%s:%d@%s", s.GetName(), s.GetVersion(), s.Address)
}

// ParseSeedName returns the parts of a full name.
func ParseSeedName(full string) (name string, version uint32, address string, err error) {
	left, address, found := strings.Cut(full, "@")
	name, number, dated := strings.Cut(left, ":")
	v, bad := strconv.ParseUint(number, 10, 32)
	if !found || !dated || bad != nil || v == 0 || name == "" || address == "" {
		return "", 0, "", fail("seed", dataplane.StatusInvalid, "%q is not the name of a seed: want NAME:VERSION@ADDRESS, as rfaas_seed_name returns it", full)
	}
	return name, uint32(v), address, nil
}

func seedOf(address string, r *control.SeedReply) (*Seed, error) {
	if r.GetSeed() == nil {
		return nil, fail("seed", dataplane.StatusProtocol, "%s does not describe the seed in its reply", address)
	}
	return &Seed{r.GetSeed(), address, milliseconds(r.GetLeftMs()), r.GetChildren(), r.GetKey()}, nil
}

// CreateSeed executes a function of the lease's library beside its workers, and publishes the memory that it has prepared.
func (h *Held) CreateSeed(ctx context.Context, req *control.CreateSeedRequest) (*Seed, error) {
	const op = "create a seed"
	if err := h.ended(op); err != nil {
		return nil, err
	}
	ctx, cancel := h.whileWatched(context.WithTimeout(ctx, h.c.opts.Timeout+milliseconds(req.GetLimitMs())))
	defer cancel()
	req.LeaseId = h.ID
	r, err := h.cl.CreateSeed(ctx, req)
	if err != nil {
		return nil, h.failed(op, err)
	}
	s, err := seedOf(h.Address, r)
	if err != nil {
		return nil, err
	}
	s.Left, err = h.c.RenewSeed(ctx, s.FullName()) // until then it lasts for a short time
	return s, err
}

// seed makes a request about a seed to the executor that has made it.
func seed[Reply any](ctx context.Context, c *Control, op, full string, ask func(context.Context, control.ExecutorClient, *control.SeedRequest) (Reply, error)) (r Reply, address string, err error) {
	name, version, address, err := ParseSeedName(full)
	if err == nil {
		err = c.isOpen(op)
	}
	if err != nil {
		return r, address, err
	}
	conn, err := c.dial(op, address)
	if err != nil {
		return r, address, err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	cl, req := control.NewExecutorClient(conn), &control.SeedRequest{Name: name, Version: version, Tenant: c.opts.Tenant}
	err = repeat(ctx, func() (err error) {
		r, err = ask(ctx, cl, req)
		return err
	})
	return r, address, fromControl(op, address, err)
}

// FindSeed describes a seed.
func (c *Control) FindSeed(ctx context.Context, full string) (*Seed, error) {
	r, address, err := seed(ctx, c, "open a seed", full, func(ctx context.Context, cl control.ExecutorClient, req *control.SeedRequest) (*control.SeedReply, error) {
		return cl.DescribeSeed(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return seedOf(address, r)
}

// RenewSeed makes a seed last longer, and returns how long.
func (c *Control) RenewSeed(ctx context.Context, full string) (time.Duration, error) {
	r, _, err := seed(ctx, c, "renew a seed", full, func(ctx context.Context, cl control.ExecutorClient, req *control.SeedRequest) (*control.SeedReply, error) {
		return cl.RenewSeed(ctx, req)
	})
	return milliseconds(r.GetLeftMs()), err
}

// ReleaseSeed withdraws a seed.
func (c *Control) ReleaseSeed(ctx context.Context, full string) error {
	_, _, err := seed(ctx, c, "release a seed", full, func(ctx context.Context, cl control.ExecutorClient, req *control.SeedRequest) (*control.ReleaseSeedReply, error) {
		return cl.ReleaseSeed(ctx, req)
	})
	return err
}
