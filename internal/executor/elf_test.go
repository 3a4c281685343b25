package executor

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/invoke"
)

// compile builds C source with flags and returns the file's bytes.
func compile(t testing.TB, source string, flags ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	cmd := exec.Command("cc", append([]string{"-o", out, "-x", "c", "-", "-x", "none"}, flags...)...)
	cmd.Stdin = strings.NewReader(source)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, text)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const functionsSource = `
#include <stdint.h>
#include <stdlib.h>
int variable = 1;
static uint32_t hidden_by_static(void) { return 1; }
__attribute__((visibility("hidden"))) uint32_t hidden(void) { return hidden_by_static(); }
__attribute__((weak)) uint32_t weak(void) { return 1; }
uint32_t zeta(void *a, uint32_t n, void *r) { return hidden(); }
uint32_t Alpha(void *a, uint32_t n, void *r) { return malloc(1) != 0; }
uint32_t alpha_2(void *a, uint32_t n, void *r) { return 0; }
uint32_t alpha(void *a, uint32_t n, void *r) { return 0; }
uint32_t _Z3fooPvjS_(void *a, uint32_t n, void *r) { return 0; }
`

func TestFunctionsOfALibrary(t *testing.T) {
	b := compile(t, functionsSource, "-shared", "-fPIC")
	names, err := inspect(bytes.NewReader(b), nil)
	if err != nil {
		t.Fatal(err)
	}
	// By bytes, capitals first: the index of each is its place.
	if got := fmt.Sprint(names); got != "[Alpha alpha alpha_2 zeta]" {
		t.Errorf("functions %v", got)
	}
}

// A library that needs nothing has no version section at all.
func TestLibraryWithoutDependencies(t *testing.T) {
	b := compile(t, "int f(void) { return 1; }", "-shared", "-fPIC", "-nostdlib")
	if names, err := inspect(bytes.NewReader(b), &glibc{2, 1}); err != nil || fmt.Sprint(names) != "[f]" {
		t.Errorf("functions %v, error %v", names, err)
	}
}

func TestWrongLibraries(t *testing.T) {
	good := compile(t, functionsSource, "-shared", "-fPIC")
	patched := func(at int, b ...byte) []byte {
		c := bytes.Clone(good)
		copy(c[at:], b)
		return c
	}
	head32 := make([]byte, 52)
	copy(head32, "\x7fELF\x01\x01\x01")
	binary.LittleEndian.PutUint16(head32[16:], 3)
	binary.LittleEndian.PutUint16(head32[18:], 3)
	binary.LittleEndian.PutUint32(head32[20:], 1)
	for name, c := range map[string]struct {
		file  []byte
		glibc *glibc
		text  string
	}{
		"text":          {[]byte("#!/bin/sh\n"), nil, "not an ELF file: it begins with the bytes 23 21 2f 62"},
		"empty":         {nil, nil, "not an ELF file"},
		"cut":           {good[:40], nil, "malformed"},
		"cut later":     {good[:len(good)/2], nil, "malformed"},
		"32 bits":       {head32, nil, "ELFCLASS32"},
		"other machine": {patched(18, 0xf3, 0), nil, "EM_RISCV"},
		"object":        {compile(t, functionsSource, "-c"), nil, "ET_REL"},
		"program":       {compile(t, "int main(void) { return 0; }", "-no-pie"), nil, "ET_EXEC"},
		"pie":           {compile(t, "int main(void) { return 0; }", "-pie", "-fPIE"), nil, "program"},
		"no functions":  {compile(t, "int data = 1;", "-shared", "-fPIC"), nil, "exports no functions"},
		"all hidden":    {compile(t, "int f(void) { return 0; }", "-shared", "-fPIC", "-fvisibility=hidden"), nil, "exports no functions"},
		"only C++":      {compile(t, "int _Z1fv(void) { return 0; }", "-shared", "-fPIC"), nil, "exports no functions"},
		"glibc too new": {good, &glibc{2, 1}, "this node has glibc 2.1:"},
	} {
		t.Run(name, func(t *testing.T) {
			names, err := inspect(bytes.NewReader(c.file), c.glibc)
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("functions %v, error %v; want %q", names, err, c.text)
			}
		})
	}
}

func TestGlibcIsNamed(t *testing.T) {
	b := compile(t, functionsSource, "-shared", "-fPIC")
	_, err := inspect(bytes.NewReader(b), &glibc{1, 0})
	if err == nil || !strings.Contains(err.Error(), "needs GLIBC_2.") || !strings.Contains(err.Error(), "libc.so.6") {
		t.Errorf("error %v", err)
	}
	if _, err := inspect(bytes.NewReader(b), nodeGlibc(mustExecutable(t))); err != nil {
		t.Errorf("a library that was built here: %v", err)
	}
}

// A dynamically linked program of this system: the test itself may be static.
func mustExecutable(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "main")
	if err := os.WriteFile(path, compile(t, "int main(void) { return 0; }"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestNodeGlibc(t *testing.T) {
	v := nodeGlibc(mustExecutable(t))
	if v == nil || v.major != 2 || v.minor < 17 {
		t.Errorf("this system's glibc is %v", v)
	}
	if v := nodeGlibc(filepath.Join(t.TempDir(), "absent")); v != nil {
		t.Errorf("an absent program's glibc is %v", v)
	}
}

func TestParseGlibc(t *testing.T) {
	for name, want := range map[string]glibc{"GLIBC_2.36": {2, 36}, "GLIBC_2.2.5": {2, 2}, "GLIBC_3": {}, "GLIBC_PRIVATE": {},
		"GLIBC_ABI_DT_RELR": {}, "GLIBCXX_3.4": {}, "": {}} {
		if got, ok := parseGlibc(name); got != want || ok != (want != glibc{}) {
			t.Errorf("%q: %v, %t", name, got, ok)
		}
	}
	if !(glibc{2, 9}).less(glibc{2, 36}) || (glibc{2, 36}).less(glibc{2, 36}) || (glibc{3, 0}).less(glibc{2, 36}) {
		t.Error("versions are compared wrongly")
	}
}

// The numbers that this package repeats from C.
func TestConstantsOfTheDataPlane(t *testing.T) {
	for file, lines := range map[string][]string{
		"dp_wire.h": {
			fmt.Sprintf("#define DP_DEPTH_MAX %d\n", invoke.MaxDepth),
			fmt.Sprintf("#define DP_EAGER_MAX (%du << 10)", invoke.MaxEager>>10),
		},
		"dp_fabric.h": {fmt.Sprintf("DP_PROVIDER_SHM = %d, DP_PROVIDER_VERBS = %d", invoke.ProviderSHM, invoke.ProviderVerbs)},
		"dp_status.h": {fmt.Sprintf("DP_BAD_LIBRARY = %d", statusBadLibrary), fmt.Sprintf("DP_BAD_BLOB = %d", statusBadBlob)},
		"dp_worker.h": {fmt.Sprintf("DP_EXIT_CLIENT_GONE = %d", exitClientGone)},
	} {
		b, err := os.ReadFile(filepath.Join("..", "dataplane", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lines {
			if !bytes.Contains(b, []byte(l)) {
				t.Errorf("%s does not say %q", file, l)
			}
		}
	}
}
