// Package slurm holds tests of executors on a real Slurm cluster, which scripts/slurm/testcluster starts. They need root and
// Slurm's programs, and run only on request: make test-slurm, or make test-softroce-slurm with executors on other nodes that are
// reached by verbs.
package slurm
