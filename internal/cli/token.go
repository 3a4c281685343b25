package cli

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
)

func newToken(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "token",
		Short: "Get, issue, list, show, verify, renew and revoke the tokens that authenticate users",
	}
	c.AddCommand(newTokenGet(a), newTokenIssue(a), newTokenList(a), newTokenShow(a), newTokenVerify(a), newTokenRenew(a), newTokenRevoke(a))
	return c
}

// tokenRow is a token as --json prints it.
type tokenRow struct {
	ID      string  `json:"id"`
	Tenant  string  `json:"tenant"`
	UID     *uint32 `json:"uid,omitempty"`
	Role    string  `json:"role"`
	Begins  string  `json:"begins"`
	Ends    string  `json:"ends"`
	Expired bool    `json:"expired"`
}

func rowOfToken(c identity.Claims) tokenRow {
	ends := time.Unix(c.Ends, 0)
	return tokenRow{ID: c.ID, Tenant: c.Tenant, UID: c.UID, Role: c.Role, Begins: time.Unix(c.Begins, 0).UTC().Format(time.RFC3339),
		Ends: ends.UTC().Format(time.RFC3339), Expired: !time.Now().Before(ends)}
}

func (a *app) printToken(c identity.Claims, asJSON bool) error {
	r := rowOfToken(c)
	if asJSON {
		return a.printJSON(r)
	}
	uid := "none"
	if r.UID != nil {
		uid = strconv.FormatUint(uint64(*r.UID), 10)
	}
	note := ""
	if r.Expired {
		note = " (expired)"
	}
	_, err := fmt.Fprintf(a.Stdout, "id      %s\ntenant  %s\nuid     %s\nrole    %s\nbegins  %s\nends    %s%s\n", r.ID, r.Tenant, uid, r.Role, r.Begins, r.Ends, note)
	return err
}

// tokenPath returns the token file of a command: its argument, that of the flag, or the one that clients use.
func (a *app) tokenPath(args []string) (string, error) {
	if len(args) > 0 {
		return args[0], nil
	}
	usual, _ := identity.TokenPath(a.Getenv)
	if path := cmp.Or(a.tokenFile, usual); path != "" {
		return path, nil
	}
	return "", fmt.Errorf("no token file: name one, or set %s or HOME", identity.TokenFileEnv)
}

func writeToken(path string, cred *identity.Credentials, fresh bool) error {
	b, err := cred.Encode()
	if err != nil {
		return err
	}
	err = identity.WriteFile(path, b, 0o600, fresh)
	if errors.Is(err, fs.ErrExist) {
		return tokenExists(path)
	}
	return err
}

func tokenExists(path string) error {
	return fmt.Errorf("%s: %w: choose another file with --out, or renew this token by rfaas token renew", path, fs.ErrExist)
}

func checkLife(a *app, life time.Duration) error {
	if life < time.Second {
		return a.BadUsage(fmt.Errorf("--for %v is less than a second", life))
	}
	return nil
}

