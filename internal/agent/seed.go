package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// seeds are those that a session keeps: the agent renews them until they are released or the session ends. Safe for concurrent use. The zero value has none.
type seeds struct {
	mu     sync.Mutex
	kept   map[string]*keptSeed // by full name
	closed bool
}

// keptSeed is one of them.
type keptSeed struct{ stop context.CancelFunc }

// mostSeeds bounds the seeds that a session keeps.
const mostSeeds = 1024

// keep renews a seed that lasts for `left`.
func (s *seeds) keep(ctx context.Context, control *grant.Control, name string, left time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return failed("seed", dataplane.StatusInvalid, "the session is closed")
	case s.kept[name] != nil:
		return nil // the client repeats a request
	case len(s.kept) == mostSeeds:
		return failed("seed", dataplane.StatusBusy, "the session keeps %d seeds, the most: release some", mostSeeds)
	case s.kept == nil:
		s.kept = map[string]*keptSeed{}
	}
	ctx, stop := context.WithCancel(ctx)
	k := &keptSeed{stop}
	s.kept[name] = k
	go func() {
		renewSeed(ctx, control, name, time.Now().Add(left))
		s.ended(name, k)
	}()
	return nil
}

// renewals is how often a seed is renewed in its time.
const renewals = 3

// renewSeed renews a seed until ctx ends, the executor does not have it any more, or its time is over because the executor could not be reached.
func renewSeed(ctx context.Context, control *grant.Control, name string, until time.Time) {
	for {
		left := time.Until(until)
		if left <= 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(left/renewals, time.Millisecond)):
		}
		got, err := control.RenewSeed(ctx, name)
		switch {
		case err == nil:
			until = time.Now().Add(got)
		case errors.Is(err, dataplane.ErrLease):
			return
		}
	}
}

// ended removes a seed that is not renewed any more, unless the session keeps it again by now.
func (s *seeds) ended(name string, k *keptSeed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k.stop()
	if s.kept[name] == k {
		delete(s.kept, name)
	}
}

func (s *seeds) forget(name string) {
	s.mu.Lock()
	k := s.kept[name]
	s.mu.Unlock()
	if k != nil {
		s.ended(name, k)
	}
}

func (s *seeds) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, k := range s.kept {
		k.stop()
	}
}

func seedBody(s *grant.Seed) (body, error) {
	m := protocol.Seed{Bytes: s.GetBytes(), Memory: s.GetMemory(), LoadNs: int64(s.GetLoadNs()), SetupNs: int64(s.GetSetupNs()), CaptureNs: int64(s.GetCaptureNs()), LeftNs: int64(s.Left),
		Version: s.GetVersion(), Children: s.Children, Name: s.FullName(), Executor: s.Address, Node: s.GetNode(), Warning: s.GetWarning(), Function: s.GetFunction(), Payload: s.GetPayload()}
	if len(m.Name) > protocol.MaxSeedName {
		return nil, failed("seed", dataplane.StatusUnsupported, "its full name has %d bytes, want at most %d: start executor %s with a shorter --advertise", len(m.Name), protocol.MaxSeedName, s.Address)
	}
	return m.Encode, nil
}

// createSeed creates a seed beside a lease, and keeps it.
func (c *client) createSeed(r *request) (body, error) {
	const op = "create a seed"
	m, err := protocol.DecodeSeedCreate(r.body)
	if err != nil {
		return nil, err
	}
	l, held, err := c.held(op, m.Key)
	if err != nil {
		return nil, err
	}
	s, err := held.CreateSeed(c.ctx, &control.CreateSeedRequest{Name: m.Name, Function: m.Function, Payload: m.Payload, LimitMs: uint64(max(m.LimitNs/1e6, 1)),
		TtlMs: uint64(max(m.TTLNs, 0)+1e6-1) / 1e6})
	if err != nil {
		return nil, err
	}
	reply, err := seedBody(s)
	if err == nil {
		err = l.session.seeds.keep(c.ctx, l.session.control, s.FullName(), s.Left)
	}
	if err != nil {
		_ = l.session.control.ReleaseSeed(c.ctx, s.FullName()) // else it ends by itself
		return nil, err
	}
	return reply, nil
}

// seed answers the requests about a seed.
func (c *client) seed(r *request) (body, error) {
	m, err := protocol.DecodeSeedName(r.Op, r.body)
	if err != nil {
		return nil, err
	}
	s, err := c.session("seed", m.Session)
	if err != nil {
		return nil, err
	}
	switch r.Op {
	case protocol.OpSeedKeep:
		left, err := s.control.RenewSeed(c.ctx, m.Name)
		if err != nil {
			return nil, err
		}
		return nil, s.seeds.keep(c.ctx, s.control, m.Name, left)
	case protocol.OpSeedRelease:
		s.seeds.forget(m.Name)
		return nil, s.control.ReleaseSeed(c.ctx, m.Name)
	}
	found, err := s.control.FindSeed(c.ctx, m.Name)
	if err != nil {
		return nil, err
	}
	return seedBody(found)
}
