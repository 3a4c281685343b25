package capi

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// A drain under the load of a C program loses no call and is over long before the grace, although one of the program's
// leases is held by a thread that makes no call.
func TestDrainOfACProgram(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/drain_test.c", c11...)
	secret := filepath.Join(t.TempDir(), "secret")
	address, daemon, ended := startProcess(t, secret, "--grace", "30s", "--share-cores", "2")
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"))
	cmd.Env = append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "loaded" {
		t.Fatalf("the program said %q; errors: %s", lines.Text(), errs.String())
	}
	conn, err := control.Dial(address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	began := time.Now()
	if _, err := control.NewExecutorClient(conn).Drain(ctx, &control.DrainRequest{Reason: "maintenance"}); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
		t.Log(lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, errs.String())
	}
	<-ended
	if code, took := daemon.ProcessState.ExitCode(), time.Since(began); code != 0 || took > 15*time.Second {
		t.Errorf("the executor exited with %d after %v", code, took)
	}
}
