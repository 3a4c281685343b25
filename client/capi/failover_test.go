package main

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestRepeats makes idempotent calls whose workers die.
func TestRepeats(t *testing.T) {
	run(t, build(t, "gcc", "testdata/failover_test.c", c11...), built(t, "build/functions/echo.so"), "0")
}

// TestFailover kills, and then drains, the executor that a program's lease is on, again and again, with another one to go
// to: no call is lost, none is wrong, and at the end, with no executor left, calls end with an error that says so.
func TestFailover(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "drained": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			secret := filepath.Join(t.TempDir(), "secret")
			manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret)
			executors := map[string]*exec.Cmd{}
			more := func() {
				address, cmd, _ := startProcess(t, secret, "--manager", manager, "--cores", "1")
				executors[address] = cmd
			}
			more()
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, build(t, "gcc", "testdata/failover_test.c", c11...), built(t, "build/functions/echo.so"), "4")
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
			moves := 0
			for s := bufio.NewScanner(stdout); s.Scan(); {
				t.Log(s.Text())
				address, ok := strings.CutPrefix(s.Text(), "on ")
				if !ok {
					moves++
					continue
				}
				victim := executors[address]
				if victim == nil {
					t.Errorf("the program is on %q, which is none of %v", address, executors)
					break
				}
				if moves < 4 {
					more() // there is somewhere to go before the present one is lost
				}
				victim.Process.Signal(signal)
				delete(executors, address)
			}
			if err := cmd.Wait(); err != nil || moves != 4 {
				t.Errorf("%d moves, %v\n%s", moves, err, stderr.String())
			}
		})
	}
}
