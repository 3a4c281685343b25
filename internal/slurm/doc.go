// Package slurm keeps executors on the idle nodes of a Slurm cluster and gets them out of the way the moment a job wants
// the node. There are two ways, and both end in the same container for the executor:
//
//   - As jobs. Follower keeps one executor job for each node of a preemptible partition, running where the node is idle and
//     waiting where it is not, and sizes its time limit to the scheduler's plan. It remembers nothing: what it needs to know
//     is in the names of its jobs, so that it may be killed and started anew, or twice. In the job runs Contain.
//   - As hooks. Agent is a daemon on each node that Slurm's prolog and epilog tell about jobs that come and go. It runs the
//     executor on what they leave.
//
// Slurm is asked through its commands with explicit output formats, which have been the same for many versions and need no
// plugin; the formats by --json have not. Names, comments and accounts of jobs come from users and may contain any character,
// also separators and line breaks: every parser here stays right whatever they contain.
package slurm
