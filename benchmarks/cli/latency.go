package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// benchFlags are the flags of several commands.
type benchFlags struct {
	output
	cfg      latency.Config
	modes    []string
	payloads []string
	result   string
}

func (b *benchFlags) common(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&b.cfg.Provider, "provider", dataplane.SHM, "shm or verbs")
	f.IntVar(&b.cfg.Pairs, "pairs", 15, "good pairs of floor and measurement wanted for each result; three times as many, from several peers, for one small call at a time with spinning waiters")
	f.DurationVar(&b.cfg.Batch, "batch", 0, "length of a batch (default: spinning 5ms on shm, 20ms on verbs within a machine; otherwise 10ms)")
	f.IntVar(&b.cfg.Rounds, "rounds", 0, "calls of a batch, instead of --batch")
	f.DurationVar(&b.cfg.Duration, "duration", 30*time.Second, "longest time for one result")
	f.IntSliceVar(&b.cfg.CPUs, "cpus", nil, "CPUs of client and peer (default: two of different cores)")
	f.IntVar(&b.cfg.Slots, "slots", 0, "slots of the channel (default: 8, or --depth if that is more)")
	f.IntVar(&b.cfg.Eager, "eager", dataplane.DefaultEager, "bytes of payload that fit into a slot")
	f.StringVar(&b.cfg.Function, "function", "", "echo (copies) or empty (default: echo on shm, whose floor also copies; empty on verbs)")
	f.StringVar(&b.cfg.Buffers, "buffers", "", "payload and result of the client: copied from and to its memory, or registered (default: copied on shm, registered on verbs)")
	deviceFlags(c, &b.cfg.Device, &b.cfg.Peer)
	b.output.flags(c)
}

// connect adds the flag of commands whose peer may be on another machine.
func (b *benchFlags) connect(c *cobra.Command) {
	c.Flags().StringVar(&b.cfg.Remote, "connect", "", "verbs: HOST:PORT of rfaas bench serve on the peer's machine (default: the peer is started on this machine)")
}

// deviceFlags adds the flags that select the verbs device and the peer program.
func deviceFlags(c *cobra.Command, d *dataplane.Options, peer *string) {
	f := c.Flags()
	f.StringVar(&d.Device, "device", "", "verbs: device (default: the first with an active port)")
	f.IntVar(&d.Port, "port", 0, "verbs: port (default: the first active one)")
	f.IntVar(&d.GIDIndex, "gid-index", -1, "verbs: GID index (default: chosen)")
	f.IntVar(&d.PKeyIndex, "pkey-index", 0, "verbs: P_Key index")
	f.IntVar(&d.TrafficClass, "traffic-class", 0, "verbs: traffic class")
	f.IntVar(&d.ServiceLevel, "service-level", 0, "verbs: service level")
	f.IntVar(&d.MTU, "mtu", 0, "verbs: MTU (default: the port's)")
	f.StringVar(peer, "peer", "", "path of rfaas-bench-peer (default: ../libexec/rfaas-bench-peer beside this program)")
}

// output selects the format of results.
type output struct{ asJSON, asCSV bool }

func (o *output) flags(c *cobra.Command) {
	c.Flags().BoolVar(&o.asJSON, "json", false, "print a JSON object per result, one a line")
	c.Flags().BoolVar(&o.asCSV, "csv", false, "print comma-separated values")
}

func (o *output) check() error {
	if o.asJSON && o.asCSV {
		return errors.New("--json and --csv: use one of them")
	}
	return nil
}

// emitResults executes a measurement and writes its results, including those from before an error. It writes JSON at once, other formats at the end.
func (a *app) emitResults(o *output, run func(emit func(*latency.Result) error) error) error {
	var results []*latency.Result
	err := run(func(r *latency.Result) error {
		results = append(results, r)
		if o.asJSON {
			return latency.WriteJSON(a.Stdout, r)
		}
		return nil
	})
	switch {
	case o.asJSON || err != nil && len(results) == 0:
	case o.asCSV:
		err = errors.Join(err, latency.WriteCSV(a.Stdout, results...))
	default:
		err = errors.Join(err, latency.WriteTable(a.Stdout, results...))
	}
	return err
}

// measure runs run and prints its results.
func (a *app) measure(ctx context.Context, b *benchFlags, mode string, run func(context.Context, latency.Config, func(*latency.Result) error) error) error {
	b.modes = []string{mode}
	if err := b.complete(a); err != nil {
		return a.BadUsage(err)
	}
	return a.emitResults(&b.output, func(emit func(*latency.Result) error) error { return run(ctx, b.cfg, emit) })
}

