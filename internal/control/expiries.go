package control

import (
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// expiries keeps the earliest expiry of the tokens that were used lately.
type expiries struct {
	mu    sync.Mutex
	since time.Time    // beginning of the current half hour
	first [2]time.Time // of the current half hour and of the one before; zero: no token was used
}

const halfHour = 30 * time.Minute

// turn begins a new half hour if the current one is over. The caller holds the lock.
func (e *expiries) turn(now time.Time) {
	switch age := now.Sub(e.since); {
	case age >= 2*halfHour || age < 0:
		e.first = [2]time.Time{}
	case age >= halfHour:
		e.first = [2]time.Time{{}, e.first[0]}
	default:
		return
	}
	e.since = now
}

// used notes a token that was used.
func (e *expiries) used(expires, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.turn(now)
	if e.first[0].IsZero() || expires.Before(e.first[0]) {
		e.first[0] = expires
	}
}

// soonest returns the first expiry; zero: no token was used lately.
func (e *expiries) soonest(now time.Time) time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.turn(now)
	a, b := e.first[0], e.first[1]
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// TokenExpiry returns the earliest expiry of the tokens of a role that were used in the last half hour. Some that were used up to an hour ago
// count too. Zero: no token was used.
func (g *Gate) TokenExpiry(role identity.Role) time.Time {
	if e := g.expiries[role]; e != nil {
		return e.soonest(g.now())
	}
	return time.Time{}
}
