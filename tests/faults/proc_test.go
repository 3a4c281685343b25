package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Reading /proc.

// stat returns name, state and parent of a process; ok is false if it does not exist.
func stat(pid int) (name string, state byte, parent int, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, 0, false
	}
	s := string(b)
	open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if n, err := fmt.Sscanf(s[end+1:], " %c %d", &state, &parent); n != 2 || err != nil {
		return "", 0, 0, false
	}
	return s[open+1 : end], state, parent, true
}

// children returns the child processes of a process, zombies included.
func children(pid int) (list []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, task := range tasks {
		b, _ := os.ReadFile(task) // a thread may have ended
		for _, f := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}

// living returns the processes of an executor's spawner that are not zombies, by kind.
func living(executor int) (zygotes, workers []int) {
	for _, c := range children(spawner(executor)) {
		switch name, state, _, ok := stat(c); {
		case !ok || state == 'Z' || state == 'X':
		case name == "rfaas-guard": // belongs to a worker's sandbox
		case name == "rfaas-zygote":
			zygotes = append(zygotes, c)
		default:
			workers = append(workers, c)
		}
	}
	return zygotes, workers
}

// scheduling describes the processor time of the executors' workers: the state of each, the time that it has run and has waited for a
// processor (schedstat, ns), and the counters of its control group's quota.
func scheduling(executors []*daemon) string {
	var b strings.Builder
	for _, d := range executors {
		_, workers := living(d.pid())
		for _, pid := range workers {
			name, state, _, _ := stat(pid)
			times, _ := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
			fmt.Fprintf(&b, "%s %s %d %c %s", d.name, name, pid, state, times)
			groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			for line := range strings.Lines(string(groups)) {
				if _, path, ok := strings.Cut(strings.TrimSpace(line), ":cpu:"); ok {
					quota, _ := os.ReadFile("/sys/fs/cgroup/cpu" + path + "/cpu.stat")
					fmt.Fprintf(&b, "  %s: %s\n", path, strings.ReplaceAll(string(quota), "\n", " "))
				}
			}
		}
	}
	return b.String()
}

// runnable lists the threads of all processes of this machine that run or are ready to run. For each it gives the processor, the time that
// it has run, and the time that it has waited for a processor (schedstat, ns).
func runnable() string {
	var b strings.Builder
	tasks, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, task := range tasks {
		line, _ := os.ReadFile(task + "/stat")
		_, rest, _ := strings.Cut(string(line), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 37 || fields[0] != "R" {
			continue
		}
		command, _ := os.ReadFile(task + "/comm")
		times, _ := os.ReadFile(task + "/schedstat")
		fmt.Fprintf(&b, "%s %s session %s cpu %s: %s", strings.TrimPrefix(task, "/proc/"), strings.TrimSpace(string(command)), fields[3], fields[36], times)
	}
	return b.String()
}

// spawner returns the process id of an executor's spawner, -1 if there is none.
func spawner(executor int) int {
	for _, c := range children(executor) {
		if name, _, _, _ := stat(c); name == "rfaas-spawner" {
			return c
		}
	}
	return -1
}

// openFiles is how many descriptors a process has open; -1 if it does not exist.
func openFiles(pid int) int {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return -1
	}
	if pid == os.Getpid() {
		return len(list) - 1 // without the one of the directory itself
	}
	return len(list)
}

// openNames returns what each descriptor of a process refers to.
func openNames(pid int) (names []string) {
	list, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, path := range list {
		if to, err := os.Readlink(path); err == nil {
			names = append(names, filepath.Base(path)+" "+to)
		}
	}
	return names
}

// sharedMappings returns the mappings of shared or device memory of a process.
func sharedMappings(pid int) (mappings []string) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "memfd:") || strings.Contains(line, "uverbs") {
			mappings = append(mappings, strings.TrimSpace(line))
		}
	}
	return mappings
}

// handle is a process (pidfd). A signal by it never reaches another process with the same id.
type handle struct{ pid, fd int }

// hold opens a handle of a child of parent, or of its spawner. ok is false if the child is gone.
func hold(pid, parent int) (handle, bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return handle{}, false
	}
	if _, state, p, ok := stat(pid); !ok || p != parent && p != spawner(parent) || state == 'Z' {
		unix.Close(fd)
		return handle{}, false
	}
	return handle{pid, fd}, true
}

func (h handle) signal(s unix.Signal) { _ = unix.PidfdSendSignal(h.fd, s, nil, 0) }
func (h handle) close()               { unix.Close(h.fd) }

func readProc(pid int, file string) ([]byte, error) {
	return os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
}
