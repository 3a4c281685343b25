package manager

import (
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// The rate at which a tenant's clients attach is limited. Another tenant's clients are not affected.
func TestAttachesHaveARate(t *testing.T) {
	m, _ := newManager(t)
	m.cfg.Gate = control.NewGate(nil, quota.Limits{quota.Attaches: 1})
	busy := func(tenant string) bool {
		ctx := control.WithCaller(t.Context(), &identity.Identity{Tenant: tenant, Role: identity.RoleTenant})
		_, err := m.AttachClient(ctx, &control.AttachClientRequest{Provider: "none"})
		return control.ClassOf(err) == control.ClassBusy && strings.Contains(control.Text(err), "tenant-attaches")
	}
	n := 0
	for ; n < 1000 && !busy("ann"); n++ {
	}
	if n < 10 || n == 1000 {
		t.Errorf("%d times, want about 10", n)
	}
	if busy("ben") {
		t.Error("another tenant has to wait")
	}
	if m.cfg.Gate.RefusedByQuota(quota.Attaches) != 1 {
		t.Error("not counted")
	}
}
