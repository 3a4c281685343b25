package manager

import (
	"context"
	"math"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// entering tells when a call waits for a list.
type entering struct {
	*Manager
	entered chan struct{}
}

func (m *entering) Revocations(ctx context.Context, r *control.RevocationsRequest) (*control.RevocationsReply, error) {
	close(m.entered)
	return m.Manager.Revocations(ctx, r)
}

// A call that waits for a newer list is answered when the resource manager ends, so that its end need not wait for the call.
func TestWaitForRevocationsEndsWithThePort(t *testing.T) {
	dir := t.TempDir()
	newCluster(t, dir, map[string][]string{"localhost": {"localhost"}})
	node, err := identity.OpenNode(filepath.Join(dir, "localhost"), nil, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(dir, "secret")
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	m := &entering{&Manager{node: node}, make(chan struct{})}
	control.RegisterManagerServer(port.Server, m)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	conn, err := control.Dial(port.Address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answered := make(chan error, 1)
	go func() {
		r, err := control.NewManagerClient(conn).Revocations(t.Context(), &control.RevocationsRequest{Serial: math.MaxUint64})
		if err == nil && len(r.GetList()) > 0 {
			t.Error("a list that is not newer")
		}
		answered <- err
	}()
	<-m.entered
	port.Close(t.Context())
	if err := <-answered; err != nil {
		t.Error(err)
	}
}
