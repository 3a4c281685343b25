package executor

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/link"
)

// limitCall bounds a call about a tenant's limit, since a lease waits for it.
const limitCall = 500 * time.Millisecond

// flagUnreserved marks a lease that was granted while its tenant's limit could not be read.
const flagUnreserved = "unreserved"

// limiter enforces the limits of tenants. Before a lease's workers start it reserves the cores in the manager's memory,
// where all executors count together, and returns them when the cores are free. If the manager cannot be reached, the
// policy decides. Running leases are counted as soon as the manager is back. It is safe for concurrent use. All methods
// may be called on nil.
type limiter struct {
	client      control.ManagerClient
	incarnation [16]byte
	admit       bool // policy while the manager cannot be reached
	log         *slog.Logger
	begins      func() // called when the first tenant gets a limit; may be nil

	mu      sync.Mutex // also held during remote operations, so leases of one executor take turns
	met     bool       // the manager has been reached at least once
	limited bool       // any tenant has a limit, as last reported by the manager
	away    bool       // the manager cannot be reached
	way     *link.Executor
	tenants map[string]*tenant
	places  []bool // used indexes of link.Executor.Hold
}

// tenant is the use of one tenant on this executor.
type tenant struct {
	cores uint32 // of its leases
	// As counted through the current connection to the manager:
	asked    bool
	limited  bool
	record   uint32
	reserved uint32
	place    int // -1: none
}

func newLimiter(client control.ManagerClient, incarnation [16]byte, admit bool, log *slog.Logger) *limiter {
	return &limiter{client: client, incarnation: incarnation, admit: admit, log: log, tenants: map[string]*tenant{}}
}

// registered records whether any tenant has a limit.
func (l *limiter) registered(limited bool) {
	if l == nil {
		return
	}
	l.mu.Lock()
	begins := limited && !l.limited
	l.met, l.limited = true, limited
	l.mu.Unlock()
	if begins && l.begins != nil {
		l.begins()
	}
}

// mayRefuse reports whether a lease may be refused because of its tenant's limit. That is unknown until the manager has been reached.
func (l *limiter) mayRefuse() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.met || l.limited
}

// join counts all leases again, because the manager has new memory or the connection is new (nil: by messages).
func (l *limiter) join(way *link.Executor) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
	l.way, l.away = way, false
	if way != nil {
		l.places = make([]bool, way.Holds())
	}
	l.countAll()
}

// beat counts leases that could not be counted before. It is called after the manager has answered.
func (l *limiter) beat() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.away {
		l.countAll()
	}
}

// countAll counts uncounted leases, as far as the manager answers.
func (l *limiter) countAll() {
	if !l.limited {
		return
	}
	for name, t := range l.tenants {
		if t.cores == t.reserved || t.asked && !t.limited {
			continue
		}
		err := l.look(name, t)
		if err == nil {
			err = l.count(name, t, true)
		}
		if err != nil {
			l.log.Debug("cores are counted later", "tenant", name, "error", control.Text(err))
			return
		}
	}
}

// detach records that there is no connection for now.
func (l *limiter) detach() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
	l.away = true
}

// forget drops the state of a connection. The caller holds the lock, as for all methods below.
func (l *limiter) forget() {
	l.way, l.places = nil, nil
	for name, t := range l.tenants {
		if t.cores == 0 {
			delete(l.tenants, name)
			continue
		}
		t.asked, t.limited, t.reserved, t.place = false, false, 0, -1
	}
}

// lost records that the connection has failed, which the next write of the line will find too. The last operation may
// have been counted or not, so everything is counted again with the next connection.
func (l *limiter) lost(err error) error {
	if !l.away {
		l.log.Warn("cannot read tenants' limits", "admit", l.admit, "error", control.Text(err))
	}
	l.forget()
	l.away = true
	return err
}

// look asks for a tenant's limit, once for each connection.
func (l *limiter) look(name string, t *tenant) error {
	if t.asked {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), limitCall)
	defer cancel()
	r, err := l.client.Limit(ctx, &control.LimitRequest{Tenant: name})
	if err != nil {
		return err // the manager's memory may still be reachable
	}
	t.asked, t.limited, t.record, t.place = true, r.GetLimited(), r.GetRecord(), -1
	return nil
}

// errOver means that a limit is reached.
type errOver struct{ error }

// knownTenants is how many tenants without leases are remembered, with the manager's answers.
const knownTenants = 1024

