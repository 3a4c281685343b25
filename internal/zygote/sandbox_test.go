package zygote

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

var confined = Sandbox{Mode: sandbox.On, UIDs: sandbox.Range{First: 1_900_000_000, N: 1000}, Processes: 200, Files: 100}

// What holds without a sandbox holds within: reports of deaths, limits, kills, a zygote that is replaced, workers in advance.
func TestInSandbox(t *testing.T) {
	if testing.Short() {
		t.Skip("these tests run without a sandbox too")
	}
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	for name, test := range map[string]func(*testing.T){
		"deaths": TestDeathIsExplained, "time limit": TestTimeLimit, "stopped worker": TestStoppedWorker, "counters": TestCounters,
		"zygote killed": TestZygoteKilledDuringSpawns, "pooled workers die": TestPooledWorkersDie,
		"inspection": TestInspect, "refusals": TestInspectRefuses, "bounds": TestInspectIsBounded, "symbols": TestSymbols,
	} {
		t.Run(name, test)
	}
	testSandbox.without = wire.WithoutReturn
	for name, test := range map[string]func(*testing.T){"deaths": TestDeathIsExplained, "zygote killed": TestZygoteKilledDuringSpawns} {
		t.Run("with a stem/"+name, test)
	}
}

// The C library's thread id is that of the worker's own process namespace.
func TestThreadInSandbox(t *testing.T) {
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	w := lease(t, startZygote(t), startClient(t), nil)
	got := w.mustCall(t, fnThreadID, nil)
	for i, what := range []string{"cached thread id", "gettid", "getpid", "owner of a priority-inheritance mutex"} {
		if id := int(binary.LittleEndian.Uint32(got[4*i:])); id != 2 {
			t.Errorf("%s: %d, want 2", what, id)
		}
	}
	if got := w.mustCall(t, fnThreads, nil); got[0] != 1 {
		t.Error("threads, raise or system do not work")
	}
	s := w.Steps()
	if s.Sandbox <= 0 || s.Connect < 0 || s.Code <= 0 {
		t.Errorf("steps %+v", s)
	}
	t.Logf("the sandbox took %v", s.Sandbox)
	if len(w.Exit().Reason) == 0 {
		t.Error("no reason")
	}
}

// Workers run as users who must pass the directories that root makes for them, whatever root's umask is.
func TestSandboxUnderUmask(t *testing.T) {
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	defer unix.Umask(unix.Umask(0o077)) // the spawner and the zygote inherit it
	w := lease(t, startZygote(t), startClient(t), nil)
	if got := w.mustCall(t, fnEcho, []byte("x")); string(got) != "x" {
		t.Errorf("%q", got)
	}
}

// rootWorker is the spawner's error if it cannot give a worker a user id.
const rootWorker = "workers would run as root"

// Any part may be missing: one line of the log names it, and workers run with the rest. If all parts are required, or
// if a worker would be root, no worker runs.
func TestIncompleteSandbox(t *testing.T) {
	for part, names := range map[uint32]string{wire.PartUID: "user ids", wire.PartPIDs: "process namespace", wire.PartFiles: "file system",
		wire.PartNet: "network namespace", wire.PartSeccomp: "filter of system calls", wire.PartLandlock: "Landlock", wire.PartAll &^ wire.PartPrivs: "Landlock"} {
		s := confined
		s.without = part
		var log bytes.Buffer
		z, err := Start(t.Context(), Config{Path: workerPath(t), Log: slog.New(slog.NewTextHandler(&log, nil)), Sandbox: s})
		if os.Geteuid() == 0 && part&wire.PartUID != 0 {
			if err == nil || !strings.Contains(err.Error(), rootWorker) || !strings.Contains(err.Error(), names) {
				t.Errorf("without %#x: %v", part, err)
			}
		} else if err != nil {
			t.Fatal(err)
		} else {
			w := lease(t, z, startClient(t), nil)
			if got := w.mustCall(t, fnEcho, []byte("x")); string(got) != "x" {
				t.Errorf("without %#x: %q", part, got)
			}
			z.Close()
			if text := log.String(); strings.Count(text, "the sandbox of workers is incomplete") != 1 || !strings.Contains(text, names) {
				t.Errorf("without %#x: log %q does not say %q once", part, text, names)
			}
		}
		s.Mode = sandbox.Require
		_, err = Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t), Sandbox: s})
		if err == nil || !strings.Contains(err.Error(), "required") || !strings.Contains(err.Error(), names) {
			t.Errorf("required, without %#x: %v", part, err)
		}
	}
}

