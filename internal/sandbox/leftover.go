package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// groupPrefix returns the prefix of the names of this executor's groups: "rfaas-NAMESPACE.PID-START-". The process id alone
// is not enough: an executor in its own process namespace has a small id that another process of the node has too. The kernel reuses the numbers of
// namespaces and processes, so the name also has the time at which the process started, in ticks since the boot. Executors of earlier
// versions read only the part before the first "-" after "rfaas-".
func groupPrefix() string {
	return fmt.Sprintf("rfaas-%s.%d-%s-", nameSpace("/proc", "self"), os.Getpid(), readStat("/proc/self").start)
}

// maker identifies the executor that made a group, as the name of the group does.
type maker struct{ space, pid, start string } // empty: not in the name, which an earlier version has made

func makerOf(group string) maker {
	parts := strings.SplitN(strings.TrimPrefix(filepath.Base(group), "rfaas-"), "-", 3)
	space, pid, found := strings.Cut(parts[0], ".")
	if !found {
		return maker{pid: parts[0]}
	}
	m := maker{space: space, pid: pid}
	if len(parts) == 3 {
		m.start = parts[1]
	}
	return m
}

// nameSpace returns the number of a process's process namespace; empty: unknown.
func nameSpace(proc, pid string) string {
	link, _ := os.Readlink(filepath.Join(proc, pid, "ns/pid"))
	return strings.TrimSuffix(strings.TrimPrefix(link, "pid:["), "]")
}

// executors knows which executors are alive, by the names of their groups.
type executors struct {
	proc   string
	own    string              // this process's namespace
	ours   bool                // proc shows the process ids of this process's namespace
	others map[string][]string // by namespace: when its processes started
}

// findExecutors reads the namespaces of all processes.
func findExecutors(proc string) executors {
	self, _ := os.Readlink(filepath.Join(proc, "self"))
	e := executors{proc: proc, own: nameSpace(proc, "self"), ours: self == strconv.Itoa(os.Getpid()), others: map[string][]string{}}
	processes, _ := filepath.Glob(filepath.Join(proc, "[0-9]*"))
	for _, p := range processes {
		space := nameSpace(proc, filepath.Base(p))
		e.others[space] = append(e.others[space], readStat(p).start)
	}
	return e
}

// alive reports whether the executor that made a group may be alive.
func (e executors) alive(group string) bool {
	m := makerOf(group)
	if m.space == "" || m.space == e.own && e.ours {
		s := readStat(filepath.Join(e.proc, m.pid))
		return s.running && (m.start == "" || s.start == "" || s.start == m.start)
	}
	started := e.others[m.space]
	return len(started) > 0 && (m.start == "" || slices.Contains(started, m.start) || slices.Contains(started, ""))
}

// stat is the state of a process.
type stat struct {
	running bool   // it may be running
	start   string // when it started, in ticks since the boot; empty: unknown
}

// readStat reads the state of the process with this directory. A zombie does not run: in a container whose first process does not reap
// the orphans, zombies stay.
func readStat(dir string) stat {
	text, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return stat{running: !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH)}
	}
	f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // from the third field on
	s := stat{running: len(f) == 0 || f[0] != "Z" && f[0] != "X"}
	if len(f) >= 20 {
		s.start = f[19]
	}
	return s
}

// hiddenAge is how long a group is kept whose executor cannot be seen.
const hiddenAge = time.Minute

// hidden reports whether a group may belong to an executor that this process cannot see: one in a parallel namespace,
// which has just made the group and is about to use it. Groups with processes cannot be removed anyway.
func (e executors) hidden(group string) bool {
	if makerOf(group).space == e.own && e.ours {
		return false
	}
	st, err := os.Stat(group)
	return err == nil && time.Since(st.ModTime()) < hiddenAge
}

// RemoveLeftovers removes the groups below this process's own groups whose executor was killed before it could remove
// them. Groups that still have processes stay. It is for programs that run executors in process namespaces below their
// own.
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

// removeDead removes the groups of dead executors beside those of this one.
func (g *Groups) removeDead() {
	var dirs []string
	for _, t := range g.trees {
		dirs = append(dirs, t.dir)
	}
	removeDead(dirs, "/proc", false)
}

// removeDead removes the groups of dead executors in directories. seesAll means that all executors that share these
// directories are in this process's namespace or below it.
func removeDead(dirs []string, proc string, seesAll bool) {
	var groups []string
	for _, dir := range dirs {
		found, _ := filepath.Glob(filepath.Join(dir, "rfaas-*-*"))
		groups = append(groups, found...)
	}
	if len(groups) == 0 {
		return
	}
	// After listing the groups, so that an executor that starts now is seen.
	executors := findExecutors(proc)
	for _, group := range groups {
		if !executors.alive(group) && (seesAll || !executors.hidden(group)) {
			letOrphansDie(group)
			_ = os.Remove(group) // fails for groups with processes
		}
	}
}
