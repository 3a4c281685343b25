package zygote

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// seedLibrary compiles a library of tests/seeds.
func seedLibrary(t testing.TB, name string) *os.File {
	t.Helper()
	return sealedFile(t, testkit.SeedLibrary(t, "../..", name))
}

const seedMemory = 256 << 20 // OpenBLAS needs more than 64 MiB

func seedSpec(code *os.File, setup, payload string) *SeedSpec {
	return &SeedSpec{Worker: Spec{Code: code, MemoryLimit: seedMemory}, Setup: setup, Payload: []byte(payload), Heap: SeedHeap(seedMemory)}
}

// makeSeed makes the seed of a library's function setup.
func makeSeed(t testing.TB, z *Zygote, code *os.File) *Seed {
	t.Helper()
	s, err := z.MakeSeed(t.Context(), seedSpec(code, "setup", ""))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// seeded leases a worker of a library, on one CPU if `one` is set. It starts from the seed, or without one makes the call of setup.
func seeded(t testing.TB, z *Zygote, c *client, code *os.File, s *Seed, one bool) *leased {
	t.Helper()
	l := lease(t, z, c, func(spec *Spec) {
		spec.Code, spec.Names, spec.Seed, spec.MemoryLimit = code, []string{"query", "setup"}, s, seedMemory
		if one {
			spec.CPUs = []int{0}
		}
	})
	if l.Steps().Seeded != (s != nil) {
		t.Fatalf("seeded %v: %s", l.Steps().Seeded, l.Steps().Unseeded)
	}
	if s == nil {
		l.mustCall(t, 1, nil)
	}
	return l
}

// Workers of a seed answer like a worker that has made the init call itself, and change only their own copy: in C, C++, Fortran, with OpenMP, OpenBLAS, and
// with FFTW, GSL, libxml2 and SQLite. Workers of another zygote, for which the kernel has chosen other addresses and which has loaded other libraries for
// itself, start from the seed, too.
func TestSeed(t *testing.T) {
	z, other := startZygote(t), startZygote(t)
	loadProvider(t, other)
	for _, name := range testkit.SeedStates {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code := seedLibrary(t, name)
			s := makeSeed(t, z, code)
			c := startClient(t)
			var want [3][]byte
			one := name == "openblas_state.c" // its threads spin, and wait for each other on a busy machine
			workers := []*leased{seeded(t, z, c, code, nil, one), seeded(t, z, c, code, s, one), seeded(t, z, c, code, s, one)}
			if runtime.GOARCH == "amd64" {
				workers = append(workers, seeded(t, other, c, code, s, one))
			}
			for i, l := range workers {
				for n := range want {
					got := l.mustCall(t, 0, nil)
					if i == 0 {
						want[n] = got
					} else if !bytes.Equal(got, want[n]) || len(got) == 0 {
						t.Errorf("worker %d of the seed, call %d: %q, want %q", i, n, got, want[n])
					}
				}
			}
		})
	}
}

// loadProvider makes a zygote load what encrypted connections need.
func loadProvider(t testing.TB, z *Zygote) {
	t.Helper()
	w, err := z.prepared(t.Context(), &Spec{Provider: "tcp", Device: "127.0.0.1:1", Encrypt: 3, GIDIndex: -1})
	if err != nil {
		t.Fatal(err)
	}
	w.abort(nil)
}

// What cannot be kept is refused by name, and so are functions that fail or do not exist.
func TestSeedRefused(t *testing.T) {
	z := startZygote(t)
	code := seedLibrary(t, "refused.c")
	for way, want := range map[string]string{"threads": "has left 1 threads", "files": "has left 1 files open", "handler": "a handler for signal 10", "mask": "the signal mask",
		"mode mask": "the file mode mask", "environment": "the environment", "directory": "the working directory", "locale": "the locale",
		"thread's locale": "the locale", "handler's flags": "a handler for signal 15", "CPUs": "the CPUs", "kernel's timer": "has left a timer", "rounding": "the rounding", "child": "child processes", "timer": "a timer running", "library": "has loaded libresolv",
		"payload": "points to the payload", "stack": "points to the stack", "result": "points to memory mapped outside the seed",
		"memory": "has left memory mapped", "fork": "has forked"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			_, err := z.MakeSeed(t.Context(), seedSpec(code, "setup", way+"\x00"))
			wantError(t, err, wire.StatusUnsupported, want)
		})
	}
	for setup, want := range map[string]int32{"fails": -400, "crashes": wire.StatusWorkerDied, "missing": wire.StatusBadLibrary} {
		_, err := z.MakeSeed(t.Context(), seedSpec(code, setup, ""))
		var e *WorkerError
		if !errors.As(err, &e) || e.Status != want {
			t.Errorf("%s: %v, want status %d", setup, err, want)
		}
	}
}

