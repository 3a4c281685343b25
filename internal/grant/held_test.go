package grant

import (
	"context"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
)

// dying is an executor that ends while it handles a release.
type dying struct {
	*lessor
	end func()
}

func (x *dying) Release(ctx context.Context, _ *control.ReleaseRequest) (*control.ReleaseReply, error) {
	go x.end()
	<-ctx.Done()
	return nil, ctx.Err()
}

// The lease of an executor that ends during the release has ended too, so the release succeeds.
func TestReleaseWhileTheExecutorEnds(t *testing.T) {
	x := &dying{lessor: &lessor{}}
	c, port, _, _ := lessee(t, x)
	x.end = port.Server.Stop
	conn, err := c.dial("release", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	h := &Held{Candidate: Candidate{Address: port.Address}, ID: 1, c: c, cl: control.NewExecutorClient(conn)}
	if err := h.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
