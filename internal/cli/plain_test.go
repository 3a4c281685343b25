package cli

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// The name of a node or tenant cannot contain commands that the operator's terminal executes.
func TestNamesAreText(t *testing.T) {
	const name = "a\x1b]52;c;cm0=\x07\x1b[2J\u009b2J\tb\nc"
	var out bytes.Buffer
	a := &app{Program: command.Program{Env: Env{Stdout: &out}}}
	err := errors.Join(a.printExecutors([]executorRow{{Address: name, Node: name, Providers: []string{name}}}), a.printLeases([]leaseRow{{Executor: name, Tenant: name, State: name, Flag: name}}, true),
		a.printBills([]bill{{Tenant: name, Lines: []billLine{{Units: "1"}}}}))
	if err != nil {
		t.Fatal(err)
	}
	a.Stderr = &out // an executor chooses the text of its errors
	a.Started = true
	a.Program.Run(t.Context(), &cobra.Command{SilenceErrors: true, SilenceUsage: true, RunE: func(*cobra.Command, []string) error { return errors.New(name) }}, nil)
	if text := out.String(); strings.ContainsAny(text, "\x1b\x07\u009b\t") || strings.Count(text, "]52;c;cm0=") != 10 || strings.Count(text, "\n") != 9 {
		t.Errorf("printed %q", text)
	}
}
