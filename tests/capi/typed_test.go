package capi

import (
	"path/filepath"
	"strings"
	"testing"
)

// A call by `rfaas invoke`, and what it prints.
type typedCall struct {
	name, line string
	prints     string
	fails      string // part of the error; prints is empty then
}

// checkCalls makes the calls with an executor of its own.
func checkCalls(t *testing.T, library string, calls []typedCall) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	env := []string{"RFAAS_EXECUTOR=" + startExecutor(t, secret), "RFAAS_SECRET_FILE=" + secret, "RFAAS_MANAGER="}
	for _, c := range calls {
		t.Run(c.name, func(t *testing.T) {
			out, exit := runIn(t, ".", env, built(t, "bin/rfaas"), append([]string{"invoke", library}, strings.Fields(c.line)...)...)
			if c.fails == "" && (exit != 0 || strings.TrimSpace(out) != c.prints) {
				t.Errorf("exit status %d, it prints %q, want %q", exit, out, c.prints)
			}
			if c.fails != "" && (exit == 0 || !strings.Contains(out, c.fails)) {
				t.Errorf("exit status %d, it says\n%s\nwant %q", exit, out, c.fails)
			}
		})
	}
}

// TestTypedFunctions calls functions that rfaas_function.hpp made, with good and bad input.
func TestTypedFunctions(t *testing.T) {
	cc, dir := compiler(t, nil)
	source, _ := filepath.Abs("testdata/typed.cpp")
	library := filepath.Join(dir, "libtyped.so")
	if out, exit := runIn(t, dir, nil, cc, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", library, source); exit != 0 || out != "" {
		t.Fatalf("exit status %d\n%s", exit, out)
	}
	checkCalls(t, library, []typedCall{
		{name: "values", line: "hypotenuse --args f64:3,4 --print f64", prints: "5"},
		{name: "structure", line: "intrinsic --args f64:100,90,1 --print f64", prints: "10"},
		{name: "spans", line: "doubled --args f64:1,2,3 --print f64", prints: "2 4 6"},
		{name: "empty span", line: "doubled --print f64", prints: ""},
		{name: "value and spans", line: "shifted --args i32:2,0 --args f64:1,2 --print f64", prints: "3 4"},
		{name: "container", line: "iota --args i64:3 --print i64", prints: "1 2 3"},
		{name: "string and no parameters", line: "type_of_nothing", prints: "nothing"},
		{name: "template", line: "sum_i64 --args i64:1,2,3 --print i64", prints: "6"},

		{name: "exception", line: "intrinsic --args f64:1,2,-3", fails: "negative time -3.000000 100%s"},
		{name: "exception that is not a std::exception", line: "throws_int", fails: "exception of type int"},
		{name: "missing table", line: "first_of_table --args str:prices", fails: `the program has published no table "prices"`},
		{name: "exception of the standard library", line: "iota --args i64:-1", fails: "cannot create std::vector larger than max_size()"},
		{name: "negative count", line: "shifted --args i32:0,0", fails: "the function returned -1 elements"},
		{name: "input of another size", line: "hypotenuse --args f64:3", fails: "input of 8 bytes: want 16"},
		{name: "structure of another size", line: "intrinsic --args f64:3,4,5,6", fails: "input of 32 bytes: want 24"},
		{name: "no multiple", line: "doubled --args i32:3,4,5", fails: "input of 12 bytes: want a multiple of 8"},
		{name: "no multiple after a value", line: "shifted --args i32:1,2,3", fails: "input of 12 bytes: want 8 and a multiple of 8"},
		{name: "two inputs", line: "type_of_nothing --args i32:1 --hex 00", fails: "--hex and --args: want one\nusage: "},
		{name: "half a byte", line: "type_of_nothing --hex 010", fails: "--hex 010: odd length hex string"},
		{name: "input for none", line: "type_of_nothing --args i32:1", fails: "input of 4 bytes: want 0"},
		{name: "room for a value", line: "hypotenuse --args f64:3,4 --capacity 4", fails: "result of 8 bytes, the capacity is 4: raise --capacity"},
		{name: "room for a span", line: "doubled --args f64:3,4 --capacity 8", fails: "result of 16 bytes, the capacity is 8"},
		{name: "room for a container", line: "iota --args i64:3 --capacity 16", fails: "result of 24 bytes, the capacity is 16"},
	})
}

// TestTypedSignatures compiles functions whose types cannot travel, or whose parameters say nothing useful.
func TestTypedSignatures(t *testing.T) {
	for name, c := range map[string]struct{ function, says string }{
		"string parameter":  {"void f(const std::string &) {}", "must be trivially copyable"},
		"vector of strings": {"std::vector<std::string> f() { return {}; }", "must be trivially copyable"},
		"pointer":           {"void f(const double *) {}", "a pointer means nothing in another process"},
		"reference":         {"void f(double &) {}", "take a value by const reference"},
		"no count":          {"void f(rfaas::span<double>) {}", "returns how many elements"},
		"order":             {"void f(rfaas::span<const double>, int) {}", "parameters: first values"},
		"two inputs":        {"void f(rfaas::span<const double>, rfaas::span<const int>) {}", "parameters: first values"},
		"alignment":         {"struct alignas(128) wide { int x; }; void f(wide) {}", "aligned to 64 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cc, dir := compiler(t, map[string]string{"f.cpp": "#include <rfaas_function.hpp>\n#include <string>\n#include <vector>\n" + c.function + "\nRFAAS_FUNCTION(f);\n"})
			out, exit := runIn(t, dir, nil, cc, "-std=c++17", "-fsyntax-only", "f.cpp")
			if exit == 0 || !strings.Contains(out, c.says) {
				t.Errorf("exit status %d, want %q\n%s", exit, c.says, out)
			}
		})
	}
}

