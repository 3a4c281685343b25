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
	name, c, cxx, fortran string
	run                   []string
}{
	{"openmpi", "mpicc.openmpi", "mpicxx.openmpi", "mpif90.openmpi", []string{"mpirun.openmpi", "--bind-to", "none"}},
	{"mpich", "mpicc.mpich", "mpicxx.mpich", "mpif90.mpich", []string{"mpirun.mpich"}},
}

// cxxMPI are the flags of a C++ program with MPI, whose own C++ bindings it leaves out.
var cxxMPI = []string{"-std=c++17", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX"}

var mpiEnvironment = []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
	"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1"}

// TestMPILeases gives all ranks of a communicator leases in one call, in C, C++, Fortran and Go. There are as many ranks as cores on three
// executors, and no executor refuses, so every rank was sent to another core.
func TestMPILeases(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("placement does not depend on the fabric, and two MPIs are slow there")
	}
	for _, mpi := range mpis {
		if mpi.name == "openmpi" { // mpi.TestUnderMPI tests the Go package with both
			t.Run(mpi.name+"/go", func(t *testing.T) {
				program := filepath.Join(t.TempDir(), "mpilease")
				if out, err := exec.Command("go", "build", "-o", program, "./testdata/mpilease").CombinedOutput(); err != nil {
					t.Fatalf("go build: %v\n%s", err, out)
				}
				leaseForRanks(t, mpi.run, program)
			})
		}
		t.Run(mpi.name+"/c", func(t *testing.T) {
			leaseForRanks(t, mpi.run, build(t, mpi.c, "testdata/mpi_lease_test.c", c11...))
		})
		t.Run(mpi.name+"/cxx", func(t *testing.T) {
			leaseForRanks(t, mpi.run, build(t, mpi.cxx, "testdata/mpi_lease_test.cpp", cxxMPI...))
		})
		t.Run(mpi.name+"/fortran", func(t *testing.T) {
			// The program includes the module rfaas_mpi.
			object := build(t, mpi.c, root+"/client/mpi/rfaas_mpi_fortran.c", "-c")
			flags := []string{"-I", root + "/client/mpi", object,
				"-L", filepath.Dir(built(t, "lib/librfaas_fortran.a")), "-lrfaas_fortran"}
			leaseForRanks(t, mpi.run, build(t, mpi.fortran, "testdata/mpi_lease_test.f90", flags...))
		})
	}
}

// leaseForRanks runs a program with four ranks and three executors of four cores together.
func leaseForRanks(t *testing.T, mpirun []string, program string) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret)
	cores := map[string]int{}
	for _, n := range []string{"2", "1", "1"} {
		address, _, _ := startProcess(t, secret, "--manager", manager, "--cores", n)
		cores[address] = int(n[0] - '0')
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	line := append(slices.Clone(mpirun), "-n", "4", program, built(t, "build/functions/echo.so"))
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
		build(t, mpi.cxx, source, append(slices.Clone(cxxMPI), "-Wno-address")...)
	}
}
