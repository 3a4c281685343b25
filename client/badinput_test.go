package client_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// compile makes a shared library from C source, once for each source and flags, and returns its path.
func compile(t *testing.T, name, source string, flags ...string) string {
	t.Helper()
	all, err := compiled()
	if err != nil {
		t.Fatal(err)
	}
	key := sha256.Sum256([]byte(strings.Join(append([]string{source}, flags...), "\x00")))
	dir := filepath.Join(all, hex.EncodeToString(key[:8]))
	out := filepath.Join(dir, name)
	if _, err := os.Stat(out); err == nil {
		return out
	}
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "x.c"), []byte(source), 0o600)); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-shared", "-fPIC", "-o", out, filepath.Join(dir, "x.c")}, flags...)
	if b, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
	return out
}

// newerGlibc makes a library that needs a newer C library than any that exists.
func newerGlibc(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	script := filepath.Join(dir, "versions")
	if err := os.WriteFile(script, []byte("GLIBC_2.99 { global: of_the_future; };\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	stub := compile(t, "libc.so.6", "int of_the_future(void) { return 1; }", "-nostdlib", "-Wl,-soname,libc.so.6", "-Wl,--version-script="+script)
	return compile(t, "newer.so", `#include <stdint.h>
int of_the_future(void);
uint32_t f(void *a, uint32_t n, void *r) { (void)a; (void)n; (void)r; return of_the_future(); }
`, "-nostdlib", stub)
}

// otherVersion is an executor with another protocol version.
type otherVersion struct {
	control.UnimplementedExecutorServer
}

func (otherVersion) Info(context.Context, *control.InfoRequest) (*control.InfoReply, error) {
	return &control.InfoReply{ProtocolVersion: 7}, nil
}

// liar is an executor that grants workers to which no client can connect.
type liar struct {
	control.UnimplementedExecutorServer
	workers  []*control.WorkerGrant
	released chan uint64
}

func (l *liar) Info(context.Context, *control.InfoRequest) (*control.InfoReply, error) {
	id, err := control.NodeID()
	return &control.InfoReply{ProtocolVersion: control.ProtocolVersion, NodeId: id, Cores: 8, FreeCores: 8,
		Providers: []string{provider()}}, err
}

func (l *liar) Lease(context.Context, *control.LeaseRequest) (*control.LeaseReply, error) {
	return &control.LeaseReply{LeaseId: 5, DurationMs: 60_000, ClientMs: 60_000, Workers: l.workers, Functions: []string{"f"}}, nil
}

func (l *liar) Events(_ *control.EventsRequest, to control.Executor_EventsServer) error {
	<-to.Context().Done()
	return nil
}

func (l *liar) Release(_ context.Context, r *control.ReleaseRequest) (*control.ReleaseReply, error) {
	l.released <- r.GetLeaseId()
	return &control.ReleaseReply{}, nil
}

// An invalid grant is an error that says why, and the client releases the lease.
func TestBadGrant(t *testing.T) {
	for name, c := range map[string]struct {
		workers []*control.WorkerGrant
		names   string
	}{
		"no workers":   {nil, "granted 0 workers, want 1 to 1"},
		"more workers": {[]*control.WorkerGrant{{}, {}}, "granted 2 workers"},
		"no blob":      {[]*control.WorkerGrant{{Pid: 1}}, "blob has 0 bytes"},
		"random blob":  {[]*control.WorkerGrant{{Pid: 1, Blob: []byte(strings.Repeat("blob", 34))}}, "magic"},
	} {
		t.Run(name, func(t *testing.T) {
			secret := filepath.Join(t.TempDir(), "secret")
			bad := &liar{workers: c.workers, released: make(chan uint64, 9)}
			s, err := client.Connect(t.Context(), client.Options{Executor: serve(t, secret, bad), SecretFile: secret, Provider: provider()})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			_, err = s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so")})
			if err == nil || !strings.Contains(err.Error(), c.names) {
				t.Errorf("%v, want %q", err, c.names)
			}
			within(t, 10*time.Second, "the lease is given back", func() bool { return len(bad.released) > 0 })
			if len(bad.released) != 1 {
				t.Errorf("the lease was released %d times, want once", len(bad.released))
			}
		})
	}
}

// serve serves a test's executor and returns its address.
func serve(t *testing.T, secret string, e control.ExecutorServer) string {
	t.Helper()
	leakcheck.Once(t, objects)
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterExecutorServer(port.Server, e)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		port.Close(ctx)
	})
	return port.Address
}

