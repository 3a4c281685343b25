package backtrace

import (
	"bytes"
	"debug/elf"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const source = `static __attribute__((noinline)) int inner(volatile int *p) {
    return *p;
}
static inline int inlined(volatile int *p) {
    return inner(p) + 1;
}
int outer(int *p) {
    int sum = 0;
    sum += inlined(p);
    return sum;
}
__attribute__((cold)) int below(int *p) { /* below .text */
    return outer(p);
}
`

// build compiles a library of the files, by name, and returns its bytes.
func build(t testing.TB, files map[string]string, flags ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	args := append([]string{"-shared", "-fPIC", "-O1", "-freorder-functions", "-o", "lib.so"}, flags...)
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, name)
	}
	cmd := exec.CommandContext(t.Context(), "gcc", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	code, err := os.ReadFile(filepath.Join(dir, "lib.so"))
	if err != nil {
		t.Fatal(err)
	}
	return code
}

// start returns the address of a function.
func start(t *testing.T, library []byte, function string) uint64 {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		t.Fatal(err)
	}
	all, _ := f.Symbols()
	for _, s := range all {
		if s.Name == function {
			return s.Value
		}
	}
	t.Fatalf("no function %s", function)
	return 0
}

// A backtrace gets the lines of the library's functions, static ones and inlined ones too, and keeps all others.
func TestWithLines(t *testing.T) {
	files := map[string]string{"prices.c": source}
	for _, flags := range [][]string{{"-g1"}, {"-g"}, {"-g1", "-gdwarf-4"}, {"-g", "-gz"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			library := build(t, files, flags...)
			back := start(t, library, "outer") + 1
			// library+... is in outer, at what was inlined there.
			trace := fmt.Sprintf("inner+0x0\n...\nabort+0x12 (libc.so.6)\nlibrary+0x%x\n0x0\nlibrary+0x\nnothing+0x7\nbelow+0x1", back)
			got := strings.Split(WithLines(trace, library), "\n")
			want := strings.Split(trace, "\n")
			for i, suffix := range map[int]string{0: "/prices.c:2", 3: "/prices.c:5", 7: "/prices.c:12"} {
				line, place, ok := strings.Cut(got[i], " at ")
				if !ok || line != want[i] || !strings.HasSuffix(place, suffix) {
					t.Errorf("line %d is %q, want %q at ...%s", i, got[i], want[i], suffix)
				}
				got[i], want[i] = "", ""
			}
			if strings.Join(got, "\n") != strings.Join(want, "\n") {
				t.Errorf("the other lines are %q, want %q", got, want)
			}
		})
	}
}

// The line of a call is that of its call instruction, even if the next instruction belongs to another line.
func TestLineOfACall(t *testing.T) {
	library := build(t, map[string]string{"x.c": "void g(void);\nint f(int a) {\n    g();\n    return 2 * a + 7;\n}\nvoid g(void) {}\n"}, "-g1", "-O0")
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		t.Fatal(err)
	}
	d, err := f.DWARF()
	if err != nil {
		t.Fatal(err)
	}
	at, offset := start(t, library, "f"), uint64(0)
	for !strings.HasSuffix(placeOf(f, d, at+offset), ":4") { // the first instruction behind the call
		offset++
	}
	for trace, want := range map[string]string{
		fmt.Sprintf("0x0\nf+0x%x", offset): "x.c:3",
		fmt.Sprintf("f+0x%x", offset):      "x.c:4", // here it crashed
	} {
		if got := WithLines(trace, library); !strings.HasSuffix(got, want) {
			t.Errorf("%q, want %s", got, want)
		}
	}
}

// Where the place is not certain, or nothing says it, a line stays as it is.
func TestUnknownPlaces(t *testing.T) {
	same := "static __attribute__((noinline)) int inner(volatile int *p) { return *p + %d; }\nint outer%d(int *p) { return inner(p); }\n"
	twice := map[string]string{"a.c": fmt.Sprintf(same, 1, 1), "b.c": fmt.Sprintf(same, 2, 2)}
	plain := build(t, map[string]string{"prices.c": source})
	for name, c := range map[string]struct {
		trace   string
		library []byte
	}{
		"no debug information":            {"inner+0x0", plain},
		"two static functions of a name":  {"inner+0x0", build(t, twice, "-g1")},
		"beyond the function":             {"inner+0xffff", build(t, map[string]string{"prices.c": source}, "-g1")},
		"at the end of the address space": {"library+0xffffffffffffffff\nouter+0xffffffffffffffff", plain},
		"no library":                      {"inner+0x0", nil},
		"truncated library":               {"inner+0x0", plain[:200]},
		"empty":                           {"", plain},
	} {
		if got := WithLines(c.trace, c.library); got != c.trace {
			t.Errorf("%s: %q, want %q", name, got, c.trace)
		}
	}
}

// A function in the exported table only is found too.
func TestStrippedLibraryWithDebugLines(t *testing.T) {
	library := build(t, map[string]string{"prices.c": source}, "-g1", "-Wl,--retain-symbols-file=/dev/null")
	if got := WithLines("outer+0x1", library); !strings.HasSuffix(got, "/prices.c:5") {
		t.Errorf("%q", got)
	}
}

// Damaged libraries end in lines or in none, and not in a panic or a wait.
func TestDamagedLibraries(t *testing.T) {
	library := build(t, map[string]string{"prices.c": source}, "-g1")
	r := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		bad := bytes.Clone(library)
		for range 1 + r.IntN(8) {
			bad[r.IntN(len(bad))] = byte(r.Uint32())
		}
		check(t, "inner+0x3\nlibrary+0x1111\nouter+0x9", bad)
	}
}

func check(t *testing.T, trace string, library []byte) {
	t.Helper()
	got := strings.Split(WithLines(trace, library), "\n")
	for i, line := range strings.Split(trace, "\n") {
		if i >= len(got) || !strings.HasPrefix(got[i], line) {
			t.Fatalf("%q became %q", trace, got)
		}
	}
}

func FuzzWithLines(f *testing.F) {
	library := build(f, map[string]string{"prices.c": source}, "-g1")
	f.Add("inner+0x3\nlibrary+0x1111\nouter+0x9", library)
	f.Fuzz(func(t *testing.T, trace string, library []byte) { check(t, trace, library) })
}
