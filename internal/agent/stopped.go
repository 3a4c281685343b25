package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// A process that is stopped (SIGSTOP, a debugger) does not use the cores that it has leased. After stoppedBound its leases are
// released.
const (
	stoppedBound = 10 * time.Second
	stoppedEvery = time.Second // between two looks
)

// isStopped reports whether a process is stopped. It returns false after an error, for example if there is no such process.
func isStopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// "PID (NAME) STATE ...", and a name may hold parentheses.
	_, rest, ok := bytes.Cut(b[bytes.LastIndexByte(b, ')')+1:], []byte(" "))
	return ok && len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
}

// watchStopped releases the leases of processes that stay stopped, until ctx ends.
func (a *Agent) watchStopped(ctx context.Context) {
	since := map[*client]time.Time{}
	tick := time.NewTicker(stoppedEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			since = a.lookForStopped(since, now)
		}
	}
}

// lookForStopped checks all clients that hold leases. It returns the stopped ones, with the time since when they are stopped.
func (a *Agent) lookForStopped(before map[*client]time.Time, now time.Time) map[*client]time.Time {
	a.mu.Lock()
	clients := make([]*client, 0, len(a.clients))
	for c := range a.clients {
		clients = append(clients, c)
	}
	a.mu.Unlock()
	since := map[*client]time.Time{}
	for _, c := range clients {
		if c.pid <= 0 || !c.holds() || !isStopped(c.pid) {
			continue
		}
		start, known := before[c]
		if !known {
			start = now
		}
		since[c] = start
		if now.Sub(start) >= stoppedBound {
			c.log.Warn("the process is stopped: its leases are released", "for", now.Sub(start))
			c.releaseAll(fmt.Sprintf("released: its process was stopped for %v", stoppedBound))
		}
	}
	return since
}

// holds reports whether the client holds a lease.
func (c *client) holds() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.leases) > 0
}

// releaseAll ends all granted leases of a client and tells it why.
func (c *client) releaseAll(why string) {
	c.mu.Lock()
	var all []*lease
	for _, l := range c.leases {
		all = append(all, l)
	}
	c.mu.Unlock()
	for _, l := range all {
		l.mu.Lock()
		granted := l.held != nil && !l.given
		l.mu.Unlock()
		if !granted || !c.forget(l) {
			continue
		}
		c.background(func() {
			l.abandon(false)
			l.tell(grant.Event{Kind: grant.LeaseEnded, Status: dataplane.StatusLeaseEnded, Reason: why})
		})
	}
}