// complete turns the flags into the configuration.
func (b *benchFlags) complete(a *app) error {
	if err := b.output.check(); err != nil {
		return err
	}
	if b.cfg.Pairs < 1 || b.cfg.Duration <= 0 { // in a Config 0 selects the default; as a flag it is an error
		return fmt.Errorf("--pairs %d and --duration %v: want at least 1 pair, and more than 0s", b.cfg.Pairs, b.cfg.Duration)
	}
	var err error
	b.cfg.Modes, b.cfg.Payloads = nil, nil
	for _, s := range b.modes {
		m, err := dataplane.ParseWaitMode(s)
		if err != nil {
			return err
		}
		b.cfg.Modes = append(b.cfg.Modes, m)
	}
	for _, s := range b.payloads {
		n, err := parseSize("payload", s)
		if err != nil {
			return err
		}
		b.cfg.Payloads = append(b.cfg.Payloads, n)
	}
	if b.result != "" {
		if b.cfg.Result, err = parseSize("result", b.result); err != nil {
			return err
		}
	}
	if b.cfg.Peer == "" {
		if b.cfg.Peer, err = command.Beside("..", "libexec", "rfaas-bench-peer"); err != nil {
			return err
		}
	}
	b.cfg.Progress = a.progress()
	return b.cfg.Validate()
}

func parseSize(what, s string) (int, error) {
	var n config.Bytes
	if err := n.UnmarshalText([]byte(s)); err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	if n < 1 || n > 1<<30 {
		return 0, fmt.Errorf("%s %q: want 1 byte to 1GiB", what, s)
	}
	return int(n), nil
}

// progress returns a function that prints progress lines: all of them on a terminal, otherwise one every 15 seconds.
func (a *app) progress() func(string) {
	last, every := time.Now(), 15*time.Second
	if f, is := a.Stderr.(*os.File); is {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			every = 0
		}
	}
	return func(line string) {
		if time.Since(last) >= every {
			last = time.Now()
			fmt.Fprintf(a.Stderr, "%s\n", line)
		}
	}
}

func newBenchLatency(a *app) *cobra.Command {
	var b benchFlags
	var check bool
	c := &cobra.Command{
		Use:   "latency",
		Short: "Round trips of calls, compared with bare ones of the same bytes",
		Example: `  rfaas bench latency --payload 8,64,1KiB,64KiB,1MiB
  rfaas bench latency --mode hot,warm --json >now.json
  rfaas bench latency --depth 64 --payload 8
  rfaas bench latency --payload 8 --result 4KiB
  rfaas bench latency --provider verbs --device mlx5_0 --payload 8,4KiB
  rfaas bench latency --provider verbs --connect node-b:7470      # there: rfaas bench serve --listen :7470`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if b.cfg.Depth < 1 {
				return a.BadUsage(fmt.Errorf("--depth %d: want at least 1", b.cfg.Depth))
			}
			if err := b.complete(a); err != nil {
				return a.BadUsage(err)
			}
			return a.benchLatency(c.Context(), &b, check)
		},
	}
	b.common(c)
	b.connect(c)
	f := c.Flags()
	f.StringSliceVar(&b.modes, "mode", []string{"hot"}, "hot, warm, adaptive: how both sides wait (several: hot,warm)")
	f.StringSliceVar(&b.payloads, "payload", []string{"8", "64", "1KiB", "4KiB", "64KiB", "1MiB"}, "bytes of payload, and of result unless --result is given")
	f.StringVar(&b.result, "result", "", "bytes of result (default: as many as the payload)")
	f.IntVar(&b.cfg.Depth, "depth", 1, "calls in flight")
	f.BoolVar(&check, "check", false, "exit with 1 if a ratio is above its bound (the bounds of rfaas bench guard)")
	return c
}

func (a *app) benchLatency(ctx context.Context, b *benchFlags, check bool) error {
	var results []*latency.Result
	err := a.emitResults(&b.output, func(emit func(*latency.Result) error) error {
		return latency.Run(ctx, b.cfg, func(r *latency.Result) error {
			results = append(results, r)
			return emit(r)
		})
	})
	if err != nil || !check {
		return err
	}
	rep := &latency.GuardReport{Results: results}
	for _, r := range results {
		v := latency.Check(r)
		rep.Note(r, v)
	}
	return a.verdict(rep)
}

// verdict returns an error that lists the results above their bounds, and prints those without a verdict.
func (a *app) verdict(rep *latency.GuardReport) error {
	for _, key := range rep.Disturbed {
		fmt.Fprintf(a.Stderr, "rfaas-bench: %s: too few undisturbed pairs for a verdict\n", key)
	}
	for _, key := range rep.Rough {
		fmt.Fprintf(a.Stderr, "rfaas-bench: %s: too few undisturbed pairs: judged by all pairs, with twice the bound\n", key)
	}
	if len(rep.Exceeds) > 0 {
		return fmt.Errorf("above the bound:\n  %s", strings.Join(rep.Exceeds, "\n  "))
	}
	return nil
}

