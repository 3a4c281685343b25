package executor

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// hasty is a resource manager that answers at once that it has no newer list.
type hasty struct {
	control.ManagerClient
	asked int
}

func (h *hasty) Revocations(context.Context, *control.RevocationsRequest, ...grpc.CallOption) (*control.RevocationsReply, error) {
	h.asked++
	return &control.RevocationsReply{}, nil
}

// The executor does not ask more than once a second, even if the resource manager answers at once.
func TestRevocationsAreAskedForOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &hasty{}
		none := identity.NewRevocations(filepath.Join(t.TempDir(), "revoked"), nil, nil, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second+time.Millisecond)
		defer cancel()
		(&revocations{client: m, revoked: none, log: slog.New(slog.DiscardHandler)}).run(ctx)
		if m.asked != 11 {
			t.Errorf("%d requests in 10 s, want 11", m.asked)
		}
	})
}
