package capi

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// A set-user-ID program does not start the agent, nor listen at the socket, that the environment of its user names.
func TestSetUserIDProgram(t *testing.T) {
	crosses(t)
	testkit.Root(t, "can make a set-user-ID program of another user")
	const uid = 12345
	dir := t.TempDir()
	testkit.OpenUp(t, dir, 0o777)
	copied := func(from, name string) string {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name)
	}
	copied(built(t, "lib/librfaas.so"), "librfaas.so.0") // beside it there is no agent
	program := copied(build(t, "gcc", "testdata/secure_test.c", append([]string{"-Wl,--disable-new-dtags", "-Wl,-rpath," + dir}, c11...)...), "program")
	marker, agent := filepath.Join(dir, "marker"), filepath.Join(dir, "agent")
	if err := os.WriteFile(agent, []byte("#!/bin/sh\nid -u > "+marker+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(program, uid, uid); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(program, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll("/tmp/rfaas-12345") })
	cmd := exec.Command(program, "127.0.0.1:1")
	cmd.Env = append(os.Environ(), "RFAAS_AGENT="+agent, "RFAAS_AGENT_SOCKET="+filepath.Join(dir, "agent.sock"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), "the program rfaas-agent is not in") {
		t.Errorf("the program says %q, want that it finds no agent", out)
	}
	for _, path := range []string{marker, filepath.Join(dir, "agent.sock.lock")} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is there: the program has followed its user's environment", path)
		}
	}
}

// A program that has closed its standard files, and still writes to them, does not write to what the library has opened.
func TestClosedStandardFiles(t *testing.T) {
	crosses(t)
	env, _, address := agentCluster(t)
	cmd := exec.Command(build(t, "gcc", "testdata/start_test.c", c11...), address, "stdio")
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "0 0 \n" {
		t.Errorf("%v, %q, want status 0 and 0 of the files taken", err, out)
	}
}

// A child of a process that was starting an agent when it forked keeps others neither from the lock nor from noticing that
// the agent has been killed.
func TestForkWhileAgentStarts(t *testing.T) {
	crosses(t)
	env, socket, address := agentCluster(t)
	cmd := exec.Command(build(t, "gcc", "testdata/start_test.c", c11...), address, "fork")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	line := make([]byte, 200)
	n, err := out.Read(line)
	if err != nil || !strings.HasPrefix(string(line[:n]), "0 ") {
		t.Fatalf("%v, %q", err, line[:n])
	}
	if err := syscall.Kill(agentStatus(t, socket).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	lead(t, 1, 0, env...).do("init", "session")
}