// Without a file system of its own a worker loads the libraries of its bundle, and reads no other bundle. A library of the bundle ends the
// worker otherwise.
func TestBundleWithoutFileSystem(t *testing.T) {
	testSandbox = confined
	testSandbox.without = wire.PartFiles
	testSandbox.Bundles = t.TempDir()
	defer func() { testSandbox = Sandbox{} }()
	own, other := BundleID{1}, BundleID{2}
	file := func(id BundleID, name string) string { return filepath.Join(testSandbox.Bundles, id.String(), name) }
	for _, id := range []BundleID{own, other} {
		if err := os.MkdirAll(file(id, ".rfaas"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file(id, "data"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{filepath.Dir(testSandbox.Bundles), testSandbox.Bundles} { // workers are other users
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	gcc := exec.Command("gcc", "-shared", "-fPIC", "-o", file(own, ".rfaas/libraries.so"), "-x", "c", "-")
	gcc.Stdin = strings.NewReader(fmt.Sprintf(`#include <fcntl.h>
		#include <stdlib.h>
		__attribute__((constructor)) static void look(void) {
			if (open(%q, O_RDONLY) < 0 || open(%q, O_RDONLY) >= 0 || open(%q, O_RDONLY) >= 0 || open(%q, O_RDWR) >= 0)
				abort();
		}`, file(own, "data"), file(other, "data"), testSandbox.Bundles, file(own, "data")))
	if b, err := gcc.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
	w := lease(t, startZygote(t), startClient(t), func(s *Spec) { s.Bundle = own })
	if got := w.mustCall(t, fnEcho, []byte("x")); string(got) != "x" {
		t.Errorf("%q", got)
	}
}

// A whole sandbox needs root, or says what it lacks.
func TestRequiredSandbox(t *testing.T) {
	s := confined
	s.Mode = sandbox.Require
	z, err := Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t), Sandbox: s})
	if err != nil {
		testkit.Lacks(t, "%v", err)
	}
	z.Close()
}

// A worker runs as the verified user of its lease.
func TestVerifiedUser(t *testing.T) {
	testkit.Root(t, "gives workers other users")
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	z := startZygote(t)
	w := lease(t, z, startClient(t), func(s *Spec) { s.UID, s.GID = 4242, 4343 })
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.PID()))
	if err != nil {
		t.Fatal(err)
	}
	if text := string(b); !strings.Contains(text, "\nUid:\t4242\t4242\t4242\t4242\n") || !strings.Contains(text, "\nGid:\t4343\t4343\t4343\t4343\n") {
		t.Errorf("%s", text)
	}
	w.mustCall(t, fnEcho, []byte("x"))

	// Without a sandbox, the worker runs as the executor's user.
	testSandbox = Sandbox{}
	w = lease(t, startZygote(t), startClient(t), func(s *Spec) { s.UID, s.GID = 4242, 4343 })
	if b, err = os.ReadFile(fmt.Sprintf("/proc/%d/status", w.PID())); err != nil || !strings.Contains(string(b), "\nUid:\t0\t0\t0\t0\n") {
		t.Errorf("%v\n%s", err, b)
	}
}

// No worker in a sandbox is root, even if the executor has no user ids to give.
func TestNoWorkerIsRoot(t *testing.T) {
	testkit.Root(t, "could start a worker as root")
	testSandbox = confined
	testSandbox.UIDs = sandbox.Range{}
	defer func() { testSandbox = Sandbox{} }()
	z, c := startZygote(t), startClient(t)
	spec, _ := c.spec(t, sealedFile(t, testLibrary(t)))
	if _, err := z.Spawn(t.Context(), spec); err == nil || !strings.Contains(err.Error(), rootWorker) {
		t.Errorf("without a range of user ids: %v", err)
	}
	lease(t, z, c, func(s *Spec) { s.UID, s.GID = 4242, 4343 }).mustCall(t, fnEcho, []byte("x"))
}

// limits are the soft and hard limits of a process by name, as /proc shows them.
func limits(t *testing.T, pid int) map[string][2]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		t.Fatal(err)
	}
	list := make(map[string][2]string)
	for line := range strings.Lines(string(b)) {
		if name := strings.TrimSpace(line[:26]); strings.HasPrefix(name, "Max ") {
			values := strings.Fields(line[26:])
			list[strings.TrimPrefix(name, "Max ")] = [2]string{values[0], values[1]}
		}
	}
	return list
}