// A seed of a library of Go is refused before the init call, because its runtime has threads. The error names the runtime.
func TestSeedOfGo(t *testing.T) {
	out := filepath.Join(t.TempDir(), "go.so")
	if text, err := exec.Command("go", "build", "-buildmode=c-shared", "-o", out, "./testdata/goruntime").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	_, err := startZygote(t).MakeSeed(t.Context(), seedSpec(sealedFile(t, out), "setup", ""))
	wantError(t, err, wire.StatusUnsupported, "threads when it was loaded, which belong to the runtime of Go, and a seed cannot keep them: use the init call without RFAAS_LEASE_SEED")
}

// Pointers on the heap that workers cannot use are no reason to refuse a seed, but its warning counts them. Pointers to libraries and to the heap itself are valid.
func TestSeedWarns(t *testing.T) {
	z, code := startZygote(t), seedLibrary(t, "refused.c")
	for way, want := range map[string]string{"nothing": "", "unreadable": "", "heap": "words of the heap that look like pointers to memory outside the seed: 2, the first at 0x6"} {
		s, err := z.MakeSeed(t.Context(), seedSpec(code, "setup", way+"\x00"))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(s.Warning, want) || want == "" && s.Warning != "" || want != "" && !strings.Contains(s.Warning, "to the stack. Copy") {
			t.Errorf("%s: %q, want %q", way, s.Warning, want)
		}
		s.Close()
	}
}

