package agent

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// The unit for a user's service manager starts an agent that reports when its socket listens. The agent needs only the variables that a
// service has. Its end is regular. No setting of the unit needs a user namespace.
func TestUserService(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "scripts/systemd/user/rfaas-agent.service"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var args []string
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch {
		case name == "ExecStart":
			args = strings.Fields(strings.NewReplacer("@PREFIX@/libexec/rfaas-agent", built(t, "libexec/rfaas-agent"), "%t", dir).Replace(value))
		case strings.HasPrefix(name, "Protect") || strings.HasPrefix(name, "Private") || slices.Contains([]string{"DeviceAllow", "DevicePolicy"}, name):
			t.Errorf("%s needs a user namespace, or closes /dev/infiniband", strings.TrimSpace(line))
		}
	}
	states, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer states.Close()
	next := func() string {
		b := make([]byte, 64)
		n, err := states.Read(b)
		if err != nil {
			return err.Error()
		}
		return string(b[:n])
	}
	var output bytes.Buffer
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "XDG_RUNTIME_DIR=" + dir, "NOTIFY_SOCKET=" + filepath.Join(dir, "notify")}
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		err := cmd.Wait()
		if conn, err := net.Dial("unixgram", filepath.Join(dir, "notify")); err == nil {
			conn.Write([]byte("the agent has ended")) // after all that it has sent
			conn.Close()
		}
		ended <- err
	}()
	if state := next(); state != "READY=1" {
		cmd.Process.Kill()
		t.Fatalf("%s, %v; the agent said:\n%s", state, <-ended, output.String())
	}
	conn, err := net.Dial("unix", filepath.Join(dir, "rfaas/agent.sock"))
	if err != nil {
		t.Errorf("the agent was ready, but: %v", err)
	} else {
		conn.Close()
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if state := next(); state != "STOPPING=1" {
		t.Errorf("%s, want STOPPING=1", state)
	}
	if err := <-ended; err != nil {
		t.Errorf("%v; the agent said:\n%s", err, output.String())
	}
}
