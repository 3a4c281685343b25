// Command rfaas-spawner starts and reaps the workers of one executor. Only the executor starts it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/rfaas-go/rfaas/internal/spawner"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// version is set by the linker.
var version = "unknown"

func main() {
	runtime.GOMAXPROCS(1) // it only forwards messages; waking a second thread for each would double the time
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("rfaas-spawner", version)
		return
	}
	cfg, err := spawner.Parse(os.Args[1:], os.Stderr)
	if err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		os.Exit(2)
	}
	// Batch systems and terminals signal all processes of a job. The spawner ends when the executor closes the socket.
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGUSR1, syscall.SIGUSR2)
	conn, err := wire.Conn(spawner.SocketFD)
	if err == nil {
		err = spawner.Run(conn, cfg, version)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "rfaas-spawner: %v\n", err)
		os.Exit(1)
	}
}