// undecided returns a separate exit status for a guard that was too disturbed to judge.
func (a *app) undecided(err error) error {
	if !errors.Is(err, latency.ErrNoVerdict) {
		return err
	}
	fmt.Fprintf(a.Stderr, "rfaas-bench: too disturbed to judge: %v\n", err)
	return command.ExitStatus(command.Unknown)
}

func newBenchGuard(a *app) *cobra.Command {
	var b benchFlags
	var patience latency.GuardConfig
	var prove bool
	c := &cobra.Command{
		Use:   "guard",
		Short: "Measure everything that has a bound, and fail if one is exceeded",
		Long: `Measure everything that has a bound, and fail if one is exceeded. Bounds are ratios to the floor of the same run, never times.
A result above its bound is measured again after all others, so that noise does not fail it. If too few pairs are undisturbed,
all pairs are compared with twice the bound. With --prove the guard then shows that it can fail: calls that are delayed by as
much as a bound allows must exceed it.

Exit status: 0 nothing is above its bound, 1 something is, 3 the machine was too busy for a verdict on the measurements or on the
proof.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b.modes, b.payloads = []string{"warm"}, []string{"8"} // Guard ignores them
			if patience.Slack < 1 || patience.Repeats < 1 || patience.Total < 0 {
				return a.BadUsage(fmt.Errorf("slack %g, %d repeats, %v in total: want at least 1, 1 and 0", patience.Slack, patience.Repeats, patience.Total))
			}
			if err := b.complete(a); err != nil {
				return a.BadUsage(err)
			}
			var rep *latency.GuardReport
			err := a.emitResults(&b.output, func(emit func(*latency.Result) error) (err error) {
				rep, err = latency.Guard(c.Context(), b.cfg, patience, emit)
				return err
			})
			if err == nil {
				err = a.verdict(rep)
			}
			if err != nil || !prove {
				return a.undecided(err)
			}
			delay, err := latency.Prove(c.Context(), b.cfg, patience)
			if err != nil {
				return a.undecided(err)
			}
			fmt.Fprintf(a.Stderr, "rfaas-bench: the guard found calls that took %v longer to be too slow\n", delay)
			return nil
		},
	}
	b.common(c)
	c.Flags().BoolVar(&prove, "prove", false, "afterwards, show that slower calls are found")
	c.Flags().IntVar(&patience.Repeats, "repeats", 3, "how often each is measured at most")
	c.Flags().Float64Var(&patience.Slack, "slack", 1, "factor by which bounds may be exceeded")
	c.Flags().DurationVar(&patience.Total, "total", 0, "time after which nothing is measured again (default: no limit)")
	return c
}

func newBenchCompare(a *app) *cobra.Command {
	var worse float64
	var out output
	c := &cobra.Command{
		Use:   "compare A.json B.json",
		Short: "Compare two files of bench --json",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := out.check(); err != nil {
				return a.BadUsage(err)
			}
			old, err := readResults(args[0])
			if err != nil {
				return err
			}
			now, err := readResults(args[1])
			if err != nil {
				return err
			}
			return a.benchCompare(args, old, now, worse, &out)
		},
	}
	c.Flags().Float64Var(&worse, "fail-above", 0, "exit with 1 if a ratio has grown by more than this share, for example 0.1 (default: never)")
	out.flags(c)
	return c
}

func (a *app) benchCompare(names []string, old, now []*latency.Result, worse float64, out *output) error {
	changes, onlyOld, onlyNew := latency.Compare(old, now)
	if len(changes) == 0 {
		return fmt.Errorf("%s and %s have no measurement in common", names[0], names[1])
	}
	write, unpaired := latency.WriteChanges, a.Stdout
	switch {
	case out.asJSON:
		write, unpaired = latency.WriteChangesJSON, a.Stderr
	case out.asCSV:
		write, unpaired = latency.WriteChangesCSV, a.Stderr
	}
	if err := write(a.Stdout, changes); err != nil {
		return err
	}
	for _, one := range []struct {
		name string
		keys []string
	}{{names[0], onlyOld}, {names[1], onlyNew}} {
		for _, key := range one.keys {
			fmt.Fprintf(unpaired, "only in %s: %s\n", one.name, key)
		}
	}
	var grown []string
	for _, c := range changes {
		if worse > 0 && c.Worse() > worse {
			grown = append(grown, fmt.Sprintf("%s: %+.1f %%", c.Key, 100*c.Worse()))
		}
	}
	if len(grown) > 0 {
		return fmt.Errorf("grown by more than %g %%:\n  %s", 100*worse, strings.Join(grown, "\n  "))
	}
	return nil
}

func readResults(path string) ([]*latency.Result, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	results, err := latency.ReadJSON(io.LimitReader(f, 1<<28))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(results) == 0 {
		return nil, fmt.Errorf("%s: no results in it (rfaas bench latency --json writes them)", path)
	}
	return results, nil
}
