package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// benchProgram is a program of its own, so that rfaas links neither benchmarks nor plots.
const benchProgram = "rfaas-bench"

// newBench executes rfaas-bench, which is beside this program, with the same arguments, environment and process id.
func newBench(*app) *cobra.Command {
	return &cobra.Command{
		Use:                "bench",
		Short:              "Measure calls beside their floor",
		Long:               "Measure calls beside their floor. This command executes the program rfaas-bench with the same arguments.",
		DisableFlagParsing: true,
		ValidArgsFunction:  completeBench,
		RunE: func(_ *cobra.Command, args []string) error {
			program, err := command.Beside(benchProgram)
			if err != nil {
				return err
			}
			err = syscall.Exec(program, append([]string{command.BenchName}, args...), os.Environ()) // returns only on failure
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s is missing: build it with make programs, or install it beside rfaas", program)
			}
			return fmt.Errorf("execute %s: %w", program, err)
		},
	}
}

// completeBench asks rfaas-bench for completions. cobra's hidden command __complete prints one per line, and last a
// directive.
func completeBench(c *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	program, err := command.Beside(benchProgram)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	out, err := exec.CommandContext(c.Context(), program, append(append([]string{"__complete"}, args...), toComplete)...).Output()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var directive cobra.ShellCompDirective
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := len(lines) - 1
	if _, err := fmt.Sscanf(lines[last], ":%d", &directive); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return lines[:last], directive
}
