package control

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// hello is the beginning of an HTTP/2 connection with empty settings.
const hello = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// pretend connects and sends some bytes.
func pretend(t *testing.T, network, address, words string) net.Conn {
	t.Helper()
	c, err := net.DialTimeout(network, address, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, words); err != nil {
		t.Logf("the connection was dropped before it had sent anything: %v", err)
	}
	return c
}

// dropped waits until the daemon has closed the connection.
func dropped(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.Copy(io.Discard, c); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the unauthenticated connection is still open")
	}
}

// wayServer records the connection of a call.
type wayServer struct {
	infoServer
	way atomic.Pointer[conn]
}

func (w *wayServer) Info(ctx context.Context, _ *InfoRequest) (*InfoReply, error) {
	w.way.Store(ctx.Value(connKey{}).(*conn))
	return &InfoReply{}, nil
}

// New unauthenticated connections close the oldest unauthenticated ones, and no others.
func TestUnauthenticatedConnectionsDropEachOther(t *testing.T) {
	for _, listen := range []string{"tcp", "unix"} {
		t.Run(listen, func(t *testing.T) { connectionsDropEachOther(t, listen) })
	}
}

func connectionsDropEachOther(t *testing.T, network string) {
	secret, listen := filepath.Join(t.TempDir(), "secret"), "127.0.0.1:0"
	if network == "unix" {
		listen = "unix:" + filepath.Join(t.TempDir(), "socket")
	}
	p, err := OpenPort(PortConfig{Listen: listen, SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	const most = 8
	p.listener.unauth.most = most
	var server wayServer
	RegisterExecutorServer(p.Server, &server)
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Server.Stop)
	address := strings.TrimPrefix(p.Address, "unix:")
	ask := func(c ExecutorClient) *conn {
		t.Helper()
		if _, err := c.Info(t.Context(), &InfoRequest{}); err != nil {
			t.Errorf("somebody who has the secret: %v", err)
		}
		return server.way.Load()
	}
	connect := func() ExecutorClient {
		t.Helper()
		return dial(t, p.Address, DialConfig{SecretFile: secret})
	}
	known := connect()
	way := ask(known)
	for _, words := range []string{"", "P", hello[:30], hello} {
		first := pretend(t, network, address, words)
		for range 3 * most {
			pretend(t, network, address, words)
		}
		dropped(t, first)
		ask(connect())
		if ask(known) != way {
			t.Error("who was known had to connect again")
		}
	}
	s := p.listener.unauth
	count := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.list.Len()
	}
	if n := count(); n == 0 || n > most {
		t.Errorf("%d unauthenticated connections are open, want 1 to %d", n, most)
	}
	p.Server.Stop()
	if n := count(); n != 0 {
		t.Errorf("%d connections are left after the end", n)
	}
}