// The memory of a seed cannot be changed by its workers, nor does a process stay that could. A maker that is killed, or whose time is over, leaves nothing.
func TestSeedSealed(t *testing.T) {
	z := startZygote(t)
	code := seedLibrary(t, "refused.c")
	s, err := z.MakeSeed(t.Context(), seedSpec(code, "setup", "nothing\x00"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	fd := int(s.File.Fd())
	const all = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || seals&all != all {
		t.Errorf("seals %#x, %v", seals, err)
	}
	if st, err := s.File.Stat(); err != nil || st.Mode().Perm() != 0o400 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY {
		t.Errorf("flags %#x, %v", flags, err)
	}
	if _, err := unix.Mmap(fd, 0, 4096, unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("the file can be mapped for writing")
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		eventually(t, "the init call runs", func() bool { return runningMakers(z) == 1 })
	}()
	if _, err := z.MakeSeed(ctx, seedSpec(code, "setup", "sleep\x00")); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if n := runningMakers(z); n != 0 {
		t.Errorf("%d processes are left", n)
	}
}

// runningMakers returns the number of workers that have reached user code.
func runningMakers(z *Zygote) (n int) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, w := range z.workers {
		if w.page.phase() == phaseLoading {
			n++
		}
	}
	return n
}

// A damaged seed is refused, and the worker starts without it. Nothing outside of the worker's own memory depends on the file's bytes.
func TestSeedDamaged(t *testing.T) {
	z := startZygote(t)
	code := seedLibrary(t, "c_state.c")
	s := makeSeed(t, z, code)
	good, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", s.File.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	header := int(s.Units) * SeedUnit
	for at, want := range map[int]string{0: "not a seed", 24: "thread pointer"} {
		bad := bytes.Clone(good[header : header+64])
		binary.LittleEndian.PutUint64(bad[at:], ^binary.LittleEndian.Uint64(bad[at:]))
		damaged := damagedSeed(t, s, header, bad)
		l := lease(t, z, startClient(t), func(spec *Spec) {
			spec.Code, spec.Names, spec.Seed, spec.MemoryLimit = code, []string{"query", "setup"}, damaged, seedMemory
		})
		if got := l.Steps().Unseeded; !strings.Contains(got, want) {
			t.Errorf("damaged at %d: %q, want %q", at, got, want)
		}
		l.mustCall(t, 1, nil)
		l.mustCall(t, 0, nil)
	}
}

// A worker says at most once that it has no seed.
func TestSeedUnseededTwice(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]net.Conn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		defer conns[i].Close()
	}
	w := &Worker{conn: conns[0].(*net.UnixConn)}
	w.serves.Store(&Spec{Seed: &Seed{}})
	for _, text := range []string{"first", "second"} {
		m := wire.Message{Type: wire.Unseeded, Body: wire.EncodeFailure(wire.StatusUnsupported, text)}
		if _, err := conns[1].Write(m.Encode()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.start(t.Context()); err == nil || !strings.Contains(err.Error(), "unexpected message of type 27") || w.steps.Unseeded != "first" {
		t.Errorf("%v, %q", err, w.steps.Unseeded)
	}
}

// damagedSeed is a copy of a seed without its heap, with other bytes at an offset.
func damagedSeed(t testing.TB, s *Seed, at int, with []byte) *Seed {
	t.Helper()
	fd, err := fixedMemfd("rfaas-seed", int(2*uint64(s.Units)*SeedUnit+seedData), 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "seed")
	t.Cleanup(func() { f.Close() })
	rest := make([]byte, 128<<10)
	if _, err := s.File.ReadAt(rest, int64(at)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(rest, int64(at)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(with, int64(at)); err != nil {
		t.Fatal(err)
	}
	bad := &Seed{Units: s.Units, Bytes: s.Bytes}
	bad.File = f
	return bad
}

// Layout returns which process a seed is of, and refuses a header whose numbers would lead out of it. Segments cover what the file has, and everything else is zero.
func TestSeedLayout(t *testing.T) {
	z := startZygote(t)
	s := makeSeed(t, z, seedLibrary(t, "c_state.c"))
	l, err := s.Layout()
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]SeedModule{}
	for _, m := range l.Modules {
		named[m.Name] = m
	}
	libc, found := named["libc.so.6"]
	if !found || libc.Base == 0 || libc.DataSize != 0 || libc.Build == [20]byte{} || l.ThreadPointer == 0 || l.Size == 0 {
		t.Errorf("%+v", l)
	}
	c, err := s.Contents(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	parts := c.Segments
	if len(parts) == 0 || len(parts) > segmentsMost {
		t.Fatalf("%d segments", len(parts))
	}
	end, sum := uint64(0), uint64(0)
	for _, p := range parts {
		if p.Offset < end || p.Size == 0 {
			t.Errorf("a segment of %d bytes at %d, behind %d", p.Size, p.Offset, end)
		}
		end, sum = p.Offset+p.Size, sum+p.Size
	}
	if sum < s.Bytes/2 || sum > 4*s.Bytes {
		t.Errorf("segments of %d bytes, the file takes %d", sum, s.Bytes)
	}
	header := int(s.Units) * SeedUnit
	for at, want := range map[int]string{0: "damaged", 12: "damaged", 16: "damaged"} {
		damaged := damagedSeed(t, s, header+at, []byte{0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4})
		if at > 0 {
			good := make([]byte, at)
			if _, err := s.File.ReadAt(good, int64(header)); err != nil {
				t.Fatal(err)
			}
			if _, err := damaged.File.WriteAt(good, int64(header)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := damaged.Layout(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("damaged at %d: %v, want %q", at, err, want)
		}
	}
}

// Each worker of a seed calls the functions that setup has registered, in their order, and has a number of its own. A worker that makes the call itself calls them at once.
func TestSeedResume(t *testing.T) {
	z := startZygote(t)
	code := seedLibrary(t, "resume.c")
	s := makeSeed(t, z, code)
	if s.Bytes > 8<<20 {
		t.Errorf("a seed with 128 MiB of static data that is zero takes %d bytes", s.Bytes)
	}
	c := startClient(t)
	for i := range uint32(3) {
		from, want := s, []uint32{0, i + 1, 32, 1, 32, 100, 7, 0, 0}
		if i == 2 {
			from, want[1] = nil, 0
		}
		got := seeded(t, z, c, code, from, false).mustCall(t, 0, nil)
		for n, w := range want {
			if g := binary.LittleEndian.Uint32(got[4*n:]); g != w {
				t.Errorf("worker %d, number %d: %d, want %d", i, n, g, w)
			}
		}
	}
	if _, err := z.MakeSeed(t.Context(), seedSpec(code, "fails", "")); err == nil || !strings.Contains(err.Error(), "on purpose") {
		t.Errorf("more functions than there is room for: %v", err)
	}
}

// A worker at other addresses than its seed does not start from it, and says why. Kernels place everything elsewhere if the stack has no limit.
func TestSeedElsewhere(t *testing.T) {
	z := startZygote(t)
	code := seedLibrary(t, "c_state.c")
	s := makeSeed(t, z, code)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_STACK, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_STACK, &unix.Rlimit{Cur: limit.Max, Max: limit.Max}); err != nil || limit.Max != unix.RLIM_INFINITY {
		t.Skipf("the stack cannot have no limit: %v, %d", err, limit.Max)
	}
	other := startZygote(t)
	if err := unix.Setrlimit(unix.RLIMIT_STACK, &limit); err != nil {
		t.Fatal(err)
	}
	l := lease(t, other, startClient(t), func(spec *Spec) {
		spec.Code, spec.Names, spec.Seed, spec.MemoryLimit = code, []string{"query", "setup"}, s, seedMemory
	})
	if got := l.Steps().Unseeded; !strings.Contains(got, "the thread pointer is") {
		t.Errorf("%q", got)
	}
	l.mustCall(t, 1, nil)
	l.mustCall(t, 0, nil)
}

// A setup function cannot allocate more than its memory limit and 64 MiB.
func TestSeedMemoryLimit(t *testing.T) {
	z := startZygote(t)
	code := seedLibrary(t, "refused.c")
	_, err := z.MakeSeed(t.Context(), seedSpec(code, "greedy", ""))
	var e *WorkerError
	if !errors.As(err, &e) {
		t.Fatal(err)
	}
	var mib int
	_, at, told := strings.Cut(e.Text, "allocated ")
	if _, err := fmt.Sscanf(at, "%d MiB", &mib); told && (err != nil || mib < seedMemory>>21 || mib > seedMemory>>20+64) || !told && e.Status != wire.StatusMemoryLimit {
		t.Errorf("%v, with a limit of %d MiB", e, seedMemory>>20)
	}
}

// A header of any bytes is refused or described within its bounds.
func FuzzSeedLayout(f *testing.F) {
	header := make([]byte, seedModules+2*seedModuleSize)
	le := binary.LittleEndian
	le.PutUint64(header, seedMagic)
	le.PutUint32(header[8:], SeedVersion)
	le.PutUint32(header[12:], 2)
	le.PutUint64(header[16:], 2*SeedUnit)
	copy(header[seedModules:], "libc.so.6")
	f.Add(header)
	le.PutUint32(header[12:], seedModulesMax+1)
	f.Add(bytes.Clone(header))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		fd, err := fixedMemfd("rfaas-seed", 2*SeedUnit+seedData, 0)
		if err != nil {
			t.Fatal(err)
		}
		s := &Seed{File: os.NewFile(uintptr(fd), "seed"), Units: 2}
		defer s.Close()
		if _, err := s.File.WriteAt(b[:min(len(b), seedData)], 2*SeedUnit); err != nil {
			t.Fatal(err)
		}
		l, err := s.Layout()
		if err != nil {
			return
		}
		if len(l.Modules) > seedModulesMax {
			t.Errorf("%d modules", len(l.Modules))
		}
		for _, m := range l.Modules {
			if len(m.Name) > 3*seedModuleName || !utf8.ValidString(m.Name) {
				t.Errorf("name %q", m.Name)
			}
		}
	})
}