func newTokenIssue(a *app) *cobra.Command {
	var dir, tenant, role, out string
	var uid int64
	var life time.Duration
	c := &cobra.Command{
		Use:   "issue",
		Short: "Make the token file of a user",
		Long: "Make the token file of a user: the token, the user's private key, which is never sent, and the cluster's certificate.\n" +
			"The user keeps it as ~/.rfaas/token with mode 0600, or sets $RFAAS_TOKEN_FILE to its path.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if tenant == "" {
				return a.BadUsage(errors.New("--tenant is missing"))
			}
			claims := identity.Claims{Tenant: tenant, Role: role}
			if c.Flags().Changed("uid") {
				if uid < 1 || uid >= math.MaxUint32 {
					return a.BadUsage(fmt.Errorf("--uid %d is not in 1..%d", uid, uint32(math.MaxUint32-1)))
				}
				id := uint32(uid)
				claims.UID = &id
			}
			if err := checkLife(a, life); err != nil {
				return err
			}
			if out == "" && strings.ContainsRune(tenant, '/') {
				return a.BadUsage(fmt.Errorf("--tenant %q is not a file name: give the file for the token with --out", tenant))
			}
			out := cmp.Or(out, tenant+".token")
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			if _, err := os.Lstat(out); err == nil { // checked here too, so that a token that cannot be written is not listed
				return tokenExists(out)
			}
			now := time.Now()
			claims.Ends = now.Add(life).Unix()
			cred, err := cl.IssueToken(claims, nil, now)
			if err != nil {
				return err
			}
			if err := writeToken(out, cred, true); err != nil {
				return err
			}
			fmt.Fprintf(a.Stderr, "wrote %s: give it to its user, who keeps it as ~/.rfaas/token\n", out)
			return a.printToken(cred.Claims, false)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&tenant, "tenant", "", "account that owns the leases and pays for them")
	c.Flags().Int64Var(&uid, "uid", 0, "user id as which functions run (default: none)")
	c.Flags().StringVar(&role, "role", "tenant", "tenant, or operator, which may list and end all leases, and cordon and drain nodes")
	c.Flags().DurationVar(&life, "for", tokenLife, "how long it is valid")
	c.Flags().StringVar(&out, "out", "", "file to write, which must not exist (default: TENANT.token)")
	return c
}

func newTokenShow(a *app) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "show [FILE]",
		Short: "Show what a token says, without checking whether it is accepted",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			cred, err := a.loadToken(args)
			if err != nil {
				return err
			}
			return a.printToken(cred.Claims, asJSON)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}

func (a *app) loadToken(args []string) (*identity.Credentials, error) {
	path, err := a.tokenPath(args)
	if err != nil {
		return nil, err
	}
	return identity.LoadCredentials(path)
}

