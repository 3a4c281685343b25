package grant

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// endsBound is far more than an operation takes whose context has ended.
const endsBound = 20 * time.Second

// While one caller waits for a resource manager that does not answer, another one waits no longer than its own context allows, and the
// session can be closed.
func TestSilentManager(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	secret := filepath.Join(t.TempDir(), "secret")
	if _, err := control.EnsureSecret(secret); err != nil {
		t.Fatal(err)
	}
	c, err := newShared(&Options{Manager: "unix:" + path, Provider: "auto", SecretFile: secret, Getenv: func(string) string { return "" }})
	if err != nil {
		t.Fatal(err)
	}
	first := make(chan error, 1)
	go func() {
		_, err := c.pick(context.Background(), &Spec{Workers: 1, CoresPerWorker: 1}, map[uint32]bool{})
		first <- err
	}()
	silent, err := l.Accept() // the first caller has the lock and waits for an answer
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	others := make(chan error, 2)
	go func() {
		_, err := c.pick(ended, &Spec{Workers: 1, CoresPerWorker: 1}, map[uint32]bool{})
		others <- err
	}()
	go func() {
		_, err := c.changes(time.Hour).Poll(ended)
		others <- err
	}()
	within := time.After(endsBound)
	for range 2 {
		select {
		case err := <-others:
			if err == nil {
				t.Error("a caller whose context has ended was answered")
			}
		case <-within:
			t.Fatal("a caller whose context has ended still waits")
		}
	}
	closed := make(chan struct{})
	go func() {
		c.close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-within:
		t.Fatal("the session is not closed")
	}
	if err := <-first; err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the first caller: %v", err)
	}
}
