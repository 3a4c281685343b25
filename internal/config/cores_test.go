package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/topology"
)

// Which cores are lent of a machine with two sockets and its adapter on the second one.
func TestPickCores(t *testing.T) {
	root := t.TempDir()
	for cpu := range 16 {
		dir := filepath.Join(root, fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology", cpu))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "core_cpus_list"), fmt.Appendf(nil, "%d,%d\n", cpu%8, cpu%8+8), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for node, cpus := range []string{"0-3,8-11\n", "4-7,12-15\n"} {
		dir := filepath.Join(root, fmt.Sprintf("sys/devices/system/node/node%d", node))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "cpulist"), []byte(cpus), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all := make([]int, 16)
	for i := range all {
		all[i] = i
	}
	for name, c := range map[string]struct {
		want    string // the setting
		allowed []int
		slurm   topology.Slurm
		cores   string
		unbound bool
		text    string // of the error
	}{
		"all":                   {"auto", []int{0, 1, 8}, topology.Slurm{}, "[{[0 8] 0} {[1] 0}]", false, ""},
		"a count, near ones":    {"3", all, topology.Slurm{}, "[{[4 12] 1} {[5 13] 1} {[6 14] 1}]", false, ""},
		"a list":                {"2-3,11-11", all, topology.Slurm{CPUs: 1}, "[{[2] 0} {[3 11] 0}]", false, ""},
		"bound by Slurm":        {"auto", []int{4, 12}, topology.Slurm{CPUs: 2}, "[{[4 12] 1}]", false, ""},
		"assigned, not bound":   {"auto", all, topology.Slurm{CPUs: 4}, "[{[0 8] 0} {[1 9] 0}]", true, ""},
		"more than there is":    {"3", []int{0, 1, 8}, topology.Slurm{}, "", false, "3 wanted, but this process may use only 2"},
		"more than Slurm gives": {"5", all, topology.Slurm{CPUs: 8}, "", true, "5 wanted, but this process may use only 4"},
		"not ours":              {"3-4", []int{4, 12}, topology.Slurm{}, "", false, "CPU 3 is not among"},
	} {
		var want Cores
		if err := want.UnmarshalText([]byte(c.want)); err != nil {
			t.Fatal(err)
		}
		got, unbound, err := want.Pick(root, c.allowed, []int{1}, c.slurm)
		if c.text != "" {
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%s: %v, %v; want %q", name, got, err, c.text)
			}
			continue
		}
		if err != nil || fmt.Sprint(got) != c.cores || unbound != c.unbound {
			t.Errorf("%s: %v, unbound %t, %v; want %s", name, got, unbound, err, c.cores)
		}
	}
}

// The spawner opens files for an executor that has given up root, by the names that it was given: both must use the same names.
func TestPathsAreAbsolute(t *testing.T) {
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for given, want := range map[string]string{"nd": dir + "/nd", "nd/": dir + "/nd", "/a//b": "/a/b", "/a/../b/": "/b"} {
		e, _, err := load([]string{"--identity-dir", given, "--audit-file", given, "--state-dir", given, "--manager", "unix:" + given}, nil)
		if err != nil || e.IdentityDir != want || e.AuditFile != want || e.StateDir != want || e.Manager != "unix:"+want {
			t.Errorf("%q: %q, %q, %q, %q, %v; want %q", given, e.IdentityDir, e.AuditFile, e.StateDir, e.Manager, err, want)
		}
	}
	e, _, err := load([]string{"--manager", "127.0.0.1:7464"}, nil)
	if err != nil || e.Manager != "127.0.0.1:7464" || e.IdentityDir != "" || e.AuditFile != "" {
		t.Errorf("manager %q, identity %q, audit %q, %v", e.Manager, e.IdentityDir, e.AuditFile, err)
	}
}

// A setting that this machine cannot meet is found by --check-config, which names the value and the limit.
func TestCheckConfigLooksAtTheMachine(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string // of the error, "": none
	}{
		"all cores":     {nil, ""},
		"too many":      {[]string{"--cores", "1000"}, "cores: 1000 wanted, but this process may use only "},
		"no such CPU":   {[]string{"--cores", "1023-1023"}, "cores: CPU 1023 is not among"},
		"little memory": {[]string{"--memory", "1MiB"}, ""},
		"too much":      {[]string{"--memory", "8000000GiB"}, "memory: 8000000GiB is more than the "},
		"both":          {[]string{"--memory", "8000000GiB", "--cores", "1000"}, "cores: 1000 wanted"},
	} {
		_, out, err := load(append(c.args, "--check-config"), nil)
		if c.text == "" && (!errors.Is(err, ErrDone) || !strings.Contains(out, "good")) {
			t.Errorf("%s: %v, output %q", name, err, out)
		}
		if c.text != "" && (!errors.Is(err, ErrUsage) || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%s: %v, want %q", name, err, c.text)
		}
	}
}

func TestCheckMemoryAgainstTheOuterGroup(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n", "proc/self/cgroup": "0::/job/step\n",
		"sys/fs/cgroup/job/memory.max": "1073741824\n"} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := (&Executor{Memory: 1 << 30}).CheckMemory(root); err != nil {
		t.Errorf("all that the group allows: %v", err)
	}
	err := (&Executor{Memory: 2 << 30}).CheckMemory(root)
	if want := "2GiB is more than the 1GiB that the control group " + filepath.Join(root, "sys/fs/cgroup/job") + " allows"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}
