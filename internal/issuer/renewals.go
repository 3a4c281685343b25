package issuer

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// Times between the attempts of Renewals, on average.
const (
	firstRenewal = 4 * time.Second // after the daemon's start
	nextRenewal  = time.Hour
	retryRenewal = time.Minute // after a failed attempt; doubled with each further one, up to nextRenewal
)

// RenewFunc renews the certificate in a daemon's identity directory if it is due, and gets the list of revoked credentials. It returns when the
// certificate expires, and whether it is new.
type RenewFunc func(ctx context.Context) (ends time.Time, renewed bool, err error)

// Renewals keeps the identity directory of a daemon up to date, if it came from an issuer. NewRenewals makes it.
type Renewals struct {
	dir          string
	open         identity.Opener
	renew        RenewFunc
	log          *slog.Logger
	done, failed atomic.Uint64
}

// NewRenewals returns renewals for a directory, whose files are read with open. A nil renew means that this process can write the directory.
func NewRenewals(dir string, open identity.Opener, renew RenewFunc, log *slog.Logger) *Renewals {
	if renew == nil {
		renew = func(ctx context.Context) (time.Time, bool, error) { return Renew(ctx, dir, AtFirst) }
	}
	return &Renewals{dir: dir, open: open, renew: renew, log: log}
}

// Counts returns how many certificates were renewed, and how many attempts have failed.
func (r *Renewals) Counts() (done, failed uint64) { return r.done.Load(), r.failed.Load() }

// Run renews the certificate in time, until ctx ends. It returns at once without an identity directory.
func (r *Renewals) Run(ctx context.Context) { r.run(ctx, firstRenewal, nextRenewal, retryRenewal) }

func (r *Renewals) run(ctx context.Context, first, next, retry time.Duration) {
	if r.dir == "" {
		return
	}
	wait, again, said := first, retry, ""
	var known time.Time // end of the certificate
	// soon is at most a quarter of the certificate's remaining time, so that one of a few hours is renewed in time, too.
	soon := func(d time.Duration) time.Duration {
		if known.IsZero() {
			return d
		}
		return min(d, max(time.Until(known)/4, retry))
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait)): // so that the daemons of a cluster do not ask at the same time
		}
		wait = next
		_, err := identity.RemoteNode(r.dir, r.open)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the directory did not come from an issuer
		}
		var ends time.Time
		var renewed bool
		if err == nil {
			ends, renewed, err = r.renew(ctx)
		}
		if !ends.IsZero() {
			known = ends
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.failed.Add(1)
			if text := err.Error(); text != said {
				said = text
				r.log.Warn("cannot renew the certificate or get the list of revoked credentials from the issuer; trying again", "dir", r.dir, "error", text)
			}
			wait, again = soon(again), min(2*again, next)
			continue
		case renewed:
			r.done.Add(1)
			r.log.Info("renewed the certificate", "dir", r.dir, "expires", ends.UTC().Format(time.RFC3339))
		}
		wait, again, said = soon(next), retry, ""
	}
}
