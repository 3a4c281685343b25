package grant

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// refusing returns an address at which no process listens.
func refusing(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func cordoned(e *control.ExecutorEntry) *control.ExecutorEntry {
	e.Info.Cordoned = true
	return e
}

// If no executor can be asked, the error names the executors and why each of them is unusable. The error has the class of
// the executor that is most likely to come back, even if this node could never use another one.
func TestErrorNamesUnusableExecutors(t *testing.T) {
	self, err := control.NodeID()
	if err != nil {
		t.Fatal(err)
	}
	entry := func(address, node string, cores uint32, alive, draining bool, providers ...string) *control.ExecutorEntry {
		return &control.ExecutorEntry{Address: address, Alive: alive, AgeMs: 12000, Info: &control.InfoReply{Node: "n-" + node, NodeId: node, Cores: cores,
			FreeCores: cores, Draining: draining, Providers: providers}}
	}
	const near, far = "192.0.2.1:7465", "192.0.2.2:7465"
	remote := entry(far, "elsewhere/1", 4, true, false, "shm", "verbs")
	noDevice := []string{far, "n-elsewhere/1", "no RDMA device"}
	for _, k := range []struct {
		name    string
		list    []*control.ExecutorEntry
		devices bool
		status  dataplane.Status // 0: the executor far is asked
		words   []string
	}{
		{"no executor", nil, false, dataplane.StatusBusy, []string{"knows no executor"}},
		{"far without a device", []*control.ExecutorEntry{remote}, false, dataplane.StatusUnsupported, noDevice},
		{"near is silent", []*control.ExecutorEntry{remote, entry(near, self, 4, false, false, "shm")}, false, dataplane.StatusBusy,
			append([]string{near + " on this node has not been heard from for 12s; "}, noDevice...)},
		{"near drains", []*control.ExecutorEntry{entry(near, self, 4, true, true, "shm"), remote}, false, dataplane.StatusBusy,
			append([]string{near + " on this node is draining; "}, noDevice...)},
		{"near is cordoned", []*control.ExecutorEntry{cordoned(entry(near, self, 4, true, true, "shm")), remote}, false, dataplane.StatusBusy,
			append([]string{near + " on this node is cordoned"}, noDevice...)},
		{"near is too small", []*control.ExecutorEntry{entry(near, self, 1, true, false, "shm"), remote}, false, dataplane.StatusUnsupported,
			append([]string{near + " on this node lends 1 core", "2 workers of 1 core need 2 cores on one node, and none of the 2 executors"}, noDevice...)},
		{"all are too small", []*control.ExecutorEntry{entry(near, self, 1, true, false, "shm")}, false, dataplane.StatusInvalid, []string{"the only executor that the resource manager", near, "lends 1 core"}},
		{"near is silent, far with a device", []*control.ExecutorEntry{remote, entry(near, self, 4, false, false, "shm")}, true, 0, nil},
	} {
		t.Run(k.name, func(t *testing.T) {
			c := listing(t, &liar{list: k.list})
			c.devices = func() bool { return k.devices }
			found, _, err := c.candidates(t.Context(), &Spec{Workers: 2, CoresPerWorker: 1})
			if k.status == 0 {
				if err != nil || len(found) != 1 || found[0].Address != far || found[0].Provider != "verbs" {
					t.Errorf("%v, %v; want %s by verbs", found, err, far)
				}
				return
			}
			var e *dataplane.Error
			if !errors.As(err, &e) || e.Status != k.status {
				t.Errorf("%v, want status %v", err, k.status)
			}
			for _, word := range k.words {
				if err == nil || !strings.Contains(err.Error(), word) {
					t.Errorf("%v does not say %q", err, word)
				}
			}
		})
	}
}

// The resource manager still counts the executor of this node as alive. The client asks that executor and gets no answer.
func TestErrorOfADeadExecutorNamesUnusableOnes(t *testing.T) {
	self, err := control.NodeID()
	if err != nil {
		t.Fatal(err)
	}
	const far = "192.0.2.2:7465"
	near := refusing(t)
	c := listing(t, &liar{list: []*control.ExecutorEntry{
		{Address: near, Alive: true, Info: &control.InfoReply{NodeId: self, Cores: 4, FreeCores: 4, Providers: []string{"shm"}}},
		{Address: far, Alive: true, Info: &control.InfoReply{Node: "b", NodeId: "elsewhere/1", Cores: 4, FreeCores: 4, Providers: []string{"verbs"}}}}})
	c.devices = func() bool { return false }
	p, err := c.Plan(&Library{}, Spec{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Look(t.Context()); err != nil {
		t.Fatal(err)
	}
	if cand, err := p.Next(t.Context()); err != nil || cand.Address != near {
		t.Fatalf("%v, %v; want %s", cand, err, near)
	}
	if _, err := p.Grant(t.Context(), [][]byte{{1}}); !errors.Is(err, dataplane.ErrConnection) {
		t.Errorf("%v, want that nobody answers", err)
	}
	_, err = p.Next(t.Context())
	if !errors.Is(err, dataplane.ErrConnection) {
		t.Errorf("%v, want the class of the executor that does not answer", err)
	}
	for _, word := range []string{near, "connection refused", "not asked: ", far, "no RDMA device"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not say %q", err, word)
		}
	}
}
