package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/slurm"
)

func newSlurm(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "slurm",
		Short: "Executors on the idle nodes of a Slurm cluster",
		Long: `Executors on the idle nodes of a Slurm cluster. They drain as soon as a job wants the node.

docs/slurm.md is the administrator's guide.`,
		Args: cobra.NoArgs,
	}
	c.AddCommand(newSlurmFollow(a), newSlurmStop(a), newSlurmRun(a), newSlurmInit(a), newSlurmNode(a), newSlurmStatus(a), newSlurmReplay(a),
		newSlurmHook(a, "prolog", "In Slurm's prolog: drain the node's executor",
			`Drain this node's executor before a job starts, and return when it has ended. The command never fails. It kills a node daemon that
does not answer in time, together with its executor. Without a node daemon it does nothing. The job is $SLURM_JOB_ID.`, 3*time.Second),
		newSlurmHook(a, "epilog", "In Slurm's epilog: lend the ended job's resources again",
			"Tell the node daemon that a job has ended and that its resources may be lent again. The command never fails. The job is $SLURM_JOB_ID.",
			time.Second))
	return c
}

// jobFlags name the executor jobs.
type jobFlags struct{ partition, prefix string }

func (f *jobFlags) register(c *cobra.Command) {
	c.Flags().StringVar(&f.partition, "partition", "", "partition of the executor jobs, one whose jobs are preempted (mandatory)")
	c.Flags().StringVar(&f.prefix, "job-name", "rfaas-", "beginning of the jobs' names; the node's name follows")
	c.MarkFlagRequired("partition")
}

func newSlurmFollow(a *app) *cobra.Command {
	var j jobFlags
	f := slurm.Follow{Policy: defaultPolicy()}
	var logLevel slog.Level
	var manager string
	c := &cobra.Command{
		Use:   "follow --partition PARTITION [flags] [-- SBATCH-ARGS...]",
		Short: "Keep one executor job for each idle node",
		Long: `Keep one executor job for each node of a partition whose jobs are preempted. The job runs where the node is idle and waits
where it is not, so that the scheduler starts it as soon as the node becomes idle.

The controller keeps no state outside of Slurm: the jobs' names say for which node they are. You can kill and restart it at any
time, or run several at once. When it is killed the jobs stay. "rfaas slurm stop" cancels them and ends the controller with
status 0. It runs anywhere where sbatch works, as the user that is to own the jobs. Settings of the executors are in the job
script or in the environment (RFAAS_EXECUTOR_MANAGER and others), which sbatch passes on.

Executors publish when their job ends. When the scheduler's plan gives a node to another job earlier or later than before, the
controller tells its executor, whose address it gets from the resource manager.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			f.Partition, f.Prefix, f.Args = j.partition, j.prefix, args
			f.Log = slog.New(slog.NewTextHandler(a.Stderr, &slog.HandlerOptions{Level: logLevel}))
			if manager != "" {
				v, err := a.openBoard(manager)
				if err != nil {
					return err
				}
				defer v.close()
				f.Publish = a.publishUntil(v)
			}
			if f.Script == "" {
				var err error
				if f.Script, err = defaultScript("executor.sbatch"); err != nil {
					return err
				}
			}
			return f.Run(c.Context())
		},
	}
	j.register(c)
	fl := c.Flags()
	fl.StringVar(&f.Script, "script", "", "job script (default: ../share/rfaas/slurm/executor.sbatch beside this program)")
	fl.DurationVar(&f.Interval, "interval", time.Second, "how often Slurm is asked for nodes and jobs")
	fl.DurationVar(&f.PlanEvery, "plan-interval", 15*time.Second, "how often it is asked for its plan")
	policyFlags(fl, &f.Policy)
	a.addressFlag(c, &manager, "manager", "RFAAS_EXECUTOR_MANAGER", "", "address of the executors' resource manager; none: the plan is not published")
	fl.TextVar(&logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	return c
}

// publishUntil is how the controller finds executors and tells them when their nodes are wanted back.
func (a *app) publishUntil(v *boardView) *slurm.Publish {
	return &slurm.Publish{
		Executors: func(ctx context.Context) ([]slurm.Lent, error) {
			rows, err := v.list(ctx)
			var lent []slurm.Lent
			for _, r := range rows {
				if r.State == "silent" || r.State == "draining" || r.reachable() != nil {
					continue
				}
				e := slurm.Lent{Node: r.Node, Address: r.Address}
				if r.Until > 0 {
					e.Until = time.Unix(int64(r.Until), 0)
				}
				lent = append(lent, e)
			}
			return lent, err
		},
		Tell: func(ctx context.Context, address string, until time.Time) error {
			return a.onExecutor(ctx, address, func(ctx context.Context, e control.ExecutorClient) error {
				_, err := e.Until(ctx, &control.UntilRequest{Until: uint64(until.Unix())})
				return err
			})
		},
	}
}

func defaultPolicy() slurm.Policy {
	return slurm.Policy{Longest: 4 * time.Hour, Shortest: time.Minute, LeastGap: 20 * time.Second, Ahead: true, MaxAhead: 256, Rate: 10, Burst: 64,
		Again: time.Second, AgainMost: 5 * time.Minute}
}

func policyFlags(f *pflag.FlagSet, p *slurm.Policy) {
	f.DurationVar(&p.Longest, "longest", p.Longest, "time limit of a job on a node that is not in the scheduler's plan")
	f.DurationVar(&p.Shortest, "shortest", p.Shortest, "shortest time limit, and --time-min of the jobs while other jobs wait for nodes")
	f.DurationVar(&p.LeastGap, "least-gap", p.LeastGap, "leave a node alone that is wanted sooner than this")
	f.BoolVar(&p.Ahead, "ahead", p.Ahead, "submit jobs for busy nodes too, which wait")
	f.IntVar(&p.MaxAhead, "max-ahead", p.MaxAhead, "most jobs that wait for busy nodes")
	f.Float64Var(&p.Rate, "rate", p.Rate, "submissions per second, on average")
	f.IntVar(&p.Burst, "burst", p.Burst, "submissions at once")
	f.DurationVar(&p.Again, "again", p.Again, "shortest time between two submissions for one node")
	f.DurationVar(&p.AgainMost, "again-most", p.AgainMost, "longest such time; it doubles each time the node's jobs fail")
}

func newSlurmStop(a *app) *cobra.Command {
	var j jobFlags
	c := &cobra.Command{
		Use:   "stop --partition PARTITION",
		Short: "Cancel the executor jobs, and end the controllers that submit them",
		Long: `Cancel the executor jobs of a partition, running and waiting ones. Controllers ("rfaas slurm follow") of the same user, partition
and job names notice that within their --interval and end. A controller without a job at that time does not notice: end it by
hand.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			f := slurm.Follow{Partition: j.partition, Prefix: j.prefix}
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			n, err := f.Stop(ctx, time.Second)
			if err == nil {
				fmt.Fprintf(a.Stdout, "%d jobs cancelled\n", n)
			}
			return err
		},
	}
	j.register(c)
	return c
}

