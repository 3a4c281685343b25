package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// After its executor was killed, a lease has ended: its calls say so, and the event's text begins with "lost".
func TestExecutorKilled(t *testing.T) {
	crosses(t)
	secret := filepath.Join(t.TempDir(), "secret")
	address, daemon, _ := startProcess(t, secret)
	runKilling(t, "testdata/lost_test.c", daemon, "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
}

// A lease with RFAAS_LEASE_LOCAL is opened although its executor is killed during the init call.
func TestExecutorKilledDuringInitCall(t *testing.T) {
	crosses(t)
	secret := filepath.Join(t.TempDir(), "secret")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	_, daemon, _ := startProcess(t, secret, "--manager", manager)
	runKilling(t, "testdata/lost_init_test.c", daemon, "RFAAS_EXECUTOR=", "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER="+manager)
}

// runKilling runs a program that kills the executor.
func runKilling(t *testing.T, source string, executor *exec.Cmd, env ...string) {
	t.Helper()
	program := build(t, "gcc", source, append([]string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}, c11...)...)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), strconv.Itoa(executor.Process.Pid))
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
