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

// Groups makes and removes control groups for workers, below the executor's own group, so that the limits of the
// executor's group apply to all of them together. It uses each controller of version 2 where it exists, and else of
// version 1. It is safe for concurrent use.
type Groups struct {
	trees   []*tree // version 2 first
	prefix  string
	number  atomic.Uint64
	missing []string
	limits  string // limit on processes of a group
	idle    bool   // groups get only the CPU time and I/O that no other group wants
	leaf    string // group of version 2 that was made for the executor itself
	frozen  string // an empty group that stays frozen (holdFrozen); "": none
	pids    []int  // processes that were moved there
	mkdir   func(dir string) error
	rmdir   func(dir string) error

	mu    sync.Mutex
	spare *GroupDir // made ahead for the next New, which then takes about 0.4 ms less
	limit uint64    // memory limit of the last removed group
	ended bool
}

// GroupsConfig has what all groups have in common.
type GroupsConfig struct {
	Processes []int  // processes to move into a group below their own, if version 2 needs it; empty: this process
	PIDs      uint32 // most processes and threads of a group; 0: no limit
	Idle      bool   // groups get only the CPU time and I/O that no other group wants
	Self      string // file that names the executor's own groups; "": /proc/self/cgroup
}

// tree is a hierarchy of control groups.
type tree struct {
	version     int
	dir         string // parent of new groups
	path        string // of dir in the hierarchy
	controllers []string
	constants   []setting // for every group
	delegated   []string  // controllers of version 2 that were enabled here
}

// setting is a text to write to a control file of a new group.
type setting struct{ controller, file, text string }

// A group competes with other groups by its weight, whatever the policy of its threads is: a thread of policy SCHED_IDLE that is alone in a group with
// the default weight takes half of a CPU from a program in another group. cpu.idle (Linux 5.15) makes the group itself idle. older has the settings for
// kernels without it, by version. The weight of I/O has an effect only with I/O schedulers that use weights.
var (
	idleCPU = setting{"cpu", "cpu.idle", "1"}
	idleIO  = setting{"io", "io.weight", "default 1"}
	older   = map[int]setting{1: {"cpu", "cpu.shares", "2"}, 2: {"cpu", "cpu.weight", "1"}}
)

// GroupDir is a group for its maker. The maker adds processes through Join, and calls Remove when no process is left.
type GroupDir struct {
	*Group
	// Join has the files through which a process with one thread joins the group quickly: the directory of version 2,
	// for clone3, and the file tasks of version 1, to which the process writes "0". Moving a process with cgroup.procs
	// waits for all processors.
	Join []*os.File
	dirs []string
}

const groupRoot = "/sys/fs/cgroup"

// The effect of each missing controller. Version 2 always has the freezer and the CPU time.
var lost = []struct{ controller, effect string }{
	{"cpuset", "only the system call filter keeps workers from changing their CPUs"},
	{"cpu", "only its CPUs limit the CPU time of a worker, and workers share CPUs by thread"},
	{"memory", "memory is limited for each process only, and shared memory and swap are not limited"},
	{"pids", "processes are limited by user id, if workers have their own"},
	{"hugetlb", "workers can use the node's huge pages"},
	{"rdma", "objects of RDMA devices are not limited"},
	{"freezer", "no worker is cached after its lease"},
	{"cpuacct", "CPU time of child processes is not billed"},
}

