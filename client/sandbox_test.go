package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// hostile compiles testdata/hostile*.c.
func hostile(t *testing.T) string {
	t.Helper()
	return compile(t, "hostile.so", "", "testdata/hostile.c", "testdata/hostile_limits.c", "-std=gnu11", "-D_GNU_SOURCE", "-O1")
}

// try calls a hostile function with a text and returns which attempts succeeded, "" if none did.
func try(t *testing.T, l *client.Lease, name, arg string) string {
	t.Helper()
	out := make([]byte, 4096)
	n, err := function(t, l, name).Invoke(context.Background(), []byte(arg), out)
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
	return string(out[:n])
}

// pooled takes a lease with a pooled start from an executor whose pool has one worker.
func pooled(t *testing.T, w *world, pool string, o client.LeaseOptions) *client.Lease {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) { // the pool fills in the background
		late := time.Now().After(end)
		l := w.lease(t, o)
		if pool == "0" || l.Start() == client.StartPooled {
			return l
		}
		if release(t, l); late {
			t.Fatal("no lease starts warm within 20 s")
		}
	}
}

// processNamed returns the id of a process with a name, 0 if there is none.
func processNamed(name string) int {
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range comms {
		if b, _ := os.ReadFile(file); string(b) == name+"\n" {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			return pid
		}
	}
	return 0
}

// segment creates a System V segment in this process's namespace.
func segment(t *testing.T) int {
	t.Helper()
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o666)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.SysvShmCtl(id, unix.IPC_RMID, nil) })
	return id
}

