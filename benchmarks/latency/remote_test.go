package latency

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// serving starts Serve and returns its address, its progress lines, and a function that ends it.
func serving(t *testing.T) (address string, said func() string, end func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var lines []string
	done := make(chan error, 1)
	go func() {
		done <- Serve(ctx, l, ServeConfig{Device: dataplane.Options{GIDIndex: -1}, CPU: -1, Peer: peerProgram, Progress: func(line string) {
			mu.Lock()
			defer mu.Unlock()
			lines = append(lines, line)
		}})
	}()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return l.Addr().String(), func() string {
		mu.Lock()
		defer mu.Unlock()
		return strings.Join(lines, "\n")
	}, end
}

// ask sends messages and returns what comes back, until the other side closes.
func ask(t *testing.T, address string, raw string) string {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(conn, raw); err != nil {
		t.Fatal(err)
	}
	_ = conn.(*net.TCPConn).CloseWrite()
	text, _ := io.ReadAll(conn) // a reset also means that it closed
	return string(text)
}

func TestServeRefuses(t *testing.T) {
	address, said, end := serving(t)
	message := func(text string) string {
		var b strings.Builder
		if err := writeMessage(&b, []byte(text)); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for _, c := range []struct{ raw, says string }{
		{message("rfaas bench 0"), "this is " + remoteGreeting + `, not "rfaas bench 0"`},
		{"\xff\xff\xff\xffGET / HTTP/1.1", ""},
		{"\x00\x00", ""},
		{message(remoteGreeting) + "\x00\x00\x10\x00short", ""},
		{message(remoteGreeting) + message("no hello of the bench"), ""},
	} {
		if got := ask(t, address, c.raw); !strings.Contains(got, c.says) {
			t.Errorf("%q: answer %q, want %q", c.raw, got, c.says)
		}
	}
	end()
	for _, want := range []string{"a message of 4294967295 bytes", "no greeting"} {
		if !strings.Contains(said(), want) {
			t.Errorf("the server does not say %q:\n%s", want, said())
		}
	}
}

func remoteConfig(address string) Config {
	cfg := quick(dataplane.Verbs)
	cfg.Remote, cfg.Payloads = address, []int{8, 20_000}
	return cfg
}

func TestRemoteRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = readMessage(conn)
			refuse(conn, "no service today")
		}
	}()
	for _, c := range []struct{ name, says string }{{"another service", "no service today"}, {"nobody", "refused"}} {
		if err := Run(context.Background(), remoteConfig(l.Addr().String()), nil); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
		_ = l.Close()
	}
	shm := quick(dataplane.SHM)
	shm.Remote = "node-b:7470"
	if err := shm.Validate(); err == nil || !strings.Contains(err.Error(), "node-b:7470") {
		t.Errorf("shm between machines: %v", err)
	}
	big := remoteConfig("node-b:7470")
	big.Payloads, big.Depth = []int{1 << 30}, 2
	if err := big.Validate(); err == nil {
		t.Error("2 GiB in flight pass")
	}
}

// A peer as on another machine, but on this one: client and peer share only the connection and the device.
func TestRemoteVerbs(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		if provider != dataplane.Verbs {
			t.Skip("between machines there is verbs only")
		}
		address, said, end := serving(t)
		defer end()
		n := 0
		if err := Run(context.Background(), remoteConfig(address), func(r *Result) error {
			n++
			if r.Remote != address || r.CPUPeer != -1 || r.Pairs+r.PairsDiscarded+r.PairsShared < 1 || !strings.Contains(r.Key(), "another machine") {
				t.Errorf("%+v", r)
			}
			return nil
		}); err != nil {
			t.Fatalf("%v; the server said: %s", err, said())
		}
		if n != 2 {
			t.Errorf("%d results", n)
		}
	})
}
