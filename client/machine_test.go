package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// far is the address of tests/remote on the machine of the executors, empty if there is only one machine.
var far = os.Getenv("RFAAS_TEST_REMOTE")

// secondNode is the file of the second node's network namespace, empty if there is only one node. Both nodes have the same processes.
var secondNode = os.Getenv("TWO_NODES_NET")

// hostOf returns the address of this node or machine, or of the one of the executors (there), without a port.
func hostOf(t testing.TB, there bool) string {
	t.Helper()
	switch {
	case secondNode != "" && there:
		return os.Getenv("TWO_NODES_SECOND")
	case secondNode != "":
		return os.Getenv("TWO_NODES_FIRST")
	case far != "" && there:
		host, _, err := net.SplitHostPort(far)
		if err != nil {
			t.Fatal(err)
		}
		return host
	case far != "":
		return os.Getenv("SOFTROCE_ADDRESS")
	}
	return "127.0.0.1"
}

// fromSecondNode returns how many bytes this node has received from the second one.
func fromSecondNode(t testing.TB) (bytes int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/net/dev")
	if err != nil {
		t.Fatal(err)
	}
	_, counts, ok := strings.Cut(string(b), " cable:")
	if _, err := fmt.Sscan(counts, &bytes); !ok || err != nil {
		t.Fatalf("no bytes of the interface cable: %v\n%s", err, b)
	}
	return bytes
}

const remoteProgram = "build/twovm/remote"

// farShell runs a script on the machine of the executors.
func farShell(script string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(root, remoteProgram), "run", far, "--", "sh", "-c", script).Output()
	var e *exec.ExitError
	if errors.As(err, &e) {
		err = fmt.Errorf("%w: %s", err, e.Stderr)
	}
	return out, err
}

// readProc reads a file in /proc on the machine of the executors. An error counts as a missing file.
func readProc(pid int, file string) ([]byte, error) {
	path := fmt.Sprintf("/proc/%d/%s", pid, file)
	if far != "" {
		return farShell("cat " + path)
	}
	return os.ReadFile(path)
}

// kill sends a signal to a process of the machine of the executors.
func kill(t testing.TB, pid int, s syscall.Signal) {
	t.Helper()
	err := fmt.Errorf("it is not a process of another")
	switch {
	case pid <= 1:
	case far != "":
		_, err = farShell(fmt.Sprintf("kill -%d %d", s, pid))
	default:
		err = syscall.Kill(pid, s)
	}
	if err != nil {
		t.Fatalf("kill %d: %v", pid, err)
	}
}

// children returns the live processes that an executor's spawner has started: zygote, workers and their guards.
func children(t *testing.T, executor int) []int {
	t.Helper()
	for _, pid := range childrenOf(t, executor) {
		if name, _ := readProc(pid, "comm"); string(name) == "rfaas-spawner\n" {
			return childrenOf(t, pid)
		}
	}
	t.Fatalf("executor %d has no spawner", executor)
	return nil
}

func childrenOf(t *testing.T, pid int) (list []int) {
	t.Helper()
	var text []byte
	if far != "" {
		var err error
		if text, err = farShell(fmt.Sprintf("cat /proc/%d/task/*/children", pid)); err != nil {
			t.Fatalf("no tasks of process %d: %v", pid, err)
		}
	} else {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		if err != nil || len(tasks) == 0 {
			t.Fatalf("no tasks of process %d: %v", pid, err)
		}
		for _, task := range tasks {
			b, _ := os.ReadFile(task) // a thread may have ended
			text = append(append(text, b...), ' ')
		}
	}
	for _, f := range strings.Fields(string(text)) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, n)
	}
	return list
}

// withoutGuards leaves out the processes that keep the sandboxes of workers.
func withoutGuards(pids []int) (list []int) {
	for _, pid := range pids {
		if name, _ := readProc(pid, "comm"); string(name) != "rfaas-guard\n" {
			list = append(list, pid)
		}
	}
	return list
}

// running reports whether a process runs. A zombie does not.
func running(pid int) bool {
	b, err := readProc(pid, "stat")
	_, rest, ok := strings.Cut(string(b), ") ")
	return err == nil && ok && rest[0] != 'Z' && rest[0] != 'X'
}

// fixedManager is an address, on the managers' machine, at which several resource managers can listen one after the
// other.
func fixedManager(t testing.TB) string {
	t.Helper()
	if far == "" && secondNode == "" {
		return "unix:" + filepath.Join(t.TempDir(), "m")
	}
	return net.JoinHostPort(hostOf(t, os.Getenv("RFAAS_TEST_MANAGER") == "there"), "7464") // nothing else listens on these machines
}

// pid returns the daemon's process id on its machine.
func (d *daemon) pid() int {
	if d.far != 0 {
		return d.far
	}
	return d.cmd.Process.Pid
}

// signal sends a signal to the daemon itself, not to the program that runs it on another machine. It ignores a daemon
// that has ended.
func (d *daemon) signal(s syscall.Signal) {
	d.t.Helper()
	var err error
	if d.far != 0 && s != syscall.SIGTERM {
		_, err = farShell(fmt.Sprintf("kill -%d %[2]d || ! kill -0 %[2]d", s, d.far))
	} else {
		err = d.cmd.Process.Signal(s)
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		d.t.Fatalf("%v to process %d: %v", s, d.pid(), err)
	}
}
