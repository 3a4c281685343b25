package conventions

import (
	"debug/elf"
	"path/filepath"
	"strings"
	"testing"
)

// No program links libibverbs: a process that uses shared memory only loads neither it nor its dependencies, and starts
// where it is not installed. The data plane loads it for verbs.
func TestNothingLinksLibibverbs(t *testing.T) {
	root := filepath.Join("..", "..")
	files, err := filepath.Glob(filepath.Join(root, "bin", "*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 3 {
		t.Fatalf("bin has %d programs (run make build)", len(files))
	}
	files = append(files, filepath.Join(root, "lib", "librfaas.so"), filepath.Join(root, "libexec", "rfaas-worker"),
		filepath.Join(root, "libexec", "rfaas-bench-peer"))
	for _, file := range files {
		for _, bad := range verbsImports(t, file) {
			t.Errorf("%s needs %s, which must be called through dpv_ibv", file, bad)
		}
	}
}

// verbsImports returns what a program or library needs of libibverbs when it starts.
func verbsImports(t *testing.T, file string) (bad []string) {
	t.Helper()
	f, err := elf.Open(file)
	if err != nil {
		t.Fatalf("%v (run make build)", err)
	}
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for _, l := range libraries {
		if strings.HasPrefix(l, "libibverbs.") || strings.HasPrefix(l, "libnl-") {
			bad = append(bad, l)
		}
	}
	symbols, err := f.ImportedSymbols() // a shared library links with names that nothing defines
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for _, s := range symbols {
		if strings.HasPrefix(strings.TrimLeft(s.Name, "_"), "ibv_") {
			bad = append(bad, s.Name)
		}
	}
	return bad
}
