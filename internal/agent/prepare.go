package agent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// leastFiles is the least limit of open files with which the agent serves: enough for its own and those of a few clients.
const leastFiles = 64

// raised are the limits whose soft value Prepare raises to the hard one. For an agent that the library starts, the library has done so
// already, because the Go runtime does not start within a small address space.
var raised = []int{unix.RLIMIT_CPU, unix.RLIMIT_FSIZE, unix.RLIMIT_DATA, unix.RLIMIT_AS, unix.RLIMIT_RSS, unix.RLIMIT_NPROC, unix.RLIMIT_NOFILE,
	unix.RLIMIT_MEMLOCK}

// Prepare resets what this process inherited from the one that started it: soft limits, umask, score of the out-of-memory killer. The
// library has reset the rest (client/c/agent_prepare.c). Prepare returns warnings for the log, and an error if the agent cannot serve.
func Prepare() (warnings []string, err error) {
	for _, r := range raised {
		var l unix.Rlimit
		if unix.Getrlimit(r, &l) == nil && l.Cur != l.Max {
			l.Cur = l.Max
			_ = unix.Setrlimit(r, &l)
		}
	}
	unix.Umask(0o077)
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0) // fails if an administrator has set a higher score
	return fitness(func(resource int) (l unix.Rlimit, err error) {
		err = unix.Getrlimit(resource, &l)
		return l, err
	})
}

// fitness checks the hard limits. It returns what Prepare returns.
func fitness(limit func(resource int) (unix.Rlimit, error)) (warnings []string, err error) {
	if l, err := limit(unix.RLIMIT_NOFILE); err == nil && l.Max < leastFiles {
		return nil, fmt.Errorf("the hard limit of open files is %d, want at least %d: raise it (ulimit -n)", l.Max, leastFiles)
	}
	if l, err := limit(unix.RLIMIT_CPU); err == nil && l.Max != unix.RLIM_INFINITY {
		warnings = append(warnings, fmt.Sprintf("the kernel ends this agent after %d s of processor time (ulimit -t); a client then starts another agent", l.Max))
	}
	return warnings, nil
}
