package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

// Env is the world that the program sees. All fields are mandatory.
type Env struct {
	Version        string
	Getenv         func(string) string
	Stdout, Stderr io.Writer
}

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
	exitUnknown = 3 // bench guard: the machine was too busy to say
)

// Run runs the program with its arguments (without its name) and returns the exit code.
func Run(ctx context.Context, env Env, args []string) int {
	a := &app{Env: env}
	root := newRoot(a)
	root.SetArgs(args)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	c, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	var status exitStatus
	if errors.As(err, &status) {
		return int(status)
	}
	fmt.Fprintf(env.Stderr, "rfaas: %s\n", control.Text(err))
	if !a.started { // cobra refused the command line
		if !c.HasSubCommands() {
			fmt.Fprintf(env.Stderr, "usage: %s\n", c.UseLine())
		}
		fmt.Fprintf(env.Stderr, "%s --help tells more\n", c.CommandPath())
		return exitUsage
	}
	return exitFailure
}

// app is what subcommands share.
type app struct {
	Env
	started bool // the command line was good

	secretFile     string
	tokenFile      string
	allowPlaintext bool
	timeout        time.Duration
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:           "rfaas",
		Short:         "Functions executed by remote memory write",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       versionLine(a), // --version, as the daemons have it
		PersistentPreRun: func(*cobra.Command, []string) {
			a.started = true
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	f := root.PersistentFlags()
	f.StringVar(&a.secretFile, "secret-file", "", "shared secret (default: $RFAAS_SECRET_FILE, $XDG_RUNTIME_DIR/rfaas/secret or ~/.rfaas/secret)")
	f.StringVar(&a.tokenFile, "token-file", "", "token of rfaas token issue (default: $RFAAS_TOKEN_FILE or ~/.rfaas/token)")
	allow, _ := strconv.ParseBool(a.Getenv("RFAAS_ALLOW_PLAINTEXT")) // as client programs read it
	f.BoolVar(&a.allowPlaintext, "allow-plaintext", allow, "speak without TLS, also to addresses that are not loopback ($RFAAS_ALLOW_PLAINTEXT)")
	f.DurationVar(&a.timeout, "timeout", 30*time.Second, "bound of one command that talks to a daemon")
	root.AddCommand(
		newVersion(a),
		newMan(a),
		newExecutors(a),
		newBill(a),
		newLedger(a),
		newCluster(a),
		newToken(a),
		newDeploy(a),
		newInvoke(a),
		newLeases(a),
		newRevoke(a),
		newDrain(a),
		newDoctor(a),
		newBench(a),
		newSlurm(a),
	)
	for _, c := range root.Commands() {
		if c.HasSubCommands() { // else cobra takes any word after it for a wish to be helped, and a script's mistake for success
			c.Args, c.DisableFlagsInUseLine = cobra.NoArgs, true
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		}
	}
	return root
}

// secretPath returns the secret file's path: the flag, else where daemons look too.
func (a *app) secretPath() (string, error) {
	if a.secretFile != "" {
		return a.secretFile, nil
	}
	return control.SecretPath(a.Getenv)
}

// dialConfig is how all commands dial.
func (a *app) dialConfig() control.DialConfig {
	return control.DialConfig{SecretFile: a.secretFile, TokenFile: a.tokenFile, AllowPlaintext: a.allowPlaintext, Getenv: a.Getenv}
}

// dial connects to a daemon.
func (a *app) dial(addr string) (*grpc.ClientConn, error) {
	return control.Dial(addr, a.dialConfig())
}

// addressFlag adds a flag for a daemon's address: its default is the environment variable, else fallback.
func (a *app) addressFlag(c *cobra.Command, into *string, name, variable, fallback, help string) {
	value := a.Getenv(variable)
	if value == "" {
		value = fallback
	}
	c.Flags().StringVar(into, name, value, help+" ($"+variable+")")
}

// printJSON writes v, indented, as the whole output.
func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.Stdout)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
