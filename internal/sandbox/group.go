package sandbox

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Group controls the control group of one worker through open control files. Its methods only read and write these
// files, so an unprivileged process can use a Group whose files another process has opened and passed to it. A nil
// Group has no controllers. Methods are safe for concurrent use, except that Freeze and Thaw of one Group must not run
// at the same time.
type Group struct {
	files [controls]*os.File // nil: the group has no such file
	v1    uint32             // bit i: files[i] has the format of version 1

	limit atomic.Uint64 // set by Limit; 0: none
}

// Control files of a Group.
const (
	freezeFile = iota // cgroup.freeze, freezer.state
	eventsFile        // cgroup.events
	timeFile          // cpu.stat, cpuacct.usage
	killsFile         // memory.events, memory.oom_control
	peakFile          // memory.max_usage_in_bytes; version 2 needs none
	memoryFile        // memory.max, memory.limit_in_bytes
	swapFile          // memory.memsw.limit_in_bytes
	cpusFile          // cpuset.cpus
	quotaFile         // cpu.max, cpu.cfs_quota_us
	controls
)

// ErrNoFreezer means that the group has no freezer.
var ErrNoFreezer = errors.New("control groups have no freezer")

// Files returns the open files of the group and a number that describes them for NewGroup. The group still owns the
// files.
func (g *Group) Files() (layout uint32, files []*os.File) {
	for i, f := range g.files {
		if f != nil {
			layout |= 1 << i
			files = append(files, f)
		}
	}
	return layout | g.v1<<16, files
}

// NewGroup returns a Group for the result of Files. limit is its memory limit in bytes (0: none). NewGroup takes over
// the files, even if it fails.
func NewGroup(layout uint32, files []*os.File, limit uint64) (*Group, error) {
	g := &Group{v1: layout >> 16}
	g.limit.Store(limit)
	present := layout & 0xffff
	if (present|g.v1)>>controls != 0 || g.v1&^present != 0 || bits.OnesCount32(present) != len(files) {
		for _, f := range files {
			f.Close()
		}
		return nil, fmt.Errorf("control group: %d files do not match layout %#x", len(files), layout)
	}
	for i := range g.files {
		if present&(1<<i) != 0 {
			g.files[i], files = files[0], files[1:]
		}
	}
	return g, nil
}

// Close closes the files. The group itself remains.
func (g *Group) Close() {
	if g == nil {
		return
	}
	for _, f := range g.files {
		if f != nil {
			f.Close()
		}
	}
}

func (g *Group) has(i int) bool { return g != nil && g.files[i] != nil }
func (g *Group) old(i int) bool { return g.v1&(1<<i) != 0 }

// CanFreeze reports whether the group has a freezer.
func (g *Group) CanFreeze() bool { return g.has(freezeFile) }

// Freezer returns a descriptor of the file that freezes and thaws the group, which the caller closes. old: it is freezer.state of version 1, not
// cgroup.freeze.
func (g *Group) Freezer() (fd int, old bool, err error) {
	if !g.CanFreeze() {
		return -1, false, ErrNoFreezer
	}
	err = g.control(freezeFile, func(open int) (err error) {
		fd, err = unix.FcntlInt(uintptr(open), unix.F_DUPFD_CLOEXEC, 3)
		return err
	})
	return fd, g.old(freezeFile), err
}

// put writes a control file.
func (g *Group) put(i int, text string) error {
	if _, err := g.files[i].WriteAt([]byte(text), 0); err != nil {
		return fmt.Errorf("control group: write %q: %w", text, err)
	}
	return nil
}

