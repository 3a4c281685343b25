package executor

import (
	"context"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// lateManager does not answer the first Hello in time. The third answer says that another manager has taken over.
type lateManager struct {
	managerStub
	memory *cellManager
	hellos atomic.Int32
}

func (m *lateManager) reply(epoch uint64) *control.ManagerHelloReply {
	return &control.ManagerHelloReply{NodeId: "here", Providers: []string{"shm"}, Epoch: epoch}
}

func (m *lateManager) Register(context.Context, *control.RegisterRequest) (*control.RegisterReply, error) {
	m.calls <- "register"
	return &control.RegisterReply{ExecutorId: 5, HeartbeatMs: 10, Manager: m.reply(7)}, nil
}

func (m *lateManager) Hello(ctx context.Context, _ *control.ManagerHelloRequest) (*control.ManagerHelloReply, error) {
	switch m.hellos.Add(1) {
	case 1:
		m.calls <- "late"
		<-ctx.Done()
	case 2:
		m.calls <- "same"
	case 3:
		m.calls <- "other"
		return m.reply(8), nil
	}
	return m.reply(7), nil
}

func (m *lateManager) Deregister(context.Context, *control.DeregisterRequest) (*control.DeregisterReply, error) {
	return &control.DeregisterReply{}, nil
}

func (m *lateManager) AttachExecutor(ctx context.Context, req *control.AttachExecutorRequest) (*control.AttachExecutorReply, error) {
	return m.memory.AttachExecutor(ctx, req)
}

// A manager that is slow to answer keeps its executors. They register again when another manager has taken over.
func TestSlowManagerKeepsExecutors(t *testing.T) {
	n := newNode(t)
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	secret := n.e.cfg.Settings.SecretFile
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	m := &lateManager{managerStub: managerStub{calls: make(chan string, 100)}, memory: &cellManager{t: t, dev: dev}}
	control.RegisterManagerServer(port.Server, m)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	defer port.Close(n.ctx())
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	managers := port.Address + "," + dead.Addr().String()
	conn, err := control.Dial(managers, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := newRegistrar(conn, managers, "here:1", n.e.info, slog.New(slog.DiscardHandler))
	r.nodeID, r.devices = "here", &link.Devices{}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.run(ctx) }()
	for _, want := range []string{"register", "late", "same", "other", "register"} {
		select {
		case call := <-m.calls:
			if call != want {
				t.Fatalf("the executor called %q, want %q", call, want)
			}
		case <-time.After(testBound):
			t.Fatalf("no %q", want)
		}
	}
	stop()
	<-done
}
