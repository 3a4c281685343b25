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

// TestLocalUntilThereIsAnother runs them there while there is no executor: before anything listens, and between the death of one executor and
// the start of the next. Calls move to each executor.
func TestLocalUntilThereIsAnother(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("make test-twovm shows there how a lease moves")
	}
	dir := t.TempDir()
	secret, manager := filepath.Join(dir, "secret"), "unix:"+filepath.Join(dir, "manager")
	var victim *exec.Cmd
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, build(t, "gcc", "testdata/local_test.c", c11...), built(t, "build/functions/echo.so"), "lost")
	cmd.Env = append(os.Environ(), "TEST_LIBRARY="+library(t, "testdata/numbers.c"), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := 0
	for s := bufio.NewScanner(stdout); s.Scan(); said++ {
		switch said {
		case 0:
			startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--listen", manager)
			_, victim, _ = startProcess(t, secret, "--manager", manager)
		case 1:
			victim.Process.Signal(syscall.SIGKILL)
		case 2:
			startProcess(t, secret, "--manager", manager)
		}
	}
	if err := cmd.Wait(); err != nil || said != 3 {
		t.Errorf("%v after %d lines\n%s", err, said, stderr.String())
	}
}

// TestLocalAlone runs them there because nothing is configured, or because no agent can be started.
func TestLocalAlone(t *testing.T) {
	crosses(t)
	program, functions := build(t, "gcc", "testdata/local_test.c", checkedC()...), library(t, "testdata/numbers.c")
	for reason, env := range map[string][]string{
		"no address":     nil,
		"/there/is/none": {"RFAAS_AGENT=/there/is/none", "RFAAS_AGENT_SOCKET=" + filepath.Join(t.TempDir(), "agent.sock")},
	} {
		cmd := exec.CommandContext(t.Context(), program, built(t, "build/functions/echo.so"), reason)
		cmd.Env = append(append(os.Environ(), "TEST_LIBRARY="+functions, "RFAAS_MANAGER=", "RFAAS_EXECUTOR="), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", reason, err, out)
		}
	}
}
