package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/identity"

	"github.com/rfaas-go/rfaas/tests/leakcheck"
)

func TestMain(m *testing.M) { leakcheck.Main(m, nil) }

func env(kv map[string]string) func(string) string { return func(k string) string { return kv[k] } }

func TestSecretPath(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"RFAAS_SECRET_FILE": "/x", "XDG_RUNTIME_DIR": "/run/user/1", "HOME": "/home/a"}, "/x"},
		{map[string]string{"XDG_RUNTIME_DIR": "/run/user/1", "HOME": "/home/a"}, "/run/user/1/rfaas/secret"},
		{map[string]string{"HOME": "/home/a"}, "/home/a/.rfaas/secret"},
		{nil, ""},
	} {
		got, err := SecretPath(env(c.env))
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%v: %q, %v; want %q", c.env, got, err, c.want)
		}
	}
}

func TestEnsureSecret(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b", "secret")
	if _, err := LoadSecret(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	secrets := make(chan Secret, 16)
	var wg sync.WaitGroup
	for range 16 { // daemons that start at once
		wg.Go(func() {
			s, err := EnsureSecret(path)
			if err != nil {
				t.Error(err)
			}
			secrets <- s
		})
	}
	wg.Wait()
	first := <-secrets
	for range 15 {
		if s := <-secrets; s != first {
			t.Fatal("two daemons made two secrets")
		}
	}
	if first == (Secret{}) {
		t.Error("an empty secret")
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if st, err := os.Stat(filepath.Dir(path)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("directory mode %v, %v", st.Mode(), err)
	}
	if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
		t.Errorf("left beside the secret: %v, %v", list, err)
	}
	for _, text := range []string{fmt.Sprint(first), fmt.Sprintf("%v %+v %#v %s", first, first, first, first)} {
		if strings.Contains(text, first.Hex()) {
			t.Errorf("the secret prints itself: %s", text)
		}
	}
}

func TestLoadSecretRefuses(t *testing.T) {
	good := strings.Repeat("ab", 32)
	for name, c := range map[string]struct {
		content string
		mode    os.FileMode
		text    string
	}{
		"readable to the group": {good, 0o640, "0640"},
		"readable to all":       {good, 0o604, "0604"},
		"short":                 {good[:63], 0o600, "63 characters"},
		"long":                  {good + "00", 0o600, "66 characters"},
		"not hexadecimal":       {strings.Repeat("xy", 32), 0o600, "not hexadecimal"},
		"empty":                 {"", 0o600, "0 characters"},
	} {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte(c.content), c.mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadSecret(path); err == nil || !strings.Contains(err.Error(), c.text) || strings.Contains(err.Error(), good) {
			t.Errorf("%s: %v, want %q", name, err, c.text)
		}
	}
	if _, err := LoadSecret(t.TempDir()); err == nil {
		t.Error("a directory is a secret")
	}
}

func TestParseAddress(t *testing.T) {
	for _, c := range []struct {
		in, out string // out empty: an error
		local   bool
	}{
		{"127.0.0.1:1", "127.0.0.1:1", true},
		{"127.8.9.1:0", "127.8.9.1:0", true},
		{"[::1]:65535", "[::1]:65535", true},
		{"[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:1", true},
		{"localhost:5", "localhost:5", true},
		{"unix:/run/x", "unix:/run/x", true},
		{"unix:///run/x", "unix:/run/x", true},
		{"unix:rel", "unix:rel", true},
		{":5", ":5", false},
		{"0.0.0.0:5", "0.0.0.0:5", false},
		{"[::]:5", "[::]:5", false},
		{"node7:5", "node7:5", false},
		{"localhost.evil.org:5", "localhost.evil.org:5", false},
		{"10.0.0.1:5", "10.0.0.1:5", false},
		{"", "", false},
		{"127.0.0.1", "", false},
		{"127.0.0.1:x", "", false},
		{"127.0.0.1:65536", "", false},
		{"127.0.0.1:-1", "", false},
		{"::1:5", "", false},
		{"unix:", "", false},
		{"unix:/" + strings.Repeat("x", 107), "", false},
	} {
		a, err := ParseAddress(c.in)
		switch {
		case (err == nil) != (c.out != ""):
			t.Errorf("%q: %v", c.in, err)
		case err == nil && (a.String() != c.out || a.Local() != c.local):
			t.Errorf("%q: %v, local %t; want %q, %t", c.in, a, a.Local(), c.out, c.local)
		}
	}
}

func TestListen(t *testing.T) {
	if _, err := Listen("0.0.0.0:0", false); err == nil || !strings.Contains(err.Error(), "--allow-plaintext") || !strings.Contains(err.Error(), "TLS") {
		t.Errorf("a public address: %v", err)
	}
	l, err := Listen("0.0.0.0:0", true)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()

	path := filepath.Join(t.TempDir(), "s")
	u, err := Listen("unix:"+path, false)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}
	if ListenerAddress(u) != "unix:"+path {
		t.Errorf("address %q", ListenerAddress(u))
	}
	if _, err := Listen("unix:"+path, false); err == nil {
		t.Error("a socket that is served was taken")
	}
	u.(*net.UnixListener).SetUnlinkOnClose(false) // as a killed daemon leaves it
	u.Close()
	if u, err = Listen("unix:"+path, false); err != nil {
		t.Errorf("a left socket: %v", err)
	} else {
		u.Close()
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen("unix:"+path, false); err == nil {
		t.Error("a file was taken for a socket")
	}
}

// infoServer answers Info and nothing else.
type infoServer struct{ UnimplementedExecutorServer }

func (infoServer) Info(context.Context, *InfoRequest) (*InfoReply, error) {
	return &InfoReply{Node: "n"}, nil
}

func (infoServer) Events(_ *EventsRequest, s grpc.ServerStreamingServer[Event]) error {
	return s.Send(&Event{Kind: Event_KIND_OPEN})
}

func openPort(t *testing.T, listen string) (*Port, string) {
	t.Helper()
	dir := t.TempDir()
	if listen == "unix" {
		listen = "unix:" + filepath.Join(dir, "socket")
	}
	p, err := OpenPort(PortConfig{Listen: listen, SecretFile: filepath.Join(dir, "secret"), AddressFile: filepath.Join(dir, "address")})
	if err != nil {
		t.Fatal(err)
	}
	RegisterExecutorServer(p.Server, infoServer{})
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(t.Context()) })
	b, err := os.ReadFile(filepath.Join(dir, "address"))
	if err != nil || strings.TrimSpace(string(b)) != p.Address {
		t.Fatalf("address file %q, %v; bound %q", b, err, p.Address)
	}
	return p, filepath.Join(dir, "secret")
}

