package agent

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// An agent that has no descriptors left refuses a new client with an error that says so, and serves the others.
func TestNoDescriptorsLeft(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "agent.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sh", "-c", `ulimit -n 64; exec "$0"`, built(t, "libexec/rfaas-agent"))
	cmd.ExtraFiles = []*os.File{f}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	page := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	defer page.Close()
	var served []*net.UnixConn
	greet := func() string { // returns the refusal, "" for none
		conn := dial(t, socket)
		if err := sendMessage(conn, message(protocol.OpHello, 1, hello()), page); err != nil {
			t.Fatal(err)
		}
		h, body, err := readMessage(conn)
		if err != nil {
			t.Fatalf("client %d: %v", len(served), err)
		}
		if h.Status == 0 {
			served = append(served, conn)
			return ""
		}
		text, err := protocol.DecodeFailure(h.Op, body)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		return text
	}
	refusal := ""
	for refusal == "" {
		refusal = greet()
	}
	if len(served) < 10 || !strings.Contains(refusal, "its limit is 64") || !strings.Contains(refusal, "ulimit -n") {
		t.Errorf("after %d clients: %s", len(served), refusal)
	}
	for _, conn := range served {
		if _, err := conn.Write(message(protocol.OpStatus, 2, nil)); err != nil {
			t.Fatal(err)
		}
		if h, _, err := readMessage(conn); err != nil || h.Status != 0 {
			t.Fatalf("a client that is served: status %d, %v", h.Status, err)
		}
	}
	for _, conn := range served[:len(served)/2] {
		conn.Close()
	}
	eventually(t, "a client is served again", func() bool { return greet() == "" })
}

// With which hard limits an agent serves.
func TestFitness(t *testing.T) {
	for _, c := range []struct {
		files, cpu   uint64
		warns, fails string
	}{
		{1024, unix.RLIM_INFINITY, "", ""},
		{64, 1, "after 1 s of processor time", ""},
		{63, unix.RLIM_INFINITY, "", "open files is 63, want at least 64"},
	} {
		warnings, err := fitness(func(resource int) (unix.Rlimit, error) {
			return unix.Rlimit{Max: map[int]uint64{unix.RLIMIT_NOFILE: c.files, unix.RLIMIT_CPU: c.cpu}[resource]}, nil
		})
		if text := strings.Join(warnings, "\n"); !strings.Contains(text, c.warns) || (c.warns == "") != (text == "") {
			t.Errorf("%+v: warnings %q", c, text)
		}
		if (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
