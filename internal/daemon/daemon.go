// Package daemon starts the resource manager and the executor for a program that needs them only while it runs, and ends them.
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
	"time"
)

// Config describes a daemon to start.
type Config struct {
	Program string
	Args    []string
	Env     []string  // nil: the environment of this process
	Event   string    // the event of the daemon's log that ends Start; "": ready
	Log     io.Writer // receives the daemon's log; nil: nobody
	Apart   bool      // the signals of the terminal do not reach the daemon
}

// Daemon is a running resource manager or executor.
type Daemon struct {
	Address string // of its control port
	Metrics string // of its HTTP port, "" if it has none

	cmd  *exec.Cmd
	done chan struct{}
	stop sync.Once
}

// Start starts a daemon and waits until it is ready. The daemon is killed if this process dies or ctx ends.
func Start(ctx context.Context, program string, args ...string) (*Daemon, error) {
	return Config{Program: program, Args: args}.Start(ctx)
}

// Start starts the daemon and waits for its event. The daemon is killed if this process dies or ctx ends. The error for a daemon
// that ends before the event has the daemon's log.
func (c Config) Start(ctx context.Context) (*Daemon, error) {
	if c.Log == nil {
		c.Log = io.Discard
	}
	event := "msg=" + c.Event + " "
	if c.Event == "" {
		event = "msg=ready "
	}
	cmd := exec.CommandContext(ctx, c.Program, c.Args...)
	cmd.Env = c.Env
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: c.Apart}
	errs, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Program, err)
	}
	d := &Daemon{cmd: cmd, done: make(chan struct{})}
	log := io.TeeReader(errs, c.Log)
	var said strings.Builder
	lines, happened := bufio.NewReader(log), false
	for !happened {
		line, err := lines.ReadString('\n')
		if err != nil {
			break
		}
		d.note(line)
		happened = strings.Contains(line, event)
		said.WriteString("\n  " + strings.TrimSuffix(line, "\n"))
	}
	go func() {
		defer close(d.done)
		_, _ = io.Copy(io.Discard, log)
		_ = cmd.Wait() // the log says why it ended
	}()
	if !happened {
		<-d.done
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s: not started: %w%s", c.Program, context.Cause(ctx), said.String())
		}
		return nil, fmt.Errorf("%s ended at once:%s", c.Program, said.String())
	}
	return d, nil
}

// note takes the addresses from a line of the log.
func (d *Daemon) note(line string) {
	if _, rest, ok := strings.Cut(line, `msg="health and metrics" address=`); ok {
		d.Metrics = strings.Fields(rest)[0]
	}
	if _, rest, ok := strings.Cut(line, "msg=ready address="); ok {
		d.Address = strings.Fields(rest)[0]
	}
}

// Stop ends the daemon by SIGTERM and waits.
func (d *Daemon) Stop() {
	d.stop.Do(func() { _ = d.cmd.Process.Signal(syscall.SIGTERM) })
	<-d.done
}

// StopWithin is Stop, and kills a daemon that has not ended after the duration.
func (d *Daemon) StopWithin(most time.Duration) {
	defer time.AfterFunc(most, func() { _ = d.cmd.Process.Kill() }).Stop()
	d.Stop()
}

// Done is closed when the daemon has ended.
func (d *Daemon) Done() <-chan struct{} { return d.done }

// Signal sends a signal.
func (d *Daemon) Signal(s syscall.Signal) error { return d.cmd.Process.Signal(s) }
