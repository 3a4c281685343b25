package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Groups makes control groups for workers: of version 2, or of version 1 with its controllers for memory and processes. All are
// below the executor's own group, so that what holds for the executor holds for them together.
type Groups struct {
	version int
	memory  string // directory in which groups are made
	pids    string // the same of version 2
	leaf    string // the executor's own group of version 2, made for it
	prefix  string
	number  atomic.Uint64
}

// Group is the control group of one worker. Its owner calls Remove when no process is left in it.
type Group struct {
	dirs    []string // memory first
	version int
}

const groupRoot = "/sys/fs/cgroup"

// OpenGroups finds the groups that this process may make. The error says what is missing. With version 2 the process is moved
// into a group of its own below the one that it is in, since groups with processes cannot have children with controllers;
// Close moves it back.
func OpenGroups() (*Groups, error) { return openGroups(groupRoot, "/proc/self/cgroup", os.Getpid()) }

func openGroups(root, self string, pid int) (*Groups, error) {
	own, err := ownGroups(self)
	if err != nil {
		return nil, err
	}
	g := &Groups{prefix: groupPrefix()}
	if text, err := os.ReadFile(filepath.Join(root, own[""], "cgroup.controllers")); err == nil {
		have := strings.Fields(string(text))
		if !slices.Contains(have, "memory") || !slices.Contains(have, "pids") {
			return nil, fmt.Errorf("control group %s has the controllers %q, not memory and pids (Delegate=yes in the unit)", own[""], have)
		}
		g.version = 2
		return g, g.delegate(filepath.Join(root, own[""]), pid)
	}
	g.version = 1
	for controller, dir := range map[string]*string{"memory": &g.memory, "pids": &g.pids} {
		*dir = filepath.Join(root, controller, own[controller])
		if _, ok := own[controller]; !ok {
			return nil, fmt.Errorf("no controller %s in any version", controller)
		}
	}
	removeDead([]string{g.memory, g.pids}, "/proc")
	probe, err := g.New()
	if err != nil {
		return nil, err
	}
	return g, probe.Remove()
}

// ownGroups reads /proc/self/cgroup: the group by controller, that of version 2 by "".
func ownGroups(file string) (map[string]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	own := map[string]string{}
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			return nil, fmt.Errorf("%s has the line %q", file, line)
		}
		for controller := range strings.SplitSeq(f[1], ",") {
			own[controller] = f[2]
		}
	}
	return own, nil
}

// delegate makes room for groups with controllers below dir.
func (g *Groups) delegate(dir string, pid int) error {
	g.memory, g.pids = dir, dir
	removeDead([]string{dir}, "/proc")
	err := fs.ErrExist
	for n := 0; errors.Is(err, fs.ErrExist); n++ { // of an executor with the same process id in another name space
		leaf := filepath.Join(dir, g.prefix+"executor"+strconv.Itoa(n))
		if err = os.Mkdir(leaf, 0o755); err == nil {
			g.leaf = leaf
		}
	}
	if err == nil {
		err = write(g.leaf, "cgroup.procs", strconv.Itoa(pid))
	}
	if err == nil {
		err = write(dir, "cgroup.subtree_control", "+memory +pids")
	}
	if err != nil { // not ours, or not ours alone
		return errors.Join(fmt.Errorf("control groups cannot be made: %w", err), g.Close())
	}
	return nil
}

// Close leaves the executor's group of version 2. No group of a worker is left then. While another executor has groups beside
// it, which would lose their controllers, it stays: the next executor that starts after its end removes it.
func (g *Groups) Close() error {
	if g.leaf == "" {
		return nil
	}
	groups, err := filepath.Glob(filepath.Join(g.memory, "rfaas-*-*"))
	if others := slices.DeleteFunc(groups, func(dir string) bool { return dir == g.leaf }); err != nil || len(others) > 0 {
		return err
	}
	err = write(g.memory, "cgroup.subtree_control", "-memory -pids")
	return errors.Join(err, write(g.memory, "cgroup.procs", strconv.Itoa(os.Getpid())), os.Remove(g.leaf))
}

// New makes a group without limits.
func (g *Groups) New() (*Group, error) {
	for {
		group, err := g.try(g.prefix + strconv.FormatUint(g.number.Add(1), 10))
		// Executors in process name spaces of their own may have the same process id, and here the same group.
		if !errors.Is(err, fs.ErrExist) {
			return group, err
		}
	}
}

func (g *Groups) try(name string) (*Group, error) {
	group := &Group{version: g.version, dirs: []string{filepath.Join(g.memory, name)}}
	if g.pids != g.memory {
		group.dirs = append(group.dirs, filepath.Join(g.pids, name))
	}
	for i, dir := range group.dirs {
		if err := os.Mkdir(dir, 0o755); err != nil {
			group.dirs = group.dirs[:i]
			return nil, errors.Join(fmt.Errorf("control group: %w", err), group.Remove())
		}
	}
	return group, nil
}

// Limit sets the most bytes of memory and the most processes and threads; 0 leaves what is.
func (g *Group) Limit(memory uint64, processes uint32) error {
	var err error
	if memory != 0 {
		name := "memory.max"
		if g.version == 1 {
			name = "memory.limit_in_bytes"
		}
		err = write(g.dirs[0], name, strconv.FormatUint(memory, 10))
	}
	if processes != 0 {
		err = errors.Join(err, write(g.dirs[len(g.dirs)-1], "pids.max", strconv.FormatUint(uint64(processes), 10)))
	}
	return err
}

// Doors opens what it takes to bring a process into the group: of version 2 its directory, which clone3 takes and which has
// cgroup.procs; of version 1 cgroup.procs of each controller, to write to. The caller closes them.
func (g *Group) Doors() (files []*os.File, err error) {
	for _, dir := range g.dirs {
		path, flags := filepath.Join(dir, "cgroup.procs"), os.O_WRONLY
		if g.version == 2 {
			path, flags = dir, os.O_RDONLY|unix.O_DIRECTORY
		}
		f, err := os.OpenFile(path, flags, 0)
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			return nil, fmt.Errorf("control group: %w", err)
		}
		files = append(files, f)
	}
	return files, nil
}

// Killed is how many processes the kernel has killed because the group had no memory left.
func (g *Group) Killed() int {
	name := "memory.events"
	if g.version == 1 {
		name = "memory.oom_control"
	}
	text, _ := os.ReadFile(filepath.Join(g.dirs[0], name))
	for line := range strings.Lines(string(text)) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			killed, _ := strconv.Atoi(strings.TrimSpace(n))
			return killed
		}
	}
	return 0
}

// Remove removes the group, in which no process is left.
func (g *Group) Remove() error {
	var err error
	for _, dir := range g.dirs {
		err = errors.Join(err, os.Remove(dir))
	}
	return err
}

func write(dir, name, text string) error {
	return os.WriteFile(filepath.Join(dir, name), []byte(text), 0)
}
