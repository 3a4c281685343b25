package privilege

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Bare executes this program again, with other arguments, as the same user without any capability. Root without capabilities
// has only the rights of a file's owner. Bare returns only after an error.
func Bare(args []string) error {
	runtime.LockOSThread() // the set belongs to the thread that calls execve
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) { // c is above the last capability
			break
		}
		if err != nil {
			return fmt.Errorf("give up capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("give up new privileges: %w", err)
	}
	return os.NewSyscallError("execve", unix.Exec("/proc/self/exe", args, os.Environ()))
}
