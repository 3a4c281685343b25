package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// versions are the control groups of this node: all of them, those of version 1 only, and those of version 2 only.
func versions(t *testing.T, test func(t *testing.T, g *Groups)) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	only := func(keep func(line string) bool) string {
		var lines string
		for line := range strings.Lines(string(text)) {
			if keep(line) {
				lines += line
			}
		}
		file := filepath.Join(t.TempDir(), "cgroup")
		if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for name, self := range map[string]string{
		"all":       "",
		"version 1": only(func(line string) bool { return !strings.HasPrefix(line, "0:") }),
		"version 2": only(func(line string) bool { return strings.HasPrefix(line, "0:") }),
	} {
		t.Run(name, func(t *testing.T) {
			g, err := OpenGroups(GroupsConfig{PIDs: 10, Self: self})
			if err != nil {
				usable := fileExists("/sys/fs/cgroup/memory/memory.limit_in_bytes") || fileExists("/sys/fs/cgroup/cgroup.controllers")
				if (os.Getenv("CI") != "" || os.Getenv("RFAAS_REQUIRE_VERBS") != "") && os.Geteuid() == 0 && usable && name == "all" {
					t.Fatal(err)
				}
				t.Skip(err)
			}
			defer g.Close()
			t.Logf("missing: %q", g.Missing())
			test(t, g)
		})
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// newGroup makes a group whose files have passed through Files and NewGroup.
func newGroup(t *testing.T, g *Groups) (*GroupDir, *Group) {
	t.Helper()
	dir, err := g.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A shell may have ended before the last process of its pipeline has.
		for end := time.Now().Add(20 * time.Second); !empty(dir) && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		if err := g.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	layout, files := dir.Files()
	var passed []*os.File
	for _, f := range files {
		fd, err := syscall.Dup(int(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		passed = append(passed, os.NewFile(uintptr(fd), f.Name()))
	}
	group, err := NewGroup(layout, passed, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(group.Close)
	return dir, group
}

// empty says whether no process is left in a group.
func empty(dir *GroupDir) bool {
	for _, d := range dir.dirs {
		if pids, err := os.ReadFile(filepath.Join(d, "cgroup.procs")); err != nil || len(pids) > 0 {
			return false
		}
	}
	return true
}

// in starts a shell that joins the group, reports that, and then runs the script. The test has its input.
func in(t *testing.T, dir *GroupDir, script string) *exec.Cmd {
	t.Helper()
	join := ""
	for _, d := range dir.dirs {
		join += "echo 0 >" + d + "/cgroup.procs\n"
	}
	cmd := exec.Command("sh", "-c", join+"echo in\n"+script)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		dir.LetDie()
		_ = cmd.Wait()
	})
	if n, err := out.Read(make([]byte, 8)); n < 3 {
		t.Fatalf("the shell has not joined its groups: %d bytes, %v", n, err)
	}
	return cmd
}

// The kernel kills a process that exceeds the memory limit of its group, and counts that.
func TestGroupLimitsMemory(t *testing.T) {
	versions(t, func(t *testing.T, g *Groups) {
		if !g.hasController("memory") {
			t.Skip("no memory controller")
		}
		dir, group := newGroup(t, g)
		for _, limit := range []uint64{16 << 20, 64 << 20, 32 << 20} { // up and down again
			if err := group.Limit(limit); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range dir.dirs { // swap counts too, or there is none
			if text, err := os.ReadFile(filepath.Join(d, "memory.memsw.limit_in_bytes")); err == nil && string(text) != "33554432\n" {
				t.Errorf("memory with swap: %q, want as much as memory alone", text)
			}
			if text, err := os.ReadFile(filepath.Join(d, "memory.swap.max")); err == nil && string(text) != "0\n" {
				t.Errorf("swap: %q, want 0", text)
			}
		}
		_ = in(t, dir, "head -c 100000000 /dev/zero | tail -c 100000000 >/dev/null").Wait()
		if n, full := group.Killed(); n == 0 || !full {
			t.Errorf("100 MB in a group of 32 MiB: %d killed, full %t", n, full)
		}
	})
}

// A process that is killed because of an outer group's limit does not count as exceeding its own.
func TestGroupWithinAnOuterLimit(t *testing.T) {
	self, outer := outerGroup(t, 32<<20)
	child := exec.Command("sleep", "100")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	})
	g, err := OpenGroups(GroupsConfig{Self: self, Processes: []int{child.Process.Pid}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the worker's group is removed, and before the outer one is
		if err := g.Close(); err != nil {
			t.Errorf("close groups below %s: %v", outer, err)
		}
	})
	dir, group := newGroup(t, g)
	if err := group.Limit(1 << 30); err != nil {
		t.Fatal(err)
	}
	_ = in(t, dir, "head -c 100000000 /dev/zero | tail -c 100000000 >/dev/null").Wait()
	if n, full := group.Killed(); n == 0 || full {
		t.Errorf("100 MB in a group of 1 GiB within one of 32 MiB: %d killed, full %t; want it not to be full", n, full)
	}
}

// outerGroup makes a group with a memory limit. self is the content of /proc/self/cgroup in it.
func outerGroup(t *testing.T, limit uint64) (self, dir string) {
	t.Helper()
	own, err := ownGroups("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	for _, o := range own {
		parent, file, controllers := filepath.Join(groupRoot, "memory", o.path), "memory.limit_in_bytes", "memory"
		if len(o.controllers) == 0 {
			parent, file, controllers = filepath.Join(groupRoot, o.path), "memory.max", ""
			_ = write(parent, "cgroup.subtree_control", "+memory")
		} else if !slices.Contains(o.controllers, "memory") {
			continue
		}
		dir = filepath.Join(parent, fmt.Sprintf("outer-%d", os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		if write(dir, file, strconv.FormatUint(limit, 10)) != nil {
			continue
		}
		_ = write(dir, "memory.memsw.limit_in_bytes", strconv.FormatUint(limit, 10)) // where swap is counted
		_ = write(dir, "memory.swap.max", "0")
		self = filepath.Join(t.TempDir(), "cgroup")
		if err := os.WriteFile(self, fmt.Appendf(nil, "1:%s:%s\n", controllers, filepath.Join(o.path, filepath.Base(dir))), 0o600); err != nil {
			t.Fatal(err)
		}
		return self, dir
	}
	testkit.Lacks(t, "no memory controller")
	return "", ""
}

// A frozen group uses no CPU time, whatever signals its processes get. It continues when it is thawed, and it can be
// killed while frozen.
func TestGroupFreezes(t *testing.T) {
	versions(t, func(t *testing.T, g *Groups) {
		dir, group := newGroup(t, g)
		if !group.CanFreeze() {
			t.Skip("no freezer")
		}
		if group.old(freezeFile) {
			state, err := os.ReadFile(filepath.Join(g.frozen, "freezer.state"))
			if strings.TrimSpace(string(state)) != "FROZEN" {
				t.Errorf("the group %q that makes thawing fast: %q, %v", g.frozen, state, err)
			}
			t.Cleanup(func() {
				if fileExists(g.frozen) {
					t.Errorf("%s is left after Close", g.frozen)
				}
			})
		}
		cmd := in(t, dir, "while :; do :; done")
		used := func() time.Duration {
			d, ok := group.CPUTime()
			if !ok {
				t.Fatal("no CPU time")
			}
			return d
		}
		// ran returns in how many of 50 intervals of a millisecond the process has run.
		ran := func() (n int) {
			for before, i := used(), 0; i < 50; i++ {
				_ = cmd.Process.Signal(syscall.SIGCONT)
				time.Sleep(time.Millisecond)
				now := used()
				if now > before {
					n++
				}
				before = now
			}
			return n
		}
		for range 5 {
			spinning := ran()
			for tries := 0; spinning < 12 && tries < 100; tries++ { // this process or that one may wait for its turn
				spinning = ran()
			}
			if spinning < 12 {
				t.Fatalf("a spinning process runs at %d of 50 looks", spinning)
			}
			if err := group.Freeze(t.Context()); err != nil {
				t.Fatal(err)
			}
			// The kernel reports a thread as frozen just before it leaves its processor, and counts its last moment later.
			if n := ran(); n > spinning/4 {
				t.Errorf("a frozen process ran at %d of 50 looks, before at %d", n, spinning)
			}
			if err := group.Thaw(); err != nil {
				t.Fatal(err)
			}
		}
		if err := group.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Process.Kill()
		group.LetDie()
		_ = cmd.Wait() // hangs if it cannot be killed
	})
}

// A freeze whose context ends is undone.
func TestFreezeGivesUp(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	files := map[string]string{"cgroup.freeze": "0", "cgroup.events": "populated 1\nfrozen 0\n"}
	group := &Group{}
	dir := t.TempDir()
	for i, name := range map[int]string{freezeFile: "cgroup.freeze", eventsFile: "cgroup.events"} {
		path := filepath.Join(dir, name)
		os.WriteFile(path, []byte(files[name]), 0o600)
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		group.files[i] = f
	}
	defer group.Close()
	if err := group.Freeze(ctx); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("%v, want the context's cause", err)
	}
	if text, _ := os.ReadFile(filepath.Join(dir, "cgroup.freeze")); string(text) != "0" {
		t.Errorf("cgroup.freeze has %q, want 0", text)
	}
	if err := (*Group)(nil).Freeze(ctx); !errors.Is(err, ErrNoFreezer) {
		t.Errorf("of no group: %v", err)
	}
}

func TestNewGroupRefuses(t *testing.T) {
	null := func(n int) (files []*os.File) {
		for range n {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		return files
	}
	for _, c := range []struct {
		layout uint32
		files  int
	}{{0, 1}, {1, 0}, {3, 1}, {1 << controls, 1}, {1 | 2<<16, 1}, {1 << 16, 0}} {
		files := null(c.files)
		if _, err := NewGroup(c.layout, files, 0); err == nil {
			t.Errorf("layout %#x with %d files was taken", c.layout, c.files)
		}
		for _, f := range files {
			if err := f.Close(); !errors.Is(err, os.ErrClosed) {
				t.Errorf("layout %#x: a file was left open", c.layout)
			}
		}
	}
}

// fake is a tree of files that replaces the kernel's. Its new groups have the control files that mkdir gets.
func fake(t *testing.T, self string, groups map[string][]string) (root string, cfg GroupsConfig) {
	t.Helper()
	root = t.TempDir()
	cfg.Self = filepath.Join(root, "self")
	os.WriteFile(cfg.Self, []byte(self), 0o600)
	for dir, files := range groups {
		os.MkdirAll(filepath.Join(root, dir), 0o700)
		for _, f := range files {
			name, text, _ := strings.Cut(f, "=")
			os.WriteFile(filepath.Join(root, dir, name), []byte(text), 0o600)
		}
	}
	return root, cfg
}

func populate(files ...string) func(string) error {
	return func(dir string) error {
		err := os.Mkdir(dir, 0o755)
		for _, name := range files {
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name), nil, 0o600)
			}
		}
		return err
	}
}

var v2Files = []string{"cgroup.procs", "cgroup.freeze", "cgroup.events", "cpu.stat", "cpu.max", "cpuset.cpus", "memory.max", "memory.swap.max",
	"memory.events", "pids.max", "rdma.max"}

// OpenGroups on trees of files: it names what is missing, and what is not enforced then.
func TestOpenGroupsDegrades(t *testing.T) {
	for name, c := range map[string]struct {
		self    string
		groups  map[string][]string
		new     []string
		refused bool
		missing []string
	}{
		"nonsense": {"x\n", nil, nil, true, []string{`"x`}},
		"nothing":  {"0::/\n", nil, nil, true, []string{"cpuset", "cpu:", "memory", "pids", "freezer"}},
		"version 2": {"0::/a\n", map[string][]string{"a": {"cgroup.controllers=cpuset cpu io memory pids rdma", "cgroup.type", "cgroup.procs", "cgroup.subtree_control"}},
			v2Files, false, []string{"hugetlb (not delegated"}},
		"version 2 without cpuset": {"0::/a\n", map[string][]string{"a": {"cgroup.controllers=cpu memory pids rdma", "cgroup.type", "cgroup.procs", "cgroup.subtree_control"}},
			v2Files, false, []string{"hugetlb (", "cpuset (not delegated to this control group: use Delegate= in the unit): only the system call filter keeps workers from changing their CPUs"}},
		"version 2, not to be written": {"0::/a\n", map[string][]string{"a": {"cgroup.controllers=cpuset cpu memory pids hugetlb rdma", "cgroup.type", "cgroup.procs"}},
			v2Files, false, []string{"cpuset (", "cpu (", "memory (", "pids (", "hugetlb (", "rdma ("}},
		"version 1 without pids": {"4:memory:/a\n0::/\n", map[string][]string{"memory/a": {"tasks"}},
			[]string{"tasks", "memory.oom_control", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.swappiness"}, false,
			[]string{"cpuset", "cpu:", "pids", "hugetlb", "rdma", "freezer", "cpuacct"}},
		"version 1, no such groups": {"4:memory:/a\n5:pids:/b\n", nil, nil, true, []string{"memory (", "has no group /a", "pids (", "has no group /b"}},
		"version 1, two in one hierarchy": {"4:cpu,cpuacct:/a\n", map[string][]string{"cpu,cpuacct/a": nil}, []string{"tasks", "cpu.cfs_quota_us", "cpuacct.usage"}, false,
			[]string{"cpuset", "memory", "pids", "hugetlb", "rdma", "freezer"}},
	} {
		t.Run(name, func(t *testing.T) {
			root, cfg := fake(t, c.self, c.groups)
			g, err := openGroups(root, cfg, populate(c.new...), os.RemoveAll)
			if (err != nil) != c.refused {
				t.Fatalf("error %v", err)
			}
			var said string
			if err != nil {
				said = err.Error()
			} else {
				said = strings.Join(g.Missing(), "; ")
				if len(g.Missing()) != len(c.missing) {
					t.Errorf("missing %q, want %d", g.Missing(), len(c.missing))
				}
			}
			for _, m := range c.missing {
				if !strings.Contains(said, m) {
					t.Errorf("%q does not name %q", said, m)
				}
			}
		})
	}
}

// The texts that are written to control files of version 2.
func TestGroupFilesV2(t *testing.T) {
	root, cfg := fake(t, "0::/a\n", map[string][]string{"a": {"cgroup.controllers=cpuset cpu memory pids", "cgroup.type", "cgroup.procs", "cgroup.subtree_control"}})
	cfg.PIDs, cfg.Processes = 7, []int{11, 12}
	var moved []string
	mkdir := populate(v2Files...)
	g, err := openGroups(root, cfg, func(dir string) error {
		if strings.Contains(dir, "executor") {
			moved = append(moved, dir)
		}
		return mkdir(dir)
	}, os.RemoveAll)
	if err != nil {
		t.Fatal(err)
	}
	read := func(dir, file string) string {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if len(moved) != 1 || read(moved[0], "cgroup.procs") != "12" { // each write is one process to the kernel; a file keeps the last
		t.Errorf("moved to %q: %q", moved, read(moved[0], "cgroup.procs"))
	}
	if text := read(filepath.Join(root, "a"), "cgroup.subtree_control"); !strings.HasPrefix(text, "+pids") { // likewise
		t.Errorf("delegated %q", text)
	}
	d, err := g.New()
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Join) != 1 || d.Join[0].Name() != d.dirs[0] {
		t.Errorf("joined by %v, want the directory %v", d.Join, d.dirs)
	}
	want := func(file, text string) {
		t.Helper()
		if got := read(d.dirs[0], file); got != text {
			t.Errorf("%s: %q, want %q", file, got, text)
		}
	}
	want("pids.max", "7")
	want("memory.swap.max", "0")
	if err := errors.Join(d.Limit(1<<20), d.Pin([]int{3, 5})); err != nil {
		t.Fatal(err)
	}
	want("memory.max", "1048576")
	want("cpuset.cpus", "3,5")
	want("cpu.max", "225000 100000")
	for file, text := range map[string]string{"cpu.stat": "usage_usec 1234567\nuser_usec 1\n", "memory.events": "low 0\noom 3\noom_kill 2\n"} {
		os.WriteFile(filepath.Join(d.dirs[0], file), []byte(text), 0o600)
	}
	used, ok := d.CPUTime()
	killed, full := d.Killed()
	if !ok || used != 1234567*time.Microsecond || killed != 2 || !full {
		t.Errorf("CPU time %v, %v, %d killed, full %t", used, ok, killed, full)
	}
	if err := errors.Join(g.Remove(d), g.Close()); err != nil {
		t.Error(err)
	}
}

// New returns the group that was made ahead, and Close removes it.
func TestPrepare(t *testing.T) {
	root, cfg := fake(t, "2:memory:/job\n", map[string][]string{"memory/job": nil})
	g, err := openGroups(root, cfg, populate("tasks", "memory.oom_control", "memory.limit_in_bytes", "memory.swappiness"), os.RemoveAll)
	if err != nil {
		t.Fatal(err)
	}
	g.Prepare()
	groups := func() int {
		list, _ := filepath.Glob(filepath.Join(root, "memory/job/rfaas-*"))
		return len(list)
	}
	d, err := g.New()
	if n := groups(); err != nil || n != 1 {
		t.Errorf("%d groups, %v: the one made ahead was not given out", n, err)
	}
	g.Prepare()
	// An executor in another process namespace removes the group made ahead, as if its executor were dead.
	list, _ := filepath.Glob(filepath.Join(root, "memory/job/rfaas-*"))
	for _, dir := range list {
		if dir != d.dirs[0] {
			os.RemoveAll(dir)
		}
	}
	other, err := g.New()
	if n := groups(); err != nil || n != 2 {
		t.Errorf("%d groups, %v: one that is gone was given out", n, err)
	}
	dead := filepath.Join(g.trees[0].dir, "rfaas-"+nameSpace("/proc", "self")+".4194305-1") // of an executor that has ended since g was opened
	if err := os.Mkdir(dead, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(g.Remove(other), g.Remove(d), g.Close()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dead); err == nil {
		t.Errorf("%s is left", dead)
	}
	g.Prepare()
	if n := groups(); n != 0 {
		t.Errorf("%d groups are left", n)
	}
}

// Two executors in different process namespaces with the same process id have different groups.
func TestSameProcessID(t *testing.T) {
	root, cfg := fake(t, "2:memory:/job\n1:pids:/job\n", map[string][]string{"memory/job": nil, "pids/job": nil})
	taken := map[string]bool{}
	for range 2 {
		g, err := openGroups(root, cfg, populate("tasks", "memory.oom_control", "memory.limit_in_bytes", "memory.swappiness"), os.RemoveAll)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			group, err := g.New()
			if err != nil {
				t.Fatal(err)
			}
			defer group.Close()
			for _, dir := range group.dirs {
				if taken[dir] {
					t.Errorf("%s was given twice", dir)
				}
				taken[dir] = true
			}
			group.CloseJoin()
		}
	}
	if len(taken) != 12 {
		t.Errorf("%d directories, want 12", len(taken))
	}
}
