// Command executor lends this node's cores to functions that are called by remote memory write.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/executor"
	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// version is set by the linker.
var version = "unknown"

// The main goroutine stays on the first thread of the process, which starts all children (wire.BeStarter).
func init() { runtime.LockOSThread() }

func main() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1) // RATIONALE.md, "Why do the executor and the agent use one processor"
	}
	if executor.IsRenewal(os.Args) {
		os.Exit(executor.RunRenewal(context.Background(), os.Args, os.Stdout))
	}
	state, environ, err := handover.Take(os.Environ())
	if err != nil {
		fmt.Fprintf(os.Stderr, "executor: %v: all leases end\n", err)
		os.Exit(1)
	}
	if state.GetDropped() {
		if err := privilege.Hide(); err != nil { // execve has permitted tracing
			fmt.Fprintf(os.Stderr, "executor: %v\n", err)
			os.Exit(1)
		}
	}
	s := receive(int(state.GetSignals()), state.GetEnding(), func() { os.Exit(128 + int(syscall.SIGINT)) })
	hand := executor.Handover{Asked: s.handover, Program: handover.Program(), Args: os.Args, Environ: environ, State: state, Version: version,
		StopSignals: s.stop, Execve: replace}
	ended := make(chan struct{})
	status := 0
	go func() {
		defer close(ended)
		status = run(s.first, s.second, true, os.Args[1:], environ, hand, os.Stdout, os.Stderr)
	}()
	wire.BeStarter(ended)
	os.Exit(status)
}

// run is main without the process: it serves until ctx ends, lets what runs finish until now ends or the grace is over, and
// returns the exit code, 0 for a clean end, 1 for a failure, 2 for a wrong command line or wrong settings. With separate it gives up
// the process's rights for good once it has started.
func run(ctx, now context.Context, separate bool, args, environ []string, hand executor.Handover, stdout, stderr io.Writer) int {
	settings, err := config.LoadExecutor(args, environ, stdout, version)
	switch {
	case errors.Is(err, config.ErrDone):
		return 0
	case errors.Is(err, config.ErrUsage):
		fmt.Fprintf(stderr, "executor: %v\n", err)
		return 2
	case err != nil:
		fmt.Fprintf(stderr, "executor: %v\n", err)
		return 1
	}
	settings.Separate = separate
	hand.Check = func() error {
		next, err := config.LoadExecutor(args, environ, io.Discard, version)
		if err != nil {
			return err
		}
		return executor.SameForHandover(&settings, &next)
	}
	log := settings.Logger(stderr)
	if settings.Manager == "" {
		warnAlone(log, environ)
	}
	if err := executor.Serve(ctx, now, settings, hand, log); err != nil {
		fmt.Fprintf(stderr, "executor: %v\n", err)
		return 1
	}
	return 0
}

// warnAlone logs that the executor has no resource manager. That is probably a mistake if the environment names one for clients.
func warnAlone(log *slog.Logger, environ []string) {
	const alone = "no resource manager (--manager): only RFAAS_EXECUTOR=ADDRESS reaches this executor"
	if slices.ContainsFunc(environ, func(kv string) bool { return strings.HasPrefix(kv, "RFAAS_MANAGER=") && kv != "RFAAS_MANAGER=" }) {
		log.Warn(alone + "; RFAAS_MANAGER is for clients; did you mean --manager?")
		return
	}
	log.Info(alone)
}
