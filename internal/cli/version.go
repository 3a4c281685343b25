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
			_, err := fmt.Fprintf(a.Stdout, "rfaas %s (control protocol %d, %s, %s)\n", a.Version, control.ProtocolVersion,
				runtime.Version(), runtime.GOARCH)
			return err
		},
	}
}
