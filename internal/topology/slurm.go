package topology

import (
	"fmt"
	"math"
	"strconv"
)

// Slurm is what a Slurm job or step has on this node. The zero value: there is no such job, or it did not say.
type Slurm struct {
	CPUs   int    // logical; 0: not told
	Memory uint64 // bytes; 0: not told, or all of the node's
}

// ReadSlurm reads the environment of a job, usually with os.Getenv.
func ReadSlurm(getenv func(string) string) (Slurm, error) {
	var s Slurm
	if getenv("SLURM_JOB_ID") == "" {
		return s, nil
	}
	number := func(name string) (uint64, error) {
		text := getenv(name)
		if text == "" {
			return 0, nil
		}
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return 0, fmt.Errorf("topology: Slurm says %s=%s, which is not a number", name, text)
		}
		return n, nil
	}
	cpus, err := number("SLURM_CPUS_ON_NODE")
	if err != nil {
		return s, err
	}
	s.CPUs = int(cpus)
	perNode, err := number("SLURM_MEM_PER_NODE") // MiB, both
	if err != nil {
		return s, err
	}
	perCPU, err := number("SLURM_MEM_PER_CPU")
	if err != nil {
		return s, err
	}
	switch {
	case perNode > 0:
		s.Memory = perNode << 20
	case perCPU > 0 && cpus > 0 && perCPU < math.MaxUint64>>20/cpus:
		s.Memory = perCPU * cpus << 20
	}
	return s, nil
}

// Limit keeps of the cores as many as Slurm assigned CPUs, when it assigned fewer and bound the process to none of them.
// What is kept are whole cores, as far as possible; limited says that some were dropped.
func (s Slurm) Limit(cores []Core) (kept []Core, limited bool) {
	if s.CPUs == 0 || s.CPUs >= len(CPUs(cores)) {
		return cores, false
	}
	left := s.CPUs
	for _, c := range cores {
		if left == 0 {
			break
		}
		n := min(left, len(c.CPUs))
		kept = append(kept, Core{CPUs: c.CPUs[:n:n], Node: c.Node})
		left -= n
	}
	return kept, true
}
