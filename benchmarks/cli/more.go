package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/benchmarks/control"
	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/benchmarks/neighbour"
	"github.com/rfaas-go/rfaas/benchmarks/others"
	"github.com/rfaas-go/rfaas/benchmarks/report"
	"github.com/rfaas-go/rfaas/benchmarks/scaling"
	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

func newBenchBandwidth(a *app) *cobra.Command {
	var b benchFlags
	c := &cobra.Command{
		Use:   "bandwidth",
		Short: "Bytes per second of calls in flight, compared with bare ones",
		Long: `Bytes per second of calls in flight, measured like latency with large payloads. bytes_per_s counts one direction; as many
bytes come back at the same time.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.measure(c.Context(), &b, "hot", latency.Run)
		},
	}
	b.common(c)
	b.connect(c)
	c.Flags().StringSliceVar(&b.payloads, "payload", []string{"4KiB", "64KiB", "1MiB", "4MiB"}, "bytes of payload, and of result")
	c.Flags().IntVar(&b.cfg.Depth, "depth", 4, "calls in flight")
	return c
}

func newBenchOthers(a *app) *cobra.Command {
	var b benchFlags
	var cfg others.Config
	c := &cobra.Command{
		Use:   "others",
		Short: "Alternatives on this machine, compared with the same floor",
		Long: `Alternatives on this machine, compared with the same floor: MPI_Send and MPI_Recv, UCX, unary gRPC in Go, HTTP
with keep-alive; and calls of the client library over TCP (rfaas-tcp). Systems that are not installed are skipped, and the output names
them.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b.modes = []string{"warm"}
			if err := b.complete(a); err != nil {
				return a.BadUsage(err)
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			if cfg.MPI == "" {
				if cfg.MPI, err = command.Beside("..", "build", "bench", "pingpong"); err != nil {
					return err
				}
			}
			if cfg.Executor, err = command.Beside("executor"); err != nil {
				return err
			}
			if cfg.Library, err = command.Beside("..", "build", "functions", "echo.so"); err != nil {
				return err
			}
			cfg.Latency, cfg.Self = b.cfg, []string{self, "echo-server"}
			return a.emitResults(&b.output, func(emit func(*latency.Result) error) error {
				return others.Run(c.Context(), cfg, emit)
			})
		},
	}
	b.common(c)
	f := c.Flags()
	f.StringSliceVar(&b.payloads, "payload", []string{"8", "64", "1KiB", "64KiB", "1MiB"}, "bytes of payload, and of result")
	f.StringSliceVar(&cfg.Only, "only", others.Names, "systems to measure")
	f.StringVar(&cfg.MPI, "mpi-program", "", "path of the MPI ping-pongs without .openmpi and .mpich (default: ../build/bench/pingpong beside this program)")
	for name, value := range map[string]string{"pairs": "5"} {
		f.Lookup(name).DefValue = value
		_ = f.Set(name, value)
	}
	return c
}

// newEchoServer is the server of gRPC and HTTP for the command others.
func newEchoServer(a *app) *cobra.Command {
	return &cobra.Command{Use: "echo-server KIND", Hidden: true, Args: cobra.ExactArgs(1), RunE: func(_ *cobra.Command, args []string) error {
		return others.Serve(args[0], os.Stdin, a.Stdout)
	}}
}

