package cli

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/etcd"
)

// etcdFlags says where etcd is, like the resource manager's settings of the same names.
type etcdFlags struct {
	endpoints, prefix, ca, cert, key string
	plaintext                        bool
}

// open connects to etcd.
func (f *etcdFlags) open() (*etcd.Cluster, error) {
	var list []string
	for part := range strings.SplitSeq(f.endpoints, ",") {
		endpoint := strings.TrimSpace(part)
		a, err := control.ParseAddress(endpoint)
		if err != nil || a.Network != "tcp" {
			return nil, control.Errorf(control.ClassInvalid, "--etcd-endpoints: %q is not host:port", endpoint)
		}
		if f.ca == "" && !a.Local() && !f.plaintext {
			return nil, control.Errorf(control.ClassInvalid, "--etcd-endpoints: %s is not loopback: set --etcd-ca, or on a trusted network --allow-plaintext", endpoint)
		}
		list = append(list, endpoint)
	}
	secure, err := etcd.TLS(f.ca, f.cert, f.key)
	if err != nil {
		return nil, err
	}
	return etcd.Open(etcd.Config{Endpoints: list, Prefix: f.prefix, TLS: secure, Log: slog.New(slog.DiscardHandler)})
}

// with calls run with a connection to etcd, after a check of the certificates.
func (f *etcdFlags) with(run func(c *cobra.Command, e *etcd.Cluster, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		e, err := f.open()
		if err != nil {
			return err
		}
		defer e.Close()
		if err := e.Probe(c.Context()); err != nil {
			return err
		}
		return run(c, e, args)
	}
}

func newLedgerEtcd(a *app, file func(dir string) string) *cobra.Command {
	var f etcdFlags
	c := &cobra.Command{
		Use:   "etcd",
		Short: "Begin, check, import and export the ledger that resource managers share in etcd",
		Long: "Begin, check, import and export the ledger that resource managers share in etcd. The options have the values of the\n" +
			"resource managers' settings.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	flags := c.PersistentFlags()
	flags.StringVar(&f.endpoints, "etcd-endpoints", "127.0.0.1:2379", "addresses of etcd, host:port,host:port")
	flags.StringVar(&f.prefix, "etcd-prefix", "/rfaas", "beginning of all keys in etcd")
	flags.StringVar(&f.ca, "etcd-ca", "", "certificates to check etcd with, PEM")
	flags.StringVar(&f.cert, "etcd-cert", "", "certificate for etcd, PEM")
	flags.StringVar(&f.key, "etcd-key", "", "its private key, PEM")
	flags.BoolVar(&f.plaintext, "allow-plaintext", false, "permit addresses that are not loopback without TLS")
	c.MarkFlagsRequiredTogether("etcd-cert", "etcd-key")
	c.AddCommand(&cobra.Command{
		Use:   "init",
		Short: "Begin an empty ledger; resource managers start only if there is one",
		Args:  cobra.NoArgs,
		RunE: f.with(func(c *cobra.Command, e *etcd.Cluster, _ []string) error {
			id, err := e.Init(c.Context())
			if err == nil {
				fmt.Fprintf(a.Stdout, "the ledger %s has begun\n", id)
			}
			return err
		}),
	}, &cobra.Command{
		Use:   "check",
		Short: "Read the whole ledger and print its size and its id",
		Args:  cobra.NoArgs,
		RunE: f.with(func(c *cobra.Command, e *etcd.Cluster, _ []string) error {
			id, d, err := e.Digest(c.Context())
			if err == nil {
				fmt.Fprintf(a.Stdout, "ledger %s: %d leases, %d hourly totals\n", id, d.Leases, d.Totals)
			}
			return err
		}),
	}, &cobra.Command{
		Use:   "import STATE-DIR",
		Short: "Copy the ledger in a state directory to etcd, and rename the file",
		Long: "Copy the ledger in a state directory to etcd, and rename the file. Stop the resource manager first. If the command fails,\n" +
			"the file stays in use, and the command can be repeated, unless the error says that the ledger may be in etcd.",
		Args: cobra.ExactArgs(1),
		RunE: f.with(func(c *cobra.Command, e *etcd.Cluster, args []string) error {
			return a.importLedger(c.Context(), e, file(args[0]))
		}),
	}, &cobra.Command{
		Use:   "export STATE-DIR",
		Short: "Copy the ledger in etcd to a state directory, and end the one in etcd",
		Long: "Copy the ledger in etcd to a state directory, and end the one in etcd. Stop all resource managers first. The state directory\n" +
			"must not have a ledger. If the command is interrupted, the ledger is in etcd, or in STATE-DIR/ledger.*.new/ledger.",
		Args: cobra.ExactArgs(1),
		RunE: f.with(func(c *cobra.Command, e *etcd.Cluster, args []string) error {
			return a.exportLedger(c.Context(), e, file(args[0]))
		}),
	})
	return c
}

// importLedger copies a file to etcd.
func (a *app) importLedger(ctx context.Context, e *etcd.Cluster, path string) error {
	r, err := accounting.CheckLedger(path, ledgerWait)
	if err == nil && len(r.Damage) > 0 {
		err = fmt.Errorf("ledger %s: %w: %s", path, accounting.ErrLedger, r.Damage[0])
	}
	if err != nil {
		return err
	}
	l, err := accounting.OpenLedger(path, ledgerWait)
	if err != nil {
		return err
	}
	defer l.Close()
	random := make([]byte, 16)
	rand.Read(random)
	id := hex.EncodeToString(random)
	if err := l.Records(func(r accounting.Change) error {
		if r.Bucket == accounting.IDBucket && r.Key == accounting.IDKey {
			id = string(r.Value) // it was in etcd before
		}
		return nil
	}); err != nil {
		return err
	}
	d, err := e.Import(ctx, id, l.Records)
	if err != nil {
		return fmt.Errorf("import %s: %w", path, err)
	}
	aside, err := accounting.SetLedgerAside(path)
	if err != nil {
		return fmt.Errorf("the ledger is in etcd now, but its file is still in use by a resource manager without etcd: remove it: %w", err)
	}
	fmt.Fprintf(a.Stdout, "ledger %s: %d leases and %d hourly totals are in etcd; the file is %s\n", id, d.Leases, d.Totals, aside)
	return nil
}

// exportLedger copies the ledger in etcd to a file.
func (a *app) exportLedger(ctx context.Context, e *etcd.Cluster, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	var d accounting.Digest
	if err := e.Export(ctx, fmt.Sprintf("%s on %s at %s", absolute, host, time.Now().UTC().Format(time.RFC3339)),
		func(load func(add func(accounting.Change) error) error, take func() (bool, error)) (err error) {
			d, err = accounting.CreateLedger(path, load, take)
			return err
		}); err != nil {
		return fmt.Errorf("export to %s: %w", path, err)
	}
	fmt.Fprintf(a.Stdout, "%s: %d leases and %d hourly totals; etcd has no ledger any more\n", path, d.Leases, d.Totals)
	return nil
}
