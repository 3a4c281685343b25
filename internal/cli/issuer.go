package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/internal/systemd"
)

// addressFile names the file in a cluster's directory that contains the address of its issuer.
const addressFile = "address"

func newClusterServe(a *app) *cobra.Command {
	usage := config.IssuerUsage()
	c := &cobra.Command{
		Use:   "serve",
		Short: "Give certificates to nodes that have a code, renew them, and give tokens to users",
		Long: "Issue certificates and tokens with a cluster's keys, over TLS, until SIGTERM. A node with an enrolment code gets its certificate\n" +
			"(rfaas cluster enrol-code, rfaas cluster join), and a node with a certificate renews it (rfaas cluster renew).\n" +
			"Run it under a separate user that owns the directory of the keys, on a machine where no functions run. " + usage.Sources,
		DisableFlagParsing: true, // internal/config reads the flags, as for the daemons
		RunE: func(c *cobra.Command, args []string) error {
			host, err := os.Hostname()
			if err != nil {
				return err
			}
			settings, err := config.LoadIssuer(args, a.Getenv, a.Stdout, a.Version, a.clusterDir(), host)
			switch {
			case errors.Is(err, config.ErrDone):
				return nil
			case errors.Is(err, config.ErrUsage):
				return a.BadUsage(err)
			case err != nil:
				return err
			}
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return a.serveCluster(ctx, &settings)
		},
	}
	c.Flags().AddFlagSet(usage.Flags)
	return c
}

var geteuid = os.Geteuid // tests replace it

// serveCluster runs the issuer until ctx ends.
func (a *app) serveCluster(ctx context.Context, s *config.Issuer) error {
	if geteuid() == 0 {
		return errors.New("the issuer does not run as root: run it as a user of its own who owns the directory of the keys, like rfaas-issuer of the package")
	}
	log := s.Logger(a.Stderr)
	cl, err := identity.OpenCluster(s.Dir)
	if err != nil {
		return err
	}
	audit, err := identity.OpenAudit(identity.AuditConfig{Path: s.AuditFile, Log: log, Daemon: "issuer"})
	if err != nil {
		return fmt.Errorf("audit file: %w", err)
	}
	defer audit.Close()
	server, err := issuer.NewServer(issuer.Config{Cluster: cl, Hosts: s.HostList(), Reserved: s.ReservedList(), NodeLife: s.NodeLife, Tenants: s.TenantRules(),
		TokenLife: s.TokenLife, Munge: issuer.Munge{Socket: s.MungeSocket}, Audit: audit, Log: log})
	if err != nil {
		return err
	}
	l, err := control.Listen(s.Listen, true)
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(control.ListenerAddress(l))
	if err != nil {
		l.Close()
		return err
	}
	at := issuer.AddressOf(net.JoinHostPort(s.HostList()[0], port), cl.CA())
	if err := identity.WriteFile(filepath.Join(s.Dir, addressFile), []byte(at.String()+"\n"), 0o644, false); err != nil {
		l.Close()
		return err
	}
	log.Info("ready", "address", control.ListenerAddress(l), "issuer", at.String())
	if err := systemd.Notify("READY=1"); err != nil {
		log.Warn("cannot report to systemd", "error", err)
	}
	return server.Serve(ctx, l)
}

// codeJSON is an enrolment code as --json prints it.
type codeJSON struct {
	Code  string   `json:"code"`
	Hosts []string `json:"hosts"` // empty: any that no other node has
	Ends  string   `json:"ends"`
}

