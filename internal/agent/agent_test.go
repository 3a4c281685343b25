package agent

import (
	"encoding/json"
	"testing"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

func TestLease(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := w.connect("RFAAS_EXECUTOR=" + x.address)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	l := p.mustAcquire(4096+7, 2)
	if l.LeaseID == 0 || l.Executor != x.address || len(l.Functions) == 0 || l.Workers[0].PID == 0 || l.UntilNs == 0 {
		t.Errorf("granted %+v", l.Candidate)
	}
	for i := range 2 {
		if err := l.call(i); err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	}
	n := protocol.WorkerName{Key: l.key, Worker: 1}
	if i, err := protocol.DecodeInspection(p.must(protocol.OpInspect, n.Encode, nil)); err != nil || i.Calls != 1 || i.PID != int(l.Workers[1].PID) {
		t.Errorf("inspection %+v, %v", i, err)
	}
	renewal := protocol.Renewal{Key: l.key}
	if until, err := protocol.DecodeUntil(protocol.OpRenew, p.must(protocol.OpRenew, renewal.Encode, nil)); err != nil || until < l.UntilNs {
		t.Errorf("renewed until %d, was %d, %v", until, l.UntilNs, err)
	}
	var s Status
	text, err := protocol.DecodeReport(p.must(protocol.OpStatus, nil, nil))
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil || len(s.Clients) != 1 || s.Clients[0].Leases != 1 || s.Executors != 1 {
		t.Errorf("status %s: %v", text, err)
	}
	if l.release(false) {
		t.Error("cached, which nobody asked for")
	}
	if n := x.free(t, w.secret); n != 2 {
		t.Errorf("%d cores are free, want 2", n)
	}
	name := protocol.SessionName{Session: 1}
	p.must(protocol.OpClose, name.Encode, nil)
}
