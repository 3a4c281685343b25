package grant

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// liar is a resource manager whose list has what a hostile node has registered.
type liar struct {
	control.UnimplementedManagerServer
	list []*control.ExecutorEntry
}

func (l *liar) Hello(context.Context, *control.ManagerHelloRequest) (*control.ManagerHelloReply, error) {
	return &control.ManagerHelloReply{ProtocolVersion: control.ProtocolVersion}, nil
}

func (l *liar) List(context.Context, *control.ListRequest) (*control.ListReply, error) {
	return &control.ListReply{Executors: l.list}, nil
}

// listing returns a session with the resource manager l.
func listing(t *testing.T, l *liar) *Control {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterManagerServer(port.Server, l)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { port.Close(context.Background()) })
	c, err := openSession(t, Options{Manager: port.Address, SecretFile: secret, Provider: "auto", Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// The client does not dial a loopback address or a unix socket of an executor on another node: the listener at that
// address on this node is not that executor.
func TestLocalAddressOfAnotherNode(t *testing.T) {
	self, err := control.NodeID()
	if err != nil {
		t.Fatal(err)
	}
	l := &liar{}
	c := listing(t, l)
	c.devices = func() bool { return true }
	for _, k := range []struct {
		address, node string
		taken         bool
	}{
		{"127.0.0.1:7465", "elsewhere/1", false},
		{"localhost:7465", "elsewhere/1", false},
		{"[::1]:7465", "", false},
		{"unix:/tmp/x", "elsewhere/1", false},
		{"unix:/tmp/x", self, true},
		{"127.0.0.1:7465", self, true},
		{"192.0.2.1:7465", "elsewhere/1", true},
	} {
		l.list = []*control.ExecutorEntry{{Address: k.address, Alive: true, Info: &control.InfoReply{NodeId: k.node, Cores: 4, FreeCores: 4, Providers: []string{"shm", "verbs"}}}}
		found, _, err := c.candidates(t.Context(), &Spec{Workers: 1, CoresPerWorker: 1})
		if k.taken && (err != nil || len(found) != 1) || !k.taken && (err == nil || !strings.Contains(err.Error(), k.address)) {
			t.Errorf("%s of node %q: %v, %v", k.address, k.node, found, err)
		}
	}
}