// Hard limits apply to workers, including those that run as a verified user, whose other processes count too.
func TestWorkerLimits(t *testing.T) {
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	z, c := startZygote(t), startClient(t)
	want := map[string]string{"core file size": "0", "open files": "100", "nice priority": "0", "locked memory": fmt.Sprint(8 << 20)}
	root := os.Geteuid() == 0
	check := func(name string, w *leased, processes int) {
		t.Helper()
		got := limits(t, w.PID())
		if root {
			want["processes"] = fmt.Sprint(processes)
		}
		for resource, most := range want {
			if got[resource] != [2]string{most, most} {
				t.Errorf("%s: %s: limits %q, want %s", name, resource, got[resource], most)
			}
		}
	}
	check("cloned for its lease", lease(t, z, c, nil), 200)
	if root {
		check("verified user", lease(t, z, c, func(s *Spec) { s.UID, s.GID = 4242, 4343 }), 200*runtime.NumCPU())
	}
	testSandbox = Sandbox{}
	w := lease(t, startZygote(t), startClient(t), nil)
	if got := limits(t, w.PID())["core file size"]; got != [2]string{"0", "0"} {
		t.Errorf("without a sandbox: core file size: limits %q", got)
	}
}

// zygoteMemory is the name in /proc of the memory that the zygote shares with the stem.
const zygoteMemory = "/dev/zero (deleted)"

// Processes that run a user's code, and their guards, do not have the memory that the zygote shares with a stem, with
// and without process namespaces.
func TestZygoteMemoryIsNotInherited(t *testing.T) {
	for name, without := range map[string]uint32{"whole": 0, "with a stem": wire.WithoutReturn, "without process namespaces": wire.PartPIDs} {
		testSandbox = confined
		testSandbox.without = without
		z := startZygote(t)
		w := lease(t, z, startClient(t), nil)
		if maps := string(w.mustCall(t, fnMappings, nil)); strings.Contains(maps, zygoteMemory) || !strings.Contains(maps, "memfd:") {
			t.Errorf("%s: the worker maps\n%s", name, maps)
		}
		testSandbox = Sandbox{}
		if without == wire.PartPIDs {
			continue
		}
		children, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", z.spawner.process.Pid))
		guards := 0
		for _, file := range children {
			list, _ := os.ReadFile(file)
			for _, pid := range strings.Fields(string(list)) {
				if comm, _ := os.ReadFile("/proc/" + pid + "/comm"); string(comm) != "rfaas-guard\n" {
					continue
				}
				maps, err := os.ReadFile("/proc/" + pid + "/maps")
				if err != nil || len(maps) == 0 { // the stem is reaped later
					continue
				}
				if guards++; strings.Contains(string(maps), zygoteMemory) {
					t.Errorf("guard %s maps\n%s", pid, maps)
				}
			}
		}
		if guards == 0 && z.parts&wire.PartPIDs != 0 {
			t.Error("no guard was looked at")
		}
	}
}

// When the ids are used up, here or by another executor, there is no worker, and those of dead workers serve again.
func TestUserIDsRunOut(t *testing.T) {
	testkit.Root(t, "gives workers other users")
	testSandbox = confined
	testSandbox.UIDs.N, testSandbox.UIDFile = 1, filepath.Join(t.TempDir(), "uids")
	defer func() { testSandbox = Sandbox{} }()
	z, other, c := startZygote(t), startZygote(t), startClient(t)
	w := lease(t, z, c, nil)
	spec, _ := c.spec(t, sealedFile(t, testLibrary(t)))
	for _, z := range []*Zygote{z, other} {
		if _, err := z.Spawn(t.Context(), spec); err == nil || !strings.Contains(err.Error(), sandbox.ErrNoUID.Error()) {
			t.Errorf("a second worker with one id: %v", err)
		}
	}
	w.Kill()
	<-w.Done()
	lease(t, other, c, nil).mustCall(t, fnEcho, []byte("x"))
}

// The doctor reports the same missing parts of the sandbox as an executor.
func TestLacks(t *testing.T) {
	missing, err := Lacks(t.Context(), workerPath(t), confined.UIDs)
	if err != nil || (missing == "") != (os.Geteuid() == 0) && os.Getenv("CI") != "" {
		t.Errorf("%q, %v", missing, err)
	}
	if missing, err := Lacks(t.Context(), workerPath(t), sandbox.Range{}); err != nil || !strings.Contains(missing, "user ids") {
		t.Errorf("without ids: %q, %v", missing, err)
	}
	if _, err := Lacks(t.Context(), "/bin/false", confined.UIDs); err == nil {
		t.Error("a program that is not a worker lacks nothing")
	}
}
