package client_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// look is what a worker sees of a table.
type look struct{ address, size, sum uint64 }

func (w *world) tableLease(t *testing.T, o client.LeaseOptions) *client.Lease {
	t.Helper()
	o.Library = library(t, "table")
	return w.lease(t, o)
}

func lookAt(t *testing.T, l *client.Lease, worker int, name string) look {
	t.Helper()
	out := make([]byte, 24)
	if _, err := l.Worker(worker).Invoke(t.Context(), function(t, l, "table_look"), append([]byte(name), 0), out); err != nil {
		t.Fatal(err)
	}
	return look{binary.LittleEndian.Uint64(out), binary.LittleEndian.Uint64(out[8:]), binary.LittleEndian.Uint64(out[16:])}
}

// randomTable returns bytes and what a worker sees of them.
func randomTable(size int) ([]byte, look) {
	b, want := make([]byte, size), look{size: uint64(size)}
	for i := range b {
		b[i] = byte(rand.Uint32())
		if i%4096 == 0 {
			want.sum += uint64(b[i])
		}
	}
	return b, want
}

func (l look) check(t *testing.T, what string, want look) {
	t.Helper()
	if l.size != want.size || l.sum != want.sum || l.address == 0 || l.address%4096 != 0 {
		t.Errorf("%s: %+v, want %+v", what, l, want)
	}
}

// publish publishes a table, which later tests of the session do not need.
func publish(t *testing.T, s *client.Session, name string, address uint64, parts ...client.Piece) {
	t.Helper()
	if err := s.PutTableAt(t.Context(), name, address, parts...); err != nil {
		t.Fatal(err)
	}
}

// TestTable has two workers and their replacements read tables: one of three pieces, one at a fixed address, one that does not exist.
func TestTable(t *testing.T) {
	const fixed = 0x200000000000
	w := newWorld(t)
	data, want := randomTable(3<<20 + 4097)
	publish(t, w.session, "cross sections", 0, client.Piece{Bytes: data[:5]}, client.Piece{}, client.Piece{Bytes: data[5 : 2<<20]}, client.Piece{Bytes: data[2<<20:]})
	clear(data) // it was copied
	small, wantSmall := randomTable(100)
	publish(t, w.session, "small", fixed, client.Piece{Bytes: small})
	l := w.tableLease(t, client.LeaseOptions{Workers: 2})
	for i := range 2 {
		lookAt(t, l, i, "cross sections").check(t, "pieces", want)
		got := lookAt(t, l, i, "small")
		got.check(t, "small", wantSmall)
		if got.address != fixed {
			t.Errorf("at %#x, want %#x", got.address, fixed)
		}
		if none := lookAt(t, l, i, "smal"); none != (look{}) {
			t.Errorf("no table: %+v", none)
		}
	}
	var e *client.Error
	if _, err := l.Worker(1).Invoke(t.Context(), function(t, l, "table_write"), []byte("small\x00"), nil); !errors.As(err, &e) || e.Status != client.StatusWorkerDied {
		t.Errorf("a function has written to a table: %v", err)
	}
	lookAt(t, l, 1, "small").check(t, "replaced worker", wantSmall)
	lookAt(t, l, 0, "small").check(t, "the other worker", wantSmall)
	if err := w.session.DropTable("small"); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `1 leases of the session may use "small"`) {
		t.Errorf("drop while it is used: %v", err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.session.DropTable("small"); err != nil {
		t.Error(err)
	}
	if l = w.tableLease(t, client.LeaseOptions{}); lookAt(t, l, 0, "small") != (look{}) {
		t.Error("a lease has a table that was dropped")
	}
	lookAt(t, l, 0, "cross sections").check(t, "another lease", want)
}

// TestTableLimits publishes invalid tables. The errors say what is wrong, and the other tables of the session stay.
func TestTableLimits(t *testing.T) {
	w := newWorld(t, "--table-limit", "64KiB")
	s := w.session
	data, want := randomTable(65536)
	publish(t, s, "fits", 0, client.Piece{Bytes: data})
	page := client.Piece{Bytes: make([]byte, 4096)}
	for _, c := range []struct {
		name, text string
		address    uint64
		part       client.Piece
	}{
		{"", "name is empty", 0, page},
		{strings.Repeat("n", 64), "name of 64 bytes, want at most 63", 0, page},
		{"a\x00b", "NUL", 0, page},
		{"fits", `has a table "fits" already`, 0, page},
		{"empty", "parts have 0 bytes", 0, client.Piece{}},
		{"at", "address 0x1001 is not a multiple", 0x1001, page},
		{"stride", "parts[0] has Size 2 and Stride 1", 0, client.Piece{Bytes: page.Bytes, Size: 2, Stride: 1}},
	} {
		if err := s.PutTableAt(t.Context(), c.name, c.address, c.part); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%q: %v", c.name, err)
		}
	}
	if err := s.DropTable("none"); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `no table "none"`) {
		t.Errorf("drop: %v", err)
	}
	l := w.tableLease(t, client.LeaseOptions{})
	lookAt(t, l, 0, "fits").check(t, "fits", want)
	publish(t, s, "second", 0, page)
	_, err := s.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table")})
	if !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `table "second" of 4096 bytes, after others of 65536 bytes: this executor keeps at most 65536 bytes`) {
		t.Errorf("beyond the limit together: %v", err)
	}
	full := w.connect(t, client.Options{Executor: w.Address, CachedLeases: -1})
	publish(t, full, "more", 0, page)
	_, err = full.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table")})
	if !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), `table of 4096 bytes: leases of this tenant use tables of 65536 bytes here, and it may have 65536 (table-limit)`) {
		t.Errorf("beyond the limit with another lease: %v", err)
	}
	lookAt(t, l, 0, "fits").check(t, "after a refusal", want)
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := w.connect(t, client.Options{Executor: w.Address, CachedLeases: -1})
	publish(t, other, "large", 0, client.Piece{Bytes: append(data, 1)})
	if _, err := other.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table")}); !errors.Is(err, client.ErrInvalid) ||
		!strings.Contains(err.Error(), `table "large" of 65537 bytes, after others of 0 bytes: this executor keeps at most 65536 bytes of tables for a tenant (table-limit)`) {
		t.Errorf("beyond the limit: %v", err)
	}
	overlap := w.connect(t, client.Options{Executor: w.Address, CachedLeases: -1})
	publish(t, overlap, "first", 0x200000000000, client.Piece{Bytes: make([]byte, 8192)})
	publish(t, overlap, "second", 0x200000001000, page)
	if _, err := overlap.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table")}); !errors.Is(err, client.ErrInvalid) ||
		!strings.Contains(err.Error(), `table "second": other memory of the worker lies in the 4096 bytes from 0x200000001000; choose another address`) {
		t.Errorf("overlapping tables: %v", err)
	}
	if err := s.DropTable("second"); err != nil {
		t.Fatal(err)
	}
	l = w.tableLease(t, client.LeaseOptions{})
	lookAt(t, l, 0, "fits").check(t, "at the end", want)
}

