package agent

import (
	"errors"
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

// claimsEvery is how often the agent looks for claims in the page of a client that can claim workers. The library sends CLAIMED earlier, unless the
// program does not call it after the claim.
const claimsEvery = 500 * time.Millisecond

// claimsAfter is how long the agent continues to look after a cached lease has expired, because the client may have been slow.
const claimsAfter = 2 * claimsEvery

// expectClaims looks for claims as long as the client can claim k.
func (c *client) expectClaims(k *grant.Cached) {
	until := k.Expires().Add(claimsAfter)
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

// findClaims follows the leases whose claims are in the page.
func (c *client) findClaims() {
	c.claiming.Lock()
	defer c.claiming.Unlock()
	now := c.page.claims()
	if now == c.claimsSeen {
		return
	}
	c.claimsSeen = now
	for i := range uint64(protocol.MaxLeases) {
		line := c.page.line(i)
		if cached := line.claimed.Load(); cached != 0 {
			c.findClaim(line, cached)
		}
	}
}

// findClaim follows the lease of a line, unless the library sends CLAIMED at the same time. The caller holds claiming.
func (c *client) findClaim(line line, cached uint64) {
	m := protocol.Adopt{Key: line.key.Load(), Cached: cached, LeaseID: line.leaseID.Load(), UntilNs: int64(line.until.Load())}
	if !c.claimable(&m) || !line.claimed.CompareAndSwap(cached, 0) {
		return // CLAIMED comes, or has come
	}
	var l *lease
	var err error
	if m.Cached == m.Key {
		l = c.known(m.Key)
	} else {
		l, err = c.newLease(m.Key, m.Session)
	}
	if l == nil && err == nil {
		return // released meanwhile
	}
	if err == nil {
		_, err = l.begin()
	}
	if err == nil && !l.claimed(&m) {
		err = errors.New("its workers were given to another process")
		l.done(nil, err)
	}
	if err != nil {
		c.loseClaimed(m.Key, err)
	}
}

// claimable reports whether a claim is of workers that this client can claim. It sets m.Session.
func (c *client) claimable(m *protocol.Adopt) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.Cached == m.Key {
		l := c.leases[m.Key]
		return l != nil && l.hasTaken()
	}
	for key, s := range c.sessions {
		if s != nil && s.control.HasCached(m.Cached) {
			m.Session = key
			return true
		}
	}
	return false
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