// For every restriction of the sandbox a function tries to break it, on a worker that is cloned for its lease and on a
// pooled one.
func TestSandbox(t *testing.T) {
	library := hostile(t)
	secretFile := filepath.Join(t.TempDir(), "of-the-executor")
	if err := os.WriteFile(secretFile, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	ids := fmt.Sprint(segment(t))
	const variable = "CLOUD_ACCESS_KEY" // in the executor's environment
	t.Setenv(variable, "x")
	// Where a test runs as another user than root it is the namespace of that user: ids are its own.
	for _, pool := range []string{"0", "1"} {
		t.Run("pool "+pool, func(t *testing.T) {
			w := newWorld(t, "--sandbox", "on", "--pool", pool, "--cache-time", "0s", "--sandbox-processes", "40", "--sandbox-files", "100")
			executor := fmt.Sprint(w.pid())
			descriptors, device := "9", ""
			if provider() == "verbs" {
				descriptors, device = "12", "verbs"
			}
			l := pooled(t, w, pool, client.LeaseOptions{Library: library})
			for _, tc := range []struct{ function, arg string }{
				{"works", ""}, {"files", secretFile}, {"has_tmp", ""}, {"processes", executor}, {"ipc", ids}, {"network", ""},
				{"calls", ""}, {"arguments", ""}, {"raises_limits", "100"}, {"environment", variable}, {"fills_tmp", ""}, {"device", device}, {"descriptors", descriptors}, {"works", ""},
			} {
				if got := try(t, l, tc.function, tc.arg); got != "" {
					t.Errorf("%s: %s", tc.function, got)
				}
			}
			if os.Geteuid() == 0 {
				for _, tc := range []struct{ function, arg string }{{"privileges", ""}, {"fork_bomb", "100"}} {
					if got := try(t, l, tc.function, tc.arg); got != "" {
						t.Errorf("%s: %s", tc.function, got)
					}
				}
			}
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// No process that a function starts outlives its worker, however it hides.
func TestLeftBehindEndsWithWorker(t *testing.T) {
	w := newWorld(t, "--sandbox", "on", "--cache-time", "0s") // a cached worker would be frozen with all its processes
	l := w.lease(t, client.LeaseOptions{Library: hostile(t)})
	const name = "rfaas-leftover"
	if got := try(t, l, "leaves_behind", name); got != "" {
		t.Fatal(got)
	}
	pid := processNamed(name)
	if pid == 0 {
		t.Fatal("no process was left behind: the test shows nothing")
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The release is answered when no process is left.
	if running(pid) {
		t.Errorf("process %d outlives its worker", pid)
	}
}

// Two leases share neither files nor users.
func TestSandboxesAreApart(t *testing.T) {
	w := newWorld(t, "--sandbox", "on")
	library := hostile(t)
	first := w.lease(t, client.LeaseOptions{Library: library})
	second := w.lease(t, client.LeaseOptions{Library: library})
	for _, l := range []*client.Lease{first, second} {
		if got := try(t, l, "has_tmp", ""); got != "" { // each lease has an empty /tmp
			t.Error(got)
		}
	}
	if os.Geteuid() == 0 {
		uid := func(l *client.Lease) string { return uidOf(t, l.Worker(0).PID()) }
		if a, b := uid(first), uid(second); a == b || a == "0" || b == "0" {
			t.Errorf("users %s and %s", a, b)
		}
	}
}

// uidOf returns the real user id of a process.
func uidOf(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, ok := bytes.Cut(b, []byte("\nUid:\t"))
	if err != nil || !ok {
		t.Fatalf("status of process %d: %v", pid, err)
	}
	return strings.Fields(string(rest))[0]
}

// Only the configured paths are visible, and read-only.
func TestSandboxPaths(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "rfaas-sandbox") // not in /tmp, which is private to each worker
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	seen, link, hidden := filepath.Join(dir, "seen"), filepath.Join(dir, "link"), filepath.Join(dir, "hidden")
	for _, d := range []string{seen, hidden} {
		if err := errors.Join(os.Mkdir(d, 0o755), os.WriteFile(filepath.Join(d, "file"), []byte("x"), 0o644), os.Chmod(dir, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(seen, link); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, "--sandbox", "on", "--sandbox-paths", seen+":"+link)
	l := w.lease(t, client.LeaseOptions{Library: hostile(t)})
	for path, want := range map[string]bool{seen: true, link: true, hidden: false} {
		got := strings.Contains(try(t, l, "files", filepath.Join(path, "file")), "reads(arg)")
		if got != want {
			t.Errorf("%s: seen %v, want %v", path, got, want)
		}
	}
}

// Without a sandbox the same functions succeed, so they do try what the tests above check.
func TestHostileWithoutSandbox(t *testing.T) {
	const variable = "CLOUD_ACCESS_KEY"
	t.Setenv(variable, "x")
	w := newWorld(t, "--sandbox", "off", "--pool", "0")
	l := w.lease(t, client.LeaseOptions{Library: hostile(t)})
	for name, arg := range map[string]string{"network": "", "descriptors": "3", "environment": variable} { // only harmless ones
		if got := try(t, l, name, arg); got == "" {
			t.Errorf("%s finds nothing to do", name)
		}
	}
	start := time.Now()
	if err := l.Release(t.Context()); err != nil || time.Since(start) > 10*time.Second {
		t.Errorf("release: %v after %v", err, time.Since(start))
	}
}

// Where the node has control groups, the memory limit counts all processes of a worker and its shared memory. It holds
// for a worker that is cloned for its lease, for a pooled one that was limited to the default memory before its lease,
// and for one whose limit the lease changes.
func TestSandboxMemory(t *testing.T) {
	_, v1 := os.Stat("/sys/fs/cgroup/memory/memory.limit_in_bytes")
	v2, _ := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	testkit.Root(t, "can make control groups everywhere")
	if v1 != nil && !strings.Contains(string(v2), "memory") {
		testkit.Lacks(t, "no control groups that this test knows")
	}
	library := hostile(t)
	for _, tc := range []struct {
		pool   string
		memory uint64
	}{{"0", 64 << 20}, {"1", 0}, {"1", 64 << 20}} {
		w := newWorld(t, "--sandbox", "on", "--pool", tc.pool, "--cache-time", "0s", "--memory", map[bool]string{true: "128MiB", false: "1GiB"}[tc.memory == 0])
		l := pooled(t, w, tc.pool, client.LeaseOptions{Library: library, Memory: tc.memory, Bulk: -1})
		if got := try(t, l, "eats_shared_memory", "30"); got != "30 MiB; " {
			t.Errorf("%+v: less than the limit: %q", tc, got)
		}
		for _, arg := range []string{"200", "200 memfd", "200 segment"} {
			_, err := function(t, l, "eats_shared_memory").Invoke(t.Context(), []byte(arg), make([]byte, 4096))
			var e *client.Error
			if !errors.As(err, &e) || e.Status != client.StatusMemoryLimit || !strings.Contains(err.Error(), "exceeded its memory limit of ") {
				t.Errorf("%+v: %s: more than the limit: %v", tc, arg, err)
			}
		}
		if got := try(t, l, "works", ""); got != "" {
			t.Errorf("%+v: the next worker: %s", tc, got)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
