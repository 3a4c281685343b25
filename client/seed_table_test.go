package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

// mappedLibrary compiles one of the libraries of testdata/mapped.c: with -DMAKES, the one that makes the seed.
func mappedLibrary(t *testing.T, name string, flags ...string) string {
	t.Helper()
	return compile(t, name+".so", "", append([]string{"testdata/mapped.c", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Werror", "-I../worker"}, flags...)...)
}

// treeOf is the payload of a setup function of testdata/mapped.c.
func treeOf(nodes, mb uint64) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, nodes), mb)
}

// makeTree makes a seed with a tree at an executor; "": any.
func makeTree(t *testing.T, s *client.Session, executor, setup string, payload []byte) (*client.Seed, error) {
	t.Helper()
	l, err := s.Lease(context.Background(), client.LeaseOptions{Library: mappedLibrary(t, "makes", "-DMAKES"), Executor: executor, Memory: 256 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer release(t, l)
	return l.CreateSeed(context.Background(), setup, payload, client.SeedOptions{Name: "tree"})
}

// walkTree reads the tree in a worker.
func walkTree(t *testing.T, l *client.Lease, worker int, nodes, mb uint64) {
	t.Helper()
	out := make([]byte, 24)
	if _, err := l.Worker(worker).Invoke(context.Background(), function(t, l, "walk"), nil, out); err != nil {
		t.Fatal(err)
	}
	sum, n, rest := binary.LittleEndian.Uint64(out), binary.LittleEndian.Uint64(out[8:]), binary.LittleEndian.Uint64(out[16:])
	if sum != nodes*(nodes-1)/2 || n != nodes || rest != 7*((mb*1000000+4095)/4096) {
		t.Errorf("worker %d: a sum of %d, %d nodes, and %d, want %d nodes", worker, sum, n, rest, nodes)
	}
}

// Workers of another library read a tree that a setup function has made, by its pointers. They cannot change it. Replacements have it, too, after a handover and when the
// seed was released.
func TestSeedTable(t *testing.T) {
	const nodes = 10000
	w := newWorld(t, "--share-cores", "4")
	seed, err := makeTree(t, w.session, "", "prepare", treeOf(nodes, 8))
	if err != nil {
		t.Fatal(err)
	}
	s := w.connect(t, w.options())
	if err := s.PutTableSeed(t.Context(), "tree", seed.Name()); err != nil {
		t.Fatal(err)
	}
	o := client.LeaseOptions{Library: mappedLibrary(t, "uses"), Workers: 2}
	l, err := s.Lease(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		walkTree(t, l, i, nodes, 8)
		if got := numbers(t, l, i, "unprotect"); unix.Errno(got[0]) != unix.EACCES {
			t.Errorf("to make the tree writable: %v", unix.Errno(got[0]))
		}
	}
	scribble := func() {
		t.Helper()
		var e *client.Error
		if _, err := l.Worker(1).Invoke(t.Context(), function(t, l, "scribble"), nil, nil); !errors.As(err, &e) || e.Status != client.StatusWorkerDied {
			t.Errorf("a function has written to the tree: %v", err)
		}
		walkTree(t, l, 1, nodes, 8)
		walkTree(t, l, 0, nodes, 8)
	}
	scribble()
	if provider() != "verbs" { // whose connections cannot be handed over
		w.handOver(t)
		walkTree(t, l, 0, nodes, 8)
		scribble()
	}
	if err := seed.Release(); err != nil {
		t.Fatal(err)
	}
	scribble()
	release(t, l)
	_, err = s.Lease(t.Context(), o)
	if !errors.Is(err, client.ErrLease) || !strings.Contains(err.Error(), seed.Name()) {
		t.Errorf("a lease after the seed was released: %v", err)
	}
}

// Each reason for which a seed cannot be a table is named.
func TestSeedTableRefused(t *testing.T) {
	w := newWorld(t, "--share-cores", "4")
	made, err := makeTree(t, w.session, "", "prepare", treeOf(10, 0))
	if err != nil {
		t.Fatal(err)
	}
	rootless, err := makeTree(t, w.session, "", "prepare_nothing", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := makeTree(t, w.session, "", "prepare_static", nil); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "not in memory from malloc") {
		t.Errorf("a static root: %v", err)
	}
	s := w.connect(t, w.options())
	name, version, _ := strings.Cut(made.Name(), ":")
	_, address, _ := strings.Cut(version, "@")
	for _, c := range []struct {
		table, seed string
		class       error
		text        string
	}{
		{"tree", "", client.ErrInvalid, "full name"},
		{"tree", "tree", client.ErrInvalid, "NAME:VERSION@"},
		{"tree\x00", made.Name(), client.ErrInvalid, "NUL"},
		{"", made.Name(), client.ErrInvalid, "name is empty"},
		{"tree", name + ":1@" + address, client.ErrLease, "no seed tree:1"},
		{"tree", rootless.Name(), client.ErrInvalid, "prepare_nothing must call rfaas_set_root"},
	} {
		if err := s.PutTableSeed(t.Context(), c.table, c.seed); !errors.Is(err, c.class) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("table %q of seed %q: %v, want %q", c.table, c.seed, err, c.text)
		}
	}
	if err := s.PutTableSeed(t.Context(), "tree", made.Name()); err != nil {
		t.Fatal(err)
	}
	for table, text := range map[string]string{"tree": "already", "other": "another seed as a table"} {
		if err := s.PutTableSeed(t.Context(), table, made.Name()); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), text) {
			t.Errorf("a second one, %q: %v, want %q", table, err, text)
		}
	}
	_, err = s.Lease(t.Context(), client.LeaseOptions{Library: mappedLibrary(t, "takes", "-DTAKES")})
	if !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `table "tree": other memory of the worker lies in the`) {
		t.Errorf("a library that takes the address: %v", err)
	}
	own := client.LeaseOptions{Library: mappedLibrary(t, "makes", "-DMAKES"), InitFunction: "prepare", InitPayload: treeOf(10, 0), SeedRequired: true, Memory: 256 << 20}
	if _, err := s.Lease(t.Context(), own); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), `maps another seed as its table "tree"`) {
		t.Errorf("a lease with a seed of its own: %v", err)
	}
}

