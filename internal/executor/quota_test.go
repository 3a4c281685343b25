package executor

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// manyCalls is more than the quotas of these tests let through, however slow the machine is.
const manyCalls = 1000

// untilBusy calls until a quota is reached, and returns how many calls succeeded.
func untilBusy(t *testing.T, setting string, call func() error) int {
	t.Helper()
	for i := range manyCalls {
		if err := call(); control.ClassOf(err) == control.ClassBusy && strings.Contains(control.Text(err), setting) {
			return i
		} else if err != nil {
			t.Fatal(err)
		}
	}
	t.Errorf("%d calls, and %s is not reached", manyCalls, setting)
	return manyCalls
}

// The rates of a tenant's leases, replacements and uploads are limited. Other tenants and operators are not affected.
func TestQuotas(t *testing.T) {
	n := newTenants(t, func(c *Config) {
		c.Settings.TenantLeases, c.Settings.TenantReplaces, c.Settings.TenantUpload = 2, 1, 10
	})
	n.seeds()
	ann, ben, op := n.as("ann", "tenant", 0), n.as("ben", "tenant", 0), n.as("boss", "operator", 0)
	for _, c := range []control.ExecutorClient{ann, ben} {
		if got := untilBusy(t, "tenant-upload", func() error { _, err := n.upload(c, n.lib); return err }); got < 4 {
			t.Errorf("%d libraries of %d bytes, want 100 bytes at once", got, len(n.lib))
		}
	}
	l := n.leaseOf(ann, "")
	blob := n.request(1).GetClientBlobs()[0]
	if got := untilBusy(t, "tenant-replaces", func() error {
		_, err := ann.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), ClientBlob: blob})
		return err
	}); got < 10 {
		t.Errorf("%d replacements, want 10 at once", got)
	}
	if got := untilBusy(t, "tenant-leases", func() error {
		req := n.request(1)
		req.Tenant = ""
		l, err := ann.Lease(n.ctx(), req)
		if err == nil {
			_, err = ann.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
		}
		return err
	}); got < 19 {
		t.Errorf("%d more leases, want 20 at once", got)
	}
	untilBusy(t, "tenant-leases", func() error { // a seed counts, too
		_, err := ann.CreateSeed(n.ctx(), &control.CreateSeedRequest{LeaseId: l.GetLeaseId(), Name: "xs", Function: "prepare", LimitMs: 1000})
		return err
	})
	n.leaseOf(ben, "")
	for range 50 {
		if _, err := op.Release(n.ctx(), &control.ReleaseRequest{LeaseId: n.leaseOf(op, "ann").GetLeaseId()}); err != nil {
			t.Fatalf("an operator: %v", err)
		}
	}
	for _, k := range []quota.Kind{quota.Leases, quota.Replaces, quota.UploadBytes} {
		if n.e.gate.RefusedByQuota(k) == 0 {
			t.Errorf("%s: nothing was counted", k)
		}
	}
}

// A tenant whose workers die all the time does not fill the log, and does not hide other tenants' lines.
func TestLogLinesAreBounded(t *testing.T) {
	n := newTenants(t, func(c *Config) { c.Settings.TenantLogLines = 1 })
	var out bytes.Buffer
	n.e.log = slog.New(slog.NewTextHandler(&out, nil))
	ann, ben := &holding{tenant: "ann"}, &holding{tenant: "ben"}
	for range manyCalls {
		n.e.tell(ann, slog.LevelDebug, "not logged and not counted")
	}
	for range manyCalls {
		n.e.tell(ann, slog.LevelWarn, "worker ended", "of", "ann")
	}
	n.e.tell(ben, slog.LevelWarn, "worker ended", "of", "ben")
	if got := strings.Count(out.String(), "of=ann"); got < 10 || got > manyCalls/2 {
		t.Errorf("%d lines of ann, want about 10", got)
	}
	if !strings.Contains(out.String(), "of=ben") {
		t.Error("ben's line is missing")
	}
	if n.e.gate.RefusedByQuota(quota.LogLines) < manyCalls/2 {
		t.Errorf("%d counted", n.e.gate.RefusedByQuota(quota.LogLines))
	}
}