func newBenchControl(a *app) *cobra.Command {
	var b benchFlags
	var cfg control.Config
	c := &cobra.Command{
		Use:   "control",
		Short: "Placement, notifications, charges and heartbeats, compared with bare reads and fetch-and-adds",
		Long: `Placement, notifications, charges and heartbeats, compared with bare reads and fetch-and-adds. The command starts resource
managers with simulated executors on their boards. rfaas bench cold measures leases.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			b.modes, b.payloads = []string{"warm"}, []string{"64"}
			if err := b.complete(a); err != nil {
				return a.BadUsage(err)
			}
			if cfg.Manager == "" {
				if cfg.Manager, err = command.Beside("resource-manager"); err != nil {
					return err
				}
			}
			cfg.Latency = b.cfg
			charging := control.ChargingConfig{Manager: cfg.Manager, Provider: b.cfg.Provider, CPUs: b.cfg.CPUs, Pairs: b.cfg.Pairs}
			if charging.Executor, err = command.Beside("executor"); err != nil {
				return err
			}
			if charging.Library, err = command.Beside("..", "build", "functions", "echo.so"); err != nil {
				return err
			}
			if charging.Dir, err = os.MkdirTemp("", "rfaas-bench"); err != nil {
				return err
			}
			defer os.RemoveAll(charging.Dir)
			return a.emitResults(&b.output, func(emit func(*latency.Result) error) error {
				if err := control.Run(c.Context(), cfg, emit); err != nil {
					return err
				}
				r, err := control.Charging(c.Context(), charging)
				if err != nil {
					return err
				}
				return emit(r)
			})
		},
	}
	b.common(c)
	f := c.Flags()
	f.StringVar(&cfg.Manager, "manager-program", "", "path of the resource manager (default: beside this program)")
	f.IntSliceVar(&cfg.Executors, "executors", []int{10, 10_000}, "simulated executors on the boards that are compared")
	f.IntSliceVar(&cfg.Subscribers, "subscribers", []int{100, 300, 1000}, "mailboxes that get a change")
	f.IntVar(&cfg.Batch, "operations", 200, "operations of a batch")
	return c
}

func newBenchScaling(a *app) *cobra.Command {
	var cfg scaling.Config
	var out output
	var provider string
	c := &cobra.Command{
		Use:   "scaling",
		Short: "Calls per second with 1 to n workers and clients, compared with as many threads without calls",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := out.check(); err != nil {
				return a.BadUsage(err)
			}
			if provider != dataplane.SHM && provider != dataplane.Verbs {
				return a.BadUsage(fmt.Errorf("provider %q (shm, verbs)", provider))
			}
			if cfg.Max < 0 || cfg.Max > 1024 || cfg.Pairs < 1 {
				return a.BadUsage(fmt.Errorf("up to %d workers, %d pairs: want 1 to 1024 workers, and at least 1 pair", cfg.Max, cfg.Pairs))
			}
			if cfg.Executor == "" {
				if cfg.Executor, err = command.Beside("executor"); err != nil {
					return err
				}
			}
			if cfg.Library == "" {
				if cfg.Library, err = command.Beside("..", "build", "functions", "echo.so"); err != nil {
					return err
				}
			}
			dir, err := os.MkdirTemp("", "rfaas-bench")
			if err != nil {
				return err
			}
			defer os.RemoveAll(dir)
			cfg.Provider, cfg.Secret, cfg.Progress = provider, filepath.Join(dir, "secret"), a.progress()
			return a.emitResults(&out, func(emit func(*latency.Result) error) error {
				return scaling.Run(c.Context(), cfg, emit)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&provider, "provider", dataplane.SHM, "shm or verbs")
	f.IntVar(&cfg.Max, "max", 0, "largest number of workers and clients (default: the number of CPUs, at least 2)")
	f.IntVar(&cfg.Pairs, "pairs", 7, "pairs of floor and measurement for each result")
	f.DurationVar(&cfg.Batch, "batch", 100*time.Millisecond, "length of a batch")
	f.StringVar(&cfg.Library, "library", "", "library with the function spin (default: ../build/functions/echo.so beside this program)")
	f.StringVar(&cfg.Executor, "executor-program", "", "path of the executor (default: beside this program)")
	out.flags(c)
	return c
}

// newNeighbourJob is the job that rfaas-bench neighbour starts.
func newNeighbourJob(a *app) *cobra.Command {
	return &cobra.Command{Use: "neighbour-job", Hidden: true, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		return neighbour.ServeJob(os.Stdin, a.Stdout)
	}}
}

func newBenchNeighbour(a *app) *cobra.Command {
	var cfg neighbour.Config
	var out output
	c := &cobra.Command{
		Use:   "neighbour",
		Short: "Measure how workers of an executor with yield-after slow down another job of the node, and how soon their leases end",
		Long: `What the workers of an executor with yield-after do to another job of the node, and how soon they leave. Three kinds of jobs, with
a thread on each CPU, are timed alone and with workers that compute without a pause: a loop in registers, a stream over memory, and threads that
wait for each other. The ratio is the job's slowdown. The threads of a fourth kind sleep for 1 ms at a time. Its times are the delays
from the moment at which a thread should wake until it runs. A control follows each result: the job alone once more, or beside an ordinary program in
the workers' place. It shows what the machine does to the job without workers. The text of a result's method says for which part of its
time the job waited for a CPU, and how much more processor time it used than alone. Then the command measures the time from the start of a job on the CPUs
of a lease, and of one that takes the node's memory, to the end of the lease.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := out.check(); err != nil {
				return a.BadUsage(err)
			}
			for _, part := range cfg.Only {
				if !slices.Contains(neighbour.Parts, part) {
					return a.BadUsage(fmt.Errorf("--only: no part is called %q, want some of %s", part, strings.Join(neighbour.Parts, ", ")))
				}
			}
			if cfg.Pairs < 1 || cfg.Batch < time.Millisecond || cfg.Yield < 200*time.Millisecond || cfg.Yield > time.Minute {
				return a.BadUsage(fmt.Errorf("%d pairs, batches of %v, yield-after %v: want at least 1 pair, 1ms, and 200ms to 1m", cfg.Pairs, cfg.Batch, cfg.Yield))
			}
			if cfg.Executor == "" {
				if cfg.Executor, err = command.Beside("executor"); err != nil {
					return err
				}
			}
			if cfg.Library, err = command.Beside("..", "build", "functions", "echo.so"); err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Job = []string{self, "neighbour-job"}
			dir, err := os.MkdirTemp("", "rfaas-bench")
			if err != nil {
				return err
			}
			defer os.RemoveAll(dir)
			cfg.Secret, cfg.Progress = filepath.Join(dir, "secret"), a.progress()
			return a.emitResults(&out, func(emit func(*latency.Result) error) error {
				return neighbour.Run(c.Context(), cfg, emit)
			})
		},
	}
	f := c.Flags()
	f.StringSliceVar(&cfg.Only, "only", nil, "measure only these: jobs of the kinds compute, bandwidth, latency and wake-up, and the ends of leases (ends)")
	f.IntSliceVar(&cfg.CPUs, "cpus", nil, "CPUs of job and workers (default: all that this process may use)")
	f.IntVar(&cfg.Pairs, "pairs", 21, "pairs of batches for each result")
	f.DurationVar(&cfg.Batch, "batch", 100*time.Millisecond, "length of a batch")
	f.DurationVar(&cfg.Yield, "yield-after", 500*time.Millisecond, "setting of the executor whose lease has to end")
	f.StringVar(&cfg.Executor, "executor-program", "", "path of the executor (default: beside this program)")
	out.flags(c)
	return c
}

