package issuer

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

const (
	followEvery   = 5 * time.Second
	followLongest = time.Minute // after failures
)

// Follow keeps the revocation list of a daemon up to date with the issuer's, until ctx ends. dir is the daemon's identity directory.
// While that did not come from an issuer, Follow does nothing.
func Follow(ctx context.Context, dir string, node *identity.Node, log *slog.Logger) {
	follow(ctx, dir, node, followEvery, log)
}

func follow(ctx context.Context, dir string, node *identity.Node, every time.Duration, log *slog.Logger) {
	if node == nil {
		return
	}
	wait, said := every, ""
	for {
		err := fetch(ctx, dir, node)
		switch {
		case err == nil || errors.Is(err, fs.ErrNotExist):
			wait, said = every, ""
		case ctx.Err() == nil:
			wait = min(2*wait, max(every, followLongest))
			if text := err.Error(); text != said {
				said = text
				log.Warn("cannot get the list of revoked credentials from the issuer; trying again", "error", text)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// fetch asks for a newer list and adopts it.
func fetch(ctx context.Context, dir string, node *identity.Node) error {
	text, err := identity.RemoteNode(dir, nil)
	if err != nil {
		return err
	}
	at, err := ParseAddress(text)
	if err != nil {
		return err
	}
	now := time.Now()
	list, err := at.revoked(ctx, &node.Files(now).Certificate, node.Revoked.Serial(now))
	if err == nil && len(list) > 0 {
		_, err = node.Revoked.Adopt(list, now)
	}
	return err
}
