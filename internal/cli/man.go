package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/rfaas-go/rfaas/internal/config"
)

// newMan makes the manual pages that make install installs: section 1 for rfaas and its commands, section 8 for the daemons.
func newMan(a *app) *cobra.Command {
	return &cobra.Command{
		Use:    "man DIRECTORY",
		Short:  "Write the manual pages of all programs",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			root.DisableAutoGenTag = true
			header := func(section string) *doc.GenManHeader {
				return &doc.GenManHeader{Section: section, Source: "rfaas " + a.Version, Manual: "rfaas"}
			}
			err := doc.GenManTreeFromOpts(root, doc.GenManTreeOptions{Path: args[0], CommandSeparator: "-", Header: header("1")})
			if err != nil {
				return fmt.Errorf("write manual pages: %w", err)
			}
			for _, u := range config.Usages() {
				daemon := &cobra.Command{
					Use:   u.Name,
					Short: u.About,
					Long:  u.About + ".\n\n" + strings.ReplaceAll(u.Sources, "_", `\_`) + "\n\nExit status: 0 ended as told, 1 failure, 2 wrong usage or settings.",
					Run:   func(*cobra.Command, []string) {},

					DisableAutoGenTag: true,
				}
				daemon.Flags().AddFlagSet(u.Flags)
				err := doc.GenManTreeFromOpts(daemon, doc.GenManTreeOptions{Path: args[0], CommandSeparator: "-", Header: header("8")})
				if err != nil {
					return fmt.Errorf("write manual pages: %w", err)
				}
			}
			return nil
		},
	}
}
