package agent

import (
	"context"
	"errors"
	"maps"
	"slices"
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
	c.expectClaims(k)
	return protocol.Claim{Region: m.Number, Line: m.Line, Sequence: m.Sequence}
}

// offerOwn tells a client that is a claimant how it claims cached workers over its own queue pair.
func (c *client) offerOwn(k *grant.Cached, answer *protocol.Released) {
	own := k.OwnClaim()
	if own == nil {
		return
	}
	c.expectClaims(k)
	answer.Claim = protocol.Claim{Line: own.Line, Sequence: own.Sequence}
	answer.Own = &protocol.OwnClaim{LeaseID: own.LeaseID, ClientNs: own.Lasts.Nanoseconds()}
}

// attach makes a session a claimant of a lease's executor.
func (c *client) attach(r *request) (body, error) {
	const op = "attach a claimant"
	m, err := protocol.DecodeAttach(r.body)
	if err != nil {
		return nil, err
	}
	_, held, err := c.held(op, m.Key)
	if err != nil {
		return nil, err
	}
	theirs, cell, err := held.AttachClaimant(context.WithoutCancel(c.ctx), m.Blob) // if the client ends meanwhile, the session's end detaches it
	if err == nil && len(theirs) > protocol.MaxBlob {
		err = failed(op, dataplane.StatusProtocol, "the executor's blob has %d bytes, want at most %d", len(theirs), protocol.MaxBlob)
	}
	if err != nil {
		return nil, err
	}
	answer := protocol.Attached{Addr: cell.GetAddr(), Key: cell.GetKey(), Blob: theirs}
	return answer.Encode, nil
}

// claimsEvery is how often the agent looks for claims in the page of a client that can claim workers. Usually the library has sent CLAIMED before.
const claimsEvery = 500 * time.Millisecond

// expectClaims starts a goroutine, if none runs, that looks for claims until k is given up.
func (c *client) expectClaims(k *grant.Cached) {
	until := k.Expires().Add(grant.ClaimGrace)
	c.mu.Lock()
	defer c.mu.Unlock()
	if until.Before(c.claimsUntil) {
		return
	}
	looking := !c.claimsUntil.IsZero()
	c.claimsUntil = until
	if looking || c.closed {
		return
	}
	c.work.Go(func() {
		tick := time.NewTicker(claimsEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				c.findClaims()
			case <-c.ctx.Done():
				return
			}
			c.mu.Lock()
			over := time.Now().After(c.claimsUntil)
			if over {
				c.claimsUntil = time.Time{}
			}
			c.mu.Unlock()
			if over {
				return
			}
		}
	})
}

// findClaims follows the leases that the client has claimed, and whose claims are in the page.
func (c *client) findClaims() {
	c.claiming.Lock()
	defer c.claiming.Unlock()
	claimed := c.claimedCached()
	if len(claimed) == 0 {
		return
	}
	for i := range uint64(protocol.MaxLeases) {
		line := c.page.line(i)
		cached := line.claimed.Load()
		if session, is := claimed[cached]; is {
			delete(claimed, cached)
			m := protocol.Adopt{Key: line.key.Load(), Session: session, Cached: cached, LeaseID: line.leaseID.Load(), UntilNs: int64(line.until.Load())}
			c.followFound(&m)
			line.claimed.CompareAndSwap(cached, 0)
		}
	}
}

// claimedCached returns the keys of the cached leases whose workers the client may have claimed, with their sessions. If the client got the channels from the
// agent, the key is that of the lease that the client opens.
func (c *client) claimedCached() map[uint64]uint64 {
	c.mu.Lock()
	sessions, leases := maps.Clone(c.sessions), slices.Collect(maps.Values(c.leases))
	c.mu.Unlock()
	claimed := make(map[uint64]uint64)
	for session, s := range sessions {
		if s != nil {
			for _, cached := range s.control.ClaimedCached() {
				claimed[cached] = session
			}
		}
	}
	for _, l := range leases {
		if l.takenClaimed() {
			claimed[l.key] = 0
		}
	}
	return claimed
}

// followFound follows a lease whose claim was found in the page. The caller holds claiming.
func (c *client) followFound(m *protocol.Adopt) {
	var l *lease
	var err error
	if m.Cached == m.Key {
		if l = c.known(m.Key); l == nil {
			return // released meanwhile
		}
	} else {
		l, err = c.newLease(m.Key, m.Session)
	}
	if err == nil {
		_, err = l.begin()
	}
	if err == nil && !l.claimed(m) {
		err = errors.New("the agent does not have the claimed workers any more")
		l.done(nil, err)
	}
	if err != nil {
		c.loseClaimed(m.Key, err)
	}
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

// followClaimed follows the lease of a message CLAIMED. It returns false if the agent does not know the cached lease any more. The caller then adopts the
// lease like that of an earlier agent.
func (c *client) followClaimed(r *request) bool {
	c.claiming.Lock()
	defer c.claiming.Unlock()
	if r.adopt, r.err = protocol.DecodeAdopt(r.body); r.err != nil {
		return false
	}
	m := &r.adopt
	r.lease = c.known(m.Key)
	if r.lease != nil && (m.Cached != m.Key || r.lease.isHeld()) {
		return true // the claim was found in the page, or the lease was handed over to this agent
	}
	if r.lease == nil {
		r.lease, r.err = c.newLease(m.Key, m.Session)
	}
	if r.err == nil {
		r.ctx, r.err = r.lease.begin()
	}
	defer c.page.line(m.Key).claimed.CompareAndSwap(m.Cached, 0)
	return r.err == nil && r.lease.claimed(m)
}

// claimed follows a lease that the client has got by a claim. It returns false if the agent does not know the cached lease any more.
func (l *lease) claimed(m *protocol.Adopt) bool {
	var k *grant.Cached
	if m.Cached == m.Key {
		k = l.takeTaken()
	} else {
		k = l.session.control.TakeCached(m.Cached)
	}
	if k == nil {
		return false
	}
	if l.pending == nil {
		l.pending = l.session.control.Like(k)
	}
	held := l.pending.Claimed(k, m.LeaseID, untilOf(m.UntilNs))
	l.keepHanded(k)
	if l.done(held, nil) {
		l.growth.present = len(held.Workers)
		l.c.a.spares.acquired(l.pending, held, false, time.Now())
		l.granted(true)
	}
	return true
}

// loseClaimed reports that a claimed lease cannot be followed.
func (c *client) loseClaimed(key uint64, err error) {
	c.event(&protocol.Event{Key: key, Kind: uint32(grant.LeaseEnded), Status: int32(dataplane.StatusLeaseEnded), Text: "lost: " + err.Error()})
}
