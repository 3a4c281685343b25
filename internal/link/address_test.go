package link

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// forged is a resource manager on another node. It says that its memory is at a loopback address.
type forged struct {
	control.ManagerClient
	blob []byte
}

func (f *forged) came(opts []grpc.CallOption) {
	for _, o := range opts {
		if p, ok := o.(grpc.PeerCallOption); ok {
			p.PeerAddr.Addr = &net.TCPAddr{IP: net.IPv4(198, 51, 100, 2), Port: 7464}
			p.PeerAddr.LocalAddr = &net.TCPAddr{IP: net.IPv4(192, 0, 2, 77), Port: 1}
		}
	}
}

func (f *forged) AttachClient(_ context.Context, _ *control.AttachClientRequest, opts ...grpc.CallOption) (*control.AttachClientReply, error) {
	f.came(opts)
	return &control.AttachClientReply{Blob: f.blob}, nil
}

func (f *forged) AttachExecutor(_ context.Context, _ *control.AttachExecutorRequest, opts ...grpc.CallOption) (*control.AttachExecutorReply, error) {
	f.came(opts)
	return &control.AttachExecutorReply{Blob: f.blob}, nil
}

// A resource manager on another node cannot make an executor or a client connect to a service of their own node.
func TestForgedAddress(t *testing.T) {
	service, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	theirs, err := dataplane.Open(dataplane.TCP, dataplane.Options{GIDIndex: -1, Handed: true, Advertise: service.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	memory, blob, err := newEnd(theirs, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	own, err := dataplane.Open(dataplane.TCP, dataplane.Options{GIDIndex: -1, ActiveOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	accepted := make(chan struct{})
	go func() {
		if c, err := service.Accept(); err == nil {
			c.Close()
			close(accepted)
		}
	}()
	m := &forged{blob: blob}
	_, client := AttachClient(t.Context(), m, own)
	_, executor := AttachExecutor(t.Context(), m, own, 1, [16]byte{1})
	for who, err := range map[string]error{"client": client, "executor": executor} {
		if !errors.Is(err, dataplane.ErrConnection) || !strings.Contains(err.Error(), "is a loopback address, and the resource manager is on another node") ||
			!strings.Contains(err.Error(), service.Addr().String()) {
			t.Errorf("the %s: %v", who, err)
		}
	}
	select {
	case <-accepted:
		t.Error("the service was connected to")
	default:
	}
}
