// Package topology finds out what of a node may be lent: which physical cores with which of their logical CPUs, on which
// NUMA node they and the network adapters are, and how much memory there is. It reads /proc and /sys below a root that
// tests choose, the affinity that it is given, and what Slurm says in the environment.
//
// Several powers restrict a process to some CPUs: taskset, a control group's cpuset, a batch system that uses either. The
// kernel intersects them all in the affinity, so that alone counts. A batch system may also assign CPUs without binding
// anybody to them (Slurm with task/none): then the number that it assigned is the bound.
package topology
