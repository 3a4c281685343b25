// Package quota limits what each tenant uses of a daemon: simultaneous connections and streams, and rates per second.
package quota

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Kind is what a quota limits. Its text is the label of the metric.
type Kind string

// The kinds. Connections, Streams and Replies are limits on simultaneous use (Hold, HoldSome). The others are rates
// (Take).
const (
	Connections Kind = "connections"
	Streams     Kind = "streams"
	Replies     Kind = "reply_bytes"
	Leases      Kind = "leases"
	Replaces    Kind = "replaces"
	UploadBytes Kind = "upload_bytes"
	Attaches    Kind = "attaches"
	LogLines    Kind = "log_lines"
)

// kinds lists for each kind its setting and the unit of its limit, for error messages.
var kinds = []struct {
	kind    Kind
	setting string
	what    string
}{
	{Connections, "tenant-connections", "connections at a time"},
	{Streams, "tenant-streams", "calls and streams at a time"},
	{Replies, "tenant-replies", "bytes of replies that it has not read"},
	{Leases, "tenant-leases", "lease requests a second"},
	{Replaces, "tenant-replaces", "replacements of workers a second"},
	{UploadBytes, "tenant-upload", "uploaded bytes a second"},
	{Attaches, "tenant-attaches", "attachments to the board a second"},
	{LogLines, "tenant-log-lines", "log lines a second"},
}

// Kinds returns all kinds.
func Kinds() (all []Kind) {
	for _, k := range kinds {
		all = append(all, k.kind)
	}
	return all
}

// Limits are the limits of one tenant: a number for simultaneous use, or per second. A kind that is 0 or missing has no
// limit.
type Limits map[Kind]int

// burst is how many seconds' worth of a rate a tenant may use at once after a pause.
const burst = 10

// Error says that a tenant has reached a limit.
type Error struct {
	Tenant  string
	Kind    Kind
	Limit   int
	Setting string
	What    string
}

// nodePrefix begins the names of nodes. No tenant's name can begin with it.
const nodePrefix = "\x00"

// Node returns the name under which a node's use is counted beside that of tenants.
func Node(name string) string { return nodePrefix + name }

func (e *Error) Error() string {
	if node, ok := strings.CutPrefix(e.Tenant, nodePrefix); ok {
		return fmt.Sprintf("%s has reached its limit of %d %s, which is that of a tenant: try again later, or ask the operator of this daemon for a higher %s",
			node, e.Limit, e.What, e.Setting)
	}
	return fmt.Sprintf("tenant %q has reached its limit of %d %s: try again later, or ask the operator of this daemon for a higher %s",
		e.Tenant, e.Limit, e.What, e.Setting)
}

// Tenants counts what tenants use. It is safe for concurrent use and never blocks.
type Tenants struct {
	limits  Limits
	now     func() time.Time
	refused map[Kind]*atomic.Uint64

	mu      sync.Mutex
	tenants map[string]*tenant
	sweep   int // number of tenants at which idle ones are removed
}

type tenant struct {
	held  map[Kind]int
	rates map[Kind]*rate.Limiter
}

// minSweep is the number of tenants below which idle ones are not removed.
const minSweep = 256

// New returns counters for limits. now is the clock for rates.
func New(limits Limits, now func() time.Time) *Tenants {
	t := &Tenants{limits: limits, now: now, refused: map[Kind]*atomic.Uint64{}, tenants: map[string]*tenant{}, sweep: minSweep}
	for _, k := range kinds {
		t.refused[k.kind] = new(atomic.Uint64)
	}
	return t
}

// Refused returns how often a limit of a kind was reached.
func (t *Tenants) Refused(k Kind) uint64 { return t.refused[k].Load() }

// Take uses n units of a rate. If the rate is exceeded it returns an *Error and uses nothing.
func (t *Tenants) Take(name string, k Kind, n int) error {
	limit := t.limits[k]
	if limit == 0 {
		return nil
	}
	now := t.now()
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.tenant(name, now)
	r := of.rates[k]
	if r == nil {
		r = rate.NewLimiter(rate.Limit(limit), burst*limit)
		of.rates[k] = r
	}
	// A request larger than a burst, such as one large library, uses a whole burst: otherwise it could never succeed.
	if !r.AllowN(now, min(n, burst*limit)) {
		return t.refuse(name, k, limit)
	}
	return nil
}

// Hold counts one simultaneous use until release is called. release may be called more than once. The error is an
// *Error.
func (t *Tenants) Hold(name string, k Kind) (release func(), err error) {
	return t.HoldSome(name, k, 1)
}

// HoldSome is Hold for n units. A tenant that holds nothing yet may take more than the limit, since a reply is one piece.
func (t *Tenants) HoldSome(name string, k Kind, n int) (release func(), err error) {
	limit := t.limits[k]
	if limit == 0 {
		return func() {}, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.tenant(name, t.now())
	if has := of.held[k]; has >= limit || has > 0 && n > limit-has {
		return nil, t.refuse(name, k, limit)
	}
	of.held[k] += n
	var once sync.Once
	return func() {
		once.Do(func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			of.held[k] -= n
		})
	}, nil
}

// refuse counts a refusal and returns its error.
func (t *Tenants) refuse(name string, k Kind, limit int) error {
	t.refused[k].Add(1)
	e := &Error{Tenant: name, Kind: k, Limit: limit}
	for _, told := range kinds {
		if told.kind == k {
			e.Setting, e.What = told.setting, told.what
		}
	}
	return e
}

// tenant returns a tenant's counters. The caller holds mu.
func (t *Tenants) tenant(name string, now time.Time) *tenant {
	of := t.tenants[name]
	if of == nil {
		if len(t.tenants) >= t.sweep {
			t.forget(now)
		}
		of = &tenant{held: map[Kind]int{}, rates: map[Kind]*rate.Limiter{}}
		t.tenants[name] = of
	}
	return of
}

// forget removes tenants whose counters equal those of a new tenant. The caller holds mu.
func (t *Tenants) forget(now time.Time) {
	for name, of := range t.tenants {
		if of.idle(now) {
			delete(t.tenants, name)
		}
	}
	t.sweep = max(minSweep, 2*len(t.tenants))
}

func (of *tenant) idle(now time.Time) bool {
	for _, n := range of.held {
		if n > 0 {
			return false
		}
	}
	for _, r := range of.rates {
		if r.TokensAt(now) < float64(r.Burst()) {
			return false
		}
	}
	return true
}
