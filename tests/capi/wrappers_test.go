package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestPlaces runs what needs a resource manager in C++ and in Fortran: places, leases across executors, what happens to executors.
func TestPlaces(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("placement does not depend on the fabric, and compilers are slow there")
	}
	for _, c := range []struct{ compiler, source string }{{"g++", "testdata/places_test.cpp"}, {"gfortran", "testdata/places_test.f90"}} {
		t.Run(c.compiler, func(t *testing.T) {
			flags := []string{"-std=c++17", "-O0", "-fsanitize=address,undefined"}
			if c.compiler == "gfortran" {
				flags = []string{"-std=f2018", "-L", filepath.Dir(built(t, "lib/librfaas_fortran.a")), "-lrfaas_fortran"}
			}
			program := build(t, c.compiler, c.source, flags...)
			secret := filepath.Join(t.TempDir(), "secret")
			manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
			for range 2 {
				startProcess(t, secret, "--manager", manager)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, program, built(t, "build/functions/echo.so"))
			cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
