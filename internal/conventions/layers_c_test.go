package conventions

import (
	"debug/elf"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// cFolders states for every folder of C sources from which other folders its files may include headers. Dependencies point
// down: tests, then programs, then the data plane.
var cFolders = map[string][]string{
	"internal/dataplane": {},
	"client/c":           {"internal/dataplane"},
	"worker":             {"internal/dataplane", "worker/startup", "worker/seed"},
	"worker/seed":        {"internal/dataplane"},
	"worker/startup":     {"internal/dataplane"},
	"benchmarks/raw":     {"internal/dataplane"},
	"client/python/ext":  {},
	"tests/c":            {"internal/dataplane", "client/c", "worker", "worker/startup"},
	"tests/fuzz":         {"internal/dataplane", "client/c", "worker", "worker/seed", "examples/mpi/blackscholes"},
}

var quotedInclude = regexp.MustCompile(`(?m)^#include "([^"]+)"`)

// includedFrom returns the folder of a header, as the compiler finds it: beside the file, in the data plane, in the client library, or from the root.
func includedFrom(folder, name string) string {
	for _, dir := range []string{folder, "internal/dataplane", "client/c", "."} {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(filepath.Join("..", "..", path)); err == nil {
			return filepath.Dir(path)
		}
	}
	return ""
}

// strayIncludes returns the headers that a file of the folder must not include.
func strayIncludes(folder, text string) (stray []string) {
	for _, m := range quotedInclude.FindAllStringSubmatch(text, -1) {
		if from := includedFrom(folder, m[1]); from != folder && !slices.Contains(cFolders[folder], from) {
			stray = append(stray, m[1])
		}
	}
	return stray
}

func TestIncludesPointDown(t *testing.T) {
	for folder := range cFolders {
		files, err := filepath.Glob(filepath.Join("..", "..", folder, "*.[ch]"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s has no C files (%v): remove it from cFolders", folder, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range strayIncludes(folder, string(text)) {
				t.Errorf("%s/%s includes %q: files of this folder may include headers of %s", folder, filepath.Base(file), name,
					strings.Join(append([]string{folder}, cFolders[folder]...), ", "))
			}
		}
	}
	// The test must be able to find something.
	for folder, include := range map[string]string{"internal/dataplane": "worker/sandbox.h", "worker": "benchmarks/raw/bench.h", "benchmarks/raw": "nowhere.h"} {
		if stray := strayIncludes(folder, `#include "`+include+"\"\n"); len(stray) != 1 {
			t.Errorf("%s may include %q", folder, include)
		}
	}
}

// Prefixes of the symbols of the worker program and of the measuring code.
var (
	workerSymbols = []string{"dp_worker_", "dp_zygote_", "dp_sandbox_", "dp_clone", "dp_packet_", "dp_msg_", "dp_crash_", "dp_spare_", "dp_ahead_"}
	benchSymbols  = []string{"dp_bench_", "github.com/rfaas-go/rfaas/benchmarks", "gonum.org/v1/plot"}
)

// symbolsOf returns the names of a program's or library's functions that begin with one of the prefixes.
func symbolsOf(t *testing.T, file string, prefixes []string) (names []string) {
	t.Helper()
	f, err := elf.Open(filepath.Join("..", "..", file))
	if err != nil {
		t.Fatalf("run make build first: %v", err)
	}
	defer f.Close()
	all, err := f.Symbols()
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for _, s := range all {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Section != elf.SHN_UNDEF &&
			slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s.Name, p) }) {
			names = append(names, s.Name)
		}
	}
	return names
}

// Clients and daemons contain neither the worker program nor the measuring code.
func TestProgramsHaveOnlyTheirOwnCode(t *testing.T) {
	for _, file := range []string{"lib/librfaas.so", "bin/resource-manager", "bin/executor", "bin/rfaas"} {
		if names := symbolsOf(t, file, slices.Concat(workerSymbols, benchSymbols)); len(names) > 0 {
			t.Errorf("%s has %d functions of the worker or the benchmarks: %s", file, len(names), strings.Join(names[:min(len(names), 10)], ", "))
		}
	}
	if names := symbolsOf(t, "libexec/rfaas-worker", benchSymbols); len(names) > 0 {
		t.Errorf("libexec/rfaas-worker has functions of the benchmarks: %s", strings.Join(names, ", "))
	}
	// Where the code belongs it is found.
	for file, prefixes := range map[string][]string{"libexec/rfaas-worker": workerSymbols, "bin/rfaas-bench": benchSymbols} {
		for _, prefix := range prefixes {
			if len(symbolsOf(t, file, []string{prefix})) == 0 {
				t.Errorf("%s has no function %s*: the prefix is out of date", file, prefix)
			}
		}
	}
}
