package cli

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// clusterDirEnv names the environment variable that says where a cluster's keys are.
const clusterDirEnv = "RFAAS_CLUSTER_DIR"

// clusterFlag adds the flag for the directory of a cluster's keys.
func (a *app) clusterFlag(c *cobra.Command, into *string) {
	def := a.Getenv(clusterDirEnv)
	if home := a.Getenv("HOME"); def == "" && home != "" {
		def = filepath.Join(home, ".rfaas", "cluster")
	}
	c.Flags().StringVar(into, "dir", def, "directory of the cluster's keys ($"+clusterDirEnv+")")
}

const (
	day         = 24 * time.Hour
	clusterLife = 3650 * day
	nodeLife    = 366 * day
	tokenLife   = 30 * day
)

func newCluster(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Make a cluster's keys, and certificates for its nodes",
		Long: "The keys of a cluster are one directory, which stays with whoever runs it: what it signs is believed by every node.\n" +
			"A node gets a directory out of it (rfaas cluster node) for --identity-dir of its executor or resource manager,\n" +
			"a user gets a file (rfaas token issue).",
	}
	c.AddCommand(newClusterInit(a), newClusterNode(a))
	return c
}

func newClusterInit(a *app) *cobra.Command {
	var dir, name string
	c := &cobra.Command{
		Use:   "init",
		Short: "Make a cluster's keys; existing ones are never replaced",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := identity.InitCluster(dir, name, clusterLife, time.Now()); err != nil {
				return fmt.Errorf("cluster: %w", err)
			}
			_, err := fmt.Fprintf(a.Stdout, "%s holds the keys of cluster %q: keep it, and show it to nobody\n", dir, name)
			return err
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&name, "name", "rfaas", "name of the cluster, for people")
	return c
}

func newClusterNode(a *app) *cobra.Command {
	var dir, out string
	var life time.Duration
	c := &cobra.Command{
		Use:   "node HOST...",
		Short: "Make the identity directory of a node that is reached by these names and addresses",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, hosts []string) error {
			if life <= 0 {
				return a.badUsage(fmt.Errorf("--for %v is not above 0", life))
			}
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			if out == "" {
				out = hosts[0]
			}
			if err := cl.IssueNode(out, hosts, life, time.Now()); err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.Stdout, "%s is for --identity-dir on %s, readable by the daemon's user alone\n", out, hosts[0])
			return err
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&out, "out", "", "directory to write (default: the first name)")
	c.Flags().DurationVar(&life, "for", nodeLife, "how long the certificate is valid")
	return c
}
