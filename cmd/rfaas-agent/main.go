// Command rfaas-agent runs the control plane for all client processes of one user on one node.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/internal/systemd"
)

// version is set by the linker.
var version = "unknown"

func main() { os.Exit(run()) }

func run() int {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1) // RATIONALE.md, "Why do the executor and the agent use one processor"
	}
	if os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetGCPercent(50)
		debug.SetMemoryLimit(1 << 30)
	}
	settings, err := agent.Parse(os.Args[1:], os.Getenv, version, os.Stdout)
	if errors.Is(err, agent.ErrDone) {
		return 0
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "rfaas-agent: %v\n", err)
		return 2
	}
	warnings, err := agent.Prepare()
	if err != nil {
		fmt.Fprintf(os.Stderr, "rfaas-agent: %v\n", err)
		return 1
	}
	if settings.Socket == "" {
		// The agent outlives the client that started it: signals to that client's job or terminal are not the agent's.
		_, _ = syscall.Setsid() // fails if it leads a session already
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGXFSZ)
	socket, err := settings.Open()
	if err == nil {
		defer socket.Close()
		err = serve(ctx, &settings, socket, warnings)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "rfaas-agent: %v\n", err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, settings *agent.Settings, socket *agent.Socket, warnings []string) error {
	log, err := settings.Logger(socket, os.Stderr)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		log.Warn(w)
	}
	_ = os.Chdir("/")          // so that no file system is kept in use
	if settings.Socket != "" { // otherwise $NOTIFY_SOCKET is that of the client's service
		notify(log, "READY=1") // the socket listens already
		defer notify(log, "STOPPING=1")
	}
	return agent.Serve(ctx, agent.Config{Socket: socket, Linger: settings.Linger, Version: version, Log: log})
}

// notify sends a state to systemd. A failure is only logged.
func notify(log *slog.Logger, state string) {
	if err := systemd.Notify(state); err != nil {
		log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}
