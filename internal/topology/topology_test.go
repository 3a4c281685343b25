package topology

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// machine lays out a file of testdata, each line a path and its content, and returns the root.
func machine(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		path, content, _ := strings.Cut(line, " ")
		put(t, root, path, content)
	}
	return root
}

func put(t *testing.T, root, path, content string) {
	t.Helper()
	path = filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestCores(t *testing.T) {
	for _, c := range []struct{ machine, cpus, want string }{
		{"two-sockets-smt2", "0-15", "[{[0 8] 0} {[1 9] 0} {[2 10] 0} {[3 11] 0} {[4 12] 1} {[5 13] 1} {[6 14] 1} {[7 15] 1}]"},
		{"two-sockets-smt2", "3-4,12", "[{[3] 0} {[4 12] 1}]"}, // a cpuset that cuts a core: its sibling is not ours
		{"two-sockets-smt2", "15", "[{[15] 1}]"},
		{"hybrid-no-numa", "0-7", "[{[0 1] 0} {[2 3] 0} {[4] 0} {[5] 0} {[6] 0} {[7] 0}]"},
		{"power9-smt4", "0-5,7-15", "[{[0 1 2 3] 0} {[4 5 7] 0} {[8 9 10 11] 8} {[12 13 14 15] 8}]"},
		{"power9-smt4", "5,9-10", "[{[5] 0} {[9 10] 8}]"},
		{"arm-numa4", "1-6", "[{[1] 0} {[2] 1} {[3] 1} {[4] 2} {[5] 2} {[6] 3}]"},
		{"arm-numa4", "7,9", "[{[7] 3} {[9] 0}]"}, // a CPU of which the kernel tells nothing
		{"arm-numa4", "", "[]"},
	} {
		cpus, err := ParseList(c.cpus)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Cores(machine(t, c.machine), cpus)
		if err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("%s, CPUs %s: %v (%v), want %s", c.machine, c.cpus, got, err, c.want)
		}
		if all := CPUs(got); !slices.Equal(all, cpus) {
			t.Errorf("%s, CPUs %s: the cores have the CPUs %v", c.machine, c.cpus, all)
		}
	}
}

func TestCoresOfThisMachine(t *testing.T) {
	cpus, err := Affinity()
	if err != nil {
		t.Fatal(err)
	}
	if len(cpus) < runtime.NumCPU() {
		t.Errorf("affinity %v, and the runtime counts %d CPUs", cpus, runtime.NumCPU())
	}
	cores, err := Cores("/", cpus)
	if err != nil || !slices.Equal(CPUs(cores), cpus) {
		t.Errorf("cores %v (%v) of the CPUs %v", cores, err, cpus)
	}
	if memory, err := AvailableMemory("/"); err != nil || memory < 1<<20 {
		t.Errorf("available memory: %d bytes, %v", memory, err)
	}
}

func TestDamagedTopology(t *testing.T) {
	root := machine(t, "arm-numa4")
	put(t, root, "sys/devices/system/cpu/cpu3/topology/core_cpus_list", "4-\n")
	put(t, root, "sys/devices/system/cpu/cpu4/topology/core_cpus_list", "5")
	for cpu, text := range map[int]string{3: `"4-"`, 4: "does not name CPU 4"} {
		if _, err := Cores(root, []int{cpu}); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("CPU %d: %v, want an error that says %s", cpu, err, text)
		}
	}
	put(t, root, "sys/devices/system/node/node2/cpulist", "x")
	if _, err := Cores(root, []int{0}); err == nil || !strings.Contains(err.Error(), "node2") {
		t.Errorf("%v, want an error that names the file", err)
	}
}

func TestParseList(t *testing.T) {
	for text, want := range map[string]string{"": "[]", "3": "[3]", "0-2,7,1-3": "[0 1 2 3 7]"} {
		if got, err := ParseList(text); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v, %v; want %s", text, got, err, want)
		}
	}
	for _, text := range []string{",", "a", "3-1", "-1", "1-", "0-99999999", "1,,2", " 1"} {
		if got, err := ParseList(text); err == nil {
			t.Errorf("%q: %v and no error", text, got)
		}
	}
}

func TestNear(t *testing.T) {
	for _, c := range []struct{ machine, device, want string }{
		{"two-sockets-smt2", "", "[1]"},
		{"two-sockets-smt2", "mlx5_1", "[1]"},
		{"two-sockets-smt2", "mlx5_7", "[]"},
		{"two-sockets-smt2", "[", "[]"},
		{"hybrid-no-numa", "", "[]"},
		{"power9-smt4", "", "[0 8]"},
		{"power9-smt4", "mlx5_0", "[8]"},
		{"power9-smt4", "mlx5_2", "[]"},
		{"arm-numa4", "rxe0", "[]"},
	} {
		if got := Near(machine(t, c.machine), c.device); fmt.Sprint(got) != c.want {
			t.Errorf("%s, device %q: %v, want %s", c.machine, c.device, got, c.want)
		}
	}
}

