package fromc

// #include "fromc.h"
import "C"

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Wakes are the medians of bare wake-ups, in ns.
type Wakes struct {
	Thread int64 // from waking a thread that waits for a futex, until its answer
	Frozen int64 // from waking such a thread, which thaws and wakes a frozen process, until the answer of the process; 0: not measured
	Why    error // why Frozen was not measured
}

// MeasureWakes measures wake-ups of a thread and of a process. Both are on another CPU than the calling thread, and that CPU halts between the rounds if it
// has no other work.
func MeasureWakes(rounds int) (w Wakes, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var cpus, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		return w, os.NewSyscallError("sched_getaffinity", err)
	}
	own, other := -1, -1
	for i := range len(cpus) * 64 {
		if cpus.IsSet(i) && own < 0 {
			own = i
		} else if cpus.IsSet(i) {
			other = i
			break
		}
	}
	if other < 0 {
		return w, errors.New("wake-ups need two CPUs")
	}
	one.Set(own)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return w, os.NewSyscallError("sched_setaffinity", err)
	}
	defer unix.SchedSetaffinity(0, &cpus)
	c, err := C.fromc_chain_new(C.int(other))
	if c == nil {
		return w, fmt.Errorf("start a thread and a process: %w", err)
	}
	defer C.fromc_chain_free(c)
	if w.Thread, err = medianOf(rounds, func() (C.int64_t, error) { return C.fromc_chain_round(c, -1, 0), nil }); err != nil {
		return w, err
	}
	f, err := newFreezer(int(C.fromc_chain_process(c)))
	if err != nil {
		w.Why = err
		return w, nil
	}
	defer f.close()
	w.Frozen, err = medianOf(rounds, func() (C.int64_t, error) {
		err := f.freeze()
		return C.fromc_chain_round(c, C.int(f.file.Fd()), C.int(f.old)), err
	})
	return w, err
}

func medianOf(rounds int, round func() (C.int64_t, error)) (int64, error) {
	var all []int64
	for range rounds {
		ns, err := round()
		if err != nil {
			return 0, err
		}
		if ns < 0 {
			return 0, errors.New("a wake-up took more than a second")
		}
		all = append(all, int64(ns))
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// freezer is a control group with one process. In version 1 there is a second group, which is empty and always frozen, as on an executor's node. Without it,
// the kernel patches its own code whenever the last frozen group thaws.
type freezer struct {
	dir, above string
	held       string // the second group; "": none
	process    int
	file       *os.File // cgroup.freeze or, in version 1, freezer.state
	old        int      // 1: version 1
}

// freezerOf returns the directory of this process's control group that has a freezer. old is 1 for version 1.
func freezerOf() (dir string, old int, err error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", 0, err
	}
	mounts, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", 0, err
	}
	defer mounts.Close()
	roots := map[string]string{}
	for s := bufio.NewScanner(mounts); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) > 3 && (f[2] == "cgroup2" || f[2] == "cgroup" && slices.Contains(strings.Split(f[3], ","), "freezer")) {
			roots[f[2]] = f[1]
		}
	}
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) < 3:
		case slices.Contains(strings.Split(f[1], ","), "freezer") && roots["cgroup"] != "":
			return filepath.Join(roots["cgroup"], f[2]), 1, nil
		case f[1] == "" && roots["cgroup2"] != "":
			dir = filepath.Join(roots["cgroup2"], f[2])
		}
	}
	if dir == "" {
		err = errors.New("no control group with a freezer")
	}
	return dir, 0, err
}

func newFreezer(process int) (*freezer, error) {
	above, old, err := freezerOf()
	if err != nil {
		return nil, err
	}
	f := &freezer{dir: filepath.Join(above, "bench-rfaas-"+strconv.Itoa(os.Getpid())), above: above, process: process, old: old}
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		return nil, err
	}
	name := "cgroup.freeze"
	if old == 1 {
		name = "freezer.state"
		f.held = f.dir + "-held"
		if err = os.Mkdir(f.held, 0o755); err == nil {
			err = os.WriteFile(filepath.Join(f.held, name), []byte("FROZEN"), 0)
		}
		if err != nil {
			f.close()
			return nil, err
		}
	}
	if err = os.WriteFile(filepath.Join(f.dir, "cgroup.procs"), []byte(strconv.Itoa(process)), 0); err == nil {
		f.file, err = os.OpenFile(filepath.Join(f.dir, name), os.O_RDWR, 0)
	}
	if err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// freeze freezes the process, and waits until it is frozen.
func (f *freezer) freeze() error {
	text, file, want := "1", "cgroup.events", "frozen 1"
	if f.old == 1 {
		text, file, want = "FROZEN", "freezer.state", "FROZEN"
	}
	if _, err := f.file.WriteAt([]byte(text), 0); err != nil {
		return err
	}
	for end := time.Now().Add(time.Second); ; {
		b, err := os.ReadFile(filepath.Join(f.dir, file))
		if err != nil || strings.Contains(string(b), want) {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("process %d did not freeze within a second", f.process)
		}
	}
}

func (f *freezer) close() {
	if f.file != nil {
		text := "0"
		if f.old == 1 {
			text = "THAWED"
		}
		_, _ = f.file.WriteAt([]byte(text), 0)
		f.file.Close()
	}
	_ = os.WriteFile(filepath.Join(f.above, "cgroup.procs"), []byte(strconv.Itoa(f.process)), 0)
	_ = os.Remove(f.dir)
	if f.held != "" {
		_ = os.Remove(f.held)
	}
}
