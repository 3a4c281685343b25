package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/control"
)

// newCordon makes the command cordon, or its opposite.
func newCordon(a *app, cordon bool) *cobra.Command {
	var manager, reason string
	c := &cobra.Command{
		Use:   "cordon NODE",
		Short: "Take a node out of use: its executors grant no new leases",
		Long: "Take a node out of use: its executors grant no new leases, and existing leases continue. NODE is the control address of an executor, or a host name as\n" +
			"rfaas executors prints it: then all executors of that node. rfaas uncordon NODE ends it, and so does a restart of the executor. To end the leases too, use rfaas drain.",
		Args: cobra.ExactArgs(1),
	}
	done := "is cordoned"
	if !cordon {
		c.Use, c.Short, done = "uncordon NODE", "Put a node back into use after rfaas cordon", "accepts leases"
		c.Long = "Put a node back into use after rfaas cordon. NODE is as for rfaas cordon."
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		addresses, err := a.executorsOf(c.Context(), manager, args[0])
		if err != nil {
			return err
		}
		var errs []error
		for _, address := range addresses {
			err := a.onExecutor(c.Context(), address, func(ctx context.Context, e control.ExecutorClient) error {
				_, err := e.Cordon(ctx, &control.CordonRequest{Cordon: cordon, Reason: reason})
				return err
			})
			if errs = append(errs, err); err == nil {
				fmt.Fprintf(a.Stdout, "%s %s\n", address, done)
			}
		}
		return errors.Join(errs...)
	}
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager")
	if cordon {
		c.Flags().StringVar(&reason, "reason", "", "reason to report to clients that ask for a lease")
	}
	return c
}
