package topology

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// AvailableMemory returns how many bytes this process and its children can use now: the kernel's available memory, or
// what the control groups of this process still allow if that is less. root is the directory that contains proc and
// sys.
func AvailableMemory(root string) (uint64, error) {
	available, err := meminfo(root, "MemAvailable:")
	if err != nil {
		return 0, err
	}
	for _, g := range limitedGroups(root) {
		available = min(available, g.limit-min(g.limit, g.used))
	}
	return available, nil
}

// MostMemory returns how many bytes this process and its children can use if no other process uses any: the node's
// memory, or the smallest limit of this process's control groups, with group as the directory of that group.
func MostMemory(root string) (most uint64, group string, err error) {
	if most, err = meminfo(root, "MemTotal:"); err != nil {
		return 0, "", err
	}
	for _, g := range limitedGroups(root) {
		if g.limit < most {
			most, group = g.limit, g.dir
		}
	}
	return most, group, nil
}

// meminfo returns a value of /proc/meminfo in bytes.
func meminfo(root, name string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return 0, fmt.Errorf("memory of the node: %w", err)
	}
	n, err := meminfoValue(b, name)
	if err == nil && n == 0 {
		err = fmt.Errorf("memory of the node: /proc/meminfo has no memory as %s", name)
	}
	return n, err
}

// Memory is a node's memory in bytes.
type Memory struct {
	Total     uint64
	Free      uint64 // that nothing uses, not even the page cache
	Available uint64 // that programs can get, by the kernel's estimate
}

// NodeMemory returns the memory of the node, without limits of control groups.
func NodeMemory(root string) (m Memory, err error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return m, fmt.Errorf("memory of the node: %w", err)
	}
	for name, to := range map[string]*uint64{"MemTotal:": &m.Total, "MemFree:": &m.Free, "MemAvailable:": &m.Available} {
		if *to, err = meminfoValue(b, name); err != nil {
			return m, err
		}
	}
	return m, nil
}

// meminfoValue returns a value of the text of /proc/meminfo in bytes.
func meminfoValue(b []byte, name string) (uint64, error) {
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) < 2 || string(f[0]) != name {
			continue
		}
		kib, err := strconv.ParseUint(string(f[1]), 10, 54)
		if err != nil {
			return 0, fmt.Errorf("memory of the node: /proc/meminfo has %q", line)
		}
		return kib << 10, nil
	}
	return 0, fmt.Errorf("memory of the node: /proc/meminfo has no %s", name)
}

// limitedGroup is a control group of this process, or a parent of one, with a memory limit.
type limitedGroup struct {
	dir         string
	limit, used uint64 // in bytes; used excludes the page cache, which the kernel reclaims when memory runs short
}

// limitedGroups returns the groups of version 2 and 1.
func limitedGroups(root string) (list []limitedGroup) {
	b, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // id:controllers:path
		if len(parts) != 3 {
			continue
		}
		mount, limit, usage, cache := "sys/fs/cgroup", "memory.max", "memory.current", []string{"active_file", "inactive_file"}
		if parts[1] != "" {
			if !slices.Contains(strings.Split(parts[1], ","), "memory") {
				continue
			}
			mount, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
			cache = []string{"total_active_file", "total_inactive_file"}
		}
		for dir := filepath.Join("/", parts[2]); ; dir = filepath.Dir(dir) {
			g := limitedGroup{dir: filepath.Join(root, mount, dir)}
			var ok bool
			if g.limit, ok = number(filepath.Join(g.dir, limit)); ok {
				g.used, _ = number(filepath.Join(g.dir, usage))
				g.used -= min(g.used, sum(filepath.Join(g.dir, "memory.stat"), cache))
				list = append(list, g)
			}
			if dir == "/" {
				break
			}
		}
	}
	return list
}

// number reads a file that contains one number. It returns false for "max", which means no limit.
func number(file string) (uint64, bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}

// sum adds up fields of a file with lines of the form "name number".
func sum(file string, names []string) (total uint64) {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil && slices.Contains(names, name) {
			total += n
		}
	}
	return total
}
