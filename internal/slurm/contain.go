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

// Contain runs a program so that nothing of it is left when it has ended, or when this process has: not even processes that
// forked twice and took a session of their own, which a batch system that follows parents loses. It does that with a process
// name space, whose first process is a small init. Where the system allows none, init adopts orphans and kills them at the
// end; then only SIGKILL to init itself lets orphans live.
type Contain struct {
	Init      []string // how to run RunInit in another process: a program and its first arguments
	Program   string
	Args      []string
	Env       []string      // nil: ours
	KillAfter time.Duration // from the first SIGTERM to SIGKILL for all; above 0
	Log       *slog.Logger
	NoSpace   bool // do without a name space
}

// initFlag tells init that it is not alone in its name space.
const initFlag = "--adopt"

// Run starts the program and returns its exit status when everything of it has ended, 128 and the number if a signal ended
// it. When ctx ends the program gets SIGTERM; to end by that is no failure then. Standard output and error are ours.
func (c *Contain) Run(ctx context.Context) (int, error) {
	// The signal of a parent's death follows the thread that started the child.
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
		ready.Read(make([]byte, 1)) // init closes its end, or has ended
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
	// The first process of a name space never gets signals that it does not catch.
	for waiting := listens; ; {
		select {
		case <-waiting:
			waiting = nil
			cmd.Process.Signal(syscall.SIGTERM)
			continue
		case err = <-done:
		case <-kill.C:
			c.Log.Warn("the program has not ended; killed with all that it started", "after", c.KillAfter)
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

// readyFD is where init finds the pipe that it closes when it listens to signals.
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
		c.Log.Warn("no process name space: the system refuses it, orphans are adopted instead", "error", err)
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
		// Who is not root needs a user name space, in which everybody stays who they are.
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	}
	return cmd
}

// ended returns the program's exit status. It removes what an executor that did not end by itself has left of its control groups.
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

// RunInit is the other side of Contain, in a process of its own: it runs the program after "--" in args, passes SIGTERM and
// SIGINT on, and reaps whatever loses its parent. It returns the program's exit status.
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
	// Not by os/exec, which would reap its child before the loop below can.
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
	return status, err // in a name space the kernel ends the rest with us
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

// endAll kills and reaps all children, and theirs as they become ours, until there are none.
func endAll() {
	for {
		for _, pid := range children() {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		// One at a time: its children are ours now, and are killed in the next round.
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
