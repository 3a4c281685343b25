// Package slurm runs executors on the idle nodes of a Slurm cluster and ends them as soon as a job wants the node. There
// are two ways to set it up:
//
//   - As jobs. Follow keeps one executor job for each node of a preemptible partition. The job runs where the node is idle
//     and waits where it is not. Its time limit fits the scheduler's plan. Follow keeps no state: everything that it needs
//     is in the names of its jobs, so it may be killed and restarted, or run twice. The job runs Contain.
//   - As hooks. Daemon is the node daemon. Slurm's prolog and epilog notify it of jobs. It runs the executor, in
//     Contain, on the rest of the node.
//
// The package runs Slurm's commands with explicit output formats. These have been the same for many versions and need no
// plugin, unlike those of --json. Names, comments and accounts of jobs come from users and may contain any character,
// including separators and line breaks. Every parser here is correct whatever they contain.
package slurm