func TestSecretIsChecked(t *testing.T) {
	for _, listen := range []string{"127.0.0.1:0", "unix"} {
		p, file := openPort(t, listen)
		call := func(cfg DialConfig) (error, error) {
			conn, err := Dial(p.Address, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			c := NewExecutorClient(conn)
			_, unary := c.Info(t.Context(), &InfoRequest{})
			s, stream := c.Events(t.Context(), &EventsRequest{})
			if stream == nil {
				_, stream = s.Recv()
			}
			return unary, stream
		}
		if a, b := call(DialConfig{SecretFile: file}); a != nil || b != nil {
			t.Errorf("right secret: %v, %v", a, b)
		}
		if p.Gate.Refused() != 0 {
			t.Errorf("%d refused", p.Gate.Refused())
		}
		wrong := Secret{1}
		for _, err := range two(call(DialConfig{Secret: &wrong})) {
			if status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "wrong secret: the client's secret file ("+SecretFileEnv) || ClassOf(err) != ClassCredential {
				t.Errorf("wrong secret: %v", err)
			}
		}
		if p.Gate.Refused() != 2 {
			t.Errorf("%d refused, want 2", p.Gate.Refused())
		}
	}
}

func two(a, b error) []error { return []error{a, b} }

func TestDialRefuses(t *testing.T) {
	s := Secret{}
	for addr, text := range map[string]string{"node7:5": "--allow-plaintext", "nonsense": `"nonsense"`} {
		if _, err := Dial(addr, DialConfig{Secret: &s}); err == nil || !strings.Contains(err.Error(), text) || ClassOf(err) != ClassInvalid {
			t.Errorf("%s: %v", addr, err)
		}
	}
	t.Setenv(SecretFileEnv, "")
	t.Setenv(identity.TokenFileEnv, "")
	t.Setenv(identity.CAFileEnv, "")
	if _, err := Dial("127.0.0.1:1", DialConfig{SecretFile: filepath.Join(t.TempDir(), "absent")}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no secret file: %v", err)
	}
	// An invalid token file is the error, even if the address also needs TLS. Without a token file, the address is the
	// error.
	broken := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(broken, []byte("no token"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Dial("node7:5", DialConfig{TokenFile: broken}); err == nil || !strings.HasPrefix(Text(err), "token file "+broken) {
		t.Errorf("broken token file: %v", err)
	}
	nothing := DialConfig{Getenv: func(string) string { return "" }}
	if _, err := Dial("node7:5", nothing); err == nil || !strings.HasPrefix(Text(err), "address node7:5 is not loopback") {
		t.Errorf("no credentials: %v", err)
	}
}

// A wrong or dead address is an error soon instead of a wait.
func TestDeadAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	conn, err := Dial(addr, DialConfig{Secret: &Secret{}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err = NewExecutorClient(conn).Info(ctx, &InfoRequest{})
	if status.Code(err) != codes.Unavailable || ClassOf(err) != ClassConnection || !strings.HasPrefix(Text(err), "dial tcp "+addr) || strings.Contains(Text(err), "desc") {
		t.Errorf("error %v, as text %q", err, Text(err))
	}
}

// Text says in plain words that a server does not speak the control protocol, whatever gRPC makes of its bytes.
func TestOtherProtocolAtTheAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
			go func() {
				io.Copy(io.Discard, c) // the other end closes first
				c.Close()
			}()
		}
	}()
	conn, err := Dial(l.Addr().String(), DialConfig{Secret: &Secret{}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err = NewExecutorClient(conn).Info(ctx, &InfoRequest{}); Text(err) != "the server does not speak the control protocol" {
		t.Errorf("error %v, as text %q", err, Text(err))
	}
}

func TestClasses(t *testing.T) {
	for c := ClassBusy; c <= ClassCredential; c++ {
		err := Errorf(c, "value %d", 7)
		if ClassOf(err) != c || ClassOf(fmt.Errorf("wrapped: %w", err)) != c || StatusOf(err) != -100*int32(c) || Text(err) != "value 7" || !IsClassed(err) {
			t.Errorf("%v: class %v, status %d, text %q", c, ClassOf(err), StatusOf(err), Text(err))
		}
		// An error of another program is classed by its code alone.
		if got := ClassOf(status.Error(c.Code(), "x")); got != c && c != ClassFunction {
			t.Errorf("code %v is class %v, want %v", c.Code(), got, c)
		}
	}
	err := StatusError(-204, "bad \xff library")
	if ClassOf(err) != ClassInvalid || StatusOf(err) != -204 || !strings.Contains(Text(err), "bad \ufffd library") {
		t.Errorf("status error: %v, %d, %q", ClassOf(err), StatusOf(err), Text(err))
	}
	for _, n := range []int32{0, 5, -50, -900, -1 << 31} {
		if err := StatusError(n, "x"); ClassOf(err) != ClassFatal {
			t.Errorf("status %d is class %v", n, ClassOf(err))
		}
	}
	if ClassOf(nil) != 0 || StatusOf(nil) != 0 {
		t.Error("nil has a class")
	}
	if ClassOf(context.Canceled) != ClassConnection || ClassOf(errors.New("x")) != ClassFatal {
		t.Error("plain errors are classed wrongly")
	}
}

func TestNodeID(t *testing.T) {
	a, err := NodeID()
	if err != nil {
		t.Fatal(err)
	}
	b, _ := NodeID()
	boot, ns, ok := strings.Cut(a, "/")
	if a != b || !ok || len(boot) != 36 || ns == "" || ns == "0" {
		t.Errorf("node ids %q and %q", a, b)
	}
}
