package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// Env is the world that the program sees. All fields are mandatory.
type Env = command.Env

// Run runs the program with its arguments (without its name) and returns the exit status.
func Run(ctx context.Context, env Env, args []string) int {
	a := &app{Program: command.Program{Env: env}}
	return a.Run(ctx, newRoot(a), args)
}

// app is what subcommands share.
type app struct {
	command.Program

	secretFile     string
	tokenFile      string
	allowPlaintext bool
	dataEncryption string
	timeout        time.Duration
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "rfaas",
		Short: "Functions executed by remote memory write",
	}
	f := root.PersistentFlags()
	f.StringVar(&a.secretFile, "secret-file", "", "shared secret (default: $RFAAS_SECRET_FILE, $XDG_RUNTIME_DIR/rfaas/secret or ~/.rfaas/secret)")
	f.StringVar(&a.tokenFile, "token-file", "", "token of rfaas token issue (default: $RFAAS_TOKEN_FILE or ~/.rfaas/token)")
	allow, _ := strconv.ParseBool(a.Getenv(control.AllowPlaintextEnv)) // as client programs read it
	f.BoolVar(&a.allowPlaintext, "allow-plaintext", allow, "use no TLS, even for addresses that are not loopback ($"+control.AllowPlaintextEnv+")")
	f.StringVar(&a.dataEncryption, "data-encryption", cmp.Or(a.Getenv(grant.EnvDataEncryption), "on"),
		"encryption of data on provider tcp: off, on or require ($RFAAS_DATA_ENCRYPTION)")
	f.DurationVar(&a.timeout, "timeout", 30*time.Second, "time limit of a command that talks to a daemon, and of each call of invoke")
	root.AddCommand(
		newVersion(a),
		newMan(a),
		newExecutors(a),
		newBill(a),
		newHistory(a),
		newLedger(a),
		newCluster(a),
		newToken(a),
		newDeploy(a),
		newRun(a),
		newDemo(a),
		newInvoke(a),
		newLeases(a),
		newRevoke(a),
		newDrain(a),
		newCordon(a, true),
		newCordon(a, false),
		newDoctor(a),
		newAgent(a),
		newBench(a),
		newSlurm(a),
	)
	a.Finish(root)
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

// addressFlag adds a flag for a daemon's address. Its default is the environment variable, else fallback. An error about the address
// fallback names the flag and the variable. The command's RunE must be set before.
func (a *app) addressFlag(c *cobra.Command, into *string, name, variable, fallback, help string) {
	value := a.Getenv(variable)
	if value == "" {
		value = fallback
	}
	c.Flags().StringVar(into, name, value, help+" ($"+variable+")")
	run := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		err := run(c, args)
		return withDefault(err, fallback != "" && a.Getenv(variable) == "" && !c.Flags().Changed(name), fallback, name, variable)
	}
}

// daemonError is an error of a request to a daemon.
type daemonError struct {
	daemon string // which
	err    error  // with its class
}

func (e daemonError) Error() string { return e.daemon + ": " + control.Text(e.err) }
func (e daemonError) Unwrap() error { return e.err }

// withDefault names the flag and the variable of an address in an error that says that no daemon of the right kind is there, if the command
// used the default address.
func withDefault(err error, byDefault bool, address, name, variable string) error {
	absent := control.ClassOf(err) == control.ClassConnection || control.ClassOf(err) == control.ClassUnsupported || errors.Is(err, client.ErrConnection)
	if err != nil && byDefault && absent && strings.Contains(err.Error(), address) {
		return fmt.Errorf("%w (default address; set --%s or %s)", err, name, variable)
	}
	return err
}

// printJSON writes v, indented, as the whole output.
func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.Stdout)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