func newClusterEnrolCode(a *app) *cobra.Command {
	var dir, address string
	var hosts []string
	var life time.Duration
	var asJSON bool
	c := &cobra.Command{
		Use:   "enrol-code",
		Short: "Print a code with which one node gets its certificate",
		Long: "Print a code with which one node gets its certificate from the issuer (rfaas cluster serve). The code works once, until it expires:\n" +
			"run rfaas cluster join with it on the node. It contains the address of the issuer and the hash of the cluster's certificate, so the\n" +
			"node recognizes the right issuer. Keep the code secret until it is used. The cluster's directory has only the code's hash.\n" +
			"With --node, the certificate is only for these names and addresses. The first one is the node's name. Without --node, the node\n" +
			"chooses names that no other node known to the issuer has (rfaas cluster nodes).",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if life < time.Second || life > 30*day {
				return a.BadUsage(fmt.Errorf("--ttl %v is not in 1s..720h", life))
			}
			if c.Flags().Changed("node") && len(hosts) == 0 {
				return a.BadUsage(errors.New("--node is empty: leave it out for a code with which the node chooses its names"))
			}
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			if address == "" {
				b, err := os.ReadFile(filepath.Join(dir, addressFile))
				if err != nil {
					return fmt.Errorf("the issuer has not run yet, so its address is unknown (%w): start rfaas cluster serve, or use --issuer", err)
				}
				address = strings.TrimSpace(string(b))
			} else if !strings.Contains(address, "#") {
				address = issuer.AddressOf(address, cl.CA()).String()
			}
			at, err := issuer.ParseAddress(address)
			if err != nil {
				return err
			}
			now := time.Now()
			secret, err := cl.NewEnrolCode(hosts, life, now)
			if err != nil {
				return err
			}
			code := issuer.Code{Address: at, Secret: secret}
			ends := now.Add(life).UTC().Format(time.RFC3339)
			if asJSON {
				return a.printJSON(codeJSON{code.Text(), append([]string{}, hosts...), ends})
			}
			fmt.Fprintf(a.Stderr, "valid once, until %s: run `rfaas cluster join` with it on the node\n", ends)
			_, err = fmt.Fprintln(a.Stdout, code.Text())
			return err
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringSliceVar(&hosts, "node", nil, "names and addresses of the node, the name first (default: the node chooses)")
	c.Flags().DurationVar(&life, "ttl", time.Hour, "how long the code is valid")
	c.Flags().StringVar(&address, "issuer", "", "HOST:PORT of the issuer, if nodes reach it at another address than its setting hosts says")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}

// joinedJSON is a new certificate as --json prints it.
type joinedJSON struct {
	Dir   string   `json:"dir"`
	Hosts []string `json:"hosts"`
	Ends  string   `json:"ends"`
}

func newClusterJoin(a *app) *cobra.Command {
	var dir, file string
	var hosts []string
	var again, asJSON bool
	c := &cobra.Command{
		Use:   "join CODE | join --code-file FILE",
		Short: "Get this node's certificate from the cluster's issuer, with a code",
		Long: "Make this node's keys and its identity directory, and get its certificate from the cluster's issuer, with a code from\n" +
			"rfaas cluster enrol-code. The keys do not leave the node. The code is sent only after the issuer has shown the certificate that the\n" +
			"code names. Other users of this node can read a code on the command line. To prevent that, use --code-file, for example with /dev/stdin.\n" +
			"Then name the directory with identity-dir in the settings of executor or resource manager. These daemons renew the certificate\n" +
			"in time. An expired certificate needs a new code and --again.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if (len(args) == 0) == (file == "") {
				return a.BadUsage(errors.New("want either a code or --code-file"))
			}
			text := strings.Join(args, "")
			if file != "" {
				var err error
				if text, err = readCode(file); err != nil {
					return err
				}
			}
			code, err := issuer.ParseCode(text)
			if err != nil {
				return err
			}
			if len(hosts) == 0 {
				host, err := os.Hostname()
				if err != nil {
					return err
				}
				hosts = []string{host}
			}
			ends, err := issuer.Join(c.Context(), code, dir, hosts, again)
			if err != nil {
				return err
			}
			a.warnOfAddresses(hosts)
			until := ends.UTC().Format(time.RFC3339)
			if asJSON {
				return a.printJSON(joinedJSON{dir, hosts, until})
			}
			_, err = fmt.Fprintf(a.Stdout, "%s is for --identity-dir on %s, and valid until %s for %s\n", dir, hosts[0], until, plain(strings.Join(hosts, ", ")))
			return err
		},
	}
	c.Flags().StringVar(&dir, "identity-dir", "/etc/rfaas/identity", "directory to create")
	c.Flags().StringSliceVar(&hosts, "host", nil, "names and addresses at which others reach this node, the name first (default: this host's name)")
	c.Flags().StringVar(&file, "code-file", "", "file with the code")
	c.Flags().BoolVar(&again, "again", false, "replace a certificate that the directory has")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}

var interfaceAddrs = net.InterfaceAddrs // tests replace it

// warnOfAddresses prints a warning if a certificate for these names and addresses has none of this host's addresses.
func (a *app) warnOfAddresses(hosts []string) {
	all, err := interfaceAddrs()
	if err != nil {
		return
	}
	var own []string
	for _, i := range all {
		if n, ok := i.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			own = append(own, n.IP.String())
		}
	}
	if len(own) == 0 || slices.ContainsFunc(own, func(o string) bool {
		return slices.ContainsFunc(hosts, func(h string) bool { return net.ParseIP(h).Equal(net.ParseIP(o)) })
	}) {
		return
	}
	fmt.Fprintf(a.Stderr, "warning: the certificate has no address of this host (%s): daemons and clients that dial an address refuse it. "+
		"To add addresses, use a new code with --again --host %s,ADDRESS\n", strings.Join(own, ", "), plain(strings.Join(hosts, ",")))
}

func readCode(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	return strings.TrimSpace(string(b)), err
}

// nodeRow is a node's certificate as `rfaas cluster nodes --json` prints it.
type nodeRow struct {
	Serial string   `json:"serial"`
	Hosts  []string `json:"hosts"`
	Ends   string   `json:"ends"`
	State  string   `json:"state"` // valid, expired or revoked
}

