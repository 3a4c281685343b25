package control

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// Token is a user's token file. It is loaded again when it changes, so that open connections use a renewed token. While the file is
// missing or unusable, the last good token stays in use. Safe for concurrent use.
type Token struct {
	path string

	mu      sync.Mutex
	looked  time.Time
	read    fs.FileInfo // of the file that was loaded last; nil: OpenToken loaded it
	now     *identity.Credentials
	problem error // why the present file is not used; nil: it is
}

// TokenState describes a token file.
type TokenState struct {
	Path    string
	Tenant  string
	ID      string // revocation lists name it
	Begins  time.Time
	Expires time.Time
	Issuer  string // that gave the token by MUNGE, and gives the next one; empty: none
	Problem error  // why a changed file is not used; nil: the file has this token
}

// OpenToken loads a token file. Errors: fs.ErrNotExist; class ErrInvalid for a file with other content.
func OpenToken(path string) (*Token, error) {
	c, err := identity.LoadCredentials(path)
	if err != nil {
		var e *identity.Error
		if errors.As(err, &e) { // as the daemon would have classed it
			return nil, Errorf(ClassInvalid, "%v", err)
		}
		return nil, err
	}
	return &Token{path: path, now: c}, nil
}

// State loads the file again if it has changed, and describes the token in use.
func (t *Token) State() TokenState {
	c := t.get(now())
	t.mu.Lock()
	defer t.mu.Unlock()
	return TokenState{Path: t.path, Tenant: c.Claims.Tenant, ID: c.Claims.ID, Begins: time.Unix(c.Claims.Begins, 0),
		Expires: time.Unix(c.Claims.Ends, 0), Issuer: c.Issuer, Problem: t.problem}
}

// lookAgain is how often a token file is checked for changes.
const lookAgain = time.Second

// get returns the token to use.
func (t *Token) get(now time.Time) *identity.Credentials {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now.Sub(t.looked).Abs() < lookAgain {
		return t.now
	}
	t.looked = now
	st, err := os.Stat(t.path)
	if err != nil {
		t.problem = fmt.Errorf("token file: %w", err)
		return t.now
	}
	if identity.Unchanged(t.read, st) {
		t.problem = nil
		return t.now
	}
	c, err := identity.LoadCredentials(t.path)
	if err == nil {
		err = t.replaces(c, now)
	}
	if t.problem = err; err == nil {
		t.now, t.read = c, st
	}
	return t.now
}

// replaces returns an error for credentials that must not replace those in use.
func (t *Token) replaces(c *identity.Credentials, now time.Time) error {
	was := &t.now.Claims
	if c.Claims.Tenant != was.Tenant {
		return fmt.Errorf("token file %s: it is of tenant %q now; open connections keep the token of tenant %q, whose leases they hold: "+
			"restore that tenant's file, or open new sessions", t.path, c.Claims.Tenant, was.Tenant)
	}
	if ends := time.Unix(c.Claims.Ends, 0); !now.Before(ends) && c.Claims.Ends < was.Ends {
		return fmt.Errorf("token file %s: its token expired at %s, and the token in use is valid until %s: ask the administrator to renew it by `rfaas token renew`", t.path,
			ends.UTC().Format(time.RFC3339), time.Unix(was.Ends, 0).UTC().Format(time.RFC3339))
	}
	return nil
}
