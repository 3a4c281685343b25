package capi

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// compileFlag has the tests compile their programs into RFAAS_TEST_PROGRAMS, and end where they would start a daemon. A later run with
// that variable, in an emulated machine, where compilers are slow, takes them from there.
var compileFlag = flag.Bool("compile", false, "only compile programs, into the empty directory RFAAS_TEST_PROGRAMS")

// compile runs a compiler, unless the result is there, and returns the path of it.
func compile(t *testing.T, compiler, source string, flags ...string) string {
	t.Helper()
	all := strings.Join(slices.Concat([]string{compiler}, flags), "\x00")
	dir, err := compiled()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, fmt.Sprintf("%s-%.8x", filepath.Base(source), sha256.Sum256([]byte(all))))
	if _, err := os.Stat(program); err == nil {
		return program
	} else if os.Getenv("RFAAS_TEST_PROGRAMS") != "" && !*compileFlag {
		t.Fatalf("%s with %s %v is not among the programs that -compile made: %v", source, compiler, flags, err)
	}
	if _, err := exec.LookPath(compiler); err != nil {
		t.Fatalf("%s is missing: run make deps", compiler)
	}
	args := append([]string{"-o", program, source}, flags...)
	if strings.HasSuffix(source, ".f90") {
		args = append(args, "-J", t.TempDir()) // where modules of its own go
	}
	if out, err := exec.Command(compiler, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", compiler, err, out)
	}
	return program
}

// build compiles a program of testdata and returns its path.
func build(t *testing.T, compiler, source string, flags ...string) string {
	t.Helper()
	include, lib := filepath.Dir(built(t, "include/rfaas.h")), filepath.Dir(built(t, "lib/librfaas.so"))
	return compile(t, compiler, source, slices.Concat([]string{"-O1", "-g", "-Wall", "-Wextra", "-Werror"}, flags,
		[]string{"-I", include, "-L", lib, "-lrfaas", "-pthread", "-Wl,-rpath," + lib})...)
}

// functions compiles testdata/functions.c.
func functions(t *testing.T) string {
	t.Helper()
	return library(t, "testdata/functions.c", "-O2", "-Wall", "-Werror")
}

func library(t *testing.T, source string, flags ...string) string {
	t.Helper()
	return compile(t, "gcc", source, append([]string{"-shared", "-fPIC", "-I", filepath.Dir(built(t, "include/rfaas_function.h"))}, flags...)...)
}

// run runs a program with an executor of its own and returns what it printed.
func run(t *testing.T, line ...string) string {
	t.Helper()
	return runWith(t, nil, line...)
}

// runWith is run with additional arguments for the executor.
func runWith(t *testing.T, executor []string, line ...string) string {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env = append(os.Environ(), "TEST_LIBRARY="+functions(t), "RFAAS_EXECUTOR="+startExecutor(t, secret, executor...), "RFAAS_SECRET_FILE="+secret, "RFAAS_MANAGER=", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return string(out)
}

var c11 = []string{"-std=gnu11", "-D_GNU_SOURCE"}

// checkedC returns the options of a C program that runs only once: with sanitizers, which find all that a plain program finds. In the virtual
// machine, where they are too slow, it runs without them.
func checkedC() []string {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		return c11
	}
	return slices.Concat(c11, []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"})
}

// TestCProgram runs the programs of testdata against lib/librfaas.so, alone and as MPI programs.
func TestCProgram(t *testing.T) {
	for _, c := range []struct {
		name, compiler string
		flags, run     []string
	}{
		{"plain", "gcc", nil, nil},
		{"sanitized", "gcc", []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}, nil},
		{"openmpi", "mpicc.openmpi", []string{"-DWITH_MPI"}, []string{"mpirun.openmpi", "--bind-to", "none", "-n", "1"}},
		{"mpich", "mpicc.mpich", []string{"-DWITH_MPI"}, []string{"mpirun.mpich", "-n", "1"}},
	} {
		for _, source := range []string{"api_test.c", "batch_test.c", "event_test.c"} {
			t.Run(c.name+"/"+source, func(t *testing.T) {
				verbs := os.Getenv("RFAAS_REQUIRE_VERBS") != ""
				if c.run != nil && source != "api_test.c" || c.name == "plain" && (!verbs || source == "event_test.c") {
					t.Skip("the sanitized program tests the same")
				}
				if verbs && c.name != "plain" {
					t.Skip("only the program differs, or it runs on verbs across machines (make test-twovm)")
				}
				program := build(t, c.compiler, "testdata/"+source, slices.Concat(c11, c.flags)...)
				run(t, slices.Concat(c.run, []string{program, built(t, "build/functions/echo.so")})...)
			})
		}
	}
}

// crosses skips a test in the virtual machine if its program, or the Go test of the same service, runs on verbs across two
// machines.
func crosses(t *testing.T) {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("the same runs on verbs across machines (make test-twovm)")
	}
}

// TestCxxProgram compiles the test of rfaas.hpp as the oldest C++ with optimisation, and runs it as a newer one with coroutines and sanitizers.
func TestCxxProgram(t *testing.T) {
	crosses(t)
	built(t, "include/rfaas.hpp")
	build(t, "g++", "testdata/cpp_test.cpp", "-std=c++17")
	run(t, build(t, "g++", "testdata/cpp_test.cpp", "-std=c++20", "-O0", "-fsanitize=address,undefined"), built(t, "build/functions/echo.so"))
}

// TestFortranProgram runs the test of the Fortran module.
func TestFortranProgram(t *testing.T) {
	crosses(t)
	run(t, build(t, "gfortran", "testdata/fortran_test.f90", "-std=f2018", "-L", filepath.Dir(built(t, "lib/librfaas_fortran.a")), "-lrfaas_fortran"),
		built(t, "build/functions/echo.so"))
}
