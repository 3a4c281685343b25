package manager

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// The number, the rate and the memory of one node certificate's registrations are limited. Other nodes are not
// affected.
func TestNodeQuotas(t *testing.T) {
	c := &clock{time.Unix(1e9, 0)}
	m, err := New(Config{Heartbeat: time.Second, Slots: 64, Log: slog.New(slog.DiscardHandler), Now: c.Now,
		Quota: NodeQuota{Executors: 3, Memory: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	a := asNode(t, "a")
	n := byte(0)
	register := func(port int) (uint64, error) {
		n++
		r, err := m.Register(a, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: fmt.Sprint("a:", port), Info: info(n, 4)})
		return r.GetExecutorId(), err
	}
	var ids [3]uint64
	for i := range ids {
		if ids[i], err = register(i + 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := register(4); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("one more than it may have: %v", err)
	}
	if _, err := register(1); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("another incarnation at once: %v", err)
	}
	c.now = c.now.Add(registerEvery)
	if ids[0], err = register(1); err != nil {
		t.Errorf("another incarnation later: %v", err)
	}
	o := ownerOf(a)
	if err := m.table.quotas.attach(&o, 1<<20); control.ClassOf(m.answer(a, "", err)) != control.ClassBusy {
		t.Errorf("more memory than it may have: %v", err)
	}
	if _, err := m.Register(asNode(t, "b"), &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "b:1", Info: info(100, 4)}); err != nil {
		t.Errorf("another node: %v", err)
	}
	for i := range 100 {
		if _, err := m.Register(asOperator(t), &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: fmt.Sprint("c:", i%8), Info: info(byte(101+i), 4)}); err != nil {
			t.Fatalf("an operator: %v", err)
		}
	}
	for _, id := range ids[:] {
		if _, err := m.Deregister(a, &control.DeregisterRequest{ExecutorId: id}); err != nil {
			t.Error(err)
		}
	}
	if q := m.table.quotas.of["node a"]; q != nil && (q.registrations != 0 || q.bytes != 0) {
		t.Errorf("left of it: %+v", q)
	}
	if got := m.refusals[refusedQuota].Load(); got != 3 {
		t.Errorf("%d refusals are counted", got)
	}
}
