package topology

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Core is a physical core, or what of it may be used.
type Core struct {
	CPUs []int // its logical CPUs that may be used, ascending. Other processes may use the others
	Node int   // NUMA node; 0 where the kernel tells none
}

// Affinity returns the logical CPUs that this process may run on, ascending.
func Affinity() ([]int, error) {
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

// Cores returns the physical cores to which the given CPUs belong, ascending by their first CPU. CPUs of which the kernel
// tells no siblings count as cores of their own.
func Cores(root string, cpus []int) ([]Core, error) {
	nodes, err := nodeOf(root)
	if err != nil {
		return nil, err
	}
	left := slices.Sorted(slices.Values(cpus))
	var list []Core
	for len(left) > 0 {
		siblings, err := siblings(root, left[0])
		if err != nil {
			return nil, err
		}
		c := Core{Node: nodes[left[0]]}
		c.CPUs = append(c.CPUs, left[0])
		for _, cpu := range left[1:] {
			if slices.Contains(siblings, cpu) {
				c.CPUs = append(c.CPUs, cpu)
			}
		}
		left = slices.DeleteFunc(left, func(cpu int) bool { return slices.Contains(c.CPUs, cpu) })
		list = append(list, c)
	}
	return list, nil
}

// NodeCores returns the number of physical cores of the node, whether or not this process may use them. 0: not known.
func NodeCores(root string) int {
	online, err := readList(filepath.Join(root, "sys/devices/system/cpu/online"))
	if err != nil {
		return 0
	}
	cores, err := Cores(root, online)
	if err != nil {
		return 0
	}
	return len(cores)
}

// siblings are the CPUs of the core that has cpu, itself included.
func siblings(root string, cpu int) ([]int, error) {
	dir := filepath.Join(root, "sys/devices/system/cpu", "cpu"+strconv.Itoa(cpu), "topology")
	for _, name := range []string{"core_cpus_list", "thread_siblings_list"} { // since Linux 5.3; before
		list, err := readList(filepath.Join(dir, name))
		if err == nil && !slices.Contains(list, cpu) {
			return nil, fmt.Errorf("topology: %s does not name CPU %d itself", filepath.Join(dir, name), cpu)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return list, err
		}
	}
	return []int{cpu}, nil
}

// nodeOf maps CPUs to NUMA nodes; those of which the kernel tells none are on node 0.
func nodeOf(root string) (map[int]int, error) {
	nodes := map[int]int{}
	files, err := filepath.Glob(filepath.Join(root, "sys/devices/system/node/node[0-9]*/cpulist"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		node, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(file)), "node"))
		if err != nil {
			continue
		}
		cpus, err := readList(file)
		if err != nil {
			return nil, err
		}
		for _, cpu := range cpus {
			nodes[cpu] = node
		}
	}
	return nodes, nil
}

// Near returns the NUMA nodes that have network adapters with an RDMA device: of the named one, or with "" of all,
// ascending. Empty: there is none, or the kernel does not know where it is.
func Near(root, device string) []int {
	files, err := filepath.Glob(filepath.Join(root, "sys/class/infiniband", cmp.Or(device, "*"), "device/numa_node"))
	if err != nil { // a name with brackets in it is no device
		return nil
	}
	var nodes []int
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		// -1: not known
		if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// First returns n of the cores, those on the near nodes first, ascending by their first CPU; all if there are fewer.
func First(cores []Core, n int, near []int) []Core {
	list := slices.Clone(cores)
	rank := func(c Core) int {
		if slices.Contains(near, c.Node) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(list, func(a, b Core) int { return cmp.Compare(rank(a), rank(b)) })
	list = list[:min(n, len(list))]
	slices.SortFunc(list, func(a, b Core) int { return cmp.Compare(a.CPUs[0], b.CPUs[0]) })
	return list
}

// CPUs are the logical CPUs of the cores, ascending.
func CPUs(cores []Core) []int {
	var cpus []int
	for _, c := range cores {
		cpus = append(cpus, c.CPUs...)
	}
	slices.Sort(cpus)
	return cpus
}

// readList reads a file like "0-3,8,10-11".
func readList(file string) ([]int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	list, err := ParseList(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("topology: %s: %w", file, err)
	}
	return list, nil
}

// maxCPU bounds CPU numbers in lists: the kernel's own limit is 8192.
const maxCPU = 1 << 16

// ParseList reads the kernel's notation of CPU sets, like "0-3,8,10-11"; "" is the empty one.
func ParseList(text string) ([]int, error) {
	var list []int
	if text == "" {
		return list, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		from, to, ranged := strings.Cut(part, "-")
		lo, err := strconv.Atoi(from)
		hi := lo
		if err == nil && ranged {
			hi, err = strconv.Atoi(to)
		}
		if err != nil || lo < 0 || hi < lo || hi > maxCPU {
			return nil, fmt.Errorf("%q in the CPU list %q is neither a CPU nor a range of CPUs", part, text)
		}
		for cpu := lo; cpu <= hi; cpu++ {
			list = append(list, cpu)
		}
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}
