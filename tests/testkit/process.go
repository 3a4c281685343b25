package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// AllStopped reports whether all threads of a process are stopped. A signal stops them one after the other.
func AllStopped(pid int) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if _, state, ok := strings.Cut(string(b), ") "); err == nil && (!ok || !strings.HasPrefix(state, "T ")) {
			return false
		}
	}
	return len(tasks) > 0
}
