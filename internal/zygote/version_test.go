package zygote

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// greeter installs a program in path's place that greets with these bytes and then waits for its end.
func greeter(t *testing.T, path string, greeting []byte) {
	t.Helper()
	script := fmt.Sprintf("#!/bin/sh\ncat '%s.greeting' >&3\nexec cat <&3 >/dev/null\n", path)
	for name, content := range map[string][]byte{path + ".greeting": greeting, path + ".new": []byte(script)} {
		if err := os.WriteFile(name, content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// greeting is a HELLO; text is what follows the numbers.
func greeting(version uint32, text string) []byte {
	body := binary.LittleEndian.AppendUint32(nil, version)
	body = append(body, make([]byte, 8)...)
	return (&wire.Message{Type: wire.Hello, ID: 0, Body: append(body, text...)}).Encode()
}

// unversionedSpawner is a spawner that matches executors of any version.
func unversionedSpawner(t *testing.T) string {
	t.Helper()
	path := filepath.Join(buildDir, "unversioned-spawner")
	cmd := exec.Command("go", "build", "-o", path, "../../cmd/rfaas-spawner")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// Without the check an executor would send such a program messages that it takes for others.
func TestOtherVersionDoesNotStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "rfaas-worker")
	headless := greeting(wire.Version, "\x00v2")
	headless[4] = wire.Version + 1
	const v1 = "v1: install both of one version, then restart the executor"
	for name, tc := range map[string]struct {
		ours     string
		greeting []byte
		want     string // of the error; "": it starts
	}{
		"the same":             {"v1", greeting(wire.Version, "no Landlock\x00v1"), ""},
		"ours does not matter": {"", greeting(wire.Version, "\x00v2"), ""},
		"ours unknown":         {"unknown", greeting(wire.Version, "\x00v2"), ""},
		"theirs edited":        {"v1", greeting(wire.Version, "\x00v1-dirty"), ""},
		"theirs unknown":       {"v1", greeting(wire.Version, "\x00unknown"), ""},
		"another":              {"v1", greeting(wire.Version, "\x00v2"), "it is version v2, this executor " + v1},
		"older":                {"v1", greeting(wire.Version, ""), "it is version older than 0.1, this executor " + v1},
		"other wire":           {"", greeting(wire.Version+1, "\x00v2"), "it speaks wire version 2, this executor 1: install both"},
		"other heads":          {"", headless, "wire version 2, this program speaks version 1: install both"},
	} {
		greeter(t, path, tc.greeting)
		z, err := Start(t.Context(), Config{Path: path, Spawner: unversionedSpawner(t), Version: tc.ours, Log: testLog(t)})
		if err == nil {
			z.Close()
		}
		if tc.want == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		var we *WorkerError
		if !errors.As(err, &we) || we.Status != wire.StatusProtocol || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want one with %q", name, err, tc.want)
		}
	}
}

// A lease hears why there are no workers, at once, until the executor finds its own version again.
func TestOtherVersionInstalledMeanwhile(t *testing.T) {
	worker := workerPath(t)
	path := filepath.Join(t.TempDir(), "rfaas-worker")
	if err := os.Symlink(worker, path); err != nil {
		t.Fatal(err)
	}
	said, err := exec.Command(worker, "--version").Output() // rfaas-worker VERSION, wire version N
	if err != nil {
		t.Fatal(err)
	}
	ours, _, _ := strings.Cut(strings.TrimPrefix(string(said), "rfaas-worker "), ",")
	if ours == "unknown" || ours == "devel" {
		ours = "v1"
	}
	z, err := Start(t.Context(), Config{Path: path, Spawner: unversionedSpawner(t), Version: ours, Log: testLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { z.Close() })
	c := startClient(t)
	lease(t, z, c, nil).mustCall(t, fnEcho, []byte("before"))

	greeter(t, path, greeting(wire.Version, "\x00v0"))
	old := current(t, z)
	unix.Kill(old, unix.SIGKILL)
	eventually(t, "end of the zygote", func() bool {
		z.mu.Lock()
		defer z.mu.Unlock()
		return z.zygotes[0].pid != old
	})
	spec, channel := c.spec(t, sealedFile(t, testLibrary(t)))
	_, err = z.Spawn(t.Context(), spec)
	wantError(t, err, wire.StatusProtocol, "it is version v0, this executor "+ours+":")
	c.ask("close %d", channel)
	for {
		changed, reason := z.CannotStart()
		if reason != nil {
			wantError(t, reason, wire.StatusProtocol, "it is version v0, this executor "+ours+":")
			break
		}
		within(t, "word that no worker can be started", changed)
	}

	if err := os.Symlink(worker, path+".back"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".back", path); err != nil {
		t.Fatal(err)
	}
	for {
		z.mu.Lock()
		pid, changed := z.zygotes[0].pid, z.changed
		z.mu.Unlock()
		if pid != 0 {
			break
		}
		within(t, "a zygote of ours", changed)
	}
	if _, reason := z.CannotStart(); reason != nil {
		t.Errorf("with a zygote of ours: %v", reason)
	}
	lease(t, z, c, nil).mustCall(t, fnEcho, []byte("after"))
}
