package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/grant"
)

// tokensEvery is how often the agent checks the token files of its clients. Each call to a daemon checks them too.
const tokensEvery = 10 * time.Second

// TokenStatus describes a token that clients of the agent use.
type TokenStatus struct {
	File    string    `json:"file"`
	Tenant  string    `json:"tenant"`
	ID      string    `json:"id"`
	Expires time.Time `json:"expires"`
	LeftMS  int64     `json:"left_ms"` // below 0: it has expired
	Warning string    `json:"warning,omitempty"`
}

// tokens describes the tokens in use.
func (a *Agent) tokens(now time.Time) []TokenStatus {
	list := []TokenStatus{}
	for _, t := range a.pool.Tokens() {
		_, text := a.renewals.warning(&t, now)
		list = append(list, TokenStatus{File: t.Path, Tenant: t.Tenant, ID: t.ID, Expires: t.Expires.UTC(),
			LeftMS: t.Expires.Sub(now).Milliseconds(), Warning: text})
	}
	return list
}

// soonPart: the agent warns when less than 1/soonPart of a token's life is left.
const soonPart = 10

// warning returns a warning about a token for the user, and its kind, which does not depend on the time left. Both are "" if there is
// nothing to warn of.
func (r *tokenRenewals) warning(t *grant.Token, now time.Time) (kind, text string) {
	left, remedy := t.Expires.Sub(now), r.remedy(t)
	switch {
	case t.Problem != nil:
		return t.Problem.Error(), t.Problem.Error()
	case t.Refusal != "":
		return "refused", "a lease could not be renewed: " + t.Refusal
	case left <= 0:
		return "expired", fmt.Sprintf("it expired %v ago: %s", -left.Round(time.Second), remedy)
	case left < t.Expires.Sub(t.Begins)/soonPart:
		return "expires", fmt.Sprintf("it expires in %v: %s", left.Round(time.Second), remedy)
	}
	return "", ""
}

// watchTokens renews tokens, and logs warnings about them, each once, until ctx ends.
func (a *Agent) watchTokens(ctx context.Context) {
	said := map[string]string{} // kind of the last warning about each token
	tick := time.NewTicker(tokensEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			a.renewTokens(ctx, now)
			said = a.warn(said, now)
		}
	}
}

// warn logs the warnings whose kind is not in before, and returns the kinds of all present warnings.
func (a *Agent) warn(before map[string]string, now time.Time) map[string]string {
	said := map[string]string{}
	for _, t := range a.pool.Tokens() {
		kind, text := a.renewals.warning(&t, now)
		if kind == "" {
			continue
		}
		key := t.Path + " " + t.ID
		said[key] = kind
		if before[key] != kind {
			a.log.Warn("token", "file", t.Path, "tenant", t.Tenant, "id", t.ID, "expires", t.Expires.UTC(), "warning", text)
		}
	}
	return said
}
