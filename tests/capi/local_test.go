package capi

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestLocal runs functions in the calling process because all cores are taken.
func TestLocal(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("functions in the caller are the same on every fabric, and compilers are slow there")
	}
	run(t, build(t, "gcc", "testdata/local_test.c", checkedC()...), built(t, "build/functions/echo.so"), "busy")
}

// TestLocalUntilThereIsAnother runs them there while there is no executor: before there is one, and between the death of one
// and the start of the next, to which the calls move.
func TestLocalUntilThereIsAnother(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("make test-twovm shows there how a lease moves")
	}
	secret := filepath.Join(t.TempDir(), "secret")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret)
	var victim *exec.Cmd
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, build(t, "gcc", "testdata/local_test.c", c11...), built(t, "build/functions/echo.so"), "lost")
	cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said []string
	for s := bufio.NewScanner(stdout); s.Scan(); {
		said = append(said, s.Text())
		if s.Text() == "here" {
			_, victim, _ = startProcess(t, secret, "--manager", manager)
		} else if len(said) == 2 {
			victim.Process.Signal(syscall.SIGKILL)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, stderr.String())
	}
	if len(said) != 4 || said[0] != "here" || said[1] == "here" || said[2] != "here" || said[3] == "here" {
		t.Errorf("the calls ran %q", said)
	}
}
