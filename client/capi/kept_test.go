package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestCachedConnections takes leases on connections that released ones have left: no new queue pair, by the statistics and by the
// data plane's own count, and at most half of the first lease's control time.
func TestCachedConnections(t *testing.T) {
	at := symbols(t, "rfaas_invoke", "dp_qps_made")
	f := figures(t, build(t, "gcc", "testdata/kept_test.c", c11...), built(t, "build/functions/echo.so"),
		fmt.Sprintf("reuse:%d", int64(at["dp_qps_made"]-at["rfaas_invoke"])))
	if f["cached_us"] <= 0 || f["cached_us"] > f["first_us"]/2 {
		t.Errorf("the first lease took %.1f us, one on its connections %.1f us", f["first_us"], f["cached_us"])
	}
}

// TestCachedConnectionsOfThreads has two threads of a process take leases in turn, on each other's connections.
func TestCachedConnectionsOfThreads(t *testing.T) {
	t.Log(run(t, build(t, "gcc", "testdata/kept_test.c", c11...), built(t, "build/functions/echo.so"), "threads"))
}

// with runs a program with an executor that was started with these arguments.
func with(t *testing.T, arguments []string, line ...string) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	address, _, _ := startProcess(t, secret, arguments...)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env = append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestCachedConnectionsAreLimited has a session keep none, the latest two, and none for ever.
func TestCachedConnectionsAreLimited(t *testing.T) {
	with(t, []string{"--share-cores", "4", "--keep-time", "1s"}, build(t, "gcc", "testdata/kept_test.c", c11...), built(t, "build/functions/echo.so"), "limits")
}

// TestCachedConnectionsOfAnEarlierExecutor kills the executor between two leases and starts another one at its address.
func TestCachedConnectionsOfAnEarlierExecutor(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	address, executor, ended := startProcess(t, secret)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, build(t, "gcc", "testdata/kept_test.c", c11...), built(t, "build/functions/echo.so"), "restart")
	cmd.Env = append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if lines := bufio.NewScanner(out); !lines.Scan() || lines.Text() != "released" {
		t.Errorf("the program said %q", lines.Text())
	}
	executor.Process.Signal(syscall.SIGKILL)
	<-ended
	if next, _, _ := startProcess(t, secret, "--listen", address); next != address {
		t.Errorf("the next executor is at %s, not %s", next, address)
	}
	if _, err := in.Write([]byte("go on\n")); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, stderr.String())
	}
}
