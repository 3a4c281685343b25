package agent

import (
	"io"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// handed holds the channels of a lease at rest, which a client has handed over. The agent keeps their descriptors open. So a worker's
// connection does not end with that client, and the agent can give copies to the client that takes the lease next.
type handed struct {
	a       *Agent
	workers int
	parts   []part
}

// part is one HAND message of a client, with its descriptors.
type part struct {
	protocol.Hand
	files []int
}

// Close closes the descriptors.
func (h *handed) Close() error {
	for _, p := range h.parts {
		closeAll(p.files)
		h.a.held.Add(-int64(len(p.files)))
	}
	h.parts = nil
	return nil
}

func closeAll(files []int) {
	for _, fd := range files {
		unix.Close(fd)
	}
}

// copies duplicates descriptors. It returns nil if this process has too few free descriptors.
func copies(files []int) []int {
	var all []int
	for _, fd := range files {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			closeAll(all)
			return nil
		}
		all = append(all, dup)
	}
	return all
}

// hold counts n more descriptors of handed-over channels. It returns false if the total would exceed a quarter of this process's limit.
func (a *Agent) hold(n int) bool {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil || a.held.Add(int64(n)) > int64(l.Cur/4) {
		a.held.Add(-int64(n))
		return false
	}
	return true
}

// hand receives some channels of a lease that the client is about to release. After an error, the lease is cached without its channels.
func (c *client) hand(r *request) {
	if r.over || r.lost {
		return
	}
	m, err := protocol.DecodeHand(r.body)
	if err != nil {
		c.end(err)
		return
	}
	l, err := c.lease("hand over", m.Key)
	if err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if m.First == 0 {
		l.discard()
		l.coming = &handed{a: c.a}
	}
	switch {
	case l.given || l.coming == nil || m.First != l.coming.workers:
	case m.Held:
		if p := l.handed.part(len(l.coming.parts)); p != nil && p.First == m.First && p.Count == m.Count && p.Files == m.Files {
			l.coming.add(part{m, p.files})
			p.files = nil
			return
		}
	case len(r.files) == m.Files && c.a.hold(m.Files):
		l.coming.add(part{m, r.files})
		r.files = nil
		return
	}
	l.discard()
}

func (h *handed) add(p part) {
	h.parts = append(h.parts, p)
	h.workers += p.Count
}

// part returns part i, or nil if it does not exist. h may be nil.
func (h *handed) part(i int) *part {
	if h == nil || i >= len(h.parts) {
		return nil
	}
	return &h.parts[i]
}

// discard closes an incomplete set of channels. The caller holds mu.
func (l *lease) discard() {
	if l.coming != nil {
		l.coming.Close()
		l.coming = nil
	}
}

// takeHanded returns the channels that the client has handed over before the release, and closes all others. nil: the set is incomplete.
func (l *lease) takeHanded() io.Closer {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.coming
	l.coming = nil
	l.close()
	if h == nil || l.held == nil || h.workers != len(l.held.Workers) {
		if h != nil {
			h.Close()
		}
		return nil
	}
	return h
}

// close closes all channels of the lease that the agent holds. The caller holds mu.
func (l *lease) close() {
	l.discard()
	if l.handed != nil {
		l.handed.Close()
		l.handed = nil
	}
}

// keepHanded makes the lease the owner of the channels of the cached lease k, if they were handed over.
func (l *lease) keepHanded(k *grant.Cached) {
	h, _ := k.Unhand().(*handed)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
	if l.handed = h; l.given {
		l.close()
	}
}

// giveChannels sends the channels of a cached lease to the client, before the reply to its request. key: of the request's lease.
func (c *client) giveChannels(r *request, key uint64, h *handed) {
	for _, p := range h.parts {
		m := p.Hand
		m.Key, m.Held = key, false
		b := m.Encode(protocol.Begin(nil, protocol.OpHand, r.ID, 0))
		protocol.End(b, 0)
		c.send(b, p.files, false)
	}
}

// giveTaken sends the client the channels of the cached lease that was taken for it, if there is one, and describes the lease in the reply d.
func (l *lease) giveTaken(r *request, d *protocol.Candidate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken == nil || l.taken.Late() {
		return
	}
	d.Handed = true
	if h, ok := l.taken.Handed().(*handed); ok {
		if l.pending.Lasts(l.taken) { // otherwise the client asks the executor for the workers
			l.c.offer(l.taken, d)
		}
		l.c.giveChannels(r, l.key, h)
	}
}

// takeTaken removes and returns the cached lease whose channels the client has received, or nil.
func (l *lease) takeTaken() *grant.Cached {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.taken
	l.taken = nil
	return k
}

// isHeld reports whether the lease is granted.
func (l *lease) isHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held != nil
}

// takenClaimed reports whether takeTaken would return a cached lease whose workers the client has claimed.
func (l *lease) takenClaimed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken != nil && l.taken.Claimed()
}

// holds reports whether the agent holds the channels of the lease.
func (l *lease) holds() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.handed != nil
}

// clear closes the channels that the agent holds, and gives up a cached lease that the client has not resumed.
func (l *lease) clear(stopping bool) {
	l.mu.Lock()
	l.close()
	l.mu.Unlock()
	switch k := l.takeTaken(); {
	case k == nil:
	case stopping:
		k.Close()
	default:
		l.session.control.Forget(k)
	}
}
