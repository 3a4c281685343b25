package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestInitCalls runs init_test.c with one executor, and with a resource manager and two executors.
func TestInitCalls(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/init_test.c", append([]string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}, c11...)...)
	functions := library(t, "../../client/testdata/stateful.c", "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread")
	t.Run("executor", func(t *testing.T) { run(t, program, functions) })
	t.Run("manager", func(t *testing.T) {
		secret := filepath.Join(t.TempDir(), "secret")
		manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
		for range 2 {
			startProcess(t, secret, "--manager", manager, "--cores", "1")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, functions)
		cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
}
