package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/slurm"
)

func newSlurmReplay(a *app) *cobra.Command {
	r := slurm.DefaultReplay()
	r.Policy = defaultPolicy()
	var asJSON bool
	c := &cobra.Command{
		Use:   "replay",
		Short: "Simulate the controller on a synthetic day of idle gaps, and print how much of the gaps it would use",
		Long: `Simulate "rfaas slurm follow" on a synthetic day of idle gaps, event by event, with times that were measured on a
real Slurm. Gaps and busy times are log-normal, given by median and 95th percentile. The scheduler's plan shows the end of the
known gaps. In these, Slurm starts executors in its backfill only, for whole minutes. The other gaps end by preemption.

With --yield-after, executors stay on their nodes and lend a core when the jobs have not used it for twice that time. Then the controller and the
times of executor jobs play no part. Neighbours that share a core, memory that is short, and the supply of calls are not modelled.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			res, err := r.Run()
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(res)
			}
			ms := func(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
			fmt.Fprintf(a.Stdout, "%d nodes for %v: %.1f %% of the node time idle, in %d gaps, %d of them over a minute\n", r.Nodes, r.Length,
				100*res.IdleShare, res.Gaps, res.LongGaps)
			fmt.Fprintf(a.Stdout, "lent: %.1f %% of the idle time in gaps over a minute, %.1f %% of all\n", 100*res.CoveredLong, 100*res.Covered)
			for _, c := range res.ByLength {
				fmt.Fprintf(a.Stdout, "  gaps from %v: %d, %.1f %% of their time\n", c.From, c.Gaps, 100*c.Covered)
			}
			fmt.Fprintf(a.Stdout, "%d executor jobs, %d of them preempted, which cost the job that wanted the node %v (median), %v (p95)\n", res.Jobs,
				res.Preempted, ms(res.WaitMedian), ms(res.WaitP95))
			return nil
		},
	}
	f := c.Flags()
	spread := func(s *slurm.Spread, name, what string) {
		f.DurationVar(&s.Median, name+"-median", s.Median, what+", median")
		f.DurationVar(&s.P95, name+"-p95", s.P95, what+", 95th percentile")
	}
	f.Uint64Var(&r.Seed, "seed", r.Seed, "of what is random")
	f.IntVar(&r.Nodes, "nodes", r.Nodes, "nodes")
	f.DurationVar(&r.Length, "length", r.Length, "of the replay")
	spread(&r.Gap, "gap", "length of an idle gap")
	spread(&r.Busy, "busy", "time between two gaps of a node")
	f.Float64Var(&r.Known, "known", r.Known, "share of the gaps whose end the plan shows")
	spread(&r.Start, "start", "from a job that could start to its executor in the list")
	spread(&r.Drain, "drain", "from preemption to the start of the job that wants the node")
	f.DurationVar(&r.Grace, "grace", r.Grace, "of the executors")
	f.DurationVar(&r.SchedDelay, "sched-delay", r.SchedDelay, "Slurm's batch_sched_delay")
	f.DurationVar(&r.Backfill, "backfill", r.Backfill, "Slurm's bf_interval")
	f.DurationVar(&r.Interval, "interval", r.Interval, "how often the controller looks")
	f.DurationVar(&r.Yield, "yield-after", r.Yield, "yield-after of executors that stay on their nodes beside the jobs; 0: executors are jobs")
	f.DurationVar(&r.Lease, "lease", r.Lease, "with --yield-after: time that a lease takes to start")
	policyFlags(f, &r.Policy)
	f.BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}