func newTokenVerify(a *app) *cobra.Command {
	var dir, manager string
	var asJSON bool
	c := &cobra.Command{
		Use:   "verify [FILE]",
		Short: "Check whether a token is accepted now: signed by this cluster, valid at this time, and not revoked",
		Long: "Check whether a token is accepted now: signed by this cluster, valid at this time, and not revoked.\n" +
			"--dir, or $" + clusterDirEnv + ", names a directory with the keys that check it. Without a directory, the resource manager checks it, or the executor of\n" +
			"$RFAAS_EXECUTOR if --manager and $RFAAS_MANAGER are not set.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			path, err := a.tokenPath(args)
			if err != nil {
				return err
			}
			cred, err := identity.LoadCredentials(path)
			if err != nil {
				return err
			}
			by := "the keys in " + dir
			_, err = os.Stat(dir)
			if c.Flags().Changed("dir") || a.Getenv(clusterDirEnv) != "" || err == nil && manager == "" && a.Getenv("RFAAS_EXECUTOR") == "" {
				v, err := identity.OpenVerifier(dir)
				if err != nil {
					return fmt.Errorf("cluster: %w", err)
				}
				if _, err := v.Check(cred.Token, time.Now()); err != nil {
					return err
				}
			} else if by, err = a.askAboutToken(c.Context(), path, manager); err != nil {
				return err
			}
			fmt.Fprintf(a.Stderr, "the token is accepted now, by %s\n", by)
			return a.printToken(cred.Claims, asJSON)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().Lookup("dir").Usage = "directory of the cluster's keys, or of a node's identity ($" + clusterDirEnv + ")"
	c.Flags().StringVar(&manager, "manager", a.Getenv("RFAAS_MANAGER"), "address of the resource manager that checks the token ($RFAAS_MANAGER)")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}

// askAboutToken makes a call with a token and no other credential, at the resource manager or else the executor of the environment. It returns
// the name of the daemon.
func (a *app) askAboutToken(ctx context.Context, path, manager string) (by string, err error) {
	address := cmp.Or(manager, a.Getenv("RFAAS_EXECUTOR"))
	if address == "" {
		return "", a.BadUsage(errors.New("no daemon to check the token: set --manager, RFAAS_MANAGER, RFAAS_EXECUTOR or --dir"))
	}
	if at, err := control.ParseAddress(address); err == nil && at.Network == "unix" {
		return "", a.BadUsage(fmt.Errorf("%s is a unix socket, where the daemon needs no token: name its address with a port", address))
	}
	conn, err := control.Dial(address, control.DialConfig{TokenFile: path, AllowPlaintext: a.allowPlaintext, Getenv: a.Getenv})
	if err != nil {
		return "", err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	if manager != "" {
		by = "the resource manager " + manager
		_, err = control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
	} else {
		by = "the executor " + address
		_, err = control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{})
	}
	if err != nil {
		return "", daemonError{by, err}
	}
	return by, nil
}

func newTokenRenew(a *app) *cobra.Command {
	var dir string
	var life time.Duration
	c := &cobra.Command{
		Use:   "renew FILE",
		Short: "Extend the validity of a token file; running programs load the new file",
		Long: "Extend the validity of a token file. Running programs load the new file. The issuer renews a token of rfaas token get,\n" +
			"by MUNGE. The agent asks for that in time. Other tokens are renewed with the cluster's keys.",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkLife(a, life); err != nil {
				return err
			}
			cred, err := identity.LoadCredentials(args[0])
			if err != nil {
				return err
			}
			if cred.Issuer != "" {
				if cred, err = issuer.RenewToken(c.Context(), issuer.Munge{}, args[0], cred); err != nil {
					return err
				}
				return a.printToken(cred.Claims, false)
			}
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			v, err := identity.OpenVerifier(dir)
			if err != nil {
				return err
			}
			now := time.Now()
			var refused *identity.Error
			if _, err := v.Check(cred.Token, now); errors.As(err, &refused) && refused.Reason != identity.Expired {
				return err // only an expired token may still be renewed
			}
			claims := cred.Claims
			claims.ID, claims.Begins, claims.Ends = "", 0, now.Add(life).Unix()
			if cred, err = cl.IssueToken(claims, ed25519.PrivateKey(cred.Key), now); err != nil {
				return err
			}
			if err := writeToken(args[0], cred, false); err != nil {
				return err
			}
			return a.printToken(cred.Claims, false)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().DurationVar(&life, "for", tokenLife, "how long it is valid from now on, if it does not come from an issuer")
	return c
}

// issuedRow is a token as `rfaas token list --json` prints it.
type issuedRow struct {
	tokenRow
	Revoked bool `json:"revoked"`
}

func (r *issuedRow) state() string {
	switch {
	case r.Revoked:
		return "revoked"
	case r.Expired:
		return "expired"
	}
	return "valid"
}

// issued returns the tokens that the cluster has issued for a tenant. An empty tenant means all. With an error, it returns the tokens that could be
// read.
func issued(cl *identity.Cluster, tenant string) ([]issuedRow, error) {
	revoked, err := cl.Revocations()
	if err != nil {
		return nil, err
	}
	all, err := cl.Issued()
	rows := []issuedRow{}
	for _, claims := range all {
		if tenant == "" || claims.Tenant == tenant {
			rows = append(rows, issuedRow{rowOfToken(claims), slices.ContainsFunc(revoked.Entries, func(e identity.Revocation) bool {
				return e.Kind == identity.RevokedToken && e.ID == claims.ID
			})})
		}
	}
	return rows, err
}

func newTokenList(a *app) *cobra.Command {
	var dir, tenant string
	var all, asJSON bool
	c := &cobra.Command{
		Use:   "list",
		Short: "List the valid tokens that were issued with the cluster's keys",
		Long: "List the valid tokens that were issued with the cluster's keys. The list is the file `issued` in the directory of the keys.\n" +
			"Tokens that earlier versions of rfaas issued are missing from it.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			rows, err := issued(cl, tenant)
			rows = slices.DeleteFunc(rows, func(r issuedRow) bool { return !all && r.state() != "valid" })
			if asJSON {
				return errors.Join(a.printJSON(rows), err)
			}
			return errors.Join(a.printIssued(rows), err)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&tenant, "tenant", "", "only tokens of this tenant")
	c.Flags().BoolVar(&all, "all", false, "include expired and revoked tokens")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return c
}

func (a *app) printIssued(rows []issuedRow) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "no tokens")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tTENANT\tUID\tROLE\tENDS\tSTATE")
	for _, r := range rows {
		uid := "-"
		if r.UID != nil {
			uid = strconv.FormatUint(uint64(*r.UID), 10)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", r.ID, plain(r.Tenant), uid, r.Role, r.Ends, r.state())
	}
	return w.Flush()
}

// tokensOf returns a revocation for each valid token of a tenant.
func tokensOf(cl *identity.Cluster, tenant, note string) ([]identity.Revocation, error) {
	rows, err := issued(cl, tenant)
	var entries []identity.Revocation
	for _, r := range rows {
		if r.state() == "valid" {
			entries = append(entries, identity.Revocation{Kind: identity.RevokedToken, ID: r.ID, Note: note})
		}
	}
	if err == nil && len(entries) == 0 {
		err = fmt.Errorf("no valid token of tenant %q is listed (rfaas token list --all lists all tokens; revoke a token that an earlier version issued by its id)", tenant)
	}
	return entries, err
}

func newTokenRevoke(a *app) *cobra.Command {
	var dir, note, tenant, at string
	var mine bool
	c := &cobra.Command{
		Use:   "revoke ID|FILE | revoke --tenant TENANT | revoke --mine [ID|FILE]",
		Short: "Add tokens to the cluster's signed list of revoked credentials; copy the list to the resource manager's node",
		Long: "Add a token, or all valid tokens of a tenant, to the cluster's signed list of revoked credentials (`revoked` in its directory), and\n" +
			"increment the serial number of the list.\n" +
			"To put the list into force, copy it over the file of that name in the resource manager's identity directory, by rename (as rsync does).\n" +
			"Executors fetch it from the resource manager. An executor without a resource manager needs a copy in its own identity directory.\n" +
			"Leases that were already granted continue: rfaas revoke --tenant TENANT with $RFAAS_MANAGER set ends them.\n" +
			"rfaas cluster revoked shows the list, rfaas cluster revoke adds certificates of nodes.\n" +
			"With --mine, users revoke their own tokens, one or all, at the issuer (--issuer), which identifies the user by MUNGE.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if mine && tenant != "" || !mine && (len(args) == 0) == (tenant == "") {
				return a.BadUsage(errors.New("want the id or the file of a token, or --tenant or --mine"))
			}
			var entries []identity.Revocation
			id := ""
			if len(args) > 0 {
				id = args[0]
				if cred, err := identity.LoadCredentials(id); err == nil {
					id, at = cred.Claims.ID, cmp.Or(at, cred.Issuer)
				} else if !identity.IsTokenID(id) || !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("%q is neither a token's id nor a token file: %w", id, err)
				}
			}
			if mine {
				return a.revokeMine(c.Context(), at, id)
			}
			if tenant == "" {
				entries = []identity.Revocation{{Kind: identity.RevokedToken, ID: id, Note: note}}
			}
			cl, err := identity.OpenCluster(dir)
			if err != nil {
				return err
			}
			if tenant != "" {
				if entries, err = tokensOf(cl, tenant, note); len(entries) == 0 {
					return err
				}
			}
			return errors.Join(a.revoke(cl, entries...), err)
		},
	}
	a.clusterFlag(c, &dir)
	c.Flags().StringVar(&note, "note", "", "reason, for readers of the list")
	c.Flags().StringVar(&tenant, "tenant", "", "revoke all valid tokens of this tenant")
	c.Flags().BoolVar(&mine, "mine", false, "revoke all valid tokens of this user, or the named one, at the issuer")
	a.issuerFlag(c, &at)
	return c
}