func newBenchReport(a *app) *cobra.Command {
	var out, headline string
	var check bool
	c := &cobra.Command{
		Use:   "report DIRECTORY",
		Short: "One report of a directory of results: tables, plots, promises",
		Long: `One report of a directory of results (*.jsonl from bench --json, *.log with figures that tests printed, machine.txt,
notes.txt): report.md, results.csv and plots in the directory --out.

With --readme the command writes the table and the plot of a README instead; with --check too, it only reports whether they are up to date.`,
		Example: "  rfaas bench report --out build/bench build/bench/results\n  rfaas bench report --readme README.md benchmarks/headline",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			d, err := report.Read(args[0])
			if err != nil {
				return err
			}
			if d.Empty() {
				return fmt.Errorf("%s: no results in it", args[0])
			}
			switch {
			case headline != "" && check:
				return report.CheckHeadline(d, args[0], headline)
			case headline != "":
				return report.Headline(d, args[0], headline)
			case check:
				return a.BadUsage(errors.New("--check needs --readme"))
			}
			if err := report.Write(d, out); err != nil {
				return err
			}
			fmt.Fprintln(a.Stdout, filepath.Join(out, "report.md"))
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&out, "out", ".", "directory of the report")
	f.StringVar(&headline, "readme", "", "README whose table and plot are written")
	f.BoolVar(&check, "check", false, "with --readme: change nothing, and fail if something would change")
	return c
}
