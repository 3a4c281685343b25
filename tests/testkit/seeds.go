package testkit

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// seedCompilers are the libraries of tests/seeds, each with its compiler and flags.
var seedCompilers = map[string][]string{
	"c_state.c":         {"gcc", "-std=gnu11", "-lm"},
	"cpp_state.cpp":     {"g++", "-O0", "-pthread"},
	"fortran_state.f90": {"gfortran", "-Wno-unused-dummy-argument", "-Wno-c-binding-type"},
	"openmp_state.c":    {"gcc", "-fopenmp"},
	"openblas_state.c":  {"gcc", "-lopenblas"},
	"libraries.c":       {"gcc", "-I/usr/include/libxml2", "-lfftw3", "-lgsl", "-lgslcblas", "-lxml2", "-lsqlite3", "-lm"},
	"refused.c":         {"gcc", "-pthread", "-lm"},
	"resume.c":          {"gcc"},
	"paged.c":           {"gcc", "-std=gnu11"},
}

// SeedStates are the libraries of tests/seeds with a function setup that prepares a state, and a function query that reports the state and changes it. They use
// C, C++, Fortran, OpenMP, OpenBLAS, FFTW, GSL, libxml2 and SQLite.
var SeedStates = []string{"c_state.c", "cpp_state.cpp", "fortran_state.f90", "openmp_state.c", "openblas_state.c", "libraries.c"}

// SeedLibrary compiles a library of tests/seeds, and returns its path. root is the repository. scripts/deps installs the compilers and libraries.
func SeedLibrary(t testing.TB, root, name string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), name+".so")
	with := seedCompilers[name]
	line := []string{with[0], "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I" + filepath.Join(root, "worker"), "-o", out, filepath.Join(root, "tests/seeds", name)}
	if with[0] == "gfortran" {
		line = append(line, "-J"+t.TempDir())
	}
	line = slices.Concat(line, with[1:])
	if text, err := exec.Command(line[0], line[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", line, err, text)
	}
	return out
}
