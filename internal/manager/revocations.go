package manager

import (
	"context"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

const (
	revocationsWait  = 30 * time.Second // how long a call waits for a newer list
	revocationsCheck = time.Second      // how often the manager's own list is compared
)

// Revocations waits until the manager's list of revoked credentials is newer than the caller's, and returns it. The reply is empty if
// there is no newer list for a while, or if the port begins to close. The list is signed by the cluster, so the caller need not trust the manager for it.
func (m *Manager) Revocations(ctx context.Context, r *control.RevocationsRequest) (*control.RevocationsReply, error) {
	if m.node == nil {
		return nil, control.Errorf(control.ClassUnsupported, "this resource manager has no identity, and so no list of revoked credentials")
	}
	ctx, cancel := context.WithTimeout(ctx, revocationsWait)
	defer cancel()
	tick := time.NewTicker(revocationsCheck)
	defer tick.Stop()
	closing := control.Closing(ctx).Done()
	for {
		text, serial, err := m.node.Revoked.Text(time.Now())
		switch {
		case err != nil:
			return nil, control.Errorf(control.ClassBusy, "%v", err)
		case serial > r.GetSerial() && len(text) > control.MaxMessage-64:
			return nil, control.Errorf(control.ClassUnsupported, "the list of revoked credentials has %d bytes, and a message at most %d: copy it to the nodes",
				len(text), control.MaxMessage)
		case serial > r.GetSerial():
			return &control.RevocationsReply{List: []byte(text)}, nil
		}
		select {
		case <-ctx.Done():
			return &control.RevocationsReply{}, nil
		case <-closing:
			return &control.RevocationsReply{}, nil
		case <-tick.C:
		}
	}
}
