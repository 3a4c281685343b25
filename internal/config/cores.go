package config

import (
	"fmt"
	"os"
	"slices"

	"github.com/rfaas-go/rfaas/internal/topology"
)

// Pick returns the cores to lend: all cores that this process may use and that neither the setting nor the batch system
// excludes. allowed are logical CPUs, near are preferred NUMA nodes, and root is the directory that contains sys.
// unbound means that the batch system has assigned fewer CPUs than this process may use, so the returned cores may
// belong to another job.
func (c Cores) Pick(root string, allowed, near []int, slurm topology.Slurm) (cores []topology.Core, unbound bool, err error) {
	use := allowed
	if c.List != nil {
		for _, cpu := range c.List {
			if !slices.Contains(allowed, cpu) {
				return nil, false, fmt.Errorf("cores: CPU %d is not among those that this process may use (%v)", cpu, Cores{List: allowed})
			}
		}
		use = c.List
	}
	if cores, err = topology.Cores(root, use); err != nil {
		return nil, false, err
	}
	if c.List == nil { // a list of CPUs takes precedence over what Slurm assigns
		cores, unbound = slurm.Limit(cores)
	}
	if c.Count > len(cores) {
		return nil, unbound, fmt.Errorf("cores: %d wanted, but this process may use only %d (CPUs %v)", c.Count, len(cores), Cores{List: topology.CPUs(cores)})
	}
	if c.Count > 0 {
		cores = topology.First(cores, c.Count, near)
	}
	return cores, unbound, nil
}

// CheckMemory returns an error for a memory setting that this process cannot have. root is the directory that contains
// proc and sys.
func (c *Executor) CheckMemory(root string) error {
	if c.Memory == 0 {
		return nil
	}
	most, group, err := topology.MostMemory(root)
	switch {
	case err != nil || uint64(c.Memory) <= most:
		return err
	case group != "":
		return fmt.Errorf("memory: %v is more than the %v that the control group %s allows this process: raise its limit (MemoryMax= in a unit, "+
			"--mem of a job) or lend less", c.Memory, Bytes(most), group)
	}
	return fmt.Errorf("memory: %v is more than the %v that this node has", c.Memory, Bytes(most))
}

// here checks the settings against this machine. It changes nothing.
func (c *Executor) here() error {
	var v validator
	v.add(here(c.providersParsed, c.DataListen, place{"identity-dir", c.IdentityDir, opensIdentity}, place{"state-dir", c.StateDir, canMake},
		place{"audit-file", c.AuditFile, canAppend}, place{"address-file", c.AddressFile, canReplace}, place{"secret-file", c.SecretFile, canHaveSecret},
		place{"worker", c.Worker, isProgram}, place{"bundle-dir", c.BundleDir, writable}))
	allowed, err := topology.Affinity()
	v.add(err)
	slurm, err := topology.ReadSlurm(os.Getenv)
	v.add(err)
	if allowed != nil && err == nil {
		_, _, err = c.Cores.Pick("/", allowed, nil, slurm)
		v.add(err)
	}
	v.add(c.CheckMemory("/"))
	return v.err()
}
