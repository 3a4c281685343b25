package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// idle has the resources of an executor or manager without clients.
type idle struct{ files, mappings int }

func (d *daemon) idle() idle { return idle{openFiles(d.pid()), len(sharedMappings(d.pid()))} }

// settled waits until an executor holds nothing for any client: one zygote, no worker, all cores and memory free, no more
// descriptors and mappings than before.
func (w *world) settled(executors []*daemon, before []idle, within time.Duration) {
	w.Helper()
	for i, d := range executors {
		what := ""
		took := w.eventually(within, d.name+" holds nothing any more", func() bool {
			zygotes, workers := living(d.pid())
			now := d.idle()
			what = fmt.Sprintf("%d zygotes, workers %v, %d open files (%d at the start), %d mappings (%d)", len(zygotes),
				workers, now.files, before[i].files, now.mappings, before[i].mappings)
			if len(zygotes) == 1 && len(workers) == 0 && now.files <= before[i].files && now.mappings <= before[i].mappings {
				return true
			}
			w.lastly = d.name + ": " + what + "; " + held(d.pid())
			return false
		})
		w.Logf("%s after %v: %s", d.name, took.Round(time.Millisecond), what)
	}
	w.eventually(within, "every core and byte is free", func() bool {
		list, err := w.executors()
		if err != nil {
			w.lastly = err.Error()
			return false
		}
		alive := 0
		for _, e := range list {
			if e.State == "silent" {
				continue // registered by an earlier process of one of the executors
			}
			alive++
			if e.FreeCores != e.Cores || e.FreeMemoryBytes != e.MemoryBytes {
				w.lastly = fmt.Sprintf("%+v", e)
				return false
			}
		}
		return alive == len(executors)
	})
}

// held describes what a daemon holds: its descriptors, its shared mappings, and its spawner's children.
func held(pid int) string {
	var b strings.Builder
	for _, c := range children(spawner(pid)) {
		name, state, _, _ := stat(c)
		fmt.Fprintf(&b, "%s %d %c, ", name, c, state)
	}
	return fmt.Sprintf("children %sdescriptors %q, mappings %q", &b, openNames(pid), sharedMappings(pid))
}

// strays returns the orphans among this process's children that still run. It reaps the orphans that have ended.
func strays() (list []string) {
	started.Lock()
	defer started.Unlock()
	for _, pid := range children(os.Getpid()) {
		if started.pids[pid] {
			continue
		}
		name, state, _, ok := stat(pid)
		if !ok {
			continue
		}
		if state == 'Z' {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
			continue
		}
		if name == "rfaas-agent" {
			continue // the agent of all clients, which TestMain ends
		}
		list = append(list, fmt.Sprintf("%d (%s, state %c)", pid, name, state))
	}
	return list
}

// nothingLeft checks, when all daemons and callers have ended, that no process, temporary file or file in /dev/shm is left.
func (w *world) nothingLeft(sharedBefore map[string]bool) {
	w.Helper()
	w.eventually(5*time.Second, "no process is left", func() bool {
		list := strays()
		w.lastly = strings.Join(list, ", ")
		return len(list) == 0
	})
	files, err := filepath.Glob(filepath.Join(w.dir, "tmp", "*"))
	if err != nil || len(files) > 0 {
		w.Errorf("temporary files are left: %v %v", files, err)
	}
	w.eventually(5*time.Second, "nothing is left in /dev/shm", func() bool {
		left := abandonedShared(sharedBefore)
		w.lastly = strings.Join(left, ", ")
		return len(left) == 0
	})
}

// shared returns the files in /dev/shm.
func shared() map[string]bool {
	set := map[string]bool{}
	list, _ := os.ReadDir("/dev/shm")
	for _, e := range list {
		set[e.Name()] = true
	}
	return set
}

// abandonedShared returns new files in /dev/shm that no process has mapped or open. Other programs may have files there.
func abandonedShared(before map[string]bool) (left []string) {
	for name := range shared() {
		if !before[name] && !inUse("/dev/shm/"+name) {
			left = append(left, name)
		}
	}
	return left
}

func inUse(path string) bool {
	maps, _ := filepath.Glob("/proc/[0-9]*/maps")
	for _, m := range maps {
		if b, err := os.ReadFile(m); err == nil && strings.Contains(string(b), path+"\n") {
			return true
		}
		fds, _ := filepath.Glob(filepath.Dir(m) + "/fd/*")
		for _, fd := range fds {
			if target, err := os.Readlink(fd); err == nil && target == path {
				return true
			}
		}
	}
	return false
}
