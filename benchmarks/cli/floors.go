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
			b.clients, b.modes = []string{latency.ClientC}, []string{"warm"}
			if err := b.complete(a); err != nil {
				return a.BadUsage(err)
			}
			return a.emitResults(&b.output, func(emit func(*latency.Result) error) error {
				return latency.RunFloors(c.Context(), b.cfg, emit)
			})
		},
	}
	b.common(c)
	b.connect(c)
	c.Flags().StringSliceVar(&b.payloads, "payload", []string{"8", "64", "576", "4KiB"}, "bytes")
	return c
}
