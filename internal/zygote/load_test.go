package zygote

import (
	"github.com/rfaas-go/rfaas/internal/spawner/wire"

	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

const (
	emptyFunction       = "unsigned f(void *a, unsigned n, void *r) { (void)a, (void)n, (void)r; return 0; }\n"
	crashingConstructor = `#include <stdio.h>
__attribute__((constructor)) static void c(void) { puts("in constructor"); *(volatile int *)8 = 1; }
`
	exitingConstructor = `#include <stdlib.h>
__attribute__((constructor)) static void c(void) { exit(4); }
`
	hangingConstructor = `#include <unistd.h>
__attribute__((constructor)) static void c(void) { for (;;) pause(); }
`
	// A function with state, in all dialects of C and C++.
	anyDialect = `#include "rfaas_function.h"
uint32_t f(void *a, uint32_t n, void *r);
uint32_t f(void *a, uint32_t n, void *r) {
    int fresh;
    (void)a, (void)r;
    if (!rfaas_state(n, &fresh) || rfaas_worker_cores() > rfaas_result_capacity())
        return rfaas_fail("%u", n);
    return 0;
}
`
)

// Everything that can be wrong with a library or a Spec is an error that names it, and the zygote goes on.
func TestBadLibraries(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	good, err := os.ReadFile(testLibrary(t))
	if err != nil {
		t.Fatal(err)
	}
	patched := func(change func(b []byte)) []byte {
		b := bytes.Clone(good)
		change(b)
		return b
	}
	file := func(path string) []byte {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	lib := func(name, source string) []byte { return file(library(t, name+".so", source)) }

	library(t, "libmissing-dependency.so", "int g(void) { return 1; }\n")
	needs := writeSource(t, "needs", "int g(void);\nunsigned f(void) { return (unsigned)g(); }\n")
	needsLib := file(compile(t, "needs.so", "-shared", "-fPIC", needs, "-L"+buildDir, "-lmissing-dependency"))
	os.Remove(buildDir + "/libmissing-dependency.so")
	object := file(compile(t, "object.o", "-c", needs))

	for _, tc := range []struct {
		name   string
		code   []byte
		names  []string
		status int32
		says   []string
	}{
		{"empty", nil, nil, wire.StatusBadLibrary, []string{"not an ELF file", "0 bytes"}},
		{"text", []byte("#!/bin/sh\n"), nil, wire.StatusBadLibrary, []string{"not an ELF file", "23 21"}},
		{"truncated header", good[:40], nil, wire.StatusBadLibrary, []string{"truncated"}},
		{"truncated", good[:len(good)/8], nil, wire.StatusBadLibrary, []string{"truncated", fmt.Sprint(len(good) / 8)}},
		{"32-bit", patched(func(b []byte) { b[4] = 1 }), nil, wire.StatusBadLibrary, []string{"64-bit"}},
		{"big-endian", patched(func(b []byte) { b[5] = 2 }), nil, wire.StatusBadLibrary, []string{"little-endian"}},
		{"other machine", patched(func(b []byte) { binary.LittleEndian.PutUint16(b[18:], 21) }), nil, wire.StatusBadLibrary,
			[]string{"ppc64"}},
		{"object file", object, []string{"f"}, wire.StatusBadLibrary, []string{"object file"}},
		{"program", file("/bin/true"), []string{"main"}, wire.StatusBadLibrary, []string{"position-independent executable"}},
		{"glibc too new", bytes.ReplaceAll(good, []byte("GLIBC_2.2.5\x00"), []byte("GLIBC_9.9.9\x00")), nil, wire.StatusBadLibrary,
			[]string{"GLIBC_9.9.9", "not found"}},
		{"missing dependency", needsLib, []string{"f"}, wire.StatusBadLibrary,
			[]string{"libmissing-dependency.so", "No such file"}},
		{"undefined symbol", lib("undefined", "int nowhere(void);\nunsigned f(void) { return (unsigned)nowhere(); }\n"), []string{"f"}, wire.StatusBadLibrary,
			[]string{"undefined symbol", "nowhere"}},
		{"missing function", good, []string{"echo", "nothere"}, wire.StatusBadLibrary, []string{"function 1", `"nothere"`}},
		{"function of libc", good, []string{"abort"}, wire.StatusBadLibrary, []string{`"abort"`, "libc"}},
		{"function of the worker", good, []string{"main"}, wire.StatusBadLibrary, []string{`"main"`}},
		{"variable", lib("variable", "int v = 1;\n"), []string{"v"}, wire.StatusBadLibrary, []string{`"v"`, "variable"}},
		{"no functions", good, []string{}, wire.StatusBadLibrary, []string{"no functions"}},
		{"empty name", good, []string{"echo", ""}, wire.StatusBadLibrary, []string{"function 1"}},
		{"NUL in a name", good, []string{"ec\x00ho"}, wire.StatusBadLibrary, []string{"NUL"}},
		{"constructor crashes", lib("crashes", crashingConstructor+emptyFunction), []string{"f"}, wire.StatusBadLibrary,
			[]string{"loading the library", "SIGSEGV", "in constructor"}},
		{"constructor exits", lib("exits", exitingConstructor+emptyFunction), []string{"f"}, wire.StatusBadLibrary,
			[]string{"loading the library", "called exit(4)"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			spec, channel := c.spec(t, sealed(t, tc.code))
			if tc.names != nil {
				spec.Names = tc.names
			}
			w, err := z.Spawn(t.Context(), spec)
			if err == nil {
				w.Kill()
				t.Fatal("loaded")
			}
			t.Log(err)
			wantError(t, err, tc.status, tc.says...)
			if strings.Contains(err.Error(), "/proc/self/fd") {
				t.Errorf("%v: names a path that means nothing to the user", err)
			}
			c.ask("close %d", channel)
		})
	}
	lease(t, z, c, nil).mustCall(t, fnEcho, []byte("still there"))
}

func TestBadSpecs(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	code := sealedFile(t, testLibrary(t))
	notSealed, err := os.Open(testLibrary(t))
	if err != nil {
		t.Fatal(err)
	}
	defer notSealed.Close()
	for _, tc := range []struct {
		name   string
		change func(s *Spec)
		status int32
		says   []string
	}{
		{"provider", func(s *Spec) { s.Provider = "smoke" }, wire.StatusInvalid, []string{`"smoke"`}},
		{"wait mode", func(s *Spec) { s.WaitMode = 3 }, wire.StatusInvalid, []string{"wait mode 3"}},
		{"port", func(s *Spec) { s.Port = 256 }, wire.StatusInvalid, []string{"port 256"}},
		{"GID index", func(s *Spec) { s.GIDIndex = -2 }, wire.StatusInvalid, []string{"GID index -2"}},
		{"device", func(s *Spec) { s.Device = strings.Repeat("x", 64) }, wire.StatusInvalid, []string{"device"}},
		{"device characters", func(s *Spec) { s.Device = "rxe 0" }, wire.StatusInvalid, []string{"rxe 0"}},
		{"CPU that does not exist", func(s *Spec) { s.CPUs = []int{1024} }, wire.StatusInvalid, []string{"CPU 1024"}},
		{"negative CPU", func(s *Spec) { s.CPUs = []int{-1} }, wire.StatusInvalid, []string{"CPU -1"}},
		{"CPU not here", func(s *Spec) { s.CPUs = []int{1000} }, wire.StatusInvalid, []string{"CPU 1000"}},
		{"one CPU not here", func(s *Spec) { s.CPUs = []int{0, 999} }, wire.StatusInvalid, []string{"CPU 999"}},
		{"no blob", func(s *Spec) { s.ClientBlob = nil }, wire.StatusBadBlob, []string{"0 bytes"}},
		{"long blob", func(s *Spec) { s.ClientBlob = make([]byte, 257) }, wire.StatusBadBlob, []string{"257 bytes"}},
		{"short blob", func(s *Spec) { s.ClientBlob = s.ClientBlob[:20] }, wire.StatusBadBlob, nil},
		{"damaged blob", func(s *Spec) { s.ClientBlob[9] ^= 1 }, wire.StatusBadBlob, nil},
		{"no code", func(s *Spec) { s.Code = nil }, wire.StatusBadLibrary, []string{"no code"}},
		{"code in a file", func(s *Spec) { s.Code = notSealed }, wire.StatusInvalid, []string{"memfd"}},
		{"depth", func(s *Spec) { s.MaxDepth = 2 }, wire.StatusInvalid, []string{"depth 4", "2"}},
		{"depth limit", func(s *Spec) { s.MaxDepth = 1025 }, wire.StatusInvalid, []string{"1025"}},
		{"eager", func(s *Spec) { s.MaxEager = 64 }, wire.StatusInvalid, []string{"4096", "64"}},
		{"bulk limit", func(s *Spec) { s.MaxBulk = 1<<32 + 1 }, wire.StatusInvalid, []string{"4294967297"}},
		{"verbs device", func(s *Spec) { s.Provider, s.Device = "verbs", "mlx5_77" }, -301, []string{"mlx5_77"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			spec, channel := c.spec(t, code)
			tc.change(&spec)
			w, err := z.Spawn(t.Context(), spec)
			if err == nil {
				w.Kill()
				t.Fatal("started")
			}
			t.Log(err)
			wantError(t, err, tc.status, tc.says...)
			c.ask("close %d", channel)
		})
	}
	lease(t, z, c, nil).mustCall(t, fnEcho, []byte("still there"))
}

func TestSealedMemfd(t *testing.T) {
	f, err := SealedMemfd("x", strings.NewReader("12345"), 5)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("written after sealing")
	}
	if err := f.Truncate(1); err == nil {
		t.Error("truncated after sealing")
	}
	b := make([]byte, 5)
	if _, err := f.ReadAt(b, 0); err != nil || string(b) != "12345" {
		t.Errorf("%q, %v", b, err)
	}
	_, err = SealedMemfd("x", strings.NewReader("12345"), 4)
	if err == nil || !strings.Contains(err.Error(), "more than 4 bytes") {
		t.Errorf("beyond the limit: %v", err)
	}
}

// ---- extras of rfaas_function.h ----

func TestExtras(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	w := lease(t, z, c, func(s *Spec) { s.CPUs = []int{0, 1} })
	for call := uint32(1); call <= 3; call++ {
		got := w.mustCall(t, fnExtras, nil)
		want := []uint32{1024, 2, 0, call, 1}
		if call == 1 {
			want[2] = 1
		}
		for i, v := range want {
			if g := binary.LittleEndian.Uint32(got[4*i:]); g != v {
				t.Errorf("call %d: word %d is %d, want %d", call, i, g, v)
			}
		}
	}
	r, err := w.call(fnFails, []byte("digital"))
	if err != nil || r.status != -400 || string(r.data) != "no such option: digital" {
		t.Errorf("failure: %d %q %v", r.status, r.data, err)
	}
	r, err = w.call(fnFails, bytes.Repeat([]byte("x"), 4000))
	if err != nil || r.status != -400 || len(r.data) != 511 {
		t.Errorf("long failure: %d, %d bytes, %v", r.status, len(r.data), err)
	}
	// Another worker has a state of its own.
	if got := lease(t, z, c, nil).mustCall(t, fnExtras, nil); binary.LittleEndian.Uint32(got[12:]) != 1 {
		t.Error("state of another worker")
	}
}

// A clone that is not fork must still leave a C library that knows its threads.
func TestCLibraryKnowsItsThread(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	got := w.mustCall(t, fnThreadID, nil)
	for i, what := range []string{"cached thread id", "gettid", "getpid", "owner of a priority-inheritance mutex"} {
		if id := int(binary.LittleEndian.Uint32(got[4*i:])); id != w.PID() {
			t.Errorf("%s: %d, the worker is %d", what, id, w.PID())
		}
	}
	if got := w.mustCall(t, fnThreads, nil); got[0] != 1 {
		t.Error("threads, raise or system do not work")
	}
}

func TestMemoryLimit(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), func(s *Spec) { s.MemoryLimit = 64 << 20 })
	mib := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n<<20) }
	w.mustCall(t, fnAllocates, mib(48))
	r, err := w.call(fnAllocates, mib(80))
	if err != nil || r.status != -400 || !strings.Contains(string(r.data), "no 83886080 bytes") {
		t.Errorf("beyond the limit: %d %q %v", r.status, r.data, err)
	}
	w.mustCall(t, fnAllocates, mib(48))
}