func TestFirst(t *testing.T) {
	cores, err := Cores(machine(t, "two-sockets-smt2"), []int{0, 1, 2, 4, 5, 12})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		n    int
		near []int
		want string
	}{
		{2, nil, "[{[0] 0} {[1] 0}]"},
		{2, []int{1}, "[{[4 12] 1} {[5] 1}]"},
		{3, []int{1}, "[{[0] 0} {[4 12] 1} {[5] 1}]"},
		{99, []int{1}, fmt.Sprint(cores)},
		{0, nil, "[]"},
	} {
		if got := First(cores, c.n, c.near); fmt.Sprint(got) != c.want {
			t.Errorf("%d near %v: %v, want %s", c.n, c.near, got, c.want)
		}
	}
}

func TestSlurm(t *testing.T) {
	for _, c := range []struct {
		name string
		env  map[string]string
		want Slurm
		kept string // of two-sockets-smt2 with CPUs 0-1, 8-9 allowed
	}{
		{"no job", map[string]string{"SLURM_CPUS_ON_NODE": "1"}, Slurm{}, "[{[0 8] 0} {[1 9] 0}]"},
		{"all of it", map[string]string{"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "2048"},
			Slurm{CPUs: 4, Memory: 2 << 30}, "[{[0 8] 0} {[1 9] 0}]"},
		{"not bound", map[string]string{"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2", "SLURM_MEM_PER_CPU": "100"},
			Slurm{CPUs: 2, Memory: 200 << 20}, "[{[0 8] 0}]"},
		{"half a core", map[string]string{"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "3", "SLURM_MEM_PER_NODE": "0"},
			Slurm{CPUs: 3}, "[{[0 8] 0} {[1] 0}]"},
		{"silent", map[string]string{"SLURM_JOB_ID": "7"}, Slurm{}, "[{[0 8] 0} {[1 9] 0}]"},
	} {
		got, err := ReadSlurm(func(name string) string { return c.env[name] })
		if err != nil || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", c.name, got, err, c.want)
		}
		cores, err := Cores(machine(t, "two-sockets-smt2"), []int{0, 1, 8, 9})
		if err != nil {
			t.Fatal(err)
		}
		kept, limited := got.Limit(cores)
		if fmt.Sprint(kept) != c.kept || limited != (len(CPUs(kept)) < 4) {
			t.Errorf("%s: kept %v, limited %t; want %s", c.name, kept, limited, c.kept)
		}
	}
	_, err := ReadSlurm(func(name string) string {
		return map[string]string{"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "many"}[name]
	})
	if err == nil || !strings.Contains(err.Error(), "SLURM_CPUS_ON_NODE=many") {
		t.Errorf("%v, want an error that names the variable and its value", err)
	}
}

func TestAvailableMemory(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := func(n uint64) {
		t.Helper()
		if got, err := AvailableMemory(root); err != nil || got != n {
			t.Errorf("%d, %v; want %d", got, err, n)
		}
	}
	if _, err := AvailableMemory(root); err == nil {
		t.Error("no meminfo and no error")
	}
	write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:   800 kB\n")
	want(800 << 10)
	write("proc/self/cgroup", "0::/a/b\n")
	write("sys/fs/cgroup/a/b/memory.max", "max\n")
	want(800 << 10)
	write("sys/fs/cgroup/a/memory.max", "8192\n")
	want(8192)
	write("sys/fs/cgroup/a/memory.current", "7000\n")
	write("sys/fs/cgroup/a/memory.stat", "anon 4000\nfile 3000\ninactive_file 1904\nactive_file 1000\n")
	want(4096)
	if most, group, err := MostMemory(root); most != 8192 || group != filepath.Join(root, "sys/fs/cgroup/a") || err != nil {
		t.Errorf("most: %d of %q, %v; want 8192 of a", most, group, err)
	}
	write("sys/fs/cgroup/a/memory.current", "9000\n") // above the limit while the kernel takes memory back
	write("sys/fs/cgroup/a/memory.stat", "")
	want(0)
	write("proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/slurm\n0::/\n")
	write("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "9000\n")
	want(9000)
	write("sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", "5000\n")
	write("sys/fs/cgroup/memory/slurm/memory.stat", "inactive_file 7\ntotal_inactive_file 1000\n")
	want(5000)
	write("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "9223372036854771712\n") // none
	want(800 << 10)
	if most, group, err := MostMemory(root); most != 900<<10 || group != "" || err != nil {
		t.Errorf("most: %d of %q, %v; want the node's 900 kB", most, group, err)
	}
}
