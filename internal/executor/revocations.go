package executor

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

const (
	revocationsCall    = 45 * time.Second // bound of one call; the manager answers earlier
	revocationsSoon    = time.Second      // wait after a failure, doubled with each further one
	revocationsLongest = time.Minute
)

// revocations asks the resource manager for newer lists of revoked credentials. It keeps the newest one in the state directory, so that a
// restarted executor need not wait for the manager.
type revocations struct {
	client  control.ManagerClient
	revoked *identity.Revocations
	file    string             // "": the list is not kept
	as      func(func()) error // calls a function with the rights of the executor's user
	log     *slog.Logger
}

// revocationsFile is the name of the kept list in the state directory.
const revocationsFile = "revoked"

// restore adopts the list that an earlier executor kept.
func (r *revocations) restore() {
	if r.file == "" {
		return
	}
	var text []byte
	var err error
	if rerr := r.as(func() { text, err = identity.ReadRevocations(r.file) }); rerr != nil {
		err = rerr
	}
	if err == nil {
		_, err = r.revoked.Adopt(text, time.Now())
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("cannot use the revocation list in the state directory; using the one in identity-dir", "file", r.file, "error", err)
	}
}

// run asks until ctx ends.
func (r *revocations) run(ctx context.Context) {
	wait, said := revocationsSoon, ""
	for ctx.Err() == nil {
		soonest := time.NewTimer(revocationsSoon)
		adopted, err := r.ask(ctx)
		if err == nil {
			wait, said = revocationsSoon, ""
			if !adopted { // a resource manager that ends answers at once
				select {
				case <-ctx.Done():
				case <-soonest.C:
				}
			}
			continue
		}
		if text := control.Text(err); text != said && ctx.Err() == nil && status.Code(err) != codes.Canceled { // the connection is closed shortly before ctx ends
			said = text
			r.log.Warn("cannot get the list of revoked credentials from the resource manager; trying again", "error", text)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, revocationsLongest)
	}
}

// ask waits for a newer list and adopts it. It returns false if the resource manager has none.
func (r *revocations) ask(ctx context.Context) (adopted bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, revocationsCall)
	defer cancel()
	reply, err := r.client.Revocations(ctx, &control.RevocationsRequest{Serial: r.revoked.Serial(time.Now())})
	if err != nil || len(reply.GetList()) == 0 {
		return false, err
	}
	adopted, err = r.revoked.Adopt(reply.GetList(), time.Now())
	switch {
	case err != nil:
		return false, err
	case !adopted:
		return false, errors.New("the resource manager sent a list that is not newer than this executor's")
	case r.file == "":
		return true, nil
	}
	if rerr := r.as(func() { err = identity.WriteFile(r.file, reply.GetList(), 0o600, false) }); rerr != nil {
		err = rerr
	}
	if err != nil {
		r.log.Error("cannot keep the list of revoked credentials; a restart uses the one in identity-dir until the resource manager sends the list again",
			"file", r.file, "error", err)
	}
	return true, nil
}

// newRevocations returns nil if this executor has no identity.
func (r rights) newRevocations(client control.ManagerClient, node *identity.Node, stateDir string, log *slog.Logger) *revocations {
	if node == nil {
		return nil
	}
	file := ""
	if stateDir != "" {
		file = r.reach(filepath.Join(stateDir, revocationsFile))
	}
	return &revocations{client: client, revoked: node.Revoked, file: file, as: r.do, log: log}
}
