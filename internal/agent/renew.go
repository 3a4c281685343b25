package agent

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/grant"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
)

const (
	renewSoonest = time.Minute // after a failed renewal; doubled with each further one
	renewLongest = 15 * time.Minute
)

// tokenRenewals gets new tokens for token files that came from an issuer, when about a third of a token's life is left.
type tokenRenewals struct {
	// part is the part of a token's life at which this agent renews it, between a quarter and a third. It is random, so that if several agents of a
	// user share a file, usually one of them renews the token and the others load it.
	part float64

	mu     sync.Mutex
	failed map[string]*failedRenewal // by path
}

type failedRenewal struct {
	text string
	next time.Time // of the next attempt
	wait time.Duration
}

func newTokenRenewals() *tokenRenewals {
	return &tokenRenewals{part: 0.25 + rand.Float64()/12, failed: map[string]*failedRenewal{}}
}

// renewTokens renews the tokens that are due.
func (a *Agent) renewTokens(ctx context.Context, now time.Time) {
	r := a.renewals
	for _, t := range a.pool.Tokens() {
		f := r.failure(t.Path)
		if t.Issuer == "" || !r.due(t.Begins, t.Expires, now) || f != nil && now.Before(f.next) {
			continue
		}
		cred, err := identity.LoadCredentials(t.Path)
		switch {
		case err != nil || cred.Issuer == "": // not the token in use; the agent warns of it
			continue
		case r.due(time.Unix(cred.Claims.Begins, 0), time.Unix(cred.Claims.Ends, 0), now):
			cred, err = issuer.RenewToken(ctx, issuer.Munge{}, t.Path, cred)
		}
		if ctx.Err() != nil {
			return
		}
		r.note(t.Path, err, now)
		if err != nil {
			a.log.Warn("cannot renew a token; trying again", "file", t.Path, "tenant", t.Tenant, "issuer", t.Issuer, "error", err)
			continue
		}
		a.log.Info("renewed a token", "file", t.Path, "tenant", t.Tenant, "id", cred.Claims.ID, "expires", time.Unix(cred.Claims.Ends, 0).UTC())
	}
}

// due reports whether a token should be renewed.
func (r *tokenRenewals) due(begins, ends, now time.Time) bool {
	return float64(ends.Sub(now)) < r.part*float64(ends.Sub(begins))
}

// failure returns the last attempt for a file if it failed, or nil.
func (r *tokenRenewals) failure(path string) *failedRenewal {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed[path]
}

// note records an attempt.
func (r *tokenRenewals) note(path string, err error, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.failed, path)
		return
	}
	f := &failedRenewal{text: err.Error(), wait: renewSoonest}
	if old := r.failed[path]; old != nil {
		f.wait = min(2*old.wait, renewLongest)
	}
	f.next = now.Add(f.wait)
	r.failed[path] = f
}

// remedy says what to do about a token that expires.
func (r *tokenRenewals) remedy(t *grant.Token) string {
	const until = "; until then no lease can be opened or renewed"
	if t.Issuer == "" {
		return "ask the administrator to renew it by `rfaas token renew`" + until
	}
	if f := r.failure(t.Path); f != nil {
		return fmt.Sprintf("the agent could not renew it: %s: try `rfaas token renew`%s", f.text, until)
	}
	return "the agent is about to renew it"
}
