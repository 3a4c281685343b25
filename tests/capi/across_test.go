package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// TestAcross leases workers of three executors by one call of a C program.
func TestAcross(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/across_test.c", append([]string{"-fsanitize=address,undefined"}, c11...)...)
	secret := filepath.Join(t.TempDir(), "secret")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	for range 3 {
		startProcess(t, secret, "--manager", manager)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	conn, err := control.Dial(manager, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for n := 0; n < 3; time.Sleep(5 * time.Millisecond) { // ctx bounds it
		r, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		n = len(r.GetExecutors())
	}
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), "3")
	cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
