package client

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Seed is the memory that a setup function has prepared, from which workers of leases start: LeaseOptions.SeedName. Safe for concurrent use.
type Seed struct {
	session *Session
	name    string

	mu sync.Mutex
	c  *c.Seed // nil: released
}

// SeedOptions are the options of Lease.CreateSeed.
type SeedOptions struct {
	Name string // 1 to 63 characters of A-Z, a-z, 0-9, dot, underscore and hyphen
	// TTL is how long the executor keeps the seed if nobody renews it. The agent renews it as long as the session is open. 0: as long as the
	// executor's longest lease.
	TTL time.Duration
}

// SeedDetails describe a seed.
type SeedDetails = c.SeedDetails

// CreateSeed executes a function of the lease's library once, in a process of its own beside the workers, and keeps its memory under a name. See
// rfaas_seed_create(3). Errors: ErrUnsupported (the state cannot be kept; the text says why), ErrFunction (the function has failed), ErrInvalid, ErrBusy,
// ErrConnection (it has crashed, or has not returned in time).
func (l *Lease) CreateSeed(ctx context.Context, function string, payload []byte, o SeedOptions) (*Seed, error) {
	const op = "create a seed"
	switch {
	case l.released.Load():
		return nil, fail(op, StatusLeaseEnded, "the lease was released")
	case strings.Contains(function+o.Name, "\x00"):
		return nil, fail(op, dataplane.StatusInvalid, "function %q, name %q: want no NUL character", function, o.Name)
	}
	return during(ctx, l.session, op, func() (*Seed, error) {
		s, err := l.c.SeedCreate(function, payload, o.Name, o.TTL)
		if err != nil {
			return nil, l.explain(err)
		}
		return &Seed{session: l.session, c: s, name: s.Name()}, nil
	}, func(s *Seed) { _ = s.Release() })
}

// OpenSeed opens a seed that this or another program has created, by its full name. ErrLease: the seed has ended.
func (s *Session) OpenSeed(ctx context.Context, name string) (*Seed, error) {
	const op = "open a seed"
	if strings.Contains(name, "\x00") {
		return nil, fail(op, dataplane.StatusInvalid, "name %q: want no NUL character", name)
	}
	return during(ctx, s, op, func() (*Seed, error) {
		d, err := s.c.SeedOpen(name)
		if err != nil {
			return nil, err
		}
		return &Seed{session: s, c: d, name: d.Name()}, nil
	}, func(d *Seed) { _ = d.Release() })
}

// Name is the full name, by which every program of the tenant finds the seed.
func (s *Seed) Name() string { return s.name }

// Info asks the executor about the seed.
func (s *Seed) Info(ctx context.Context) (SeedDetails, error) {
	const op = "seed info"
	return during(ctx, s.session, op, func() (SeedDetails, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.c == nil {
			return SeedDetails{}, fail(op, dataplane.StatusInvalid, "the seed was released")
		}
		return s.c.Info()
	}, nil)
}

// Release withdraws a seed that this process has created: no later lease finds it. For an opened seed it only frees the handle.
func (s *Seed) Release() error {
	end, err := s.session.begin("release a seed")
	if err != nil {
		return err
	}
	defer end()
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.c
	if s.c = nil; d == nil {
		return nil
	}
	return d.Release()
}
