package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// The commands find the agent where the client library starts it.
func TestAgent(t *testing.T) {
	dir := t.TempDir()
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "rfaas", fmt.Sprintf("agent-%d.sock", st.Ino))
	run := func(args ...string) (int, string, string) {
		var out, wrong bytes.Buffer
		getenv := func(name string) string { return map[string]string{"XDG_RUNTIME_DIR": dir}[name] }
		code := Run(t.Context(), Env{Version: "v", Getenv: getenv, Stdout: &out, Stderr: &wrong}, append([]string{"agent"}, args...))
		return code, out.String(), wrong.String()
	}
	if code, _, wrong := run("status"); code != command.Failure || !strings.Contains(wrong, agent.ErrNone.Error()) {
		t.Errorf("without a directory: status %d, %q", code, wrong)
	}
	s, err := agent.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- agent.Serve(context.Background(), agent.Config{Socket: s, Version: "v9", Log: slog.New(slog.DiscardHandler)})
	}()
	if code, out, wrong := run("status"); code != command.OK || !strings.Contains(out, "v9") || !strings.Contains(out, socket) {
		t.Errorf("status %d, %q, %q", code, out, wrong)
	}
	code, out, _ := run("status", "--json")
	var found agent.Status
	if err := json.Unmarshal([]byte(out), &found); code != command.OK || err != nil || found.Version != "v9" {
		t.Errorf("status %d, %q: %v", code, out, err)
	}
	if code, _, wrong := run("stop"); code != command.OK {
		t.Errorf("status %d, %q", code, wrong)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if code, _, wrong := run("stop"); code != command.Failure || !strings.Contains(wrong, agent.ErrNone.Error()) {
		t.Errorf("without an agent: status %d, %q", code, wrong)
	}
	if code, _, _ := run("stop", "now"); code != command.Usage {
		t.Errorf("an argument too many: status %d", code)
	}
}

// The status lists the leases whose workers are cached, and prints no control characters of their names.
func TestAgentStatusOfCachedLeases(t *testing.T) {
	var out bytes.Buffer
	s := agent.Status{Cached: 4, Held: 14, Leases: []agent.CachedStatus{
		{Executor: "x:1", Node: "n1", Library: "a.so", Workers: 2, Shared: true, Orphaned: true},
		{Executor: "y:1", Node: "n2", Library: "b\x1b[2J.so", Workers: 1, Shared: true},
		{Executor: "z:1", Node: "n3", Library: "c.so", Workers: 1},
		{Executor: "z:1", Node: "n3", Library: "d.so", Workers: 1, Shared: true, Spare: true},
	}}
	if err := printAgent(&out, "socket", &s); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"4, with 14 descriptors for other processes", "a.so on n1 (x:1), workers: 2, of an ended session",
		".so on n2 (y:1), workers: 1, of any process", "c.so on n3 (z:1), workers: 1, of one process",
		"d.so on n3 (z:1), workers: 1, spare, for any process"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("a control character in %q", out.String())
	}
}
