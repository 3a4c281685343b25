// Package leakcheck checks that tests release goroutines, descriptors, shared mappings, segments in /dev/shm, processes, and
// objects that their package counts (regions, queue pairs). For tests only.
//
// Check records the resources in use, and counts again after the test and its other cleanups. Main does the same for a whole
// package. A leak fails the test. So does an error in counting.
package leakcheck

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// patience is how long after the test a process or goroutine may take to end.
var patience = 5 * time.Second

// keep names the goroutines that a package keeps on purpose; see Main.
var keep []goleak.Option

// Kind is a kind of resource. Look counts them by name.
type Kind struct {
	Name string
	Look func() (map[string]int, error)
}

// Objects is the kind of the objects that a package counts, such as those of dataplane.Live.
func Objects(count func() map[string]int) Kind {
	return Kind{"objects", func() (map[string]int, error) { return count(), nil }}
}

// kinds are counted by every check. goleak checks goroutines, because it knows those of the runtime.
var kinds = []Kind{
	{"descriptors", descriptors},
	{"shared mappings", mappings},
	{"segments", segments},
	{"processes", processes},
}

// proc is the path of /proc, which tests replace.
var proc = "/proc"

// Usage is the resources in use at some time.
type Usage struct {
	kinds   []Kind
	had     map[string]map[string]int
	ignore  []goleak.Option
	failure error // of the first count
}

// Take counts the resources in use now.
func Take(extra ...Kind) *Usage {
	prepare()
	u := &Usage{kinds: slices.Concat(kinds, extra), had: map[string]map[string]int{}, ignore: append(slices.Clone(keep), goleak.IgnoreCurrent())}
	for _, k := range u.kinds {
		now, err := k.Look()
		if err != nil {
			u.failure = errors.Join(u.failure, fmt.Errorf("leakcheck cannot look at %s: %w", k.Name, err))
		}
		u.had[k.Name] = now
	}
	return u
}

// Leaks returns the resources that are in use beyond those of u. It waits up to limit for them to be released. The error reports
// that counting failed.
func (u *Usage) Leaks(limit time.Duration) ([]string, error) {
	if u.failure != nil {
		return nil, u.failure
	}
	for end := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		leaks, err := u.look()
		if err != nil || len(leaks) == 0 || time.Now().After(end) {
			return leaks, err
		}
	}
}

func (u *Usage) look() (leaks []string, err error) {
	for _, k := range u.kinds {
		now, err := k.Look()
		if err != nil {
			return nil, fmt.Errorf("leakcheck cannot look at %s: %w", k.Name, err)
		}
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if had := u.had[k.Name][name]; now[name] > had {
				leaks = append(leaks, fmt.Sprintf("%s: %s (%d before, %d now)", k.Name, name, had, now[name]))
			}
		}
	}
	// goleak waits by itself, by default for half a second.
	if len(leaks) == 0 {
		if err := goleak.Find(u.ignore...); err != nil {
			leaks = append(leaks, "goroutines: "+err.Error())
		}
	}
	return leaks, nil
}

// Check fails the test if more resources are in use at its end than now. Call it first, because cleanups that are registered
// later run earlier. Not for tests that run in parallel with others.
func Check(t testing.TB, extra ...Kind) {
	t.Helper()
	u := Take(extra...)
	t.Cleanup(func() { u.Verify(t) })
}

// checked has the tests for which Once was called.
var checked sync.Map

// Once is Check at its first call in a test, and does nothing later.
func Once(t testing.TB, extra ...Kind) {
	t.Helper()
	if _, again := checked.LoadOrStore(t.Name(), true); !again {
		t.Cleanup(func() { checked.Delete(t.Name()) })
		Check(t, extra...)
	}
}

// Verify fails the test if more resources are in use than when u was taken.
func (u *Usage) Verify(t testing.TB) {
	t.Helper()
	leaks, err := u.Leaks(patience)
	if err != nil {
		t.Error(err)
	}
	for _, l := range leaks {
		t.Errorf("leak: %s", l)
	}
}

// Main runs the tests of a package and ends the process; TestMain calls it. The options of goleak name goroutines that the package
// keeps on purpose, for the package's Checks too.
func Main(m *testing.M, goroutines []goleak.Option, extra ...Kind) {
	os.Exit(Run(m, goroutines, extra...))
}

