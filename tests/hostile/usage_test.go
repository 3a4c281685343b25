package hostile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ---- resources of a daemon ----

// family returns the daemon's processes: the one that was started and its descendants, without workers and their zygote.
func (d *daemon) family() (pids []int) {
	next := []int{d.cmd.Process.Pid}
	for len(next) > 0 {
		pid := next[0]
		next = next[1:]
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || strings.HasPrefix(filepath.Base(exe), "rfaas-worker") {
			continue
		}
		pids = append(pids, pid)
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, f := range files {
			b, _ := os.ReadFile(f)
			for _, w := range strings.Fields(string(b)) {
				child, _ := strconv.Atoi(w)
				next = append(next, child)
			}
		}
	}
	return pids
}

// status sums a field of /proc/PID/status over the daemon's processes.
func (d *daemon) status(field string) (sum int) {
	for _, pid := range d.family() {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if _, rest, ok := bytes.Cut(b, []byte("\n"+field+":")); ok {
			n, _ := strconv.Atoi(strings.Fields(string(rest))[0])
			sum += n
		}
	}
	return sum
}

func (d *daemon) threads() int { return d.status("Threads") }

// descriptors counts the open descriptors of the daemon's processes.
func (d *daemon) descriptors() (n int) {
	for _, pid := range d.family() {
		names, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		n += len(names)
	}
	return n
}

// peak resets the daemon's peak of resident memory. The returned function returns by how many MiB the daemon, including
// its memfds, has grown at most since then.
func (d *daemon) peak() func() int {
	for _, pid := range d.family() {
		os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
	}
	had, files := d.status("VmRSS"), d.inFiles()
	return func() int { return (d.status("VmHWM") - had + d.inFiles() - files) >> 10 }
}

// inFiles returns the KiB in the daemon's memfds, which resident memory does not count.
func (d *daemon) inFiles() (sum int) {
	for _, pid := range d.family() {
		names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, n := range names {
			var st unix.Stat_t
			if to, _ := os.Readlink(n); strings.HasPrefix(to, "/memfd:") && unix.Stat(n, &st) == nil {
				sum += int(st.Blocks / 2)
			}
		}
	}
	return sum
}

// processorTime returns the user and system time of a process.
func processorTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 13 {
		return 0, errors.New("a short stat")
	}
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	const tick = 10 * time.Millisecond // USER_HZ is 100 for all programs
	return time.Duration(user+system) * tick, nil
}

// processorTime sums the time of the daemon's processes.
func (d *daemon) processorTime() (sum time.Duration) {
	for _, pid := range d.family() {
		t, _ := processorTime(pid)
		sum += t
	}
	return sum
}

// spin keeps one thread busy for d and returns its processor time.
func spin(d time.Duration) time.Duration {
	used := make(chan time.Duration)
	go func() {
		now := func() time.Duration {
			var ts unix.Timespec
			unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
			return time.Duration(ts.Nano())
		}
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		began := now()
		for end := time.Now().Add(d); time.Now().Before(end); {
		}
		used <- now() - began
	}()
	return <-used
}
