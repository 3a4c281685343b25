package others

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// run runs a program in a process group of its own, which is killed when ctx ends.
func run(ctx context.Context, env []string, name string, args ...string) (string, error) {
	cmd := command(ctx, env, name, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, last(errs.String()+out.String()))
	}
	return out.String(), nil
}

func command(ctx context.Context, env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// last is the end of a program's output, on one line.
func last(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return text[max(0, len(text)-200):]
}

// ---- MPI ----

// mpi runs the ping-pong of two ranks, one run a batch.
type mpi struct {
	name, program, mpirun, cpus string
	verbs                       bool
	env                         []string
	args                        []string
}

func (m *mpi) start(context.Context) (err error) {
	packages := map[string]string{"openmpi": "openmpi-bin libopenmpi-dev", "mpich": "mpich libmpich-dev"}[m.name]
	if m.mpirun, err = lookup("mpirun."+m.name, packages); err != nil {
		return err
	}
	if _, err := os.Stat(m.program); err != nil {
		return fmt.Errorf("no %s: make builds it if mpicc.%s is installed (Debian: %s)", m.program, m.name, packages)
	}
	switch m.name {
	case "openmpi":
		m.args = []string{"--oversubscribe", "--bind-to", "none"}
		if os.Geteuid() == 0 {
			m.env = append(m.env, "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
		}
		if m.verbs {
			m.args = append(m.args, "--mca", "pml", "ucx", "--mca", "osc", "ucx", "--mca", "btl", "^vader,tcp,openib")
		}
	case "mpich":
		m.args = []string{"-bind-to", "none"}
	}
	if m.verbs {
		m.env = append(m.env, "UCX_TLS=rc_verbs,ud_verbs,self")
	}
	return nil
}

func (m *mpi) batch(ctx context.Context, size, n int) (float64, []int64, error) {
	args := append(m.args[:len(m.args):len(m.args)], "-n", "2", m.program, strconv.Itoa(n), m.cpus, strconv.Itoa(size))
	out, err := run(ctx, m.env, m.mpirun, args...)
	if err != nil {
		return 0, nil, err
	}
	return parsePingPong(out, size)
}

// parsePingPong reads the line of one size.
func parsePingPong(out string, size int) (mean float64, samples []int64, err error) {
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != strconv.Itoa(size) {
			continue
		}
		sum := 0.0
		for _, w := range words[1:] {
			ns, err := strconv.ParseInt(w, 10, 64)
			if err != nil {
				return 0, nil, fmt.Errorf("ping-pong of %d bytes: %q is not a time", size, w)
			}
			samples = append(samples, ns)
			sum += float64(ns)
		}
		return sum / float64(len(samples)), samples, nil
	}
	return 0, nil, fmt.Errorf("ping-pong of %d bytes: no such line in %q", size, last(out))
}

func (*mpi) stop() {}

func (m *mpi) how() string {
	return "MPI_Send and MPI_Recv between two ranks that pin themselves and poll; the server copies; a separate run for each batch, without start-up and a fifth of untimed round trips"
}

// ---- UCX ----

// ucx runs ucx_perftest, one run a batch.
type ucx struct {
	client, peer int
	verbs        bool
	program      string
	env          []string
}

func (u *ucx) start(context.Context) (err error) {
	u.program, err = lookup("ucx_perftest", "ucx-utils")
	u.env = []string{"UCX_TLS=posix,self", "UCX_WARN_UNUSED_ENV_VARS=n"}
	if u.verbs {
		u.env[0] = "UCX_TLS=rc_verbs,ud_verbs,self"
	}
	return err
}

// freePort is a TCP port that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func (u *ucx) batch(ctx context.Context, size, n int) (float64, []int64, error) {
	port, err := freePort()
	if err != nil {
		return 0, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var said bytes.Buffer
	server := command(ctx, u.env, u.program, "-c", strconv.Itoa(u.peer), "-p", strconv.Itoa(port))
	server.Stdout, server.Stderr = &said, &said
	if err := server.Start(); err != nil {
		return 0, nil, err
	}
	defer func() { cancel(); _ = server.Wait() }()
	var out string
	for tries := 0; ; tries++ { // until the server listens
		out, err = run(ctx, u.env, u.program, "127.0.0.1", "-p", strconv.Itoa(port), "-c", strconv.Itoa(u.client), "-t", "ucp_am_lat",
			"-s", strconv.Itoa(size), "-n", strconv.Itoa(n), "-w", strconv.Itoa(max(n/5, 10)), "-f", "-v")
		if err == nil || tries == 100 || ctx.Err() != nil || !strings.Contains(err.Error(), "refused") {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err != nil {
		return 0, nil, err
	}
	return parsePerftest(out, n)
}

// parsePerftest reads the last line of comma-separated output: iterations, median, average ..., all one-way in us. The output has
// no samples, so the median is returned once for each round trip.
func parsePerftest(out string, n int) (mean float64, samples []int64, err error) {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	words := strings.Split(lines[len(lines)-1], ",")
	if len(words) < 3 {
		return 0, nil, fmt.Errorf("ucx_perftest said %q", last(out))
	}
	median, err1 := strconv.ParseFloat(strings.TrimSpace(words[1]), 64)
	average, err2 := strconv.ParseFloat(strings.TrimSpace(words[2]), 64)
	if err1 != nil || err2 != nil || median <= 0 {
		return 0, nil, fmt.Errorf("ucx_perftest said %q", last(out))
	}
	samples = make([]int64, n)
	for i := range samples {
		samples[i] = int64(2000 * median)
	}
	return 2000 * average, samples, nil
}

func (*ucx) stop() {}

func (*ucx) how() string {
	return "ucx_perftest ucp_am_lat between two pinned processes that poll; a round trip is twice its one-way time; it prints only a median, so percentiles are those of the batches' medians"
}
