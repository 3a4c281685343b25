package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
)

// clusterDirEnv names the environment variable that says where a cluster's keys are.
const clusterDirEnv = "RFAAS_CLUSTER_DIR"

// clusterFlag adds the flag for the directory of a cluster's keys.
func (a *app) clusterFlag(c *cobra.Command, into *string) {
	c.Flags().StringVar(into, "dir", a.clusterDir(), "directory of the cluster's keys ($"+clusterDirEnv+")")
}

// clusterDir returns the default directory of a cluster's keys.
func (a *app) clusterDir() string {
	dir := a.Getenv(clusterDirEnv)
	if home := a.Getenv("HOME"); dir == "" && home != "" {
		dir = filepath.Join(home, ".rfaas", "cluster")
	}
	return dir
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
		Short: "Make a cluster's keys, and certificates for its nodes, and revoke them",
		Long: "The keys of a cluster are in one directory, which only the cluster's operator should have: every node trusts what they sign.\n" +
			"A node gets a directory out of it (rfaas cluster node) for --identity-dir of its executor or resource manager,\n" +
			"a user gets a file (rfaas token issue). The service rfaas cluster serve can do both. Revoked credentials are in a signed list that every node has (rfaas cluster revoked).",
	}
	c.AddCommand(newClusterInit(a), newClusterNode(a), newClusterServe(a), newClusterEnrolCode(a), newClusterJoin(a), newClusterRenew(a), newClusterNodes(a),
		newClusterRevoke(a), newClusterRevoked(a))
	return c
}

func newClusterInit(a *app) *cobra.Command {
	var dir, name string
	c := &cobra.Command{
		Use:   "init",
		Short: "Make a cluster's keys; existing ones are never replaced",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			err := identity.InitCluster(dir, name, clusterLife, time.Now())
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("cluster: %w: it has keys already; --dir names another directory", err)
			}
			if err != nil {
				return fmt.Errorf("cluster: %w", err)
			}
			_, err = fmt.Fprintf(a.Stdout, "%s has the keys of cluster %q: keep it safe and private\n", dir, name)
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
		Long: "Make the identity directory of a node with these names and addresses: its certificate and key, the keys that verify others,\n" +
			"the list of revoked credentials, and a certificate for its HTTPS page (ECDSA P-256). Browsers accept that certificate after they\n" +
			"have imported page-ca.crt from the cluster's directory. Executors of this node can register only at these names and addresses.\n" +
			"The first name identifies the node and must be unique. Running daemons load a directory that is made again.",
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, hosts []string) error {
			if life <= 0 {
				return a.BadUsage(fmt.Errorf("--for %v is not above 0", life))
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

func newClusterRenew(a *app) *cobra.Command {
	var dir string
	var within, life time.Duration
	c := &cobra.Command{
		Use:   "renew DIR...",
		Short: "Renew identity directories whose certificates expire soon",
		Long: "Get a new certificate for each of these identity directories, with the same names and addresses, if the present one expires\n" +
			"within --within. Other directories keep theirs. Running daemons load the new files. A certificate that is revoked, or of another\n" +
			"cluster, is an error. For directories of rfaas cluster node, run the command from a timer on the machine that has the cluster's keys,\n" +
			"and copy each directory to its node afterwards.\n" +
			"A directory of rfaas cluster join is renewed by the issuer, before its certificate expires and when at most two thirds of its life\n" +
			"are left. Its daemons ask for that themselves. The command also replaces the list of revoked credentials there if the issuer has a newer one.",
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, nodes []string) error {
			if life <= within || within < 0 {
				return a.BadUsage(fmt.Errorf("--for %v is not above --within %v, which must not be negative", life, within))
			}
			var cl *identity.Cluster
			var failed []error
			for _, node := range nodes {
				ends, renewed, err := issuer.Renew(c.Context(), node, within)
				if errors.Is(err, fs.ErrNotExist) { // it did not come from an issuer
					if cl == nil {
						if cl, err = identity.OpenCluster(dir); err != nil {
							return errors.Join(append(failed, err)...)
						}
					}
					ends, renewed, err = cl.RenewNode(node, within, life, time.Now())
				}
				if err != nil {
					failed = append(failed, err)
					continue
				}
				what, why := "is valid", ""
				if renewed {
					what = "is renewed, and valid"
				} else if c, err := identity.ReadCertificate(node); err == nil && ends.Before(time.Now().Add(within)) {
					why = fmt.Sprintf(": the issuer renews it from %s on, when two thirds of its life are left", issuer.RenewFrom(c).UTC().Format(time.RFC3339))
				}
				fmt.Fprintf(a.Stdout, "%s %s until %s%s\n", node, what, ends.UTC().Format(time.RFC3339), why)
			}
			return errors.Join(failed...)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().DurationVar(&within, "within", 60*day, "renew certificates that end within this time; certificates of an issuer only after a third of their life")
	c.Flags().DurationVar(&life, "for", nodeLife, "how long a new certificate is valid, if it does not come from an issuer")
	return c
}

// revoke adds entries to a cluster's list and prints what to do with it.
func (a *app) revoke(cl *identity.Cluster, entries ...identity.Revocation) error {
	l, path, err := cl.Revoke(time.Now(), entries...)
	if err != nil {
		return err
	}
	return a.sayRevoked(l, path, entries)
}

func (a *app) sayRevoked(l *identity.RevocationList, path string, entries []identity.Revocation) error {
	for _, e := range entries {
		fmt.Fprintf(a.Stdout, "%s %s is revoked\n", e.Kind, e.ID)
	}
	return a.sayList(l, path)
}

func (a *app) sayList(l *identity.RevocationList, path string) error {
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), addressFile)); err == nil {
		_, err = fmt.Fprintf(a.Stdout, "%s has serial %d and %d entries: a resource manager that joined through an issuer has it within 5 s, and executors get it from the manager; copy it over the file `revoked` in other identity directories\n",
			path, l.Serial, len(l.Entries))
		return err
	}
	_, err := fmt.Fprintf(a.Stdout, "%s has serial %d and %d entries: copy it over the file `revoked` in the resource manager's identity directory; executors get it from there. Copy it to executors without a manager too\n",
		path, l.Serial, len(l.Entries))
	return err
}

