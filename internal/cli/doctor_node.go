package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/executor"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// What a node of a cluster needs beyond a device. Roots are "/" but in tests.

// read returns a small file without space around it, "" if there is none.
func read(path ...string) string {
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// checkGIDs looks for addresses of the active ports. class is the class directory of the devices.
func checkGIDs(class string) finding {
	const check = "GIDs"
	states, _ := filepath.Glob(filepath.Join(class, "*", "ports", "*", "state"))
	var good, bad []string
	for _, state := range states {
		if !strings.HasSuffix(read(state), "ACTIVE") {
			continue
		}
		port := filepath.Dir(state)
		name := fmt.Sprintf("%s port %s", filepath.Base(filepath.Dir(filepath.Dir(port))), filepath.Base(port))
		best := ""
		gids, _ := filepath.Glob(filepath.Join(port, "gids", "*"))
		for _, file := range gids {
			gid := read(file)
			if gid == "" || strings.Trim(gid, "0:") == "" {
				continue
			}
			kind := read(port, "gid_attrs", "types", filepath.Base(file))
			ethernet := read(port, "link_layer") == "Ethernet"
			linkLocal := strings.HasPrefix(gid, "fe80:")
			switch {
			case !ethernet:
				best = "InfiniBand " + gid
			case kind == "RoCE v2" && !linkLocal:
				best = fmt.Sprintf("RoCE v2, index %s, %s", filepath.Base(file), gid)
			}
			if best != "" {
				break
			}
		}
		if best == "" {
			bad = append(bad, name)
		} else {
			good = append(good, name+" "+best)
		}
	}
	switch {
	case len(states) == 0:
		return ok(check, "not needed without a device")
	case len(good)+len(bad) == 0:
		return note(check, "", "no active port that could have one")
	case len(good) == 0:
		return problem(check, "give the interface an IP address (ip addr add); RoCE takes its GIDs from there", "none that others can reach: %s",
			strings.Join(bad, "; "))
	}
	return ok(check, "%s", strings.Join(good, "; "))
}

// checkDeviceFiles opens the device files in dir as a worker does. devices: the node has RDMA devices.
func checkDeviceFiles(dir string, devices bool) finding {
	const check = "device files"
	files, _ := filepath.Glob(filepath.Join(dir, "uverbs*"))
	switch {
	case len(files) == 0 && !devices:
		return ok(check, "not needed without a device")
	case len(files) == 0:
		return problem(check, "modprobe ib_uverbs", "%s has no uverbs files, so no program can open the device", dir)
	}
	for _, file := range files {
		fd, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
		switch {
		case err == nil:
			unix.Close(fd)
		case errors.Is(err, unix.EACCES):
			return problem(check, "let this user open it: its group (often rdma), or a udev rule with MODE=\"0666\"", "%s: %v", file, err)
		case errors.Is(err, unix.EPERM):
			// Permissions would have said EACCES: this is the control group.
			return problem(check, "the control group's device rules forbid it: Slurm's ConstrainDevices with a gres.conf that leaves it out, or systemd's "+
				"DeviceAllow=/dev/infiniband/* rw", "%s: %v", file, err)
		default:
			return problem(check, "", "%s: %v", file, err)
		}
	}
	return ok(check, "%s", strings.Join(files, ", "))
}

// checkGroups reports which control groups an executor could make if it were started like this command. It makes one with the spawner's code, and
// removes it.
func checkGroups() finding {
	groups, err := sandbox.OpenGroups(sandbox.GroupsConfig{})
	if err != nil {
		return groupsFinding(nil, err)
	}
	return groupsFinding(groups.Missing(), groups.Close())
}

// groupsFinding describes control groups that lack the controllers in missing.
func groupsFinding(missing []string, err error) finding {
	const check = "control groups"
	mend := "run the executor as root, or with Delegate=yes in its unit, and boot with systemd.unified_cgroup_hierarchy=1 if control groups of version 2 have more controllers"
	if os.Geteuid() == 0 {
		mend = "a controller that neither /proc/cgroups nor cgroup.controllers in /sys/fs/cgroup lists is not in the kernel (rdma: CONFIG_CGROUP_RDMA); for others " +
			"set Delegate=yes in the executor's unit, or boot with systemd.unified_cgroup_hierarchy=1"
	}
	switch {
	case err != nil:
		return note(check, mend, "an executor that this user starts here cannot make any for its workers: %v", err)
	case len(missing) > 0:
		return note(check, mend, "control groups of workers lack controllers: %s", strings.Join(missing, "; "))
	}
	return ok(check, "an executor can make control groups with all controllers for its workers")
}

// checkNamespaces starts a program in namespaces of its own, as `rfaas slurm run` does.
func checkNamespaces(ctx context.Context) finding {
	const check = "namespaces"
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	kind := "process"
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		kind = "user and process"
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	}
	runtime.LockOSThread() // the parent-death signal follows the thread
	defer runtime.UnlockOSThread()
	if err := cmd.Run(); err != nil {
		return note(check, "sysctl user.max_user_namespaces=10000, kernel.unprivileged_userns_clone=1 where it exists; without, processes that fork twice "+
			"are left to the batch system", "%s namespaces are refused: %v", kind, err)
	}
	return ok(check, "%s", kind)
}

