package conventions

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
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
	files = slices.DeleteFunc(files, func(path string) bool { return filepath.Base(path) == "rfaas-cc" }) // a script
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

// librfaas.so is small, and does nothing when it is loaded: its only initialiser is that of the compiler's own start files.
func TestLibraryIsSmall(t *testing.T) {
	path := filepath.Join("..", "..", "lib", "librfaas.so")
	const most = 600 << 10
	st, err := os.Stat(path)
	if err != nil {
		t.Fatalf("%v (run make build)", err)
	}
	if st.Size() > most {
		t.Errorf("librfaas.so has %d bytes, want at most %d", st.Size(), most)
	}
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	var dummy, constructors uint64
	for _, s := range symbols {
		if s.Name == "frame_dummy" {
			dummy = s.Value
		}
	}
	for _, name := range []string{".init_array", ".preinit_array", ".ctors"} {
		if section := f.Section(name); section != nil {
			constructors += section.Size
		}
	}
	if array := f.Section(".init_array"); dummy == 0 || array == nil || constructors != 8 || initialiser(t, f, array.Addr) != dummy {
		t.Errorf("librfaas.so has %d bytes of initialisers, want the 8 of frame_dummy", constructors)
	}
}

// initialiser returns the address with which the loader fills a word of a library, and 0 if it has no relative relocation.
func initialiser(t *testing.T, f *elf.File, at uint64) uint64 {
	t.Helper()
	section := f.Section(".rela.dyn")
	if section == nil {
		t.Fatal("librfaas.so has no .rela.dyn")
	}
	b, err := section.Data()
	if err != nil {
		t.Fatal(err)
	}
	for r := b; len(r) >= 24; r = r[24:] {
		if binary.LittleEndian.Uint64(r) == at {
			return binary.LittleEndian.Uint64(r[16:])
		}
	}
	return 0
}

// The resource manager has no code that makes sandboxes: only the spawner needs it, and the programs that start spawners.
func TestManagerHasNoSandbox(t *testing.T) {
	for file, want := range map[string]bool{"bin/resource-manager": false, "libexec/rfaas-spawner": true} {
		b, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(file)))
		if err != nil {
			t.Fatalf("%v (run make build)", err)
		}
		if got := bytes.Contains(b, []byte(module+"/internal/sandbox.")); got != want {
			t.Errorf("%s has functions of internal/sandbox: %v, want %v", file, got, want)
		}
	}
	if deps := list(t)[module+"/cmd/resource-manager"].Deps; len(deps) == 0 || slices.Contains(deps, module+"/internal/sandbox") {
		t.Errorf("cmd/resource-manager imports internal/sandbox, or its %d imports are not known", len(deps))
	}
}
