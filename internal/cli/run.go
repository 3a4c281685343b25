package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/daemon"
)

const (
	cannotExecute = command.ExitStatus(126)
	notFound      = command.ExitStatus(127)
	stopMost      = 10 * time.Second // a daemon that takes longer to stop is killed
	lookEvery     = 100 * time.Millisecond
)

// runFlags are the flags of rfaas run.
type runFlags struct {
	cores, logs string
	verbose     bool
}

func newRun(a *app) *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use:   "run [flags] -- PROGRAM [ARGUMENT...]",
		Short: "Run a program together with the executor that it needs",
		Long: "Run a program together with the executor that it needs. The command starts a resource manager and an executor of this node,\n" +
			"waits until they are ready, runs the program, and stops them when the program has ended. RFAAS_MANAGER and\n" +
			"RFAAS_SECRET_FILE tell the program and its child processes where they are. Settings of the executor can be given in the environment:\n" +
			"see executor(8).\n" +
			"If RFAAS_MANAGER or RFAAS_EXECUTOR is set, the command starts nothing. It waits until the resource manager there lists an\n" +
			"executor, or until the executor there answers, and runs the program.\n" +
			"The exit status is the program's, 128 plus the number of the signal that ended it, 127 if there is no such program, 126 if it\n" +
			"cannot be executed, 1 if the daemons do not start, and 2 for a wrong command line. --timeout bounds the wait.",
		Example: "  rfaas run -- mpirun -n 2 ./a.out\n  rfaas run --cores 2 -- rfaas invoke echo.so echo --hex 0102 --print hex",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("no program: give one, with its arguments, after --")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return a.runWith(c.Context(), &f, args) },
	}
	c.Flags().SetInterspersed(false) // the flags after the program are the program's
	c.Flags().StringVar(&f.cores, "cores", "", "cores that the executor lends: a count, or a list of logical CPUs like 2-5,8 (default: see executor(8))")
	c.Flags().StringVar(&f.logs, "logs", "", "existing directory for the logs of the daemons, manager.log and executor.log (default: the logs are not kept)")
	c.Flags().BoolVar(&f.verbose, "verbose", false, "report on standard error what is started and stopped")
	return c
}

// runWith runs the program. It starts daemons first, unless the environment names some.
func (a *app) runWith(ctx context.Context, f *runFlags, args []string) error {
	path, err := exec.LookPath(args[0])
	if err != nil && !errors.Is(err, exec.ErrDot) {
		fmt.Fprintf(a.Stderr, "rfaas run: %v\n", err)
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			return notFound
		}
		return cannotExecute
	}
	// From here to the end, also while the daemons stop, no signal ends this process.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	say := io.Discard
	if f.verbose {
		say = a.Stderr
	}
	if a.Getenv("RFAAS_MANAGER") != "" || a.Getenv("RFAAS_EXECUTOR") != "" {
		if f.cores != "" || f.logs != "" {
			return a.BadUsage(errors.New("--cores and --logs are for an executor that this command starts: unset RFAAS_MANAGER and RFAAS_EXECUTOR, or leave the flags out"))
		}
		if err := a.awaitExecutor(ctx, say); err != nil {
			return err
		}
		return a.runProgram(signals, path, args, nil, nil)
	}
	own, err := a.startOwn(ctx, f, say)
	if err != nil {
		return err
	}
	defer own.stop()
	return a.runProgram(signals, path, args, own.environment(), own.lost)
}

// awaitExecutor waits until the resource manager that the environment names lists an executor. If the environment names no manager, it waits until the
// executor that the environment names answers.
func (a *app) awaitExecutor(parent context.Context, say io.Writer) error {
	ctx, cancel := context.WithTimeout(parent, a.timeout)
	defer cancel()
	manager := a.Getenv("RFAAS_MANAGER") // as for the program, the manager wins over an executor
	if manager == "" {
		executor := a.Getenv("RFAAS_EXECUTOR")
		fmt.Fprintf(say, "rfaas run: waiting for the executor at %s\n", executor)
		conn, err := a.dial(executor)
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion}, grpc.WaitForReady(true))
		if err != nil {
			return fmt.Errorf("executor at %s ($RFAAS_EXECUTOR): %s", executor, control.Text(err))
		}
		return nil
	}
	fmt.Fprintf(say, "rfaas run: waiting for an executor at the resource manager %s\n", manager)
	v, err := a.openBoard(manager)
	if err != nil {
		return err
	}
	defer v.close()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	empty := false // the manager has answered, and has no executor
	for {
		rows, err := v.list(ctx)
		if err == nil && slices.ContainsFunc(rows, func(r executorRow) bool { return r.State == "idle" || r.State == "busy" }) {
			return nil
		}
		empty = empty || err == nil
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		}
		switch {
		case parent.Err() != nil:
			return parent.Err()
		case empty:
			return fmt.Errorf("resource manager at %s ($RFAAS_MANAGER): no executor has registered within %v: start one, or wait longer with --timeout", manager, a.timeout)
		}
		return err
	}
}

// ownDaemons are the daemons of one run, and the directory with their secret and the agent's socket.
type ownDaemons struct {
	app               *app
	say               io.Writer
	dir               string
	manager, executor *daemon.Daemon
	lost              chan string // the name of a daemon that ended before stop
	logs              []*os.File
	stopping          chan struct{}
}

