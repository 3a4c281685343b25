package bundle

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func never() error { return nil }

// shared compiles a library that needs the libraries named by the flags.
func shared(t *testing.T, out string, flags ...string) *Object {
	t.Helper()
	cmd := exec.Command("gcc", append([]string{"-shared", "-fPIC", "-o", out, "-x", "c", "-", "-x", "none", "-Wl,--no-as-needed"}, flags...)...)
	cmd.Stdin = strings.NewReader("int f(void) { return 1; }")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	o, err := ReadObject(out, bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func names(b *Bundle) (list []string) {
	for i := range b.items {
		list = append(list, b.items[i].name)
	}
	return list
}

// TestSystemLibrariesStay finds nothing that travels with a library that needs only what every node has.
func TestSystemLibrariesStay(t *testing.T) {
	var f Finder
	o := shared(t, filepath.Join(t.TempDir(), "plain.so"), "-lm", "-lstdc++")
	if b, err := f.Find(Wanted{Library: o, Directory: "/x"}, never); b != nil || err != nil {
		t.Errorf("%v, %v", b, err)
	}
}

// TestLibraryPath finds libraries in LD_LIBRARY_PATH before the run path. The error lists the files that it could not use.
func TestLibraryPath(t *testing.T) {
	var f Finder
	dir, other := t.TempDir(), t.TempDir()
	dep := filepath.Join(dir, "libdep.so")
	shared(t, dep, "-Wl,-soname,libdep.so")
	o := shared(t, filepath.Join(dir, "lib.so"), dep, "-Wl,-rpath,"+other)
	find := func() (*Bundle, error) {
		return f.Find(Wanted{Library: o, Directory: dir, Search: []string{dir}}, never)
	}
	b, err := find()
	if err != nil || strings.Join(names(b), " ") != ".rfaas .rfaas/lib .rfaas/libraries.so .rfaas/lib/libdep.so" || b.items[3].from != dep {
		t.Fatalf("%v, %v", b, err)
	}
	if err := errors.Join(os.Remove(dep), os.Mkdir(dep, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func() error
		want   string
	}{
		{never, dep + " is not a file"},
		{func() error { return errors.Join(os.Remove(dep), os.WriteFile(dep, []byte("#!"), 0o755)) }, dep + " is not an ELF file"},
		{func() error { return os.Remove(dep) }, "lib.so needs libdep.so, which was not found. Start the program with the directory of libdep.so in LD_LIBRARY_PATH"},
		{func() error {
			shared(t, dep)
			return os.Truncate(dep, 4096)
		}, dep},
	} {
		if err := c.change(); err != nil {
			t.Fatal(err)
		}
		if _, err := find(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	shared(t, dep) // without a name: the linker notes the path
	byPath := shared(t, filepath.Join(dir, "bypath.so"), dep)
	if _, err := f.Find(Wanted{Library: byPath, Directory: dir}, never); err == nil || !strings.Contains(err.Error(), "-Wl,-soname,libdep.so") {
		t.Errorf("needed by path: %v", err)
	}
}

// TestPacked unpacks a bundle, and notices a file that changes after its hash was computed.
func TestPacked(t *testing.T) {
	var f Finder
	dir := filepath.Join(t.TempDir(), "tree")
	file := filepath.Join(dir, "sub", "file")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte("content"), 0o755), os.Symlink("sub/file", filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	b, err := f.Find(Wanted{Files: []string{dir}}, never)
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	if err := b.Pack(&packed, never); err != nil || uint64(packed.Len()) != b.Size {
		t.Fatalf("%d bytes of %d: %v", packed.Len(), b.Size, err)
	}
	into := t.TempDir()
	root, err := os.OpenRoot(into)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := Unpack(&packed, root, b.Size); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(into, "tree", "link"))
	st, _ := os.Stat(filepath.Join(into, "tree", "sub", "file"))
	if string(got) != "content" || err != nil || st.Mode().Perm() != 0o555 {
		t.Errorf("%q, %v, %v", got, st.Mode(), err)
	}
	if err := os.WriteFile(file, []byte("CONTENT"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := b.Pack(io.Discard, never); err == nil || !strings.Contains(err.Error(), "a file has changed") {
		t.Errorf("changed: %v", err)
	}
	if again, err := f.Find(Wanted{Files: []string{dir}}, never); err != nil || again.Sum == b.Sum {
		t.Errorf("found again: %v", err)
	}
}

// nested returns the entries of a directory and of its parent directories.
func nested(name string) (entries []tar.Header) {
	for i, c := range name + "/" {
		if c == '/' {
			entries = append(entries, tar.Header{Name: name[:i], Typeflag: tar.TypeDir})
		}
	}
	return entries
}

// TestUnpackRefuses unpacks archives that a forged client sends. Nothing is written outside the directory.
func TestUnpackRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		want    string
		entries []tar.Header
	}{
		"above":            {"not a relative path", []tar.Header{{Name: "../x", Typeflag: tar.TypeReg}}},
		"above in between": {"not a relative path", []tar.Header{{Name: "a/../../x", Typeflag: tar.TypeReg}}},
		"absolute":         {"not a relative path", []tar.Header{{Name: "/tmp/x", Typeflag: tar.TypeReg}}},
		"not shortest":     {"not a relative path", []tar.Header{{Name: "a//x", Typeflag: tar.TypeReg}}},
		"itself":           {"not a relative path", []tar.Header{{Name: ".", Typeflag: tar.TypeDir}}},
		"long":             {"not a relative path", []tar.Header{{Name: strings.Repeat("n", 1025), Typeflag: tar.TypeReg}}},
		"link out":         {"which is or may be outside", []tar.Header{{Name: "a", Typeflag: tar.TypeDir}, {Name: "a/l", Linkname: "../../x", Typeflag: tar.TypeSymlink}}},
		"absolute link":    {"which is or may be outside", []tar.Header{{Name: "l", Linkname: "/etc", Typeflag: tar.TypeSymlink}}},
		// If a link's target passes through another link, where it leads depends on that link.
		"up behind a link": {"which is or may be outside", append(nested("d/a/b"), tar.Header{Name: "d/a/b/up", Linkname: "../..", Typeflag: tar.TypeSymlink},
			tar.Header{Name: "d/out", Linkname: "a/b/up/../..", Typeflag: tar.TypeSymlink})},
		"up behind a name": {"which is or may be outside", append(nested("d/a"), tar.Header{Name: "d/l", Linkname: "..//d/./a/..", Typeflag: tar.TypeSymlink})},
		"through a link": {"no entry before it is its directory", append(nested("d/a/b"), tar.Header{Name: "d/a/b/up", Linkname: "../..", Typeflag: tar.TypeSymlink},
			tar.Header{Name: "d/a/b/up/out", Linkname: "../../..", Typeflag: tar.TypeSymlink})},
		"deep":         {"in more than 64 directories", nested(strings.Repeat("d/", 65) + "d")},
		"deep link":    {"more than 65 names long", []tar.Header{{Name: "d", Typeflag: tar.TypeDir}, {Name: "d/l", Linkname: strings.Repeat("d/", 65) + "d", Typeflag: tar.TypeSymlink}}},
		"hard link":    {"want files, directories", []tar.Header{{Name: "h", Linkname: "/etc/passwd", Typeflag: tar.TypeLink}}},
		"device":       {"want files, directories", []tar.Header{{Name: "d", Devmajor: 1, Devminor: 3, Typeflag: tar.TypeChar}}},
		"fifo":         {"want files, directories", []tar.Header{{Name: "f", Typeflag: tar.TypeFifo}}},
		"twice":        {"file exists", []tar.Header{{Name: "a", Typeflag: tar.TypeReg}, {Name: "a", Typeflag: tar.TypeReg}}},
		"no directory": {"no entry before it is its directory", []tar.Header{{Name: "a/b", Typeflag: tar.TypeReg}}},
		"too large":    {"more than was announced", []tar.Header{{Name: "a", Size: 1 << 20, Typeflag: tar.TypeReg}}},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for i := range c.entries {
				if err := w.WriteHeader(&c.entries[i]); err != nil {
					t.Fatal(err)
				}
			}
			above := t.TempDir()
			into := filepath.Join(above, "into")
			if err := os.Mkdir(into, 0o755); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(into)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			if err := Unpack(io.MultiReader(&b, zeros{}), root, 1<<19); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if found, _ := os.ReadDir(above); len(found) != 1 {
				t.Errorf("%d files beside the directory", len(found)-1)
			}
		})
	}
}

func FuzzUnpack(f *testing.F) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: "a/", Typeflag: tar.TypeDir})
	_ = w.WriteHeader(&tar.Header{Name: "a/b", Size: 3, Typeflag: tar.TypeReg})
	_, _ = w.Write([]byte("abc"))
	_ = w.Close()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		above := t.TempDir()
		into := filepath.Join(above, "into")
		if err := os.Mkdir(into, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(into)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		_ = Unpack(bytes.NewReader(data), root, 1<<20)
		if found, _ := os.ReadDir(above); len(found) != 1 {
			t.Errorf("%d files beside the directory", len(found)-1)
		}
	})
}

// TestTooManyFiles stops at the bound, before it reads a file.
func TestTooManyFiles(t *testing.T) {
	b := Bundle{items: make([]item, maxItems)}
	if err := b.add(item{from: "/last"}); err == nil || !strings.Contains(err.Error(), "more than 65536 files and directories, with /last") {
		t.Error(err)
	}
}
