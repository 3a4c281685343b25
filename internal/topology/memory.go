package topology

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// AvailableMemory returns how many bytes this process and its children can use now: what the kernel calls available,
// or less where a control group says so.
func AvailableMemory(root string) (uint64, error) {
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
		return 0, errors.New("available memory: no MemAvailable in meminfo")
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
