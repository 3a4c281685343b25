package sandbox

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// What a process in a group may do: nothing beyond its limits, and its end is counted.
func TestGroups(t *testing.T) {
	g, err := OpenGroups()
	if err != nil {
		usable := fileExists("/sys/fs/cgroup/memory/memory.limit_in_bytes") || fileExists("/sys/fs/cgroup/cgroup.controllers")
		if (os.Getenv("CI") != "" || os.Getenv("RFAAS_REQUIRE_VERBS") != "") && os.Geteuid() == 0 && usable {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	defer g.Close()
	group, err := g.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := group.Remove(); err != nil {
			t.Error(err)
		}
	}()
	if err := group.Limit(32<<20, 10); err != nil {
		t.Fatal(err)
	}
	doors, err := group.Doors()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", "read x; head -c 100000000 /dev/zero | tail -c 100000000 >/dev/null; read y; exit 7")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, d := range doors {
		if info, err := d.Stat(); err != nil || info.IsDir() != (group.version == 2) {
			t.Errorf("version %d: door %v, %v", group.version, info, err)
		}
		d.Close()
	}
	for _, dir := range group.dirs {
		if err := write(dir, "cgroup.procs", strconv.Itoa(cmd.Process.Pid)); err != nil {
			t.Error(err)
		}
	}
	in.Write([]byte("go\n"))
	for end := time.Now().Add(10 * time.Second); group.Killed() == 0 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
	}
	in.Write([]byte("end\n"))
	in.Close()
	cmd.Wait()
	if n := group.Killed(); n == 0 {
		t.Error("100 MB in a group of 32 MiB: nobody was killed")
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Trees of files in the place of the kernel's: what is read of them, and what is refused.
func TestOpenGroupsRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		self  string
		files map[string]string
		says  string
	}{
		"nonsense":           {"x\n", nil, `"x`},
		"nothing":            {"0::/\n", nil, "no controller"},
		"v2 without memory":  {"0::/a\n", map[string]string{"a/cgroup.controllers": "cpu pids\n"}, "Delegate"},
		"v1 without pids":    {"4:memory:/a\n0::/\n", map[string]string{"memory/a/tasks": ""}, "no controller pids"},
		"v1, no such groups": {"4:memory:/a\n5:pids:/b\n", nil, "no such file"},
	} {
		root := t.TempDir()
		self := filepath.Join(root, "self")
		os.WriteFile(self, []byte(c.self), 0o600)
		for path, text := range c.files {
			os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o700)
			os.WriteFile(filepath.Join(root, path), []byte(text), 0o600)
		}
		if _, err := openGroups(root, self, 1); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

// Two executors in process name spaces of their own, which have the same process id, share no group.
func TestSameProcessID(t *testing.T) {
	root, self := t.TempDir(), filepath.Join(t.TempDir(), "cgroup")
	if err := os.WriteFile(self, []byte("2:memory:/job\n1:pids:/job\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, controller := range []string{"memory", "pids"} {
		if err := os.MkdirAll(filepath.Join(root, controller, "job"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	taken := map[string]bool{}
	for range 2 {
		g, err := openGroups(root, self, 8)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			group, err := g.New()
			if err != nil {
				t.Fatal(err)
			}
			for _, dir := range group.dirs {
				if taken[dir] {
					t.Errorf("%s was given twice", dir)
				}
				taken[dir] = true
			}
		}
	}
	if len(taken) != 12 {
		t.Errorf("%d directories, want 12", len(taken))
	}
}
