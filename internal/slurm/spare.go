package slurm

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/rfaas-go/rfaas/internal/topology"
)

// Hold has the resources of a job on this node.
type Hold struct {
	Job    int64
	CPUs   []int  // in Slurm's numbering, from 0: by socket, core and thread, independent of the kernel's
	Memory uint64 // bytes
	Doubt  error  // why the job may have less than this; nil: this is exact
}

// Usage is Slurm's state of a node.
type Usage struct {
	CPUs   int
	Memory uint64 // bytes
	Usable bool   // not down, drained or reserved
	Holds  []Hold
}

// Usage asks Slurm for the resources of a node and of its jobs. Jobs that are being cleaned up count.
func (c *Commands) Usage(ctx context.Context, node string) (Usage, error) {
	var u Usage
	out, err := c.run(ctx, "sinfo", "--noheader", "--Node", "--nodes="+node, "--Format="+nodesFormat)
	if err != nil {
		return u, err
	}
	nodes, err := parseNodes(out)
	if err != nil {
		return u, err
	}
	if len(nodes) == 0 {
		return u, fmt.Errorf("sinfo: Slurm has no node %s", node)
	}
	u.CPUs, u.Memory, u.Usable = nodes[0].CPUs, nodes[0].Memory, nodes[0].State.usable()
	if out, err = c.run(ctx, "squeue", "--noheader", "--nodelist="+node, "--format=%A"); err != nil {
		return u, err
	}
	for _, id := range strings.Fields(out) {
		job, err := strconv.ParseInt(id, 10, 64)
		if err != nil {
			return u, fmt.Errorf("squeue: job number %q: %w", id, err)
		}
		out, err := c.run(ctx, "scontrol", "--details", "--oneliner", "show", "job", id)
		if err != nil {
			if strings.Contains(err.Error(), "Invalid job id") {
				continue // the job has ended in the meantime
			}
			return u, err
		}
		if h, holds := parseHold(out, node, u); holds {
			h.Job = job
			u.Holds = append(u.Holds, h)
		}
	}
	return u, nil
}

// parseHold finds a job's resources on a node in scontrol's description of the job: "Nodes=n[1-2] CPU_IDs=0-1 Mem=200
// ...", once for each group of nodes on which the job has the same.
//
// The job's user writes other parts of that text, such as the job's name and comment, with any characters including
// line breaks. So these may contain words that look like Slurm's, and nothing in the text tells the two apart. But
// Slurm's own words are always present. Therefore a job counts with everything that any such words say, and with the
// whole node if some of them make no sense. Whatever users write, they cannot hide the resources of their jobs. (squeue
// --json would be exact. But its format differs in almost every version of Slurm, it needs a plugin, it has no CPU
// numbers, and in 22.05 it prints all jobs of the cluster.)
func parseHold(out, node string, u Usage) (Hold, bool) {
	var h Hold
	found, room := 0, maxHosts
	words := strings.Fields(out)
	for i, w := range words {
		list, ok := strings.CutPrefix(w, "Nodes=")
		if !ok || i+2 >= len(words) || !strings.HasPrefix(words[i+1], "CPU_IDs=") {
			continue
		}
		hosts, err := expandHosts(list, room)
		room -= len(hosts)
		if err == nil && !slices.Contains(hosts, node) {
			continue
		}
		var part Hold
		if err == nil {
			part, err = parsePart(words[i+1], words[i+2])
		}
		if err != nil {
			return u.whole(fmt.Errorf("%.200q: %w", strings.Join(words[i:i+3], " "), err)), true
		}
		found++
		h.CPUs = append(h.CPUs, part.CPUs...)
		h.Memory = max(h.Memory, part.Memory)
	}
	slices.Sort(h.CPUs)
	h.CPUs = slices.Compact(h.CPUs)
	if found > 1 {
		h.Doubt = fmt.Errorf("scontrol describes the job's resources on the node %d times", found)
	}
	return h, found > 0
}

// parsePart parses "CPU_IDs=0-1" and "Mem=200".
func parsePart(cpus, memory string) (h Hold, err error) {
	mem, ok := strings.CutPrefix(memory, "Mem=")
	mib, err := strconv.ParseUint(mem, 10, 40)
	if !ok || err != nil {
		return h, fmt.Errorf("%q is not a memory size", memory)
	}
	h.Memory = mib << 20
	h.CPUs, err = topology.ParseList(strings.TrimPrefix(cpus, "CPU_IDs="))
	return h, err
}