// checkSandbox lets the worker program say what of a worker's sandbox it can make here.
func checkSandbox(ctx context.Context) finding {
	const check = "sandbox"
	path, err := executor.DefaultWorkerPath()
	if err != nil {
		return problem(check, "", "%v", err)
	}
	if unix.Access(path, unix.X_OK) != nil {
		return note(check, "", "not looked at: rfaas-worker is missing, see programs")
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	missing, err := zygote.Lacks(ctx, path, sandbox.Range{First: 1, N: 1}) // any range: ids are not used
	switch {
	case err != nil:
		return problem(check, "fix what the message names; if the versions differ: make build, or make install", "%v", err)
	case missing != "":
		return note(check, "docs/operations.md, \"What a worker may do\", says how to fix each; an executor that is root or has an "+
			"identity-dir does not start without --sandbox=on", "incomplete: %s", missing)
	}
	return ok(check, "complete: user ids, namespaces, filter of system calls, Landlock")
}

// Clocks of nodes that differ by more than this make "available until" wrong by as much; MUNGE refuses at 5 minutes.
const skewMost = 2 * time.Second

// checkClock compares this node's clock with the resource manager's, or asks the kernel whether it is kept right.
func (a *app) checkClock(ctx context.Context, manager string) finding {
	const check = "clock"
	const mend = "run chronyd, on all nodes with the same servers"
	if skew, within, err := a.skew(ctx, manager); err == nil {
		if skew.Abs() > skewMost+within {
			return problem(check, mend, "%v away from the resource manager's", skew.Round(time.Millisecond))
		}
		return ok(check, "%v away from the resource manager's, give or take %v", skew.Round(time.Millisecond), within.Round(time.Millisecond))
	}
	var t unix.Timex
	const unsynchronised = 5 // TIME_ERROR
	state, err := unix.Adjtimex(&t)
	switch {
	case err != nil:
		return note(check, mend, "the kernel does not say whether it is synchronised: %v", err)
	case state == unsynchronised:
		return note(check, mend, "not synchronised according to the kernel, and no resource manager answers to compare with")
	}
	return ok(check, "synchronised according to the kernel; no resource manager answers to compare with")
}

// skew is how far this node's clock is ahead of the manager's, and how sure that is.
func (a *app) skew(ctx context.Context, manager string) (skew, within time.Duration, err error) {
	conn, err := a.dial(manager)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, min(a.timeout, 3*time.Second))
	defer cancel()
	begin := time.Now()
	reply, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
	end := time.Now()
	if err != nil {
		return 0, 0, err
	}
	if reply.GetNowMs() == 0 {
		return 0, 0, fs.ErrInvalid // an older one
	}
	within = end.Sub(begin)/2 + time.Millisecond
	return begin.Add(end.Sub(begin) / 2).Sub(time.UnixMilli(int64(reply.GetNowMs()))), within, nil
}

// ownPort returns a daemon's address if it is a TCP port on loopback, else the default address.
func ownPort(address, byDefault string) string {
	if a, err := control.ParseAddress(address); err == nil && a.Network == "tcp" && a.Local() {
		return address
	}
	return byDefault
}

// checkListen tries to bind the ports of the daemons. A port in use gives a note and not a problem, because the daemon itself may use it.
func checkListen(addresses ...string) finding {
	const check = "ports"
	var free, taken []string
	for _, address := range addresses {
		l, err := control.Listen(address, false)
		switch {
		case err == nil:
			l.Close()
			free = append(free, address)
		case errors.Is(err, unix.EADDRINUSE):
			taken = append(taken, address)
		default:
			return problem(check, "set another --listen for the daemon, or ask the administrator which users may bind there", "%s: %v", address, err)
		}
	}
	if len(taken) > 0 {
		return note(check, "nothing to do if the checks of executor and resource manager find a daemon there; else choose another port by --listen (0: any)",
			"in use: %s", strings.Join(taken, ", "))
	}
	return ok(check, "%s are free; between nodes open them, and UDP 4791 for RoCE v2, in the firewall", strings.Join(free, ", "))
}
