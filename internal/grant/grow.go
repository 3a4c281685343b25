package grant

import (
	"context"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// AwaitRoom returns when the lease's executor has room for another worker of the lease p. It returns an error if the executor
// cannot be asked at present or ctx has ended.
func (h *Held) AwaitRoom(ctx context.Context, p *Pending) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := h.cl.Room(ctx, &control.RoomRequest{Cores: uint32(p.spec.CoresPerWorker), MemoryBytes: p.spec.Memory, Growing: true})
	for err == nil {
		var r *control.RoomReply
		if r, err = stream.Recv(); r.GetRoom() {
			return nil
		}
	}
	if err := h.ended("wait for room"); err != nil {
		return err
	}
	return fail("wait for room", dataplane.StatusPeerGone, "%s: %v", h.Address, err)
}
