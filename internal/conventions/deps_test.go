package conventions

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// `make run` works with an MPI that is not from a package, for example from a module. If there is no MPI, it asks for one.
func TestRunNeedsAnyMPI(t *testing.T) {
	if !strings.Contains(source(t, "Makefile"), "scripts/deps run\n") {
		t.Error("make run does not call scripts/deps run")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name := range strings.FieldsSeq("bash env sed comm sort cat dirname head go") {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/bash\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// A Debian with every package except those of MPI and of compilers for other languages.
	write("dpkg-query", `for p; do case $p in -*|*mpi*|g++|gfortran|cmake|ucx*) ;; *) echo "installed $p" ;; esac; done`)
	cgo := "" // without a compiler, as here, go says that cgo is off
	check := func(mpi string, want ...string) {
		t.Helper()
		cmd := exec.Command(filepath.Join(root, "scripts/deps"), "--check", "run")
		cmd.Env = append(os.Environ(), "PATH="+dir, "CGO_ENABLED="+cgo, "MPICC=", "MPIRUN=")
		out, err := cmd.CombinedOutput()
		if (err == nil) != (len(want) == 0) {
			t.Errorf("%s: %v\n%s", mpi, err, out)
		}
		for _, text := range want {
			if !strings.Contains(string(out), text) {
				t.Errorf("%s: output has no %q:\n%s", mpi, text, out)
			}
		}
		if strings.Contains(string(out), "mpich") || strings.Contains(string(out), "cmake") {
			t.Errorf("%s: asks for more than an MPI:\n%s", mpi, out)
		}
	}
	check("no MPI", "missing: libopenmpi-dev openmpi-bin")
	write("mpirun", "")
	write("mpicc", "exit 1")
	check("an mpicc without mpi.h", "libopenmpi-dev")
	write("mpicc", "")
	check("an MPI in PATH")
	write("gcc", "")
	cgo = "0"
	check("cgo is turned off", "CGO_ENABLED is 0")
	cgo = ""
	write("dpkg-query", `for p; do echo "installed $p"; done`)
	write("mpicc", "exit 1")
	check("packages whose module is not loaded", "load the module of an MPI")
}

// Without the right to make network namespaces, the demo with two nodes says what it needs.
func TestTwoNodesNeedNamespaces(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "unshare"), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("../../scripts/demo")
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "TWO_NODES=1", "TMPDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	want := "CAP_SYS_ADMIN and CAP_NET_ADMIN"
	if os.Geteuid() != 0 {
		want = "run make demo-two-nodes as root"
	}
	if err == nil || !strings.Contains(string(out), want) {
		t.Errorf("%v, want an error with %q:\n%s", err, want, out)
	}
}
