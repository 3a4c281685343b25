package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// mostDemoWorkers bounds the workers of the demonstration. One process cannot keep many more busy with parts of its loop.
const mostDemoWorkers = 7

// demoFlags are the flags of rfaas demo.
type demoFlags struct {
	options, workers int
	json             bool
}

func newDemo(a *app) *cobra.Command {
	var f demoFlags
	c := &cobra.Command{
		Use:   "demo [flags]",
		Short: "Show on this machine what a program gains from rfaas",
		Long: "Show on this machine what a program gains from rfaas. The command starts a resource manager and an executor, as rfaas run does. Then it\n" +
			"runs a program that prices a file of options by Black-Scholes, once with leased workers and once without, compares all prices and the\n" +
			"two times, and measures calls. This is the program of make run, compiled for one process, so that it needs no MPI.\n" +
			"If RFAAS_MANAGER or RFAAS_EXECUTOR is set, the workers are leased there, and the command starts nothing.\n" +
			"The exit status is 0 if all prices are right. The speed-up does not affect it: on a busy machine it can be below 1.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if f.options < 1 || f.workers < 1 {
				return a.BadUsage(errors.New("--options and --workers must be at least 1"))
			}
			dir, err := command.Beside("..", "libexec", "rfaas-demo")
			if err != nil {
				return err
			}
			program := filepath.Join(dir, "blackscholes")
			if _, err := os.Stat(program); err != nil {
				return fmt.Errorf("%w: build it with make demo-program, or install it in ../libexec of this program", err)
			}
			args := []string{program, "--options", filepath.Join(dir, "options.txt"), "--library", filepath.Join(dir, "blackscholes.so"),
				"--n", strconv.Itoa(f.options), "--workers", strconv.Itoa(f.workers)}
			if f.json {
				args = append(args, "--json")
			}
			run := runFlags{cores: strconv.Itoa(f.workers)}
			if a.Getenv("RFAAS_MANAGER") != "" || a.Getenv("RFAAS_EXECUTOR") != "" {
				run.cores = ""
			}
			return a.runWith(c.Context(), &run, args)
		},
	}
	c.Flags().IntVar(&f.options, "options", 4000000, "options to price; the file is repeated")
	c.Flags().IntVar(&f.workers, "workers", min(max(runtime.NumCPU()-1, 1), mostDemoWorkers), "workers to lease, each on a core of its own")
	c.Flags().BoolVar(&f.json, "json", false, "print a JSON object")
	return c
}