// library compiles functions in testdata.
func library(t *testing.T, name string) string {
	t.Helper()
	return compile(t, name+".so", "", "testdata/"+name+".c", "-I../worker", "-O1")
}

// TestTableMoves moves a lease with a table to another executor, which gets the table too. The workers of the new executor have it after a handover
// of their executor to another program, and so do those that are started afterwards.
func TestTableMoves(t *testing.T) {
	g := newGrid(t)
	first := g.more()
	s := g.manager.session(t, g.secret)
	data, want := randomTable(1 << 20)
	publish(t, s, "table", 0x200000000000, client.Piece{Bytes: data})
	m := &moves{t: t, to: make(chan string, 16)}
	l, err := s.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table"), Failover: true, OnEvent: m.on})
	if err != nil {
		t.Fatal(err)
	}
	m.echo = function(t, l, "table_at")
	lookAt(t, l, 0, "table").check(t, "the first executor", want)
	second := g.more()
	first.signal(syscall.SIGKILL)
	within(t, 20*time.Second, "the lease has moved", func() bool {
		_, err := l.Worker(0).Invoke(t.Context(), function(t, l, "table_look"), []byte("table\x00"), make([]byte, 24))
		return err == nil
	})
	m.want(second.Address)
	lookAt(t, l, 0, "table").check(t, "the second executor", want)
	second.handOver(t)
	lookAt(t, l, 0, "table").check(t, "after a handover", want)
	if _, err := l.Worker(0).Invoke(t.Context(), function(t, l, "table_write"), []byte("table\x00"), nil); err == nil {
		t.Error("a function has written to a table")
	}
	lookAt(t, l, 0, "table").check(t, "a worker of the program that has taken over", want)
	other, err := s.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table")})
	if err != nil {
		t.Fatal(err)
	}
	if got := lookAt(t, other, 0, "table"); got.address != 0x200000000000 || got.sum != want.sum {
		t.Errorf("a new lease after the handover: %+v", got)
	}
}

