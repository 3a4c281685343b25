package leakcheck

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// leaky takes a resource of each kind and returns functions that release them.
var leaky = map[string]func(t testing.TB) (undo func()){
	"goroutines": func(testing.TB) func() {
		stop := make(chan struct{})
		go func() { <-stop }()
		return func() { close(stop) }
	},
	"descriptors": func(t testing.TB) func() {
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		return func() { f.Close() }
	},
	"shared mappings": func(t testing.TB) func() {
		fd, err := unix.MemfdCreate("leak", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		unix.Ftruncate(fd, 4096)
		m, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		return func() { unix.Munmap(m) }
	},
	"segments": func(t testing.TB) func() {
		f, err := os.CreateTemp("/dev/shm", "rfaas-leakcheck-")
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		return func() { os.Remove(f.Name()) }
	},
	// The grandchild has another session and another parent. Only its environment identifies it.
	"processes": func(t testing.TB) func() {
		out, err := exec.Command("sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!").Output()
		if err != nil {
			t.Fatal(err)
		}
		pid := strings.TrimSpace(string(out))
		for end := time.Now().Add(10 * time.Second); ; { // during exec it has no environment
			if line, _ := os.ReadFile("/proc/" + pid + "/cmdline"); strings.HasPrefix(string(line), "sleep") {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("process %s does not become sleep", pid)
			}
		}
		return func() { exec.Command("sh", "-c", "kill "+pid).Run() }
	},
	"processes, not waited for": func(t testing.TB) func() {
		cmd := exec.Command("true")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return func() { cmd.Wait() }
	},
	"objects": func(testing.TB) func() {
		objects++
		return func() { objects-- }
	},
}

var objects int

func counted() Kind {
	return Objects(func() map[string]int { return map[string]int{"regions": objects} })
}

// Every kind of leak is found by its name, and is no longer reported after its release.
func TestEveryKindIsFound(t *testing.T) {
	for name, take := range leaky {
		t.Run(name, func(t *testing.T) {
			u := Take(counted())
			if leaks, err := u.Leaks(patience); err != nil || len(leaks) > 0 {
				t.Fatalf("before anything: %v, %v", leaks, err)
			}
			undo := take(t)
			leaks, err := u.Leaks(100 * time.Millisecond)
			kind, _, _ := strings.Cut(name, ",")
			if err != nil || !slices.ContainsFunc(leaks, func(l string) bool { return strings.HasPrefix(l, kind+": ") }) {
				t.Errorf("leaks %q, error %v", leaks, err)
			}
			undo()
			if leaks, err := u.Leaks(patience); err != nil || len(leaks) > 0 {
				t.Errorf("given back, and still: %v, %v", leaks, err)
			}
		})
	}
}

// A resource that is released shortly after the test is not a leak.
func TestLateIsNotLeaked(t *testing.T) {
	u := Take()
	undo := leaky["descriptors"](t)
	timer := time.AfterFunc(50*time.Millisecond, undo)
	defer timer.Stop()
	if leaks, err := u.Leaks(patience); err != nil || len(leaks) > 0 {
		t.Errorf("%v, %v", leaks, err)
	}
}

// If counting fails at the beginning or at the end, the result is an error.
func TestCannotLook(t *testing.T) {
	real := proc
	defer func() { proc = real }()
	proc = t.TempDir()
	if _, err := Take().Leaks(0); err == nil || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "cannot look at descriptors") {
		t.Errorf("taken without /proc: %v", err)
	}
	proc = real
	u := Take()
	proc = t.TempDir()
	if _, err := u.Leaks(0); err == nil || !strings.Contains(err.Error(), "cannot look") {
		t.Errorf("looked without /proc: %v", err)
	}
	u = &Usage{kinds: []Kind{{"pigeons", func() (map[string]int, error) { return nil, errors.New("no pigeons here") }}}}
	if _, err := u.Leaks(0); err == nil || !strings.Contains(err.Error(), "pigeons") {
		t.Errorf("%v", err)
	}
}

// leakyEnv tells a subprocess what to leak, and whether Check or Main must notice it.
const leakyEnv = "LEAKCHECK_TEST_LEAK"

func TestMain(m *testing.M) {
	if os.Getenv(leakyEnv) != "" {
		patience = 300 * time.Millisecond
	}
	if strings.HasPrefix(os.Getenv(leakyEnv), "main:") {
		Main(m, nil, counted())
	}
	os.Exit(m.Run())
}

// TestLeaking leaks in a subprocess, as leakyEnv tells it.
func TestLeaking(t *testing.T) {
	who, kind, _ := strings.Cut(os.Getenv(leakyEnv), ":")
	if who == "" {
		t.Skip("for the subprocesses of TestLeakFails")
	}
	if who == "check" {
		Check(t, counted())
	}
	if kind != "nothing" {
		kept = leaky[kind](t)
	}
}

// kept holds leaked resources, so that no finalizer releases them.
var kept func()

// A test that leaks fails, by Check and by Main, for each kind of leak. A test without leaks passes.
func TestLeakFails(t *testing.T) {
	for _, who := range []string{"check", "main"} {
		for _, kind := range []string{"nothing", "goroutines", "descriptors", "shared mappings", "objects"} {
			t.Run(who+" "+kind, func(t *testing.T) {
				t.Parallel() // each waits for its patience
				cmd := exec.Command(os.Args[0], "-test.run=^TestLeaking$", "-test.count=1")
				cmd.Env = append(os.Environ(), leakyEnv+"="+who+":"+kind)
				out, err := cmd.CombinedOutput()
				if kind == "nothing" {
					if err != nil {
						t.Errorf("%v\n%s", err, out)
					}
					return
				}
				if err == nil || !strings.Contains(string(out), kind+": ") || !strings.Contains(string(out), "leak") {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
	}
}
