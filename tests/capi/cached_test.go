package capi

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

// TestCachedConnections takes leases on connections that released ones have left.
func TestCachedConnections(t *testing.T) {
	program := build(t, "gcc", "testdata/kept_test.c", c11...)
	// No new queue pair, by the statistics and by the data plane's own count, and at most half of the first lease's control time.
	t.Run("reuse", func(t *testing.T) {
		at := symbols(t, "rfaas_invoke", "dp_qps_made")
		f := figures(t, program, built(t, "build/functions/echo.so"), fmt.Sprintf("reuse:%d", int64(at["dp_qps_made"]-at["rfaas_invoke"])))
		t.Logf("figure: cached.control_share = %.3f", f["cached_us"]/f["first_us"])
		if f["cached_us"] <= 0 || f["cached_us"] > f["first_us"]/2 {
			t.Errorf("the first lease took %.1f us, one on its connections %.1f us", f["first_us"], f["cached_us"])
		}
	})
	// Two threads of a process take leases in turn, on each other's connections.
	t.Run("threads", func(t *testing.T) { t.Log(run(t, program, built(t, "build/functions/echo.so"), "threads")) })
	// A session keeps none, or the latest two, and none for ever.
	t.Run("limits", func(t *testing.T) {
		if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
			t.Skip("numbers and times are the same on every fabric")
		}
		limited(t, program)
	})
	t.Run("restart", func(t *testing.T) { restarted(t, program) })
}

// limited runs the program's "limits" with an executor that keeps nothing for long.
func limited(t *testing.T, program string) {
	secret := filepath.Join(t.TempDir(), "secret")
	address, _, _ := startProcess(t, secret, "--share-cores", "4", "--cache-time", "2s")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), "limits")
	cmd.Env = append(os.Environ(), "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// restarted kills the executor between two leases and starts another one at its address.
func restarted(t *testing.T, program string) {
	secret := filepath.Join(t.TempDir(), "secret")
	address, executor, ended := startProcess(t, secret)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), "restart")
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
