package cli

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/config"
)

// Every program and every command has a page, and the page names every flag.
func TestManualPages(t *testing.T) {
	dir := t.TempDir()
	env := Env{Version: "test", Getenv: func(string) string { return "" }, Stdout: io.Discard, Stderr: t.Output()}
	if code := Run(t.Context(), env, []string{"man", dir}); code != command.OK {
		t.Fatalf("exit code %d", code)
	}
	pages := 0
	check := func(page string, flags ...*pflag.FlagSet) {
		pages++
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil {
			t.Error(err)
			return
		}
		plain := strings.ReplaceAll(string(text), `\-`, "-")
		for _, set := range flags {
			set.VisitAll(func(f *pflag.Flag) {
				if !f.Hidden && !strings.Contains(plain, "--"+f.Name) {
					t.Errorf("%s does not name --%s", page, f.Name)
				}
			})
		}
	}
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if !c.IsAvailableCommand() && c.HasParent() {
			return
		}
		check(strings.ReplaceAll(c.CommandPath(), " ", "-")+".1", c.NonInheritedFlags(), c.InheritedFlags())
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(&app{Program: command.Program{Env: env}}))
	for _, u := range config.Usages() {
		check(u.Name+".8", u.Flags)
	}
	_, flags := agent.Usage()
	check("rfaas-agent.8", flags)
	page, _ := os.ReadFile(filepath.Join(dir, "rfaas-agent.8"))
	for _, want := range []string{".SH ENVIRONMENT\n", "RFAAS_AGENT\n", "RFAAS_AGENT_SOCKET\n", "RFAAS_AGENT_START\n", "RFAAS_AGENT_LINGER\n", ".SH SIGNALS\n",
		".SH FILES\n", ".SH EXIT STATUS\n"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("rfaas-agent.8 does not have %q", want)
		}
	}
	if n := strings.Count(string(page), ".TH "); n != 1 {
		t.Errorf("rfaas-agent.8 has %d titles", n)
	}
	options, _ := os.ReadFile("../../scripts/rfaas-cc")
	page, _ = os.ReadFile(filepath.Join(dir, "rfaas-cc.1"))
	for _, m := range regexp.MustCompile(`(?m)^  (--?[a-z]+)`).FindAllStringSubmatch(string(options), -1) {
		if !strings.Contains(strings.ReplaceAll(string(page), `\-`, "-"), m[1]) {
			t.Errorf("rfaas-cc.1 does not name %s", m[1])
		}
	}
	if made, _ := filepath.Glob(filepath.Join(dir, "*")); len(made) < pages || pages < 20 {
		t.Errorf("%d files for %d pages", len(made), pages)
	}
}