// startOwn starts a resource manager and an executor, and returns when the executor has registered.
func (a *app) startOwn(parent context.Context, f *runFlags, say io.Writer) (_ *ownDaemons, err error) {
	o := &ownDaemons{app: a, say: say, lost: make(chan string, 2), stopping: make(chan struct{})}
	if o.dir, err = os.MkdirTemp("", "rfaas-run-"); err != nil {
		return nil, fmt.Errorf("make a directory for the secret of this run: %w", err)
	}
	defer func() {
		if err != nil {
			o.stop()
		}
	}()
	began := time.Now()
	secret := filepath.Join(o.dir, "secret")
	o.manager, err = o.start(parent, f, "manager", "resource-manager", "ready", "--listen", "127.0.0.1:0", "--secret-file", secret)
	if err != nil {
		return nil, err
	}
	flags := []string{"--listen", "127.0.0.1:0", "--secret-file", secret, "--manager", o.manager.Address}
	if f.cores != "" {
		flags = append(flags, "--cores", f.cores)
	}
	if o.executor, err = o.start(parent, f, "executor", "executor", "registered", flags...); err != nil {
		return nil, err
	}
	fmt.Fprintf(say, "rfaas run: resource manager at %s and executor at %s are ready after %v\n", o.manager.Address, o.executor.Address,
		time.Since(began).Round(time.Millisecond))
	return o, nil
}

// start starts one daemon and waits until it is ready. If the context ends or the time-out passes before that, the daemon is killed. Afterwards
// neither affects it.
func (o *ownDaemons) start(parent context.Context, f *runFlags, name, program, event string, args ...string) (*daemon.Daemon, error) {
	path, err := command.Beside(program)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("%s is missing: build it with make programs, or install it beside rfaas", path)
	}
	c := daemon.Config{Program: path, Args: args, Event: event, Apart: true}
	if f.logs != "" {
		log, err := os.Create(filepath.Join(f.logs, name+".log"))
		if err != nil {
			return nil, fmt.Errorf("--logs: %w", err)
		}
		o.logs = append(o.logs, log)
		c.Log = log
	}
	ctx, kill := context.WithCancelCause(context.WithoutCancel(parent))
	interrupted := context.AfterFunc(parent, func() { kill(errors.New("interrupted")) })
	late := time.AfterFunc(o.app.timeout, func() { kill(fmt.Errorf("not ready after %v (--timeout)", o.app.timeout)) })
	d, err := c.Start(ctx)
	late.Stop()
	interrupted()
	if err != nil {
		kill(nil)
		return nil, err
	}
	go func() {
		<-d.Done()
		kill(nil)
		select {
		case <-o.stopping:
		default:
			o.lost <- name
		}
	}()
	return d, nil
}

// environment is what the program has in addition to the environment of this process.
func (o *ownDaemons) environment() []string {
	env := []string{"RFAAS_MANAGER=" + o.manager.Address, "RFAAS_SECRET_FILE=" + filepath.Join(o.dir, "secret")}
	if o.app.Getenv("RFAAS_AGENT_SOCKET") == "" {
		env = append(env, "RFAAS_AGENT_SOCKET="+o.agentSocket())
	}
	return env
}

// agentSocket is where the program's own agent listens. The user's usual agent is not used, so it keeps no connection to this run's daemons.
func (o *ownDaemons) agentSocket() string { return filepath.Join(o.dir, "agent.sock") }

// stop stops the agent and the daemons that were started, and removes the directory.
func (o *ownDaemons) stop() {
	close(o.stopping)
	ctx, cancel := context.WithTimeout(context.Background(), stopMost)
	defer cancel()
	if err := agent.Stop(ctx, o.agentSocket()); err != nil && !errors.Is(err, agent.ErrNone) {
		fmt.Fprintf(o.app.Stderr, "rfaas run: the agent of the program was not stopped: %v\n", err)
	}
	for _, d := range []*daemon.Daemon{o.executor, o.manager} {
		if d != nil {
			d.StopWithin(stopMost)
		}
	}
	for _, log := range o.logs {
		log.Close()
	}
	if err := os.RemoveAll(o.dir); err != nil {
		fmt.Fprintf(o.app.Stderr, "rfaas run: %v\n", err)
	}
	fmt.Fprintln(o.say, "rfaas run: stopped the daemons")
}

// runProgram runs the program and returns how it ended, as an exit status. Signals to this process are passed to the program. After a
// signal that came before, the program is not run.
func (a *app) runProgram(signals <-chan os.Signal, path string, args, env []string, lost <-chan string) error {
	select {
	case s := <-signals:
		return command.ExitStatus(128 + int(s.(syscall.Signal)))
	default:
	}
	cmd := &exec.Cmd{Path: path, Args: args, Env: append(os.Environ(), env...), Stdin: os.Stdin, Stdout: a.Stdout, Stderr: a.Stderr}
	if err := cmd.Start(); err != nil {
		fmt.Fprintf(a.Stderr, "rfaas run: %v\n", err)
		return cannotExecute
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			if (s == syscall.SIGINT || s == syscall.SIGQUIT) && fromTerminal() {
				continue // the terminal has sent it to the program too
			}
			_ = cmd.Process.Signal(s) // fails if the program has ended, which the next turn sees
		case name := <-lost:
			fmt.Fprintf(a.Stderr, "rfaas run: the %s has ended while the program runs; --logs DIRECTORY keeps its log\n", name)
		case err := <-ended:
			return exitOf(cmd, err)
		}
	}
}

// fromTerminal reports whether this process is in the foreground of its terminal, whose keys signal the whole process group.
func fromTerminal() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// exitOf returns the exit status of a program that has ended, in the form of shells: 128 plus the number of the signal that ended it.
func exitOf(cmd *exec.Cmd, err error) error {
	if cmd.ProcessState == nil {
		return err
	}
	switch w := cmd.ProcessState.Sys().(syscall.WaitStatus); {
	case w.Signaled():
		return command.ExitStatus(128 + int(w.Signal()))
	case w.ExitStatus() != 0:
		return command.ExitStatus(w.ExitStatus())
	}
	return nil
}
