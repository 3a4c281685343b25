package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Every function of rfaas.h can be had from C++ and from Fortran.
func TestWrappersAreComplete(t *testing.T) {
	read := func(path string) string {
		b, err := os.ReadFile(root + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	header, cxx, fortran := read("/internal/dataplane/rfaas.h"), read("/client/cpp/rfaas.hpp"), read("/client/fortran/rfaas.f90")
	cxx = regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(cxx, "")
	n := 0
	for _, f := range regexp.MustCompile(`(?s)RFAAS_API [^;]*?(rfaas_\w+)\(`).FindAllStringSubmatch(header, -1) {
		n++
		if !strings.Contains(cxx, f[1]+"(") {
			t.Errorf("rfaas.hpp does not call %s", f[1])
		}
		if !strings.Contains(fortran, "name='"+f[1]+"'") {
			t.Errorf("rfaas.f90 does not bind %s", f[1])
		}
		if public := regexp.MustCompile(`(?s)public :: [^!]*?\b` + f[1] + `\b`); !public.MatchString(fortran) {
			t.Errorf("rfaas.f90 does not offer %s", f[1])
		}
	}
	if n < 30 {
		t.Errorf("only %d functions were found", n)
	}
}

// TestPlaces runs what needs a resource manager in C++ and in Fortran: places, leases across executors, what happens to executors.
func TestPlaces(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("placement does not depend on the fabric, and compilers are slow there")
	}
	for _, c := range []struct{ compiler, source string }{{"g++", "testdata/places_test.cpp"}, {"gfortran", "testdata/places_test.f90"}} {
		t.Run(c.compiler, func(t *testing.T) {
			flags := []string{"-std=c++17", "-fsanitize=address,undefined"}
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
