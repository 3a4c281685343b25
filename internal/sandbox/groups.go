package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Groups makes and removes control groups for workers, below the executor's own group, so that what bounds the executor bounds
// all of them together. It takes each controller from version 2 where that has it, and else from version 1. Any goroutine may
// call its methods.
type Groups struct {
	trees   []*tree // of version 2 first
	prefix  string
	number  atomic.Uint64
	missing []string
	limits  string // processes of a group
	leaf    string // the executor's own group of version 2, made for it
	pids    []int  // that were moved there
	mkdir   func(dir string) error
	rmdir   func(dir string) error

	mu    sync.Mutex
	spare *GroupDir
	limit uint64 // of the last group that was removed
	ended bool
}

// GroupsConfig says what all groups have in common.
type GroupsConfig struct {
	Processes []int  // to move where version 2 wants them, below their group; none: this process
	PIDs      uint32 // processes and threads of a group; 0: no limit
	Self      string // file that names the executor's own groups; "": /proc/self/cgroup
}

// tree is a hierarchy of control groups.
type tree struct {
	version     int
	dir         string // in which groups are made
	controllers []string
	constants   []setting // of every group
	delegated   []string  // controllers of version 2 that were enabled here
}

// setting is what is written to a control file of a new group.
type setting struct{ controller, file, text string }

// GroupDir is a group as its maker has it. The maker brings processes in by Join, and calls Remove when none is left.
type GroupDir struct {
	*Group
	// Join is what a process with one thread joins the group by: of version 2 its directory, for clone3, and of version 1 the
	// file tasks, to write "0" to. That is quick. A process that is moved by cgroup.procs waits for all processors.
	Join []*os.File
	dirs []string
}

const groupRoot = "/sys/fs/cgroup"

// What is lost without a controller. The freezer and the CPU time are always there in version 2.
var lost = []struct{ controller, effect string }{
	{"cpuset", "workers are kept from changing their CPUs by the filter of system calls alone"},
	{"cpu", "the CPU time of a worker is bounded by its CPUs alone, and all workers share it by thread"},
	{"memory", "memory is limited process by process, and neither shared memory nor swap is"},
	{"pids", "processes are limited by user id, where workers have their own"},
	{"hugetlb", "workers can take the huge pages of the node"},
	{"rdma", "objects of RDMA devices are not limited"},
	{"freezer", "no worker is cached after its lease"},
	{"cpuacct", "CPU time of child processes is not billed"},
}

// OpenGroups finds the groups that this process may make. With version 2 it moves processes into a group of their own below the
// one that they are in, since a group with processes cannot have children with controllers. Close moves them back. The error says
// why there can be no groups at all; Missing says what the groups lack.
func OpenGroups(cfg GroupsConfig) (*Groups, error) {
	return openGroups(groupRoot, cfg, func(dir string) error { return os.Mkdir(dir, 0o755) }, os.Remove)
}

func openGroups(root string, cfg GroupsConfig, mkdir, rmdir func(dir string) error) (*Groups, error) {
	own, err := ownGroups(cmp.Or(cfg.Self, "/proc/self/cgroup"))
	if err != nil {
		return nil, err
	}
	if len(cfg.Processes) == 0 {
		cfg.Processes = []int{os.Getpid()}
	}
	g := &Groups{prefix: groupPrefix(), pids: cfg.Processes, mkdir: mkdir, rmdir: rmdir}
	if cfg.PIDs != 0 {
		g.limits = strconv.FormatUint(uint64(cfg.PIDs), 10)
	}
	why := g.find(root, own)
	var dirs []string
	for _, t := range g.trees {
		dirs = append(dirs, t.dir)
	}
	removeDead(dirs, "/proc", false)
	// What cannot be used after all is left out.
	for len(g.trees) > 0 {
		probe, err := g.make()
		if err == nil {
			if err = g.Remove(probe); err != nil {
				return nil, errors.Join(fmt.Errorf("control groups cannot be removed: %w", err), g.Close())
			}
			break
		}
		g.drop(err, why)
	}
	for _, l := range lost {
		if !g.hasController(l.controller) {
			text := l.controller
			if err := why[l.controller]; err != nil {
				text += " (" + err.Error() + ")"
			}
			g.missing = append(g.missing, text+": "+l.effect)
		}
	}
	if len(g.trees) == 0 {
		return nil, errors.Join(fmt.Errorf("control groups cannot be made: %s", strings.Join(g.missing, "; ")), g.Close())
	}
	return g, nil
}

