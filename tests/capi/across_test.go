package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
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
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), "3")
	cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
