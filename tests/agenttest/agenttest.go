// Package agenttest runs an agent for the tests of a package. The user's own agent is not used.
package agenttest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Run runs tests with an agent (see Serve), and returns their exit status.
func Run(root string, tests func() int) int {
	stop, err := Serve(root)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer stop()
	return tests()
}

// Serve starts the agent that make has built in the repository at root. This process and its children use it. stop ends the agent,
// which also ends with this process.
func Serve(root string) (stop func(), err error) {
	dir, err := os.MkdirTemp("", "rfaas-agent-test")
	if err != nil {
		return nil, err
	}
	program, err := filepath.Abs(filepath.Join(root, "libexec/rfaas-agent"))
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "agent.sock")
	cmd := exec.Command(program, "--socket", socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	if err := errors.Join(os.Setenv("RFAAS_AGENT_SOCKET", socket), os.Setenv("RFAAS_AGENT", program)); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
			break
		}
		if time.Now().After(end) {
			return nil, err
		}
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		os.RemoveAll(dir)
	}, nil
}
