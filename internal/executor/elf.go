package executor

import (
	"debug/elf"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// maxFunctions is how many functions an index of a request can name.
const maxFunctions = 1 << 16

// glibc is a version of the C library.
type glibc struct{ major, minor int }

func (g glibc) String() string { return fmt.Sprintf("%d.%d", g.major, g.minor) }

func (g glibc) less(o glibc) bool {
	return g.major < o.major || g.major == o.major && g.minor < o.minor
}

// parseGlibc reads "GLIBC_2.36". Names like GLIBC_PRIVATE or GLIBC_ABI_DT_RELR are none.
func parseGlibc(name string) (glibc, bool) {
	rest, ok := strings.CutPrefix(name, "GLIBC_")
	if !ok {
		return glibc{}, false
	}
	major, minor, _ := strings.Cut(rest, ".")
	minor, _, _ = strings.Cut(minor, ".") // 2.2.5 counts as 2.2
	a, err := strconv.Atoi(major)
	if err != nil {
		return glibc{}, false
	}
	b, err := strconv.Atoi(minor)
	if err != nil {
		return glibc{}, false
	}
	return glibc{a, b}, true
}

// machine returns the ELF machine of this node.
func machine() elf.Machine {
	if runtime.GOARCH == "arm64" {
		return elf.EM_AARCH64
	}
	return elf.EM_X86_64
}

// inspect checks that r is a shared library that this node can load and returns its functions, sorted by bytes: a
// function's place is its index. node is the node's C library, nil if unknown. What only the dynamic linker
// can know, such as a missing dependency, is left to the worker.
func inspect(r io.ReaderAt, node *glibc) (names []string, err error) {
	defer func() {
		// debug/elf says of itself that it is not hardened, and this is anybody's file.
		if p := recover(); p != nil {
			names, err = nil, fmt.Errorf("malformed ELF file: %v", p)
		}
	}()
	var magic [len(elf.ELFMAG)]byte
	if n, _ := r.ReadAt(magic[:], 0); string(magic[:n]) != elf.ELFMAG {
		return nil, fmt.Errorf("not an ELF file: it begins with the bytes % x", magic[:n])
	}
	f, err := elf.NewFile(r)
	if err != nil {
		return nil, fmt.Errorf("malformed ELF file: %w", err)
	}
	if f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB {
		return nil, fmt.Errorf("ELF class %v, %v; this node wants 64 bits, little endian", f.Class, f.Data)
	}
	if f.Machine != machine() {
		return nil, fmt.Errorf("built for %v, this node is %v", f.Machine, machine())
	}
	if f.Type != elf.ET_DYN {
		return nil, fmt.Errorf("ELF type %v, not a shared library (link with -shared)", f.Type)
	}
	if flags, err := f.DynValue(elf.DT_FLAGS_1); err == nil && len(flags) > 0 && elf.DynFlag1(flags[0])&elf.DF_1_PIE != 0 {
		return nil, fmt.Errorf("a position-independent program, not a shared library (link with -shared)")
	}
	if err := checkGlibc(f, node); err != nil {
		return nil, err
	}
	names, err = functions(f)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("it exports no functions (C linkage and default visibility are needed)")
	}
	if len(names) > maxFunctions {
		return nil, fmt.Errorf("it exports %d functions, at most %d can be called", len(names), maxFunctions)
	}
	return names, nil
}

// functions lists what the library exports to C.
func functions(f *elf.File) ([]string, error) {
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("no dynamic symbols: %w", err)
	}
	var names []string
	for _, s := range symbols {
		if elf.ST_BIND(s.Info) != elf.STB_GLOBAL || elf.ST_TYPE(s.Info) != elf.STT_FUNC ||
			elf.ST_VISIBILITY(s.Other) != elf.STV_DEFAULT || s.Section == elf.SHN_UNDEF {
			continue
		}
		if s.Name == "" || s.Name == "_init" || s.Name == "_fini" || strings.HasPrefix(s.Name, "_Z") {
			continue
		}
		names = append(names, s.Name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// checkGlibc compares the C library that f needs with the node's.
func checkGlibc(f *elf.File, node *glibc) error {
	if node == nil || f.SectionByType(elf.SHT_GNU_VERNEED) == nil {
		return nil // it needs no particular version of anything
	}
	needs, err := f.DynamicVersionNeeds()
	if err != nil {
		return fmt.Errorf("malformed version section: %w", err)
	}
	for _, lib := range needs {
		for _, n := range lib.Needs {
			if v, ok := parseGlibc(n.Dep); ok && node.less(v) {
				return fmt.Errorf("needs GLIBC_%v of %s, this node has glibc %v: build it on a system as old as the node", v, lib.Name, node)
			}
		}
	}
	return nil
}

// nodeGlibc finds the C library that the program at path runs with and returns its version; nil if it cannot be
// told (musl, static).
func nodeGlibc(path string) *glibc {
	f, err := elf.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP || p.Filesz > 4096 {
			continue
		}
		b, err := io.ReadAll(p.Open())
		if err != nil {
			return nil
		}
		loader, err := filepath.EvalSymlinks(strings.TrimRight(string(b), "\x00"))
		if err != nil {
			return nil
		}
		return libcVersion(filepath.Join(filepath.Dir(loader), "libc.so.6")) // glibc installs the two together
	}
	return nil
}

// libcVersion returns the newest symbol version that a libc.so.6 defines.
func libcVersion(path string) *glibc {
	f, err := elf.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	versions, err := f.DynamicVersions()
	if err != nil {
		return nil
	}
	var newest *glibc
	for _, d := range versions {
		if v, ok := parseGlibc(d.Name); ok && (newest == nil || newest.less(v)) {
			newest = &v
		}
	}
	return newest
}