// nodeRows returns the listed certificates for a name or an address; "" means all. Beside an error, it returns the certificates that it could read.
func nodeRows(cl *identity.Cluster, name string) ([]nodeRow, error) {
	revoked, err := cl.Revocations()
	if err != nil {
		return nil, err
	}
	all, err := cl.Nodes()
	rows := []nodeRow{}
	for _, n := range all {
		if name != "" && !n.Has(name) {
			continue
		}
		r := nodeRow{n.Serial, n.Hosts, time.Unix(n.Ends, 0).UTC().Format(time.RFC3339), "valid"}
		switch {
		case revoked.Has(identity.RevokedNode, n.Serial):
			r.State = "revoked"
		case time.Now().Unix() >= n.Ends:
			r.State = "expired"
		}
		rows = append(rows, r)
	}
	return rows, err
}

func newClusterNodes(a *app) *cobra.Command {
	var dir, node string
	var all, asJSON bool
	c := &cobra.Command{
		Use:   "nodes",
		Short: "List the valid certificates of nodes that were issued with the cluster's keys",
		Long: "List the valid certificates of nodes that were issued with the cluster's keys. The list is the file `nodes` in the directory of the keys.\n" +
			"Certificates that earlier versions of rfaas issued are missing from it.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			rows, err := nodeRows(cl, node)
			rows = slices.DeleteFunc(rows, func(r nodeRow) bool { return !all && r.State != "valid" })
			if asJSON {
				return errors.Join(a.printJSON(rows), err)
			}
			if len(rows) == 0 {
				fmt.Fprintln(a.Stdout, "no certificates")
				return err
			}
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "SERIAL\tENDS\tSTATE\tNAMES")
			for _, r := range rows {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Serial, r.Ends, r.State, plain(strings.Join(r.Hosts, ",")))
			}
			return errors.Join(w.Flush(), err)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&node, "node", "", "only certificates for this name or address")
	c.Flags().BoolVar(&all, "all", false, "include expired and revoked certificates")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return c
}

// issuerFlag adds the flag for the issuer's address.
func (a *app) issuerFlag(c *cobra.Command, into *string) {
	c.Flags().StringVar(into, "issuer", a.Getenv(issuer.AddressEnv), "HOST:PORT#HASH of the cluster's issuer, as the issuer logs it ($"+issuer.AddressEnv+")")
}

func newTokenGet(a *app) *cobra.Command {
	var at, out, socket string
	var asJSON bool
	c := &cobra.Command{
		Use:   "get",
		Short: "Get a token for this user from the cluster's issuer, by MUNGE",
		Long: "Get a token for this user from the cluster's issuer (rfaas cluster serve), which identifies the user with MUNGE, the authentication service of\n" +
			"Slurm. The user's key is made here and never sent. The token is valid for a day, unless the issuer says otherwise. The user's agent\n" +
			"renews it while programs use it. A valid token that an administrator issued is not replaced.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			path, err := a.tokenPath(nil)
			if out == "" && err != nil {
				return err
			}
			path = cmp.Or(out, path)
			if at == "" {
				return a.BadUsage(fmt.Errorf("no issuer: set --issuer or %s", issuer.AddressEnv))
			}
			address, err := issuer.ParseAddress(at)
			if err != nil {
				return err
			}
			old, err := identity.LoadCredentials(path)
			switch {
			case err == nil && old.Issuer == "" && time.Now().Unix() < old.Claims.Ends:
				return fmt.Errorf("%s contains a token that an administrator issued: %w: choose another file with --out, or move this one away", path, os.ErrExist)
			case err != nil && !errors.Is(err, os.ErrNotExist):
				return err
			}
			cred, err := address.GetToken(c.Context(), issuer.Munge{Socket: socket}, nil)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				return err
			}
			if err := writeToken(path, cred, false); err != nil {
				return err
			}
			fmt.Fprintf(a.Stderr, "wrote %s\n", path)
			return a.printToken(cred.Claims, asJSON)
		},
	}
	a.issuerFlag(c, &at)
	c.Flags().StringVar(&out, "out", "", "file to write (default: $"+identity.TokenFileEnv+" or ~/.rfaas/token)")
	c.Flags().StringVar(&socket, "munge-socket", "", "socket of munged (default: that of munge)")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}

// revokeMine revokes a token of this user at the issuer, or all of them if id is empty.
func (a *app) revokeMine(ctx context.Context, at, id string) error {
	if at == "" {
		return a.BadUsage(fmt.Errorf("no issuer: set --issuer or %s", issuer.AddressEnv))
	}
	address, err := issuer.ParseAddress(at)
	if err != nil {
		return err
	}
	ids, err := address.RevokeTokens(ctx, issuer.Munge{}, id)
	if err != nil {
		return err
	}
	for _, id := range ids {
		fmt.Fprintf(a.Stdout, "token %s is revoked at the issuer\n", id)
	}
	if len(ids) > 0 {
		fmt.Fprintln(a.Stdout, "a resource manager that joined by the issuer refuses them within 5 s, others when the administrator has copied the list")
	}
	if len(ids) == 0 {
		fmt.Fprintln(a.Stdout, "all of them had already been revoked")
	}
	return nil
}
