// Package smalldisk lets a test fill a disk. It runs the test again in a mount namespace with a small file system, or mounts one
// for the programs that the test starts.
package smalldisk

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

const env = "RFAAS_TEST_SMALL_DISK"

// apart are the attributes of a process in new user and mount namespaces.
func apart() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}}
}

// Hold mounts a file system of the given size in the mount namespace of a new process. It returns a directory on it, which
// other processes of this user can use too, and the process. Both are gone at the end of the test. Without namespaces it
// skips the test, or fails it if CI is set.
func Hold(t *testing.T, size string) (dir string, pid int) {
	t.Helper()
	at := t.TempDir()
	cmd := exec.Command("sh", "-c", `mount -t tmpfs -o size="$1" none "$0" && echo mounted && exec cat`, at, size)
	cmd.SysProcAttr = apart()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe() // cat ends when it is closed
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		testkit.Lacks(t, "no namespaces here: %v", err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		testkit.Lacks(t, "no namespaces here: %v %q %s", err, line, stderr.Bytes())
	}
	return filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "root", at), cmd.Process.Pid
}

// Run runs test, which must be the whole calling test, in a separate process and mount namespace. dir is empty and on a
// file system of the given size (an option of mount, like 256k). Without namespaces it skips the test, or fails it if
// CI is set.
func Run(t *testing.T, size string, test func(t *testing.T, dir string)) {
	t.Helper()
	if dir := os.Getenv(env); dir != "" {
		test(t, dir)
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `mount -t tmpfs -o size="$2" none "$0" && exec "$1" -test.run="$3" -test.v`, dir, self, size,
		"^"+regexp.QuoteMeta(t.Name())+"$")
	cmd.Env = append(os.Environ(), env+"="+dir)
	cmd.SysProcAttr = apart()
	out, err := cmd.CombinedOutput()
	began := strings.Contains(string(out), "=== RUN   "+t.Name()) // if not, the output is an error of mount
	if errors.Is(err, syscall.EPERM) || !began && strings.Contains(string(out), "mount:") {
		testkit.Lacks(t, "no namespaces here: %v %s", err, out)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("%v\n%s", err, out)
	}
}
