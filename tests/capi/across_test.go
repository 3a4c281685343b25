package capi

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// TestAcross leases workers of three executors by one call of a C program.
func TestAcross(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/across_test.c", append([]string{"-fsanitize=address,undefined"}, c11...)...)
	secret := filepath.Join(t.TempDir(), "secret")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	dir := t.TempDir()
	for i := range 3 {
		startProcess(t, secret, "--manager", manager, "--cache-awake", "0s", "--http-listen", fmt.Sprintf("unix:%s/%d", dir, i))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"), "3")
	cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		return // no claims
	}
	for i := range 3 {
		testkit.Eventually(t, "the claim of two workers is booked", func() bool {
			return testkit.Metric(t, fmt.Sprintf("%s/%d", dir, i), "rfaas_executor_claims_total") != "0"
		})
	}
}
