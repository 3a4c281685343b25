package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/benchmarks/cold"
)

func newBenchCold(a *app) *cobra.Command {
	var cfg cold.Config
	var out output
	var modes []string
	var runs int
	c := &cobra.Command{
		Use:   "cold",
		Short: "Time from a lease's request to the first result, step by step",
		Long: `Time from a lease's request to the first result, step by step. cold: a new worker for each lease. pooled: a worker of the
executor's pool. spare: a worker of a spare lease, started ahead of demand. ahead: the same, given in advance at the release before (shm). cached: the worker of the lease before, which is
still connected (RFAAS_LEASE_REUSE) and frozen. awake: that worker within cache-awake, while it still polls for calls (shm). Each mode starts its own executor.`,
		Example: `  rfaas bench cold --provider shm --json
  rfaas bench cold --provider verbs --library libmine.so --function empty`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.check(); err != nil {
				return a.BadUsage(err)
			}
			if cfg.Leases < 1 {
				return a.BadUsage(fmt.Errorf("%d leases: want 1 to 100000", cfg.Leases))
			}
			if runs < 1 || runs > cold.MostRuns || runs%2 == 0 {
				return a.BadUsage(fmt.Errorf("%d runs: want an odd number, 1 to %d", runs, cold.MostRuns))
			}
			if !c.Flags().Changed("mode") {
				modes = cold.Modes(cfg.Provider)
			}
			for _, cfg.Mode = range modes {
				if err := cfg.Check(); err != nil {
					return a.BadUsage(err)
				}
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the directory of this program: %w", err)
			}
			if cfg.Executor == "" {
				cfg.Executor = filepath.Join(filepath.Dir(self), "executor")
			}
			if cfg.Peer == "" {
				cfg.Peer = filepath.Join(filepath.Dir(self), "..", "libexec", "rfaas-bench-peer")
			}
			if cfg.Library == "" { // in a source tree
				cfg.Library = filepath.Join(filepath.Dir(self), "..", "build", "functions", "echo.so")
			}
			cfg.Progress = a.progress()
			if cfg.Client == "c" && !c.Flags().Changed("rest") {
				cfg.Rest = cold.Rest
			}
			results, failed := cold.Series(c.Context(), cfg, modes, runs)
			if out.asCSV && len(results) > 0 {
				failed = errors.Join(cold.WriteCSV(a.Stdout, results...), failed)
			}
			for _, r := range results {
				switch {
				case out.asJSON:
					failed = errors.Join(cold.WriteJSON(a.Stdout, r), failed)
				case !out.asCSV:
					failed = errors.Join(cold.WriteTable(a.Stdout, r), failed)
				}
			}
			return failed
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Provider, "provider", "shm", "shm, verbs or tcp")
	f.StringVar(&cfg.Client, "client", "go", "language of the code that takes the leases: go or c")
	f.DurationVar(&cfg.Rest, "rest", 0, "how long a client in C sleeps between a release and the next request (default 5ms)")
	f.StringSliceVar(&modes, "mode", nil, "ways to start: "+strings.Join(cold.Modes("shm"), ", ")+" (default: all of the provider)")
	f.IntVar(&cfg.Leases, "leases", 200, "leases to measure")
	f.IntVar(&cfg.Workers, "workers", 1, "workers of each lease, at most 64")
	f.IntVar(&runs, "runs", 1, "runs of each mode, in turn; the output has the run with the median p50, and the p50 of all runs")
	f.Int64Var(&cfg.Bulk, "bulk", 0, "bytes of the channel's bulk area; 0: the client's default, negative: none")
	f.StringVar(&cfg.Library, "library", "", "library of functions (default: ../build/functions/echo.so beside this program)")
	f.StringVar(&cfg.Function, "function", "empty", "function of the library, called without a payload")
	f.StringVar(&cfg.Executor, "executor-program", "", "path of the executor (default: beside this program)")
	f.StringVar(&cfg.Peer, "peer", "", "path of rfaas-bench-peer, whose process start is measured for comparison (default: ../libexec beside this program)")
	out.flags(c)
	return c
}
