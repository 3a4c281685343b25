package executor

import (
	"context"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
)

// cordonReason is the default reason.
const cordonReason = "an operator has taken the node out of use"

// Cordon makes the executor refuse new leases, or accept them again. Existing leases continue, without further workers. The cordon survives a
// handover, but not a restart.
func (e *Executor) Cordon(_ context.Context, req *control.CordonRequest) (*control.CordonReply, error) {
	reason, err := checkReason(req.GetReason(), cordonReason)
	if err != nil {
		return nil, err
	}
	if !req.GetCordon() {
		reason = ""
	}
	defer e.turns.enter()()
	e.mu.Lock()
	was := e.cordoned
	e.cordoned = reason
	e.mu.Unlock()
	if was == reason {
		return &control.CordonReply{}, nil
	}
	if reason != "" {
		e.claims.revokeAll() // earlier claims have become leases
		e.log.Info("cordoned: no new leases", "reason", reason)
	} else {
		e.log.Info("no longer cordoned")
	}
	e.changed()
	return &control.CordonReply{}, nil
}

// whyCordoned returns the reason of a cordon, or "".
func (e *Executor) whyCordoned() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cordoned
}

// notCordoned returns an error if the executor refuses new leases.
func (e *Executor) notCordoned() error {
	if reason := e.whyCordoned(); reason != "" {
		return control.CodeErrorf(control.ClassBusy, codes.Unavailable, "the executor is cordoned and grants no new leases: %s", reason)
	}
	return nil
}
