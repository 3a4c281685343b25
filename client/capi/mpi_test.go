package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var mpis = []struct {
	name, compiler, cxx string
	run                 []string
}{
	{"openmpi", "mpicc.openmpi", "mpicxx.openmpi", []string{"mpirun.openmpi", "--bind-to", "none"}},
	{"mpich", "mpicc.mpich", "mpicxx.mpich", []string{"mpirun.mpich"}},
}

var mpiEnvironment = []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
	"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1"}

// TestMPILeases gives all ranks of a communicator leases in one call (rfaas_mpi.h), as many as there are cores on three
// executors: none is refused, so everybody was told another place.
func TestMPILeases(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("placement does not depend on the fabric, and two MPIs are slow there")
	}
	for _, mpi := range mpis {
		t.Run(mpi.name, func(t *testing.T) {
			secret := filepath.Join(t.TempDir(), "secret")
			manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret)
			cores := map[string]int{}
			for _, n := range []string{"2", "1", "1"} {
				address, _, _ := startProcess(t, secret, "--manager", manager, "--cores", n)
				cores[address] = int(n[0] - '0')
			}
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			line := append(slices.Clone(mpi.run), "-n", "4", build(t, mpi.compiler, "testdata/mpi_lease_test.c", c11...), built(t, "build/functions/echo.so"))
			cmd := exec.CommandContext(ctx, line[0], line[1:]...)
			cmd.Env = append(append(os.Environ(), mpiEnvironment...), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			got := map[string]int{}
			for line := range strings.Lines(string(out)) {
				if _, at, ok := strings.Cut(strings.TrimSpace(line), " on "); ok {
					got[at]++
				}
			}
			for at, n := range cores {
				if got[at] != 2*n { // twice: without and with failover
					t.Errorf("executor %s of %d cores has taken %d ranks in two rounds", at, n, got[at])
				}
			}
		})
	}
}

// The header is C++ too.
func TestMPIHeaderInCxx(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("a compiler's business")
	}
	source := filepath.Join(t.TempDir(), "header.cpp")
	if err := os.WriteFile(source, []byte("#include <rfaas_mpi.h>\nint main() { return rfaas_mpi_lease_open == nullptr; }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, mpi := range mpis {
		build(t, mpi.cxx, source, "-std=c++17", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX", "-Wno-address")
	}
}
