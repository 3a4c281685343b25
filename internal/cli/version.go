package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/control"
)

func newVersion(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(a.Stdout, versionLine(a))
			return err
		},
	}
}

func versionLine(a *app) string {
	return fmt.Sprintf("rfaas %s (control protocol %d, %s, %s)", a.Version, control.ProtocolVersion, runtime.Version(), runtime.GOARCH)
}
