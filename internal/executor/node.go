package executor

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/config"
)

// AllowedCPUs returns the logical CPUs that this process may run on, ascending: what the batch system, a cpuset or
// taskset left to it.
func AllowedCPUs() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	var cpus []int
	for i := range len(set) * strconv.IntSize {
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	return cpus, nil
}

// availableMemory returns how many bytes this process and its children can use now: what the kernel calls available,
// or less where a control group says so.
func availableMemory(root string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return 0, fmt.Errorf("available memory: %w", err)
	}
	var available uint64
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) < 2 || string(f[0]) != "MemAvailable:" {
			continue
		}
		kib, err := strconv.ParseUint(string(f[1]), 10, 54)
		if err != nil {
			return 0, fmt.Errorf("available memory: %q in meminfo: %w", f[1], err)
		}
		available = kib << 10
	}
	if available == 0 {
		return 0, fmt.Errorf("available memory: no MemAvailable in meminfo")
	}
	return min(available, cgroupLimit(root)), nil
}

// cgroupLimit returns the least memory limit of this process's control groups, version 2 or 1; the largest number if
// there is none.
func cgroupLimit(root string) uint64 {
	limit := ^uint64(0)
	b, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return limit
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		parts := strings.SplitN(s.Text(), ":", 3) // id:controllers:path
		if len(parts) != 3 {
			continue
		}
		mount, file := "sys/fs/cgroup", "memory.max"
		if parts[1] != "" {
			if !slices.Contains(strings.Split(parts[1], ","), "memory") {
				continue
			}
			mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		}
		// A parent's limit counts too.
		for dir := filepath.Join("/", parts[2]); ; dir = filepath.Dir(dir) {
			text, err := os.ReadFile(filepath.Join(root, mount, dir, file))
			if n, perr := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil && perr == nil {
				limit = min(limit, n)
			}
			if dir == "/" {
				break
			}
		}
	}
	return limit
}

// chooseProviders returns what this node offers: what was asked for, or what there is.
func chooseProviders(asked []string, verbsDevices int) ([]string, error) {
	if slices.Contains(asked, "verbs") && verbsDevices == 0 {
		return nil, fmt.Errorf("providers: verbs was asked for, and this node has no verbs device")
	}
	if asked != nil {
		return asked, nil
	}
	if verbsDevices > 0 {
		return []string{"shm", "verbs"}, nil
	}
	return []string{"shm"}, nil
}

// DefaultWorkerPath returns where rfaas-worker is when it was installed or built together with the running program:
// ../libexec/rfaas-worker from its directory.
func DefaultWorkerPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("where is rfaas-worker: %w", err)
	}
	if real, err := filepath.EvalSymlinks(self); err == nil {
		self = real
	}
	return filepath.Join(filepath.Dir(self), "..", "libexec", "rfaas-worker"), nil
}

// workerPath returns the path of a worker program that can be started.
func workerPath(s *config.Executor) (string, error) {
	path := s.Worker
	if path == "" {
		var err error
		if path, err = DefaultWorkerPath(); err != nil {
			return "", err
		}
	}
	if err := unix.Access(path, unix.X_OK); err != nil {
		return "", fmt.Errorf("worker program %s: %w (--worker says where it is)", path, err)
	}
	return path, nil
}
