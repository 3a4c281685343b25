package grant

import (
	"context"
	"crypto/sha256"
	"errors"
	"path/filepath"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Adoption describes a lease that was granted to another process of the same user, which has ended without releasing it.
type Adoption struct {
	ID                      uint64
	Address, Node, Provider string
	Until                   time.Time         // as the other process knew it
	Library                 [sha256.Size]byte // hash
	PIDs                    []int             // of its workers, by index
}

// shortest is the shortest renewal. Since a renewal never makes a lease shorter, it only asks how long the lease lasts.
const shortest = time.Millisecond

// adoptTime is how long the executor may take to answer. A client hands its leases over one after the other.
const adoptTime = 2 * time.Second

// Adopt continues a lease of another process: it renews the lease, or asks how long it lasts if the spec does not say
// Renew. The executor waits for the new event stream (2 s by default), so Watch must follow soon. If the executor does not answer within
// adoptTime, or refuses the credential, Watch decides about the lease. Errors: ErrLease (the executor does not know the lease any more), ErrConnection
// (the executor has ended).
func (c *Control) Adopt(ctx context.Context, s Spec, a Adoption) (*Pending, *Held, error) {
	const op = "adopt a lease"
	if err := s.check(); err != nil {
		return nil, nil, err
	}
	if err := c.isOpen(op); err != nil {
		return nil, nil, err
	}
	p := &Pending{c: c, spec: s, sha: a.Library, name: filepath.Base(s.Library), current: -1, granted: true}
	conn, err := c.dial(op, a.Address)
	if err != nil {
		return nil, nil, err
	}
	h := &Held{Wanted: len(a.PIDs), Candidate: Candidate{Address: a.Address, Node: a.Node, Provider: a.Provider}, ID: a.ID, Duration: s.Duration, asked: s.Duration, c: c,
		cl: control.NewExecutorClient(conn), renew: s.Renew, key: p.key(), sha: a.Library, adopted: true, end: a.Until,
		unanswered: make(chan Unanswered, reportsMax)}
	for _, pid := range a.PIDs {
		h.Workers = append(h.Workers, Worker{PID: pid})
	}
	d := shortest
	if s.Renew {
		d = 0
	}
	ctx, cancel := context.WithTimeout(ctx, adoptTime)
	defer cancel()
	if err := h.Renew(ctx, d); errors.Is(err, dataplane.ErrLease) || nobodyListens(err) {
		return nil, nil, err
	}
	return p, h, nil
}

// With returns the plan of an adopted lease with its library. If that is another library than the lease's, for example because its file has
// changed since, With returns p.
func (p *Pending) With(lib *Library) *Pending {
	if lib.sha != p.sha {
		return p
	}
	known := *p
	known.lib = lib
	return &known
}
