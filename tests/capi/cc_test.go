package capi

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// compiler returns the path of rfaas-cc, and a directory with sources. It skips the test in the virtual machine.
func compiler(t *testing.T, sources map[string]string) (cc, dir string) {
	t.Helper()
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("what a compiler does is the same on every fabric, and compilers are slow there")
	}
	dir = t.TempDir()
	for name, text := range sources {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return built(t, "bin/rfaas-cc"), dir
}

const (
	goodFunction   = "#include <rfaas_function.h>\nuint32_t f(void *a, uint32_t n, void *r) { (void)a; (void)r; return n == 0 ? rfaas_fail(\"empty\") : 0; }\n"
	hiddenFunction = "#include <cstdint>\nuint32_t f(void *, uint32_t, void *) { return 0; }\n"
	trampoline     = "#include <stdlib.h>\nint sorts(int *v, int n, int sign) { int by(const void *a, const void *b) { return sign * (*(int *)a - *(int *)b); }\n" +
		"qsort(v, n, sizeof *v, by); return 0; }\n"
)

// TestCompiler runs rfaas-cc with good and bad input.
func TestCompiler(t *testing.T) {
	cc, dir := compiler(t, map[string]string{
		"good.c": goodFunction, "hidden.cpp": hiddenFunction, "trampoline.c": trampoline,
		"undefined.c": "int g(int); int f(int x) { return g(x); }\n",
		"outside.c":   "int g(int); int f(int x) { return g(x); }\n", "g.c": "int g(int x) { return x; }\n",
		"format.c": strings.Replace(goodFunction, "empty", "%u bytes", 1),
		"broken.c": "int f(int x) { return y; }\n",
		"good.f90": "function f(a, n, r) bind(C)\nuse iso_c_binding\ntype(c_ptr), value :: a, r\ninteger(c_int32_t), value :: n\ninteger(c_int32_t) :: f\nf = n\nend function\n",
	})
	for _, c := range []struct {
		name, line string
		exit       int
		says       []string // in its output
		silent     bool     // prints nothing
	}{
		{name: "C", line: "-o libgood.so good.c", silent: true},
		{name: "options of the caller come last", line: "-v -o libgood.so good.c -O1 -Wall", says: []string{"'gcc' '-O3'", "'-g1'", "'-Wl,-z,defs'", "'-O1' '-Wall'"}},
		{name: "C++", line: "-v -o libhidden.so hidden.cpp", says: []string{"'g++' '-O3'", "libhidden.so exports no function", `extern "C"`}},
		{name: "Fortran", line: "-v -o libf.so good.f90", says: []string{"'gfortran' '-O3'"}},
		{name: "Fortran and C", line: "-v -o libf.so good.f90 g.c", says: []string{"'gfortran' '-O3'"}},
		{name: "an option's value is not a source", line: "-v -o libgood.so -include /dev/null -MF x.cpp -MD good.c", says: []string{"'gcc'"}},
		{name: "object", line: "-v -c -o g.o g.c", says: []string{"'-fPIC'"}},
		{name: "objects", line: "-v -o libg.so g.o --lang c++", says: []string{"'g++'"}},
		{name: "march", line: "-v --march=x86-64-v3 -o libgood.so good.c", says: []string{"'-march=x86-64-v3'"}},
		{name: "native", line: "-v --native -o libgood.so good.c", says: []string{"'-march=native'"}},
		{name: "flags", line: "--cflags --libs", says: []string{"-fPIC", "-shared -Wl,-z,defs"}},
		{name: "missing argument of rfaas_fail", line: "-o libf.so format.c", says: []string{"format.c:2", "-Wformat"}},
		{name: "undefined symbol", line: "-o libu.so undefined.c", exit: 1, says: []string{"undefined.c:1: undefined reference to `g'"}},
		{name: "compiler's error", line: "-o libb.so broken.c", exit: 1, says: []string{"broken.c:1"}},
		{name: "libraries elsewhere travel too", line: "-o libo.so outside.c ./libg.so", silent: true},
		{name: "executable stack", line: "-o libt.so trampoline.c", says: []string{"libt.so needs an executable stack"}},
		{name: "no source", line: "-O2", exit: 2, says: []string{"no source"}},
		{name: "no output", line: "good.c", exit: 2, says: []string{"-o libgood.so"}},
		{name: "two languages", line: "-o x.so good.c hidden.cpp", exit: 2, says: []string{"C and C++ sources", "--lang c++"}},
		{name: "unknown language", line: "--lang rust -o x.so g.o", exit: 2, says: []string{"--lang rust: want c, c++ or fortran"}},
		{name: "march without value", line: "good.c --march", exit: 2, says: []string{"--march needs a value"}},
		{name: "unknown processor", line: "--march=none -o x.so good.c", exit: 1, says: []string{"none"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, exit := runIn(t, dir, nil, cc, strings.Fields(c.line)...)
			if exit != c.exit {
				t.Errorf("exit status %d, want %d\n%s", exit, c.exit, out)
			}
			for _, want := range c.says {
				if !strings.Contains(out, want) {
					t.Errorf("it does not say %q but\n%s", want, out)
				}
			}
			if c.silent && out != "" {
				t.Errorf("it says\n%s", out)
			}
		})
	}
	t.Run("missing compiler", func(t *testing.T) {
		out, exit := runIn(t, dir, []string{"CC=no-such-compiler"}, cc, "-o", "x.so", "good.c")
		if want := "the compiler no-such-compiler is missing: install it, or set CC to another one"; exit != 1 || !strings.Contains(out, want) {
			t.Errorf("exit status %d\n%s", exit, out)
		}
	})
	t.Run("library that is missing", func(t *testing.T) {
		if err := os.Remove(filepath.Join(dir, "libg.so")); err != nil {
			t.Fatal(err)
		}
		runIn(t, dir, nil, cc, strings.Fields("-o libg.so g.c -Wl,-soname,libgone.so")...)
		out, _ := runIn(t, dir, nil, cc, strings.Fields("-o libo.so outside.c libg.so")...)
		if !strings.Contains(out, "libo.so needs libgone.so, which is not found on this machine") {
			t.Errorf("it says\n%s", out)
		}
	})
}

// runIn runs a program in a directory. It returns all that the program printed, and its exit status.
func runIn(t *testing.T, dir string, env []string, program string, args ...string) (string, int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}