func newClusterRevoke(a *app) *cobra.Command {
	var dir, note, node string
	c := &cobra.Command{
		Use:   "revoke SERIAL|FILE|DIR | revoke --node NAME",
		Short: "Add the certificate of a node to the cluster's signed list of revoked credentials",
		Long: "Add the certificate of a node, by its serial number, its file or its identity directory, to the cluster's signed list of revoked credentials.\n" +
			"--node adds all listed certificates for a name or an address that are valid (rfaas cluster nodes).\n" +
			"The resource manager refuses the certificate, also on open connections, once the list has replaced `revoked` in its identity directory.\n" +
			"Executors fetch the list from the resource manager.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if (len(args) == 0) == (node == "") {
				return a.BadUsage(errors.New("want either the certificate of a node or --node"))
			}
			if node != "" {
				cl, err := identity.OpenCluster(dir)
				if err != nil {
					return err
				}
				entries, l, path, err := cl.RevokeNode(node, note, time.Now())
				if l == nil {
					return err
				}
				return errors.Join(a.sayRevoked(l, path, entries), err)
			}
			id := args[0]
			if cert, err := identity.ReadCertificate(id); err == nil {
				id = identity.NodeSerial(cert)
			} else if !identity.IsTokenID(id) || !errors.Is(err, os.ErrNotExist) { // a serial number has the form of a token's id
				return fmt.Errorf("%q is neither a serial number nor a file or directory with a certificate: %w", id, err)
			}
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			return a.revoke(cl, identity.Revocation{Kind: identity.RevokedNode, ID: id, Note: note})
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&note, "note", "", "reason, for readers of the list")
	c.Flags().StringVar(&node, "node", "", "revoke all valid certificates for this name or address of a node")
	return c
}

// revokedList is the list in the format of --json.
type revokedList struct {
	Serial  uint64       `json:"serial"`
	Made    string       `json:"made"`
	Entries []revokedRow `json:"entries"`
}

type revokedRow struct {
	Kind string `json:"kind"` // token or node
	ID   string `json:"id"`
	Note string `json:"note,omitempty"`
}

func newClusterRevoked(a *app) *cobra.Command {
	var dir string
	var asJSON, fresh bool
	var serial uint64
	c := &cobra.Command{
		Use:   "revoked",
		Short: "Show the signed list of revoked credentials, or make a new one",
		Long: "Show the signed list of revoked credentials of a cluster or of a node, after checking it.\n" +
			"--new makes the list of a cluster that has none. It keeps the entries of an unsigned list from an earlier version. Daemons refuse a list\n" +
			"with a lower serial number than the one they have: if the list was lost, use --serial with a higher number.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if serial == 0 {
				return a.BadUsage(errors.New("--serial 0 is not above 0"))
			}
			if fresh {
				cl, err := identity.OpenCluster(dir)
				if err != nil {
					return err
				}
				l, path, err := cl.NewRevocations(serial, time.Now())
				if err != nil {
					return err
				}
				if len(l.Entries) == 0 {
					fmt.Fprintln(a.Stdout, "the list is empty: what was revoked before is valid again (to keep it, copy `revoked` from a node's identity directory instead)")
				}
				return a.sayList(l, path)
			}
			l, err := identity.OpenRevocations(dir)
			if err != nil {
				return err
			}
			return a.printRevoked(l, asJSON)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().Lookup("dir").Usage = "directory of the cluster's keys, or of a node's identity ($" + clusterDirEnv + ")"
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	c.Flags().BoolVar(&fresh, "new", false, "make the list of a cluster that has none, or whose list is unsigned")
	c.Flags().Uint64Var(&serial, "serial", 1, "with --new: serial number of the list")
	return c
}

func (a *app) printRevoked(l *identity.RevocationList, asJSON bool) error {
	out := revokedList{Serial: l.Serial, Made: l.Made.UTC().Format(time.RFC3339), Entries: []revokedRow{}}
	for _, e := range l.Entries {
		out.Entries = append(out.Entries, revokedRow(e))
	}
	if asJSON {
		return a.printJSON(out)
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "serial\t%d\nmade\t%s\n", out.Serial, out.Made)
	for _, e := range out.Entries {
		fmt.Fprintf(w, "%s\t%s\t%s\n", e.Kind, e.ID, e.Note)
	}
	return w.Flush()
}
