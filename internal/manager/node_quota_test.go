package manager

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
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

// The buffers of a connection over tcp count as memory of its node until it is deregistered.
func TestConnectionsCountAsMemory(t *testing.T) {
	m, err := New(Config{Heartbeat: time.Second, Slots: 8, Providers: []string{dataplane.TCP}, Asked: true, DataListen: "127.0.0.1:0",
		Log: slog.New(slog.DiscardHandler), Now: time.Now, Quota: NodeQuota{Executors: 8, Memory: 3 * dataplane.ConnTCPBytes}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	dev, err := dataplane.Open(dataplane.TCP, dataplane.Options{GIDIndex: -1, ActiveOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	a := asNode(t, "a")
	attach := func(n byte) (uint64, error) {
		t.Helper()
		x := info(n, 4)
		r, err := m.Register(a, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: fmt.Sprint("a:", n), Info: x})
		if err != nil {
			t.Fatal(err)
		}
		d, err := dev.NewDomain()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Close)
		conn, err := d.NewConn()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(conn.Close)
		blob, err := conn.Blob()
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.AttachExecutor(a, &control.AttachExecutorRequest{ExecutorId: r.GetExecutorId(), Incarnation: x.Incarnation, Provider: dataplane.TCP, Blob: blob})
		return r.GetExecutorId(), err
	}
	var ids []uint64
	for n := range byte(3) {
		id, err := attach(n + 1)
		if n < 2 && err != nil || n == 2 && control.ClassOf(err) != control.ClassBusy {
			t.Errorf("connection %d: %v", n+1, err)
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		if _, err := m.Deregister(a, &control.DeregisterRequest{ExecutorId: id}); err != nil {
			t.Error(err)
		}
	}
	m.harvest() // frees what was attached
	if q := m.table.quotas.of["node a"]; q != nil && q.bytes != 0 {
		t.Errorf("left of it: %+v", q)
	}
}
