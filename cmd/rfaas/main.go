// Command rfaas is the command line of rfaas, for users, operators and administrators. `rfaas help` lists its commands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/rfaas-go/rfaas/internal/cli"
)

// version is set by the linker.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // the second signal ends the program at once
	os.Exit(cli.Run(ctx, cli.Env{Version: version, Getenv: os.Getenv, Stdout: os.Stdout, Stderr: os.Stderr}, os.Args[1:]))
}
