package cli

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/internal/config"
)

// newMan writes manual pages: section 1 for rfaas, its commands and rfaas-cc, section 8 for the daemons. `make man` then
// runs rfaas-bench, which writes rfaas-bench.1 and the pages of its commands into the same directory.
func newMan(a *app) *cobra.Command {
	return &cobra.Command{
		Use:    "man DIRECTORY",
		Short:  "Write the manual pages of this program and of the daemons",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.WriteManual(cmd.Root(), args[0]); err != nil {
				return err
			}
			for _, u := range config.Usages() {
				long := u.About + ".\n\n" + strings.ReplaceAll(u.Sources, "_", `\_`) + "\n\nExit status: 0 clean end, 1 failure, 2 wrong usage or settings."
				if err := a.writeDaemon(args[0], u.Name, u.About, long, u.Flags, ""); err != nil {
					return err
				}
			}
			about, flags := agent.Usage()
			name, about, _ := strings.Cut(about, ": ")
			short, _, _ := strings.Cut(about, ".")
			if err := os.WriteFile(filepath.Join(args[0], "rfaas-cc.1"), md2man.Render([]byte(compilerPage)), 0o644); err != nil {
				return fmt.Errorf("write manual pages: %w", err)
			}
			return a.writeDaemon(args[0], name, short, about, flags, agentSections)
		},
	}
}

// agentSections are the sections of rfaas-agent.8 that follow its flags, under a title.
//
//go:embed manual/rfaas-agent.md
var agentSections string

// compilerPage is rfaas-cc.1. rfaas-cc is a script (scripts/rfaas-cc).
//
//go:embed manual/rfaas-cc.md
var compilerPage string

// writeDaemon writes a daemon's page: what it is in a line and at length, its flags, and the sections of a Markdown text.
func (a *app) writeDaemon(dir, name, short, long string, flags *pflag.FlagSet, sections string) error {
	daemon := &cobra.Command{Use: name, Short: short, Long: long, Run: func(*cobra.Command, []string) {}, DisableAutoGenTag: true}
	daemon.Flags().AddFlagSet(flags)
	var page bytes.Buffer
	err := doc.GenMan(daemon, a.ManHeader("8"), &page)
	if err == nil {
		if _, after, ok := bytes.Cut(md2man.Render([]byte(sections)), []byte("\n.SH ")); ok { // before it: the title, which the page has
			fmt.Fprintf(&page, "\n.SH %s", after)
		}
		err = os.WriteFile(filepath.Join(dir, name+".8"), page.Bytes(), 0o644)
	}
	if err != nil {
		return fmt.Errorf("write manual pages: %w", err)
	}
	return nil
}
