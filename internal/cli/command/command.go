// Package command is what the programs rfaas and rfaas-bench share: how a command line is executed, what is printed about an
// error, and the exit statuses.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/control"
)

// Env is the world that a program sees. All fields but Name are mandatory.
type Env struct {
	Name           string // by which another program has executed this one; "": the program's own
	Version        string
	Getenv         func(string) string
	Stdout, Stderr io.Writer
}

// Exit statuses.
const (
	OK      = 0
	Failure = 1
	Usage   = 2
	Unknown = 3 // bench guard: the machine was too busy to say
)

// ExitStatus is an error that ends the program with this status and prints nothing.
type ExitStatus int

func (s ExitStatus) Error() string { return "exit status " + strconv.Itoa(int(s)) }

// Program is a program while it executes a command line.
type Program struct {
	Env
	Started bool // the command line is correct, and the command has started
}

// BadUsage marks err as an error of the command line, and returns it.
func (p *Program) BadUsage(err error) error {
	p.Started = false
	return err
}

// VersionLine is what --version prints, as the daemons print it.
func (p *Program) VersionLine() string {
	return fmt.Sprintf("rfaas %s (control protocol %d, %s, %s)", p.Version, control.ProtocolVersion, runtime.Version(), runtime.GOARCH)
}

// BenchName is the name by which rfaas executes rfaas-bench, so that help and errors name the command that the user has typed.
const BenchName = "rfaas bench"

// Finish adds to root what all programs have: --version, and refusing unknown subcommands of the commands that root has now.
func (p *Program) Finish(root *cobra.Command) {
	root.SilenceUsage, root.SilenceErrors = true, true
	root.Version = p.VersionLine()
	root.SetVersionTemplate("{{.Version}}\n")
	root.PersistentPreRun = func(*cobra.Command, []string) { p.Started = true }
	for _, c := range root.Commands() {
		if c.HasSubCommands() { // cobra prints the help and succeeds for any unknown word, which hides a script's mistake
			c.Args, c.DisableFlagsInUseLine = cobra.NoArgs, true
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		}
	}
}

// lineOrText replaces control characters other than the ends of lines. A daemon may have chosen the text.
func lineOrText(r rune) rune {
	if unicode.IsControl(r) && r != '\n' {
		return ' '
	}
	return r
}

// Run executes root with the arguments (without the program's name) and returns the exit status.
func (p *Program) Run(ctx context.Context, root *cobra.Command, args []string) int {
	root.SetArgs(args)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	c, err := root.ExecuteContextC(ctx)
	if err == nil {
		return OK
	}
	var status ExitStatus
	if errors.As(err, &status) {
		return int(status)
	}
	fmt.Fprintf(p.Stderr, "%s: %s\n", root.DisplayName(), strings.Map(lineOrText, control.Text(err)))
	if !p.Started { // cobra refused the command line
		if !c.HasSubCommands() {
			fmt.Fprintf(p.Stderr, "usage: %s\n", c.UseLine())
		}
		fmt.Fprintf(p.Stderr, "%s --help tells more\n", c.CommandPath())
		return Usage
	}
	return Failure
}

// Beside returns the path of a file that is built or installed with this program. The path is relative to the program's directory.
func Beside(path ...string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the programs beside this one: %w", err)
	}
	return filepath.Join(append([]string{filepath.Dir(self)}, path...)...), nil
}
