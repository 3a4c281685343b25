package agent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// leastFiles is how many open files the agent must be allowed to have: its own, and those of a few clients.
const leastFiles = 64

// raised are the limits whose soft value Prepare raises to the hard one. The library has done the same with an agent that it started,
// since the Go runtime does not start within a small address space.
var raised = []int{unix.RLIMIT_CPU, unix.RLIMIT_FSIZE, unix.RLIMIT_DATA, unix.RLIMIT_AS, unix.RLIMIT_RSS, unix.RLIMIT_NPROC, unix.RLIMIT_NOFILE,
	unix.RLIMIT_MEMLOCK}

// Prepare makes this process independent of the one that started it: soft limits, umask, score of the out-of-memory killer. The
// library has reset what belongs to a thread (client/c/agent_prepare.c). It returns warnings for the log, and an error if the agent
// cannot serve.
func Prepare() (warnings []string, err error) {
	for _, r := range raised {
		var l unix.Rlimit
		if unix.Getrlimit(r, &l) == nil && l.Cur != l.Max {
			l.Cur = l.Max
			_ = unix.Setrlimit(r, &l)
		}
	}
	unix.Umask(0o077)
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0) // fails if an administrator has set a higher one
	return fitness(func(resource int) (l unix.Rlimit, err error) {
		err = unix.Getrlimit(resource, &l)
		return l, err
	})
}

// fitness judges hard limits.
func fitness(limit func(resource int) (unix.Rlimit, error)) (warnings []string, err error) {
	if l, err := limit(unix.RLIMIT_NOFILE); err == nil && l.Max < leastFiles {
		return nil, fmt.Errorf("this process may have %d open files, want at least %d: raise the limit (ulimit -n)", l.Max, leastFiles)
	}
	if l, err := limit(unix.RLIMIT_CPU); err == nil && l.Max != unix.RLIM_INFINITY {
		warnings = append(warnings, fmt.Sprintf("the kernel ends this agent after %d s of processor time (ulimit -t), and a client then starts another one", l.Max))
	}
	return warnings, nil
}
