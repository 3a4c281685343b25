package manager

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

const (
	// attachWithin bounds one attempt to connect. On shm the peer's process must answer in this time.
	attachWithin = 2 * time.Second
	// attachWait is how long an attempt waits for its turn.
	attachWait = 3 * time.Second
	// maxWaiting is how many attempts of one party may wait for a turn.
	maxWaiting = 256
	// attachDescriptors is the number of file descriptors of a connection on shm: socket, receive ring, completion
	// queue and scratch memory.
	attachDescriptors = 4
	// DefaultAttempts and DefaultTenantAttached replace zeros in a Config.
	DefaultAttempts, DefaultTenantAttached = 8, 4096
)

// attaching bounds the connections to the manager's memory: their number, and how many are being made at a time, since
// each attempt occupies a thread until the peer answers. It is safe for concurrent use.
type attaching struct {
	clients, executors turns
	refused            atomic.Uint64 // attempts that were refused as busy

	tenantMost int // most connections of one tenant
	most       int // most connections of all clients

	mu       sync.Mutex
	attached map[string]int // by tenant: connections, and attempts to make one
	total    int
}

func newAttaching(attempts, tenantMost int) *attaching {
	if attempts == 0 {
		attempts = DefaultAttempts
	}
	if tenantMost == 0 {
		tenantMost = DefaultTenantAttached
	}
	a := &attaching{clients: turns{most: attempts}, executors: turns{most: attempts}, attached: map[string]int{}}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		limit.Cur = 1024
	}
	// All clients together may use half of the descriptors, and one tenant a quarter of that half.
	a.most = int(min(max(limit.Cur/2/attachDescriptors, 16), 1<<30))
	a.tenantMost = min(tenantMost, max(a.most/4, 4))
	return a
}

// client waits until the caller may connect. The caller must call connected after the attempt, and gone when the
// connection is closed or was not made. ctx bounds the attempt. It blocks for at most attachWait.
func (a *attaching) client(caller context.Context) (ctx context.Context, connected, gone func(), err error) {
	who := control.Caller(caller)
	if gone, err = a.reserve(who); err != nil {
		return nil, nil, nil, err
	}
	if ctx, connected, err = a.turn(caller, &a.clients, who.Tenant); err != nil {
		gone()
		return nil, nil, nil, err
	}
	return ctx, connected, gone, nil
}

// executor is client for executors. Their number of connections is bounded by that of registrations.
func (a *attaching) executor(caller context.Context) (ctx context.Context, connected func(), err error) {
	return a.turn(caller, &a.executors, control.Caller(caller).Name)
}

// turn waits for a turn of a party.
func (a *attaching) turn(caller context.Context, t *turns, party string) (context.Context, func(), error) {
	wait, cancel := context.WithTimeout(caller, attachWait)
	defer cancel()
	done := t.take(wait, party)
	switch {
	case done != nil:
	case caller.Err() != nil:
		return nil, nil, control.Errorf(control.ClassConnection, "waiting for a turn to connect: %v", context.Cause(caller))
	default:
		a.refused.Add(1)
		return nil, nil, control.Errorf(control.ClassBusy, "too many connections are being made: try again (attach-attempts is %d, of which a tenant may use %d)",
			t.most, t.share())
	}
	ctx, end := context.WithTimeout(caller, attachWithin)
	return ctx, func() { end(); done() }, nil
}

// reserve counts a connection of a caller until gone is called. Operators are bounded only by the process's limit.
func (a *attaching) reserve(who *identity.Identity) (gone func(), err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.attached[who.Tenant]
	switch {
	case who.Role == identity.RoleTenant && n >= a.tenantMost:
		a.refused.Add(1)
		return nil, control.Errorf(control.ClassBusy, "tenant %q has %d connections to the board, at most %d: close some (tenant-attached)",
			who.Tenant, n, a.tenantMost)
	case a.total >= a.most:
		a.refused.Add(1)
		return nil, control.Errorf(control.ClassBusy, "clients have %d connections to the board, at most %d: try again (the limit is half of the resource manager's descriptors)",
			a.total, a.most)
	}
	a.attached[who.Tenant]++
	a.total++
	return sync.OnceFunc(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.total--
		if a.attached[who.Tenant]--; a.attached[who.Tenant] == 0 {
			delete(a.attached, who.Tenant)
		}
	}), nil
}

// turns is a semaphore that parties share. Each party may use a quarter of it, and waiting parties take turns. So a
// party whose attempts all block delays another party by one attempt at most.
type turns struct {
	most int

	mu      sync.Mutex
	running int
	parties map[string]*waiters // parties that run or wait
	order   []string            // waiting parties, the next one first
}

// waiters are the attempts of one party.
type waiters struct {
	running int
	queue   []chan struct{} // closed when it is their turn
}

// share returns how many turns one party may have at a time.
func (t *turns) share() int { return max(t.most/4, 1) }

// take waits for a turn and returns the function that ends it. It returns nil if ctx ended first, or if too many
// attempts wait.
func (t *turns) take(ctx context.Context, party string) (done func()) {
	t.mu.Lock()
	p := t.parties[party]
	if p == nil {
		if t.parties == nil {
			t.parties = map[string]*waiters{}
		}
		p = &waiters{}
		t.parties[party] = p
	}
	if len(p.queue) >= maxWaiting {
		t.mu.Unlock()
		return nil
	}
	mine := make(chan struct{})
	if len(p.queue) == 0 {
		t.order = append(t.order, party)
	}
	p.queue = append(p.queue, mine)
	t.next()
	t.mu.Unlock()
	done = sync.OnceFunc(func() { t.end(party) })
	select {
	case <-mine:
		return done
	case <-ctx.Done():
	}
	t.mu.Lock()
	i := slices.Index(p.queue, mine)
	if i >= 0 {
		p.queue = slices.Delete(p.queue, i, i+1)
		t.tidy(party, p)
	}
	t.mu.Unlock()
	if i < 0 { // the turn was assigned at the same moment
		done()
	}
	return nil
}

// next assigns the free turns. The caller holds the lock.
func (t *turns) next() {
	for t.running < t.most {
		i := slices.IndexFunc(t.order, func(party string) bool { return t.parties[party].running < t.share() })
		if i < 0 {
			return
		}
		party := t.order[i]
		p := t.parties[party]
		close(p.queue[0])
		p.queue = p.queue[1:]
		p.running++
		t.running++
		t.order = slices.Delete(t.order, i, i+1)
		if len(p.queue) > 0 {
			t.order = append(t.order, party)
		}
	}
}

func (t *turns) end(party string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.parties[party]
	p.running--
	t.running--
	t.tidy(party, p)
	t.next()
}

// tidy forgets a party without waiting attempts. The caller holds the lock.
func (t *turns) tidy(party string, p *waiters) {
	if len(p.queue) > 0 {
		return
	}
	t.order = slices.DeleteFunc(t.order, func(x string) bool { return x == party })
	if p.running == 0 {
		delete(t.parties, party)
	}
}

// attempts returns how many attempts run or wait.
func (t *turns) attempts() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.parties {
		n += p.running + len(p.queue)
	}
	return n
}
