package agent

import (
	"context"
	"io"
	"maps"
	"slices"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// giveUp records that the client does not have the lease any more, and ends its acquisition. It returns the grant, or that the lease was
// being acquired.
func (l *lease) giveUp() (held *grant.Held, acquiring bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given = true
	l.growth.end()
	if l.acquiring {
		l.cancel()
	}
	return l.held, l.acquiring
}

// abandon releases a lease whose key the client has released, or whose client has ended. stopping: the client may hand the lease over to another agent, or by
// another connection, so only its watch ends.
func (l *lease) abandon(stopping bool) {
	held, acquiring := l.giveUp()
	if !acquiring {
		l.clear(stopping) // before the release, so that the end of the connection also ends the worker
	}
	switch {
	case acquiring: // done, which ends the acquisition, calls abandon again
	case held == nil:
	case stopping:
		held.StopWatch()
	default:
		if err := held.Release(context.Background()); err != nil {
			l.c.log.Debug("lease not released: its executor ends it", "lease", held.ID, "executor", held.Address, "error", err)
		}
		if p := l.plan(); p != nil {
			l.c.a.spares.released(p, held)
		}
	}
}

// release releases a lease, or caches its workers.
func (c *client) release(r *request) (body, error) {
	m, err := protocol.DecodeRelease(r.body)
	if err != nil {
		return nil, err
	}
	var answer protocol.Released
	l, err := c.lease("release", m.Key)
	if err != nil || !c.forget(l) {
		c.forgetCached(m.Key) // if nothing is cached either, the acquisition failed or never began
		return answer.Encode, nil
	}
	held, acquiring := l.giveUp()
	if acquiring { // done abandons it
		return answer.Encode, nil
	}
	var channels io.Closer
	if m.Keep {
		channels = l.takeHanded()
	}
	l.clear(false)
	if held == nil {
		return answer.Encode, nil
	}
	p := l.plan()
	if p != nil { // nil: it was claimed, and the agent does not know it
		defer c.a.spares.released(p, held)
	}
	var k *grant.Cached
	if m.Keep {
		k, err = held.ReleaseCached(context.WithoutCancel(c.ctx), m.Key, channels, m.Own)
	} else {
		err = held.Release(context.WithoutCancel(c.ctx))
	}
	switch {
	case k != nil:
		answer = protocol.Released{Cached: true, Handed: channels != nil, Claim: c.claimOf(k), May: k.MayAttach()}
		c.offerOwn(k, &answer)
	case m.Ahead && err == nil && p != nil:
		c.giveAhead(r, m.Key, p, held, &answer)
	}
	return answer.Encode, err
}

// giveAhead sends the client a spare lease with the terms of the lease that it releases, if there is one that it can claim. Its next lease with these terms
// then needs no message. Any other process can still take the spare lease, and the client learns that by an event.
func (c *client) giveAhead(r *request, key uint64, p *grant.Pending, held *grant.Held, answer *protocol.Released) {
	k := p.TakeSpare(held)
	if k == nil {
		return
	}
	defer p.PutAhead(k, key) // nobody else takes it and closes its channels before they are sent
	h, ok := k.Handed().(*handed)
	if !ok {
		return
	}
	claim := c.claimOf(k)
	if claim.Region == 0 {
		return
	}
	c.giveChannels(r, key, h)
	_, _, workers := k.Describe()
	for i := range workers {
		answer.Spare = append(answer.Spare, uint64(workers[i].PID))
	}
	answer.Claim = claim
}

// forgetCached ends the workers that are cached under a key, if there are any. No event follows.
func (c *client) forgetCached(key uint64) {
	c.mu.Lock()
	sessions := slices.Collect(maps.Values(c.sessions))
	c.mu.Unlock()
	for _, s := range sessions {
		if s == nil {
			continue
		}
		if k := s.control.TakeCached(key); k != nil {
			s.control.Forget(k)
			return
		}
	}
}

// held returns a granted lease.
func (c *client) held(op string, key uint64) (*lease, *grant.Held, error) {
	l, err := c.lease(op, key)
	if err != nil {
		return nil, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil {
		return nil, nil, failed(op, dataplane.StatusInvalid, "lease %#x is not granted yet", key)
	}
	return l, l.held, nil
}