func newSlurmRun(a *app) *cobra.Command {
	var program string
	var killAfter time.Duration
	var noSpace bool
	c := &cobra.Command{
		Use:   "run [flags] [-- EXECUTOR-ARGS...]",
		Short: "In a job: run an executor that knows when the job ends and leaves nothing behind",
		Long: `Run an executor in a Slurm job. The executor gets the end of the job's time (--until) and SIGTERM at once. None of its
processes is left when it has ended: it runs in its own process namespace where the system allows one.

The exit status is the executor's.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			log := slog.New(slog.NewTextHandler(a.Stderr, nil))
			if program == "" {
				var err error
				if program, err = command.Beside("executor"); err != nil {
					return err
				}
			}
			// Further ones must not end us while the executor drains.
			repeated := make(chan os.Signal, 1)
			signal.Notify(repeated, syscall.SIGTERM)
			defer signal.Stop(repeated)
			run := slurm.Contain{Init: []string{"/proc/self/exe", "slurm", "init"}, Program: program, Args: args,
				Env: a.jobEnv(c.Context(), log), KillAfter: killAfter, Log: log, NoSpace: noSpace}
			status, err := run.Run(c.Context())
			if err == nil && status != 0 {
				err = command.ExitStatus(status)
			}
			return err
		},
	}
	c.Flags().StringVar(&program, "program", "", "the executor (default: beside this program)")
	c.Flags().DurationVar(&killAfter, "kill-after", 3*time.Second, "from SIGTERM until everything is killed: give the executor a --grace that is less")
	c.Flags().BoolVar(&noSpace, "no-namespace", false, "adopt orphans instead of using a process namespace")
	return c
}

// jobEnv is the environment for an executor in a job: ours, and when the job ends.
func (a *app) jobEnv(ctx context.Context, log *slog.Logger) []string {
	const until = "RFAAS_EXECUTOR_UNTIL"
	env := os.Environ()
	job := a.Getenv("SLURM_JOB_ID")
	if job == "" || a.Getenv(until) != "" {
		return env
	}
	if end := a.Getenv("SLURM_JOB_END_TIME"); end != "" { // Slurm 23.02 and later
		return append(env, until+"="+end)
	}
	end, err := (&slurm.Commands{Timeout: 2 * time.Second}).EndTime(ctx, job)
	if err != nil {
		log.Warn("the end of the job is not known", "job", job, "error", err)
		return env
	}
	return append(env, until+"="+strconv.FormatInt(end.Unix(), 10))
}

func newSlurmInit(*app) *cobra.Command {
	return &cobra.Command{
		Use:                "init",
		Hidden:             true, // slurm run starts it
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			status, err := slurm.RunInit(args)
			if err == nil && status != 0 {
				err = command.ExitStatus(status)
			}
			return err
		},
	}
}

// defaultScript finds a file of scripts/slurm, installed or in the source tree.
func defaultScript(name string) (string, error) {
	for _, dir := range []string{"share/rfaas/slurm", "scripts/slurm"} {
		path, err := command.Beside("..", dir, name)
		if err != nil {
			return "", err
		}
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", errors.New("no " + name + " beside this program: name it by --script")
}