// unusable is a controller that does not work in a new group; none: the hierarchy does not.
type unusable struct {
	tree       *tree
	controller string
	error
}

func (u *unusable) Unwrap() error { return u.error }

// drop leaves out what has failed.
func (g *Groups) drop(err error, why map[string]error) {
	var u *unusable
	if !errors.As(err, &u) { // cannot be
		u = &unusable{tree: g.trees[0], error: err}
	}
	u.tree.controllers = slices.DeleteFunc(u.tree.controllers, func(c string) bool {
		gone := u.controller == "" || c == u.controller
		if gone {
			why[c] = u.error
		}
		return gone
	})
	u.tree.constants = slices.DeleteFunc(u.tree.constants, func(s setting) bool { return s.controller == u.controller })
	g.trees = slices.DeleteFunc(g.trees, func(t *tree) bool { return len(t.controllers) == 0 })
}

// Missing names each controller that groups lack, why, and what is not enforced without it.
func (g *Groups) Missing() []string { return g.missing }

// HoldCPUs says whether groups keep processes on their CPUs.
func (g *Groups) HoldCPUs() bool { return g.hasController("cpuset") }

// CanFreeze says whether groups have a freezer.
func (g *Groups) CanFreeze() bool { return g.hasController("freezer") }

func (g *Groups) hasController(name string) bool {
	return slices.ContainsFunc(g.trees, func(t *tree) bool { return slices.Contains(t.controllers, name) })
}

// letOrphansDie thaws a group of version 1 whose executor was killed while the group was frozen. Its processes got SIGKILL then, but
// version 1 delivers no signal to a frozen process.
func letOrphansDie(group string) {
	pids, _ := os.ReadFile(filepath.Join(group, "cgroup.procs"))
	for pid := range strings.FieldsSeq(string(pids)) {
		status, _ := os.ReadFile("/proc/" + pid + "/status")
		for line := range strings.Lines(string(status)) {
			mask, ok := strings.CutPrefix(line, "ShdPnd:")
			pending, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			if ok && err == nil && pending&(1<<(unix.SIGKILL-1)) != 0 {
				_ = write(group, "freezer.state", "THAWED")
				return
			}
		}
	}
}

// ownGroup is a line of /proc/self/cgroup.
type ownGroup struct {
	controllers []string // none: version 2
	path        string
}

// ownGroups reads /proc/self/cgroup.
func ownGroups(file string) ([]ownGroup, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var own []ownGroup
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			return nil, fmt.Errorf("%s has the line %q", file, line)
		}
		var controllers []string
		if f[1] != "" {
			controllers = strings.Split(f[1], ",")
		}
		own = append(own, ownGroup{controllers, f[2]})
	}
	return own, nil
}

// find finds the hierarchies, and says why controllers are missing where it knows.
func (g *Groups) find(root string, own []ownGroup) (why map[string]error) {
	why = map[string]error{}
	for _, o := range own {
		if len(o.controllers) == 0 {
			g.findUnified(root, o.path, why)
		}
	}
	for _, o := range own {
		var wanted []string
		for _, l := range lost {
			if slices.Contains(o.controllers, l.controller) && !g.hasController(l.controller) {
				wanted = append(wanted, l.controller)
			}
		}
		if len(wanted) == 0 {
			continue
		}
		t := &tree{version: 1, controllers: wanted}
		for _, name := range append([]string{strings.Join(o.controllers, ",")}, o.controllers...) {
			dir := filepath.Join(root, name, o.path)
			if _, err := os.Stat(dir); err == nil {
				t.dir = dir
				break
			}
		}
		if t.dir == "" {
			for _, c := range wanted {
				why[c] = fmt.Errorf("%s has no group %s", filepath.Join(root, wanted[0]), o.path)
			}
			continue
		}
		t.constants = g.constants(t)
		g.trees = append(g.trees, t)
	}
	return why
}