// whole returns a Hold with all of the node.
func (u *Usage) whole(doubt error) Hold {
	h := Hold{Memory: u.Memory, Doubt: doubt}
	for cpu := range u.CPUs {
		h.CPUs = append(h.CPUs, cpu)
	}
	return h
}

// Offer is what an executor may lend. If it has no CPUs, no executor runs.
type Offer struct {
	CPUs   []int  // the kernel's numbers, ascending
	Memory uint64 // bytes
}

// equal reports whether two offers are the same.
func (o Offer) equal(p Offer) bool { return slices.Equal(o.CPUs, p.CPUs) && o.Memory == p.Memory }

// within reports whether p lends everything that o lends.
func (o Offer) within(p Offer) bool {
	for _, c := range o.CPUs {
		if !slices.Contains(p.CPUs, c) {
			return false
		}
	}
	return o.Memory <= p.Memory
}

// least is the smallest memory of an executor, in bytes.
const least = 64 << 20

// offer returns what is left of a node for an executor. order maps Slurm's CPU numbers to the kernel's (see cpuOrder).
// gone are jobs whose epilog has begun; they do not count. keepCPUs and keepMemory are kept for the system. If spare is
// false, the node is lent as a whole or not at all.
func offer(u Usage, order []int, gone map[int64]bool, keepCPUs int, keepMemory uint64, spare bool) Offer {
	if !u.Usable || u.Memory <= keepMemory {
		return Offer{}
	}
	held := map[int]bool{}
	memory := u.Memory - keepMemory
	count := 0
	for _, h := range u.Holds {
		if gone[h.Job] {
			continue
		}
		if !spare || h.Memory >= memory {
			return Offer{}
		}
		memory -= h.Memory
		count += len(h.CPUs)
		for _, c := range h.CPUs {
			held[c] = true
		}
	}
	var free []int
	if u.CPUs == len(order) {
		for abstract, machine := range order {
			if !held[abstract] {
				free = append(free, machine)
			}
		}
	} else if n := min(u.CPUs, len(order)) - count; n > 0 {
		// Slurm is configured with a wrong number of CPUs: use only how many are free, not which ones.
		free = slices.Clone(order[len(order)-n:])
	}
	if len(free) <= keepCPUs || memory < least {
		return Offer{}
	}
	free = free[keepCPUs:]
	slices.Sort(free)
	return Offer{CPUs: free, Memory: memory}
}

// CPUOrder returns the kernel's number of each CPU of this node in Slurm's order.
func CPUOrder() ([]int, error) { return cpuOrder("/") }

// cpuOrder returns the kernel's number of each CPU in Slurm's order: by socket, then by core, then by thread, each in
// the order of their first CPUs. root is the directory that contains sys.
func cpuOrder(root string) ([]int, error) {
	base := filepath.Join(root, "sys/devices/system/cpu")
	text, err := os.ReadFile(filepath.Join(base, "online"))
	if err != nil {
		return nil, fmt.Errorf("CPUs of this node: %w", err)
	}
	online, err := topology.ParseList(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("CPUs of this node: %w", err)
	}
	cores, err := topology.Cores(root, online)
	if err != nil {
		return nil, err
	}
	socket := map[int]string{} // of a core's first CPU
	first := map[string]int{}  // CPU of a socket
	for _, c := range cores {
		id, err := os.ReadFile(filepath.Join(base, "cpu"+strconv.Itoa(c.CPUs[0]), "topology/physical_package_id"))
		if err != nil {
			return nil, fmt.Errorf("CPUs of this node: %w", err)
		}
		s := strings.TrimSpace(string(id))
		socket[c.CPUs[0]] = s
		if f, ok := first[s]; !ok || c.CPUs[0] < f {
			first[s] = c.CPUs[0]
		}
	}
	slices.SortFunc(cores, func(a, b topology.Core) int {
		return cmp.Or(cmp.Compare(first[socket[a.CPUs[0]]], first[socket[b.CPUs[0]]]), cmp.Compare(a.CPUs[0], b.CPUs[0]))
	})
	var order []int
	for _, c := range cores {
		order = append(order, c.CPUs...)
	}
	return order, nil
}
