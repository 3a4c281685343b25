package executor

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
)

// A cordoned executor grants no new leases and says why. Its leases continue, and it grants leases again afterwards.
func TestCordon(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	cordon := func(on bool, reason string) {
		t.Helper()
		if _, err := n.e.Cordon(n.ctx(), &control.CordonRequest{Cordon: on, Reason: reason}); err != nil {
			t.Fatal(err)
		}
	}
	state := func(cordoned bool) {
		t.Helper()
		i, err := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
		if err != nil || i.GetCordoned() != cordoned || i.GetDraining() != cordoned || i.GetFreeCores() != 3 {
			t.Errorf("%v %v, want cordoned %v", i, err, cordoned)
		}
	}
	cordon(true, "memory is being replaced")
	state(true)
	_, err := n.Lease(n.ctx(), n.request(1))
	wantError(t, err, codes.Unavailable, control.ClassBusy, "cordoned", "memory is being replaced")
	if _, err := n.renew(l.GetLeaseId(), time.Minute); err != nil {
		t.Errorf("a lease cannot be renewed: %v", err)
	}
	cordon(true, "")
	_, err = n.Lease(n.ctx(), n.request(1))
	wantError(t, err, codes.Unavailable, control.ClassBusy, cordonReason)
	_, err = n.e.Cordon(n.ctx(), &control.CordonRequest{Cordon: true, Reason: strings.Repeat("x", 1<<16)})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "reason")
	cordon(false, "")
	state(false)
	n.release(n.lease(1).GetLeaseId())
	n.release(l.GetLeaseId())
}
