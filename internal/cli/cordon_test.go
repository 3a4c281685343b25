package cli

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// A cordoned node is shown as such and gets no leases. Afterwards it does.
func TestCordonNode(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	startDaemon(t, "bin/resource-manager", "--listen", "unix:"+in("m"), "--secret-file", in("secret"), "--heartbeat", "50ms", "--executors", "64")
	x := startDaemon(t, "bin/executor", "--listen", "unix:"+in("x"), "--secret-file", in("secret"), "--manager", "unix:"+in("m"), "--cores", "1", "--providers", "shm")
	eventually(t, "the executor is registered", func() bool { return strings.Contains(x.said(), "msg=registered") })
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		env := map[string]string{"RFAAS_SECRET_FILE": in("secret"), "RFAAS_MANAGER": "unix:" + in("m")}
		code := Run(context.Background(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
	node, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	state := func(want string) {
		t.Helper()
		eventually(t, "the node is "+want, func() bool {
			code, out, _ := run("executors")
			return code == 0 && strings.Contains(out, want)
		})
	}
	session, err := client.Connect(t.Context(), client.Options{Executor: "unix:" + in("x"), SecretFile: in("secret"), Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	lib := built(t, "build/functions/echo.so")
	if code, out, errs := run("cordon", node, "--reason", "a disk is replaced"); code != 0 || !strings.Contains(out, "is cordoned") {
		t.Fatalf("%d %s%s", code, out, errs)
	}
	state("cordoned")
	if _, err := session.Lease(t.Context(), client.LeaseOptions{Library: lib, Workers: 1}); !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), "a disk is replaced") {
		t.Errorf("a lease of a cordoned node: %v", err)
	}
	if err := x.cmd.Process.Signal(syscall.SIGUSR2); err != nil { // a handover keeps the cordon
		t.Fatal(err)
	}
	eventually(t, "the next program is registered", func() bool { return strings.Count(x.said(), "msg=registered") == 2 })
	state("cordoned")
	if code, out, errs := run("uncordon", node); code != 0 || !strings.Contains(out, "accepts leases") {
		t.Fatalf("%d %s%s", code, out, errs)
	}
	state("idle")
	l, err := session.Lease(t.Context(), client.LeaseOptions{Library: lib, Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if code, _, errs := run("cordon", "nowhere"); code != 1 || !strings.Contains(errs, "nowhere") {
		t.Errorf("%d %s", code, errs)
	}
	if code, _, _ := run("cordon"); code != 2 {
		t.Errorf("cordon without a node: %d", code)
	}
}