func write(t *testing.T, name string, content []byte) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(p, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// Each invalid lease is an error of the right class that names the value. Nothing stays leased, and the executor stays
// up.
func TestBadLease(t *testing.T) {
	w := newWorld(t)
	good := built(t, "build/functions/echo.so")
	elf, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	otherMachine := append([]byte(nil), elf...)
	otherMachine[18], otherMachine[19] = 0xf3, 0 // e_machine: RISC-V
	helper := compile(t, "libhelper_that_is_missing.so", "int helper(void) { return 1; }", "-Wl,-soname,libhelper_that_is_missing.so")
	function := "#include <stdint.h>\nuint32_t f(void *a, uint32_t n, void *r) { (void)a; (void)n; (void)r; return 0; }\n"
	for _, c := range []struct {
		name    string
		options client.LeaseOptions
		class   error
		names   string
	}{
		{"no library", client.LeaseOptions{}, client.ErrInvalid, "library"},
		{"absent", client.LeaseOptions{Library: "/does/not/exist.so"}, client.ErrInvalid, "/does/not/exist.so"},
		{"directory", client.LeaseOptions{Library: "/tmp"}, client.ErrInvalid, "/tmp"},
		{"not ELF", client.LeaseOptions{Library: write(t, "text.so", []byte("#!/bin/sh\n"))}, client.ErrInvalid, "not an ELF"},
		{"empty", client.LeaseOptions{Library: write(t, "empty.so", nil)}, client.ErrInvalid, "empty.so"},
		{"truncated", client.LeaseOptions{Library: write(t, "half.so", elf[:len(elf)/2])}, client.ErrInvalid, "half.so"},
		{"other machine", client.LeaseOptions{Library: write(t, "riscv.so", otherMachine)}, client.ErrInvalid, "RISC"},
		{"no functions", client.LeaseOptions{Library: compile(t, "none.so", "static int x; int *p = &x;")}, client.ErrInvalid, "function"},
		{"missing symbol", client.LeaseOptions{Library: compile(t, "symbol.so",
			function+"void nowhere_defined(void); uint32_t g(void *a, uint32_t n, void *r) { nowhere_defined(); return f(a, n, r); }")},
			client.ErrInvalid, "nowhere_defined"},
		{"missing dependency", client.LeaseOptions{Library: compile(t, "dependency.so",
			function+"int helper(void); uint32_t g(void *a, uint32_t n, void *r) { helper(); return f(a, n, r); }", helper)},
			client.ErrInvalid, "libhelper_that_is_missing.so"},
		{"glibc", client.LeaseOptions{Library: newerGlibc(t)}, client.ErrInvalid, "GLIBC_2.99"},
		{"too many workers", client.LeaseOptions{Library: good, Workers: 3}, client.ErrInvalid, "3"},
		{"negative workers", client.LeaseOptions{Library: good, Workers: -1}, client.ErrInvalid, "-1"},
		{"absurd workers", client.LeaseOptions{Library: good, Workers: 1 << 30}, client.ErrInvalid, "1073741824"},
		{"too many cores", client.LeaseOptions{Library: good, CoresPerWorker: 3}, client.ErrInvalid, "3"},
		{"negative cores", client.LeaseOptions{Library: good, CoresPerWorker: -1}, client.ErrInvalid, "-1"},
		{"depth", client.LeaseOptions{Library: good, Depth: 1025}, client.ErrInvalid, "1025"},
		{"negative depth", client.LeaseOptions{Library: good, Depth: -4}, client.ErrInvalid, "-4"},
		{"eager", client.LeaseOptions{Library: good, Eager: 1 << 20}, client.ErrInvalid, "1048576"},
		{"bulk", client.LeaseOptions{Library: good, Bulk: 1 << 40}, client.ErrInvalid, "1099511627776"},
		{"wait mode", client.LeaseOptions{Library: good, WaitMode: 7}, client.ErrInvalid, "7"},
		{"duration", client.LeaseOptions{Library: good, Duration: -time.Second}, client.ErrInvalid, "-1s"},
		{"absurd duration", client.LeaseOptions{Library: good, Duration: 1 << 62}, client.ErrInvalid, "4611686018427"},
		{"memory", client.LeaseOptions{Library: good, Memory: 1 << 60}, nil, "memory"},
		{"executor", client.LeaseOptions{Library: good, Executor: "127.0.0.1:1"}, client.ErrConnection, "127.0.0.1:1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := w.session.Lease(t.Context(), c.options)
			if err == nil {
				l.Release(t.Context())
				t.Fatal("it was granted")
			}
			if c.class != nil && !errors.Is(err, c.class) {
				t.Errorf("class of %q is not %v", err, c.class)
			}
			if !strings.Contains(err.Error(), c.names) {
				t.Errorf("%q does not name %q", err, c.names)
			}
		})
	}
	l := w.lease(t, client.LeaseOptions{Workers: 2}) // both cores are still free
	if _, err := l.Function("ecko"); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `did you mean "echo"`) {
		t.Errorf("unknown function: %v", err)
	}
	if _, err := l.Worker(0).Invoke(t.Context(), nil, nil, nil); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("nil function: %v", err)
	}
	if _, err := w.session.Lease(t.Context(), client.LeaseOptions{Library: good}); !errors.Is(err, client.ErrBusy) {
		t.Errorf("no core is free: %v", err)
	}
}

