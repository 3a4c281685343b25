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
		Long: `Bare round trips alone, interleaved in one pair of processes: on shm ping-pongs, on verbs write-with-immediate, and on both
one-sided reads and fetch-and-adds, which are what placement and charging are made of. The ratio is to the calibration.`,
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
