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

// Hold is what a job has of this node.
type Hold struct {
	Job    int64
	CPUs   []int  // Slurm's own numbers, from 0: by socket, core, thread, whatever the kernel calls them
	Memory uint64 // bytes
	Doubt  error  // why this may be more than the job has; nil: it is exact
}

// Usage is what Slurm says about a node.
type Usage struct {
	CPUs   int
	Memory uint64 // bytes
	Usable bool   // not down, drained or reserved
	Holds  []Hold
}

// Usage asks what jobs have of a node. Jobs that are being cleaned up count.
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
				continue // gone meanwhile
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

// parseHold finds what a job has of a node in what scontrol says of the job: "Nodes=n[1-2] CPU_IDs=0-1 Mem=200 ...", once for
// each group of nodes on which the job has the same.
//
// The job's user writes other parts of that text, such as the job's name and comment, with any characters, line breaks among
// them. So they may contain words that look like Slurm's. Nothing in the text tells the two apart, but Slurm's own words are
// always there. Therefore a job holds everything that any such words say, and the whole node when some of them make no
// sense: whatever users write, it cannot hide what their jobs have. (squeue --json would be exact. It has a different form in
// almost every version of Slurm, needs a plugin, has no CPU numbers, and in 22.05 prints all jobs of the cluster.)
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
		h.Doubt = fmt.Errorf("scontrol says %d times what the job has of the node", found)
	}
	return h, found > 0
}

// parsePart reads "CPU_IDs=0-1" and "Mem=200".
func parsePart(cpus, memory string) (h Hold, err error) {
	mem, ok := strings.CutPrefix(memory, "Mem=")
	mib, err := strconv.ParseUint(mem, 10, 40)
	if !ok || err != nil {
		return h, fmt.Errorf("%q is no memory size", memory)
	}
	h.Memory = mib << 20
	h.CPUs, err = topology.ParseList(strings.TrimPrefix(cpus, "CPU_IDs="))
	return h, err
}

// whole is a job that holds all of the node.
func (u *Usage) whole(doubt error) Hold {
	h := Hold{Memory: u.Memory, Doubt: doubt}
	for cpu := range u.CPUs {
		h.CPUs = append(h.CPUs, cpu)
	}
	return h
}

// Offer is what an executor may lend. Without CPUs there is no executor.
type Offer struct {
	CPUs   []int  // the kernel's numbers, ascending
	Memory uint64 // bytes
}

// equal says that nothing differs.
func (o Offer) equal(p Offer) bool { return slices.Equal(o.CPUs, p.CPUs) && o.Memory == p.Memory }

// within says that o lends nothing that p does not.
func (o Offer) within(p Offer) bool {
	for _, c := range o.CPUs {
		if !slices.Contains(p.CPUs, c) {
			return false
		}
	}
	return o.Memory <= p.Memory
}

// least is the memory below which an executor makes no sense.
const least = 64 << 20

// offer is what is left of a node for an executor. order is the kernel's number for each of Slurm's (see cpuOrder); gone are
// jobs whose epilog has begun, which hold nothing any more; keepCPUs and keepMemory stay with the system. With spare false
// the node is lent as a whole or not at all.
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
		// Slurm was told another number of CPUs than there are: its numbers mean nothing here, but how many do.
		free = slices.Clone(order[len(order)-n:])
	}
	if len(free) <= keepCPUs || memory < least {
		return Offer{}
	}
	free = free[keepCPUs:]
	slices.Sort(free)
	return Offer{CPUs: free, Memory: memory}
}

// CPUOrder is the kernel's number of each CPU of this node in the order in which Slurm counts them.
func CPUOrder() ([]int, error) { return cpuOrder("/") }

// cpuOrder is the kernel's number of each CPU as Slurm counts them: socket by socket, in each core by core, in each thread by
// thread, and in the order of their first CPUs everywhere. root is where /sys is.
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
