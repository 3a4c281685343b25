package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/rfaas-go/rfaas/internal/config"
)

// newMan writes manual pages: section 1 for rfaas and its commands, section 8 for the daemons. `make man` then
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
				daemon := &cobra.Command{
					Use:   u.Name,
					Short: u.About,
					Long:  u.About + ".\n\n" + strings.ReplaceAll(u.Sources, "_", `\_`) + "\n\nExit status: 0 ended as told, 1 failure, 2 wrong usage or settings.",
					Run:   func(*cobra.Command, []string) {},

					DisableAutoGenTag: true,
				}
				daemon.Flags().AddFlagSet(u.Flags)
				err := doc.GenManTreeFromOpts(daemon, doc.GenManTreeOptions{Path: args[0], CommandSeparator: "-", Header: a.ManHeader("8")})
				if err != nil {
					return fmt.Errorf("write manual pages: %w", err)
				}
			}
			return nil
		},
	}
}