// get reads a control file.
func (g *Group) get(i int) (string, error) {
	buf := make([]byte, 1024) // the longest, cpu.stat, has about 400 bytes
	var n int
	// ReadAt would read a second time to find the end.
	err := g.control(i, func(fd int) (err error) {
		n, err = unix.Pread(fd, buf, 0)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("control group: read %s: %w", g.files[i].Name(), err)
	}
	return string(buf[:n]), nil
}

// control calls fn with the descriptor of a control file, which stays open during the call.
func (g *Group) control(i int, fn func(fd int) error) error {
	c, err := g.files[i].SyscallConn()
	if err != nil {
		return err
	}
	if cerr := c.Control(func(fd uintptr) { err = fn(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// field returns a number of a file with lines of the form "name number".
func field(text, name string) (n uint64, ok bool) {
	for line := range strings.Lines(text) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// freezeLooks is how often Freeze checks the state before it sleeps, because the shortest sleep is longer than the freezing of one sleeping
// process. With it, the release of a cached lease takes 0.9 of its time with sleeps alone.
const freezeLooks = 30

// Freeze stops all processes of the group, whatever signals they get. It blocks until the kernel reports that all of
// them have stopped. If ctx ends first, it thaws the group and returns an error. The error is ErrNoFreezer if there is
// no freezer.
func (g *Group) Freeze(ctx context.Context) error {
	if !g.CanFreeze() {
		return ErrNoFreezer
	}
	word := "1"
	if g.old(freezeFile) {
		word = "FROZEN"
	}
	err := g.put(freezeFile, word)
	for look, wait := 0, 20*time.Microsecond; err == nil; look++ {
		var done bool
		if done, err = g.frozen(); done || err != nil {
			break
		}
		if look < freezeLooks {
			continue
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("control group did not freeze: %w", context.Cause(ctx))
			break
		}
		g.awaitEvent(&wait)
	}
	if err != nil {
		return errors.Join(err, g.Thaw())
	}
	return nil
}

// frozen reports whether all processes of the group have stopped.
func (g *Group) frozen() (bool, error) {
	if g.old(freezeFile) {
		state, err := g.get(freezeFile)
		return strings.TrimSpace(state) == "FROZEN", err
	}
	events, err := g.get(eventsFile)
	n, _ := field(events, "frozen")
	return n == 1, err
}

// awaitEvent waits for a change of cgroup.events since it was last read, at most for *wait, which it doubles up to 1 ms. It has a limit
// because the kernel delays the second of two changes by 10 ms. In version 1, which has no such event, it only sleeps.
func (g *Group) awaitEvent(wait *time.Duration) {
	limit := unix.NsecToTimespec(int64(*wait))
	*wait = min(2**wait, time.Millisecond)
	if g.old(freezeFile) {
		_ = unix.Nanosleep(&limit, nil)
		return
	}
	_ = g.control(eventsFile, func(fd int) error {
		_, err := unix.Ppoll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, &limit, nil)
		return err
	})
}

// Thaw lets the processes of a frozen group run again.
func (g *Group) Thaw() error {
	switch {
	case !g.CanFreeze():
		return ErrNoFreezer
	case g.old(freezeFile):
		return g.put(freezeFile, "THAWED")
	}
	return g.put(freezeFile, "0")
}

// LetDie lets frozen processes of the group end after they were sent SIGKILL. Version 1 delivers no signal to a frozen
// process. Version 2 delivers SIGKILL, and the group stays frozen.
func (g *Group) LetDie() {
	if g.CanFreeze() && g.old(freezeFile) {
		_ = g.Thaw() // fails if the group was removed, which then had no processes
	}
}

// Limit sets the memory limit in bytes, without swap; 0: no limit. Without the controller it does nothing.
func (g *Group) Limit(memory uint64) error {
	if !g.has(memoryFile) || g.limit.Load() == memory {
		return nil
	}
	text := strconv.FormatUint(memory, 10)
	switch {
	case memory == 0 && g.old(memoryFile):
		text = "-1"
	case memory == 0:
		text = "max"
	}
	err := g.put(memoryFile, text)
	if g.has(swapFile) {
		// In version 1 this file limits memory and swap together, and must never be below the memory limit.
		larger := errors.Is(err, unix.EINVAL)
		if err == nil || larger {
			err = g.put(swapFile, text)
		}
		if larger && err == nil {
			err = g.put(memoryFile, text)
		}
	}
	if err == nil {
		g.limit.Store(memory)
	}
	return err
}

// quotaPeriod is the period of a CPU quota in microseconds, the kernel's default.
const quotaPeriod = 100_000

// Pin binds the processes of the group to CPUs and limits their CPU time to that of as many CPUs. Without CPUs it
// changes nothing. Without the controllers it does nothing.
func (g *Group) Pin(cpus []int) error {
	if g == nil || len(cpus) == 0 {
		return nil
	}
	quota := len(cpus) * quotaPeriod
	if g.has(cpusFile) {
		if err := g.put(cpusFile, cpuList(cpus)); err != nil {
			return err
		}
		// With a cpuset the CPUs are the limit. A quota of exactly as much would throttle a spinning worker whenever
		// the kernel's timer is late.
		quota += quota / 8
	}
	if !g.has(quotaFile) {
		return nil
	}
	text := strconv.Itoa(quota)
	if !g.old(quotaFile) {
		text += " " + strconv.Itoa(quotaPeriod)
	}
	// Version 1 refuses a quota above the parent's. The parent's quota applies then.
	if err := g.put(quotaFile, text); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}

// HoldsCPUs reports whether processes cannot leave the CPUs that Pin sets.
func (g *Group) HoldsCPUs() bool { return g.has(cpusFile) }

// cpuList returns CPUs in the kernel's format.
func cpuList(cpus []int) string {
	var b strings.Builder
	for i, c := range cpus {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(c))
	}
	return b.String()
}

// CPUTime returns how much CPU time all processes that have ever been in the group have used; false: unknown.
func (g *Group) CPUTime() (time.Duration, bool) {
	if !g.has(timeFile) {
		return 0, false
	}
	text, err := g.get(timeFile)
	if err != nil {
		return 0, false
	}
	if g.old(timeFile) {
		ns, err := strconv.ParseUint(strings.TrimSpace(text), 10, 63)
		return time.Duration(ns), err == nil
	}
	us, ok := field(text, "usage_usec")
	return time.Duration(us) * time.Microsecond, ok
}

// Killed returns how many processes of the group the kernel has killed because memory ran out. full means that the
// group had reached its own limit. Otherwise an outer control group, or the node, had no memory left.
func (g *Group) Killed() (n int, full bool) {
	if !g.has(killsFile) {
		return 0, false
	}
	text, _ := g.get(killsFile)
	kills, _ := field(text, "oom_kill")
	if !g.old(killsFile) {
		failures, _ := field(text, "oom")
		return int(kills), failures > 0
	}
	// Version 1 does not count how often the limit was reached. The kernel charges memory in batches, so a group is
	// full slightly below its limit.
	const batch = 1 << 20
	return int(kills), g.has(memoryFile) && g.has(peakFile) && g.number(peakFile)+batch >= g.number(memoryFile)
}

// number reads a control file that holds one number; 0 if that fails.
func (g *Group) number(i int) uint64 {
	text, _ := g.get(i)
	n, _ := strconv.ParseUint(strings.TrimSpace(text), 10, 64)
	return n
}
