package client_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

// The libraries of these tests: each of the first two needs the other, and the second has no name of its own.
const (
	firstSource  = "int second(int n); int first(int n) { return n ? n + second(n - 1) : 0; }"
	secondSource = "int first(int n); int second(int n) { return n ? n + first(n - 1) : 0; }"
)

// link compiles C source into a shared library.
func link(t *testing.T, out, source string, flags ...string) {
	t.Helper()
	cmd := exec.Command("gcc", append([]string{"-shared", "-fPIC", "-o", out, "-x", "c", "-", "-x", "none"}, flags...)...)
	cmd.Stdin = strings.NewReader(source)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
}

// needy compiles a library of functions into a new directory, and the libraries that it needs into the directory "deps" beside it. runPath is the
// path by which the library names "deps".
func needy(t *testing.T, runPath func(deps string) string) (deps, library string) {
	t.Helper()
	dir := t.TempDir()
	deps, library = filepath.Join(dir, "deps"), filepath.Join(dir, "needy.so")
	if err := os.Mkdir(deps, 0o755); err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("testdata/bundle.c")
	if err != nil {
		t.Fatal(err)
	}
	first, second := filepath.Join(deps, "libfirst.so.1"), filepath.Join(deps, "libsecond.so")
	link(t, second, secondSource)
	link(t, first, firstSource, "-Wl,-soname,libfirst.so.1", "-L"+deps, "-lsecond", "-Wl,-rpath,$ORIGIN")
	link(t, second, secondSource, first, "-Wl,-rpath,$ORIGIN")
	link(t, library, string(source), "-DNEEDS", "-D_GNU_SOURCE", "-I../worker", first, "-Wl,-rpath-link,"+deps, runPath(deps))
	return deps, library
}

// checkSum calls the function that needs both libraries.
func checkSum(t *testing.T, l *client.Lease) {
	t.Helper()
	out := make([]byte, 8)
	if _, err := function(t, l, "bundle_sum").Invoke(t.Context(), nil, out); err != nil {
		t.Fatal(err)
	}
	if sum, before := binary.LittleEndian.Uint32(out), binary.LittleEndian.Uint32(out[4:]); sum != 55 || before != 10 {
		t.Errorf("the libraries computed %d, and %d in a constructor, want 55 and 10", sum, before)
	}
}

func ask(t *testing.T, l *client.Lease, name, arg string) (int32, error) {
	t.Helper()
	out := make([]byte, 4)
	_, err := function(t, l, name).Invoke(t.Context(), append([]byte(arg), 0), out)
	return int32(binary.LittleEndian.Uint32(out)), err
}

func text(t *testing.T, l *client.Lease, name, arg string) (string, error) {
	t.Helper()
	out := make([]byte, 8192)
	n, err := function(t, l, name).Invoke(t.Context(), append([]byte(arg), 0), out)
	return string(out[:max(n, 0)]), err
}

// TestBundleOfLibraries runs a library that needs two others, which need each other, and which workers find nowhere but in their bundle.
func TestBundleOfLibraries(t *testing.T) {
	w := newWorld(t)
	for name, runPath := range map[string]func(deps string) string{
		"relative run path":          func(string) string { return "-Wl,-rpath,$ORIGIN/deps" },
		"absolute run path":          func(deps string) string { return "-Wl,-rpath," + deps },
		"older kind of a run path":   func(string) string { return "-Wl,--disable-new-dtags,-rpath,${ORIGIN}/deps" },
		"one of several directories": func(deps string) string { return "-Wl,-rpath,/nowhere:$ORIGIN/../x:" + deps },
	} {
		t.Run(name, func(t *testing.T) {
			deps, library := needy(t, runPath)
			l := w.lease(t, client.LeaseOptions{Library: library, Workers: 2})
			checkSum(t, l)
			if sees, err := ask(t, l, "bundle_sees", library); sees != 0 || err != nil {
				t.Errorf("a worker sees %s: %v", library, err)
			}
			release(t, l)
			if err := os.Rename(filepath.Join(deps, "libsecond.so"), filepath.Join(deps, "away")); err != nil {
				t.Fatal(err)
			}
			refusedFor(t, w, client.LeaseOptions{Library: library}, deps+"/libfirst.so.1 needs libsecond.so, which was not found",
				"LD_LIBRARY_PATH", "RFAAS_BUNDLE_LIBRARIES=off")
		})
	}
}

// refusedFor expects that a lease is refused, with these parts of the text.
func refusedFor(t *testing.T, w *world, o client.LeaseOptions, parts ...string) {
	t.Helper()
	l, err := w.session.Lease(t.Context(), o)
	if err == nil {
		release(t, l)
	}
	if !errors.Is(err, client.ErrInvalid) {
		t.Errorf("%v, want %v", err, client.ErrInvalid)
		return
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%v\ndoes not say %q", err, p)
		}
	}
}

