package grant

import (
	"context"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// smallChannels bounds the memory of a lease's channels on this side. A larger lease first asks the executor whether it has room, before
// the channels are made.
const smallChannels = 64 << 20

// only returns the executor at an address as the candidate of a lease that is bound to it. With small channels, an earlier description
// of the executor saves a round trip, unless the lease does not fit that description.
func (c *shared) only(ctx context.Context, addr string, s *Spec) (Candidate, error) {
	c.mu.Lock()
	known, closed := c.infos[addr], c.closed
	c.mu.Unlock()
	if closed {
		return Candidate{}, fail("find an executor", dataplane.StatusInvalid, "the session is closed")
	}
	if known != nil && !s.recheck && uint64(s.Workers)*(uint64(s.Depth)*uint64(s.Eager)+s.Bulk) <= smallChannels {
		if cand, err := c.suited(addr, known, s); err == nil && cand.tooSmall(s) == nil {
			return cand, nil
		}
	}
	info, err := c.info(ctx, addr)
	if err != nil {
		return Candidate{}, err
	}
	cand, err := c.suited(addr, info, s)
	if need := uint32(s.least() * s.CoresPerWorker); err == nil && need > info.FreeCores {
		// Checked here, because the channels of an impossible lease may take gigabytes before the executor refuses it.
		err = fail("find an executor", dataplane.StatusBusy, "%s, executor %s has %d of %d free",
			needs(s.least(), s.CoresPerWorker), addr, info.FreeCores, info.Cores)
	}
	return cand, err
}

// suited reports whether the executor that info describes could ever grant such a lease.
func (c *shared) suited(addr string, info *control.InfoReply, s *Spec) (Candidate, error) {
	if need := uint32(s.Workers * s.CoresPerWorker); need > info.Cores {
		return Candidate{}, fail("find an executor", dataplane.StatusInvalid, "%s, executor %s lends %d",
			needs(s.Workers, s.CoresPerWorker), addr, info.Cores)
	}
	p, err := c.provider(addr, info)
	return Candidate{Address: addr, Node: info.Node, Provider: p, info: info}, err
}

// tooSmall returns an error if the executor does not accept channels of these sizes.
func (cand *Candidate) tooSmall(s *Spec) error {
	const op = "lease"
	i := cand.info
	switch {
	case i.MaxDepth != 0 && s.Depth > int(i.MaxDepth):
		return fail(op, dataplane.StatusInvalid, "depth %d, executor %s allows %d", s.Depth, cand.Address, i.MaxDepth)
	case i.MaxEager != 0 && s.Eager > int(i.MaxEager):
		return fail(op, dataplane.StatusInvalid, "eager %d bytes, executor %s allows %d", s.Eager, cand.Address, i.MaxEager)
	case i.MaxBulk != 0 && s.Bulk > i.MaxBulk:
		return fail(op, dataplane.StatusInvalid, "bulk area of %d bytes, executor %s allows %d", s.Bulk, cand.Address, i.MaxBulk)
	}
	return nil
}

// info asks an executor for its description, and remembers it until forget.
func (c *shared) info(ctx context.Context, addr string) (*control.InfoReply, error) {
	const op = "ask the executor"
	conn, err := c.dial(op, addr)
	if err != nil {
		return nil, err
	}
	r, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil {
		return nil, c.explainAbsent(fromControl(op, addr, err), addr)
	}
	if r.ProtocolVersion != control.ProtocolVersion {
		return nil, fail(op, dataplane.StatusProtocol, "%s speaks control protocol %d, this client %d", addr, r.ProtocolVersion, control.ProtocolVersion)
	}
	c.mu.Lock()
	c.infos[addr] = r
	c.mu.Unlock()
	return r, nil
}

// forget drops the description of an executor that has refused, since it may have been restarted.
func (c *shared) forget(addr string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.infos, addr)
}
