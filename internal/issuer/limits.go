package issuer

import (
	"hash/maphash"
	"maps"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	maxParties    = 1 << 16 // parties of one kind that have a limiter of their own
	sharedRates   = 1 << 12 // limiters of all others
	sweepEvery    = time.Minute
	sweepWhenFull = time.Second
)

// limits limits the request rates of many parties of one kind. Its memory is bounded: maxParties parties that have used up a part of their rate have a limiter
// of their own, and all further parties share sharedRates limiters. A hash with a secret seed assigns a party to a shared limiter, so no party can choose with whom it
// shares. limits is safe for concurrent use. The zero value is empty.
type limits struct {
	mu     sync.Mutex
	of     map[string]*rate.Limiter
	shared map[uint64]*rate.Limiter // by hash
	seed   maphash.Seed
	swept  time.Time
}

// spent reports whether a party has used up its rate.
func (l *limits) spent(party string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.of[party]
	if h == nil && len(l.of) >= maxParties {
		h = l.shared[l.hash(party)]
	}
	return h != nil && h.TokensAt(now) < 1
}

// take uses one unit of a party's rate, and returns false if there is none. If every differs from the
// rate of the party's last call, it is the party's rate from now on.
func (l *limits) take(party string, every rate.Limit, burst int, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of, l.shared, l.seed = map[string]*rate.Limiter{}, map[uint64]*rate.Limiter{}, maphash.MakeSeed()
	}
	h := l.of[party]
	if since := now.Sub(l.swept).Abs(); since > sweepEvery || h == nil && len(l.of) >= maxParties && since > sweepWhenFull {
		idle := func(h *rate.Limiter) bool { return h.TokensAt(now) >= float64(h.Burst()) }
		maps.DeleteFunc(l.of, func(_ string, h *rate.Limiter) bool { return idle(h) })
		maps.DeleteFunc(l.shared, func(_ uint64, h *rate.Limiter) bool { return idle(h) })
		l.swept, h = now, l.of[party]
	}
	if h == nil && len(l.of) >= maxParties {
		at := l.hash(party)
		if h = l.shared[at]; h == nil {
			h = rate.NewLimiter(every, burst)
			l.shared[at] = h
		}
	} else if h == nil {
		h = rate.NewLimiter(every, burst)
		l.of[party] = h
	}
	if h.Limit() != every {
		h.SetLimitAt(now, every)
	}
	return h.AllowN(now, 1)
}

func (l *limits) hash(party string) uint64 { return maphash.String(l.seed, party) % sharedRates }
