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