// Run is Main, but returns the exit status.
func Run(m *testing.M, goroutines []goleak.Option, extra ...Kind) int {
	keep = goroutines
	u := Take(extra...)
	code := m.Run()
	leaks, err := u.Leaks(patience)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		leaks = append(leaks, "")
	}
	for _, l := range leaks {
		if l != "" {
			fmt.Fprintln(os.Stderr, "leak after all tests:", l)
		}
	}
	if len(leaks) > 0 && code == 0 {
		code = 1
	}
	return code
}

// markEnv is an environment variable that marks all descendants of this process, including daemons that have left their parents and
// sessions.
const markEnv = "RFAAS_LEAKCHECK"

var mark string

// prepare makes permanent resources once: the mark, and everything that package net makes at its first use.
var prepare = sync.OnceFunc(func() {
	var b [8]byte
	rand.Read(b[:])
	mark = hex.EncodeToString(b[:])
	os.Setenv(markEnv, mark)
	if r, w, err := os.Pipe(); err == nil { // the poller's own descriptors
		r.SetReadDeadline(time.Now())
		r.Close()
		w.Close()
	}
})

func descriptors() (map[string]int, error) {
	dir, err := os.Open(filepath.Join(proc, "self/fd"))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	found := map[string]int{}
	for _, n := range names {
		if n == strconv.Itoa(int(dir.Fd())) {
			continue
		}
		to, err := os.Readlink(filepath.Join(proc, "self/fd", n))
		if err != nil { // closed since the directory was read
			continue
		}
		if kind, _, _ := strings.Cut(to, ":["); kind == "socket" || kind == "pipe" { // socket:[4711]: only the number of sockets counts
			to = kind
		}
		found[to]++
	}
	return found, nil
}

func mappings() (map[string]int, error) {
	b, err := os.ReadFile(filepath.Join(proc, "self/maps"))
	if err != nil {
		return nil, err
	}
	found := map[string]int{}
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		if len(f) < 5 || !strings.HasSuffix(f[1], "s") {
			continue
		}
		what := "anonymous"
		if len(f) > 5 {
			what = strings.Join(f[5:], " ")
		}
		found[what]++
	}
	return found, nil
}

// segments are files of rfaas in /dev/shm. There should be none, because its shared memory has no names. Directories of bundles do not count: those
// of a killed executor stay until the next one starts, and tests of other packages run executors at the same time.
func segments() (map[string]int, error) {
	entries, err := os.ReadDir("/dev/shm")
	if err != nil {
		return nil, err
	}
	found := map[string]int{}
	for _, e := range entries {
		if strings.Contains(e.Name(), "rfaas") && !strings.HasPrefix(e.Name(), "rfaas-bundles-") {
			found[e.Name()]++
		}
	}
	return found, nil
}

// environment reads the environment of a process. A child that this process has just started may still be in execve, where the kernel shows
// neither arguments nor environment: the call then waits until it shows them, or the child has ended.
func environment(pid int, child bool) ([]byte, error) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	for {
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil || len(env) > 0 || !child {
			return env, err
		}
		if args, err := os.ReadFile(filepath.Join(dir, "cmdline")); err != nil || len(args) > 0 {
			return env, err
		}
		if _, state, _, err := status(pid); err != nil || state == 'Z' {
			return nil, err
		}
		runtime.Gosched()
	}
}

// processes returns live processes with this process's mark, and children of this process that were not waited for.
func processes() (map[string]int, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	want := []byte(markEnv + "=" + mark)
	self := os.Getpid()
	found, seen := map[string]int{}, 0
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		seen++
		if pid == self {
			continue
		}
		name, state, parent, err := status(pid)
		if err != nil {
			continue // it has ended
		}
		if state == 'Z' {
			if parent == self {
				found["zombie of "+name]++
			}
			continue
		}
		env, err := environment(pid, parent == self)
		if err == nil && slices.ContainsFunc(bytes.Split(env, []byte{0}), func(kv []byte) bool { return bytes.Equal(kv, want) }) {
			found[fmt.Sprintf("%s (pid %d)", name, pid)]++
		}
	}
	if seen == 0 {
		return nil, fmt.Errorf("%s shows no processes: %w", proc, fs.ErrNotExist)
	}
	return found, nil
}

// status reads a process's name, state and parent.
func status(pid int) (name string, state byte, parent int, err error) {
	b, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return "", 0, 0, err
	}
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return "", 0, 0, unix.EINVAL
	}
	if _, err := fmt.Sscanf(string(b[end+1:]), " %c %d", &state, &parent); err != nil {
		return "", 0, 0, err
	}
	return string(b[open+1 : end]), state, parent, nil
}
