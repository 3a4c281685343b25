package agent

import (
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// claimOf returns how a client can claim cached workers. It sends the client the claim region first, if the client does not have it.
func (c *client) claimOf(k *grant.Cached) protocol.Claim {
	m := k.Claim()
	if m == nil {
		return protocol.Claim{}
	}
	c.mu.Lock()
	had := c.regions[m.Number]
	if c.regions == nil {
		c.regions = map[uint32]bool{}
	}
	c.regions[m.Number] = true
	c.mu.Unlock()
	if !had {
		raw, err := m.File.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) {
				b := protocol.EncodeRegion(protocol.Begin(nil, protocol.OpRegion, 0, 0), m.Number)
				protocol.End(b, 0)
				c.send(b, []int{int(fd)}, false)
			})
		}
		if err != nil { // the region was closed meanwhile
			return protocol.Claim{}
		}
	}
	return protocol.Claim{Region: m.Number, Line: m.Line, Sequence: m.Sequence}
}

// offer describes a cached lease whose channels the client receives. If the client can claim the workers, it needs no further step.
func (c *client) offer(k *grant.Cached, d *protocol.Candidate) {
	d.Claim = c.claimOf(k)
	if d.Claim.Region == 0 {
		return
	}
	var workers []grant.Worker
	d.Library, d.Functions, workers = k.Describe()
	start := uint32(api.StartCached)
	if k.Spare() {
		start = api.StartPooled
	}
	for i := range workers {
		w := workerOf(&workers[i])
		w.Start, w.ForkNs, w.SandboxNs, w.ConnectNs, w.CodeNs = start, 0, 0, 0, 0
		d.Workers = append(d.Workers, w)
	}
}

// claimed follows a lease that the client has got by a claim. It returns false if the agent does not know the cached lease any more. The caller
// then adopts the lease like that of an earlier agent.
func (c *client) claimed(r *request) bool {
	l := r.lease
	if r.err != nil {
		return false
	}
	m := &r.adopt
	var k *grant.Cached
	if m.Cached == m.Key {
		k = l.takeTaken()
	} else {
		k = l.session.control.TakeCached(m.Cached)
	}
	if k == nil {
		return false
	}
	held, err := l.claimed(k, m, r)
	if err != nil || held == nil {
		l.session.control.Forget(k)
		return false
	}
	l.keepHanded(k)
	if !l.done(held, nil) {
		return true
	}
	l.growth.present = len(held.Workers)
	c.a.spares.acquired(l.pending, held, false, time.Now())
	l.granted(true)
	return true
}

// claimed returns the lease that a claim has made of k.
func (l *lease) claimed(k *grant.Cached, m *protocol.Adopt, r *request) (*grant.Held, error) {
	if l.pending == nil {
		lib, err := l.session.control.Library(r.file, m.Spec.Library)
		if err != nil {
			return nil, err
		}
		spec := l.c.spec(&m.Spec)
		spec.Tables = l.session.tables.current()
		if l.pending, err = l.session.control.Plan(lib, spec); err != nil {
			return nil, err
		}
	}
	return l.pending.Claimed(k, m.LeaseID, untilOf(m.UntilNs)), nil
}

// loseClaimed reports that a claimed lease cannot be followed, unless it was handed over to this agent meanwhile.
func (c *client) loseClaimed(r *request, err error) {
	if _, unknown := c.lease(opLease, r.adopt.Key); r.lease == nil && unknown == nil {
		return
	}
	c.event(&protocol.Event{Key: r.adopt.Key, Kind: uint32(grant.LeaseEnded), Status: int32(dataplane.StatusLeaseEnded), Text: "lost: " + err.Error()})
}
