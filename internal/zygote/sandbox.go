package zygote

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// Sandbox says how workers are to be confined. The zero value does not.
type Sandbox struct {
	Mode  sandbox.Mode
	Paths []string // absolute; what workers see read-only besides the system's
	// Environment is what workers keep of the executor's variables besides those for computing; a name may end in *.
	Environment []string
	UIDs        sandbox.Range // for workers whose Spec has no UID; needs root
	UIDFile     string        // shared with others that give out UIDs on this node; "": none
	// Processes is how many processes and threads a worker may have; 0: no limit.
	Processes uint32

	without   uint32 // parts that tests leave out
	ownGroups string // file in the place of /proc/self/cgroup, for tests
	fixedCPUs bool   // no cpuset keeps workers on their CPUs: the filter of system calls has to
}

// Parts of a sandbox, DP_SANDBOX_* of dp_worker_sandbox.h.
const (
	partUID      = 1 << 0
	partPIDs     = 1 << 1
	partFiles    = 1 << 2
	partIPC      = 1 << 3
	partNet      = 1 << 4
	partPrivs    = 1 << 5
	partSeccomp  = 1 << 6
	partLandlock = 1 << 7
	partAll      = 1<<8 - 1
)

const maxSandboxPaths = 64 // DP_SANDBOX_PATHS_MAX

// arguments are those of the zygote.
func (s *Sandbox) arguments() []string {
	args := []string{"zygote"}
	if s.Mode == sandbox.Off {
		return args
	}
	args = append(args, "--sandbox")
	if s.fixedCPUs {
		args = append(args, "--fixed-cpus")
	}
	if s.without != 0 {
		args = append(args, fmt.Sprintf("--without=%d", s.without))
	}
	for _, p := range s.paths() {
		args = append(args, "--path="+p)
	}
	return args
}

// paths are the settings' and those in which the executor's own libraries are looked for.
func (s *Sandbox) paths() []string {
	list := s.Paths
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if strings.HasPrefix(dir, "/") {
			list = append(list[:len(list):len(list)], dir)
		}
	}
	return list[:min(len(list), maxSandboxPaths)]
}

// lacks says what of the sandbox a zygote cannot give; "" if nothing.
func (s *Sandbox) lacks(parts uint32, missing string) string {
	if s.Mode == sandbox.Off {
		return ""
	}
	if parts&partUID != 0 && s.UIDs.N == 0 {
		parts &^= partUID
		missing = strings.TrimPrefix(missing+"; user ids: no range is set", "; ")
	}
	if parts&partAll == partAll {
		return ""
	}
	if missing == "" {
		missing = fmt.Sprintf("parts %#x of %#x", parts, partAll)
	}
	return missing
}

// check refuses a zygote without what is required, and logs what is missing where it is not.
func (s *Sandbox) check(p *process, log *slog.Logger) error {
	missing := s.lacks(p.parts, p.missing)
	switch {
	case missing == "":
		return nil
	case s.Mode == sandbox.Require:
		return fmt.Errorf("a complete sandbox is required, and this node cannot give it: %s", missing)
	}
	log.Warn("the sandbox of workers is incomplete", "missing", missing)
	return nil
}

// Lacks says what of a complete sandbox a worker program cannot give here, and why; "" if nothing. It starts the program and ends
// it again; ctx bounds that.
func Lacks(ctx context.Context, path string, uids sandbox.Range) (string, error) {
	cfg := Config{Path: path, Log: slog.New(slog.DiscardHandler), Sandbox: Sandbox{Mode: sandbox.On, UIDs: uids}}
	p, err := startProcess(ctx, &cfg)
	if err != nil {
		return "", err
	}
	defer p.stop()
	return cfg.Sandbox.lacks(p.parts, p.missing), nil
}

// shareUIDs keeps this zygote's ids of users apart from others'.
func (z *Zygote) shareUIDs() {
	s := &z.cfg.Sandbox
	if s.UIDFile == "" || s.UIDs.N == 0 || !z.canGiveUID() {
		return
	}
	if err := z.uids.Share(s.UIDFile); err != nil {
		z.cfg.Log.Warn("workers of two executors of this node may have the same user id", "err", err)
	}
}

