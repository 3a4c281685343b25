package capi

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestChanges has a C program hear of executors that come, die and leave, over a restart of the manager.
func TestChanges(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/changes_test.c", append([]string{"-fsanitize=address,undefined"}, c11...)...)
	dir := t.TempDir()
	secret, address := filepath.Join(dir, "secret"), "unix:"+filepath.Join(dir, "m")
	manager := func() (*exec.Cmd, <-chan struct{}) {
		_, cmd, done := startDaemon(t, "bin/resource-manager", "--listen", address, "--secret-file", secret, "--heartbeat", "50ms", "--executors", "64")
		return cmd, done
	}
	m, ended := manager()
	a, first, _ := startProcess(t, secret, "--manager", address, "--cores", "1")
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "")
	cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	want := func(text string) {
		t.Helper()
		for lines.Scan() {
			if lines.Text() == text {
				return
			}
		}
		t.Fatalf("the program ended before %q\n%s", text, stderr.String())
	}
	want("open " + a)
	first.Process.Kill()
	want("silent " + a)
	m.Process.Kill()
	<-ended
	manager()
	b, second, _ := startProcess(t, secret, "--manager", address, "--cores", "1")
	want("open " + b)
	second.Process.Signal(syscall.SIGTERM)
	want("left " + b)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, stderr.String())
	}
}
