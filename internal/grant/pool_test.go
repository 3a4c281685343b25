package grant

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Sessions with the same addresses and credentials share their connections, others do not. When the last such session ends, the connections stay open
// for a while.
func TestPool(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	port := serveLessor(t, &lessor{}, secret, "")
	p := NewPool(50 * time.Millisecond)
	defer p.Close()
	open := func(o Options) *Control {
		t.Helper()
		o.Executor = port.Address
		c, err := p.Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	getenv := func(name string) string { return map[string]string{control.SecretFileEnv: secret}[name] }
	a, b := open(Options{SecretFile: secret}), open(Options{Getenv: getenv})
	if a.shared != b.shared {
		t.Error("the same secret by a setting and by the environment: two connections")
	}
	other := open(Options{SecretFile: secret, Tenant: "other"})
	if other.shared == a.shared {
		t.Error("two tenants share a connection")
	}
	other.Close()
	plain := open(Options{SecretFile: secret, DataEncryption: "off"}) // the connection to the manager's memory would be in the clear
	if plain.shared == a.shared {
		t.Error("sessions with different encryption share a connection")
	}
	plain.Close()
	device := open(Options{SecretFile: secret, Verbs: &dataplane.Options{Device: "rdma1", GIDIndex: -1}})
	if device.shared == a.shared {
		t.Error("sessions with different RDMA devices share one")
	}
	device.Close()
	if _, err := p.Open(t.Context(), Options{Executor: port.Address, DataEncryption: "yes"}); err == nil || !strings.Contains(err.Error(), `"yes"`) {
		t.Errorf("unknown encryption: %v", err)
	}
	p.mu.Lock()
	if n := len(p.parts); n != 4 {
		t.Errorf("%d connections, want four", n)
	}
	p.mu.Unlock()
	if n := p.Connections().Executors; n != 1 {
		t.Errorf("the four connections lead to %d executors, want one", n)
	}
	a.Close()
	a.Close()
	if _, err := a.Plan(&Library{}, Spec{Workers: 1}); err == nil {
		t.Error("a closed session plans a lease")
	}
	if err := b.isOpen("test"); err != nil {
		t.Errorf("another session of the same connections: %v", err)
	}
	was := b.shared
	b.Close()
	c := open(Options{SecretFile: secret})
	if c.shared != was {
		t.Error("connections that were used just now are closed")
	}
	c.Close()
	for end := time.Now().Add(20 * time.Second); p.Connections().Executors > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("unused connections stay open")
		}
	}
}

// openSession opens a session that shares its connections with no other.
func openSession(t testing.TB, o Options) (*Control, error) {
	p := NewPool(0)
	t.Cleanup(p.Close)
	return p.Open(t.Context(), o)
}
