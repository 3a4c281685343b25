package slurm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// Contain runs a program and ensures that none of its processes is left when it, or this process, has ended. That
// includes processes that forked twice and started a session, which a batch system that follows parents loses. It uses
// a process namespace, whose first process is a small init. Where the system does not allow namespaces, init adopts
// orphans and kills them at the end. Then orphans survive only if init itself gets SIGKILL.
type Contain struct {
	Init      []string // how to run RunInit in another process: a program and its first arguments
	Program   string
	Args      []string
	Env       []string      // nil: this process's environment
	KillAfter time.Duration // time from the first SIGTERM to SIGKILL for all; above 0
	Log       *slog.Logger
	NoSpace   bool // do not use a namespace
}

// initFlag tells init that it shares its namespace with other processes.
const initFlag = "--adopt"

// Run starts the program and blocks until all its processes have ended. It returns the exit status; 128 plus the signal
// number if a signal ended it. When ctx ends the program gets SIGTERM; ending by that signal counts as success.
// Standard output and error are those of this process.
func (c *Contain) Run(ctx context.Context) (int, error) {
	// The parent death signal is tied to the thread that started the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer ready.Close()
	cmd, err := c.start(theirs)
	theirs.Close()
	if err != nil {
		return 0, err
	}
	listens := make(chan struct{})
	go func() {
		ready.Read(make([]byte, 1)) // init has closed its end, or has ended
		close(listens)
	}()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err = <-done:
		return ended(cmd, err)
	case <-ctx.Done():
	}
	kill := time.NewTimer(c.KillAfter)
	defer kill.Stop()
	// The first process of a namespace gets only signals that it catches, so wait until init is ready.
	for waiting := listens; ; {
		select {
		case <-waiting:
			waiting = nil
			cmd.Process.Signal(syscall.SIGTERM)
			continue
		case err = <-done:
		case <-kill.C:
			c.Log.Warn("killed the program and all its processes, because it has not ended", "after", c.KillAfter)
			cmd.Process.Kill()
			err = <-done
		}
		break
	}
	status, err := ended(cmd, err)
	if status == 128+int(syscall.SIGTERM) {
		status = 0
	}
	return status, err
}

// readyFD is the pipe that init closes when it handles signals.
const readyFD = 3

func (c *Contain) start(ready *os.File) (*exec.Cmd, error) {
	if !c.NoSpace {
		cmd := c.command(false, ready)
		err := cmd.Start()
		if err == nil {
			return cmd, nil
		}
		if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EACCES) {
			return nil, fmt.Errorf("start %s: %w", c.Init[0], err)
		}
		c.Log.Warn("the system refuses a process namespace; adopting orphans instead", "error", err)
	}
	cmd := c.command(true, ready)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Init[0], err)
	}
	return cmd, nil
}

func (c *Contain) command(adopt bool, ready *os.File) *exec.Cmd {
	args := c.Init[1:len(c.Init):len(c.Init)]
	if adopt {
		args = append(args, initFlag)
	}
	args = append(append(args, "--", c.Program), c.Args...)
	cmd := exec.Command(c.Init[0], args...)
	cmd.Stdout, cmd.Stderr, cmd.Env = os.Stdout, os.Stderr, c.Env
	cmd.ExtraFiles = []*os.File{ready}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if adopt {
		return cmd
	}
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWPID
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		// Other users than root need a user namespace, in which all ids stay the same.
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	}
	return cmd
}

// ended returns the program's exit status. If an executor did not end by itself, it removes the executor's control
// groups.
func ended(cmd *exec.Cmd, err error) (int, error) {
	status, err := exitStatus(cmd, err)
	if status != 0 {
		sandbox.RemoveLeftovers()
	}
	return status, err
}

func exitStatus(cmd *exec.Cmd, err error) (int, error) {
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, err
	}
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return status.ExitStatus(), nil
}

// RunInit is the init process of Contain. It runs the program after "--" in args, forwards SIGTERM and SIGINT, and
// reaps orphans. It returns the program's exit status.
func RunInit(args []string) (int, error) {
	adopt := len(args) > 0 && args[0] == initFlag
	if adopt {
		args = args[1:]
	}
	if len(args) < 2 || args[0] != "--" {
		return 0, fmt.Errorf("init: arguments %q: want -- and a program", args)
	}
	if adopt {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return 0, fmt.Errorf("init: PR_SET_CHILD_SUBREAPER: %w", err)
		}
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	os.NewFile(readyFD, "ready").Close()
	// os/exec would reap its child before the loop below can.
	p, err := os.StartProcess(args[1], args[1:], &os.ProcAttr{Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return 0, fmt.Errorf("init: %w", err)
	}
	go func() {
		for s := range signals {
			syscall.Kill(p.Pid, s.(syscall.Signal))
		}
	}()
	status, err := reapUntil(p.Pid)
	if adopt {
		endAll()
	}
	return status, err // in a namespace the kernel then ends all other processes
}

// reapUntil reaps children until pid has ended, and returns its exit status.
func reapUntil(pid int) (int, error) {
	for {
		var status unix.WaitStatus
		got, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, fmt.Errorf("init: wait4: %w", err)
		case got != pid:
		case status.Signaled():
			return 128 + int(status.Signal()), nil
		default:
			return status.ExitStatus(), nil
		}
	}
}

// endAll kills and reaps all children, including those that become children when their parents die, until none is left.
func endAll() {
	for {
		for _, pid := range children() {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		// Reap one at a time: its children are now this process's, and are killed in the next round.
		if _, err := unix.Wait4(-1, nil, 0, nil); err != nil && err != unix.EINTR {
			return
		}
	}
}

// children lists the processes whose parent is this one.
func children() []int {
	var list []int
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	self := os.Getpid()
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // ended
		}
		_, rest, _ := strings.Cut(string(text[max(0, strings.LastIndexByte(string(text), ')')):]), " ") // after the name: state, parent
		f := strings.Fields(rest)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if len(f) > 1 && err == nil && f[1] == strconv.Itoa(self) {
			list = append(list, pid)
		}
	}
	return list
}
