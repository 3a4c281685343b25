package executor

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/invoke"
)

// lines returns the audit lines of grants, releases, kills and drains so far.
func (n *tenants) lines() (lines []identity.AuditEntry) {
	n.t.Helper()
	n.e.gate.Audit().Flush()
	b, err := os.ReadFile(n.in("audit"))
	if err != nil {
		n.t.Fatal(err)
	}
	for text := range strings.Lines(string(b)) {
		var e identity.AuditEntry
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			n.t.Fatalf("%v: %q", err, text)
		}
		if slices.Contains([]string{identity.AuditGrant, identity.AuditRelease, identity.AuditKill, identity.AuditDrain}, e.Event) {
			lines = append(lines, e)
		}
	}
	return lines
}

// Each grant, release, kill and drain is one line with tenant, event, node and reason.
func TestAuditLines(t *testing.T) {
	n := newTenants(t)
	ann, op := n.as("ann", "tenant", 1001), n.as("boss", "operator", 0)
	if _, err := n.upload(ann, n.lib); err != nil {
		t.Fatal(err)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	// next returns the only new line. who is the beginning of its caller; "": the event has no caller.
	next := func(event, who, reason string, lease uint64) identity.AuditEntry {
		t.Helper()
		all := n.lines()
		if len(all) != seen+1 {
			t.Fatalf("%s: %d new lines: %+v", event, len(all)-seen, all[seen:])
		}
		e := all[seen]
		seen++
		if e.Event != event || e.Lease != lease || e.Time.IsZero() || e.Node != host || !strings.Contains(e.Reason, reason) ||
			!strings.HasPrefix(e.Who, who) || (e.Who == "") != (who == "") || (e.Remote == "") != (who == "") {
			t.Errorf("%s by %q with %q: %+v", event, who, reason, e)
		}
		if lease != 0 && (e.Tenant != "ann" || e.UID == nil || *e.UID != 1001 || e.Code != hex.EncodeToString(n.sum[:]) || e.Workers == 0 || len(e.Cores) != e.Workers) {
			t.Errorf("%s of whose lease: %+v", event, e)
		}
		return e
	}
	grant := func(workers int, change ...func(*control.LeaseRequest)) *control.LeaseReply {
		t.Helper()
		req := n.request(workers)
		req.Tenant = ""
		for _, c := range change {
			c(req)
		}
		l, err := ann.Lease(n.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		e := next(identity.AuditGrant, "ann by token", "", l.GetLeaseId())
		var cores []int
		for _, w := range l.GetWorkers() {
			cores = append(cores, int(w.GetCpus()[0]))
		}
		if e.Workers != workers || !slices.Equal(e.Cores, cores) || e.Start != "cold" || !strings.HasPrefix(e.Remote, "127.0.0.1:") {
			t.Errorf("%+v, want cores %v", e, cores)
		}
		if _, err := ann.Lease(n.ctx(), req); err != nil { // the same request again is the same grant, and no other line
			t.Error(err)
		}
		return l
	}

	l := grant(2)
	if _, err := ann.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	if e := next(identity.AuditRelease, "ann by token", "by its client", l.GetLeaseId()); e.State != "released" || e.Workers != 2 {
		t.Errorf("%+v", e)
	}

	l = grant(1)
	if _, err := ann.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), ClientBlob: clientBlob(invoke.ProviderSHM)}); err != nil {
		t.Fatal(err)
	}
	if e := next(identity.AuditKill, "ann by token", "another worker", l.GetLeaseId()); e.Worker == nil || *e.Worker != 0 || e.State != "" {
		t.Errorf("%+v", e)
	}
	if _, err := op.Revoke(n.ctx(), &control.RevokeRequest{LeaseId: l.GetLeaseId(), Reason: "it mines"}); err != nil {
		t.Fatal(err)
	}
	if e := next(identity.AuditKill, "boss by token", "it mines", l.GetLeaseId()); e.State != "revoked" {
		t.Errorf("%+v", e)
	}

	l = grant(1, func(r *control.LeaseRequest) { r.DurationMs = proto.Uint64(200) })
	eventually(t, "it has expired", func() bool { return len(n.lines()) > seen })
	if e := next(identity.AuditKill, "", "", l.GetLeaseId()); e.State != "expired" {
		t.Errorf("%+v", e)
	}

	l = grant(1)
	n.e.DrainUntil(n.ctx(), "maintenance")
	all := n.lines()
	if len(all) != seen+2 {
		t.Fatalf("drained: %+v", all[seen:])
	}
	if e := all[seen]; e.Event != identity.AuditDrain || e.Lease != 0 || e.Reason != "maintenance" || !strings.HasPrefix(e.Detail, "grace ") {
		t.Errorf("the node: %+v", e)
	}
	if e := all[seen+1]; e.Event != identity.AuditDrain || e.Lease != l.GetLeaseId() || e.State != "drained" || e.Reason != "maintenance" {
		t.Errorf("its lease: %+v", e)
	}
	if s := n.log.String(); strings.Contains(s, "lease granted") || strings.Contains(s, "lease ended") {
		t.Errorf("the log says it once more:\n%s", s)
	}
}