// A library that uses the extras loads in any program and does something sensible there; in C99 and C++ too.
func TestExtrasElsewhere(t *testing.T) {
	program := writeSource(t, "elsewhere", `
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
int main(int argc, char **argv) {
    (void)argc;
    void *l = dlopen(argv[1], RTLD_NOW);
    if (!l) { puts(dlerror()); return 1; }
    uint32_t (*extras)(void *, uint32_t, void *) = (uint32_t (*)(void *, uint32_t, void *))dlsym(l, "extras");
    uint32_t (*fails)(void *, uint32_t, void *) = (uint32_t (*)(void *, uint32_t, void *))dlsym(l, "fails");
    uint32_t out[5];
    for (int i = 0; i < 2; i++) {
        extras(0, 0, out);
        printf("%u %u %u %u %u\n", out[0], out[1], out[2], out[3], out[4]);
    }
    printf("%u\n", fails("x", 1, out));
    return 0;
}
`)
	out, err := exec.Command(compile(t, "elsewhere", program, "-ldl"), testLibrary(t)).Output()
	if want := "4294967295 1 1 1 1\n4294967295 1 0 2 1\n0\n"; err != nil || string(out) != want {
		t.Errorf("%q, %v; want %q", out, err, want)
	}
	header := writeSource(t, "header", anyDialect)
	for _, args := range [][]string{
		{"gcc", "-std=c99", "-pedantic", "-x", "c"},
		{"gcc", "-std=gnu17", "-Wconversion", "-x", "c"},
		{"g++", "-std=c++11", "-pedantic", "-x", "c++"},
		{"g++", "-std=c++20", "-x", "c++"},
	} {
		args = append(args, "-O2", "-Wall", "-Wextra", "-Werror", "-I../../worker",
			"-shared", "-fPIC", "-o", "/dev/null", header)
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
}
