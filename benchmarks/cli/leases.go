package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/benchmarks/leases"
	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

func newBenchLeases(a *app) *cobra.Command {
	var b benchFlags
	var cfg leases.Config
	c := &cobra.Command{
		Use:   "leases",
		Short: "Measure leases, beside the figures of KRCORE and Swift",
		Long: `The figures of leases beside those of KRCORE and Swift, each with its floor or its counterpart from the same run, on shm: looking an executor up,
claims, all kinds of start, a group of workers, the first contact of a process. Queue pairs of the agent, which clients use at first, are measured on
verbs if this machine has a device, otherwise on tcp. With --provider verbs, the command measures only these queue pairs, and leases whose first calls use them.
benchmarks/README.md has the whole table.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			b.modes, b.payloads = []string{"warm"}, []string{"64"}
			if err := b.complete(a); err != nil {
				return a.BadUsage(err)
			}
			switch {
			case b.cfg.Provider != dataplane.SHM && b.cfg.Provider != dataplane.Verbs:
				return a.BadUsage(fmt.Errorf("provider %q: want shm or verbs; bench cold also measures tcp", b.cfg.Provider))
			case b.asCSV:
				return a.BadUsage(errors.New("--csv: want --json or neither"))
			case cfg.Leases < 1 || cfg.Leases > 10_000 || cfg.Group < 2 || cfg.Group > 64:
				return a.BadUsage(fmt.Errorf("%d leases, groups of %d workers: want 1 to 10000 leases, and 2 to 64 workers", cfg.Leases, cfg.Group))
			}
			cfg.Control.Latency = b.cfg
			for path, into := range map[string]*string{"resource-manager": &cfg.Control.Manager, "executor": &cfg.Cold.Executor,
				filepath.Join("..", "build", "functions", "echo.so"): &cfg.Cold.Library, filepath.Join("..", "libexec", "rfaas-bench-peer"): &cfg.Cold.Peer} {
				if *into, err = command.Beside(path); err != nil {
					return err
				}
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Contact = []string{self, "contact"}
			cfg.Cold.Provider, cfg.Cold.Function, cfg.Cold.Progress = b.cfg.Provider, "empty", a.progress()
			rows, err := leases.Run(c.Context(), cfg)
			write := leases.WriteTable
			if b.asJSON {
				write = leases.WriteJSON
			}
			return errors.Join(err, write(a.Stdout, rows))
		},
	}
	b.common(c)
	f := c.Flags()
	f.IntVar(&cfg.Leases, "leases", 100, "leases of each kind of start")
	f.IntVar(&cfg.Group, "group", 8, "workers of the group")
	for name, value := range map[string]string{"pairs": "5"} {
		f.Lookup(name).DefValue = value
		_ = f.Set(name, value)
	}
	return c
}

// newContact is the process whose first contact the command leases measures.
func newContact(a *app) *cobra.Command {
	return &cobra.Command{Use: "contact", Hidden: true, Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		return leases.Contact(c.Context(), a.Stdout)
	}}
}
