package cli

import (
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/internal/cli/command"
)

func newBenchServe(a *app) *cobra.Command {
	var cfg latency.ServeConfig
	var listen string
	c := &cobra.Command{
		Use:   "serve",
		Short: "Serve latency, bandwidth and floors on another machine",
		Long: `Serve rfaas bench latency, bandwidth and floors on another machine, which get the address by --connect. The command starts a
peer for one client at a time. Calls and floors use verbs between the two machines; the address is only used to start and end a
measurement. Ctrl-C ends the command.

Like ib_write_lat, it does not authenticate clients: run it only while you measure, on a network that you trust.`,
		Example: `  node-b$ rfaas bench serve --listen 0.0.0.0:7470 --device mlx5_0 --cpu 3
  node-a$ rfaas bench latency --provider verbs --device mlx5_0 --cpus 2 --connect node-b:7470`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if cfg.Peer == "" {
				if cfg.Peer, err = command.Beside("..", "libexec", "rfaas-bench-peer"); err != nil {
					return err
				}
			}
			if cfg.Idle < 0 {
				return a.BadUsage(fmt.Errorf("--idle %v: must not be negative", cfg.Idle))
			}
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return a.BadUsage(fmt.Errorf("listen: %w", err))
			}
			cfg.Progress = func(line string) { fmt.Fprintf(a.Stderr, "rfaas-bench: %s\n", line) }
			fmt.Fprintf(a.Stdout, "serving at %v\n", l.Addr())
			return latency.Serve(c.Context(), l, cfg)
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:7470", "HOST:PORT")
	c.Flags().DurationVar(&cfg.Idle, "idle", 0, "end after this time without a new client, counted after the first (default: never)")
	c.Flags().IntVar(&cfg.CPU, "cpu", -1, "CPU of the peer (default: the scheduler chooses)")
	deviceFlags(c, &cfg.Device, &cfg.Peer)
	return c
}