// TestFortranFunctions calls functions that use the module rfaas_function, which rfaas-cc compiles, directly or by objects.
func TestFortranFunctions(t *testing.T) {
	cc, dir := compiler(t, nil)
	source, _ := filepath.Abs("testdata/extras.f90")
	for _, line := range []string{"-std=f2018 -o libextras.so " + source, "-std=f2018 -c -o extras.o " + source, "--lang fortran -o libobjects.so extras.o"} {
		if out, exit := runIn(t, dir, nil, cc, strings.Fields(line)...); exit != 0 || out != "" {
			t.Fatalf("%s: exit status %d\n%s", line, exit, out)
		}
	}
	for _, library := range []string{"libextras.so", "libobjects.so"} {
		t.Run(library, func(t *testing.T) {
			run(t, build(t, "gcc", "testdata/fortran_functions.c", c11...), filepath.Join(dir, library), built(t, "build/functions/polynomial.so"))
		})
	}
}

// TestFortranFunctionsElsewhere calls them in a program that knows nothing of rfaas.
func TestFortranFunctionsElsewhere(t *testing.T) {
	cc, dir := compiler(t, map[string]string{"main.f90": `program main
   use iso_c_binding
   implicit none
   interface
      function look(args, size, res) bind(c) result(bytes)
         import
         type(c_ptr), value :: args, res
         integer(c_int32_t), value :: size
         integer(c_int32_t) :: bytes
      end function
      function complain(args, size, res) bind(c) result(bytes)
         import
         type(c_ptr), value :: args, res
         integer(c_int32_t), value :: size
         integer(c_int32_t) :: bytes
      end function
   end interface
   character(len=7), target :: name = 'squares'
   integer(c_int64_t), target :: out(5)
   if (look(c_loc(name), 7, c_loc(out)) /= 40) error stop 1
   if (look(c_loc(name), 7, c_loc(out)) /= 40) error stop 2
   if (any(out /= [4294967295_c_int64_t, 1_c_int64_t, 2_c_int64_t, 0_c_int64_t, 0_c_int64_t])) error stop 3
   if (complain(c_loc(name), 7, c_loc(out)) /= 0) error stop 4
end program
`})
	source, _ := filepath.Abs("testdata/extras.f90")
	if out, exit := runIn(t, dir, nil, cc, "-o", "libextras.so", source); exit != 0 || out != "" {
		t.Fatalf("exit status %d\n%s", exit, out)
	}
	if out, exit := runIn(t, dir, nil, "gfortran", "-o", "main", "main.f90", "./libextras.so"); exit != 0 {
		t.Fatalf("exit status %d\n%s", exit, out)
	}
	if out, exit := runIn(t, dir, nil, "./main"); exit != 0 || out != "squares" {
		t.Errorf("exit status %d, it says %q", exit, out)
	}
}

// TestOverrun calls functions that write beyond the room for their results. Their calls fail, and the worker goes on.
func TestOverrun(t *testing.T) {
	cc, dir := compiler(t, map[string]string{"sloppy.c": `#include <rfaas_function.h>
#include <string.h>
uint32_t sloppy(void *args, uint32_t size, void *res) {
	(void)size;
	memset(res, 7, *(uint32_t *)args);
	return 4;
}
uint32_t honest(void *args, uint32_t size, void *res) {
	(void)size;
	memset(res, 7, *(uint32_t *)args);
	return *(uint32_t *)args;
}
`})
	library := filepath.Join(dir, "libsloppy.so")
	if out, exit := runIn(t, dir, nil, cc, "-o", library, "sloppy.c"); exit != 0 {
		t.Fatalf("exit status %d\n%s", exit, out)
	}
	checkCalls(t, library, []typedCall{
		{name: "within", line: "sloppy --args u32:16 --capacity 16 --print hex", prints: "07070707"},
		{name: "small", line: "sloppy --args u32:17 --capacity 16",
			fails: "sloppy on worker 0 failed: it wrote beyond the 16 bytes of room for its result, and returned 4: write at most rfaas_result_capacity() bytes"},
		{name: "in place", line: "sloppy --args u32:4097 --capacity 4096", fails: "it wrote beyond the 4096 bytes of room"},
		{name: "bulk", line: "sloppy --args u32:200001 --capacity 200000", fails: "it wrote beyond the 200000 bytes of room"},
		{name: "no room", line: "sloppy --args u32:4 --capacity 0", fails: "result of 4 bytes, the capacity is 0"},
		{name: "announced", line: "honest --args u32:17 --capacity 16", fails: "result of 17 bytes, the capacity is 16"},
	})
}
