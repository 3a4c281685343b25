package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestBadInput makes the mistakes that a program can make. Each gives a named error, whose text says what is wrong, and no crash.
func TestBadInput(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("refused before the fabric hears of it; api_test.c does the main part of it there")
	}
	program := build(t, "gcc", "testdata/badinput_test.c", checkedC()...)
	for _, mistake := range []string{"NULLs", "freed-requests", "waiting-twice", "unregistered-buffers", "after-finalize", "another-process"} {
		t.Run(mistake, func(t *testing.T) {
			run(t, program, built(t, "build/functions/echo.so"), mistake)
		})
	}
}

// TestForgetsFinalize has programs end without rfaas_finalize while the library is at work: they end at once, well, without a
// word, and their cores are free for the next.
func TestForgetsFinalize(t *testing.T) {
	plain := build(t, "gcc", "testdata/forgets.c", c11...)
	programs := map[string][]string{"exit": {plain}}
	if os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
		programs["return"], programs["other"] = []string{plain}, []string{plain}
		for _, mpi := range mpis {
			programs["return "+mpi.name] = append(slices.Clone(mpi.run), "-n", "1", build(t, mpi.c, "testdata/forgets.c", append(slices.Clone(c11), "-DWITH_MPI")...))
		}
	}
	secret := filepath.Join(t.TempDir(), "secret")
	address := startExecutor(t, secret)
	for name, line := range programs {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			how := name
			if len(line) > 1 {
				how = "return"
			}
			line = append(line, built(t, "build/functions/echo.so"), how)
			cmd := exec.CommandContext(ctx, line[0], line[1:]...)
			cmd.Env = append(append(os.Environ(), mpiEnvironment...), "RFAAS_EXECUTOR="+address, "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=")
			if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