// tree makes a directory like a virtual environment: n files in directories of 50, programs, and links inside and outside.
func tree(t *testing.T, n int) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "venv")
	for i := range n {
		path := filepath.Join(dir, "lib", fmt.Sprint("package", i/50), fmt.Sprint("module", i, ".py"))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(fmt.Sprint("module ", i)), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	outside := filepath.Join(t.TempDir(), "python")
	if err := errors.Join(os.WriteFile(outside, []byte("program"), 0o755), os.Mkdir(filepath.Join(dir, "bin"), 0o700), os.Symlink("lib", filepath.Join(dir, "lib64")),
		os.Symlink(outside, filepath.Join(dir, "bin", "python3")), os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestBundleOfFiles has functions read a file and a directory that travel with their library, and fail to change them.
func TestBundleOfFiles(t *testing.T) {
	const files = 400
	w := newWorld(t)
	model, venv := filepath.Join(t.TempDir(), "model.bin"), tree(t, files)
	weights := strings.Repeat("weights ", 512)
	if err := os.WriteFile(model, []byte(weights), 0o600); err != nil {
		t.Fatal(err)
	}
	o := client.LeaseOptions{Library: compile(t, "bundle.so", "", "testdata/bundle.c", "-I../worker", "-D_GNU_SOURCE", "-O1"), Workers: 2, Bundle: []string{model, venv + "/"}}
	for _, again := range []string{"first", "second"} {
		l := w.lease(t, o)
		for name, want := range map[string]string{"model.bin": weights, "venv/lib/package7/module399.py": "module 399", "venv/lib64/package0/module1.py": "module 1",
			"venv/bin/python3": "program", "venv/empty": ""} {
			if got, err := text(t, l, "bundle_read", name); err != nil || got != want {
				t.Errorf("%s lease: %s: %.20q, %v", again, name, got, err)
			}
		}
		if n, err := ask(t, l, "bundle_count", "venv"); err != nil || n != files+3 {
			t.Errorf("%d files in the directory, want %d: %v", n, files+3, err)
		}
		for _, name := range []string{"other", "..", ".", "", "venv/lib", "/etc", ".rfaas"} {
			if path, err := text(t, l, "bundle_path", name); path != "" || err != nil {
				t.Errorf("%q is at %q: %v", name, path, err)
			}
		}
		for _, name := range []string{"model.bin", "venv/new", "venv/lib/package0/module0.py"} {
			if e, err := ask(t, l, "bundle_write", name); unix.Errno(e) != unix.EROFS && unix.Errno(e) != unix.EACCES {
				t.Errorf("write to %s: %v, %v", name, unix.Errno(e), err)
			}
		}
		release(t, l)
	}
	plain := w.lease(t, client.LeaseOptions{Library: o.Library})
	if path, _ := text(t, plain, "bundle_path", "model.bin"); path != "" {
		t.Errorf("a lease without a bundle sees %q", path)
	}
	release(t, plain)
	changed := strings.Repeat("others! ", 512)
	if err := os.WriteFile(model, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	l := w.lease(t, o)
	if got, err := text(t, l, "bundle_read", "model.bin"); got != changed {
		t.Errorf("after a change: %.20q, %v", got, err)
	}
}

// TestBundleRefused opens leases with bad bundles. Each error names the mistake, and a later lease succeeds.
func TestBundleRefused(t *testing.T) {
	w := newWorld(t, "--table-limit", "1MiB")
	library := compile(t, "bundle.so", "", "testdata/bundle.c", "-I../worker", "-D_GNU_SOURCE", "-O1")
	dir := t.TempDir()
	large, fifo, loop := filepath.Join(dir, "large"), filepath.Join(dir, "fifo"), filepath.Join(dir, "loop")
	if err := errors.Join(os.WriteFile(large, make([]byte, 2<<20), 0o600), unix.Mkfifo(fifo, 0o600), os.Mkdir(loop, 0o700), os.Symlink(loop, filepath.Join(loop, "again")), os.Symlink("nowhere", filepath.Join(dir, "dangling")),
		os.Mkdir(filepath.Join(dir, "x"), 0o700), os.WriteFile(filepath.Join(dir, "x", "fifo"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		files []string
		text  string
	}{
		{[]string{filepath.Join(dir, "none")}, "bundle: lstat " + dir + "/none: no such file"},
		{[]string{large}, "bytes of bundles and tables for a tenant (table-limit)"},
		{[]string{fifo}, fifo + " is neither a file nor a directory"},
		{[]string{loop}, loop + "/again links to a directory that contains it"},
		{[]string{large, filepath.Join(dir, "x", "fifo"), fifo}, "have the same name in the bundle"},
		{[]string{"/"}, "/ cannot be bundled, because it has no name"},
		{[]string{filepath.Join(dir, "dangling")}, dir + "/dangling is a symbolic link to nowhere, which does not exist"},
		{[]string{"a:b"}, `"a:b" contains a colon`},
		{[]string{"/" + strings.Repeat("n", 4100)}, "more than 4095 bytes"},
		{[]string{filepath.Join(dir, ".rfaas")}, "same name in the bundle"},
	} {
		refusedFor(t, w, client.LeaseOptions{Library: library, Bundle: c.files}, c.text)
	}
	l := w.lease(t, client.LeaseOptions{Library: library, Bundle: []string{filepath.Join(dir, "x")}})
	if n, err := ask(t, l, "bundle_count", "x"); n != 1 {
		t.Errorf("%d files, %v", n, err)
	}
}

// TestBundleMoves moves a lease to another executor, which gets the bundle too, and then to another program in the same process.
func TestBundleMoves(t *testing.T) {
	g := newGrid(t)
	first := g.more()
	s := g.manager.session(t, g.secret)
	_, library := needy(t, func(string) string { return "-Wl,-rpath,$ORIGIN/deps" })
	data := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(data, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := &moves{t: t, to: make(chan string, 16)}
	o := client.LeaseOptions{Library: library, Bundle: []string{data}, Failover: true, OnEvent: m.on}
	l, err := s.Lease(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	m.echo = function(t, l, "bundle_sum")
	check := func(l *client.Lease) {
		t.Helper()
		checkSum(t, l)
		if got, err := text(t, l, "bundle_read", "data"); got != "data" {
			t.Errorf("data: %q, %v", got, err)
		}
	}
	check(l)
	second := g.more()
	first.signal(syscall.SIGKILL)
	within(t, 20*time.Second, "the lease has moved", func() bool {
		_, err := m.echo.Invoke(t.Context(), nil, make([]byte, 8))
		return err == nil
	})
	m.want(second.Address)
	check(l)
	second.handOver(t)
	check(l)
	o.OnEvent = nil
	other, err := s.Lease(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	check(other)
}

// TestBundleHere runs functions in this process, where they find the program's own files.
func TestBundleHere(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "data"), []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	library := compile(t, "here.so", "", "testdata/bundle.c", "-I../worker", "-D_GNU_SOURCE", "-O1")
	whole := w.lease(t, client.LeaseOptions{Workers: 2})
	l := w.lease(t, client.LeaseOptions{Library: library, Local: true, Bundle: []string{library, filepath.Join(dir, "data")}})
	if l.Provider() != "local" {
		t.Fatalf("the lease is on %s", l.Provider())
	}
	if got, err := text(t, l, "bundle_path", "data"); got != filepath.Join(dir, "data") {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := text(t, l, "bundle_path", "ata"); got != "" {
		t.Errorf("%q, %v", got, err)
	}
	release(t, whole)
}

// TestBundleByEnvironment calls functions from a program with and without LD_LIBRARY_PATH, on executors with and without a sandbox.
func TestBundleByEnvironment(t *testing.T) {
	deps, library := needy(t, func(string) string { return "-Wl,-rpath,/none" })
	for _, sandbox := range []string{"on", "off"} {
		w := newWorld(t, "--sandbox", sandbox)
		invoke := func(env ...string) ([]byte, error) {
			cmd := exec.Command(built(t, "bin/rfaas"), "invoke", "--executor", w.Address, "--provider", provider(), library, "bundle_sum")
			cmd.Env = append(os.Environ(), append(env, "RFAAS_SECRET_FILE="+w.secret)...)
			return cmd.CombinedOutput()
		}
		out, err := invoke("LD_LIBRARY_PATH=/none:" + deps)
		if err != nil || len(out) < 8 || binary.LittleEndian.Uint32(out) != 55 {
			t.Errorf("sandbox %s: %v\n%q", sandbox, err, out)
		}
		out, err = invoke("LD_LIBRARY_PATH=")
		if err == nil || !strings.Contains(string(out), "needy.so needs libfirst.so.1, which was not found") {
			t.Errorf("sandbox %s, without the variable: %v\n%s", sandbox, err, out)
		}
		out, err = invoke("LD_LIBRARY_PATH=", "RFAAS_BUNDLE_LIBRARIES=off")
		if err == nil || !strings.Contains(string(out), "libfirst.so.1: cannot open shared object file") ||
			!strings.Contains(string(out), "RFAAS_BUNDLE_LIBRARIES=off") {
			t.Errorf("sandbox %s, libraries do not travel: %v\n%s", sandbox, err, out)
		}
	}
}
