package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/slurm"
)

// defaultSocket is where hooks find the node daemon.
const defaultSocket = "/run/rfaas/slurm.sock"

func (a *app) socketFlag(c *cobra.Command, into *string) {
	a.addressFlag(c, into, "socket", "RFAAS_SLURM_SOCKET", defaultSocket, "socket of the node daemon")
}

// nodeFlags are those of rfaas slurm node.
type nodeFlags struct {
	socket, name, program string
	killAfter             time.Duration
	noSpace               bool
	keepMemory            string
	daemon                slurm.DaemonConfig
}

func newSlurmNode(a *app) *cobra.Command {
	var f nodeFlags
	c := &cobra.Command{
		Use:   "node [flags] [-- EXECUTOR-ARGS...]",
		Short: "On each node: run an executor on the resources that jobs leave, and serve Slurm's hooks",
		Long: `Run an executor on the cores and the memory of this node that no job has. Slurm's prolog ("rfaas slurm prolog") and epilog
notify it of jobs, and it asks Slurm for their resources. It is a service of each node: share/rfaas/slurm has a unit for it.

An executor that could lend more is replaced when it has no leases, or after --grow-within.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error { return a.slurmNode(c.Context(), &f, args) },
	}
	fl := c.Flags()
	a.socketFlag(c, &f.socket)
	fl.StringVar(&f.name, "name", "", "this node's name in Slurm (default: $SLURMD_NODENAME or the host name up to its first dot)")
	fl.StringVar(&f.program, "program", "", "the executor (default: beside this program)")
	fl.DurationVar(&f.killAfter, "kill-after", 1500*time.Millisecond, "time from SIGTERM until everything is killed: give the executor a shorter --grace")
	fl.BoolVar(&f.noSpace, "no-namespace", false, "adopt orphans instead of using a process namespace")
	fl.BoolVar(&f.daemon.Spare, "spare", true, "also lend the rest of a node with jobs; without it whole nodes only")
	fl.IntVar(&f.daemon.KeepCPUs, "keep-cpus", 0, "CPUs kept for the system")
	fl.StringVar(&f.keepMemory, "keep-memory", "0", "memory kept for the system")
	fl.DurationVar(&f.daemon.Resync, "resync", 30*time.Second, "how often Slurm is asked without an event")
	fl.DurationVar(&f.daemon.GrowWithin, "grow-within", 5*time.Minute, "how long an executor in use may stay smaller than it could be")
	return c
}

func (a *app) slurmNode(ctx context.Context, f *nodeFlags, args []string) error {
	log := slog.New(slog.NewTextHandler(a.Stderr, nil))
	var keep config.Bytes
	if err := keep.UnmarshalText([]byte(f.keepMemory)); err != nil {
		return fmt.Errorf("--keep-memory: %w", err)
	}
	if f.daemon.KeepCPUs < 0 || f.daemon.Resync <= 0 || f.daemon.GrowWithin <= 0 || f.killAfter <= 0 {
		return errors.New("--keep-cpus below 0, or a duration not above 0")
	}
	var err error
	if f.program == "" {
		if f.program, err = command.Beside("executor"); err != nil {
			return err
		}
	}
	name := f.name
	if name == "" {
		if name = a.Getenv("SLURMD_NODENAME"); name == "" {
			if name, err = os.Hostname(); err != nil {
				return err
			}
			name, _, _ = strings.Cut(name, ".")
		}
	}
	// Beside the socket and under a fixed name, so that no files accumulate when the prolog kills node daemons.
	address := strings.TrimSuffix(f.socket, ".sock") + ".address"

	cfg := f.daemon
	cfg.KeepMemory, cfg.Log = uint64(keep), log
	if cfg.Order, err = slurm.CPUOrder(); err != nil {
		return err
	}
	cfg.Usage = func(ctx context.Context) (slurm.Usage, error) { return (&slurm.Commands{}).Usage(ctx, name) }
	cfg.Leased = func(ctx context.Context) (bool, error) { return a.leased(ctx, address) }
	cfg.Launch = func(ctx context.Context, o slurm.Offer) error {
		run := slurm.Contain{Init: []string{"/proc/self/exe", "slurm", "init"}, Program: f.program, KillAfter: f.killAfter, Log: log, NoSpace: f.noSpace,
			Args: append(append([]string{}, args...), "--cores", config.Cores{List: o.CPUs}.String(), "--memory", strconv.FormatUint(o.Memory, 10),
				"--address-file", address)}
		status, err := run.Run(ctx)
		if err == nil && status != 0 {
			err = command.ExitStatus(status)
		}
		return err
	}
	l, err := slurm.ListenHooks(f.socket)
	if err != nil {
		return err
	}
	defer os.Remove(address)
	daemon := slurm.NewDaemon(cfg)
	served := make(chan error, 1)
	go func() { served <- daemon.ServeHooks(ctx, l, log) }()
	log.Info("ready", "node", name, "socket", f.socket)
	daemon.Run(ctx)
	return <-served
}

// leased says whether the executor on this node whose address is in a file has leases.
func (a *app) leased(ctx context.Context, file string) (bool, error) {
	address, err := os.ReadFile(file)
	if err != nil {
		return false, err
	}
	path, err := a.secretPath()
	if err != nil {
		return false, err
	}
	conn, err := control.Dial(strings.TrimSpace(string(address)), control.DialConfig{SecretFile: path, AllowPlaintext: true})
	if err != nil {
		return false, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	i, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	return err == nil && i.GetFreeCores() < i.GetCores(), err
}

// newSlurmHook makes the commands for Slurm's prolog and epilog. They never fail: a prolog that does has Slurm drain the node.
func newSlurmHook(a *app, hook, short, long string, within time.Duration) *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use:   hook + " [JOB]",
		Short: short,
		Long:  long,
		Args:  cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			job := a.Getenv("SLURM_JOB_ID")
			if len(args) > 0 {
				job = args[0]
			}
			ctx, cancel := context.WithTimeout(c.Context(), within)
			defer cancel()
			if _, err := slurm.TellDaemon(ctx, socket, hook+" "+job, hook == "prolog"); err != nil {
				fmt.Fprintf(a.Stderr, "rfaas: %s of job %s: %v\n", hook, job, err)
			}
			return nil
		},
	}
	a.socketFlag(c, &socket)
	c.Flags().DurationVar(&within, "within", within, "how long it may take")
	return c
}

func newSlurmStatus(a *app) *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use:   "status",
		Short: "Print what the node daemon does, as JSON",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			answer, err := slurm.TellDaemon(ctx, socket, "status", false)
			if err == nil {
				fmt.Fprintln(a.Stdout, answer)
			}
			return err
		},
	}
	a.socketFlag(c, &socket)
	return c
}