func TestBadConnect(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	executor := start(t, "bin/executor", secret, "--cores", "1")
	manager := start(t, "bin/resource-manager", secret)
	garbage, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer garbage.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	go func() {
		for {
			c, err := garbage.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("220 mail.example.org ESMTP\r\n"))
			c.Close()
		}
	}()
	wrong := write(t, "wrong", []byte(strings.Repeat("ab", 32)+"\n"))
	for _, c := range []struct {
		name    string
		options client.Options
		class   error
		names   string
	}{
		{"no address", client.Options{}, client.ErrInvalid, "RFAAS_EXECUTOR"},
		{"two addresses", client.Options{Manager: manager.Address, Executor: executor.Address}, client.ErrInvalid, manager.Address},
		{"malformed", client.Options{Executor: "here"}, client.ErrInvalid, "here"},
		{"bad port", client.Options{Executor: "127.0.0.1:99999"}, client.ErrInvalid, "99999"},
		{"nobody", client.Options{Executor: "127.0.0.1:1"}, client.ErrConnection, "127.0.0.1:1"},
		{"no socket", client.Options{Executor: "unix:/does/not/exist"}, client.ErrConnection, "/does/not/exist"},
		{"not loopback", client.Options{Executor: "192.0.2.1:7465"}, client.ErrInvalid, "192.0.2.1"},
		{"something else", client.Options{Executor: garbage.Addr().String()}, client.ErrConnection, garbage.Addr().String()},
		{"silence", client.Options{Executor: silent.Addr().String(), Timeout: 300 * time.Millisecond}, nil, silent.Addr().String()},
		{"manager as executor", client.Options{Executor: manager.Address}, client.ErrConnection, manager.Address},
		{"executor as manager", client.Options{Manager: executor.Address}, client.ErrConnection, executor.Address},
		{"other version", client.Options{Executor: serve(t, secret, otherVersion{})}, client.ErrConnection, "control protocol 7, this client 1"},
		{"provider", client.Options{Executor: executor.Address, Provider: "smoke"}, client.ErrInvalid, "smoke"},
		{"time-out", client.Options{Executor: executor.Address, Timeout: -1}, client.ErrInvalid, "-1"},
		{"secret", client.Options{Executor: executor.Address, SecretFile: wrong}, client.ErrCredential, "secret"},
		{"no secret", client.Options{Executor: executor.Address, SecretFile: "/does/not/exist"}, client.ErrCredential, "/does/not/exist"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, v := range []string{"RFAAS_MANAGER", "RFAAS_EXECUTOR", "RFAAS_PROVIDER", "RFAAS_ALLOW_PLAINTEXT"} {
				t.Setenv(v, "")
			}
			if c.options.SecretFile == "" {
				c.options.SecretFile = secret
			}
			began := time.Now()
			s, err := client.Connect(context.Background(), c.options)
			if err == nil {
				s.Close()
				t.Fatal("it connected")
			}
			if c.class != nil && !errors.Is(err, c.class) {
				t.Errorf("class of %q is not %v", err, c.class)
			}
			if !strings.Contains(err.Error(), c.names) {
				t.Errorf("%q does not name %q", err, c.names)
			}
			if d := time.Since(began); d > 5*time.Second {
				t.Errorf("it took %v", d)
			}
		})
	}
	t.Run("no device", func(t *testing.T) {
		s, err := client.Connect(t.Context(), client.Options{Executor: executor.Address, Provider: "verbs", SecretFile: secret})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		_, err = s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so")})
		if os.Getenv("RFAAS_REQUIRE_VERBS") == "" && (!errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "verbs")) {
			t.Errorf("verbs where there is none: %v", err)
		}
	})
}

// A client that opens and closes sessions leaves no goroutine and no descriptor, also after deaths and errors.
func TestNothingLeaks(t *testing.T) {
	w := newWorld(t)
	round := func() {
		s, err := client.Connect(t.Context(), client.Options{Executor: w.Address, SecretFile: w.secret, Provider: provider()})
		if err != nil {
			t.Fatal(err)
		}
		l, err := s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2})
		if err != nil {
			t.Fatal(err)
		}
		out := make([]byte, 8)
		if _, err := function(t, l, "echo").Invoke(t.Context(), u64(1), out); err != nil {
			t.Fatal(err)
		}
		if _, err := function(t, l, "crash").Invoke(t.Context(), nil, nil); !errors.Is(err, client.ErrConnection) {
			t.Fatal(err)
		}
		if _, err := l.Worker(1).Submit(t.Context(), function(t, l, "sleep_ns"), u64(2e8), 8); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Worker(0).Alloc(t.Context(), 4096); err != nil {
			t.Fatal(err)
		}
		s.Lease(t.Context(), client.LeaseOptions{Library: "/etc/passwd"})
		if err := s.Close(); err != nil { // releases the lease
			t.Fatal(err)
		}
	}
	count := func() (goroutines, fds int) {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(d)
	}
	round()
	g0, f0 := count()
	for range 5 {
		round()
	}
	testkit.Eventually(t, fmt.Sprintf("there are %d goroutines and %d descriptors again", g0, f0), func() bool {
		g, f := count()
		return g <= g0 && f <= f0
	})
}