// findUnified finds the hierarchy of version 2, which is at root or, beside version 1, in a directory of it.
func (g *Groups) findUnified(root, path string, why map[string]error) {
	for _, mount := range []string{root, filepath.Join(root, "unified")} {
		dir := filepath.Join(mount, path)
		text, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
		if err != nil {
			continue
		}
		t := &tree{version: 2, dir: dir, controllers: []string{"freezer", "cpuacct"}}
		have := strings.Fields(string(text))
		for _, l := range lost {
			switch {
			case slices.Contains(t.controllers, l.controller):
			case slices.Contains(have, l.controller):
				t.delegated = append(t.delegated, l.controller)
			case mount == root:
				why[l.controller] = errors.New("not delegated to this control group: Delegate= in the unit")
			}
		}
		removeDead([]string{dir}, "/proc", false)
		if len(t.delegated) > 0 {
			g.delegate(t, why)
		}
		t.constants = g.constants(t)
		g.trees = append(g.trees, t)
		return
	}
}

// delegate enables controllers for groups below t.
func (g *Groups) delegate(t *tree, why map[string]error) {
	// The root alone may have processes beside children with controllers. It has no cgroup.type.
	if _, err := os.Stat(filepath.Join(t.dir, "cgroup.type")); err == nil {
		if err := g.moveToLeaf(t); err != nil {
			for _, c := range t.delegated {
				why[c] = err
			}
			t.delegated = nil
			return
		}
	}
	t.delegated = slices.DeleteFunc(t.delegated, func(c string) bool {
		err := write(t.dir, "cgroup.subtree_control", "+"+c)
		if err != nil { // the group is not ours, or not ours alone
			why[c] = err
		}
		return err != nil
	})
	t.controllers = append(t.controllers, t.delegated...)
}

func (g *Groups) moveToLeaf(t *tree) error {
	err := fs.ErrExist
	for n := 0; errors.Is(err, fs.ErrExist); n++ { // of an executor with the same process id in another name space
		leaf := filepath.Join(t.dir, g.prefix+"executor"+strconv.Itoa(n))
		if err = g.mkdir(leaf); err == nil {
			g.leaf = leaf
		}
	}
	for _, pid := range g.pids {
		if err == nil {
			err = write(g.leaf, "cgroup.procs", strconv.Itoa(pid))
		}
	}
	return err
}

// constants are what every new group of a hierarchy gets.
func (g *Groups) constants(t *tree) (list []setting) {
	for _, c := range t.controllers {
		switch {
		case c == "pids" && g.limits != "":
			list = append(list, setting{c, "pids.max", g.limits})
		case c == "memory" && t.version == 2:
			list = append(list, setting{c, "memory.swap.max", "0"})
		case c == "memory":
			list = append(list, setting{c, "memory.swappiness", "0"}) // for where swap is not counted
		case c == "cpuset" && t.version == 1:
			list = append(list, setting{c, "cpuset.sched_load_balance", "0"}) // else each change of CPUs rebuilds the scheduler's domains
			list = append(list, setting{c, "cpuset.mems", inherited(t.dir, "cpuset.mems")})
			list = append(list, setting{c, "cpuset.cpus", inherited(t.dir, "cpuset.cpus")})
		case c == "hugetlb":
			list = append(list, hugePages(t)...)
		case c == "rdma":
			list = append(list, rdmaDevices(t)...)
		}
	}
	return list
}

