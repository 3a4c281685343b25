package bundle

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// maxNeeds bounds the libraries that a library needs, directly and indirectly.
const maxNeeds = 1024

// Object has the fields of a library by which the dynamic linker finds the libraries that it needs.
type Object struct {
	Needs          []string // DT_NEEDED
	rpath, runpath []string // directories, with tokens
	machine        elf.Machine
	class          elf.Class

	name   string // for messages
	origin string // absolute directory, "": not known
	loader *Object
}

// ReadObject reads a library of a number of bytes. name is for messages.
func ReadObject(name string, r io.ReaderAt, size int64) (*Object, error) {
	f, err := elf.NewFile(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && (p.Off > uint64(size) || p.Filesz > uint64(size)-p.Off) {
			return nil, fmt.Errorf("%s is truncated: a segment needs %d bytes at %d, the file has %d", name, p.Filesz, p.Off, size)
		}
	}
	o := &Object{name: name, machine: f.Machine, class: f.Class}
	var lists [3][]string
	for i, tag := range []elf.DynTag{elf.DT_NEEDED, elf.DT_RPATH, elf.DT_RUNPATH} {
		if lists[i], err = f.DynString(tag); err != nil && f.SectionByType(elf.SHT_DYNAMIC) != nil {
			return nil, fmt.Errorf("%s: %v: %w", name, tag, err)
		}
	}
	o.Needs, o.runpath = lists[0], split(lists[2])
	if len(lists[2]) == 0 { // otherwise the linker ignores DT_RPATH
		o.rpath = split(lists[1])
	}
	if len(o.Needs) > maxNeeds {
		return nil, fmt.Errorf("%s needs %d libraries, want at most %d", name, len(o.Needs), maxNeeds)
	}
	return o, nil
}

func split(lists []string) (dirs []string) {
	for _, l := range lists {
		for _, dir := range filepath.SplitList(l) {
			if dir != "" {
				dirs = append(dirs, dir)
			}
		}
	}
	return dirs
}

// ofCLibrary are the libraries of glibc. A worker has loaded them already, so the linker never uses others with these names.
var ofCLibrary = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libanl.so.1", "libmvec.so.1"}

// closure finds what a library needs.
type closure struct {
	search     []string // the client's LD_LIBRARY_PATH
	configured []string // other directories that the node's dynamic linker searches
	system     []string // directories that every node has
	order      []string // names in the order in which the dynamic linker loads them
	known      map[string]bool
	private    []item
}

// needs finds the libraries that root needs, breadth first as the dynamic linker does.
func (c *closure) needs(root *Object) error {
	c.known = map[string]bool{}
	for queue := []*Object{root}; len(queue) > 0; queue = queue[1:] {
		o := queue[0]
		for _, name := range o.Needs {
			if c.known[name] {
				continue
			}
			if len(c.order) == maxNeeds {
				return fmt.Errorf("%s needs more than %d libraries", root.name, maxNeeds)
			}
			path, err := c.find(o, name)
			if err != nil {
				return err
			}
			c.known[name] = true
			c.order = append(c.order, name)
			if path == "" {
				continue
			}
			needed, err := c.add(name, path)
			if err != nil {
				return err
			}
			needed.loader = o
			queue = append(queue, needed)
		}
	}
	return nil
}

// add adds a library that travels.
func (c *closure) add(name, path string) (*Object, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	o, err := ReadObject(path, f, st.Size())
	if err != nil {
		return nil, err
	}
	o.origin = filepath.Dir(path)
	c.private = append(c.private, fileItem(libraries+"/"+name, path, st))
	return o, nil
}

// find returns the path of a library that o needs and that travels, or "" if every node has it.
func (c *closure) find(o *Object, name string) (path string, err error) {
	if strings.Contains(name, "/") {
		if c.isSystem(filepath.Dir(name)) {
			return "", nil
		}
		return "", fmt.Errorf("%s needs %s by its path, because that library has no DT_SONAME: link that library with -Wl,-soname,%s, then link %s again", o.name,
			name, filepath.Base(name), o.name)
	}
	if slices.Contains(ofCLibrary, name) || strings.HasPrefix(name, "ld-linux") {
		return "", nil
	}
	var looked, unusable []string
	for _, dir := range c.directories(o) {
		if slices.Contains(looked, dir) {
			continue
		}
		looked = append(looked, dir)
		path := filepath.Join(dir, name)
		switch err := o.accepts(path); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			unusable = append(unusable, err.Error())
		case slices.Contains(c.system, dir):
			return "", nil
		default:
			return path, nil
		}
	}
	text := fmt.Sprintf("%s needs %s, which was not found", o.name, name)
	if len(unusable) > 0 {
		text += " (" + strings.Join(unusable, ", ") + ")"
	}
	text += ". Start the program with the directory of " + name + " in LD_LIBRARY_PATH, or link " + filepath.Base(o.name) + " with -Wl,-rpath,DIRECTORY. " +
		"If the executors' nodes have the library, set RFAAS_BUNDLE_LIBRARIES=off. Searched: the system's directories"
	for _, dir := range looked {
		if !c.isSystem(dir) {
			text += " and " + dir
		}
	}
	return "", errors.New(text)
}

