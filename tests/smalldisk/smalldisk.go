// Package smalldisk lets a test fill a disk: it runs the test again where a small file system is mounted.
package smalldisk

import (
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

const env = "RFAAS_TEST_SMALL_DISK"

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
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}}
	out, err := cmd.CombinedOutput()
	began := strings.Contains(string(out), "=== RUN   "+t.Name()) // then what the test prints is not mount's
	if errors.Is(err, syscall.EPERM) || !began && strings.Contains(string(out), "mount:") {
		testkit.Lacks(t, "no namespaces here: %v %s", err, out)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("%v\n%s", err, out)
	}
}
