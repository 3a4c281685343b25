// Package slurm holds tests of executors on a real Slurm, of which scripts/slurm/testcluster makes one. They need root and
// Slurm's programs, and run only when asked for: make test-slurm; with executors on other nodes that are reached by verbs,
// make test-softroce-slurm.
package slurm
