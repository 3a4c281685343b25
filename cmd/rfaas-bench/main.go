// Command rfaas-bench compares calls with their floor. rfaas bench executes it.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/rfaas-go/rfaas/benchmarks/cli"
	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// version is set by the linker.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // the second signal ends the program at once
	name := ""
	if os.Args[0] == command.BenchName {
		name = command.BenchName
	}
	os.Exit(cli.Run(ctx, command.Env{Name: name, Version: version, Getenv: os.Getenv, Stdout: os.Stdout, Stderr: os.Stderr}, os.Args[1:]))
}
