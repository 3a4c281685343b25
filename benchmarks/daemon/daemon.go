// Package daemon starts the programs that benchmarks talk to, and ends them.
package daemon

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
)

// Daemon is a running resource manager or executor.
type Daemon struct {
	Address string // of its control port
	Metrics string // of its HTTP port, "" if it has none

	cmd  *exec.Cmd
	done chan struct{}
	stop sync.Once
}

// Start starts a daemon of ours and waits until it says that it is ready. It dies with this process, and when ctx ends.
func Start(ctx context.Context, program string, args ...string) (*Daemon, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	errs, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	d := &Daemon{cmd: cmd, done: make(chan struct{})}
	var said strings.Builder
	lines := bufio.NewScanner(errs)
	for lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), `msg="health and metrics" address=`); ok {
			d.Metrics, _, _ = strings.Cut(rest, " ")
		}
		if _, rest, ok := strings.Cut(lines.Text(), "msg=ready address="); ok {
			d.Address, _, _ = strings.Cut(rest, " ")
			break
		}
		said.WriteString("\n  " + lines.Text())
	}
	go func() {
		defer close(d.done)
		_, _ = io.Copy(io.Discard, errs)
		_ = cmd.Wait() // how it ends is of no interest
	}()
	if d.Address == "" {
		<-d.done
		return nil, fmt.Errorf("%s ended at once:%s", program, said.String())
	}
	return d, nil
}

// Stop ends it by SIGTERM and waits.
func (d *Daemon) Stop() {
	d.stop.Do(func() { _ = d.cmd.Process.Signal(syscall.SIGTERM) })
	<-d.done
}

// Done is closed when it has ended.
func (d *Daemon) Done() <-chan struct{} { return d.done }

// Signal sends a signal.
func (d *Daemon) Signal(s syscall.Signal) error { return d.cmd.Process.Signal(s) }
