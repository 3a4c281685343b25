package client_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// ofiWorld starts an executor that offers ofi and tcp, and no pooled workers.
func ofiWorld(t *testing.T, args ...string) *world {
	t.Helper()
	if far != "" || provider() == "verbs" {
		t.Skip("the subject is provider ofi on loopback")
	}
	w := &world{secret: secretFile(t)}
	w.daemon = start(t, "bin/executor", w.secret, append([]string{"--cores", "2", "--providers", "ofi,tcp", "--grace", "2s"}, args...)...)
	return w
}

// Calls of all sizes and the replacement of a dead worker work over libfabric's tcp.
func TestOFI(t *testing.T) {
	w := ofiWorld(t)
	w.session = w.connect(t, client.Options{Executor: w.Address, Provider: "ofi"})
	l := w.lease(t, client.LeaseOptions{Workers: 2, Bulk: 8 << 20})
	if l.Provider() != "ofi" {
		t.Errorf("provider %q, want ofi", l.Provider())
	}
	echo, crash, pid := function(t, l, "echo"), function(t, l, "crash"), l.Worker(0).PID()
	call := func(when string) {
		for _, size := range []int{0, 8, 255, 257, 4096, 100_000, 4 << 20} {
			in, out := bytes.Repeat([]byte{byte(size), 7}, (size+1)/2)[:size], make([]byte, size)
			for i := range 2 {
				if n, err := l.Worker(i).Invoke(t.Context(), echo, in, out); err != nil || !bytes.Equal(out[:n], in) {
					t.Fatalf("%s: %d bytes by worker %d: %d bytes, %v", when, size, i, n, err)
				}
			}
		}
	}
	call("at first")
	var e *client.Error
	if _, err := l.Worker(0).Invoke(t.Context(), crash, nil, make([]byte, 8)); !errors.As(err, &e) || e.Status != client.StatusWorkerDied || !e.Started {
		t.Fatalf("crash: %v, want a worker that died", err)
	}
	call("after a death")
	if l.Replaced() != 1 || l.Worker(0).PID() == pid {
		t.Errorf("%d workers were replaced, want 1", l.Replaced())
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A worker on ofi over tcp may use what libfabric needs, which is sendmsg and accept on open sockets, and no more.
func TestOFISandbox(t *testing.T) {
	w := ofiWorld(t, "--sandbox", "on")
	w.session = w.connect(t, client.Options{Executor: w.Address, Provider: "ofi"})
	l := w.lease(t, client.LeaseOptions{Library: hostile(t)})
	const allowed = "syscall(SYS_sendmsg, 1, page, 0): Socket operation on non-socket; syscall(SYS_accept4, 1, NULL, NULL, 0): Socket operation on non-socket; "
	if got := try(t, l, "calls", ""); got != allowed {
		t.Errorf("calls: %q, want %q", got, allowed)
	}
	if got := try(t, l, "network", ""); got != "no pairs of sockets: Operation not permitted; " { // of datagram sockets
		t.Errorf("network: %q", got)
	}
	for _, name := range []string{"works", "arguments"} {
		if got := try(t, l, name, ""); got != "" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// auto chooses ofi if the client has a provider of libfabric configured and the data need not be encrypted.
func TestOFIByAuto(t *testing.T) {
	w := ofiWorld(t)
	for _, c := range []struct{ ofi, encryption, want string }{{"", "on", "tcp"}, {"tcp", "on", "ofi"}, {"tcp", "require", "tcp"}} {
		// In a separate process, because the agent reads the environment only once.
		cmd := exec.CommandContext(t.Context(), built(t, "bin/rfaas"), "invoke", built(t, "build/functions/echo.so"), "echo", "--json")
		cmd.Env = append(os.Environ(), "RFAAS_SECRET_FILE="+w.secret, "RFAAS_EXECUTOR="+w.Address, "RFAAS_MANAGER=", "RFAAS_PROVIDER=auto",
			"RFAAS_OFI_PROVIDER="+c.ofi, "RFAAS_DATA_ENCRYPTION="+c.encryption)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), `"provider": "`+c.want+`"`) {
			t.Errorf("RFAAS_OFI_PROVIDER=%q, data encryption %s: want %s: %v, %s", c.ofi, c.encryption, c.want, err, out)
		}
	}
	s, err := client.Connect(context.Background(), client.Options{Executor: w.Address, SecretFile: w.secret, Provider: "ofi", DataEncryption: "require"})
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "provider ofi does not encrypt") {
		t.Errorf("ofi with required encryption: %v", err)
	}
}

// Errors of a client or an executor that cannot use ofi.
func TestOFIMissing(t *testing.T) {
	w := ofiWorld(t)
	const library = "RFAAS_LIBFABRIC=libfabric-that-is-not-there.so.1"
	invoke := func(env ...string) []string {
		return append([]string{"RFAAS_SECRET_FILE=" + w.secret, "RFAAS_EXECUTOR=" + w.Address, "RFAAS_MANAGER=", "RFAAS_PROVIDER=ofi"}, env...)
	}
	client := []string{"bin/rfaas", "invoke", built(t, "build/functions/echo.so"), "echo"}
	executor := []string{"bin/executor", "--listen", "127.0.0.1:0", "--secret-file", w.secret, "--providers", "ofi"}
	for name, c := range map[string]struct {
		args, env []string
		want      string
	}{
		"client, no libfabric":    {client, invoke(library), "libfabric-that-is-not-there.so.1"},
		"client, its package":     {client, invoke(library), "install libfabric1 (Debian) or libfabric (Red Hat)"},
		"client, other provider":  {client, invoke("RFAAS_OFI_PROVIDER=sockets"), `ofi-provider "sockets" is not one of tcp, cxi`},
		"client, no such adapter": {client, invoke("RFAAS_OFI_PROVIDER=cxi", "RFAAS_DATA_ENCRYPTION=off"), "libfabric's provider cxi"},
		"client, bad address":     {client, invoke("RFAAS_OFI_DEVICE=localhost"), `"localhost" is not a numeric`},
		"client, data encryption": {client, invoke("RFAAS_OFI_DEVICE=192.0.2.1"), "does not encrypt"},
		"executor, no libfabric":  {executor, []string{library}, "providers: ofi was asked for: open ofi: unsupported: ofi needs libfabric-that-is-not-there.so.1"},
		"executor, no adapter":    {append(executor, "--ofi-provider", "cxi", "--data-encryption", "off", "--sandbox", "off"), nil, "libfabric's provider cxi"},
		"executor, sandbox":       {append(executor, "--ofi-provider", "cxi", "--data-encryption", "off", "--sandbox", "on"), nil, "set ofi-provider to tcp, or sandbox to off"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), built(t, c.args[0]), c.args[1:]...)
			cmd.Env = append(os.Environ(), c.env...)
			out, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(out), c.want) {
				t.Errorf("%v, want %q in:\n%s", err, c.want, out)
			}
		})
	}
}
