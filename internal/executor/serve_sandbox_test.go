package executor

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// Without a setting, an executor that is root or has an identity requires a complete sandbox. A weaker setting is used,
// and logged.
func TestSandboxSetting(t *testing.T) {
	for _, tc := range []struct {
		args []string
		root bool
		want sandbox.Mode
		log  string
	}{
		{nil, true, sandbox.Require, ""},
		{nil, false, sandbox.On, ""},
		{[]string{"--identity-dir", "/etc/rfaas/identity"}, false, sandbox.Require, ""},
		{[]string{"--sandbox", "on"}, true, sandbox.On, "complete sandbox"},
		{[]string{"--sandbox", "on"}, false, sandbox.On, ""},
		{[]string{"--sandbox", "on", "--identity-dir", "/etc/rfaas/identity"}, false, sandbox.On, "complete sandbox"},
		{[]string{"--sandbox", "off"}, false, sandbox.Off, "not confined"},
	} {
		s, err := config.LoadExecutor(tc.args, []string{"HOME=/root"}, new(bytes.Buffer), "")
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		got := sandboxMode(&s, tc.root, slog.New(slog.NewTextHandler(&log, nil)))
		if got != tc.want || (log.Len() == 0) != (tc.log == "") || !strings.Contains(log.String(), tc.log) {
			t.Errorf("%q, root %v: %v, want %v; log %q", tc.args, tc.root, got, tc.want, &log)
		}
	}
}
