package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// groupPrefix begins the names of an executor's groups: "rfaas-NAMESPACE.PID-". The process id alone says nothing, since an executor
// in a process name space of its own has a small number that some process of the node has too.
func groupPrefix() string {
	return fmt.Sprintf("rfaas-%s.%d-", nameSpace("/proc", "self"), os.Getpid())
}

// nameSpace is the number of a process's name space of process ids; empty if it is not known.
func nameSpace(proc, pid string) string {
	link, _ := os.Readlink(filepath.Join(proc, pid, "ns/pid"))
	return strings.TrimSuffix(strings.TrimPrefix(link, "pid:["), "]")
}

// executors says which executors are alive, by the names of their groups.
type executors struct {
	proc   string
	own    string // our name space
	ours   bool   // proc shows the numbers of our name space
	others map[string]bool
}

// findExecutors looks at all processes.
func findExecutors(proc string) executors {
	self, _ := os.Readlink(filepath.Join(proc, "self"))
	e := executors{proc: proc, own: nameSpace(proc, "self"), ours: self == strconv.Itoa(os.Getpid()), others: map[string]bool{}}
	processes, _ := filepath.Glob(filepath.Join(proc, "[0-9]*"))
	for _, p := range processes {
		e.others[nameSpace(proc, filepath.Base(p))] = true
	}
	return e
}

// alive says whether the executor that made a group may live.
func (e executors) alive(group string) bool {
	maker, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(group), "rfaas-"), "-")
	space, pid, found := strings.Cut(maker, ".")
	if !found || space == e.own && e.ours { // without a name space: of an earlier version
		if !found {
			pid = maker
		}
		_, err := os.Stat(filepath.Join(e.proc, pid))
		return !os.IsNotExist(err)
	}
	return e.others[space]
}

// hiddenAge is how long a group stays whose executor cannot be seen.
const hiddenAge = time.Minute

// hidden says whether a group may have an executor that this process does not see: one in a name space beside this process's own, which
// has made the group a moment ago and is about to use it. Groups with processes cannot be removed anyway.
func (e executors) hidden(group string) bool {
	maker, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(group), "rfaas-"), "-")
	if space, _, found := strings.Cut(maker, "."); found && space == e.own && e.ours {
		return false
	}
	st, err := os.Stat(group)
	return err == nil && time.Since(st.ModTime()) < hiddenAge
}

// RemoveLeftovers removes the groups below this process's own ones whose executor was killed before it could remove them. Groups
// that still have processes stay. It is for who runs executors in process name spaces below its own.
func RemoveLeftovers() { removeLeftovers(groupRoot, "/proc") }

func removeLeftovers(root, proc string) {
	text, _ := os.ReadFile(filepath.Join(proc, "self/cgroup"))
	var dirs []string
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		if f[1] == "" {
			dirs = append(dirs, filepath.Join(root, "unified", f[2]))
		}
		for controller := range strings.SplitSeq(strings.TrimPrefix(f[1], "name="), ",") {
			dirs = append(dirs, filepath.Join(root, controller, f[2]))
		}
	}
	removeDead(dirs, proc, true)
}

// removeDead removes the groups of dead executors in directories. seesAll: all executors that share these directories are in the process's own
// process name space or below it.
func removeDead(dirs []string, proc string, seesAll bool) {
	var groups []string
	for _, dir := range dirs {
		found, _ := filepath.Glob(filepath.Join(dir, "rfaas-*-*"))
		groups = append(groups, found...)
	}
	if len(groups) == 0 {
		return
	}
	// After the groups, so that an executor that starts now is seen.
	executors := findExecutors(proc)
	for _, group := range groups {
		if !executors.alive(group) && (seesAll || !executors.hidden(group)) {
			letOrphansDie(group)
			_ = os.Remove(group) // those with processes stay
		}
	}
}