// directories returns where the dynamic linker looks for what o needs, in order.
func (c *closure) directories(o *Object) (dirs []string) {
	if len(o.runpath) == 0 {
		for l := o; l != nil; l = l.loader {
			dirs = append(dirs, l.expand(l.rpath)...)
		}
	}
	return slices.Concat(dirs, c.search, o.expand(o.runpath), c.configured, c.system)
}

// platforms are the values of $PLATFORM.
var platforms = map[elf.Machine]string{elf.EM_X86_64: "x86_64", elf.EM_AARCH64: "aarch64", elf.EM_PPC64: "power8", elf.EM_RISCV: "riscv64"}

// expand replaces the tokens of a run path. What $LIB means is compiled into the dynamic linker, so all values are tried.
func (o *Object) expand(list []string) (dirs []string) {
	for _, dir := range list {
		if strings.Contains(strings.NewReplacer("${ORIGIN}", "$ORIGIN").Replace(dir), "$ORIGIN") && o.origin == "" {
			continue // a library from memory is in no directory
		}
		for _, lib := range []string{"lib64", "lib", "lib/" + platforms[o.machine] + "-linux-gnu"} {
			d := strings.NewReplacer("${ORIGIN}", o.origin, "$ORIGIN", o.origin, "${LIB}", lib, "$LIB", lib, "${PLATFORM}", platforms[o.machine],
				"$PLATFORM", platforms[o.machine]).Replace(dir)
			if d = filepath.Clean(d); filepath.IsAbs(d) {
				dirs = append(dirs, d)
			}
			if d == filepath.Clean(dir) || !strings.Contains(dir, "LIB") {
				break
			}
		}
	}
	return dirs
}

// accepts returns nil for a file that the dynamic linker would load for o. fs.ErrNotExist: go on searching.
func (o *Object) accepts(path string) error {
	st, err := os.Stat(path)
	if err != nil || !st.Mode().IsRegular() {
		if err == nil {
			err = fmt.Errorf("%s is not a file", path)
		}
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var h [20]byte
	if _, err := f.ReadAt(h[:], 0); err != nil || !bytes.Equal(h[:4], []byte(elf.ELFMAG)) {
		return fmt.Errorf("%s is not an ELF file", path)
	}
	if elf.Class(h[elf.EI_CLASS]) != o.class || elf.Machine(uint16(h[18])|uint16(h[19])<<8) != o.machine {
		return fs.ErrNotExist // for another machine: the linker continues without an error
	}
	return nil
}

// isSystem reports whether every node has the directory.
func (c *closure) isSystem(dir string) bool { return slices.Contains(c.system, filepath.Clean(dir)) }

// systemRoots are the directories that workers see of their node, and in which a node's packages are. Libraries elsewhere are sent, even if the
// node's linker finds them, like those of /usr/local.
var systemRoots = []string{"/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32"}

// systemDirectories returns the directories that the dynamic linker searches last: those of /etc/ld.so.conf that are not the system's, and the
// system's.
func systemDirectories() (configured, system []string) {
	for _, dir := range linkerConfiguration("/etc/ld.so.conf", 0) {
		if slices.ContainsFunc(systemRoots, func(root string) bool { return dir == root || strings.HasPrefix(dir, root+"/") }) {
			system = append(system, dir)
		} else {
			configured = append(configured, dir)
		}
	}
	for _, dir := range []string{"/lib64", "/usr/lib64", "/lib", "/usr/lib"} {
		if !slices.Contains(system, dir) {
			system = append(system, dir)
		}
	}
	return configured, system
}

// maxIncludes bounds the nesting of the linker's configuration.
const maxIncludes = 8

// linkerConfiguration returns the directories of a file like /etc/ld.so.conf. What cannot be read is left out.
func linkerConfiguration(path string, depth int) (dirs []string) {
	if depth == maxIncludes {
		return nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" \t\r\n:,", r) })
		if len(fields) > 1 && fields[0] == "include" {
			for _, pattern := range fields[1:] {
				if !filepath.IsAbs(pattern) {
					pattern = filepath.Join(filepath.Dir(path), pattern)
				}
				files, _ := filepath.Glob(pattern)
				for _, f := range files {
					dirs = append(dirs, linkerConfiguration(f, depth+1)...)
				}
			}
			continue
		}
		for _, dir := range fields {
			if filepath.IsAbs(dir) {
				dirs = append(dirs, filepath.Clean(dir))
			}
		}
	}
	return dirs
}
