package cli

import (
	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

func newBenchFloors(a *app) *cobra.Command {
	var b benchFlags
	c := &cobra.Command{
		Use:   "floors",
		Short: "Bare round trips alone: ping-pongs, reads, fetch-and-adds",
		Long: `Bare round trips alone, interleaved in one pair of processes: ping-pongs on shm, write-with-immediate on verbs, and on both
the one-sided reads and fetch-and-adds of which placement and charging are made. The ratio is to the calibration.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.measure(c.Context(), &b, "warm", latency.RunFloors)
		},
	}
	b.common(c)
	b.connect(c)
	c.Flags().StringSliceVar(&b.payloads, "payload", []string{"8", "64", "576", "4KiB"}, "bytes")
	return c
}