func inherited(dir, file string) string {
	text, _ := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSpace(string(text))
}

// hugePages forbids huge pages of every size that the node has.
func hugePages(t *tree) (list []setting) {
	sizes, _ := os.ReadDir("/sys/kernel/mm/hugepages")
	for _, d := range sizes {
		kb, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(d.Name(), "hugepages-"), "kB"))
		if err != nil {
			continue
		}
		size := fmt.Sprintf("%dKB", kb)
		for _, u := range []struct {
			kb   int
			unit string
		}{{1 << 10, "MB"}, {1 << 20, "GB"}} {
			if kb >= u.kb {
				size = fmt.Sprintf("%d%s", kb/u.kb, u.unit)
			}
		}
		file := "hugetlb." + size + ".limit_in_bytes"
		if t.version == 2 {
			file = "hugetlb." + size + ".max"
		}
		list = append(list, setting{"hugetlb", file, "0"})
	}
	return list
}

// rdmaDevices bounds what a worker has of each RDMA device. A worker opens a device once, and its channel has about ten objects.
func rdmaDevices(t *tree) (list []setting) {
	devices, _ := os.ReadDir("/sys/class/infiniband")
	for _, d := range devices {
		list = append(list, setting{"rdma", "rdma.max", d.Name() + " hca_handle=4 hca_object=256"})
	}
	return list
}

// Close moves the executor back from its group of version 2. No group of a worker is left then. While another executor has groups
// beside it, which would lose their controllers, it stays: the next executor that starts after its end removes it.
func (g *Groups) Close() error {
	g.mu.Lock()
	spare := g.spare
	g.spare, g.ended = nil, true
	g.mu.Unlock()
	var err error
	if spare != nil {
		err = g.Remove(spare)
	}
	if g.leaf == "" {
		return err
	}
	dir := filepath.Dir(g.leaf)
	groups, _ := filepath.Glob(filepath.Join(dir, "rfaas-*-*"))
	if others := slices.DeleteFunc(groups, func(d string) bool { return d == g.leaf }); len(others) > 0 {
		return err
	}
	for _, t := range g.trees {
		for _, c := range t.delegated {
			err = errors.Join(err, write(t.dir, "cgroup.subtree_control", "-"+c))
		}
	}
	for _, pid := range g.pids {
		err = errors.Join(err, write(dir, "cgroup.procs", strconv.Itoa(pid)))
	}
	return errors.Join(err, g.rmdir(g.leaf))
}

// New returns a group without processes and CPU quota, which has the executor's CPUs and any memory limit.
func (g *Groups) New() (*GroupDir, error) {
	g.mu.Lock()
	d := g.spare
	g.spare = nil
	g.mu.Unlock()
	if d != nil && d.there() {
		return d, nil
	}
	if d != nil { // an executor that does not see this one's process name space took it for a dead one's
		_ = g.Remove(d)
	}
	return g.make()
}

// there says whether nobody has removed the group.
func (d *GroupDir) there() bool {
	for _, dir := range d.dirs {
		if err := unix.Access(dir, unix.F_OK); err != nil {
			return false
		}
	}
	return true
}

// Prepare makes a group that the next New returns, unless there is one, with the memory limit that is most likely: a start takes less
// time then.
func (g *Groups) Prepare() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.spare != nil || g.ended {
		return
	}
	d, err := g.make()
	if err != nil {
		return // New will say why
	}
	_ = d.Limit(g.limit) // as will Limit
	g.spare = d
}

// make makes a group. An error wraps an *unusable.
func (g *Groups) make() (*GroupDir, error) {
	for {
		d, err := g.try(g.prefix + strconv.FormatUint(g.number.Add(1), 10))
		// Executors in process name spaces of their own may have the same process id, and here the same group.
		if !errors.Is(err, fs.ErrExist) {
			return d, err
		}
	}
}

