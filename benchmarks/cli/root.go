// Package cli is the program rfaas-bench, which `rfaas bench` executes: a command for each kind of measurement.
package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// Run runs the program with its arguments (without its name) and returns the exit status.
func Run(ctx context.Context, env command.Env, args []string) int {
	a := &app{Program: command.Program{Env: env}}
	return a.Run(ctx, newRoot(a), args)
}

// app is shared by the commands.
type app struct {
	command.Program
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "rfaas-bench",
		Short: "Compare calls with their floor",
		Long: `Compare calls with their floor: a careful program that moves the same bytes and does nothing else. rfaas bench executes
this program.

The commands start the programs that they measure. Only cold, control, leases, neighbour, others and scaling start executors or resource managers.
benchmarks/README.md describes the method.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	if a.Name != "" {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: a.Name}
	}
	root.AddCommand(newBenchLatency(a), newBenchGuard(a), newBenchCompare(a), newBenchCold(a), newBenchFloors(a), newBenchBandwidth(a), newBenchOthers(a),
		newBenchControl(a), newBenchLeases(a), newContact(a), newBenchScaling(a), newBenchNeighbour(a), newNeighbourJob(a), newBenchServe(a), newBenchReport(a), newEchoServer(a), newMan(a))
	a.Finish(root)
	return root
}

// newMan writes the manual pages of this program's commands.
func newMan(a *app) *cobra.Command {
	return &cobra.Command{
		Use:    "man DIRECTORY",
		Short:  "Write the manual pages of this program",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.WriteManual(c.Root(), args[0])
		},
	}
}
