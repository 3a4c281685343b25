package grant

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Token describes a token that sessions of a pool use.
type Token struct {
	control.TokenState
	Refusal string // why an executor refused it at the last renewal of a lease; "": it did not
}

// Tokens returns the tokens that the sessions of a pool use, by path and tenant.
func (p *Pool) Tokens() (list []Token) {
	p.mu.Lock()
	var all []*shared
	for _, s := range p.parts {
		all = append(all, s)
	}
	p.mu.Unlock()
	for _, s := range all {
		s.mu.Lock()
		token, refusal := s.token, s.refusal
		s.mu.Unlock()
		if token == nil {
			continue
		}
		t := Token{token.State(), refusal}
		i := slices.IndexFunc(list, func(x Token) bool { return x.Path == t.Path && x.ID == t.ID })
		switch {
		case i < 0:
			list = append(list, t)
		case list[i].Refusal == "":
			list[i].Refusal = t.Refusal
		}
	}
	slices.SortFunc(list, func(a, b Token) int { return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Tenant, b.Tenant)) })
	return list
}

// The user may renew the token file at any time. These bound the pause before an executor that has refused the token is asked again.
const (
	firstRefused = 250 * time.Millisecond
	mostRefused  = 10 * time.Second
)

// untilRefused returns the pause after the n-th refusal in a row, from 0, with jitter.
func untilRefused(n int) time.Duration {
	d := min(firstRefused<<min(n, 16), mostRefused)
	return d/2 + rand.N(d/2+1)
}

// noteRenewal records whether the executor refused the credential when a lease was renewed. An attempt that failed for another
// reason, as the last one before the lease's end may, says nothing about the credential: the earlier refusal still counts.
func (h *Held) noteRenewal(err error) {
	var e *dataplane.Error
	refusal := ""
	if errors.Is(err, dataplane.ErrCredential) && errors.As(err, &e) {
		refusal = e.Detail
	} else if err != nil {
		return
	}
	h.mu.Lock()
	h.refusal = refusal
	h.mu.Unlock()
	h.c.shared.mu.Lock()
	h.c.refusal = refusal
	h.c.shared.mu.Unlock()
}

// expiry adds to the reason of an event about the lease's end why the lease could not be renewed.
func (h *Held) expiry(reason string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refusal == "" {
		return reason
	}
	if reason != "" {
		reason += "; "
	}
	return reason + "it could not be renewed: " + h.refusal
}