// Other executors copy the seed, also from each other, when the one that has made it is gone.
func TestSeedTableIsCopied(t *testing.T) {
	const nodes = 20000
	all, s, _ := seedCluster(t, 3)
	seed, err := makeTree(t, s, all[0].Address, "prepare", treeOf(nodes, 4))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.PutTableSeed(t.Context(), "tree", seed.Name()); err != nil {
		t.Fatal(err)
	}
	use := func(at *daemon) {
		t.Helper()
		l, err := s.Lease(t.Context(), client.LeaseOptions{Library: mappedLibrary(t, "uses"), Executor: at.Address})
		if err != nil {
			t.Fatal(err)
		}
		walkTree(t, l, 0, nodes, 4)
		release(t, l)
	}
	for range 2 {
		use(all[1])
		use(all[0])
	}
	all[0].signal(syscall.SIGKILL)
	ends(t, "the executor", all[0].done)
	use(all[2])
	use(all[1])
}

// A map of the standard library of C++ is a table, too.
func TestSeedTableOfCpp(t *testing.T) {
	library := func(name string, flags ...string) string {
		return compile(t, name+".so", "", append([]string{"-xc++", "testdata/mapped.cpp", "-O2", "-Wall", "-Werror", "-I../worker", "-I../client/cpp", "-lstdc++"}, flags...)...)
	}
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Library: library("cppmakes", "-DMAKES"), Memory: 64 << 20})
	seed, err := l.CreateSeed(t.Context(), "prepare", nil, client.SeedOptions{Name: "numbers"})
	if err != nil {
		t.Fatal(err)
	}
	release(t, l)
	if err := w.session.PutTableSeed(t.Context(), "numbers", seed.Name()); err != nil {
		t.Fatal(err)
	}
	l = w.lease(t, client.LeaseOptions{Library: library("cppuses")})
	out := make([]byte, 8)
	if _, err := l.Worker(0).Invoke(t.Context(), function(t, l, "look_up"), nil, out); err != nil {
		t.Fatal(err)
	}
	if got := math.Float64frombits(binary.LittleEndian.Uint64(out)); got != 999*1000/2+3+3+1001 {
		t.Errorf("%g", got)
	}
	if _, err := l.Worker(0).Invoke(t.Context(), function(t, l, "look_elsewhere"), nil, out); !errors.Is(err, client.ErrFunction) || !strings.Contains(err.Error(), "bytes, want 8") {
		t.Errorf("a root of another type: %v", err)
	}
}