func (g *Groups) try(name string) (*GroupDir, error) {
	d := &GroupDir{Group: &Group{}}
	for _, t := range g.trees {
		if err := g.add(d, t, filepath.Join(t.dir, name)); err != nil {
			return nil, errors.Join(fmt.Errorf("control group: %w", err), g.Remove(d))
		}
	}
	return d, nil
}

// add makes the group's directory of one hierarchy and opens its files.
func (g *Groups) add(d *GroupDir, t *tree, dir string) error {
	if err := g.mkdir(dir); err != nil {
		return &unusable{t, "", err}
	}
	d.dirs = append(d.dirs, dir)
	for _, c := range t.constants {
		err := write(dir, c.file, c.text)
		// A kernel that does not count swap has no file for it.
		if err != nil && !(errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(c.file, "memory.swap")) {
			return &unusable{t, c.controller, err}
		}
	}
	return d.open(t, dir)
}

// Control files by controller, of version 2 and of version 1.
var controlFiles = []struct {
	controller string
	file       int
	names      [2]string
	flags      int
	optional   bool
}{
	{"freezer", freezeFile, [2]string{"cgroup.freeze", "freezer.state"}, os.O_RDWR, false},
	{"freezer", eventsFile, [2]string{"cgroup.events", ""}, os.O_RDONLY, false},
	{"cpuacct", timeFile, [2]string{"cpu.stat", "cpuacct.usage"}, os.O_RDONLY, false},
	{"memory", killsFile, [2]string{"memory.events", "memory.oom_control"}, os.O_RDONLY, false},
	{"memory", peakFile, [2]string{"", "memory.max_usage_in_bytes"}, os.O_RDONLY, true},
	{"memory", memoryFile, [2]string{"memory.max", "memory.limit_in_bytes"}, os.O_RDWR, false},
	{"memory", swapFile, [2]string{"", "memory.memsw.limit_in_bytes"}, os.O_WRONLY, true},
	{"cpuset", cpusFile, [2]string{"cpuset.cpus", "cpuset.cpus"}, os.O_WRONLY, false},
	{"cpu", quotaFile, [2]string{"cpu.max", "cpu.cfs_quota_us"}, os.O_WRONLY, true}, // a kernel may have weights alone
}

// open opens what Group needs, and the way in.
func (d *GroupDir) open(t *tree, dir string) error {
	for _, c := range controlFiles {
		name := c.names[2-t.version]
		if name == "" || !slices.Contains(t.controllers, c.controller) {
			continue
		}
		f, err := openFile(filepath.Join(dir, name), c.flags)
		if errors.Is(err, fs.ErrNotExist) && c.optional {
			continue
		}
		if err != nil {
			return &unusable{t, c.controller, err}
		}
		d.files[c.file] = f
		if t.version == 1 {
			d.v1 |= 1 << c.file
		}
	}
	path, flags := filepath.Join(dir, "tasks"), os.O_WRONLY
	if t.version == 2 {
		path, flags = dir, os.O_RDONLY|unix.O_DIRECTORY
	}
	f, err := openFile(path, flags)
	if err != nil {
		return &unusable{t, "", err}
	}
	d.Join = append(d.Join, f)
	return nil
}

// openFile opens a file without the runtime's poller, which takes time.
func openFile(path string, flags int) (*os.File, error) {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// CloseJoin closes the files of Join.
func (d *GroupDir) CloseJoin() {
	for _, f := range d.Join {
		f.Close()
	}
	d.Join = nil
}

// Remove removes a group, in which no process is left, and closes its files.
func (g *Groups) Remove(d *GroupDir) error {
	d.CloseJoin()
	d.Close()
	if used := d.limit.Load(); used != 0 {
		g.mu.Lock()
		g.limit = used
		g.mu.Unlock()
	}
	var err error
	for _, dir := range d.dirs {
		err = errors.Join(err, g.rmdir(dir))
	}
	return err
}

func write(dir, name, text string) error {
	f, err := openFile(filepath.Join(dir, name), os.O_WRONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write([]byte(text))
	return err
}