// available returns bytes of memory that this process can have.
func available(t *testing.T) uint64 {
	t.Helper()
	m, err := topology.AvailableMemory("/")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// pss returns the memory of processes, in which memory that several processes share counts once, in bytes.
func pss(t *testing.T, pids []int) (sum uint64) {
	t.Helper()
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			testkit.Lacks(t, "the right to look at workers: %v", err)
		}
		var kib uint64
		_, text, _ := strings.Cut(string(b), "\nPss:")
		if _, err := fmt.Sscan(text, &kib); err != nil {
			t.Fatalf("smaps_rollup: %v\n%s", err, b)
		}
		sum += kib << 10
	}
	return sum
}

// TestTableOfManyWorkers has eight workers of one node read a table of 240 MB. They have one copy of it, and only the first lease waits for its
// transfer: neither a second lease does, nor a second session that publishes the same bytes.
func TestTableOfManyWorkers(t *testing.T) {
	if available(t) < 2<<30 {
		testkit.Lacks(t, "2 GiB of memory")
	}
	const size, workers = 240_000_000, 8
	metrics := filepath.Join(t.TempDir(), "http")
	w := newWorld(t, "--share-cores", "4", "--pool", "1", "--http-listen", "unix:"+metrics)
	data, want := randomTable(size)
	open := func(s *client.Session, n int) *client.Lease {
		l, err := s.Lease(t.Context(), client.LeaseOptions{Library: library(t, "table"), Workers: n, Memory: 32 << 20})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	publish(t, w.session, "table", 0, client.Piece{Bytes: data})
	first := open(w.session, 1)
	lookAt(t, first, 0, "table").check(t, "the first worker", want)
	second := open(w.session, 1)
	lookAt(t, second, 0, "table").check(t, "the second worker", want)
	other := w.connect(t, client.Options{Executor: w.Address, CachedLeases: -1})
	publish(t, other, "same bytes", 0, client.Piece{Bytes: data[:1000]}, client.Piece{Bytes: data[1000:]})
	rest := open(other, workers-2)
	leases := []*client.Lease{first, second, rest}
	var pids []int
	for i, l := range leases {
		for k := range l.Workers() {
			pids = append(pids, l.Worker(k).PID())
			name := "table"
			if i == 2 {
				name = "same bytes"
			}
			lookAt(t, l, k, name).check(t, "a worker", want)
		}
	}
	memory := pss(t, pids)
	t.Logf("%d workers: %.1f MB, %.3f of the table", workers, float64(memory)/1e6, float64(memory)/size)
	if memory < size || float64(memory) > 1.1*size {
		t.Errorf("%d workers have %d bytes of memory, want 1 to 1.1 times the table's %d", workers, memory, size)
	}
	received := testkit.Metric(t, metrics, "rfaas_executor_table_received_bytes_total")
	if n, err := strconv.ParseFloat(received, 64); err != nil || n != size {
		t.Errorf("the executor has received %q bytes of tables, want %d, once for all leases and jobs", received, size)
	}
}

var largeTable = flag.Bool("large-table", false, "run TestTableBeyondFourGiB, which takes 16 GiB of memory and most of a minute")

// TestTableBeyondFourGiB publishes memory that nobody has written to, except for some bytes beyond 4 GiB.
func TestTableBeyondFourGiB(t *testing.T) {
	const size, at = 6 << 30, 5<<30 + 4096
	if !*largeTable {
		t.Skip("only with -large-table: scripts/bench --only soak-table")
	}
	if available(t) < 2*size+4<<30 {
		t.Fatal("needs 16 GiB of memory")
	}
	data, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(data)
	copy(data[at:], "beyond4G")
	w := newWorld(t)
	began := time.Now()
	publish(t, w.session, "large", 0, client.Piece{Bytes: data})
	published := time.Now()
	l := w.tableLease(t, client.LeaseOptions{})
	t.Logf("published in %v, leased in %v", published.Sub(began), time.Since(published))
	for _, c := range []struct {
		at   uint64
		want string
	}{{at, "beyond4G"}, {at - 8, "\x00\x00\x00\x00\x00\x00\x00\x00"}, {size - 8, "\x00\x00\x00\x00\x00\x00\x00\x00"}} {
		out := make([]byte, 8)
		in := append(binary.LittleEndian.AppendUint64(nil, c.at), "large\x00"...)
		if _, err := function(t, l, "table_at").Invoke(t.Context(), in, out); err != nil || string(out) != c.want {
			t.Errorf("at %d: %q, %v", c.at, out, err)
		}
	}
}
