// Package etcdtest starts etcd for tests.
package etcdtest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Server is an etcd with one member.
type Server struct {
	Endpoint string

	t       testing.TB
	program string
	args    []string
	cmd     *exec.Cmd
	log     *os.File
}

// Start starts etcd on loopback, until the end of the test.
func Start(t testing.TB) *Server {
	t.Helper()
	program, err := exec.LookPath("etcd")
	if err != nil {
		testkit.Lacks(t, "etcd is missing: run make deps")
	}
	dir := t.TempDir()
	s := &Server{t: t, program: program, Endpoint: free(t)}
	client, peer := "http://"+s.Endpoint, "http://"+free(t)
	s.args = []string{"--name", "test", "--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "test=" + peer, "--unsafe-no-fsync"}
	if s.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Kill()
		s.log.Close()
		if t.Failed() {
			if b, err := os.ReadFile(s.log.Name()); err == nil {
				t.Logf("etcd:\n%s", b[max(0, len(b)-4000):])
			}
		}
	})
	s.Run()
	return s
}

// free returns an address on loopback that no process uses.
func free(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Run starts the process, also again after Kill, and waits until it accepts connections.
func (s *Server) Run() {
	s.t.Helper()
	s.cmd = exec.Command(s.program, s.args...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	testkit.Eventually(s.t, fmt.Sprintf("etcd listens at %s", s.Endpoint), func() bool {
		c, err := net.DialTimeout("tcp", s.Endpoint, time.Second)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// Kill ends the process. What it has acknowledged stays.
func (s *Server) Kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}