// OpenGroups determines which groups this process may make. With version 2 it moves processes into a new group below
// their own, since a group with processes cannot have children with controllers; Close moves them back. The error says
// why no groups can be made. Missing says what the groups lack.
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
	g := &Groups{prefix: groupPrefix(), idle: cfg.Idle, pids: cfg.Processes, mkdir: mkdir, rmdir: rmdir}
	if cfg.PIDs != 0 {
		g.limits = strconv.FormatUint(uint64(cfg.PIDs), 10)
	}
	why := g.find(root, own)
	g.removeDead()
	// Leave out what does not work in a test group.
	for len(g.trees) > 0 {
		probe, err := g.make()
		if err == nil {
			if err = g.Remove(probe); err != nil {
				return nil, errors.Join(fmt.Errorf("cannot remove control groups: %w", err), g.Close())
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
		return nil, errors.Join(fmt.Errorf("cannot make control groups: %s", strings.Join(g.missing, "; ")), g.Close())
	}
	g.holdFrozen()
	return g, nil
}

// unusable is an error of a controller in a new group. Without a controller it is an error of the hierarchy.
type unusable struct {
	tree       *tree
	controller string
	error
}

func (u *unusable) Unwrap() error { return u.error }

// drop removes the controller or hierarchy that has failed.
func (g *Groups) drop(err error, why map[string]error) {
	var u *unusable
	if !errors.As(err, &u) { // impossible
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

// Missing returns a text for each missing controller: why it is missing, and what is not enforced without it.
func (g *Groups) Missing() []string { return g.missing }

// Competes returns the control group that competes with other programs although the groups inside it are idle. Neither this group nor one above it
// is idle or has the smallest weight. Competes returns "" if there is no such group.
func (g *Groups) Competes() string {
	for _, t := range g.trees {
		if !slices.Contains(t.controllers, "cpu") || t.path == "/" {
			continue
		}
		for dir, path := t.dir, t.path; path != "/"; dir, path = filepath.Dir(dir), filepath.Dir(path) {
			least := older[t.version]
			if inherited(dir, idleCPU.file) == idleCPU.text || inherited(dir, least.file) == least.text {
				return ""
			}
		}
		return t.dir
	}
	return ""
}

// HoldCPUs reports whether processes of groups cannot leave their CPUs.
func (g *Groups) HoldCPUs() bool { return g.hasController("cpuset") }

func (g *Groups) hasController(name string) bool {
	return slices.ContainsFunc(g.trees, func(t *tree) bool { return slices.Contains(t.controllers, name) })
}

// letOrphansDie thaws a group of version 1 whose executor was killed while the group was frozen. Its processes have
// been sent SIGKILL, but version 1 delivers no signal to a frozen process.
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

// ownGroups parses /proc/self/cgroup.
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

// find finds the hierarchies. It returns why controllers are missing, as far as it is known.
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
		t := &tree{version: 1, path: o.path, controllers: wanted}
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
		t := &tree{version: 2, dir: dir, path: path, controllers: []string{"freezer", "cpuacct"}}
		have := strings.Fields(string(text))
		for _, l := range lost {
			switch {
			case slices.Contains(t.controllers, l.controller):
			case slices.Contains(have, l.controller):
				t.delegated = append(t.delegated, l.controller)
			case mount == root:
				why[l.controller] = errors.New("not delegated to this control group: use Delegate= in the unit")
			}
		}
		if g.idle && slices.Contains(have, idleIO.controller) {
			t.delegated = append(t.delegated, idleIO.controller)
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
	// Only the root group may have processes beside children with controllers. It has no cgroup.type.
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
		if err != nil { // the group belongs to another user, or has other processes
			why[c] = err
		}
		return err != nil
	})
	t.controllers = append(t.controllers, t.delegated...)
}

func (g *Groups) moveToLeaf(t *tree) error {
	err := fs.ErrExist
	for n := 0; errors.Is(err, fs.ErrExist); n++ { // an executor in another namespace may have the same process id
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

// constants returns the settings for every new group of a hierarchy.
func (g *Groups) constants(t *tree) (list []setting) {
	for _, c := range t.controllers {
		switch {
		case c == "pids" && g.limits != "":
			list = append(list, setting{c, "pids.max", g.limits})
		case c == "memory" && t.version == 2:
			list = append(list, setting{c, "memory.swap.max", "0"})
		case c == "memory":
			list = append(list, setting{c, "memory.swappiness", "0"}) // for kernels that do not count swap
		case c == "cpuset" && t.version == 1:
			list = append(list, setting{c, "cpuset.sched_load_balance", "0"}) // otherwise each change of CPUs rebuilds the scheduler's domains
			list = append(list, setting{c, "cpuset.mems", inherited(t.dir, "cpuset.mems")})
			list = append(list, setting{c, "cpuset.cpus", inherited(t.dir, "cpuset.cpus")})
		case c == "cpu" && g.idle:
			list = append(list, idleCPU)
		case c == "io":
			list = append(list, idleIO)
		case c == "hugetlb":
			list = append(list, hugePages(t)...)
		case c == "rdma":
			list = append(list, rdmaDevices()...)
		}
	}
	return list
}

func inherited(dir, file string) string {
	text, _ := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSpace(string(text))
}

// hugePages returns the settings that forbid huge pages of every size of the node.
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

// rdmaDevices returns the limits for each RDMA device. A worker opens a device once, and its channel has about ten
// objects.
func rdmaDevices() (list []setting) {
	devices, _ := os.ReadDir("/sys/class/infiniband")
	for _, d := range devices {
		list = append(list, setting{"rdma", "rdma.max", d.Name() + " hca_handle=4 hca_object=256"})
	}
	return list
}

// Close moves the executor back from its group of version 2. The groups of all workers must have been removed. If other
// executors have groups beside it, which would lose their controllers, the executor's group stays, and the next
// executor that starts after its end removes it.
func (g *Groups) Close() error {
	g.mu.Lock()
	spare := g.spare
	g.spare, g.ended = nil, true
	g.mu.Unlock()
	var err error
	if spare != nil {
		err = g.Remove(spare)
	}
	if g.frozen != "" {
		err = errors.Join(err, g.rmdir(g.frozen))
	}
	g.removeDead() // of executors that were still dying when this one started
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

// New returns a group without processes and CPU quota, with the executor's CPUs and an arbitrary memory limit.
func (g *Groups) New() (*GroupDir, error) {
	g.mu.Lock()
	d := g.spare
	g.spare = nil
	g.mu.Unlock()
	if d != nil && d.there() {
		return d, nil
	}
	if d != nil { // another executor that cannot see this one's process namespace removed it
		_ = g.Remove(d)
	}
	return g.make()
}

// there reports whether the group still exists.
func (d *GroupDir) there() bool {
	for _, dir := range d.dirs {
		if err := unix.Access(dir, unix.F_OK); err != nil {
			return false
		}
	}
	return true
}

// Prepare makes a group for the next New, with the most likely memory limit, unless there is one already. It makes the
// next start faster.
func (g *Groups) Prepare() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.spare != nil || g.ended {
		return
	}
	d, err := g.make()
	if err != nil {
		return // New will report the error
	}
	_ = d.Limit(g.limit) // a later Limit will report the error
	g.spare = d
}

// make makes a group. An error wraps an *unusable.
func (g *Groups) make() (*GroupDir, error) {
	for {
		d, err := g.try(g.prefix + strconv.FormatUint(g.number.Add(1), 10))
		// Executors in process namespaces of their own may have the same process id, and try to make the same group
		// here.
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

// add makes the group's directory in one hierarchy and opens its files.
func (g *Groups) add(d *GroupDir, t *tree, dir string) error {
	if err := g.mkdir(dir); err != nil {
		return &unusable{t, "", err}
	}
	d.dirs = append(d.dirs, dir)
	for _, c := range t.constants {
		err := write(dir, c.file, c.text)
		if c == idleCPU && errors.Is(err, fs.ErrNotExist) {
			c = older[t.version]
			err = write(dir, c.file, c.text)
		}
		// A kernel that does not count swap, or cannot weigh I/O, has no such file.
		if err != nil && !(errors.Is(err, fs.ErrNotExist) && (c == idleIO || strings.HasPrefix(c.file, "memory.swap"))) {
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
	{"cpu", quotaFile, [2]string{"cpu.max", "cpu.cfs_quota_us"}, os.O_WRONLY, true}, // a kernel may support weights only
}

// open opens the files for Group and Join.
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

// openFile opens a file without the runtime's poller, which would take time.
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

// Remove removes a group without processes and closes its files.
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
