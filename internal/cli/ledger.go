package cli

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/accounting"
)

// ledgerWait is how long to wait for another process that has the ledger open.
const ledgerWait = time.Second

func newLedger(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "ledger",
		Short: "Check, back up, restore and compact the resource manager's ledger, and move it to etcd",
		Long: "Check, back up, restore and compact the ledger in a resource manager's state directory (its setting state-dir).\n" +
			"Stop the resource manager first. The commands of \"rfaas ledger etcd\" are for a ledger in etcd.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	file := func(dir string) string { return filepath.Join(dir, "ledger") }
	c.AddCommand(newLedgerEtcd(a, file), &cobra.Command{
		Use:   "check STATE-DIR",
		Short: "Read the whole ledger and print its errors",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			r, err := accounting.CheckLedger(file(args[0]), ledgerWait)
			if err != nil {
				return err
			}
			fmt.Fprintf(a.Stdout, "%s: %d leases, %d hourly totals, %d bytes, of which %d are unused\n", file(args[0]), r.Leases, r.Totals, r.Bytes, r.Unused)
			for _, text := range r.Damage {
				fmt.Fprintf(a.Stdout, "  %s\n", text)
			}
			if n := len(r.Damage); n > 0 {
				return fmt.Errorf("ledger %s: it is damaged: restore a backup with \"rfaas ledger restore\"", file(args[0]))
			}
			return nil
		},
	}, &cobra.Command{
		Use:   "backup STATE-DIR FILE",
		Short: "Copy the ledger to a file, if it is valid; replaces the file",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			return accounting.BackupLedger(file(args[0]), args[1], ledgerWait)
		},
	}, &cobra.Command{
		Use:   "restore STATE-DIR FILE",
		Short: "Replace the ledger by a backup, and keep the old ledger beside it",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			kept, err := accounting.RestoreLedger(file(args[0]), args[1], ledgerWait)
			if kept != "" {
				fmt.Fprintf(a.Stdout, "the old ledger is %s\n", kept)
			}
			return err
		},
	}, &cobra.Command{
		Use:   "compact STATE-DIR",
		Short: "Replace the ledger by a copy without unused space, if it is valid",
		Long: "Replace the ledger by a copy without unused space, if it is valid. The file system needs space for the copy.\n" +
			"The resource manager does this itself when it starts and more than half of a ledger of at least 16 MiB is unused.",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			before, after, err := accounting.CompactLedger(file(args[0]), ledgerWait)
			if err == nil {
				fmt.Fprintf(a.Stdout, "%s: %d bytes, before %d\n", file(args[0]), after, before)
			}
			return err
		},
	})
	return c
}
