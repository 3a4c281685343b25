// Command resource-manager knows which executors lend cores, and keeps the accounts of those who use them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/manager"
)

// version is set by the linker.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // the second signal is not caught and ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// run is main without the process: it serves until ctx ends and returns the exit code, 0 for a clean end, 1 for a
// failure, 2 for a wrong command line or wrong settings.
func run(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	settings, err := config.LoadManager(args, environ, stdout, version)
	switch {
	case errors.Is(err, config.ErrDone):
		return 0
	case errors.Is(err, config.ErrUsage):
		fmt.Fprintf(stderr, "resource-manager: %v\n", err)
		return 2
	case err != nil:
		fmt.Fprintf(stderr, "resource-manager: %v\n", err)
		return 1
	}
	if err := manager.Serve(ctx, settings, settings.Logger(stderr)); err != nil {
		fmt.Fprintf(stderr, "resource-manager: %v\n", err)
		return 1
	}
	return 0
}
