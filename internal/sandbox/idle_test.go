package sandbox

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// An idle group leaves its CPU to a program in another group. With the default weight it would take half of it.
func TestIdleGroup(t *testing.T) {
	open := func(cfg GroupsConfig) *Groups {
		t.Helper()
		g, err := OpenGroups(cfg)
		if err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() { g.Close() })
		if !g.hasController("cpu") {
			t.Skip("no cpu controller")
		}
		return g
	}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	for cpu := range len(set) * 64 {
		if set.Count() > 1 {
			set.Clear(cpu)
		}
	}
	spin := func(g *Groups) func() time.Duration {
		dir, group := newGroup(t, g)
		cmd := in(t, dir, "while :; do :; done")
		if err := unix.SchedSetaffinity(cmd.Process.Pid, &set); err != nil {
			t.Fatal(err)
		}
		return func() time.Duration {
			used, ok := group.CPUTime()
			if !ok {
				t.Skip("no CPU times of groups")
			}
			return used
		}
	}
	idle, normal := spin(open(GroupsConfig{Idle: true})), spin(open(GroupsConfig{}))
	before, other := idle(), normal()
	for end := time.Now().Add(time.Minute); normal()-other < 300*time.Millisecond && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if i, n := idle()-before, normal()-other; i > n/5 {
		t.Errorf("a program in an idle group took %v of a CPU, while another one took %v", i, n)
	}
}

// Kernels without cpu.idle get the smallest weight instead, and a kernel that cannot weigh I/O does without.
func TestIdleGroupOfOlderKernels(t *testing.T) {
	for name, c := range map[string]struct {
		self   string
		groups map[string][]string
		new    []string
		want   map[string]string
	}{
		"version 2": {"0::/a\n", map[string][]string{"a": {"cgroup.controllers=cpu io memory", "cgroup.type", "cgroup.procs", "cgroup.subtree_control"}},
			append([]string{"cpu.weight", "io.weight"}, v2Files...), map[string]string{"cpu.weight": "1", "io.weight": "default 1"}},
		"version 2 with cpu.idle": {"0::/a\n", map[string][]string{"a": {"cgroup.controllers=cpu io", "cgroup.type", "cgroup.procs", "cgroup.subtree_control"}},
			append([]string{"cpu.weight", "cpu.idle"}, v2Files...), map[string]string{"cpu.weight": "", "cpu.idle": "1"}},
		"version 1": {"4:cpu,cpuacct:/a\n", map[string][]string{"cpu,cpuacct/a": nil}, []string{"tasks", "cpu.cfs_quota_us", "cpuacct.usage", "cpu.shares"},
			map[string]string{"cpu.shares": "2"}},
	} {
		t.Run(name, func(t *testing.T) {
			root, cfg := fake(t, c.self, c.groups)
			cfg.Idle = true
			g, err := openGroups(root, cfg, populate(c.new...), os.RemoveAll)
			if err != nil {
				t.Fatal(err)
			}
			d, err := g.New()
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			defer d.CloseJoin()
			if in := g.Competes(); filepath.Base(in) != "a" {
				t.Errorf("a group of the default weight: %q", in)
			}
			os.WriteFile(filepath.Join(g.trees[0].dir, "cpu.idle"), []byte("1\n"), 0o600)
			if in := g.Competes(); in != "" {
				t.Errorf("an idle group competes: %q", in)
			}
			for file, want := range c.want {
				got, err := os.ReadFile(filepath.Join(d.dirs[0], file))
				if err != nil || string(got) != want {
					t.Errorf("%s has %q, %v; want %q", file, got, err, want)
				}
			}
		})
	}
}