// count makes a tenant's reservation equal to the cores of its leases. With force the leases have the cores already, so
// the limit does not apply.
func (l *limiter) count(name string, t *tenant, force bool) error {
	switch {
	case !t.limited || t.reserved == t.cores:
		return nil
	case l.way == nil:
		return l.countByMessage(name, t, force)
	}
	if t.place < 0 {
		for i, taken := range l.places {
			if !taken {
				t.place, l.places[i] = i, true
				break
			}
		}
		if t.place < 0 {
			return fmt.Errorf("cannot report the cores of tenant %q: all %d entries for tenants are in use", name, len(l.places))
		}
	}
	// A return is reported first, a reservation last: in between the count is too high, never too low.
	delta := int64(t.cores) - int64(t.reserved)
	if delta < 0 {
		if err := l.way.Hold(t.place, t.record, t.cores); err != nil {
			return l.lost(err)
		}
	}
	lim, err := l.way.Reserve(t.record, delta)
	if err != nil {
		return l.lost(err)
	}
	if delta > 0 && !force && lim.Reserved() > lim.Cores {
		if _, err := l.way.Reserve(t.record, -delta); err != nil {
			return l.lost(err)
		}
		l.vacate(t) // otherwise tenants without cores would use up all indexes
		return over(name, delta, lim.Reserved()-uint64(delta), lim.Cores)
	}
	if delta > 0 {
		if err := l.way.Hold(t.place, t.record, t.cores); err != nil {
			return l.lost(err)
		}
	}
	t.reserved = t.cores
	l.vacate(t)
	return nil
}

// vacate frees the index of a tenant without reservations.
func (l *limiter) vacate(t *tenant) {
	if t.reserved == 0 {
		l.places[t.place], t.place = false, -1
	}
}

func (l *limiter) countByMessage(name string, t *tenant, force bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), limitCall)
	defer cancel()
	r, err := l.client.Reserve(ctx, &control.ReserveRequest{Incarnation: l.incarnation[:], Tenant: name, Cores: t.cores, Force: force || t.cores < t.reserved})
	if err != nil {
		return err
	}
	if !r.GetGranted() {
		return over(name, int64(t.cores)-int64(t.reserved), r.GetReserved(), r.GetCores())
	}
	t.reserved = t.cores
	return nil
}

func over(name string, more int64, has, limit uint64) error {
	return errOver{control.Errorf(control.ClassBusy, "tenant %q has %d of %d cores, %d more were asked for", name, has, limit, more)}
}

// reserve takes cores for a lease. The caller calls release when they are free. flag is "" or flagUnreserved.
func (l *limiter) reserve(name string, cores int) (release func(), flag string, err error) {
	if l == nil {
		return nil, "", nil
	}
	name = tenantOf(name)
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.tenants[name]
	if t == nil {
		if len(l.tenants) >= knownTenants {
			maps.DeleteFunc(l.tenants, func(_ string, t *tenant) bool { return t.cores == 0 && t.reserved == 0 })
		}
		t = &tenant{place: -1}
		l.tenants[name] = t
	}
	t.cores += uint32(cores)
	release = func() { l.release(name, cores) }
	if l.met && !l.limited {
		return release, "", nil // no tenant had a limit when the manager was last reached
	}
	if l.met && !l.away {
		if err = l.look(name, t); err == nil {
			err = l.count(name, t, false)
		}
		if err == nil {
			return release, "", nil
		}
		if reached, ok := err.(errOver); ok {
			t.cores -= uint32(cores)
			return nil, "", reached.error
		}
	} else {
		err = fmt.Errorf("the resource manager cannot be reached")
	}
	if !l.admit {
		t.cores -= uint32(cores)
		return nil, "", control.Errorf(control.ClassBusy, "tenant %q: its limit of cores cannot be read: %s (limit-unknown)", name, control.Text(err))
	}
	return release, flagUnreserved, nil
}

func (l *limiter) release(name string, cores int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.tenants[name]
	t.cores -= uint32(cores)
	if l.away || !l.limited {
		return
	}
	if err := l.count(name, t, true); err != nil {
		l.log.Debug("cores are given back later", "tenant", name, "error", err)
	}
}

// reserve reserves a lease's cores within its tenant's limit.
func (e *Executor) reserve(h *holding) (flag string, err error) {
	if e.limits == nil {
		return "", nil
	}
	l, err := e.table.Get(h.id)
	if err != nil {
		return "", err
	}
	release, flag, err := e.limits.reserve(l.Terms.Tenant, l.Present()*l.Terms.CoresPerWorker)
	if flag != "" {
		e.tell(h, slog.LevelWarn, "lease granted without checking its tenant's limit", "lease", uint64(h.id), "tenant", l.Terms.Tenant, "flag", flag)
	}
	h.mu.Lock()
	h.reserved = release
	h.mu.Unlock()
	return flag, err
}
