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
	program := build(t, "gcc", "testdata/lost_test.c", append([]string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}, c11...)...)
	secret := filepath.Join(t.TempDir(), "secret")
	address, daemon, _ := startProcess(t, secret)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), strconv.Itoa(daemon.Process.Pid))
	cmd.Env = append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