// canGiveUID says whether workers can be other users than the executor.
func (z *Zygote) canGiveUID() bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.cfg.Sandbox.Mode != sandbox.Off && z.parts&partUID != 0
}

// confinement is what one worker has of the sandbox's and gives back when nothing of it is left.
type confinement struct {
	body  []byte // the message that asks for it
	uid   uint32 // taken, or 0
	group *sandbox.GroupDir
}

// confine takes what a worker needs and completes the message that asks for it.
func (z *Zygote) confine(s *Spec, body []byte) (*confinement, error) {
	c := &confinement{body: body}
	uid, gid, processes := s.UID, s.GID, s.Processes
	switch {
	case !z.canGiveUID():
		uid, gid, processes = 0, 0, 0 // the worker is whoever the executor is
	case uid == 0 && z.cfg.Sandbox.UIDs.N > 0:
		var err error
		if c.uid, err = z.uids.Take(); err != nil {
			return nil, err
		}
		uid, gid, processes = c.uid, c.uid, z.cfg.Sandbox.Processes
	}
	c.body = slices.Clone(body)
	binary.LittleEndian.PutUint32(c.body[bodyUID:], uid)
	binary.LittleEndian.PutUint32(c.body[bodyUID+4:], gid)
	binary.LittleEndian.PutUint32(c.body[bodyUID+8:], processes)
	if err := z.enclose(c, s); err != nil {
		z.release(c)
		return nil, err
	}
	return c, nil
}

// enclose makes the control group of a worker, if there can be one. What clones the worker's guard brings the worker there.
func (z *Zygote) enclose(c *confinement, s *Spec) (err error) {
	z.mu.Lock()
	guarded := z.parts&partPIDs != 0
	z.mu.Unlock()
	if z.groups == nil || !guarded {
		return nil
	}
	if c.group, err = z.groups.New(); err != nil {
		return err
	}
	if err := c.group.Limit(s.groupMemory()); err != nil {
		return err
	}
	return c.group.Pin(s.CPUs)
}

// joins are the descriptors by which a worker joins its control group.
func (c *confinement) joins() []int {
	if c.group == nil {
		return nil
	}
	return fds(c.group.Join)
}

// handle is what a worker has of its control group; nil: it has none.
func (c *confinement) handle() *sandbox.Group {
	if c.group == nil {
		return nil
	}
	return c.group.Group
}

// groupMemory is the limit of a worker's control group, which also counts what is not the function's: its channel, the pages
// of tables and libraries. 0: none.
func (s *Spec) groupMemory() uint64 {
	const overhead = 32 << 20
	if s.MemoryLimit == 0 || s.MemoryLimit > 1<<62 || s.ChannelMemory > 1<<62 {
		return 0
	}
	return s.MemoryLimit + s.ChannelMemory + overhead
}

// release gives back what confine took.
func (z *Zygote) release(c *confinement) {
	z.giveUID(c)
	z.removeGroup(c)
}

func (z *Zygote) giveUID(c *confinement) {
	if c.uid != 0 {
		z.uids.Give(c.uid)
	}
}

func (z *Zygote) removeGroup(c *confinement) {
	if c.group != nil {
		if err := z.groups.Remove(c.group); err != nil {
			z.cfg.Log.Warn("a worker's control group is left behind", "err", err)
		}
	}
}

// openGroups finds the control groups that workers can have, and logs what is not enforced without them.
func openGroups(cfg *Config) *sandbox.Groups {
	s := &cfg.Sandbox
	if s.Mode == sandbox.Off {
		return nil
	}
	groups, err := sandbox.OpenGroups(sandbox.GroupsConfig{PIDs: s.Processes, Self: s.ownGroups})
	s.fixedCPUs = err != nil || !groups.HoldCPUs()
	if err != nil {
		cfg.Log.Warn("workers have no control groups", "missing", err)
		return nil
	}
	for _, m := range groups.Missing() {
		cfg.Log.Warn("control groups of workers lack a controller", "missing", m)
	}
	groups.Prepare()
	return groups
}

// reapNow reaps a child that has ended or is about to.
func reapNow(fd int) {
	for {
		err := unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	unix.Close(fd)
}
