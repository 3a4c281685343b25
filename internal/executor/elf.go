package executor

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

const (
	maxFunctions = 1 << 16 // how many an index of a request can name
	maxName      = 1 << 10 // bytes of a function's name; longer ones are left out
	maxNames     = 2 << 20 // bytes of all names, for they travel in one message
)

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
// can know, such as a missing dependency, is left to the worker. r is anybody's file.
func inspect(r io.ReaderAt, node *glibc) ([]string, error) {
	f, err := openELF(r)
	if err != nil {
		return nil, err
	}
	if f.machine != machine() {
		return nil, fmt.Errorf("built for %v, this node is %v", f.machine, machine())
	}
	if f.kind != elf.ET_DYN {
		return nil, fmt.Errorf("ELF type %v, not a shared library (link with -shared)", f.kind)
	}
	flags, err := f.dynamic(elf.DT_FLAGS_1)
	if err != nil {
		return nil, err
	}
	if elf.DynFlag1(flags)&elf.DF_1_PIE != 0 {
		return nil, fmt.Errorf("a position-independent program, not a shared library (link with -shared)")
	}
	if err := checkGlibc(f, node); err != nil {
		return nil, err
	}
	names, err := functions(f)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("it exports no functions (C linkage and default visibility are needed)")
	}
	return names, nil
}

// functions lists what the library exports to C.
func functions(f *elfFile) ([]string, error) {
	known := map[string]bool{}
	total := 0
	err := f.symbols(func(name []byte) error {
		if bytes.HasPrefix(name, []byte("_Z")) || string(name) == "_init" || string(name) == "_fini" || known[string(name)] {
			return nil
		}
		if len(known) == maxFunctions {
			return fmt.Errorf("it exports more than %d functions, which is how many can be called", maxFunctions)
		}
		if total += len(name) + 1; total > maxNames {
			return fmt.Errorf("the names of its functions take more than %d bytes", maxNames)
		}
		known[string(name)] = true
		return nil
	})
	return slices.Sorted(maps.Keys(known)), err
}

// checkGlibc compares the C library that f needs with the node's.
func checkGlibc(f *elfFile, node *glibc) error {
	if node == nil {
		return nil
	}
	return f.versionsNeeded(func(library, version string) error {
		if v, ok := parseGlibc(version); ok && node.less(v) {
			return fmt.Errorf("needs GLIBC_%v of %q, this node has glibc %v: build it on a system as old as the node", v, library, node)
		}
		return nil
	})
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
