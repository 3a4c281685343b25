package sandbox

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// The groups of killed executors are removed, even if the executor was in a process namespace where its id is that of
// another process of the node. All other groups stay.
func TestLeftoversAreRemoved(t *testing.T) {
	dir := t.TempDir()
	self := groupPrefix()
	child := exec.Command("cat")
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if os.Geteuid() != 0 {
		child.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
	}
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		testkit.Lacks(t, "no process namespaces here: %v", err)
	}
	defer child.Wait()
	defer in.Close()
	fmt.Fprintln(in, "up")
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatal(line, err)
	}
	zombie := exec.Command("true")
	if err := zombie.Start(); err != nil {
		t.Fatal(err)
	}
	defer zombie.Wait()
	if err := unix.Waitid(unix.P_PID, zombie.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	space := nameSpace("/proc", fmt.Sprint(child.Process.Pid))
	ownSpace := nameSpace("/proc", "self")
	started := readStat(fmt.Sprintf("/proc/%d", child.Process.Pid)).start
	if space == "" || space == ownSpace || started == "" {
		t.Fatalf("namespaces %q and %q", space, ownSpace)
	}
	stay := []string{
		self + "1",                // ours
		self + "executor0",        // our own
		"rfaas-" + space + ".1-1", // of an earlier version, in a namespace that lives
		"rfaas-" + space + ".1-" + started + "-1",
		fmt.Sprintf("rfaas-%d-1", os.Getpid()), // of an earlier version, alive
	}
	gone := []string{
		"rfaas-1234.1-1",                   // of a namespace that has ended; process 1 lives always
		"rfaas-1234.8-2",                   //
		"rfaas-" + ownSpace + ".4194305-1", // no process can have this number
		fmt.Sprintf("rfaas-%s.%d-1", ownSpace, zombie.Process.Pid),
		"rfaas-4194305-1", // of an earlier version
		fmt.Sprintf("rfaas-%s.%d-1-1", ownSpace, os.Getpid()), // of an earlier process with this number
		"rfaas-" + space + ".1-1-1",                           // of an earlier namespace with this number
	}
	for _, name := range append(slices.Clone(stay), gone...) {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	removeDead([]string{dir, "/nonexistent"}, "/proc", false)
	for _, name := range gone {
		if _, err := os.Stat(filepath.Join(dir, name)); !strings.HasPrefix(name, "rfaas-"+ownSpace) && err != nil {
			t.Errorf("%s is removed, whose executor may be in a namespace that is not seen: %v", name, err)
		}
	}
	removeDead([]string{dir, "/nonexistent"}, "/proc", true)
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range left {
		names = append(names, l.Name())
	}
	slices.Sort(stay)
	if !slices.Equal(names, stay) {
		t.Errorf("left: %s\nwant: %s", strings.Join(names, " "), strings.Join(stay, " "))
	}
}
